"""The paper's preset from a better start: its ladder, rewards and Langevin moves, and a first plan from a pool."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.evaluate import Evaluator
from crepe_diffusion.stitching import Restitch
from studies.mazes.evaluate import TOLERANCE, ends, judge
from studies.mazes.model import load_maze_model
from studies.shared.pages import markdown
from studies.shared.results import Results

__all__ = ["RUNS", "LangevinFromPool", "never", "preset_table", "record_preset"]

RUNS = ("preset", "preset alone")
"""Results: of the preset, and of its Langevin moves alone."""


@dataclass(frozen=True)
class LangevinFromPool(cd.Langevin):
    """Langevin moves; only the plan that a chain begins with is drawn from a pool."""

    pool: Restitch = field(default_factory=lambda: Restitch(between=(0.07, 0.16)))

    def check(self, evaluate: Evaluator) -> None:
        super().check(evaluate)
        self.pool.check(evaluate)

    def begin(self, evaluate: Evaluator, n_chains: int, stream: cd.Stream) -> tuple[Tensor, int]:
        return self.pool.begin(evaluate, n_chains, stream)


def never(log_alpha: Tensor, stream: cd.Stream) -> Tensor:
    """No swap is accepted: what is left of replica exchange are the moves within each level."""
    return torch.zeros_like(log_alpha, dtype=torch.bool)


def record_preset(folder: Path, results: Results, n_windows: int = 4) -> str:
    """Shares of what the plans of a run fulfil, in equal windows of its iterations, and how its replicas travel.

    They are kept as the first of `RUNS`, or as the second if the run accepts no swaps; the name is returned.
    """
    config = tomllib.loads((folder / "config.toml").read_text("utf-8"))
    options, name = config["options"], RUNS[config["sampler"]["accept"].endswith(":never")]
    maze, _ = load_maze_model(options["maze"])
    run = cd.read_run(folder)
    plans = maze.unnormalise(torch.as_tensor(run.x))  # (iterations, chains, segments, steps, 2)
    # Acceptances are probabilities, by the works of the walks; nothing is accepted where no replica changes its level.
    acceptance = np.asarray(run.trace["acceptance"]) * (np.ptp(run.trace["level"], 0).max() > 0)
    windows = []
    for part in np.array_split(np.arange(len(plans)), min(n_windows, len(plans))):
        x = plans[part[0] : part[-1] + 1].flatten(0, 1)
        verdict = judge(maze, x, *ends(maze, maze.tasks[options["task"] - 1]))
        gaps = (x[:, :-1, -1] - x[:, 1:, 0]).norm(dim=-1)
        found = {name: float(getattr(verdict, name).double().mean()) for name in ("start", "goal", "walls", "success")}
        found |= {"junctions": float((gaps < TOLERANCE).double().mean()), "widest": float(gaps.amax(1).mean())}
        found |= {"acceptance": float(np.nanmean(acceptance[part]))}
        windows.append({"first": int(run.iteration[part[0]]), "last": int(run.iteration[part[-1]]), **found})
    trips = 0 if run.diagnostics is None else int(run.diagnostics.round_trips())
    record = {"windows": windows, "rows": int(run.trace["rows"][-1]), "round_trips": trips}
    results.save(name, record, plans=plans[[0, -1], 0].numpy().astype(np.float32))
    return name


def preset_table(record: dict[str, Any]) -> str:
    """One row per window of iterations."""
    header = ["iterations", "success", "start and goal", "junctions", "widest gap", "out of walls", "acceptance"]
    rows = [
        [
            f"{w['first']:,} to {w['last']:,}",
            *(f"{100 * share:.0f} %" for share in (w["success"], min(w["start"], w["goal"]), w["junctions"])),
            f"{w['widest']:.2f}",
            f"{100 * w['walls']:.0f} %",
            f"{w['acceptance']:.2f}",
        ]
        for w in record["windows"]
    ]
    return markdown(header, rows)
