"""Pictures of images: grids with names beside their rows, shares of clusters, rewards along a chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

__all__ = ["curves", "rows_of_images", "shares_and_images"]


def strip(images: np.ndarray, gap: int = 2) -> np.ndarray:
    """(n, h, w) images side by side, as one picture with values in [0, 1]; bytes and [-1, 1] are both understood."""
    x = images / 255 if images.dtype == np.uint8 else (np.asarray(images, np.float64) + 1) / 2
    padded = np.pad(np.clip(x, 0, 1), ((0, 0), (0, 0), (0, gap)), constant_values=1.0)
    return np.concatenate(list(padded), axis=1)[:, :-gap]


def _draw_rows(axes: Sequence[Any], rows: Mapping[str, np.ndarray]) -> None:
    for ax, (name, images) in zip(axes, rows.items(), strict=True):
        ax.imshow(strip(images), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        ax.set_xticks([])
        ax.set_yticks([])
        ax.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
        for side in ax.spines.values():
            side.set_visible(False)


def rows_of_images(rows: Mapping[str, np.ndarray], title: str = "") -> Figure:
    """One row of images for each name."""
    n, beside = max(len(x) for x in rows.values()), 0.4 + 0.08 * max(map(len, rows))
    figure, axes = plt.subplots(
        len(rows), 1, figsize=(beside + 0.6 * n, 0.62 * len(rows) + 0.4), squeeze=False, layout="constrained"
    )
    _draw_rows(list(axes[:, 0]), rows)
    if title:
        figure.suptitle(title, fontsize=10)
    return figure


def shares_and_images(
    rows: Mapping[str, np.ndarray], shares: Mapping[str, np.ndarray], title: str, n_bars: int = 10
) -> Figure:
    """Rows of images, and beside them the shares (seeds, components) of the most frequent components of the first."""
    figure = plt.figure(figsize=(11.5, 0.62 * len(rows) + 0.9), layout="constrained")
    grid = figure.add_gridspec(len(rows), 2, width_ratios=(1.25, 1))
    _draw_rows([figure.add_subplot(grid[i, 0]) for i in range(len(rows))], rows)
    ax = figure.add_subplot(grid[:, 1])
    order = np.argsort(-next(iter(shares.values())).mean(0))[:n_bars]
    width = 0.8 / len(shares)
    for i, (name, values) in enumerate(shares.items()):
        chosen = values[:, order]
        error = chosen.std(0, ddof=1) / np.sqrt(len(chosen)) if len(chosen) > 1 else None
        place = np.arange(n_bars) + (i - (len(shares) - 1) / 2) * width
        colour = "black" if i == 0 else f"C{i - 1}"
        ax.bar(place, chosen.mean(0), width, yerr=error, label=name, color=colour, error_kw={"lw": 0.8})
    ax.set_xticks(range(n_bars), [str(k + 1) for k in range(n_bars)])
    ax.set_xlabel("clusters, the most frequent in truth first")
    ax.set_ylabel("share")
    ax.legend(frameon=False, fontsize=8)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    figure.suptitle(title, fontsize=10)
    return figure


def curves(groups: Mapping[str, Mapping[str, np.ndarray]]) -> Figure:
    """One panel per group: a quantity (wishes, iterations) along the chain, each wish thin and their mean thick."""
    figure, axes = plt.subplots(1, len(groups), figsize=(4.2 * len(groups), 2.9), squeeze=False, layout="constrained")
    for ax, (title, lines) in zip(axes[0], groups.items(), strict=True):
        for name, values in lines.items():
            n = np.arange(1, values.shape[1] + 1)
            (line,) = ax.plot(n, values.mean(0), lw=2.2, label=name)
            ax.plot(n, values.T, lw=0.6, alpha=0.5, color=line.get_color())
        ax.set_title(title, fontsize=10)
        ax.set_xlabel("iteration")
        ax.legend(frameon=False, fontsize=8)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    return figure
