"""Training: an ended and resumed one is the same training, and the loss is the one that is written down."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import crepe_diffusion as cd
from checks import assert_mean, refuted
from crepe_diffusion.models.edm import EDM
from studies.shared.training import Settings, load_weights, loss, save_weights, train

SETTINGS = Settings(n_steps=12, batch=16, rate=0.02, warm_up=3, average=0.7, seed=5)
SCALES = torch.tensor([2.0, 0.5, 0.1, 0.02])
BASIS = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(1)))[0].contiguous()


class Network(nn.Module):
    """A hidden layer, with something that is no parameter and yet part of the state."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
        self.register_buffer("shift", torch.tensor(0.3))

    def forward(self, y, c_noise):
        z = torch.cat([y.flatten(1), c_noise[:, None] + self.shift], 1)
        return self.layers(z).reshape(y.shape)


def fresh(seed=0):
    torch.manual_seed(seed)
    return EDM(Network(), SCALES, BASIS)


def batches(n, generator):
    return (torch.randn(n, 4, generator=generator) * SCALES @ BASIS).reshape(n, 2, 2)


def trained(folder, settings=SETTINGS, ended_after=(), seed=0):
    """The averaged weights and the log, of a training that was ended after so many yields each time."""
    lines, model = [], fresh(seed)
    for n in ended_after:
        running = train(model, batches, settings, folder, every=2)
        lines += [next(running) for _ in range(n)]
        running.close()
        model = fresh(seed=99)  # all that matters comes from the checkpoint
    lines += list(train(model, batches, settings, folder, every=2))
    return model.state_dict(), [(line["step"], line["loss"]) for line in lines]


def test_a_resumed_training_is_the_uninterrupted_one(tmp_path):
    weights, log = trained(tmp_path / "whole")
    assert [step for step, _ in log] == [2, 4, 6, 8, 10, 12]

    def check(folder, **options):
        again, its_log = trained(tmp_path / folder, **options)
        assert all(torch.equal(again[k], v) for k, v in weights.items())
        assert its_log == log

    check("once", ended_after=(2,))
    check("often", ended_after=(1, 3, 1))
    refuted(check, "other weights", seed=1)
    refuted(check, "other rate", settings=replace(SETTINGS, rate=0.01))
    assert trained(tmp_path / "whole")[1] == []  # there is nothing left to do
    assert not torch.equal(weights["network.layers.0.weight"], fresh().state_dict()["network.layers.0.weight"])


def test_another_seed_is_another_training(tmp_path):
    weights = [
        trained(tmp_path / str(seed), replace(SETTINGS, seed=seed))[0]["network.layers.0.weight"] for seed in (5, 6)
    ]
    assert not torch.equal(*weights)


def test_steps_after_the_last_checkpoint_are_done_again(tmp_path):
    """A training that died between two yields goes on from the first of them."""
    weights, _ = trained(tmp_path / "whole")
    died = []

    def dying(n, generator):
        died.append(n)
        if len(died) == 6:  # in the third pair of steps
            raise KeyboardInterrupt
        return batches(n, generator)

    with pytest.raises(KeyboardInterrupt):
        list(train(fresh(), dying, SETTINGS, tmp_path / "died", every=2))
    again, log = trained(tmp_path / "died")
    assert [step for step, _ in log] == [6, 8, 10, 12]
    assert all(torch.equal(again[k], v) for k, v in weights.items())


@pytest.mark.parametrize("broken", ["exp_avg", "exp_avg_sq", "average.network", "model.network"])
def test_every_part_of_the_checkpoint_matters(tmp_path, broken, monkeypatch):
    """With one part of it forgotten, the resumed training is another one."""
    from studies.shared import training

    weights, _ = trained(tmp_path / "whole")

    def forgetful(path):
        return {k: v * 0.9 if k.startswith(broken) else v for k, v in original(path).items()}

    original = training.load_file
    monkeypatch.setattr(training, "load_file", forgetful)
    again, _ = trained(tmp_path / "resumed", ended_after=(2,))
    assert not all(torch.equal(again[k], v) for k, v in weights.items())


@pytest.mark.parametrize("change", [{"rate": 0.01}, {"n_steps": 20}, {"seed": 6}])
def test_other_settings_do_not_continue_a_training(tmp_path, change):
    running = train(fresh(), batches, SETTINGS, tmp_path, every=2)
    next(running)
    running.close()
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    (name, value), old = next(iter(change.items())), SETTINGS
    with pytest.raises(cd.InputError, match=rf"'{name}': \({getattr(old, name)}, {value}\)"):
        next(train(fresh(), batches, replace(SETTINGS, **change), tmp_path, every=2))
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before


def test_the_average_is_what_was_written_at_every_yield_and_what_is_left_at_the_end(tmp_path):
    model = fresh()
    for line in train(model, batches, SETTINGS, tmp_path, validate=lambda average: 7.0, every=2):
        average, _ = load_weights(tmp_path / "average.safetensors")
        written = [json.loads(text) for text in (tmp_path / "log.jsonl").read_text().splitlines()]
        assert written[-1] == line
        assert line["validation"] == 7.0
        assert not torch.equal(average["network.layers.0.weight"], model.state_dict()["network.layers.0.weight"])
    assert all(torch.equal(average[k], v) for k, v in model.state_dict().items())


def test_the_average_follows_its_formula(tmp_path):
    """a <- keep a + (1 - keep) b with keep = min(average, (1 + n) / (10 + n)) after step n, from the weights seen."""
    model, name = fresh(), "network.layers.2.bias"
    seen = [model.state_dict()[name].clone()]
    for _ in train(model, batches, SETTINGS, tmp_path, every=1):
        seen.append(model.state_dict()[name].clone())

    def check(most):
        a = seen[0]
        for n, b in enumerate(seen[1:], 1):
            keep = min(most, (1 + n) / (10 + n))
            a = keep * a + (1 - keep) * b
        torch.testing.assert_close(model.state_dict()[name], a, atol=1e-7, rtol=1e-5)

    check(0.7)
    refuted(check, 0.4)


def test_the_rate_warms_up_and_falls_as_a_cosine():
    settings = Settings(n_steps=100, rate=2.0, warm_up=10)
    rates = [settings.rate_at(step) for step in (0, 4, 50, 75, 100)]
    assert rates == pytest.approx([0.2, 0.99606, 1.0, 0.292893, 0.0], rel=1e-4, abs=1e-12)


def test_the_loss_of_the_best_denoiser_is_known():
    """Gaussian data: E|x_0 - D|^2 is what the weight divides by, so it is 1 at any noise, and any other is worse."""

    def values(network):
        model = EDM(network, SCALES, BASIS)
        generator = torch.Generator().manual_seed(3)
        settings = Settings(n_steps=1, noise_mean=-0.5, noise_std=1.0)
        return torch.stack([loss(model, batches(200, generator), settings, generator) for _ in range(200)])

    def check(network):
        assert_mean(values(network), 1.0)

    check(lambda z, c: torch.zeros_like(z))
    refuted(check, lambda z, c: 0.3 * z)
    refuted(check, lambda z, c: torch.full_like(z, 0.3))


def test_the_noise_of_the_loss_has_the_law_of_the_settings():
    seen = []

    def spy(z, c_noise):
        seen.append(4 * c_noise)  # log sigma
        return torch.zeros_like(z)

    settings = Settings(n_steps=1, noise_mean=-0.5, noise_std=1.5)
    generator = torch.Generator().manual_seed(0)
    loss(EDM(spy, SCALES, BASIS), batches(20_000, generator), settings, generator)
    assert_mean(seen[0], -0.5)
    assert_mean((seen[0] + 0.5).square(), 2.25)
    refuted(assert_mean, seen[0], -0.6)


def test_a_loss_that_is_not_finite_ends_the_training_and_keeps_the_checkpoint(tmp_path):
    def poisoned(n, generator):
        x = batches(n, generator)
        return x * float("nan") if len(calls) == 4 else (calls.append(0), x)[1]

    calls = []
    with pytest.raises(FloatingPointError, match="not finite at step 5"):
        list(train(fresh(), poisoned, SETTINGS, tmp_path, every=2))
    again, _ = trained(tmp_path)
    whole, _ = trained(tmp_path / "whole")
    assert all(torch.equal(again[k], v) for k, v in whole.items())


def test_weights_are_kept_with_what_is_said_about_them(tmp_path):
    model = fresh()
    save_weights(
        tmp_path / "deep" / "m.safetensors", model, {"maze": "x"}, {"process.times": torch.arange(3.0).flip(0)}
    )
    tensors, about = load_weights(tmp_path / "deep" / "m.safetensors")
    assert about == {"maze": "x"}
    assert torch.equal(tensors.pop("process.times"), torch.tensor([2.0, 1.0, 0.0]))
    assert set(tensors) == set(model.state_dict())
    assert all(torch.equal(tensors[k], v) for k, v in model.state_dict().items())
    with pytest.raises(cd.InputError, match="no weights at"):
        load_weights(tmp_path / "nowhere.safetensors")
