"""Planning in a maze as a run: `crepe-diffusion run maze-plan`."""

from __future__ import annotations

import torch
from torch import Tensor

from crepe_diffusion.errors import InputError
from crepe_diffusion.experiments.mazes.evaluate import ends, judge
from crepe_diffusion.experiments.mazes.model import load
from crepe_diffusion.experiments.mazes.stitch import Style, segments_for, terms, way_point_term
from crepe_diffusion.models import Segments
from crepe_diffusion.run.experiment import Experiment

__all__ = ["maze_plan"]


def maze_plan(
    maze: str = "medium", task: int = 1, n_segments: int = 0, width: float = 0.12, caution: float = 6.0
) -> Experiment:
    """Stitch 64-step trajectories of a point maze into a way from start to goal; rewards of kind `way-point` refine it.

    `maze` is the name of shipped weights or a file of them, `task` one of OGBench's five; `n_segments` 0 takes enough.
    """
    grid, model = load(maze)
    if not 1 <= task <= len(grid.tasks):
        raise InputError(f"task must be between 1 and {len(grid.tasks)}, got {task!r}")
    way = grid.tasks[task - 1]
    n = n_segments or segments_for(grid, way)
    style = Style(width=width, caution=caution)
    start, goal = ends(grid, way)
    coupling = terms(grid, model, way, n, style)
    shape = style.ladder()
    via = way_point_term(grid, model, n, style, torch.zeros(2))

    def way_point(plans: Tensor, x: float, y: float) -> Tensor:
        return way_point_term(grid, model, n, style, torch.tensor([x, y])).function(plans)

    def share(name: str):  # type: ignore[no-untyped-def]
        return lambda x: getattr(judge(grid, grid.unnormalise(x), start, goal), name).double()

    return Experiment(
        Segments(model, n).as_target(),
        rewards={"way-point": way_point},
        terms={term.name: term for term in coupling},
        anneals={"matched": via.anneal},
        scalars={"success": share("success"), "out of walls": share("walls"), "junctions": share("junctions")},
        defaults={
            "ladder": {"kind": "times", "times": shape.times.tolist(), "finish": list(shape.finish)},
            "sampler": {"n_chains": 1, "explorer": "none"},
            "reward": [{"name": term.name, "kind": "python"} for term in coupling],
            "stop": {"iterations": 300},
        },
    )
