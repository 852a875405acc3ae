"""Any way-point, start or goal may change while a chain runs: random changes off the present route.

A chain of particle Gibbs plans from pools (`stitching.Restitch` as its starter). After a few sweeps the task changes to
something that none of its plans fulfils, and the chain goes on with what it has. A change costs nothing but sweeps: the
kept plan has hardly any weight under the new task, and plans of the next pool take its place.
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
from studies.mazes.stitch import STEP, Style, plan_target, segments_for, way_point_term
from studies.mazes.study import measured
from studies.shared.pages import markdown
from studies.shared.results import Results

__all__ = ["KINDS", "Change", "run_change", "table"]

KINDS = ("way-point", "goal", "start")


@dataclass(frozen=True)
class Change:
    """One random task and one random change of it, both drawn from the seed."""

    kind: str
    seed: int
    n_before: int = 3
    n_after: int = 2
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
    log = []

    def sweep(task: tuple[Cell, Cell], via: Cell | None) -> None:
        out = chain.sample(1)
        plans, weights = maze.unnormalise(out.x), out.weights
        success = judge(maze, plans, *ends(maze, task)).success
        passed = torch.ones_like(success) if via is None else passes(plans, maze.xy(via))
        touched.update(*routes(maze, plans))
        both = success & passed
        log.append({key: float(weights @ v.double()) for key, v in (("success", success), ("fulfilled", both))})
        log[-1]["rows"] = out.evaluations.rows

    for _ in range(case.n_before):
        sweep(task, None)
    new = _changed(maze, case, task, n, touched)
    via = new if case.kind == "way-point" else None
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
    record = {"settings": asdict(case), "task": task, "new": new, "fresh": fresh, "log": log}
    results.save(case.result, record)
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
    """One row per kind of change; a change is met if most plans of the last sweep fulfil the new task."""
    rows = []
    for kind in KINDS:
        mine = [r for r in records if r["settings"]["kind"] == kind]
        if not mine:
            continue
        n = mine[0]["settings"]["n_before"]
        after = np.asarray([[line["fulfilled"] for line in r["log"][n:]] for r in mine])
        spent = [r["log"][-1]["rows"] - r["log"][n - 1]["rows"] for r in mine]
        rows.append(
            [
                kind,
                f"{(after[:, -1] > 0.5).sum()} of {len(mine)}",
                *(f"{100 * share:.0f} %" for share in after.mean(0)),
                f"{np.mean(spent):.2g}",
                f"{np.mean([r['fresh'] for r in mine]):.2g}",
            ]
        )
    sweeps = [f"fulfilled in sweep {i + 1}" for i in range(after.shape[1])]
    return markdown(["change", "met", *sweeps, "rows of these sweeps", "rows of a first pass"], rows)
