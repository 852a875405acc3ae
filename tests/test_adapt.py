"""Adapting the ladder makes rejections equal and moves nothing but levels: not the ends, not gamma(t), not the law."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

import crepe_diffusion as cd
from checks import assert_mean, f64, refuted
from crepe_diffusion.processes import Gaussian
from crepe_diffusion.samplers.replica_exchange import equal_rejection

BETA = 2.0
MIXTURE = cd.models.GaussianMixture([0.45, 0.55], [[-2.0], [1.5]], [0.3, 0.8])
PROCESS = Gaussian(variance=1.0, log_probs=(MIXTURE.log_prob,))


def chain(levels, n_chains=100, target=MIXTURE**BETA, k="paper"):
    return cd.ReplicaExchange(target, levels, n_chains=n_chains, process=PROCESS, seed=1, proposal=cd.Proposal(k))


def unevenness(run):
    rejection = 1 - run.diagnostics.acceptance()
    return float(rejection.max() / rejection.min())


@pytest.mark.parametrize("substeps", [1, 2])
def test_rejections_become_equal(substeps):
    """On a geometric ladder the data end hardly ever rejects; one or two rounds level that."""
    run = chain(cd.ladder.geometric(7, 0.1, 30.0, substeps=substeps))
    first = run.ladder
    run.sample(40, burn_in=20)
    before = unevenness(run)
    for _ in range(2):
        run.adapt()
        run.sample(40, burn_in=20)
    assert before > 3
    assert unevenness(run) < 1.5
    assert (run.ladder.times[0], run.ladder.times[-1]) == (first.times[0], first.times[-1])
    assert (run.ladder.times.diff() > 0).all()
    assert (run.ladder.substeps, run.ladder.n_levels) == (substeps, 7)
    assert not torch.allclose(run.ladder.times, first.times, rtol=0.05)


def test_the_worst_pair_of_the_ladder_improves():
    run = chain(cd.ladder.geometric(7, 0.1, 30.0))
    run.sample(40, burn_in=20)
    worst, trips = float(run.diagnostics.acceptance().min()), run.diagnostics.predicted_round_trips()
    run.adapt()
    run.sample(40, burn_in=20)
    assert float(run.diagnostics.acceptance().min()) > worst
    assert run.diagnostics.predicted_round_trips() > trips


def recorded(*rejections):
    return SimpleNamespace(acceptance=lambda: 1 - f64(rejections))


def test_levels_cut_the_cumulative_rejection_evenly():
    """Rejections 0.1, 0.4, 0.2: cuts at 0.2333 and 0.4667 of 0.7 lie at indices 4/3 and 23/12."""
    ladder = cd.ladder.of([1.0, 2.0, 4.0, 8.0])
    moved = equal_rejection(ladder, recorded(0.1, 0.4, 0.2))
    assert moved.times.tolist() == pytest.approx([1.0, 2 + 2 / 3, 2 + 2 * 11 / 12, 8.0])
    fewer = equal_rejection(ladder, recorded(0.1, 0.4, 0.2), n_levels=3)
    assert fewer.times.tolist() == pytest.approx([1.0, 2 + 2 * 0.25 / 0.4, 8.0])
    more = equal_rejection(ladder, recorded(0.1, 0.4, 0.2), n_levels=8)
    assert more.n_levels == 8
    assert (more.times.diff() > 0).all()


@pytest.mark.parametrize("r", [0.0, 0.3, 1.0])
def test_a_ladder_that_is_even_already_stays(r):
    ladder = cd.ladder.karras(5, 0.1, 10.0, substeps=3)
    moved = equal_rejection(ladder, recorded(r, r, r, r))
    torch.testing.assert_close(moved.times, ladder.times, rtol=1e-12, atol=0)


def test_a_ladder_cannot_be_adapted_to_nothing():
    with pytest.raises(cd.InputError, match="no acceptance has been recorded"):
        equal_rejection(cd.ladder.karras(3), recorded(0.1, math.nan))


def test_annealing_stays_a_function_of_time():
    """A reward that anneals away by the ladder's index does so by the first ladder's, wherever levels go."""
    target = (MIXTURE**BETA).tilt(lambda x: 1.0 + 0 * x[:, 0], anneal=cd.anneal.power(3, floor=0.01))
    run = chain(cd.ladder.geometric(7, 0.1, 30.0), n_chains=20, target=target)
    t = torch.logspace(-1, 1.4, 30, dtype=torch.float64)
    x = torch.zeros(30, 1, dtype=torch.float64)
    before, levels = run.evaluate(x, t).reward, run.ladder.levels
    run.sample(30)
    run.adapt()
    assert not torch.allclose(run.ladder.levels, levels, rtol=0.05)
    assert torch.equal(run.evaluate(x, t).reward, before)
    fresh = chain(cd.Ladder(run.ladder.times), n_chains=1, target=target)  # a new ladder would anneal anew
    assert not torch.allclose(fresh.evaluate(x, t).reward, before, atol=0.01)


def test_a_chain_is_right_before_and_after_it_was_adapted():
    """Weight of the left mode of p^2 at level 0, by quadrature; oracle ratios, so only Monte Carlo error is left."""
    grid = torch.linspace(-12, 12, 24_001, dtype=torch.float64)[:, None]
    weight = (BETA * MIXTURE.log_prob(grid, 0.1)).softmax(0)
    truth = float(weight[grid[:, 0] < -0.8].sum())
    run = chain(cd.ladder.geometric(7, 0.1, 30.0), n_chains=300, k="balanced")

    def check(x, value):
        assert_mean((x[..., 0] < -0.8).to(torch.float64).mean(0), value)

    before = run.sample(40, burn_in=60).chains
    run.adapt()
    after = run.sample(40, burn_in=20).chains
    for x in (before, after):
        check(x, truth)
        refuted(check, x, 0.45)  # the weight in p itself
        refuted(check, x, 1 - truth)


def test_suggested_levels_are_twice_the_barrier_plus_one_and_reach_it():
    """On the suggested number of levels, evenly cut, a pair rejects about half of its swaps."""
    run = chain(cd.ladder.geometric(15, 0.1, 30.0), n_chains=60)
    run.sample(40, burn_in=30)
    barrier = run.diagnostics.barrier().value
    n = run.diagnostics.suggested_levels()
    assert n == math.ceil(2 * barrier) + 1
    small = chain(equal_rejection(run.ladder, run.diagnostics, n_levels=n), n_chains=60)
    small.sample(40, burn_in=20)
    rejection = 1 - small.diagnostics.acceptance()
    assert 0.35 < float(rejection.mean()) < 0.65
