"""Particles that start from pools of trajectories: their weights are proper, and a kept plan keeps its law.

Gaussian segments tied by squared gaps, as in the tests of restitching: every pi_t is a Gaussian with a known integral.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import crepe_diffusion as cd
from checks import assert_mean, f64, refuted
from crepe_diffusion.random import Stream
from crepe_diffusion.stitching import Restitch
from test_restitch import FEW as MOVE
from test_restitch import (
    LADDER,
    PASSING,
    RHO,
    TIED,
    VARIANCE,
    T,
    evaluator,
    features,
    gaussian,
    repeats_allowed,
    thinned,
)

STREAM = Stream(32)
FEW = replace(MOVE, n_candidates=9, n_plans=32)
G = torch.zeros(4, 6, dtype=torch.float64)
G[0, [1, 2]] = G[1, [3, 4]] = f64([1, -1])
G[2, 0] = G[3, 5] = 1
WEIGHTS, WANTED = f64([3.0, 3.0, 2.0, 1.0]), f64([0, 0, 1.0, -0.5])


def law(t, gamma):
    """Mean, covariance and log-integral of `exp(gamma r) p_t` for TIED."""
    share, variance = RHO**2 / (RHO**2 + t**2), RHO**2 + t**2
    pull = 2 * gamma * share * WEIGHTS[:, None] * G
    precision = torch.eye(6, dtype=torch.float64) / variance + share * G.T @ pull
    mean = torch.linalg.solve(precision, pull.T @ WANTED)
    log_z = -0.5 * torch.logdet(variance * precision) + 0.5 * mean @ precision @ mean - gamma * WEIGHTS @ WANTED**2
    return mean, torch.linalg.inv(precision), float(log_z)


def draws(n, t, gamma):
    mean, covariance, _ = law(t, gamma)
    return (mean + STREAM.at("x").normal((n, 6)) @ torch.linalg.cholesky(covariance).T).reshape(n, 3, 2, 1)


# -- weights ---------------------------------------------------------------------------------------------------


def proper(starter, log_z, of=TIED):
    """The mean of exp(log_weight) over pools of any size is the integral."""
    start = starter.particles(evaluator(of), 4000, 3, STREAM.at("pools"))
    assert start.level == 1
    weights = (start.log_weights - log_z).exp()
    assert_mean(weights.mean(1), 1.0)
    if of is TIED:
        mean, covariance, _ = law(T, 0.5)
        x = start.x.reshape(4000, 3, 6)
        assert_mean((weights[..., None] * x).mean(1), mean)
        second = covariance + mean[:, None] * mean
        assert_mean((weights[..., None, None] * x[..., None] * x[..., None, :]).mean(1), second)


def test_weights_of_plans_of_a_pool_are_proper():
    log_z = law(T, 0.5)[2]
    proper(FEW, log_z)
    refuted(proper, FEW, log_z + 0.1)


class Repeated(Restitch):
    """Counts plans that use a trajectory twice."""

    def particles(self, *arguments):
        with repeats_allowed():
            return super().particles(*arguments)


def test_plans_that_use_a_trajectory_twice_have_no_weight():
    refuted(proper, Repeated(9, 1.0, (0.3, 0.7), 2, 32), law(T, 0.5)[2])


def test_rewards_that_cannot_be_summed_over_are_in_the_weights():
    evaluate = evaluator(PASSING)
    x = VARIANCE**0.5 * STREAM.at("prior").normal((400_000, 3, 2, 1))
    log_z = float(evaluate(x, f64(T).expand(len(x))).reward.exp().mean().log())  # its error is below a per cent
    proper(FEW, log_z, PASSING)
    refuted(proper, FEW, log_z + 0.15, PASSING)


# -- a kept plan -----------------------------------------------------------------------------------------------


def after_a_choice(starter, of, before):
    """One of the particles by weight, the kept plan among them."""
    evaluate = evaluator(of)
    seen = evaluate(before, f64(T).expand(len(before)))
    start = starter.particles(evaluate, len(before), 4, STREAM.at("conditional"), (before, seen))
    x = start.x.reshape(len(before), 4, *before.shape[1:])
    assert torch.equal(x[:, 0], before)
    old = (x[:, :, :, None] == before[:, None, None]).flatten(4).all(4).any(3).any(2)
    assert torch.equal(old, ~start.fresh)
    return x[torch.arange(len(x)), STREAM.at("choice").categorical(start.log_weights)]


def keeps(starter, of, before):
    after = after_a_choice(starter, of, before)
    assert float((after != before).flatten(1).any(1).double().mean()) > 0.2
    assert_mean(features(after) - features(before), 0.0)


class Forgotten(Restitch):
    """Plans of the fresh trajectories alone, beside a kept plan that is not part of the pool."""

    def particles(self, evaluate, n_batches, n_particles, stream, kept=None):
        start = super().particles(evaluate, n_batches, n_particles, stream, kept)
        other = super().particles(evaluate, n_batches, n_particles, stream)
        x = torch.where(start.fresh.flatten()[:, None, None, None], start.x, other.x)
        x = x.reshape(n_batches, n_particles, *x.shape[1:])
        x[:, 0] = kept[0]
        return replace(start, x=x.flatten(0, 1), fresh=torch.arange(n_particles).expand(n_batches, -1) > 0)


@pytest.mark.parametrize("of", [TIED, PASSING], ids=["gaps", "left out"])
def test_a_kept_plan_keeps_its_law(of):
    before = gaussian() if of is TIED else thinned(of)
    keeps(FEW, of, before)
    if of is TIED:
        refuted(keeps, Forgotten(9, 1.0, (0.3, 0.7), 2, 32), of, before)


# -- samplers --------------------------------------------------------------------------------------------------


def test_particle_gibbs_from_pools_keeps_the_law_of_plans():
    mean, covariance, log_z = law(0.1, 1.0)
    chain = cd.ParticleGibbs(TIED, LADDER, n_particles=3, n_chains=4000, starter=FEW)
    chain.x = draws(4000, 0.1, 1.0)
    chain.seen = chain.evaluate(chain.x, f64(0.1).expand(4000))
    before = chain.x
    info = chain.step()
    assert float(info.changed.double().mean()) > 0.2
    z = chain.x.flatten(1) - mean
    assert_mean(z, 0.0)
    assert_mean(z[:, :, None] * z[:, None], covariance)
    assert_mean((log_z - info.log_z).exp(), 1.0)
    refuted(assert_mean, chain.x.flatten(1) - before.flatten(1).mean(0) - 0.05, 0.0)
    assert info.level_ess.shape == (3, 4000)
    assert torch.equal(info.level_ess[1], info.level_ess[2])
    # A tour ends when nothing of the kept plan is left.
    unlike = (chain.x[:, :, None] != before[:, None]).flatten(3).any(3).flatten(1).all(1)
    assert bool((info.born[~info.changed] == 0).all())
    assert bool(unlike[info.born == 1].all())


def test_after_a_change_of_target_a_sweep_is_a_pass_of_smc():
    """Its estimate of Z is unbiased, whatever was kept: here a plan without gaps, far from all draws of the model."""
    _, _, log_z = law(0.1, 1.0)
    chain = cd.ParticleGibbs(TIED, LADDER, n_particles=3, n_chains=4000, starter=FEW)
    start = {**chain.snapshot(), "x": f64([[1.0, 6.0], [6.0, 6.0], [6.0, -0.5]])[None, ..., None].expand_as(chain.x)}

    def sweep(keeps):
        chain = cd.ParticleGibbs(TIED, LADDER, n_particles=3, n_chains=4000, starter=FEW, start=start)
        chain.target = TIED
        chain.keeps = chain.keeps or keeps
        return chain, chain.step()

    def unbiased(log_z, keeps):
        chain, info = sweep(keeps)
        x, log_w = chain.particles
        far = (x.flatten(1).abs() > 4.5).any(1).reshape(log_w.shape)  # nothing of the target is there
        assert_mean((info.log_z - log_z).exp(), 1.0)
        assert float((log_w.exp() * far).mean()) == 0

    unbiased(log_z, keeps=False)
    refuted(unbiased, log_z + 0.3, keeps=False)
    refuted(unbiased, log_z, keeps=True)
    chain, info = sweep(keeps=False)
    assert info.changed.all()
    assert (info.born == 1).all()
    assert not bool(chain.step().changed.all())  # the sweep after it keeps a path again


@pytest.mark.parametrize("sampler", [cd.ParticleGibbs, cd.ReplicaExchange])
def test_after_a_change_nothing_depends_on_the_old_plan(sampler):
    """And a chain that was stopped between the change and the next step goes on bit for bit."""
    option = "starter" if sampler is cd.ParticleGibbs else "explorer"

    def chain(**options):
        return sampler(TIED, LADDER, n_chains=3, **{option: FEW}, **options)

    one, other = chain(), chain()
    if sampler is cd.ParticleGibbs:
        other.x = other.x + 7.0
    else:
        other.state = replace(other.state, x=other.state.x + 7.0)
    one.target, other.target = PASSING, PASSING
    stopped = sampler(PASSING, LADDER, n_chains=3, **{option: FEW}, start=one.snapshot())
    for c in (one, other, stopped):
        c.step()
        c.step()
    assert torch.equal(one.output(), other.output())
    assert torch.equal(one.output(), stopped.output())


def test_smc_from_pools_finds_means_and_log_z():
    mean, _, log_z = law(0.1, 1.0)

    def check(log_z, starter=FEW):
        out = cd.SMC(TIED, LADDER, n_particles=4, n_batches=3000, starter=starter).sample()
        assert abs(out.log_z.value - log_z) < 5 * out.log_z.error < 0.3
        for i in (0, 3, 5):
            estimate = out.mean(lambda x, i=i: x.flatten(1)[:, i])
            assert abs(estimate.value - float(mean[i])) < 5 * estimate.error < 0.3

    check(log_z)
    refuted(check, log_z + 0.3)


def test_a_starter_goes_with_the_weight_of_paths_only():
    with pytest.raises(cd.InputError, match="PathWork"):
        cd.SMC(TIED, LADDER, starter=FEW, weight=cd.Twisted())
    with pytest.raises(cd.InputError, match="several segments"):
        cd.ParticleGibbs(cd.models.GaussianMixture([1.0], [[0.0]], [1.0]), LADDER, starter=FEW)


def test_a_chain_from_pools_goes_on_bit_for_bit():
    def chain(**options):
        return cd.ParticleGibbs(TIED, LADDER, n_particles=4, n_chains=3, starter=FEW, seed=5, **options)

    whole, first = chain(), chain()
    for _ in range(4):
        whole.step()
    for _ in range(2):
        first.step()
    rest = chain(start=first.snapshot())
    for _ in range(2):
        rest.step()
    assert torch.equal(whole.x, rest.x)
    assert torch.equal(whole.born, rest.born)
    assert whole.evaluate.counts.rows == rest.evaluate.counts.rows
