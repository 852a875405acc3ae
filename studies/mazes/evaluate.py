"""Whether a plan succeeds: by its geometry, and by driving it in OGBench."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from studies.mazes.maze import Cell, Maze

__all__ = ["TOLERANCE", "Verdict", "drive", "ends", "judge", "looks_like_data", "passes"]

TOLERANCE = 0.45
"""How far start, goal and junctions may be off, in units of the maze (a cell is 4)."""


@dataclass(frozen=True)
class Verdict:
    """What each plan fulfils, one boolean per plan."""

    start: Tensor
    goal: Tensor
    junctions: Tensor
    walls: Tensor

    @property
    def success(self) -> Tensor:
        return self.start & self.goal & self.junctions & self.walls


def judge(maze: Maze, plans: Tensor, start: Tensor, goal: Tensor, tolerance: float = TOLERANCE) -> Verdict:
    """The paper's criterion, for plans (n, segments, steps, 2) in units of the maze."""
    gaps = (plans[:, :-1, -1] - plans[:, 1:, 0]).norm(dim=-1)
    return Verdict(
        start=(plans[:, 0, 0] - start).norm(dim=-1) < tolerance,
        goal=(plans[:, -1, -1] - goal).norm(dim=-1) < tolerance,
        junctions=(gaps < tolerance).all(1),
        walls=~maze.in_wall(plans).flatten(1).any(1),
    )


def passes(plans: Tensor, point: Tensor, tolerance: float = TOLERANCE) -> Tensor:
    """Whether some point of each plan comes within the tolerance of a way-point."""
    return ((plans - point).norm(dim=-1).flatten(1) < tolerance).any(1)


def looks_like_data(maze: Maze, x: Tensor, data: Tensor) -> dict[str, float]:
    """Single trajectories (n, steps, 2) compared with real ones: shares out of walls, total variation of statistics."""

    def histogram(values: Tensor, edges: Tensor) -> Tensor:
        inside = (
            values.flatten().cpu().clamp(float(edges[0]), float(edges[-1]))
        )  # values beyond the ends count in the last bins
        return torch.histogram(inside, edges)[0] / values.numel()

    def tv(f: Any, edges: Tensor) -> float:
        return float((histogram(f(x), edges) - histogram(f(data), edges)).abs().sum() / 2)

    n_columns = len(maze.rows[0])

    def cell(z: Tensor) -> Tensor:
        row, column = maze.cells(z[:, z.shape[1] // 2])
        return (row * n_columns + column).float()

    return {
        "out of walls": float((~maze.in_wall(x).any(1)).float().mean()),
        "out of walls, data": float((~maze.in_wall(data).any(1)).float().mean()),
        "TV of cells": tv(cell, torch.arange(len(maze.rows) * n_columns + 1.0) - 0.5),
        "TV of step lengths": tv(lambda z: z.diff(dim=1).norm(dim=-1), torch.linspace(0, 0.6, 61)),
        "TV of displacement": tv(lambda z: (z[:, -1] - z[:, 0]).norm(dim=-1), torch.linspace(0, 16, 33)),
    }


def drive(
    env: Any, plan: Tensor, start: Tensor, goal: Tensor, n_steps: int = 1000, ahead: int = 5
) -> tuple[bool, np.ndarray]:
    """Follow a plan in OGBench: always head for the point a few steps ahead of the one reached.

    Returns whether the agent reached the goal by the environment's own rule, and where it went.
    """
    path = plan.reshape(-1, 2).double().numpy()
    env.reset(seed=0)
    env.set_goal(goal_xy=goal.double().numpy())
    env.set_xy(start.double().numpy())
    at, trace = 0, [env.get_xy()]
    for _ in range(n_steps):
        window = path[at : at + 2 * ahead]
        at += int(np.linalg.norm(window - trace[-1], axis=1).argmin())
        way = path[min(at + ahead, len(path) - 1)] - trace[-1]
        action = way / max(0.2, float(np.linalg.norm(way)))  # a step moves by a fifth of the action
        info = env.step(action)[-1]
        trace.append(env.get_xy())
        if info["success"]:
            return True, np.asarray(trace)
    return False, np.asarray(trace)


def ends(maze: Maze, task: tuple[Cell, Cell]) -> tuple[Tensor, Tensor]:
    """Start and goal of a task, in units of the maze."""
    return maze.xy(task[0]), maze.xy(task[1])
