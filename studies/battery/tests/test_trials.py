"""Trials: replicas that are dealt anew to chains, a sweep above one level, a fitted drift, ratios from both ends."""

from __future__ import annotations

import torch

import crepe_diffusion as cd
from checks import refuted
from crepe_diffusion.evaluate import Evaluator
from crepe_diffusion.paths import walk
from crepe_diffusion.processes import Gaussian
from studies.battery.problems import black_box, tokens
from studies.battery.trials import CHAINS, BothEnds, Joined, Steered, dealt, swept


def test_dealing_moves_replicas_between_chains_of_a_group_and_not_between_levels():
    problem = tokens("masked", 4, 3)
    chain = cd.ReplicaExchange(problem.target, problem.ladder(4), n_chains=2 * CHAINS, seed=1)
    for _ in range(3):
        chain.step()
    before = chain.state
    after = dealt(before, cd.Stream(2))

    def check(first: int, level: int) -> None:
        """Level `level` of the group that begins at chain `first` has the same points, in whatever order."""
        group = slice(first, first + CHAINS)
        old, new = (s.x[s.row_at(level)[group]] for s in (before, after))
        assert sorted(old.tolist()) == sorted(new.tolist())

    for first in (0, CHAINS):
        for level in range(4):
            check(first, level)
    old, new = (s.x[s.row_at(0)].tolist() for s in (before, after))
    assert old != new
    # Predictions go with their points.
    assert torch.equal(after.seen.predictions[0], chain.evaluate(after.x, torch.ones(len(after.x))).predictions[0])
    before = after
    after = dealt(before, cd.Stream(3))
    after.x.copy_(after.x.roll(1, 0))
    refuted(check, 0, 0)


def test_a_sweep_changes_the_replicas_of_its_level_only():
    problem = tokens("masked", 4, 3)
    chain = Joined(problem.target, problem.ladder(5), n_chains=12, seed=1).above(2, seed=3)
    for _ in range(3):
        chain.step()
    before, rows = chain.state, chain.evaluate.counts.rows
    after = swept(before, chain.sweeps, 2)

    def check(level: int) -> None:
        assert torch.equal(before.x[before.row_at(level)], after.x[after.row_at(level)])

    for level in (0, 1, 3, 4):
        check(level)
    refuted(check, 2)
    assert chain.evaluate.counts.rows > rows  # they are paid for
    assert torch.equal(after.seen.predictions[0], chain.evaluate(after.x, torch.ones(len(after.x))).predictions[0])


def test_the_fitted_drift_is_the_missing_part_of_the_score():
    """One observed coordinate of a normal law, without a gradient: the score of pi_t is S and a line in x."""
    problem = black_box(n_observed=1, dim=2, y=1.0, tau=1.0)
    found = cd.pilot(problem.target, problem.ladder(17), n=4096, seed=1, progress=False)
    process = Steered.of(found.process, found)
    # At level 0 the reward -(D - 1)^2 / 2 of the prediction D = x / (1 + t^2) has this gradient in x.
    shrink = 1 / (1 + float(found.ladder.times[0]) ** 2)

    def check(coordinate: int, a: float, b: float) -> None:
        assert abs(float(process.a[0, coordinate]) - a) < 0.3
        assert abs(float(process.b[0, coordinate]) - b) < 0.3  # three standard errors

    check(0, shrink, -(shrink**2))
    check(1, 0.0, 0.0)
    refuted(check, 1, shrink, -(shrink**2))


def test_ratios_from_both_ends_find_the_width_of_gaussian_data():
    """They are exact with a variance that was measured wrongly, in both directions."""
    model = cd.models.GaussianMixture([1.0], [[0.5, -1.0, 2.0]], [0.7])
    times = cd.ladder.karras(4, 0.1, 3.0)
    x, index = 2 * cd.Stream(5).normal((8, 3)), torch.arange(8) % 2 + 1
    direction = torch.arange(8) // 2 % 2 * 2 - 1

    def check(process: Gaussian) -> None:
        evaluate = Evaluator(model**2.0, times, process, cd.Proposal())
        start, end = times.times[index], times.times[index + direction]
        path = walk(evaluate, x, evaluate(x, start), index, direction, 1, cd.Stream(6))
        ratio = -direction * (model.log_prob(path.x, end) - model.log_prob(x, start))
        torch.testing.assert_close(path.models[0], ratio, atol=1e-9, rtol=0)

    check(BothEnds(variance=0.8))
    refuted(check, Gaussian(variance=0.8))
