"""Planning in a maze as a run: `crepe-diffusion run studies/mazes/plan.toml`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.run import Experiment
from crepe_diffusion.stitching import Reach, WayPoint
from studies.mazes.evaluate import ends, judge, passes
from studies.mazes.model import load_maze_model
from studies.mazes.stitch import Style, path_length, segments_for, terms, way_point_term

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
    """Stitch 64-step trajectories of a point maze into a path from start to goal.

    While it runs, a reward `way-point` may be added, and `start` and `goal` removed and added at another place.

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

    by_name = {term.name: term for term in coupling}
    pass_by = way_point_term(grid, model, n, style, torch.zeros(2))

    def at(x: float, y: float) -> tuple[float, ...]:
        return tuple(grid.normalise(torch.tensor([x, y])).tolist())

    # Classes, so that restitching finds the parts of a reward: functions would be summed over whole plans only.
    class Via(WayPoint):
        def __init__(self, x: float, y: float):
            super().__init__(**{**vars(pass_by.function), "point": at(x, y)})

    class Start(Reach):
        def __init__(self, x: float, y: float):
            super().__init__(**{**vars(by_name["start"].function), "point": at(x, y)})

    class Goal(Reach):
        def __init__(self, x: float, y: float):
            super().__init__(**{**vars(by_name["goal"].function), "point": at(x, y)})

    def share(name: str) -> Callable[[Tensor], Tensor]:
        return lambda x: getattr(judge(grid, grid.unnormalise(x), start, goal), name).double()

    scalars = {"success": share("success"), "length": lambda x: path_length(grid.unnormalise(x)).double()}
    if via:
        scalars["via"] = lambda x: passes(grid.unnormalise(x), torch.tensor(via)).double()
    return Experiment(
        cd.stitching.Segments(model, n).as_target(),
        rewards={"way-point": Via, "start": Start, "goal": Goal},
        terms=by_name,
        anneals={"matched": pass_by.anneal} | {name: by_name[name].anneal for name in ("start", "goal")},
        scalars=scalars,
        defaults={
            "ladder": {"kind": "ladder", "times": steps.times.tolist(), "finish": list(steps.finish)},
            "sampler": {
                "kind": "particle-gibbs",
                "n_particles": 16,
                "n_chains": 2,
                "starter": {"kind": "restitch", "between": list(style.between)},
                "proposal": {"clip": style.clip} if style.clip else {},
            },
            "reward": [{"name": term.name} for term in coupling],
            "output": {"burn_in": 2},
            "stop": {"iterations": 40},
        },
    )
