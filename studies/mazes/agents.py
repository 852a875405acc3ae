"""Two agents that change places and must not meet: a reward of the whole plan, for every sampler at equal rows.

Both agents are one plan: the segments of the first, and then those of the second. Each has its start, its goal and its
junctions, which a pool sums over. That they keep their distance ties every segment of one to a segment of the other,
half a plan away, so a pass over neighbours cannot sum over it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.stitching import Junctions, Reach, Segments
from studies.mazes.credit import METHODS, Plans, other_pairs
from studies.mazes.evaluate import ends, judge
from studies.mazes.maze import Cell, Maze
from studies.mazes.model import load_maze_model
from studies.mazes.pictures import Panel
from studies.mazes.stitch import Style, matched, plan_term, segments_for, weight_of
from studies.mazes.study import measured
from studies.shared.pages import markdown
from studies.shared.results import Results

__all__ = [
    "Apart",
    "JoinedTwice",
    "Pair",
    "both_arrive",
    "distance",
    "pair_target",
    "pairs",
    "panels",
    "run_pair",
    "table",
]

AIM, APART = 9.0, 8.0
"""How far the reward wants the agents to be from one another at any time, and how far they have to be: two cells, so
that they cannot pass by each other and have to take different ways."""
TOLD = ("pool and descent", "pool", "nothing")
"""What knows that agents keep their distance. Its gradient guides the descent, or it only chooses plans of a pool."""
N_PLANS = (64, 4096)
"""Among how many plans of a pool the reward chooses; this costs no network rows."""
POOLED = [name for name in METHODS if "pool" in name or "with restitching" in name]


@dataclass(frozen=True)
class Apart:
    """At no time are the agents nearer than `limit`: minus half the squared shortfalls, in units of `width`."""

    limit: float
    width: float

    def __call__(self, x: Tensor) -> Tensor:
        shortfall = (self.limit - distance(x)).clamp(min=0)
        return -0.5 * (shortfall / self.width).square().sum(1)


def distance(plans: Tensor) -> Tensor:
    """How far the two agents of plans (n, 2 J, steps, 2) are apart at each time, (n, J * steps)."""
    one, two = (half.flatten(1, 2) for half in plans.chunk(2, dim=1))
    return ((one - two).square().sum(-1) + 1e-12).sqrt()


@dataclass(frozen=True)
class JoinedTwice(Junctions):
    """Each segment begins where the last one ended, or the first agent is at its goal and the second one begins.

    The same function for all neighbours, as a pool needs it. Which junction is the second agent's beginning is said by
    the rewards of the ends.
    """

    goal: tuple[float, ...] = ()
    start: tuple[float, ...] = ()

    def _open(self, end: Tensor, begin: Tensor) -> Tensor:
        goal, start = end.new_tensor(self.goal), begin.new_tensor(self.start)
        return torch.minimum(self.gap(end - begin), self.gap(end - goal) + self.gap(begin - start))

    def __call__(self, x: Tensor) -> Tensor:
        return -self.weight * self._open(x[:, :-1, -1], x[:, 1:, 0]).sum(-1)

    def link(self, left: Tensor, right: Tensor) -> Tensor:
        return -self.weight * self._open(left[..., :, None, -1, :], right[..., None, :, 0, :])


def pair_target(
    maze: Maze, model: cd.models.Denoiser, task: tuple[Cell, Cell], n: int, style: Style, told: str = TOLD[0]
) -> cd.Target:
    """One agent goes from start to goal and the other from goal to start, with n segments each."""
    if told not in TOLD:
        raise cd.InputError(f"told must be one of {', '.join(map(repr, TOLD))}, got {told!r}")
    start, goal = (tuple(maze.normalise(p).tolist()) for p in ends(maze, task))
    w = weight_of(maze, style)
    first, last, link = matched(maze, model, style)
    rewards = [
        plan_term("start of one", Reach(start, weight=w, l1=0.0), style, first),
        plan_term("goal of one", Reach(goal, n - 1, -1, weight=w, l1=0.0), style, last),
        plan_term("start of two", Reach(goal, n, 0, weight=w, l1=0.0), style, first),
        plan_term("goal of two", Reach(start, 2 * n - 1, -1, weight=w, l1=0.0), style, last),
        plan_term("junctions", JoinedTwice(weight=w, l1=0.0, goal=goal, start=goal), style, link),
    ]
    if told != "nothing":
        keep = plan_term("apart", Apart(AIM / maze.scale, 1 / maze.scale), style, cd.anneal.power(2))
        rewards.append(keep if told == TOLD[0] else replace(keep, guidance="none"))
    return replace(Segments(model, 2 * n).as_target(), rewards=tuple(rewards))


@dataclass(frozen=True)
class Pair:
    """One method on two agents that change places."""

    method: str
    start: Cell
    goal: Cell
    told: str = TOLD[0]
    rows: int = 60_000
    weights: str = "giant"
    seed: int = 0
    slack: float = 1.6
    style: Style = field(default_factory=lambda: Style(n_levels=61))

    @property
    def label(self) -> str:
        how = f"{self.method}, {self.style.n_plans:,} plans"
        return how if self.told == TOLD[0] else f"{how}, told: {self.told}"

    @property
    def result(self) -> str:
        return f"agents {self.weights} {self.label} {self.start} {self.goal} seed{self.seed}"


def pairs(maze: Maze, n_other: int, rows: int, weights: str, seed: int = 0) -> list[Pair]:
    """All samplers with pools, on all tasks and on other pairs of cells; and guided descents that are told less."""
    ends_of = [*maze.tasks, *other_pairs(maze, n_other)]
    told = [Pair(m, *task, rows=rows, weights=weights, seed=seed) for m in POOLED for task in ends_of]
    less = [replace(case, told=what) for what in TOLD[1:] for case in told if case.method == POOLED[0]]
    few, many = ([replace(c, style=replace(c.style, n_plans=n)) for c in told + less] for n in N_PLANS)
    return few[: len(told)] + many


def run_pair(case: Pair, results: Results) -> dict[str, Any]:
    """Of every pair of plans: whether both agents arrive, whether they keep their distance, and both."""
    record = measured(results, case.result, asdict(case))
    if record is not None:
        return record
    torch.set_num_threads(1)
    maze, model = load_maze_model(case.weights)
    task = (case.start, case.goal)
    n = segments_for(maze, task, slack=case.slack)
    target = pair_target(maze, model, task, n, case.style, case.told)
    method: Callable[[cd.Target, Style, int], Plans] = METHODS[case.method]
    log, shown = [], None
    for x, rows in method(target, case.style, case.seed):
        plans = maze.unnormalise(x)
        arrived, near = both_arrive(maze, plans, task), distance(plans).amin(1)
        success = arrived & (near >= APART)
        if success.any():
            shown = plans[success][0]
        counts = {"arrived": arrived, "apart": near >= APART, "success": success}
        log.append({"rows": rows, "plans": len(x), **{key: int(flag.sum()) for key, flag in counts.items()}})
        if rows >= case.rows:
            break
    record = {"settings": asdict(case), "n_segments": n, "log": log}
    results.save(case.result, record, **({} if shown is None else {"plan": shown.numpy()}))
    return record


def both_arrive(maze: Maze, plans: Tensor, task: tuple[Cell, Cell]) -> Tensor:
    """Whether each of two plans succeeds by itself."""
    (start, goal), (one, two) = ends(maze, task), plans.chunk(2, dim=1)
    return judge(maze, one, start, goal).success & judge(maze, two, goal, start).success


def table(records: list[dict[str, Any]], tasks: list[tuple[Cell, Cell]]) -> str:
    """One row per method: shares of pairs of plans on all tasks and other pairs together, and how many it solves."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        chosen = record["settings"]
        style = Style(n_plans=chosen["style"]["n_plans"])
        groups.setdefault(Pair(chosen["method"], (0, 0), (0, 0), chosen["told"], style=style).label, []).append(record)
    order = [
        Pair(method, (0, 0), (0, 0), told, style=Style(n_plans=n)).label
        for told in TOLD
        for n in N_PLANS
        for method in POOLED
    ]
    rows = []
    for label in sorted(groups, key=order.index):
        logs = [r["log"] for r in groups[label]]
        total = sum(line["plans"] for log in logs for line in log)
        count = {key: sum(line[key] for log in logs for line in log) for key in ("arrived", "apart", "success")}
        solved = {True: 0, False: 0}
        of = {True: 0, False: 0}
        for r in groups[label]:
            known = (tuple(r["settings"]["start"]), tuple(r["settings"]["goal"])) in tasks
            solved[known] += any(line["success"] for line in r["log"])
            of[known] += 1
        rows.append(
            [
                label,
                *(f"{100 * n / total:.0f} %" for n in count.values()),
                *(f"{solved[known]} of {of[known]}" if of[known] else "-" for known in (True, False)),
                f"{sum(log[-1]['rows'] for log in logs) / len(logs):.2g}",
            ]
        )
    header = ["method", "both arrive", "keep apart", "all of it", "tasks solved", "other pairs solved", "rows"]
    return markdown(header, rows)


def panels(maze: Maze, results: Results, weights: str) -> list[Panel]:
    """The last pair of plans of SMC that does all of it, one for each task."""
    found: list[Panel] = []
    for k, task in enumerate(maze.tasks, 1):
        name = Pair(POOLED[1], *task, weights=weights, style=Style(n_levels=61, n_plans=N_PLANS[-1])).result
        if name in results and "plan" in results.arrays(name):
            plan = torch.from_numpy(results.arrays(name)["plan"])
            title = f"task {k}, {len(plan) // 2} segments each, {float(distance(plan[None]).amin()):.1f} apart"
            found.append((title, plan, *ends(maze, task), None))
    return found
