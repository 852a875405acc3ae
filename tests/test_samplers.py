"""All samplers take the same names and give one kind of result; those that can go on keep one contract."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

import crepe_diffusion as cd
from checks import assert_mean, f64, refuted
from crepe_diffusion import progress
from crepe_diffusion.processes import Gaussian
from crepe_diffusion.random import Stream
from crepe_diffusion.samplers import Particles
from crepe_diffusion.samplers.result import Chains, Independent

LADDER = cd.ladder.karras(6, 0.05, 10.0, substeps=2, n_finish=2)
MIXTURE = cd.models.GaussianMixture([0.3, 0.7], [[-2.0, 0.5], [1.5, -1.0]], [0.5, 0.4])
FAST = {"process": Gaussian(variance=0.8), "seed": 3}


def first(x):
    return x[:, 0]


# -- one result ----------------------------------------------------------------------------------------------

CALLS = {
    "ReplicaExchange": lambda target: cd.ReplicaExchange(target, LADDER, n_chains=6, **FAST).sample(40, burn_in=20),
    "SMC": lambda target: cd.SMC(target, LADDER, n_particles=24, n_batches=10, **FAST).sample(),
    "Plain": lambda target: cd.Plain(target, LADDER, n_chains=2, **FAST).sample(120),
    "ParticleGibbs": lambda target: cd.ParticleGibbs(target, LADDER, n_particles=6, n_chains=4, **FAST).sample(10),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_sampler_gives_the_same_kind_of_result(name):
    """The target is the model itself, where all of them are right."""
    out = CALLS[name](MIXTURE)
    assert isinstance(out, cd.Result)
    assert out.x.shape == (240, 2)
    assert out.weights.shape == (240,)
    assert float(out.weights.sum()) == pytest.approx(1.0)
    mean = out.mean(first)
    assert mean.value == pytest.approx(float(out.weights @ out.x[:, 0]))
    truth = 0.3 * -2.0 + 0.7 * 1.5
    assert abs(mean.value - truth) < 4 * mean.error
    assert abs(mean.value + truth) > 4 * mean.error
    spread = float(out.weights @ (out.x[:, 0] - mean.value).square())
    if name != "ReplicaExchange":
        assert out.ess(first) == pytest.approx(spread / mean.error**2, rel=0.01)
    assert 5 < out.ess(first) < 1000
    assert out.evaluations.rows > 0
    if name == "Plain":
        assert math.isnan(out.log_z.value)
    else:
        assert abs(out.log_z.value) < 1e-6  # control off


def test_a_scalar_is_one_number_per_draw():
    out = CALLS["Plain"](MIXTURE)
    with pytest.raises(cd.InputError, match=r"one number per draw, shape \(240,\); got shape \(240, 2\)"):
        out.mean(lambda x: x)


def particles(n_batches, n_particles, seed, pool="z"):
    """Importance sampling of N(0.5, 1) by N(0, 1), tilted by exp(x / 2), in the shape of SMC."""
    x = Stream(seed).normal((n_batches * n_particles, 1))
    log_w = (0.5 * x[:, 0]).reshape(n_batches, n_particles)
    log_z = log_w.logsumexp(1)
    none, eve = torch.zeros(n_batches), torch.arange(len(x))
    counts = cd.SMC(MIXTURE, LADDER, **FAST).evaluate.counts
    return Particles(x, counts, log_w - log_z[:, None], log_z - math.log(n_particles), eve, none[None], none, pool)


def check_coverage(of, truth):
    """Errors are right if the standardised mean has variance 1, over independent repetitions."""
    z = f64([(found.value - truth) / found.error for found in map(of, range(300))])
    assert_mean(z, 0.0)
    assert_mean(z.square(), 1.0)


@pytest.mark.parametrize(
    ("batches", "pool"),
    [pytest.param(1, "equal", marks=pytest.mark.slow), pytest.param(20, "equal", marks=pytest.mark.slow), (20, "z")],
)
def test_errors_of_particles_cover_the_truth(batches, pool):
    """Batches large enough for their own bias, of order 1 / n, to be below the noise of the test."""

    @cache
    def mean(seed):
        return particles(batches, 20_000 // batches, seed, pool).mean(first)

    check_coverage(mean, 0.5)
    refuted(check_coverage, mean, 0.51)
    refuted(check_coverage, lambda seed: replace(mean(seed), error=mean(seed).error / 1.5), 0.5)


def test_small_batches_are_biased_unless_they_are_pooled_by_z():
    def mean(pool):
        return lambda seed: particles(400, 3, seed, pool).mean(first)

    check_coverage(mean("z"), 0.5)
    refuted(check_coverage, mean("equal"), 0.5)


@pytest.mark.parametrize(("batches", "size"), [(400, 8), (1, 3200)])
def test_log_z_of_batches_covers_the_truth(batches, size):
    @cache
    def log_z(seed):
        return particles(batches, size, seed).log_z

    check_coverage(log_z, 0.125)
    refuted(check_coverage, log_z, 0.14)
    assert particles(1, 50, 0).log_z.value == float(particles(1, 50, 0).batch_log_z)
    assert math.isnan(particles(1, 1, 0).log_z.error)  # one particle shows no spread


def test_results_are_flat_and_chains_can_be_told_apart():
    chain, twin = (cd.ReplicaExchange(MIXTURE**1.5, LADDER, n_chains=3, **FAST) for _ in range(2))
    out = chain.sample(8)
    wanted = []
    for _ in range(8):
        twin.step()
        wanted.append(twin.output())
    assert torch.equal(out.chains, torch.stack(wanted))
    assert torch.equal(out.x, torch.cat(wanted))
    assert torch.equal(out.scalar(first), torch.stack(wanted)[..., 0])
    assert out.ess(first) == cd.ess(out.chains[..., 0], out.tours)


# -- progress and callbacks ----------------------------------------------------------------------------------


def test_a_callback_stops_a_chain_and_the_draws_so_far_are_the_same():
    chain, twin = (cd.ReplicaExchange(MIXTURE**1.5, LADDER, n_chains=3, **FAST) for _ in range(2))
    seen = []

    def callback(now):
        seen.append((now.done, now.total, now.unit))
        return now.done == 9

    out = chain.sample(20, burn_in=3, thin=2, callback=callback)
    assert seen == [(i, 43, "iterations") for i in range(1, 10)]
    assert torch.equal(out.x, twin.sample(3, burn_in=3, thin=2).x)
    assert out.iteration.tolist() == [5, 7, 9]
    assert chain.iteration == 9
    nothing = chain.sample(5, burn_in=5, callback=lambda now: True)
    assert nothing.x.shape == (0, 2)
    assert nothing.chains.shape == (0, 3, 2)
    assert math.isnan(nothing.mean(first).value)
    assert len(chain.sample(2).x) == 6


@pytest.mark.parametrize("make", [cd.SMC, cd.Plain])
def test_a_pass_that_is_stopped_before_level_0_has_no_result(make):
    arguments = () if make is cd.SMC else (4,)
    steps = 5 if make is cd.SMC else 10
    calls = []

    def stop_at(n):
        return lambda now: calls.append(now) or now.done == n

    with pytest.raises(cd.StoppedError, match="stopped"):
        make(MIXTURE, LADDER, **FAST).sample(*arguments, callback=stop_at(3))
    assert len(calls) == 3
    calls.clear()
    out = make(MIXTURE, LADDER, **FAST).sample(*arguments, callback=stop_at(steps))
    assert [c.done for c in calls] == list(range(1, steps + 1))
    assert calls[-1].total == steps
    assert torch.equal(out.x, make(MIXTURE, LADDER, **FAST).sample(*arguments).x)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "asked", "long", "shown"),
    [
        (Terminal, None, True, True),
        (Terminal, None, False, False),
        (Terminal, True, False, True),
        (Terminal, False, True, False),
        (io.StringIO, None, True, False),
        (io.StringIO, True, False, True),
    ],
)
def test_the_bar_is_shown_where_it_is_wanted(monkeypatch, stream, asked, long, shown):
    text = stream()
    monkeypatch.setattr(progress.sys, "stderr", text)
    monkeypatch.setattr(progress, "LONG", 0.0 if long else 60.0)
    cd.SMC(MIXTURE, LADDER, **FAST).sample(progress=asked)
    assert ("/5 levels" in text.getvalue()) == shown
    if shown and stream is Terminal:
        assert "|####################|  5/5 levels" in text.getvalue()
        assert text.getvalue().endswith("\n")


# -- samplers that can go on ---------------------------------------------------------------------------------

CONTINUING = {
    "ReplicaExchange": lambda target, **options: cd.ReplicaExchange(target, LADDER, n_chains=3, **options),
    "with an explorer": lambda target, **options: cd.ReplicaExchange(
        target, LADDER, n_chains=3, explorer=cd.Bounce(), **options
    ),
    "ParticleGibbs": lambda target, **options: cd.ParticleGibbs(target, LADDER, n_particles=4, n_chains=3, **options),
    "Plain": lambda target, **options: cd.Plain(target, LADDER, n_chains=3, **options),
}
FITTED = {"fit_samples": 16, "seed": 3}


@pytest.mark.parametrize("name", CONTINUING)
def test_a_restored_sampler_goes_on_bit_for_bit_and_fits_nothing(name):
    make = CONTINUING[name]
    one, broken = make(MIXTURE**1.5, **FITTED), make(MIXTURE**1.5, **FITTED)
    assert isinstance(one, cd.Continuing)
    for _ in range(3):
        one.step()
    start = one.snapshot()
    two = make(MIXTURE**1.5, start=start, **FITTED)
    assert two.evaluate.counts.rows == one.evaluate.counts.rows
    assert torch.equal(one.output(), two.output())
    for _ in range(4):
        a, b, c = one.step(), two.step(), broken.step()
        assert (a.iteration, a.rows) == (b.iteration, b.rows)
        draws = one.output()
        assert torch.equal(draws, two.output())
        assert not torch.equal(draws, broken.output())  # iterations behind, so other draws
        assert c.iteration == a.iteration - 3
        for key, row in one.draw_row(a).items():
            assert np.array_equal(row, two.draw_row(b)[key])
    assert set(start) == set(two.snapshot())


@pytest.mark.parametrize("name", CONTINUING)
def test_rows_are_those_of_the_columns(name):
    sampler = CONTINUING[name](MIXTURE**1.5, **FAST)
    infos = [sampler.step() for _ in range(5)]
    rows, trace = sampler.draw_row(infos[-1]), sampler.trace_rows(infos)
    assert set(rows) == set(sampler.draw_columns)
    assert set(trace) == set(sampler.trace_columns)
    for values, columns, lead in ((rows, sampler.draw_columns, ()), (trace, sampler.trace_columns, (5,))):
        for key, column in columns.items():
            assert values[key].shape == (*lead, *column.shape), key
            assert len(column.names) == len(column.shape)
            assert np.array_equal(values[key].astype(column.dtype), values[key].astype(column.dtype), equal_nan=True)
    one_by_one = [sampler.trace_rows([info]) for info in infos]
    for key in trace:
        assert np.array_equal(trace[key], np.concatenate([r[key] for r in one_by_one]), equal_nan=True)


def test_the_trace_of_an_exchange_is_what_happened():
    chain = CONTINUING["with an explorer"](MIXTURE**1.5, **FAST)
    infos = [chain.step() for _ in range(6)]
    trace = chain.trace_rows(infos)
    assert np.array_equal(trace["level"][-1], chain.state.level.numpy())
    work = infos[2].swaps.log_work
    alpha = (work[:, 1:] - work[:, :-1]).clamp(max=0).exp().mean(0)
    met = infos[2].swaps.active.numpy()
    np.testing.assert_allclose(trace["acceptance"][2][met], alpha.numpy()[met])
    assert np.isnan(trace["acceptance"][2][~met]).all()
    total = np.stack([i.explored.double().mean(0).numpy() for i in infos])
    np.testing.assert_allclose(trace["explored"], total, rtol=1e-6)
    np.testing.assert_allclose(chain.diagnostics.explored.numpy(), total.sum(0))


def test_the_trace_of_particle_gibbs_is_that_of_its_chains():
    """Means over chains in the trace, over sweeps and chains in the result."""
    one, two = (CONTINUING["ParticleGibbs"](MIXTURE**8.0, **FAST) for _ in range(2))
    infos = [one.step() for _ in range(6)]
    trace, found = one.trace_rows(infos), two.sample(6)
    for key, name in {"changed": "changed", "survivors": "survivors", "ess": "level_ess"}.items():
        values = np.array([getattr(info, name).tolist() for info in infos], dtype=float)
        assert values.std(axis=-1).max() > 0
        np.testing.assert_allclose(trace[key], values.sum(-1) / 3, rtol=1e-6)
        assert np.array_equal(getattr(found, name).double().numpy(), values)
    np.testing.assert_allclose(found.diagnostics["survivors"].numpy(), trace["survivors"].mean(0), rtol=1e-6)
    np.testing.assert_allclose(found.diagnostics["level_ess"].numpy(), trace["ess"].mean(0), rtol=1e-6)
    np.testing.assert_allclose(found.diagnostics["changed"].mean(), trace["changed"].mean(), rtol=1e-6)


@pytest.mark.parametrize("name", CONTINUING)
def test_a_new_target_is_followed_and_a_bad_one_changes_nothing(name):
    sampler, twin = (CONTINUING[name](MIXTURE, **FAST) for _ in range(2))
    sampler.step(), twin.step()
    with pytest.raises(cd.InputError):
        sampler.target = MIXTURE**-1.0
    sampler.step(), twin.step()
    assert torch.equal(sampler.output(), twin.output())
    sampler.target = MIXTURE**2.0
    assert sampler.target.exponents == (2.0,)
    sampler.step(), twin.step()
    assert not torch.equal(sampler.output(), twin.output())


def test_a_chain_that_was_refined_has_the_law_of_a_fresh_one():
    """As SMC and particle Gibbs have in their own tests: the new target's mean, and not the old one's."""
    tilted = MIXTURE.tilt(lambda x: -0.6 * x[:, 0], on="state", anneal=cd.anneal.linear())
    chain = cd.ReplicaExchange(MIXTURE, LADDER, n_chains=60, **FAST)
    fresh = cd.ReplicaExchange(tilted, LADDER, n_chains=60, **{**FAST, "seed": 8})
    before = chain.sample(10, burn_in=10).mean(first)
    chain.target = tilted
    after, wanted = (c.sample(15, burn_in=25).mean(first) for c in (chain, fresh))
    assert abs(after.value - wanted.value) < 5 * math.hypot(after.error, wanted.error)
    assert abs(after.value - before.value) > 5 * math.hypot(after.error, before.error)


def test_steps_of_plain_denoising_are_independent_draws_of_the_model():
    sampler = cd.Plain(MIXTURE, LADDER, n_chains=400, **FAST)
    draws = []
    for _ in range(3):
        sampler.step()
        draws.append(sampler.output()[:, 0])
    assert not any(torch.equal(a, b) for a, b in ((draws[0], draws[1]), (draws[1], draws[2])))
    right = (torch.stack(draws) > 0).double()
    assert_mean(right.flatten(), 0.7)
    refuted(assert_mean, right.flatten(), 0.6)
    product = (right[0] - 0.7) * (right[1] - 0.7)
    assert_mean(product, 0.0)


def test_kinds_of_results():
    assert isinstance(CALLS["ReplicaExchange"](MIXTURE), Chains)
    assert isinstance(CALLS["SMC"](MIXTURE), Particles)
    assert isinstance(CALLS["Plain"](MIXTURE), Independent)


def test_a_part_of_a_result_is_what_its_chains_or_batches_alone_have_given():
    """Every number of the part is made of its own rows: those of the others may be anything."""
    steps, f, target = cd.ladder.karras(6, 0.05, 10.0), first, MIXTURE**2.0
    chains = cd.ReplicaExchange(target, steps, n_chains=4, **FAST).sample(40)
    part = chains.of_chains([1, 3])
    assert torch.equal(part.scalar(f), chains.scalar(f)[:, [1, 3]])
    assert part.n_chains == 2
    assert torch.equal(part.diagnostics.works()[0], chains.diagnostics.works()[0][:, [1, 3]])
    assert part.diagnostics.restarts() == int(chains.diagnostics.trips.n_restarts[[1, 3]].sum()) > 0
    assert part.log_z != chains.log_z
    assert chains.of_chains(range(4)).log_z == chains.log_z

    particles = cd.SMC(target, steps, n_particles=8, n_batches=4, **FAST).sample()
    some = particles.of_batches([1, 3])
    assert some.log_z.value == pytest.approx(float(particles.batch_log_z[[1, 3]].logsumexp(0)) - math.log(2))
    w = particles.by_batch(particles.weights)[[1, 3]].flatten()
    values = particles.by_batch(particles.values(f))[[1, 3]].flatten().double()
    assert some.mean(f).value == pytest.approx(float(w @ values / w.sum()))
    assert particles.of_batches(range(4)).mean(f) == particles.mean(f)

    sweeps = cd.ParticleGibbs(target, steps, n_particles=4, n_chains=3, **FAST).sample(12)
    two = sweeps.of_chains([0, 2])
    assert torch.equal(two.scalar(f), sweeps.scalar(f)[:, [0, 2]])
    assert torch.equal(two.sweep_log_z, sweeps.sweep_log_z[:, [0, 2]])
    assert sweeps.of_chains(range(3)).mean(f) == sweeps.mean(f)
