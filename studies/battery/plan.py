"""Predictions of a pilot against runs: the acceptance of every cut, and what the cut costs.

    python -m studies.battery.plan

Two modes in 32 dimensions, tempered by 2, 64 steps. Each replicate has one chain and its own pilot, whose rows are part
of the budget; all replicates run in one batch. Cost is squared error x rows, relative to independent draws at 65 rows.
Takes two and a half minutes of one core.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor

from crepe_diffusion import Estimate, Pilot, ReplicaExchange, pilot
from crepe_diffusion.diagnostics.estimates import mean_of, tours
from studies.battery.problems import Problem, tempering
from studies.shared.pages import fill, markdown

PAGE = Path(__file__).parents[2] / "docs" / "decisions.md"
BUDGET, STEPS, PARTICLES = 33_280, 64, 64
PAIRS = (2, 4, 8, 16, 32, 64)
SCALAR = "second mode"
# Replicas that start from one trajectory are judged after a quarter of the run, which is best for most cuts.
BURN_IN = 0.25


def batch(problem: Problem, pilots: list[Pilot], pairs: int, from_pilot: bool) -> ReplicaExchange:
    """One chain for each pilot, in one batch; with `from_pilot` each starts from the population of its own."""
    ladder, n = problem.ladder(pairs + 1, STEPS // pairs), len(pilots)
    first = pilots[0]
    if not from_pilot:
        return ReplicaExchange(problem.target, ladder, n_chains=n, seed=1, process=first.process)
    alone = [ReplicaExchange(problem.target, ladder, seed=i, pilot=p).snapshot() for i, p in enumerate(pilots)]
    start = ReplicaExchange(problem.target, ladder, n_chains=n, seed=1, pilot=first).snapshot()
    for name in start:
        if name in ("x", "level", "diagnostics.trips.born") or name.startswith("seen."):
            start[name] = torch.cat([snapshot[name] for snapshot in alone])
    return ReplicaExchange(problem.target, ladder, n_chains=n, seed=1, process=first.process, start=start)


def cost(values: Tensor, truth: float) -> Estimate:
    """Of means of an indicator, one per replicate, which have all cost the budget."""
    ratio = (values - truth).square() / (truth * (1 - truth)) * BUDGET / 65
    return Estimate(float(ratio.mean()), float(ratio.std()) / math.sqrt(len(ratio)))


def measure(problem: Problem, pilots: list[Pilot], pairs: int, from_pilot: bool) -> tuple[Estimate, float, float]:
    """The cost, `sum r / (1 - r)`, and the share of 95 % intervals of single chains that hold the truth."""
    chain, substeps = batch(problem, pilots, pairs, from_pilot), STEPS // pairs
    # Without a pilot its fit must be paid, and one trajectory.
    paid = pilots[0].rows - (0 if from_pilot else PARTICLES * (2 * STEPS + 1) - (STEPS + 1))
    n = (BUDGET - paid) // ((pairs + 1) * substeps)
    burn_in = 0 if from_pilot else int(BURN_IN * n)
    out = chain.sample(n - burn_in, burn_in=burn_in, progress=False)
    values, truth = out.scalar(problem.scalars[SCALAR]), problem.truths[SCALAR]
    covered = []
    for r in range(len(pilots)):
        own = slice(r, r + 1)
        low, high = mean_of(values[:, own], tours(out.replica[:, own], out.born[:, own])).interval()
        covered.append(low <= truth <= high)
    rejection = 1 - out.diagnostics.acceptance()
    return cost(values.mean(0), truth), float((rejection / (1 - rejection)).sum()), sum(covered) / len(covered)


def tables(n_replicates: int, dim: int = 32) -> dict[str, str]:
    problem = tempering(dim)
    steps = problem.ladder(STEPS + 1)
    pilots = [pilot(problem.target, steps, PARTICLES, seed) for seed in range(n_replicates)]
    plans = [p.plan() for p in pilots[:8]]
    rows = []
    for pairs in PAIRS:
        predicted = [1 - p.acceptance(range(0, STEPS + 1, STEPS // pairs)) for p in pilots]
        delays = torch.stack([(r / (1 - r)).sum() for r in predicted])
        effective = [next(c.effective for c in plan.cuts if c.pairs == pairs) for plan in plans]
        started, delay, covered = measure(problem, pilots, pairs, from_pilot=True)
        cold, _, _ = measure(problem, pilots, pairs, from_pilot=False)
        rows.append(
            [
                f"{pairs} x {STEPS // pairs}",
                f"{float(delays.mean()):.2f} ± {float(delays.std()):.2f}",
                f"{delay:.2f}",
                f"{sum(effective) / len(effective):.2f}",
                f"{1000 / 65 / started.value * BUDGET / (BUDGET - pilots[0].rows):.2f}",
                f"{started.value:.0f} ± {started.error:.0f}",
                f"{covered:.2f}",
                f"{cold.value:.0f} ± {cold.error:.0f}",
            ]
        )
    own = cost(torch.tensor([p.mean(problem.scalars[SCALAR]).value for p in pilots]), problem.truths[SCALAR])
    header = [
        "pairs x sub-steps",
        "sum r/(1-r), predicted",
        "measured",
        "effective per 1,000 rows, predicted",
        "measured",
        "cost from the pilot",
        "covered",
        "cost from one trajectory",
    ]
    chosen = ", ".join(f"{plan.best.pairs} x {plan.best.substeps}" for plan in plans)
    # The pilot alone has cost only its own rows.
    alone = own.value * pilots[0].rows / BUDGET
    note = f"{n_replicates} replicates; pilots of {pilots[0].rows:,} rows, whose own mean costs {alone:.0f}."
    return {"plan": markdown(header, rows) + f"\n\n{note} Plans of eight pilots: {chosen}."}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Predictions of a pilot against runs.")
    parser.add_argument("--replicates", type=int, default=48)
    parser.add_argument("--print", action="store_true", help="print the table instead of writing it into the page")
    options = parser.parse_args()
    found = tables(options.replicates)
    if options.print:
        print(found["plan"])
    else:
        fill(PAGE, found)
