"""Steep tables of tokens from a normal start: how far the draws are from the law, and how far they may be.

    python -m studies.battery.tokens --write      seed 0, 1,000,000 rows each, some minutes of one core

    TV = 1/2 sum over states |share of the draws - probability|

`effective` independent draws would have the errors that a run states of all states, and `of effective` is their TV:
a sampler without bias has this distance. `of rows` is the TV of independent draws for the same rows, each by one walk
from noise to data.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from crepe_diffusion import ReplicaExchange, Result
from crepe_diffusion.models import TokenTable
from crepe_diffusion.processes import Masked
from studies.battery.methods import Method, particle_gibbs, replica_exchange, smc
from studies.battery.problems import Problem, tokens
from studies.battery.records import Group
from studies.shared.pages import fill, markdown

KINDS = ("masked", "uniform")


def counted(problem: Problem, budget: int, seed: int, n_groups: int) -> list[Group]:
    """SMC with as many masks as the time says, instead of coins."""
    process = problem.target.models[0].process()
    assert isinstance(process, Masked)
    return smc(problem, budget, seed, n_groups, process.counted())


def many_chains(problem: Problem, budget: int, seed: int, n_groups: int) -> list[Group]:
    """192 chains of 3 levels, each with its own start, a quarter dropped: no pilot, since nothing is planned."""
    chain = ReplicaExchange(
        problem.target, problem.ladder(3), n_chains=192 * n_groups, seed=seed, proposal=problem.proposal
    )
    start = chain.evaluate.counts.rows
    chain.step()
    n = max(8, (budget * n_groups - start) // (chain.evaluate.counts.rows - start))
    out = chain.sample(n - n // 4, burn_in=n // 4 - 1, progress=False)
    parts = [out.of_chains(range(192 * i, 192 * (i + 1))) for i in range(n_groups)]
    return [Group(part, out.evaluations.rows // n_groups, start // n_groups, {"levels": 3}) for part in parts]


RUNS: dict[str, Method] = {
    "SMC": smc,
    "particle Gibbs": particle_gibbs,
    "replica exchange, 8 chains": replica_exchange,
    "replica exchange, 192 chains": many_chains,
}
OF_MASKED: dict[str, Method] = {"SMC, counted masks": counted}


def distances(problem: Problem, out: Result, rows: int) -> tuple[float, float, float, float]:
    """The TV of these draws, how many independent ones have their stated errors, the TV of these, and of those rows."""
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
    stated = float(torch.where(errors > 0, mean * errors, law).sum()) / 2
    one = float(mean * (law * (1 - law)).sqrt().sum()) / 2
    distance = float((found - law).abs().sum()) / 2
    return distance, (one / stated) ** 2, stated, one / math.sqrt(rows / problem.walk_rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--budgets", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="+", choices=[*RUNS, *OF_MASKED], default=[*RUNS, *OF_MASKED])
    parser.add_argument("--write", action="store_true", help="put the table into the README of the study")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for kind in KINDS:
        problem = tokens(kind, 4, 3, steepness="steep")
        for method, run in {**RUNS, **(OF_MASKED if kind == "masked" else {})}.items():
            for budget in options.budgets if method in options.methods else ():
                (group,) = run(problem, budget, options.seed, 1)
                distance, effective, *floors = distances(problem, group.out, group.rows)
                levels = int(group.more.get("levels", problem.steps + 1))
                level = group.out.verdict(problem.scalars).level
                numbers = (f"{distance:.4f}", f"{effective:,.0f}", *(f"{floor:.4f}" for floor in floors))
                rows.append((kind, method, levels, f"{group.rows:,}", *numbers, level))
                print(*rows[-1], flush=True)
    header = ["process", "method", "levels", "rows", "TV", "effective", "of effective", "of rows", "verdict"]
    print(markdown(header, rows))
    if options.write:
        fill(Path(__file__).parent / "README.md", {"tokens": markdown(header, rows)})


if __name__ == "__main__":
    main()
