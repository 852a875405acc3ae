"""Plans from short trajectories: J copies of one model, coupled by rewards into a path from start to goal."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.stitching import Junctions, Matched, Reach, Restitch, Segments, WayPoint
from studies.mazes.evaluate import ends
from studies.mazes.maze import Cell, Maze

__all__ = [
    "PAPER",
    "Length",
    "Style",
    "length_term",
    "matched",
    "path_length",
    "plan_target",
    "plan_term",
    "segments_for",
    "terms",
    "way_point_term",
    "weight_of",
]

STEP = 0.2
"""How far one step of the agent goes, in units of the maze."""


@dataclass(frozen=True)
class Style:
    """How segments are coupled, and with which ladder and moves they are sampled.

    - `width`: the standard deviation of every gap in units of the maze, as a squared error; 0 takes the paper's
      rewards (absolute values and squares, with its constants) and its power-10 annealing instead;
    - `caution`: by how much to widen the model's own uncertainty, to which the annealing is matched;
    - `n_levels`, `substeps`, `sigma_min`, `sigma_max`, `n_finish`: the ladder;
    - `guidance`, `clip`: of the proposal;
    - `n_candidates`, `chance`, `between`, `n_plans`: of restitching, where it is used.
    """

    width: float = 0.08
    caution: float = 1.5
    n_levels: int = 121
    substeps: int = 1
    sigma_min: float = 0.003
    sigma_max: float = 20.0
    n_finish: int = 2
    guidance: str = "gradient"
    clip: float | None = 20.0
    n_candidates: int = 2048
    chance: float = 0.05
    between: tuple[float, float] = (0.07, 0.16)
    n_plans: int = 64

    def explorer(self) -> Restitch:
        return Restitch(self.n_candidates, self.chance, self.between, n_plans=self.n_plans)

    def ladder(self) -> cd.Ladder:
        return cd.ladder.karras(
            self.n_levels, self.sigma_min, self.sigma_max, substeps=self.substeps, n_finish=self.n_finish
        )


PAPER = Style(width=0.0, n_levels=601, sigma_min=0.001, n_finish=0, clip=None)


def segments_for(maze: Maze, task: tuple[Cell, Cell], length: int = 64, slack: float = 1.25) -> int:
    """Enough segments for the shortest path from start to goal at the agent's pace, times a slack."""
    steps = maze.distance(*task)
    if steps < 0:
        raise cd.InputError(f"there is no path from {task[0]} to {task[1]} in maze {maze.name!r}")
    return max(2, math.ceil(slack * steps * maze.unit / (STEP * length)))


def plan_target(
    maze: Maze, model: cd.models.Denoiser, task: tuple[Cell, Cell], n_segments: int, style: Style
) -> cd.Target:
    """The law of plans for a task. A way-point may be added at any time, by `way_point_term`."""
    target = Segments(model, n_segments).as_target()
    return replace(target, rewards=tuple(terms(maze, model, task, n_segments, style)))


def terms(
    maze: Maze, model: cd.models.Denoiser, task: tuple[Cell, Cell], n_segments: int, style: Style
) -> list[cd.Reward]:
    """Start, goal and junctions."""
    start, goal = (tuple(maze.normalise(p).tolist()) for p in ends(maze, task))
    if not style.width:
        strong, fading = 100.0 * n_segments, cd.anneal.power(10)
        return [
            plan_term("start", Reach(start, weight=strong), style, fading),
            plan_term("goal", Reach(goal, -1, -1, weight=strong), style, fading),
            plan_term("junctions", Junctions(), style, fading),
        ]
    w = weight_of(maze, style)
    first, last, link = matched(maze, model, style)
    return [
        plan_term("start", Reach(start, weight=w, l1=0.0), style, first),
        plan_term("goal", Reach(goal, -1, -1, weight=w, l1=0.0), style, last),
        plan_term("junctions", Junctions(weight=w, l1=0.0), style, link),
    ]


def way_point_term(maze: Maze, model: cd.models.Denoiser, n_segments: int, style: Style, point: Tensor) -> cd.Reward:
    """Pass by a point, given in units of the maze."""
    z = tuple(maze.normalise(point).tolist())
    if not style.width:
        return plan_term("way-point", WayPoint(z, weight=100.0 * n_segments), style, cd.anneal.power(10))
    reward = WayPoint(
        z, 0.5 * maze.scale**2, weight=weight_of(maze, style), l1=0.0
    )  # the nearest points, within a unit
    return plan_term("way-point", reward, style, _matched(maze, style, _uncertainty(model, style).mean(1)))


@dataclass(frozen=True)
class Length:
    """The whole plan is not longer than `limit`: minus half the squared excess in units of `width`.

    It ties all segments at once, so that no pass over neighbours can sum over it.
    """

    limit: float
    width: float

    def __call__(self, x: Tensor) -> Tensor:
        excess = (path_length(x) - self.limit).clamp(min=0)
        return -0.5 * (excess / self.width) ** 2


def path_length(plans: Tensor) -> Tensor:
    """How far the agent gets, (plans,), in the units of the plans: every eighth point, so that jitter counts little."""
    steps = plans.flatten(1, 2)[:, ::8].diff(dim=1)
    return (steps.square().sum(-1) + 1e-12).sqrt().sum(1)


def length_term(maze: Maze, style: Style, limit: float) -> cd.Reward:
    """A plan of at most this length in units of the maze, to within one of them."""
    return plan_term("length", Length(limit / maze.scale, 1 / maze.scale), style, cd.anneal.power(2))


def plan_term(
    name: str, function: Callable[[Tensor], Tensor], style: Style, fading: Callable[[Tensor], Tensor]
) -> cd.Reward:
    """A reward of plans, guided and annealed in a style."""
    return cd.Reward(function, anneal=fading, guidance=style.guidance, name=name, negligible=0.0)


def weight_of(maze: Maze, style: Style) -> float:
    """Weight of a squared error of the style's width, in the model's coordinates."""
    return 0.5 * (maze.scale / style.width) ** 2


def matched(maze: Maze, model: cd.models.Denoiser, style: Style) -> tuple[Matched, Matched, Matched]:
    """Annealing of rewards on the first point of a segment, on its last one, and on the gap between two segments."""
    v = _uncertainty(model, style)
    return (
        _matched(maze, style, v[:, 0]),
        _matched(maze, style, v[:, -1]),
        _matched(maze, style, v[:, 0] + v[:, -1]),
    )


def _matched(maze: Maze, style: Style, variances: Tensor) -> Matched:
    return Matched(style.width / maze.scale, style.ladder().times, style.caution * variances)


def _uncertainty(model: cd.models.Denoiser, style: Style) -> Tensor:
    """Mean posterior variance of every point of a trajectory at each time of the ladder, (times, steps)."""
    process = model.process()
    if not isinstance(process, cd.processes.Gaussian):
        raise cd.InputError(f"matched annealing needs a measured Gaussian process, got {process!r}")
    return process.posterior_variance(style.ladder().times, model.event_shape).mean(-1)
