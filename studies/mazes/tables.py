"""The tables and figures of the page, from the results of the commands; the prose of `page.md` stays as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from studies.mazes import agents, changes, credit, pictures
from studies.mazes.evaluate import ends
from studies.mazes.maze import Maze
from studies.mazes.model import load_maze_model, shipped, weights_folder
from studies.mazes.preset import RUNS, preset_table
from studies.mazes.study import METHODS
from studies.shared.pages import fill, markdown
from studies.shared.results import Results
from studies.shared.training import load_weights

__all__ = ["fill_page"]

PAPER_ROWS = 601 * 20
"""Network rows of one iteration of the paper's preset, local moves not counted."""
PAPER_RATES = ((25_000, 8.5), (75_000, 59.7), (125_000, 84.6))

Record = dict[str, Any]


def fill_page(results: Results, page: Path, weights: str, trainings: Path) -> Path:
    """Fill the tables of the page for which there are results, and draw their figures beside it."""
    figures = page.parent / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    maze, _ = load_maze_model(weights)
    records = [{**results[name], "name": name} for name in results.names("*-task*-seed*")]
    records = [r for r in records if r["settings"]["weights"] == weights]
    compared = [r for r in records if r["settings"]["name"] in METHODS]
    changed = [r for r in records if r["settings"]["name"] not in METHODS]
    ours = sorted((r for r in compared if r["settings"]["name"] == METHODS[0]), key=_task)
    tables = {}
    if all((trainings / name / "log.jsonl").exists() for name in shipped()):
        tables["weights"] = weights_table(trainings)
    names = results.names("quality-*")
    if names:
        tables["quality"] = quality_table([results[name] for name in names])
        for name in names:
            shown = {key: torch.from_numpy(x) for key, x in results.arrays(name).items()}
            of = results[name]["settings"]["maze"]
            pictures.trajectories(load_maze_model(of)[0], shown).savefig(figures / f"{of}-data.png", dpi=90)
    if compared:
        tables["success"] = success_table(compared)
        save_success(figures / "success.png", compared)
    if ours:
        plans = [torch.from_numpy(results.arrays(r["name"])["plans"]) for r in ours]
        tables["routes"] = routes_table(ours, [count_routes(maze, x) for x in plans])
        panels = [
            (f"task {_task(r)}, {r['n_segments']} segments", x[-1, 0], *ends(maze, maze.tasks[_task(r) - 1]), None)
            for r, x in zip(ours, plans, strict=True)
        ]
        pictures.side_by_side(maze, panels).savefig(figures / "plans.png", dpi=90)
    for kind in ("credit", "short", "blind"):
        names = results.names(f"{kind}-*")
        if names:
            tables[kind] = credit.table([results[name] for name in names], list(maze.tasks))
    names = results.names("routes-*")
    if names:
        tables["ways"] = credit.routes_table([results[name] for name in names])
    names = results.names("agents-*")
    if names:
        tables["agents"] = agents.table([results[name] for name in names], list(maze.tasks))
        shown_agents = agents.panels(maze, results, weights)
        if shown_agents:
            drawn = pictures.side_by_side(maze, shown_agents, draw=pictures.draw_agents)
            drawn.savefig(figures / "agents.png", dpi=90)
    names = results.names("change-*")
    if names:
        found = {name: results[name] for name in names}
        tables["random changes"] = changes.table(list(found.values()))
        last = sorted(names, key=lambda name: found[name]["settings"]["seed"])[-6:]  # two of each kind
        shown_plans = [panel for name in last for panel in changes.panels(maze, found[name], results, name)]
        pictures.side_by_side(maze, shown_plans, 4).savefig(figures / "refinement.png", dpi=80)
    if changed:
        tables["changes"] = changes_table(changed)
    tables |= {name: preset_table(results[name]) for name in RUNS if name in results}
    return fill(page, tables)


def _task(record: Record) -> int:
    return int(record["settings"]["task"])


def _share(values: Any) -> str:
    return f"{100 * float(np.mean(values)):.0f} %"


def _late(record: Record) -> np.ndarray:
    """What each plan of the second half of the iterations fulfils, (iterations, criteria, chains)."""
    return np.asarray(record["flags"], dtype=float)[len(record["flags"]) // 2 :]


# -- tables ------------------------------------------------------------------------------------------------------


def quality_table(records: list[Record]) -> str:
    """One column per maze: plain samples of the model compared with held-out data."""
    header = ["", *(r["settings"]["maze"] for r in records)]
    return markdown(header, [[key, *(f"{r['found'][key]:.3g}" for r in records)] for key in records[0]["found"]])


def success_table(records: list[Record]) -> str:
    """One row per method: success on each task, over the second half of the iterations."""
    tasks = sorted({_task(r) for r in records})
    rows = []
    for method in METHODS:
        mine = {_task(r): r for r in records if r["settings"]["name"] == method}
        if not mine:
            continue
        late = {task: _late(r)[:, -1].mean() for task, r in mine.items()}
        segments = [r["n_segments"] for r in mine.values()]
        driven = [d for r in mine.values() for d in r["driven"] or []]
        rows.append(
            [
                method,
                "-".join(map(str, sorted({min(segments), max(segments)}))),
                next(iter(mine.values()))["settings"]["n_chains"],
                f"{np.mean([r['rows'][-1] for r in mine.values()]):.2g}",
                *(_share(late[task]) if task in late else "-" for task in tasks),
                f"**{_share(list(late.values()))}**",
                _share(driven) if driven else "-",
            ]
        )
    header = ["method", "segments", "chains", "rows per chain", *(f"task {k}" for k in tasks), "mean", "driven"]
    return markdown(header, rows)


def routes_table(records: list[Record], routes: list[tuple[list[int], int]]) -> str:
    """When chains first succeed, and how many routes they see; `routes` holds `count_routes` of each record."""
    first = []
    for r in records:
        for chain in np.asarray(r["flags"], dtype=bool)[:, -1].T:
            first.append(r["rows"][int(chain.argmax())] if chain.any() else np.inf)
    per_chain, per_task = [n for found, _ in routes for n in found], [n for _, n in routes]
    return markdown(
        ["chains", "rows until the first success: median", "largest", "chains with one route", "routes per task"],
        [
            [
                len(first),
                f"{np.median(first):.2g}",
                f"{max(first):.2g}",
                f"{per_chain.count(1)} of {len(per_chain)}",
                f"{min(per_task)} to {max(per_task)}",
            ]
        ],
    )


def count_routes(maze: Maze, plans: torch.Tensor) -> tuple[list[int], int]:
    """Different routes in plans (draws, chains, segments, steps, 2): per chain, and of all chains together.

    A route is the set of cells that a plan touches.
    """
    row, column = maze.cells(plans.flatten(2, 3))
    cells = (row * len(maze.rows[0]) + column).transpose(0, 1).tolist()
    seen = [{frozenset(draw) for draw in chain} for chain in cells]
    return [len(routes) for routes in seen], len(set().union(*seen))


def changes_table(records: list[Record]) -> str:
    """One row per change of our preset; the barrier is the sum of the rejections of all pairs."""
    rows = []
    for r in sorted(records, key=lambda r: (r["settings"]["name"] != "ours", r["settings"]["name"])):
        late, acceptance = _late(r), np.asarray(r["acceptance"])
        rows.append(
            [
                r["settings"]["name"],
                *(_share(late[:, k]) for k in (4, 2, 3)),
                len(r["levels"]),
                f"{np.nansum(1 - acceptance):.0f}",
                f"{np.nanmin(acceptance):.2f}",
            ]
        )
    header = ["", "success", "junctions", "out of walls", "levels", "barrier", "smallest acceptance"]
    return markdown(header, rows)


def weights_table(trainings: Path) -> str:
    """One row per shipped model, with the time from the log of its training."""
    rows = []
    for name in shipped():
        about = load_weights(weights_folder() / f"{name}.safetensors")[1]
        network, settings = json.loads(about["network"]), json.loads(about["settings"])
        log = (trainings / name / "log.jsonl").read_text().splitlines()
        rows.append(
            [
                name,
                f"{network['n_layers']} x {network['width']}",
                f"{settings['n_steps']:,} x {settings['batch']}",
                f"{json.loads(about['last'])['validation']:.3f}",
                f"{sum(json.loads(line)['seconds'] for line in log) / 60:.0f} min",
            ]
        )
    header = ["maze", "network", "steps x batch", "held-out loss (1: the best linear denoiser)", "time on one core"]
    return markdown(header, rows)


# -- figures -----------------------------------------------------------------------------------------------------


def save_success(path: Path, records: list[Record]) -> None:
    """Success against network rows: one curve per method, one point for SMC, and the paper's table."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for method in METHODS:
        mine = [r for r in records if r["settings"]["name"] == method]
        if not mine:
            continue
        if len(mine[0]["rows"]) > 1:
            grid = np.geomspace(1.001 * max(r["rows"][0] for r in mine), max(r["rows"][-1] for r in mine), 60)
            axes.plot(grid, 100 * np.mean([success_along(r, grid) for r in mine], 0), label=method)
        else:
            spent = np.mean([r["rows"][-1] for r in mine])
            axes.plot([spent], [100 * np.mean([_late(r)[:, -1].mean() for r in mine])], "s", label=method)
    axes.plot([n * PAPER_ROWS for n, _ in PAPER_RATES], [r for _, r in PAPER_RATES], "k^--", label="the paper's table")
    axes.axhline(68, color="0.6", lw=0.8, ls=":")
    axes.annotate("CompDiffuser 68 %", (6e3, 69.5), fontsize=8, color="0.4")
    axes.set(xscale="log", xlabel="network rows spent on a task, per chain", ylabel="success (%)", ylim=(-3, 103))
    axes.legend(fontsize=8, loc=(0.5, 0.1))
    figure.savefig(path, dpi=110)


def success_along(record: Record, grid: np.ndarray) -> np.ndarray:
    """Success as a function of rows: the mean over the iterations of the second half of the rows so far."""
    rows, success = np.asarray(record["rows"]), np.asarray(record["flags"], dtype=float)[:, -1].mean(1)
    out = np.zeros(len(grid))
    for i, r in enumerate(grid):
        chosen = (rows <= r) & (rows > r / 2)
        out[i] = success[chosen].mean() if chosen.any() else out[i - 1]
    return out
