"""One contract for every sampler that is exported: control off, any micro-batch, seeds, and the same kind of result."""

from __future__ import annotations

import inspect

import pytest
import torch

import crepe_diffusion as cd
from checks import refuted
from crepe_diffusion.samplers import Result

MODEL = cd.models.GaussianMixture([0.3, 0.7], [[-1.0, 0.5, 0.0], [1.5, -0.5, 1.0]], [0.6, 0.4])
LADDER = cd.ladder.karras(5, 0.05, 8.0, substeps=2, n_finish=1)
CALLS = {
    cd.ReplicaExchange: lambda target, **options: cd.ReplicaExchange(target, LADDER, n_chains=2, **options).sample(12),
    cd.SMC: lambda target, **options: cd.SMC(target, LADDER, n_particles=8, n_batches=3, **options).sample(),
    cd.ParticleGibbs: lambda target, **options: cd.ParticleGibbs(
        target, LADDER, n_particles=4, n_chains=2, **options
    ).sample(4),
    cd.Plain: lambda target, **options: cd.Plain(target, LADDER, **options).sample(12),
}
each = pytest.mark.parametrize("make", CALLS.values(), ids=[c.__name__ for c in CALLS])


def test_every_exported_sampler_is_under_contract():
    classes = [
        c for c in vars(cd).values() if inspect.isclass(c) and c.__module__.startswith("crepe_diffusion.samplers")
    ]
    assert {c for c in classes if hasattr(c, "sample")} == set(CALLS)


@each
def test_control_off_gives_equal_weights_and_no_log_z(make):
    """The target is the model and the proposal follows it: no draw weighs more than another, and Z is 1."""

    def check(out: Result) -> None:
        assert float((out.weights * len(out.x) - 1).abs().max()) < 1e-9
        if out.log_z.value == out.log_z.value:
            assert abs(out.log_z.value) < 1e-9

    check(make(MODEL))
    if not isinstance(make(MODEL), cd.samplers.Independent):
        refuted(check, make(MODEL.tilt(lambda x: x[:, 0])))


@each
def test_any_micro_batch_gives_the_same_draws(make):
    target = (MODEL**1.5).tilt(lambda x: x[:, 0], guidance="gradient")
    whole, parts = make(target, seed=3), make(target, seed=3, micro_batch=5)
    torch.testing.assert_close(parts.x, whole.x, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(parts.weights, whole.weights, rtol=1e-7, atol=1e-9)
    # Blocks are padded to the micro-batch, and what is evaluated is counted.
    assert 0 <= parts.evaluations.rows - whole.evaluations.rows < 5 * parts.evaluations.calls
    assert parts.evaluations.calls > whole.evaluations.calls


@each
def test_a_seed_names_the_draws(make):
    first, again, other = (make(MODEL**1.5, seed=seed).x for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@each
def test_results_have_one_shape(make):
    out = make(MODEL**1.5)
    assert out.x.shape == (len(out.weights), 3)
    assert float(out.weights.sum()) == pytest.approx(1)
    values = out.x[:, 0]
    mean = out.mean(lambda x: x[:, 0])
    assert mean.value == pytest.approx(float(out.weights @ values))
    assert mean.error > 0
    assert 0 < out.ess(lambda x: x[:, 0]) < 10 * len(out.x)
    assert out.verdict().level in ("ok", "look", "do not trust")
    with pytest.raises(cd.InputError, match="one number per draw"):
        out.mean(lambda x: x)
