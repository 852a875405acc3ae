"""Any way-point, start or goal may change while a chain runs: random changes off the present route.

A chain of particle Gibbs plans from pools (`stitching.Restitch` as its starter). After a few sweeps the task changes to
something that none of its plans fulfils. The next sweep draws a new pool for it and keeps nothing of the old plan.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

import crepe_diffusion as cd
from studies.mazes.credit import N_PARTICLES, other_pairs, routes
from studies.mazes.evaluate import ends, judge, passes
from studies.mazes.maze import Cell, Maze
from studies.mazes.model import load_maze_model
from studies.mazes.pictures import Panel
from studies.mazes.stitch import STEP, Style, plan_target, segments_for, way_point_term
from studies.mazes.study import measured
from studies.shared.pages import markdown
from studies.shared.results import Results

__all__ = ["KINDS", "LOOKED_AT", "Change", "panels", "run_change", "table"]

LOOKED_AT = 20
"""Seeds below this one showed the fault that was mended in particle Gibbs; later ones had not been looked at."""
KINDS = ("way-point", "goal", "start")


@dataclass(frozen=True)
class Change:
    """One random task and one random change of it, both drawn from the seed."""

    kind: str
    seed: int
    n_before: int = 3
    n_after: int = 1
    weights: str = "giant"
    slack: float = 1.6
    style: Style = field(default_factory=lambda: Style(n_levels=61))

    @property
    def result(self) -> str:
        return f"change {self.weights} {self.kind} seed{self.seed}"


def run_change(case: Change, results: Results) -> dict[str, Any]:
    """Success and passing of the plans of every sweep, by weight; before the change, and after it for the new task."""
    record = measured(results, case.result, asdict(case))
    if record is not None:
        return record
    torch.set_num_threads(1)
    maze, model = load_maze_model(case.weights)
    task = other_pairs(maze, 1, seed=100 + case.seed)[0]
    n = segments_for(maze, task, slack=case.slack)
    chain = cd.ParticleGibbs(
        plan_target(maze, model, task, n, case.style),
        case.style.ladder(),
        n_particles=N_PARTICLES,
        starter=case.style.explorer(),
        proposal=cd.Proposal(clip=case.style.clip),
        nonfinite="reject",
        seed=case.seed,
    )
    fresh = chain.evaluate.counts.rows  # what a first pass costs
    touched: set[int] = set()
    log, best = [], []

    def sweep(task: tuple[Cell, Cell], via: Cell | None) -> None:
        out = chain.sample(1)
        plans, weights = maze.unnormalise(out.x), out.weights
        success = judge(maze, plans, *ends(maze, task)).success
        passed = torch.ones_like(success) if via is None else passes(plans, maze.xy(via))
        touched.update(*routes(maze, plans))
        both = success & passed
        log.append({key: float(weights @ v.double()) for key, v in (("success", success), ("fulfilled", both))})
        log[-1]["rows"] = out.evaluations.rows
        best.append(plans[weights.argmax()])

    for _ in range(case.n_before):
        sweep(task, None)
    new = _changed(maze, case, task, n, touched)
    before, via = task, new if case.kind == "way-point" else None
    if case.kind == "goal":
        task = (task[0], new)
    if case.kind == "start":
        task = (new, task[1])
    target = plan_target(maze, model, task, n, case.style)
    if via is not None:
        term = way_point_term(maze, model, n, case.style, maze.xy(via))
        target = replace(target, rewards=(*target.rewards, term))
    chain.target = target
    for _ in range(case.n_after):
        sweep(task, via)
    record = {"settings": asdict(case), "before": before, "task": task, "new": new, "fresh": fresh, "log": log}
    results.save(case.result, record, plans=torch.stack([best[case.n_before - 1], best[-1]]).numpy().astype(np.float32))
    return record


def _changed(maze: Maze, case: Change, task: tuple[Cell, Cell], n: int, touched: set[int]) -> Cell:
    """A cell that no plan has touched, and from which the new way is not longer than n segments reach."""
    reach = n * 64 * STEP / maze.unit / 1.25
    start, goal = (maze.distances(cell) for cell in task)
    length = {"way-point": start + goal, "goal": start, "start": goal}[case.kind]
    away = [c for c in maze.free if c[0] * len(maze.rows[0]) + c[1] not in touched and 2 <= length[c] <= reach]
    if not away:
        raise cd.InputError(f"every cell within reach of seed {case.seed} is on the way already: choose another seed")
    return away[int(np.random.default_rng(case.seed).integers(len(away)))]


def table(records: list[dict[str, Any]]) -> str:
    """One row per kind of change; a change is met if most plans (by weight) of the sweep after it fulfil the new task.

    Seeds below `LOOKED_AT` are those on which a fault was found and mended; the others have a column of their own.
    """
    rows = []
    for kind in (*KINDS, "all"):
        mine = [r for r in records if kind in ("all", r["settings"]["kind"])]
        old = [r for r in mine if r["settings"]["seed"] < LOOKED_AT]
        fresh = [r for r in mine if r["settings"]["seed"] >= LOOKED_AT]
        spent = [r["log"][-1]["rows"] - r["log"][r["settings"]["n_before"] - 1]["rows"] for r in mine]
        if mine:
            numbers = (f"{np.mean(spent):.2g}", f"{np.mean([r['fresh'] for r in mine]):.2g}")
            rows.append([kind, _met(old), _met(fresh), *numbers])
    header = ["change", "met, seeds looked at", "met, fresh seeds", "rows of this sweep", "rows of a first pass"]
    return markdown(header, rows)


def _met(records: list[dict[str, Any]]) -> str:
    return f"{sum(r['log'][-1]['fulfilled'] > 0.5 for r in records)} of {len(records)}" if records else "-"


def panels(maze: Maze, record: dict[str, Any], results: Results, name: str) -> list[Panel]:
    """The plan of most weight before the change, and after it."""
    before, after = (torch.from_numpy(plan) for plan in results.arrays(name)["plans"])
    old, new = (ends(maze, (tuple(task[0]), tuple(task[1]))) for task in (record["before"], record["task"]))
    kind = record["settings"]["kind"]
    via = maze.xy(tuple(record["new"])) if kind == "way-point" else None
    change = f"a {kind}" if kind == "way-point" else f"another {kind}"
    return [(f"before {change}", before, *old, None), ("after it", after, *new, via)]
