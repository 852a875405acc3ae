"""Steep tables of tokens from a normal start: how far the draws are from the law, and how far they may be.

    python -m studies.battery.tokens      seed 0, some minutes of one core

    TV = 1/2 sum over states |share of the draws - probability|

`by chance` is the TV that the stated errors of all states predict for a sampler without bias; `independent` is that of
independent draws for the same rows, each by one walk from noise to data.
"""

from __future__ import annotations

import argparse
import math
from functools import partial

import torch
from torch import Tensor

from crepe_diffusion import Result
from crepe_diffusion.models import TokenTable
from crepe_diffusion.processes import Masked
from studies.battery.methods import Method, particle_gibbs, replica_exchange, smc
from studies.battery.problems import Problem, tokens
from studies.battery.records import Group
from studies.shared.pages import markdown

KINDS = ("masked", "uniform")


def counted(problem: Problem, budget: int, seed: int, n_groups: int) -> list[Group]:
    """SMC with as many masks as the time says, instead of coins."""
    process = problem.target.models[0].process()
    assert isinstance(process, Masked)
    return smc(problem, budget, seed, n_groups, process.counted())


# A walk costs 10 rows for masked tokens and 72 for uniform ones: 64 chains of these make 20 sweeps with 100,000 rows.
RUNS: dict[str, Method] = {"SMC": smc, "particle Gibbs": particle_gibbs, "replica exchange": replica_exchange}
OF_MASKED: dict[str, Method] = {"SMC, counted masks": counted}


def distances(problem: Problem, out: Result, rows: int) -> tuple[float, float, float]:
    """The TV of these draws, by chance, and of independent ones."""
    table = problem.target.models[0]
    assert isinstance(table, TokenTable)
    law = problem.log_density(table.states).softmax(0)
    base = table.vocab_size ** torch.arange(table.length)

    def index(x: Tensor) -> Tensor:
        return (x * base).sum(1)

    def is_state(i: Tensor, x: Tensor) -> Tensor:
        return (index(x) == i).to(torch.float64)

    estimates = [out.mean(partial(is_state, i)) for i in index(table.states)]
    found = torch.tensor([e.value for e in estimates], dtype=torch.float64)
    # A state that was not seen has no error; its whole probability is missing.
    errors = torch.tensor([e.error for e in estimates], dtype=torch.float64)
    mean = math.sqrt(2 / math.pi)  # E|z|
    chance = torch.where(errors > 0, mean * errors, law).sum() / 2
    n = rows / problem.walk_rows
    independent = (mean * (law * (1 - law) / n).sqrt()).sum() / 2
    return float((found - law).abs().sum() / 2), float(chance), float(independent)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--budgets", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for kind in KINDS:
        problem = tokens(kind, 4, 3, steepness="steep")
        for method, run in {**RUNS, **(OF_MASKED if kind == "masked" else {})}.items():
            for budget in options.budgets:
                (group,) = run(problem, budget, options.seed, 1)
                numbers = [f"{d:.3f}" for d in distances(problem, group.out, group.rows)]
                levels = int(group.more.get("levels", problem.steps + 1))
                level = group.out.verdict(problem.scalars).level
                rows.append((kind, method, levels, f"{group.rows:,}", *numbers, level))
                print(*rows[-1], flush=True)
    print(markdown(["process", "method", "levels", "rows", "TV", "by chance", "independent", "verdict"], rows))


if __name__ == "__main__":
    main()
