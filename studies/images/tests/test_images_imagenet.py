"""The paper's presets, with small random networks behind the same interfaces."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import crepe_diffusion as cd
from crepe_diffusion.run import read_run
from studies.images import imagenet

HERE = Path(imagenet.__file__).parent


def test_the_papers_ladders():
    for task, n, exchanged in (("guidance", 128, 100), ("wish", 64, 32)):
        steps = imagenet.steps(task)
        assert (steps.n_levels, steps.substeps) == (exchanged + 1, 1)
        times = [*reversed(steps.finish), *steps.times.tolist()]
        index = torch.arange(n, dtype=torch.float64) / (n - 1)
        formula = (80 ** (1 / 7) + index * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7
        torch.testing.assert_close(torch.tensor(times).double(), formula.flip(0))


def test_rows_are_what_a_sampler_counts():
    """The arithmetic of the page against the counts of a chain with the paper's ladder."""
    p = cd.models.GaussianMixture([1.0], [[0.5]], [0.5])
    q = cd.models.GaussianMixture([1.0], [[0.0]], [1.0])
    for task, n in (("guidance", 2), ("wish", 3)):
        chain = cd.ReplicaExchange(
            cd.guided(p, q, 1.3), imagenet.steps(task), process=cd.processes.EulerMaruyama(), seed=0
        )
        chain.sample(n)
        assert imagenet.COSTS["imagenet-64"].rows(task, n) == chain.evaluate.counts.rows


class Latents(torch.nn.Module):
    """A random denoiser of latents with the interface of EDM2."""

    def __init__(self, label_dim):
        super().__init__()
        torch.manual_seed(label_dim)
        self.img_channels, self.img_resolution, self.label_dim = 4, 8, label_dim
        self.layer, self.label = torch.nn.Conv2d(4, 4, 3, padding=1), torch.nn.Linear(max(1, label_dim), 4)

    def forward(self, x, sigma, class_labels=None):
        s = sigma.reshape(-1, 1, 1, 1).to(x)
        inner = self.layer(x / (1 + s**2).sqrt())
        if class_labels is not None and self.label_dim:
            inner = inner + self.label(class_labels)[:, :, None, None]
        return x / (1 + s**2) + 0.3 * s / (1 + s**2).sqrt() * inner.tanh()


class Judge:
    """In the place of ImageReward, whose own test is in the library's."""

    def __init__(self, prompt, weights):
        assert prompt == imagenet.PROMPTS[417]
        assert weights == "weights/ImageReward.pt"

    def to(self, device):
        return self

    def __call__(self, images):
        assert images.shape[1:] == (3, 16, 16)
        return images.flatten(1).mean(1)


@pytest.fixture
def weights(tmp_path):
    """Two networks as `convert_edm` writes them."""
    for name, label_dim in (("net", 1000), ("partner", 0)):
        about = {"class_name": "Latents", "init_args": [label_dim], "init_kwargs": {}}
        tensors = Latents(label_dim).state_dict()
        save_file(tensors, tmp_path / f"{name}.safetensors", {k: json.dumps(v) for k, v in about.items()})
    return tmp_path


@pytest.mark.slow
def test_a_preset_runs_from_its_file_to_images(weights, monkeypatch):
    """Everything but the sizes: the file, the networks of both, the decoder, a wish, a folder, images from draws."""
    stand_ins = pytest.importorskip("stand_ins")
    vae = stand_ins.vae()
    diffusers = pytest.importorskip("diffusers")
    monkeypatch.setattr(diffusers.AutoencoderKL, "from_pretrained", lambda name: vae)
    monkeypatch.setattr(imagenet, "ImageReward", Judge)
    config = tomllib.loads((HERE / "imagenet-512.toml").read_text())
    config["options"] |= {key: str(weights / f"{key}.safetensors") for key in ("net", "partner")}
    config["options"] |= {"device": "cpu", "kind": f"{__name__}:Latents"}
    with cd.Run.start(weights / "run", config) as run:
        assert run.sampler.ladder.n_levels == 33
        assert isinstance(run.sampler.evaluate.process, cd.processes.EulerMaruyama)
        assert run.sampler.target.exponents == pytest.approx((-0.3, 1.3))
        assert run.sampler.target.rewards[0].scale == 100
        run.run(iterations=2)
        model, decode = run.sampler.target.models[1], run.history.experiment.decode
    draws = torch.tensor(read_run(weights / "run").x)
    page = cd.write_report(read_run(weights / "run"), weights / "report.html", decode=decode)
    assert "2 draws as images, spread" in page.read_text()  # and no channels of latents
    images = model.decode(draws.flatten(0, 1))
    assert images.shape == (2, 3, 16, 16)
    assert bool(images.isfinite().all())


def test_what_is_missing_is_named(weights):
    with pytest.raises(cd.InputError, match="convert it by"):
        imagenet.load_network(weights / "none.safetensors")
    with pytest.raises(cd.InputError, match="clone https"):
        imagenet.load_network(weights / "net.safetensors", "training.networks_edm2:Precond")
    with pytest.raises(cd.InputError, match="task must be guidance or wish"):
        imagenet.imagenet(net="x", task="painting")
