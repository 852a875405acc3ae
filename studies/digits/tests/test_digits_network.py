"""The network of grey levels on invented digits: what it learns, how methods use it, and how draws are judged."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import crepe_diffusion as cd
from checks import refuted
from studies.digits import grey, network, pictures, tables
from studies.shared.results import Results
from studies.shared.training import Settings

TINY = network.Sizes(levels=4, embedding=4, width=8, depth=1)


@pytest.fixture(scope="module")
def invented(tmp_path_factory):
    """Digits of one grey: 0 to 4 are paper, 5 to 9 are ink."""
    label = np.arange(200) % 10
    x = np.broadcast_to((label // 5 * 255).astype("uint8")[:, None, None], (200, 28, 28))
    path = tmp_path_factory.mktemp("digits") / "mnist.npz"
    np.savez(path, x_train=x, y_train=label, x_test=x[:40], y_test=label[:40])
    return path


@pytest.fixture(scope="module")
def trained(invented, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    settings = Settings(n_steps=80, batch=16, rate=3e-2, warm_up=5, average=0.9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(network.PRESETS, "tiny", TINY)
        lines = list(network.train_network(invented, folder, "tiny", settings))
    return network.load_network(folder / "network.safetensors"), lines


def test_levels_of_grey_are_the_nearest(tmp_path):
    x = np.array([0, 84, 85, 255], dtype="uint8")[:, None, None] * np.ones((28, 28), dtype="uint8")
    np.savez(tmp_path / "x.npz", x_train=x, y_train=[3, 1, 4, 1])
    rows = network.grey_digits(tmp_path / "x.npz", 16)
    assert rows[:, 0].tolist() == [0, 5, 5, 15]
    assert rows[:, -1].tolist() == [3, 1, 4, 1]
    assert rows.shape == (4, 785)


def check_labels_tell(models: list[cd.models.TokenModel]) -> None:
    """With all pixels masked, ink is likelier for digits of ink than without a label, and paper for the others."""
    x, t = torch.full((1, 28, 28), 4), torch.ones(1)
    paper, ink, free = (models[digit].predict(x, t)[..., 3].exp().mean() for digit in (1, 8, -1))
    assert paper + 0.1 < free < ink - 0.1


def test_one_network_is_conditional_and_unconditional(trained):
    """Labels tell the grey where nothing is seen; without one, some pixels tell that of the others."""
    model, lines = trained
    assert lines[-1]["validation"] < 0.2 < math.log(4)
    models = network.load_models(model)
    check_labels_tell(models)
    refuted(check_labels_tell, [*models[:10][::-1], models[-1]])
    refuted(check_labels_tell, [models[-1]] * 11)
    x, t = torch.full((1, 28, 28), 4), torch.ones(1)
    seen = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    ink = [models[-1].predict(torch.where(seen, level, x), t)[~seen][:, 3].exp().mean() for level in (0, 3)]
    assert ink[1] > ink[0] + 0.1
    assert_close(models[-1].predict(x, t), models[-1].predict(x, torch.zeros(1)))  # the time is not looked at


@pytest.fixture(scope="module")
def judge(invented):
    return grey.Judge.load(invented, 4)


def test_every_method_draws_digits_within_its_rows(trained, judge, tmp_path):
    model, plan, results = trained[0], grey.Plan(n_steps=6, n_draws=48, n_chains=2), Results(tmp_path)
    for method in grey.METHODS:
        found, shown = grey.run(model, judge, method, 4, plan, 0)
        assert found["rows"] <= 1.2 * plan.rows, (method, found)
        assert 0 <= shown.min() <= shown.max() < 4, method
        alike = torch.stack([(shown == level).flatten(1).double().mean(1) for level in range(4)]).amax(0)
        assert alike.mean() > 0.8, method  # a digit has one grey
        results.save(f"grey {method} 4 0", found, shown=shown.numpy())
    real = judge.real(4, 8)
    results.save("grey real 4", judge(real, torch.full((len(real),), 1 / len(real)), 4), shown=real.numpy())
    path = grey.path_of(model, 4, plan, n_iterations=2)
    masked = (path == 4).flatten(2).double().mean(2)
    assert (masked[:, 0] == 0).all()
    assert (masked[:, -1] == 1).all()
    assert (masked.diff(dim=1) > 0).all()  # every level has more masks than the one before it
    results.save("grey path", {"digit": 4}, path=path.numpy())
    table = tables.painted(results)
    assert table is not None
    assert len(table.splitlines()) == 3 + len(grey.METHODS)
    assert [p.name for p in pictures.draw_all(tmp_path, results)] == ["samples.png", "path.png"]


def test_frechet_distances_of_draws_tell_real_digits_from_noise(judge):
    """With the mean of each row of pixels for features: real ones are near, noise is far, bytes span all levels."""
    few = judge.test[judge.label == 4]
    noise = torch.randint(4, few.shape, generator=torch.Generator().manual_seed(0))
    seen = []

    def rows(images):
        seen.append(images)
        return images[:, 0, ::12, ::12].mean(2)

    found = grey.fid(rows, judge, 4, {"same": few, "noise": noise})
    assert found["real"] < found["noise"] / 3
    assert found["same"] < found["noise"] / 3
    assert max(float(x.max()) for x in seen) > 0.9  # (255 - 128) / 128


def test_copies_of_training_images_are_found(judge):
    """A training image is a copy of itself; noise is not."""
    same, w = judge.training[:20].reshape(-1, 28, 28).long(), torch.full((20,), 0.05)
    near = replace(judge, near=1.0)
    assert near(same, w, 0)["near copies"] == pytest.approx(1.0)
    noise = torch.randint(4, (20, 28, 28), generator=torch.Generator().manual_seed(0))
    assert near(noise, w, 0)["near copies"] == 0
    x = torch.rand(5, 9, generator=torch.Generator().manual_seed(1))
    y = torch.rand(7, 9, generator=torch.Generator().manual_seed(2))
    expected = (x[:, None] - y[None]).square().sum(-1).amin(1).sqrt()
    assert_close(grey.nearest(x, y, batch=3), expected)


def test_presets_have_the_sizes_that_they_say():
    sizes = {name: sum(p.numel() for p in network.Pixels(s).parameters()) for name, s in network.PRESETS.items()}
    assert sizes["small"] == 333_800
    assert abs(sizes["paper"] / 19e6 - 1) < 0.02
