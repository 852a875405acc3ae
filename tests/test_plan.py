"""The played exchange against exchanges whose course is known, and against one that is played replica by replica."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

import crepe_diffusion as cd
from checks import refuted
from crepe_diffusion.samplers.plan import CHAINS, PLAYED, Cut

STEPS, N = 8, 8
MODEL = cd.models.GaussianMixture([1.0], [[0.0]], [1.0])


@pytest.fixture(scope="module")
def pilot() -> cd.Pilot:
    process = cd.processes.Gaussian(variance=1.0)
    return cd.pilot(MODEL, cd.ladder.karras(STEPS + 1, 0.1, 10.0), n=N, process=process)


def per_iteration(pilot: cd.Pilot, cut: Cut, per_1000_rows: float) -> float:
    return per_1000_rows * pilot.iteration_rows(cut.pairs, cut.substeps) / 1000


def test_where_every_swap_is_accepted_each_second_iteration_brings_an_arrival(pilot):
    """One replica comes down with every second iteration, M - 1 after the first that leaves the noise end."""
    works = -1000.0 * torch.arange(1, STEPS + 1, dtype=torch.float64)[:, None].expand(STEPS, N)
    found = replace(pilot, down=works, up=works).plan()
    assert {cut.pairs for cut in found.cuts} >= {1, 2, 4, 8}
    for cut in found.cuts:
        late = cut.pairs - 1 + (cut.pairs - 1) % 2
        assert per_iteration(pilot, cut, cut.effective) == pytest.approx((PLAYED - late) / 2 / PLAYED, rel=1e-12)
        assert (cut.rejection, cut.delay) == pytest.approx((0.0, 0.0), abs=1e-12)
        assert per_iteration(pilot, cut, cut.arrivals) == pytest.approx(0.5)
    assert found.best.pairs == max(found.cuts, key=lambda cut: cut.effective).pairs


@pytest.mark.parametrize(("down", "up"), [(-1000.0, 1000.0), (math.nan, -1000.0), (1000.0, math.nan)])
def test_where_no_swap_is_accepted_nothing_arrives(pilot, down, up):
    works = torch.ones(STEPS, N, dtype=torch.float64)
    for cut in replace(pilot, down=down * works, up=up * works).plan().cuts:
        assert (cut.effective, cut.rejection) == (0.0, cut.pairs)


def test_delay_grows_with_the_odds_of_rejection(pilot):
    """Works of -.3 a step down and none up: a pair of k steps is accepted with chance exp(-.3 k)."""
    works = torch.full((STEPS, N), -0.3, dtype=torch.float64)
    for cut in replace(pilot, down=works, up=0 * works).plan().cuts:
        if cut.pairs * cut.substeps == STEPS:
            delay = cut.pairs * math.expm1(0.3 * cut.substeps)
            assert cut.delay == pytest.approx(delay)
            assert per_iteration(pilot, cut, cut.arrivals) == pytest.approx(1 / (2 + 2 * delay))


def played(top: int, good: float, cost: float, seed: int) -> float:
    """Effective arrivals per iteration and chain, where a bad replica replaces a good one with chance `exp(-cost)`."""
    rng, seen, born, chains = random.Random(seed), Counter(), 0, 3 * CHAINS
    for _ in range(chains):
        replicas = [(rng.random() < good, -1) for _ in range(top + 1)]
        for i in range(PLAYED):
            born += 1
            replicas[top] = rng.random() < good, born
            for m in range(1 + i % 2, top + 1, 2):
                high, low = replicas[m], replicas[m - 1]
                if high[0] or not low[0] or rng.random() < math.exp(-cost):
                    replicas[m], replicas[m - 1] = low, high
            seen[replicas[0][1]] += 1
    lengths = [n for label, n in seen.items() if label > 0]
    return sum(lengths) ** 2 / sum(n * n for n in lengths) / (chains * PLAYED)


def test_replicas_keep_their_mode_where_they_turn_around(pilot):
    """Good and bad particles have other works, and weights of .7 and .3 at the noise end; the seeds' spread is 1 %.

    Particles on their way up are numbered the other way round, so that they are found by their features only.
    """
    kinds = torch.tensor([[True] * 4 + [False] * 4, [False] * 4 + [True] * 4])
    works = (-0.5 * (~kinds).double())[:, None].expand(2, STEPS, N)
    changed = replace(
        pilot,
        features=(100.0 * kinds)[:, None, :, None].expand(2, STEPS + 1, N, 1),
        log_weights=torch.where(kinds[0], 0.7 / 4, 0.3 / 4).double().log().expand(STEPS + 1, N),
        down=works[0],
        up=works[1],
    )
    cuts = {cut.pairs: cut for cut in changed.plan().cuts}

    def check(pairs: int, good: float, cost: float) -> None:
        found = per_iteration(pilot, cuts[pairs], cuts[pairs].effective)
        assert found == pytest.approx(played(pairs, good, cost, seed=pairs), rel=0.05)

    for pairs in (1, 2, 4):
        check(pairs, 0.7, 0.5 * STEPS / pairs)
        refuted(check, pairs, 0.7, 0.0)
        refuted(check, pairs, 0.3, 0.5 * STEPS / pairs)
