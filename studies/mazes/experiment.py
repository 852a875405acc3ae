"""Planning in a maze as a run: `crepe-diffusion run studies/mazes/plan.toml`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.run import Experiment
from studies.mazes.evaluate import ends, judge, passes
from studies.mazes.model import load_maze_model
from studies.mazes.stitch import Style, segments_for, terms, way_point_term

__all__ = ["maze_plan"]


def maze_plan(
    maze: str = "medium",
    task: int = 1,
    n_segments: int = 0,
    width: float = 0.08,
    caution: float = 1.5,
    n_levels: int = 121,
    via: list[float] = [],  # noqa: B006 - options are read, never changed
) -> Experiment:
    """Stitch 64-step trajectories of a point maze into a path from start to goal; a reward `way-point` may be added.

    `maze` is the name of shipped weights or a file of weights, `task` one of OGBench's five. With `n_segments = 0`
    there are as many as the path needs. `via` is a point in units of the maze; whether plans pass it is recorded.
    """
    grid, model = load_maze_model(maze)
    if not 1 <= task <= len(grid.tasks):
        raise cd.InputError(f"task must be between 1 and {len(grid.tasks)}, got {task!r}")
    if len(via) not in (0, 2):
        raise cd.InputError(f"via must be a point [x, y] or nothing, got {via!r}")
    way = grid.tasks[task - 1]
    n = n_segments or segments_for(grid, way)
    style = Style(width=width, caution=caution, n_levels=n_levels)
    start, goal = ends(grid, way)
    coupling, steps = terms(grid, model, way, n, style), style.ladder()

    def way_point(plans: Tensor, x: float, y: float) -> Tensor:
        return way_point_term(grid, model, n, style, torch.tensor([x, y])).function(plans)

    def share(name: str) -> Callable[[Tensor], Tensor]:
        return lambda x: getattr(judge(grid, grid.unnormalise(x), start, goal), name).double()

    scalars = {"success": share("success"), "length": lambda x: _length(grid.unnormalise(x))}
    if via:
        scalars["via"] = lambda x: passes(grid.unnormalise(x), torch.tensor(via)).double()
    return Experiment(
        cd.stitching.Segments(model, n).as_target(),
        rewards={"way-point": way_point},
        terms={term.name: term for term in coupling},
        anneals={"matched": way_point_term(grid, model, n, style, torch.zeros(2)).anneal},
        scalars=scalars,
        defaults={
            "ladder": {"kind": "ladder", "times": steps.times.tolist(), "finish": list(steps.finish)},
            "sampler": {
                "n_chains": 2,
                "explorer": {"kind": "restitch", "between": list(style.between)},
                "proposal": {"clip": style.clip} if style.clip else {},
            },
            "reward": [{"name": term.name} for term in coupling],
            "output": {"burn_in": 50},
            "stop": {"iterations": 200},
        },
    )


def _length(plans: Tensor) -> Tensor:
    """How far the agent walks, in units of the maze."""
    return plans.flatten(1, 2).diff(dim=1).norm(dim=-1).sum(1).double()
