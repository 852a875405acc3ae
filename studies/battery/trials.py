"""Two ways to get more out of the same exchange, tried on three problems.

    recycled   draws at level 0 are replaced by their mean over the coin:  alpha f(arrival) + (1 - alpha) f(present)
    matched    before each swap, replicas of one level are dealt anew to all chains: who meets whom is random

Both leave the law as it is, and cost no network row. `python -m studies.battery.trials` writes the table of
docs/decisions.md; four minutes of one core.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path as File
from typing import Any

import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.kernels import State, swap
from crepe_diffusion.paths import Path, walk
from studies.battery.calibration import chosen
from studies.battery.problems import Problem
from studies.shared.pages import fill, markdown

PAGE = File(__file__).parents[2] / "docs" / "decisions.md"
PROBLEMS = (
    "tempering isotropic d=32 beta=2",
    "rare tilt with gradient, linear annealing",
    "masked tokens 4x3 steep w=2 w'=2",
)
BUDGET, CHAINS, GROUPS, SEEDS = 200_000, 8, 16, 2


class Recorded(cd.ReplicaExchange):
    """An exchange that keeps, of every iteration, level 0 before it, what arrived there, and with which probability."""

    def step(self) -> cd.samplers.Exchange:
        first, second = (self.state.row_at(level) for level in (0, 1))
        before = self.state.x[first]
        with _last_walk() as seen:
            info = super().step()
        arrival = seen[0].x[second]
        met = bool(info.swaps.active[0])
        work = info.swaps.log_work
        alpha = (work[:, 1] - work[:, 0]).clamp(max=0).exp().nan_to_num() if met else torch.zeros(self.n_chains)
        self.coins.append((before if met else self.state.x[self.state.row_at(0)], arrival, alpha))
        return info

    coins: list[tuple[Tensor, Tensor, Tensor]]


class Matched(cd.ReplicaExchange):
    """An exchange among `CHAINS` chains at once: those at one level change places at random before each swap."""

    def step(self) -> cd.samplers.Exchange:
        self.state = dealt(self.state, self.stream.at(self.iteration, "deal"))
        return super().step()


def dealt(state: State, stream: cd.Stream) -> State:
    """The replicas of every level in a random order of the chains of their group."""
    chains, levels = state.level.shape
    rows = torch.stack([state.row_at(m) for m in range(levels)], 1).reshape(-1, CHAINS, levels)
    order = stream.uniform(tuple(rows.shape)).argsort(1)
    rows = rows.gather(1, order).flatten()
    return State(state.x[rows], state.seen.rows(rows), torch.arange(levels).expand(chains, -1).clone())


@contextmanager
def _last_walk() -> Iterator[list[Path]]:
    """A copy of the path of the next swap, before rejected rows are put back."""
    module, seen = swap.__globals__, []

    def kept(*args: Any, **options: Any) -> Path:
        path = walk(*args, **options)
        seen.append(Path(path.x.clone(), path.seen, path.reward_s, path.reward_t, path.models, path.proposal))
        return path

    module["walk"] = kept
    try:
        yield seen
    finally:
        module["walk"] = walk


def costs(problem: Problem, seed: int) -> dict[str, Tensor]:
    """The cost of each group of chains, (groups,), plain, recycled and matched."""
    steps = problem.ladder(problem.steps + 1)
    found = cd.pilot(problem.target, steps, n=64, seed=seed, proposal=problem.proposal, progress=False)
    options: dict[str, Any] = {"pilot": found, "n_chains": CHAINS * GROUPS, "seed": seed}
    plain, matched = Recorded(problem.target, **options), Matched(problem.target, **options)
    best = found.plan().best
    n = int((BUDGET - found.rows) / CHAINS / found.iteration_rows(best.pairs, best.substeps))
    plain.coins = []
    draws = {"plain": plain.sample(n, progress=False).x, "matched": matched.sample(n, progress=False).x}
    before, arrival, alpha = (torch.stack(part) for part in zip(*plain.coins, strict=True))
    errors = {name: torch.zeros(GROUPS, dtype=torch.float64) for name in ("plain", "recycled", "matched")}
    for name, f in problem.scalars.items():
        values = {key: _by_chain(f, x, n) for key, x in draws.items()}
        new, old = (_by_chain(f, x.flatten(0, 1), n) for x in (arrival, before))
        values["recycled"] = alpha * new + (1 - alpha) * old
        for key, v in values.items():
            mean = v.reshape(n, GROUPS, CHAINS).mean((0, 2))
            errors[key] += (mean - problem.truths[name]).square() / problem.variances[name] / len(problem.scalars)
    return {key: e * BUDGET / problem.walk_rows for key, e in errors.items()}


def _by_chain(f: Any, x: Tensor, n: int) -> Tensor:
    values: Tensor = f(x).to(torch.float64)
    return values.reshape(n, -1)


def table() -> str:
    rows = []
    for name in PROBLEMS:
        parts = [costs(chosen(name), seed) for seed in range(SEEDS)]
        all_of = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        change = all_of["recycled"] - all_of["plain"]
        cells = [_stated(all_of[key]) for key in ("plain", "recycled", "matched")]
        rows.append([name, *cells, _stated(change)])
    note = f"{SEEDS * GROUPS} replicates of {CHAINS} chains, {BUDGET:,} rows each with the pilot."
    return markdown(["problem", "plain", "recycled", "matched", "recycled less plain"], rows) + f"\n\n{note}"


def _stated(values: Tensor) -> str:
    return f"{float(values.mean()):.2f} ± {float(values.std()) / math.sqrt(len(values)):.2f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--print", action="store_true", help="print the table instead of writing it into the page")
    torch.set_num_threads(1)
    if parser.parse_args().print:
        print(table())
    else:
        fill(PAGE, {"trials": table()})
