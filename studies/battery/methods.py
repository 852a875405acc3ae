"""How the samplers are run on the battery: each with one budget of network rows, several groups in one batch.

    groups = method(problem, budget, seed, n_groups)

The groups of one call share its pilot or fit, and the ladder that was planned from it; each is charged for all of that.
All else of a group is its own: chains or batches that no other group sees, verdict, means and errors. So a few seeds
with a few groups each cost little more than one run, since rows are cheap in large batches.
"""

from __future__ import annotations

from collections.abc import Callable

import crepe_diffusion as cd
from crepe_diffusion.processes import Process
from crepe_diffusion.samplers.choose import degenerates, fit_samples
from studies.battery.problems import Problem
from studies.battery.records import Group

__all__ = [
    "METHODS",
    "Method",
    "chosen_by_pilot",
    "few_chains",
    "particle_gibbs",
    "particles_of_a_sweep",
    "pilot",
    "replica_exchange",
    "small_pilot",
    "smc",
    "smc_of",
]

Method = Callable[[Problem, int, int, int], list[Group]]

N_CHAINS, N_PARTICLES = 8, 64
BURN_IN = 0.25
"""The share of a chain's iterations that is dropped."""
FIRST = 4
"""Iterations from which the rows of one are measured; they are part of the burn-in."""


def pilot(problem: Problem, budget: int, seed: int, process: Process | None = None) -> cd.Pilot:
    """A pass that costs about a quarter of the budget, less of large ones."""
    # Walks down and up with double steps, and the fit of the variance: four times as many samples on a quarter of the
    # steps. From 256 particles on it takes a twentieth of the budget: what it knows of the steps is part of all errors.
    most = max(256, budget // (20 * 4 * problem.walk_rows))
    n = min(most, max(16, budget // (4 * 4 * problem.walk_rows)))
    steps = problem.ladder(problem.steps + 1)
    return cd.pilot(
        problem.target,
        steps,
        n=n,
        seed=seed,
        process=process,
        proposal=problem.proposal,
        fit_samples=4 * n,
        progress=False,
    )


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


def smc(problem: Problem, budget: int, seed: int, n_groups: int, process: Process | None = None) -> list[Group]:
    """As many batches of 64 particles as the budget allows, pooled by their estimates of Z; fitted by a pilot."""
    return smc_of(problem, budget, seed, n_groups, pilot(problem, budget, seed, process))


def lean_smc(problem: Problem, budget: int, seed: int, n_groups: int) -> list[Group]:
    """The same with the small pilot that the other methods have: less is spent before it begins."""
    return smc_of(problem, budget, seed, n_groups, small_pilot(problem, budget, seed))


def smc_of(problem: Problem, budget: int, seed: int, n_groups: int, found: cd.Pilot) -> list[Group]:
    """What is left of the budget after this pilot, in batches."""
    each = N_PARTICLES * problem.walk_rows
    n = max(2, (budget - found.rows) // each)
    sampler = cd.SMC(problem.target, pilot=found, n_particles=N_PARTICLES, n_batches=n * n_groups, seed=seed)
    out = sampler.sample(progress=False)
    rows = found.rows + (out.evaluations.rows - found.rows) // n_groups
    return [Group(out.of_batches(batches), rows, found.rows) for batches in _slices(sampler.n_batches, n_groups)]


def few_chains(problem: Problem, budget: int, seed: int, n_groups: int) -> list[Group]:
    """Replica exchange with few chains of many trips each and nothing dropped, as `cd.sample` would run it.

    With large budgets its pilot has more particles, a hundredth of the budget walks down, so that chains may begin in
    rare modes.
    """
    found = small_pilot(problem, budget, seed, most=max(64, budget // (100 * problem.walk_rows)))
    best = found.plan().best
    each = found.iteration_rows(best.pairs, best.substeps)
    iterations = (budget - found.rows) / each
    n_chains = max(1, min(N_CHAINS, int(iterations / (20 * (best.pairs + best.delay)))))
    chain = cd.ReplicaExchange(
        problem.target, pilot=found, n_chains=n_chains * n_groups, seed=seed, proposal=problem.proposal
    )
    out = chain.sample(max(8, int(iterations / n_chains) - 1), progress=False)
    rows = found.rows + (out.evaluations.rows - found.rows) // n_groups
    more = {"levels": chain.ladder.n_levels, "substeps": chain.ladder.substeps, "chains": n_chains}
    return [Group(out.of_chains(chains), rows, found.rows, more) for chains in _slices(chain.n_chains, n_groups)]


def small_pilot(problem: Problem, budget: int, seed: int, most: int = 64) -> cd.Pilot:
    """A tenth of the budget for its walks, 16 particles at least, and the variance measured as `cd.sample` does it."""
    n = min(most, max(16, budget // (20 * problem.walk_rows)))
    fit = fit_samples(problem.target, problem.steps, budget, most=budget)
    steps = problem.ladder(problem.steps + 1)
    return cd.pilot(problem.target, steps, n=n, seed=seed, proposal=problem.proposal, fit_samples=fit, progress=False)


def particles_of_a_sweep(walks: int, degenerate: bool) -> int:
    """For so many walks in all: 16 to 64, and up to 512 for many.

    More particles meet rare modes sooner. Where their weights degenerate more sweeps serve better.

    >>> [particles_of_a_sweep(walks, False) for walks in (200, 3000, 30_000, 100_000)]
    [16, 64, 468, 512]
    >>> particles_of_a_sweep(100_000, degenerate=True)
    64
    """
    few = min(64, max(16, walks // 16))
    return few if degenerate else max(few, min(512, walks // 64))


def particle_gibbs(problem: Problem, budget: int, seed: int, n_groups: int) -> list[Group]:
    """One chain, begun by a pass of SMC; fitted by a pilot."""
    found = small_pilot(problem, budget, seed)
    walks = (budget - found.rows) // problem.walk_rows
    n = particles_of_a_sweep(walks, degenerates(found))
    chain = cd.ParticleGibbs(problem.target, pilot=found, n_particles=n, n_chains=n_groups, seed=seed)
    out = chain.sample(max(4, walks // n - 1), progress=False)
    rows = found.rows + (out.evaluations.rows - found.rows) // n_groups
    return [Group(out.of_chains(chains), rows, found.rows, {"particles": n}) for chains in _slices(n_groups, n_groups)]


def chosen_by_pilot(problem: Problem, budget: int, seed: int, n_groups: int) -> list[Group]:
    """`cd.sample` with all of its budget; every group has its own pilot and makes its own choice."""
    groups = []
    for i in range(n_groups):
        out = cd.sample(
            problem.target,
            problem.ladder(problem.steps + 1),
            n_effective=budget,
            budget=budget,
            scalars=problem.scalars,
            seed=seed * n_groups + i,
            proposal=problem.proposal,
            progress=False,
        )
        forecasts = {f.method: f.effective for f in out.forecasts}
        groups.append(Group(out, out.evaluations.rows, out.pilot.rows, forecasts | {"chosen": out.forecasts[0].method}))
    return groups


METHODS: dict[str, Method] = {
    "replica exchange": replica_exchange,
    "SMC": smc,
    "SMC, small pilot": lean_smc,
    "exchange, few chains": few_chains,
    "particle Gibbs": particle_gibbs,
    "cd.sample": chosen_by_pilot,
}
