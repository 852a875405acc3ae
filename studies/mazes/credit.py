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

__all__ = [
    "BLIND",
    "METHODS",
    "MOVES",
    "Case",
    "case_target",
    "cases",
    "other_pairs",
    "possible_ways",
    "routes",
    "routes_table",
    "run_case",
    "table",
    "way",
]

N_PARTICLES = 16
LONGEST = 0.86
"""Agents cut corners: a plan may be shorter than the way between the middles of cells."""
PACE = 2.8
"""Cells per segment of the longest ways that are counted: at full pace, an agent makes 3.2 along a straight line."""
Plans = Iterator[tuple[Tensor, int]]


def _options(style: Style) -> dict[str, Any]:
    return {"proposal": cd.Proposal(clip=style.clip), "nonfinite": "reject"}


def exchange(
    target: cd.Target, style: Style, seed: int, restitching: bool, explorer: cd.stitching.Restitch | None = None
) -> Plans:
    explorer = explorer or style.explorer() if restitching else None
    chain = cd.ReplicaExchange(target, style.ladder(), seed=seed, explorer=explorer, **_options(style))
    while True:
        yield chain.output(), chain.evaluate.counts.rows
        chain.step()


def particles(
    target: cd.Target,
    style: Style,
    seed: int,
    restitching: bool,
    weighted: bool = True,
    n_particles: int = N_PARTICLES,
) -> Plans:
    """Passes of SMC; without weights, every plan of a pool goes down by the guided proposal and counts."""
    smc = cd.SMC(
        target,
        style.ladder(),
        n_particles=n_particles,
        ess_threshold=0.5 if weighted else 0.0,
        starter=style.explorer() if restitching else None,
        seed=seed,
        **_options(style),
    )
    while True:
        out = smc.sample()
        yield out.resampled(cd.Stream(seed).at(smc.iteration)) if weighted else out.x, out.evaluations.rows


def gibbs(target: cd.Target, style: Style, seed: int, restitching: bool, n_particles: int = N_PARTICLES) -> Plans:
    starter = style.explorer() if restitching else None
    chain = cd.ParticleGibbs(
        target, style.ladder(), n_particles=n_particles, starter=starter, seed=seed, **_options(style)
    )
    while True:
        out = chain.sample(1)
        chosen = cd.Stream(seed).at("draws", chain.iteration).categorical(out.log_weights[0].expand(n_particles, -1))
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

MOVES: dict[str, Callable[[cd.Target, Style, int], Plans]] = {
    "passes of SMC": METHODS["pool + SMC"],
    "passes of SMC, 64 particles": partial(particles, restitching=True, n_particles=64),
    "guided descents, 64 plans per pool": partial(particles, restitching=True, weighted=False, n_particles=64),
    "particle Gibbs": METHODS["pool + particle Gibbs"],
    "particle Gibbs, 64 particles": partial(gibbs, restitching=True, n_particles=64),
    "replica exchange": METHODS["replica exchange with restitching"],
    "replica exchange, more levels": partial(
        exchange, restitching=True, explorer=cd.stitching.Restitch(512, chance=0.2, between=(0.03, 0.3))
    ),
}
"""What finds other routes: new pools, more plans per pool, or moves of a chain at one range of levels or at many."""

BLIND: dict[str, Callable[[cd.Target, Style, int], Plans]] = {
    **{name: MOVES[name] for name in MOVES if "64" in name},
    "replica exchange, few pools": partial(
        exchange, restitching=True, explorer=replace(Style(n_plans=1024).explorer(), chance=0.002)
    ),
}
"""For a reward without gradient: many particles, or a chain that spends nearly all of its rows on swaps."""
TABLES = {"routes": MOVES, "blind": BLIND}
"""The methods of the tables that have their own."""


@dataclass(frozen=True)
class Case:
    """One method on one pair of cells, with a budget of network rows, for one `table` of the page.

    `longest` bounds the length of a plan, in lengths of the shortest way between the middles of cells; 0 is no bound.
    The proposal does not follow the gradient of that bound if it is `blind`.
    """

    method: str
    start: Cell
    goal: Cell
    rows: int = 200_000
    weights: str = "giant"
    seed: int = 0
    longest: float = 0.0
    blind: bool = False
    slack: float = 1.25
    table: str = "credit"
    style: Style = field(default_factory=lambda: Style(n_levels=61))

    @property
    def result(self) -> str:
        return (
            f"{self.table} {self.weights} {self.method} {self.style.n_plans} plans {self.start} {self.goal}"
            f" seed{self.seed}"
        )


def other_pairs(maze: Maze, n: int, seed: int = 1) -> list[tuple[Cell, Cell]]:
    """Pairs of cells at least half as far apart as any, none of them a task; nothing was tuned on them."""
    steps = {(a, b): int(d[a]) for b in maze.free for d in [maze.distances(b)] for a in maze.free}
    far = [pair for pair, d in steps.items() if 2 * d >= max(steps.values()) and pair not in maze.tasks]
    chosen = np.random.default_rng(seed).choice(len(far), n, replace=False)
    return [far[i] for i in chosen]


def cases(maze: Maze, n_other: int, rows: int, weights: str, seed: int = 0) -> dict[str, list[Case]]:
    """The cases of each table. `credit`: all methods on all pairs. `short`: those with pools on the tasks, with a bound
    on the length of the whole plan and two numbers of plans that are drawn from a pool. `blind`: the same bound
    without its gradient, five times the rows, and larger batches. `routes`: what finds other routes, on the tasks that
    have three or more.
    """
    pairs = [*maze.tasks, *other_pairs(maze, n_other)]
    everything = [Case(m, *pair, rows=rows, weights=weights, seed=seed) for pair in pairs for m in METHODS]
    pooled = [case for case in everything if "pool" in case.method or "with restitching" in case.method]
    tied = [replace(c, table="short", longest=LONGEST) for c in pooled if (c.start, c.goal) in maze.tasks]
    tied = [replace(c, style=replace(c.style, n_plans=n)) for c in tied for n in (c.style.n_plans, 1024)]
    many = Style(n_levels=61, n_plans=1024)
    blind = [
        Case(m, *task, 5 * rows, weights, seed, LONGEST, blind=True, table="blind", style=many)
        for task in maze.tasks
        for m in BLIND
    ]
    moving = [
        Case(m, *task, rows=100_000, weights=weights, seed=seed, slack=1.6, table="routes")
        for task in maze.tasks
        if possible_ways(maze, task, segments_for(maze, task, slack=1.6)) > 2
        for m in MOVES
    ]
    return {"credit": everything, "short": tied, "blind": blind, "routes": moving}


def routes(maze: Maze, plans: Tensor) -> list[frozenset[int]]:
    """The cells that each plan (n, segments, steps, 2) touches."""
    row, column = maze.cells(plans.flatten(1, 2))
    return [frozenset(cells) for cells in (row * len(maze.rows[0]) + column).tolist()]


def way(maze: Maze, plan: Tensor) -> tuple[Cell, ...]:
    """The cells that a plan (segments, steps, 2) goes through one after the other, without going there and back.

    Where no four cells around a corner are all free, two plans with the same ends have the same way if and only if one
    can be moved onto the other within the corridors.
    """
    row, column = (c.tolist() for c in maze.cells(plan.flatten(0, 1)))
    found: list[Cell] = []
    for cell in zip(row, column, strict=True):
        for step in (*_around_a_corner(maze, found[-1], cell), cell) if found else (cell,):
            if len(found) > 1 and step == found[-2]:
                found.pop()
            elif not found or step != found[-1]:
                found.append(step)
    return tuple(found)


def _around_a_corner(maze: Maze, last: Cell, cell: Cell) -> tuple[Cell, ...]:
    """The free cell between two that touch at a corner, where one step has cut it."""
    if abs(last[0] - cell[0]) != 1 or abs(last[1] - cell[1]) != 1:
        return ()
    return tuple(c for c in ((last[0], cell[1]), (cell[0], last[1])) if maze.rows[c[0]][c[1]] == ".")[:1]


def possible_ways(maze: Maze, task: tuple[Cell, Cell], n_segments: int) -> int:
    """How many ways there are from start to goal that so many segments can reach."""
    ends_of = {(task[0], task[0]): 1}
    total = 0
    for _ in range(int(PACE * n_segments)):
        further: dict[tuple[Cell, Cell], int] = {}
        for (before, (i, j)), n in ends_of.items():
            for cell in ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)):
                if cell != before and maze.rows[cell[0]][cell[1]] == ".":
                    further[(i, j), cell] = further.get(((i, j), cell), 0) + n
        ends_of = further
        total += sum(n for (_, cell), n in ends_of.items() if cell == task[1])
    return total


def case_target(case: Case, maze: Maze, model: cd.models.Denoiser, n: int, limit: float) -> cd.Target:
    """Plans of n segments, at most as long as the limit."""
    target = plan_target(maze, model, (case.start, case.goal), n, case.style)
    if limit == np.inf:
        return target
    bound = length_term(maze, case.style, limit)
    bound = replace(bound, guidance="none") if case.blind else bound
    return replace(target, rewards=(*target.rewards, bound))


def run_case(case: Case, results: Results) -> dict[str, Any]:
    """Success of every plan, and the different routes and ways of those that succeed, along the rows."""
    record = measured(results, case.result, asdict(case))
    if record is not None:
        return record
    torch.set_num_threads(1)
    maze, model = load_maze_model(case.weights)
    start, goal = ends(maze, (case.start, case.goal))
    n = segments_for(maze, (case.start, case.goal), slack=case.slack)
    limit = case.longest * maze.distance(case.start, case.goal) * maze.unit or np.inf
    target = case_target(case, maze, model, n, limit)
    found: set[frozenset[int]] = set()
    ways: set[tuple[Cell, ...]] = set()
    log = []
    for x, rows in TABLES.get(case.table, METHODS)[case.method](target, case.style, case.seed):
        plans = maze.unnormalise(x)
        success = judge(maze, plans, start, goal).success & (path_length(plans) < limit + 1)
        found |= set(routes(maze, plans[success]))
        ways |= {way(maze, plan) for plan in plans[success]}
        line = {"rows": rows, "plans": len(x), "success": int(success.sum())}
        log.append({**line, "routes": len(found), "ways": len(ways)})
        if rows >= case.rows:
            break
    record = {"settings": asdict(case), "possible": possible_ways(maze, (case.start, case.goal), n), "log": log}
    results.save(case.result, record)
    return record


def table(records: list[dict[str, Any]], tasks: list[tuple[Cell, Cell]]) -> str:
    """One row per method: success on the tasks and on other pairs, rows to the first success, routes per 1e5 rows."""
    rows = []
    methods = TABLES.get(records[0]["settings"]["table"], METHODS)
    kinds = sorted({r["settings"]["style"]["n_plans"] for r in records})
    for method, n_plans in ((m, n) for m in methods for n in kinds):
        mine = [r for r in records if (r["settings"]["method"], r["settings"]["style"]["n_plans"]) == (method, n_plans)]
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
                method if len(kinds) == 1 else f"{method}, {n_plans} plans",
                *(f"{100 * np.mean(s):.0f} %" if s else "-" for s in (known, other)),
                f"{solved} of {len(pairs)}",
                f"{np.median(first):.2g}" if solved > len(first) / 2 else "-",
                f"{np.mean(rate):.1f}",
            ]
        )
    header = [
        "method",
        "success, tasks",
        "other pairs",
        "pairs solved",
        "rows to the first success",
        "routes per 1e5 rows",
    ]
    return markdown(header, rows)


def routes_table(records: list[dict[str, Any]]) -> str:
    """One row per method: the different ways of successful plans, of all tasks together, at equal rows."""
    rows = []
    for method in MOVES:
        mine = [r for r in records if r["settings"]["method"] == method]
        if not mine:
            continue
        logs = [r["log"] for r in mine]
        found, spent = sum(log[-1]["ways"] for log in logs), sum(log[-1]["rows"] for log in logs)
        second = [next((line["rows"] for line in log if line["ways"] > 1), np.inf) for log in logs]
        rows.append(
            [
                method,
                f"{100 * np.mean([_share(log) for log in logs]):.0f} %",
                f"{found} of {sum(r['possible'] for r in mine)}",
                f"{1e5 * found / spent:.2f}",
                f"{1e5 * sum(log[-1]['routes'] for log in logs) / spent:.1f}",
                f"{sum(np.isfinite(second))} of {len(second)}",
            ]
        )
    header = ["method", "success", "ways found", "ways per 1e5 rows", "sets of cells per 1e5 rows", "two ways or more"]
    return markdown(header, rows)


def _share(log: list[dict[str, int]]) -> float:
    return sum(line["success"] for line in log) / max(1, sum(line["plans"] for line in log))
