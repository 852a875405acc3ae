"""How the samplers are run on the battery: each with one budget of network rows, several groups in one batch.

    groups = method(problem, budget, seed, n_groups)

The groups of one call share its pilot or fit, and the ladder that was planned from it; each is charged for all of that.
All else of a group is its own: chains or batches that no other group sees, verdict, means and errors. So a few seeds
with a few groups each cost little more than one run, since rows are cheap in large batches.
"""

from __future__ import annotations

from collections.abc import Callable

import crepe_diffusion as cd
from studies.battery.problems import Problem
from studies.battery.records import Group

__all__ = ["METHODS", "Method", "pilot", "replica_exchange", "smc"]

Method = Callable[[Problem, int, int, int], list[Group]]

N_CHAINS, N_PARTICLES = 8, 64
BURN_IN = 0.25
"""The share of a chain's iterations that is dropped."""
FIRST = 4
"""Iterations from which the rows of one are measured; they are part of the burn-in."""


def pilot(problem: Problem, budget: int, seed: int) -> cd.Pilot:
    """A pass that costs about a quarter of the budget, less of large ones."""
    # Walks down and up, and the fit of the variance: four times as many samples on a quarter of the steps.
    n = min(256, max(16, budget // (4 * 3 * problem.walk_rows)))
    steps = problem.ladder(problem.steps + 1)
    return cd.pilot(problem.target, steps, n=n, seed=seed, proposal=problem.proposal, fit_samples=4 * n, progress=False)


def _slices(total: int, n_groups: int) -> list[range]:
    size = total // n_groups
    return [range(i * size, (i + 1) * size) for i in range(n_groups)]


def replica_exchange(problem: Problem, budget: int, seed: int, n_groups: int, n_chains: int = N_CHAINS) -> list[Group]:
    """8 chains, planned by a pilot and started from it; a quarter of the iterations is dropped."""
    found = pilot(problem, budget, seed)
    chain = cd.ReplicaExchange(problem.target, pilot=found, n_chains=n_chains * n_groups, seed=seed)
    first = chain.evaluate.counts.rows
    for _ in range(FIRST):
        chain.step()
    each = (chain.evaluate.counts.rows - first) / FIRST / n_groups
    own = (first - found.rows) / n_groups
    n = max(8, int((budget - found.rows - own) / each))
    burn_in = max(FIRST, int(BURN_IN * n))
    out = chain.sample(n - burn_in, burn_in=burn_in - FIRST, progress=False)
    rows = found.rows + (out.evaluations.rows - found.rows) // n_groups
    levels = {"levels": chain.ladder.n_levels, "substeps": chain.ladder.substeps}
    return [Group(out.of_chains(chains), rows, found.rows, levels) for chains in _slices(chain.n_chains, n_groups)]


def smc(problem: Problem, budget: int, seed: int, n_groups: int) -> list[Group]:
    """As many batches of 64 particles as the budget allows, pooled by their estimates of Z; fitted by a pilot."""
    found = pilot(problem, budget, seed)
    each = N_PARTICLES * problem.walk_rows
    n = max(2, (budget - found.rows) // each)
    sampler = cd.SMC(problem.target, pilot=found, n_particles=N_PARTICLES, n_batches=n * n_groups, seed=seed)
    out = sampler.sample(progress=False)
    rows = found.rows + (out.evaluations.rows - found.rows) // n_groups
    return [Group(out.of_batches(batches), rows, found.rows) for batches in _slices(sampler.n_batches, n_groups)]


METHODS: dict[str, Method] = {"replica exchange": replica_exchange, "SMC": smc}
