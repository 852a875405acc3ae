"""Mazes with trajectories in them: single pictures, rows of them, and animations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from studies.mazes.maze import Maze

__all__ = ["Panel", "animate", "draw_agents", "draw_maze", "draw_plan", "plans_along", "side_by_side", "trajectories"]

Panel = tuple[str, Tensor, Tensor, Tensor, Tensor | None]
"""Title, plan (segments, steps, 2), start, goal, way-point."""

START, GOAL, WAY = "#2a9d3a", "#d1342f", "#f0a202"


def draw_maze(axes: Any, maze: Maze) -> None:
    """Walls, with the first row at the bottom as in OGBench's coordinates."""
    half = maze.unit / 2
    height, width = len(maze.rows), len(maze.rows[0])
    low, high_x, high_y = -maze.unit - half, (width - 1) * maze.unit - half, (height - 1) * maze.unit - half
    axes.imshow(
        np.where(maze.walls.numpy(), 0.45, 1.0),
        origin="lower",
        extent=(low, high_x, low, high_y),
        cmap="gray",
        vmin=0,
        vmax=1,
        interpolation="nearest",
    )
    axes.set(xticks=[], yticks=[], xlim=(low, high_x), ylim=(low, high_y), aspect="equal")


def draw_plan(axes: Any, panel: Panel) -> None:
    """One plan, with one colour per segment."""
    import matplotlib

    title, plan, start, goal, way_point = panel
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.95, len(plan)))
    for segment, colour in zip(plan.numpy(), colours, strict=True):
        axes.plot(*segment.T, color=colour, lw=1.6, solid_capstyle="round")
        axes.plot(*segment[0], ".", color=colour, ms=4)
    for point, colour, marker in ((start, START, "o"), (goal, GOAL, "*"), (way_point, WAY, "D")):
        if point is not None:
            axes.plot(*point.tolist(), marker, color=colour, ms=9, mec="black", mew=0.6, zorder=5)
    axes.set_title(title, fontsize=9)


def draw_agents(axes: Any, panel: Panel) -> None:
    """Two agents, the first and the second half of a plan, and a line between them when they are nearest."""
    title, plan, start, goal, _ = panel
    one, two = (half.flatten(0, 1) for half in plan.chunk(2))
    for path, colour in ((one, START), (two, GOAL)):
        axes.plot(*path.T.numpy(), color=colour, lw=1.6, alpha=0.8)
    nearest = int((one - two).norm(dim=1).argmin())
    axes.plot(*torch.stack([one[nearest], two[nearest]], 1).numpy(), "k:", lw=1.2)
    for point, colour in ((start, START), (goal, GOAL)):
        axes.plot(*point.tolist(), "o", color=colour, ms=9, mec="black", mew=0.6, zorder=5)
    axes.set_title(title, fontsize=9)


def side_by_side(maze: Maze, panels: Sequence[Panel], columns: int = 5, draw: Any = draw_plan) -> Any:
    """Plans in rows of at most so many."""
    from matplotlib.figure import Figure

    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    aspect = len(maze.rows) / len(maze.rows[0])
    figure = Figure(figsize=(3.2 * columns, (3.2 * aspect + 0.35) * rows), layout="constrained")
    for k, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, k + 1)
        draw_maze(axes, maze)
        draw(axes, panel)
    return figure


def trajectories(maze: Maze, groups: dict[str, Tensor]) -> Any:
    """Many single trajectories, one panel per group."""
    from matplotlib.figure import Figure

    aspect = len(maze.rows) / len(maze.rows[0])
    figure = Figure(figsize=(5.5 * len(groups), 5.5 * aspect + 0.4), layout="constrained")
    for k, (title, x) in enumerate(groups.items()):
        axes = figure.add_subplot(1, len(groups), k + 1)
        draw_maze(axes, maze)
        for trajectory in x.numpy():
            axes.plot(*trajectory.T, lw=0.9, alpha=0.8)
        axes.set_title(title, fontsize=10)
    return figure


def animate(path: Path, maze: Maze, frames: Sequence[Panel], seconds: float = 0.12) -> None:
    """A GIF that shows one plan at a time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    aspect = len(maze.rows) / len(maze.rows[0])
    images = []
    for panel in frames:
        figure = Figure(figsize=(4.4, 4.4 * aspect + 0.35), layout="constrained", dpi=80)
        canvas = FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        draw_maze(axes, maze)
        draw_plan(axes, panel)
        canvas.draw()
        images.append(Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("P", palette=Image.Palette.ADAPTIVE))
    path.parent.mkdir(parents=True, exist_ok=True)
    images[0].save(path, save_all=True, append_images=images[1:], duration=int(1000 * seconds), loop=0, optimize=True)


def plans_along(plans: Tensor, iterations: Tensor, start: Tensor, goal: Tensor, n: int) -> list[Panel]:
    """At most n plans, spread over a chain, with their iterations as titles."""
    chosen = torch.linspace(0, len(plans) - 1, min(n, len(plans))).round().long()
    return [(f"iteration {int(iterations[i]):,}", plans[i], start, goal, None) for i in chosen]
