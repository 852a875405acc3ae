"""Change the task while the chains run: a way-point is added to chains that already plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

import crepe_diffusion as cd
from studies.mazes.evaluate import ends, judge, passes
from studies.mazes.maze import Cell
from studies.mazes.model import load_maze_model
from studies.mazes.stitch import Style, plan_target, segments_for, way_point_term
from studies.mazes.study import measured
from studies.shared.results import Results

__all__ = ["Refinement", "refine"]


@dataclass(frozen=True)
class Refinement:
    """A task, and the cell that plans must pass after iteration `n_before`."""

    task: int = 1
    cell: Cell = (5, 10)
    n_before: int = 600
    n_after: int = 240
    n_chains: int = 3
    weights: str = "giant"
    seed: int = 0
    slack: float = 1.4
    style: Style = field(default_factory=Style)


def refine(case: Refinement, results: Results) -> Iterator[dict[str, Any]]:
    """Yields success and passing of every iteration, and saves them at the end with the plans of every chain."""
    if measured(results, "refinement", asdict(case)):
        return
    maze, model = load_maze_model(case.weights)
    task = maze.tasks[case.task - 1]
    start, goal = ends(maze, task)
    point = maze.xy(case.cell)
    n = segments_for(maze, task, slack=case.slack)
    explorer = case.style.explorer()
    chain = cd.ReplicaExchange(
        plan_target(maze, model, task, n, case.style),
        case.style.ladder(),
        n_chains=case.n_chains,
        seed=case.seed,
        proposal=cd.Proposal(clip=case.style.clip),
        explorer=explorer,
        nonfinite="reject",
    )
    log, plans = [], []
    for i in range(1, case.n_before + case.n_after + 1):
        if i == case.n_before + 1:
            term = way_point_term(maze, model, n, case.style, point)
            chain.target = replace(chain.target, rewards=(*chain.target.rewards, term))
            chain.explorer = replace(explorer, chance=1.0)  # restitch at once, because the target has changed
        chain.step()
        chain.explorer = explorer
        x = maze.unnormalise(chain.output())
        line = {
            "iteration": i,
            "rows": chain.evaluate.counts.rows,
            "success": judge(maze, x, start, goal).success.tolist(),
            "passes": passes(x, point).tolist(),
        }
        log.append(line)
        plans.append(x)
        yield line
    record = {"settings": asdict(case), "log": log}
    results.save("refinement", record, plans=torch.stack(plans).numpy().astype(np.float32))
