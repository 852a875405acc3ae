"""The figures of the page: both curves against strength for every method, and running averages along the chains."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from studies.sentences.strengths import CHAINS, METHOD_NAMES, N_CHAINS, STRENGTHS, chain_name
from studies.sentences.tables import by_target
from studies.shared.results import Results

__all__ = ["draw"]

COLOURS = dict(zip(METHOD_NAMES, ("#888888", "#4477aa", "#228833", "#cc3311"), strict=True))
COLOURS_OF = dict(zip(CHAINS, ("#cc3311", "#4477aa"), strict=True))
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


def _thousands(axis: Axes) -> None:
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.yaxis.set_minor_formatter("{x:,.0f}")
    axis.tick_params(axis="y", which="both", labelsize=8)


def _sweep(results: Results) -> Figure | None:
    """Against the target's strength, over all proposals."""
    figure, axes = _panels()
    drawn = False
    for method in METHOD_NAMES:
        found = [(w, by_target(results, w, method)) for w in STRENGTHS]
        there = [(w + SHIFTS[method], one) for w, one in found if one is not None]
        if len(there) < 2:
            continue
        drawn = True
        for axis, key in zip(axes, ("accuracy", "perplexity"), strict=True):
            values, errors = ([one[k] for _, one in there] for k in (key, f"{key} error"))
            label = NAMES.get(method, method)
            axis.errorbar([w for w, _ in there], values, errors, fmt="-o", color=COLOURS[method], label=label, ms=4)
    for axis in axes:
        axis.set_xlabel("strength of the target")
        axis.set_xticks(STRENGTHS)
    _thousands(axes[1])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure if drawn else None


def _running(results: Results) -> Figure | None:
    """Averages of all draws up to an iteration."""
    figure, axes = _panels()
    drawn = False
    for cell, seed in itertools.product(CHAINS, range(N_CHAINS)):
        record = results.get(chain_name(cell, seed))
        if record is None or "texts" not in record:
            continue
        drawn = True
        n = np.arange(1, len(record["texts"]) + 1)
        steps, late = n * record["n"] / len(n), slice(len(n) // 20, None)  # the first averages are those of a few texts
        colour, label = COLOURS_OF[cell], None if seed else f"target {cell[0]:g}, proposal {cell[1]:g}"
        axes[0].plot(steps[late], (np.cumsum(record["right"]) / n)[late], color=colour, label=label, lw=1.1)
        perplexity = np.exp(np.cumsum(record["nats"]) / np.cumsum(record["tokens"]))
        axes[1].plot(steps[late], perplexity[late], color=colour, lw=1.1)
    for axis in axes:
        axis.set_xlabel("iterations after burn-in")
    axes[0].set_ylim(0.3, 1)
    _thousands(axes[1])
    if drawn:
        axes[0].legend(fontsize=7, frameon=False, loc="upper right")
    return figure if drawn else None
