"""The figures of the page: both curves against strength for every method, and running averages along the chains."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from studies.sentences.strengths import CHAINS, METHOD_NAMES, STRENGTHS
from studies.sentences.tables import summary
from studies.shared.results import Results

__all__ = ["draw"]

COLOURS = dict(zip(METHOD_NAMES, ("#888888", "#4477aa", "#228833", "#cc3311"), strict=True))
SHIFTS = dict(zip(METHOD_NAMES, (-0.009, -0.003, 0.003, 0.009), strict=True))
NAMES = {"replica exchange": "replica exchange (CREPE)", "plain": "plain guidance", "SMC": "SMC, batches of 50"}


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw what is measured; returns the files."""
    figures = {"sweep": _sweep(results), "running": _running(results)}
    folder.mkdir(exist_ok=True)
    paths = []
    for name, figure in figures.items():
        if figure is not None:
            paths.append(folder / f"{name}.png")
            FigureCanvasAgg(figure).print_png(paths[-1])
    return paths


def _panels(width: float = 8.4) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(width, 3.4), dpi=110, layout="constrained")
    axes = figure.subplots(1, 2)
    axes[0].set_ylabel("accuracy of the sentiment")
    axes[1].set_ylabel("perplexity")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _sweep(results: Results) -> Figure | None:
    """Against the target's strength: walks by the target's own strength (solid) and without guidance (dashed)."""
    figure, axes = _panels()
    drawn = False
    for method in METHOD_NAMES:
        for style, own in (("-o", True), ("--s", False)):
            cells = [(w, w if own else 1.0) for w in STRENGTHS]
            found = [(w, summary(results, w, p, method)) for w, p in cells]
            there = [(w, s) for w, s in found if s is not None]
            if (method == "plain" and not own) or len(there) < 2:
                continue
            drawn = True
            label = NAMES.get(method, method) + ("" if own else ", proposal 1.0")
            for axis, key in zip(axes, ("accuracy", "perplexity"), strict=True):
                values, errors = ([s[k] for _, s in there] for k in (key, f"{key} error"))
                at = [w + SHIFTS[method] for w, _ in there]
                axis.errorbar(
                    at, values, errors, fmt=style, color=COLOURS[method], label=label, ms=4, lw=1.3, elinewidth=0.7
                )
    for axis in axes:
        axis.set_xlabel("strength of the target")
        axis.set_xticks(STRENGTHS)
    axes[1].set_yscale("log")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=7, frameon=False)
    return figure if drawn else None


def _running(results: Results) -> Figure | None:
    """Averages of all draws up to an iteration."""
    figure, axes = _panels()
    drawn = False
    for (target, proposal), colour in zip(CHAINS, ("#cc3311", "#4477aa"), strict=True):
        record = results.get(f"chain {target:g} {proposal:g}")
        if record is None or "texts" not in record:
            continue
        drawn = True
        n = np.arange(1, len(record["texts"]) + 1)
        steps = n * record["n"] / len(n)
        label = f"target {target:g}, proposal {proposal:g}: {record['verdict']}"
        axes[0].plot(steps, np.cumsum(record["right"]) / n, color=colour, label=label, lw=1.3)
        axes[1].plot(steps, np.exp(np.cumsum(record["nats"]) / np.cumsum(record["tokens"])), color=colour, lw=1.3)
    for axis in axes:
        axis.set_xlabel("iterations after burn-in")
    axes[0].set_ylim(0, 1)
    axes[1].set_yscale("log")
    if drawn:
        axes[0].legend(fontsize=7, frameon=False, loc="lower right")
    return figure if drawn else None
