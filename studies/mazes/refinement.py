"""Change the goal while it runs: a way-point is added to a chain that already plans."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import crepe_diffusion as cd
from crepe_diffusion.run.files import publish
from studies.mazes.evaluate import ends, judge, passes
from studies.mazes.maze import Cell
from studies.mazes.model import load
from studies.mazes.stitch import Style, plan_target, segments_for, way_point_term

__all__ = ["Refinement", "refine"]


@dataclass(frozen=True)
class Refinement:
    """A task, and the cell that plans are to pass from iteration `n_before` on."""

    task: int = 1
    cell: Cell = (5, 10)
    n_before: int = 600
    n_after: int = 240
    n_chains: int = 3
    weights: str = "giant"
    seed: int = 0
    slack: float = 1.4


def refine(case: Refinement, folder: Path, style: Style | None = None) -> Iterator[dict[str, Any]]:
    """Yields success and passing of every iteration; `folder` gets them as JSON and every chain's plans as npz."""
    style = style or Style()
    maze, model = load(case.weights)
    task = maze.tasks[case.task - 1]
    start, goal = ends(maze, task)
    point = maze.xy(case.cell)
    n = segments_for(maze, task, slack=case.slack)
    explorer = style.explorer()
    assert explorer is not None
    chain = cd.ReplicaExchange(
        plan_target(maze, model, task, n, style),
        style.ladder(),
        n_chains=case.n_chains,
        seed=case.seed,
        proposal=cd.Proposal(clip=style.clip),
        explorer=explorer,
        nonfinite="reject",
    )
    log, plans = [], []
    for i in range(1, case.n_before + case.n_after + 1):
        if i == case.n_before + 1:
            chain.target = replace(
                chain.target, rewards=(*chain.target.rewards, way_point_term(maze, model, n, style, point))
            )
            chain.explorer = replace(explorer, chance=1.0)  # at once, now that the target has changed
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
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / "refinement.npz", plans=torch.stack(plans).numpy().astype(np.float32))
    publish(folder / "refinement.json", json.dumps({"case": asdict(case), "log": log}).encode())
