"""docs/mazes.md and its figures, from what the commands wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from studies.mazes import pictures
from studies.mazes.evaluate import ends
from studies.mazes.model import load, shipped, weights_folder
from studies.shared.training import load_weights

__all__ = ["write_page"]

PAPER_ROWS = 601 * 20
"""Network rows of one iteration of the paper's preset, local moves not counted."""
PAPER_RATES = ((25_000, 8.5), (75_000, 59.7), (125_000, 84.6))


def write_page(folder: Path, docs: Path, command: str, trainings: Path | None = None) -> Path:
    """The page and its figures; sections whose results are not there are left out."""
    records = [{**json.loads(p.read_text()), "file": p.stem} for p in sorted(folder.glob("*-task*-seed*.json"))]
    giant = [r for r in records if r["job"]["name"] in METHODS]
    changed = [r for r in records if r["job"]["name"] not in METHODS]
    (docs / "figures").mkdir(parents=True, exist_ok=True)
    parts = [HEAD.format(command=command)]
    quality = folder / "quality.json"
    if quality.exists():
        parts.append(_quality(json.loads(quality.read_text()), folder, docs))
    if giant:
        parts.append(_comparison(giant, folder, docs))
    if changed:
        parts.append(_ablation(changed))
    if (folder / "refinement.json").exists():
        parts.append(_refinement(folder, docs))
    parts.append(_weights(trainings))
    path = docs / "mazes.md"
    path.write_text("\n".join(parts))
    return path


METHODS = ("CREPE, ours", "CREPE, no restitching", "CREPE, paper", "SMC")

HEAD = """# Mazes: short trajectories stitched into plans

Written by `{command}` from the weights that ship with the package; every number below comes from it.

One model of 64-step trajectories of OGBench's `pointmaze`, J copies of it, and rewards that tie them together: begin at
the start, end at the goal, every end meets the next beginning. A plan succeeds by the paper's criterion: start, goal
and all junctions within 0.45 (a cell is 4 wide), and no point in a wall. `driven` is the share of plans on which a
simple controller reaches the goal in the real environment.

"Ours" differs from the paper's setting in four things: the variance of denoising steps is measured in the main
directions of trajectories; rewards are squared errors, annealed by what predictions still leave open; the gradient is
clipped relative to the noise; and now and then a plan is drawn anew from thousands of fresh trajectories at a noise
level at which walls can be seen (`cd.stitching.Restitch`, see [decisions](decisions.md)). The number of segments is what the way
needs at the agent's pace, and a quarter more.
"""


def _share(values: Any) -> str:
    return f"{100 * float(np.mean(values)):.0f} %"


def _flags(record: dict[str, Any]) -> np.ndarray:
    """(iterations, criteria, chains)."""
    return np.asarray(record["flags"], dtype=float)


def _quality(quality: dict[str, Any], folder: Path, docs: Path) -> str:
    lines = [
        "## The model alone",
        "",
        "What bounds everything after: plain samples of the models beside held-out data.",
        "",
    ]
    mazes = list(quality)
    lines += ["| | " + " | ".join(mazes) + " |", "|---|" + "---|" * len(mazes)]
    for key in quality[mazes[0]]:
        lines.append(f"| {key} | " + " | ".join(f"{quality[m][key]:.3g}" for m in mazes) + " |")
    lines.append("")
    for maze in mazes:
        picture = folder / f"quality-{maze}.png"
        if picture.exists():
            shutil.copy(picture, docs / "figures" / f"maze-{maze}-data.png")
            lines += [f"![{maze}: data and samples](figures/maze-{maze}-data.png)", ""]
    return "\n".join(lines)


def _comparison(records: list[dict[str, Any]], folder: Path, docs: Path) -> str:
    """One row a method: success by task over the second half of the rows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.add_subplot()
    rows = []
    for method in METHODS:
        mine = sorted((r for r in records if r["job"]["name"] == method), key=lambda r: r["job"]["task"])
        if not mine:
            continue
        late = [_flags(r)[len(r["flags"]) // 2 :, -1] for r in mine]
        cells = " | ".join(_share(x) for x in late)
        spent = np.mean([r["rows"][-1] for r in mine])
        driven = [d for r in mine if r["driven"] is not None for d in r["driven"]]
        segments = "-".join(
            str(n) for n in sorted({min(r["n_segments"] for r in mine), max(r["n_segments"] for r in mine)})
        )
        chains = mine[0]["job"]["n_chains"]
        average = _share([x.mean() for x in late])
        rows.append(
            f"| {method} | {segments} | {chains} | {spent:.2g} | {cells} | **{average}** |"
            f" {_share(driven) if driven else '-'} |"
        )
        if len(mine[0]["rows"]) > 1:
            grid = np.geomspace(1.001 * max(r["rows"][0] for r in mine), max(r["rows"][-1] for r in mine), 60)
            axes.plot(grid, 100 * np.mean([_along(r, grid) for r in mine], 0), label=method)
        else:
            axes.plot([spent], [100 * np.mean([x.mean() for x in late])], "s", label=method)
    axes.plot([n * PAPER_ROWS for n, _ in PAPER_RATES], [r for _, r in PAPER_RATES], "k^--", label="the paper's table")
    axes.axhline(68, color="0.6", lw=0.8, ls=":")
    axes.annotate("CompDiffuser 68 %", (6e3, 69.5), fontsize=8, color="0.4")
    axes.set(xscale="log", xlabel="network rows spent on a task, per chain", ylabel="success (%)", ylim=(-3, 103))
    axes.legend(fontsize=8, loc=(0.5, 0.1))
    figure.savefig(docs / "figures" / "maze-success.png", dpi=110)
    plans = _picture_of_plans(records, folder, docs)
    n_tasks = len({r["job"]["task"] for r in records})
    first = [r for r in records if r["job"]["name"] == "CREPE, ours"]
    return "\n".join(
        [
            "## Success against network rows",
            "",
            "| method | segments | chains | rows a chain | "
            + " | ".join(f"task {k + 1}" for k in range(n_tasks))
            + " | mean | driven |",
            "|---|---|---|---|" + "---|" * (n_tasks + 2),
            *rows,
            "",
            "Success is counted over the second half of each chain's iterations (SMC: over its resampled particles), rows"
            " from the beginning. The paper reports 84.6 % for iterations 100,000 to 150,000, that is after about"
            f" {100_000 * PAPER_ROWS:.1e} rows a task, its local moves not counted.",
            *_first_success(first),
            *_courses(first, folder),
            "",
            "![success](figures/maze-success.png)",
            "",
            *(
                [
                    "Last plans of the first chain, one a task; a colour a segment.",
                    "",
                    "![plans](figures/maze-plans.png)",
                    "",
                ]
                if plans
                else []
            ),
        ]
    )


def _first_success(records: list[dict[str, Any]]) -> list[str]:
    if not records:
        return []
    found = []
    for r in records:
        success = _flags(r)[:, -1]
        for chain in success.T:
            hits = np.flatnonzero(chain)
            found.append(r["rows"][hits[0]] if len(hits) else np.inf)
    return [
        "",
        f"Rows until a chain's first successful plan, our preset: median {np.median(found):.2g}, largest {max(found):.2g}"
        f" over {len(found)} chains; the candidates that it begins from are part of them.",
    ]


def _courses(records: list[dict[str, Any]], folder: Path) -> list[str]:
    """How many ways through the maze the chains have seen, a way being the set of cells it touches."""
    if not records:
        return []
    maze, _ = load(records[0]["job"]["weights"])
    per_chain, per_task = [], []
    for r in records:
        with np.load(folder / f"{r['file']}.npz") as file:
            row, column = maze.cells(torch.from_numpy(file["plans"]).flatten(2, 3))
        cells = (row * len(maze.rows[0]) + column).numpy()
        seen = [{frozenset(draw.tolist()) for draw in chain} for chain in cells.swapaxes(0, 1)]
        per_chain += [len(s) for s in seen]
        per_task.append(len(set().union(*seen)))
    return [
        "",
        f"What this does not show is mixing: in as many rows, {sum(n == 1 for n in per_chain)} of {len(per_chain)} chains"
        " kept to one way through the maze (a set of cells), and different chains of a task found"
        f" {min(per_task)} to {max(per_task)} ways. Fresh plans arise at each restitching, but few come down to the data end;"
        " draws of one chain are no independent plans.",
    ]


def _along(record: dict[str, Any], grid: np.ndarray) -> np.ndarray:
    """Success as a function of rows: a moving average over a window of half the rows so far."""
    rows, success = np.asarray(record["rows"]), _flags(record)[:, -1].mean(1)
    out = np.zeros(len(grid))
    for i, r in enumerate(grid):
        chosen = (rows <= r) & (rows > r / 2)
        out[i] = success[chosen].mean() if chosen.any() else out[i - 1]
    return out


def _picture_of_plans(records: list[dict[str, Any]], folder: Path, docs: Path) -> bool:
    """A picture of one plan for each task."""
    from matplotlib.figure import Figure

    mine = sorted((r for r in records if r["job"]["name"] == "CREPE, ours"), key=lambda r: r["job"]["task"])
    if not mine:
        return False
    maze, _ = load(mine[0]["job"]["weights"])
    figure = Figure(figsize=(3.2 * len(mine), 3.2 * len(maze.rows) / len(maze.rows[0]) + 0.35), layout="constrained")
    for k, r in enumerate(mine):
        with np.load(folder / f"{r['file']}.npz") as file:
            plan = torch.from_numpy(file["plans"][-1, 0])
        start, goal = ends(maze, maze.tasks[r["job"]["task"] - 1])
        axes = figure.add_subplot(1, len(mine), k + 1)
        pictures.draw_maze(axes, maze)
        pictures.draw_plan(axes, plan, start, goal, title=f"task {r['job']['task']}, {r['n_segments']} segments")
    figure.savefig(docs / "figures" / "maze-plans.png", dpi=90)
    return True


def _ablation(records: list[dict[str, Any]]) -> str:
    records = sorted(records, key=lambda r: (r["job"]["name"] != "ours", r["job"]["name"]))
    lines = [
        "## One thing changed at a time",
        "",
        f"Task {records[0]['job']['task']} of the giant maze, {records[0]['job']['n_chains']} chains,"
        f" {records[0]['job']['rows']:,} rows a chain. Barrier is the sum of the pairs' rejections.",
        "",
        "| | success | junctions | out of walls | levels | barrier | smallest acceptance | ms a thousand rows |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in records:
        late = _flags(r)[len(r["flags"]) // 2 :]
        acceptance = np.asarray(r["acceptance"])
        pace = 1e6 * r["seconds"] / (r["rows"][-1] * r["job"]["n_chains"])
        lines.append(
            f"| {r['job']['name']} | {_share(late[:, 4])} | {_share(late[:, 2])} | {_share(late[:, 3])} |"
            f" {len(r['levels'])} | {np.nansum(1 - acceptance):.0f} | {np.nanmin(acceptance):.2f} | {pace:.0f} |"
        )
    return "\n".join([*lines, ""])


def _refinement(folder: Path, docs: Path) -> str:
    from matplotlib.figure import Figure

    found = json.loads((folder / "refinement.json").read_text())
    case, log = found["case"], found["log"]
    n = case["n_before"]
    success = np.asarray([line["success"] for line in log], dtype=float)
    passing = np.asarray([line["passes"] for line in log], dtype=float)
    window = max(1, n // 10)
    before, soon, late = slice(n - window, n), slice(n + window, n + 2 * window), slice(n + window, len(log))
    figure = Figure(figsize=(7.5, 3.4), layout="constrained")
    axes = figure.add_subplot()
    window_of = np.convolve(np.ones(len(log)), np.ones(21), mode="same")
    for values, label in ((success, "success"), (passing, "passes the way-point")):
        axes.plot(100 * np.convolve(values.mean(1), np.ones(21), mode="same") / window_of, label=label)
    axes.axvline(n, color="0.5", lw=0.8)
    axes.annotate("way-point added", (n, 50), fontsize=8, rotation=90, va="center", ha="right")
    axes.set(xlabel="iteration", ylabel="% of chains (running mean)", ylim=(-3, 103))
    axes.legend(fontsize=8)
    figure.savefig(docs / "figures" / "maze-refinement.png", dpi=110)

    maze, _ = load(case["weights"])
    start, goal = ends(maze, maze.tasks[case["task"] - 1])
    point = maze.xy(tuple(case["cell"]))
    with np.load(folder / "refinement.npz") as file:
        plans = torch.from_numpy(file["plans"][:, 0])
    shown = [1, n // 2, n, n + window // 2, n + window, len(log)]
    row = [(f"iteration {i:,}", plans[i - 1]) for i in shown]
    pictures.side_by_side(maze, row[:5], start, goal, point).savefig(docs / "figures" / "maze-along.png", dpi=80)
    steps = [*range(0, n, max(1, n // 40)), *range(n - 5, min(len(log), n + 2 * window), max(1, window // 25))]
    frames = [
        (f"iteration {i + 1:,}" + (", way-point added" if i >= n else ""), plans[i], point if i >= n else None)
        for i in steps
    ]
    pictures.animate(docs / "figures" / "maze-chain.gif", maze, frames, start, goal)
    first = [int(np.flatnonzero(chain[n:])[0]) + 1 if chain[n:].any() else None for chain in passing.T]
    return "\n".join(
        [
            "## A way-point on the fly",
            "",
            f"Task {case['task']} of the giant maze, {case['n_chains']} chains. After {n:,} iterations the cell"
            f" {tuple(case['cell'])} has to be passed within 0.45, as an online refinement of the running chains.",
            "",
            "| iterations | passes the way-point | success |",
            "|---|---|---|",
            f"| {n - window + 1:,} to {n:,}, before | {_share(passing[before])} | {_share(success[before])} |",
            f"| {n + window + 1:,} to {min(len(log), n + 2 * window):,} | {_share(passing[soon])} | {_share(success[soon])} |",
            f"| {n + window + 1:,} to {len(log):,} | {_share(passing[late])} | {_share(success[late])} |",
            "",
            f"The first plan that passes came {', '.join('never' if f is None else str(f) for f in first)} iterations after"
            f" the change (one tenth of the iterations before it: {window}).",
            "",
            "![pass rate](figures/maze-refinement.png)",
            "",
            "![plans along the chain](figures/maze-along.png)",
            "",
            "![animation](figures/maze-chain.gif)",
            "",
        ]
    )


def _weights(trainings: Path | None) -> str:
    """How the shipped weights came about."""
    lines = [
        "## How the weights were made",
        "",
        "    python -m studies.mazes data --maze giant     # 5,500 episodes of OGBench's recipe",
        "    python -m studies.mazes train --maze giant    # goes on if it was ended",
        "",
        "| maze | network | steps x batch | held-out loss (1: the best linear denoiser) | time on one core |",
        "|---|---|---|---|---|",
    ]
    for name in shipped():
        about = load_weights(weights_folder() / f"{name}.safetensors")[1]
        network, settings = json.loads(about["network"]), json.loads(about["settings"])
        log = None if trainings is None else trainings / name / "log.jsonl"
        spent = "-"
        if log is not None and log.exists():
            spent = f"{sum(json.loads(line)['seconds'] for line in log.read_text().splitlines()) / 60:.0f} min"
        lines.append(
            f"| {name} | {network['n_layers']} x {network['width']} | {settings['n_steps']:,} x {settings['batch']} |"
            f" {json.loads(about['last'])['validation']:.3f} | {spent} |"
        )
    return "\n".join([*lines, "", "The core was shared with other work.", ""])
