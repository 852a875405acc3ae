"""Replicas that are dealt anew to chains: the same ones at every level, of the same group."""

from __future__ import annotations

import torch

import crepe_diffusion as cd
from checks import refuted
from studies.battery.problems import tokens
from studies.battery.trials import CHAINS, dealt


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
