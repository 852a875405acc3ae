"""What did it? Every sampler with and without restitching, at equal network rows, on tasks and on other pairs of cells.

A method yields plans as it goes on, with the rows spent so far. Weighted particles of a pass are resampled among
themselves first, so that every plan counts once: a user takes plans, not weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import crepe_diffusion as cd
from studies.mazes.evaluate import ends, judge
from studies.mazes.maze import Cell, Maze
from studies.mazes.model import load_maze_model
from studies.mazes.stitch import Style, length_term, path_length, plan_target, segments_for
from studies.mazes.study import measured
from studies.shared.pages import markdown
from studies.shared.results import Results

__all__ = ["METHODS", "Case", "cases", "other_pairs", "routes", "run_case", "table"]

N_PARTICLES = 16
LONGEST = 0.86
"""Agents cut corners: a plan may be shorter than the way between the middles of cells."""
Plans = Iterator[tuple[Tensor, int]]


def _options(style: Style) -> dict[str, Any]:
    return {"proposal": cd.Proposal(clip=style.clip), "nonfinite": "reject"}


def exchange(target: cd.Target, style: Style, seed: int, restitching: bool) -> Plans:
    explorer = style.explorer() if restitching else None
    chain = cd.ReplicaExchange(target, style.ladder(), seed=seed, explorer=explorer, **_options(style))
    while True:
        yield chain.output(), chain.evaluate.counts.rows
        chain.step()


def particles(target: cd.Target, style: Style, seed: int, restitching: bool, weighted: bool = True) -> Plans:
    """Passes of SMC; without weights, every plan of a pool goes down by the guided proposal and counts."""
    smc = cd.SMC(
        target,
        style.ladder(),
        n_particles=N_PARTICLES,
        ess_threshold=0.5 if weighted else 0.0,
        starter=style.explorer() if restitching else None,
        seed=seed,
        **_options(style),
    )
    while True:
        out = smc.sample()
        yield out.resampled(cd.Stream(seed).at(smc.iteration)) if weighted else out.x, out.evaluations.rows


def gibbs(target: cd.Target, style: Style, seed: int, restitching: bool) -> Plans:
    starter = style.explorer() if restitching else None
    chain = cd.ParticleGibbs(
        target, style.ladder(), n_particles=N_PARTICLES, starter=starter, seed=seed, **_options(style)
    )
    while True:
        out = chain.sample(1)
        chosen = cd.Stream(seed).at("draws", chain.iteration).categorical(out.log_weights[0].expand(N_PARTICLES, -1))
        yield out.x[chosen], out.evaluations.rows


def filtered(target: cd.Target, style: Style, seed: int) -> Plans:
    """Plain trajectories joined at the data level: no guidance, no descent."""
    low = style.ladder().levels[:2].tolist()
    starter = cd.stitching.Restitch(style.n_candidates, between=(0.9 * low[0], 1.1 * low[0]), n_steps=60)
    smc = cd.SMC(target, style.ladder(), n_particles=N_PARTICLES, starter=starter, seed=seed, **_options(style))
    while True:
        try:
            out = smc.sample()
        except cd.NonFiniteError:  # no plan can be made of this pool; the next one has other candidates
            smc.iteration += 1
            yield smc.evaluate.empty(0), smc.evaluate.counts.rows
            continue
        yield out.x, out.evaluations.rows


METHODS: dict[str, Callable[[cd.Target, Style, int], Plans]] = {
    "replica exchange": partial(exchange, restitching=False),
    "SMC": partial(particles, restitching=False),
    "particle Gibbs": partial(gibbs, restitching=False),
    "trajectories joined at the data": filtered,
    "pool + guided descent": partial(particles, restitching=True, weighted=False),
    "pool + SMC": partial(particles, restitching=True),
    "pool + particle Gibbs": partial(gibbs, restitching=True),
    "replica exchange with restitching": partial(exchange, restitching=True),
}


@dataclass(frozen=True)
class Case:
    """One method on one pair of cells, with a budget of network rows.

    `longest` bounds the length of a plan, in lengths of the shortest way between the middles of cells; 0 is no bound.
    """

    method: str
    start: Cell
    goal: Cell
    rows: int = 200_000
    weights: str = "giant"
    seed: int = 0
    longest: float = 0.0
    style: Style = field(default_factory=lambda: Style(n_levels=61))

    @property
    def result(self) -> str:
        kind = f"short {self.longest:g}" if self.longest else "credit"
        return f"{kind} {self.weights} {self.method} {self.start} {self.goal} seed{self.seed}"


def other_pairs(maze: Maze, n: int, seed: int = 1) -> list[tuple[Cell, Cell]]:
    """Pairs of cells at least half as far apart as any, none of them a task; nothing was tuned on them."""
    steps = {(a, b): int(d[a]) for b in maze.free for d in [maze.distances(b)] for a in maze.free}
    far = [pair for pair, d in steps.items() if 2 * d >= max(steps.values()) and pair not in maze.tasks]
    chosen = np.random.default_rng(seed).choice(len(far), n, replace=False)
    return [far[i] for i in chosen]


def cases(maze: Maze, n_other: int, rows: int, weights: str) -> list[Case]:
    """All methods on all pairs; those with pools also on the tasks with a bound on the length of the whole plan."""
    pairs = [*maze.tasks, *other_pairs(maze, n_other)]
    all_of_them = [Case(method, *pair, rows=rows, weights=weights) for pair in pairs for method in METHODS]
    pooled = [case for case in all_of_them if "pool" in case.method or "with restitching" in case.method]
    tied = [replace(case, longest=LONGEST) for case in pooled if (case.start, case.goal) in maze.tasks]
    return [*all_of_them, *tied]


def routes(maze: Maze, plans: Tensor) -> list[frozenset[int]]:
    """The cells that each plan (n, segments, steps, 2) touches."""
    row, column = maze.cells(plans.flatten(1, 2))
    return [frozenset(cells) for cells in (row * len(maze.rows[0]) + column).tolist()]


def run_case(case: Case, results: Results) -> dict[str, Any]:
    """Success of every plan, and the different routes of those that succeed, along the rows."""
    record = measured(results, case.result, asdict(case))
    if record is not None:
        return record
    torch.set_num_threads(1)
    maze, model = load_maze_model(case.weights)
    task = (case.start, case.goal)
    start, goal = ends(maze, task)
    target = plan_target(maze, model, task, segments_for(maze, task), case.style)
    limit = case.longest * maze.distance(*task) * maze.unit or np.inf
    if case.longest:
        target = replace(target, rewards=(*target.rewards, length_term(maze, case.style, limit)))
    found: set[frozenset[int]] = set()
    log = []
    for x, rows in METHODS[case.method](target, case.style, case.seed):
        plans = maze.unnormalise(x)
        success = judge(maze, plans, start, goal).success & (path_length(plans) < limit + 1)
        found |= set(routes(maze, plans[success]))
        log.append({"rows": rows, "plans": len(x), "success": int(success.sum()), "routes": len(found)})
        if rows >= case.rows:
            break
    record = {"settings": asdict(case), "log": log}
    results.save(case.result, record)
    return record


def table(records: list[dict[str, Any]], tasks: list[tuple[Cell, Cell]]) -> str:
    """One row per method: success on the tasks and on other pairs, rows to the first success, routes per 1e5 rows."""
    rows = []
    for method in METHODS:
        mine = [r for r in records if r["settings"]["method"] == method]
        if not mine:
            continue
        pairs = {(tuple(r["settings"]["start"]), tuple(r["settings"]["goal"])): r["log"] for r in mine}
        shares = {pair: _share(log) for pair, log in pairs.items()}
        known, other = ([s for pair, s in shares.items() if (pair in tasks) == mine] for mine in (True, False))
        first = [next((line["rows"] for line in log if line["success"]), np.inf) for log in pairs.values()]
        rate = [1e5 * log[-1]["routes"] / log[-1]["rows"] for log in pairs.values()]
        solved = sum(np.isfinite(first))
        rows.append(
            [
                method,
                *(f"{100 * np.mean(s):.0f} %" if s else "-" for s in (known, other)),
                f"{solved} of {len(pairs)}",
                f"{np.median(first):.2g}" if solved > len(first) / 2 else "-",
                f"{np.mean(rate):.1f}",
            ]
        )
    header = [
        "method",
        "success, 5 tasks",
        "other pairs",
        "pairs solved",
        "rows to the first success",
        "routes per 1e5 rows",
    ]
    return markdown(header, rows)


def _share(log: list[dict[str, int]]) -> float:
    return sum(line["success"] for line in log) / max(1, sum(line["plans"] for line in log))
