"""The tables of this study and its figure, from the measured numbers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import crepe_diffusion as cd
from studies.minibatch.study import Truth
from studies.shared.pages import markdown

__all__ = ["cells", "figure", "tables"]

SHOWN = ("SMC 4", "SMC 100", "SMC 4, by Z", "CREPE", "particle Gibbs", "cd.sample")
"""The methods of the figure, in its order: equal weights, then what is right for any size of a batch."""

Record = dict[str, Any]
Cells = tuple[list[str], list[list[str]]]


def tables(record: Record, truth: Truth) -> dict[str, str]:
    """Tables of README.md, by name."""
    return {name: markdown(header, lines) for name, (header, lines) in cells(record, truth).items()}


def cells(record: Record, truth: Truth) -> dict[str, Cells]:
    """Header and lines of each table, as text."""
    return {"weights": _weights(record, truth), "costs": _costs(record), "chain": _chain(record)}


def _weights(record: Record, truth: Truth) -> Cells:
    header = ["", *(f"{c:g}" for c in truth.centres.tolist()), "TV modes", "TV bins"]
    lines = [["truth", *(f"{float(w):.3f}" for w in truth.modes), "0", "0"]]
    for m in record["methods"]:
        lines.append([m["name"], *(_short(e) for e in [*m["modes"], m["tv_modes"], m["tv_bins"]])])
    return header, lines


def _costs(record: Record) -> Cells:
    runs = [m for m in record["methods"] if m["rows"]]
    lines = [[m["name"], f"{m['rows']:,}", f"{m['seconds']:.0f}"] for m in runs]
    return ["", "network evaluations", "CPU seconds"], lines


def _chain(record: Record) -> Cells:
    lines = [
        ["draws", f"{record['n_samples']:,}"],
        ["effective draws, for the mode that mixes worst", f"{record['ess']:,.0f}"],
        ["round trips of replicas", f"{record['round_trips']:,}"],
        ["Lambda", str(cd.Estimate(**record["barrier"]))],
    ]
    return ["CREPE", ""], lines


def _short(e: dict[str, float]) -> str:
    """0.187(2) for 0.187 +- 0.002.

    >>> _short({"value": 0.1866, "error": 0.0017})
    '0.187(2)'
    """
    return f"{e['value']:.3f}({max(1, round(1e3 * e['error']))})"


def figure(record: Record, truth: Truth, path: Path) -> None:
    """Model, reward and target above; histograms of six methods with the target's density below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    blue, orange, sky, green = "#0072B2", "#D55E00", "#56B4E9", "#009E73"  # Okabe and Ito, safe for colour-blind eyes
    thin, runs = slice(None, None, 200), [m for name in SHOWN for m in record["methods"] if m["name"] == name]
    x, density = truth.grid[thin], truth.density[thin]
    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.titlesize": 11}):
        fig = plt.figure(figsize=(9, 11.5), layout="constrained")
        layout: Any = [["top", "top"], ["a", "b"], ["c", "d"], ["e", "f"]]
        axes = fig.subplot_mosaic(layout, height_ratios=[1.05, 1, 1, 1])
        top = axes["top"]
        top.fill_between(x, truth.model[thin], color=blue, alpha=0.25, lw=0)
        top.plot(x, truth.model[thin], color=blue, label="model $p$")
        top.plot(x, density, color="black", lw=1.8, label="target $\\pi \\propto p\\,e^{r}$")
        top.plot([], [], color=orange, ls="--", label="reward $r = x^2/12$ (right axis)")
        other = top.twinx()
        other.plot(x, truth.reward[thin], color=orange, ls="--")
        other.set_ylabel("reward", color=orange)
        other.set_ylim(0, 9)
        top.set(xlim=(-9.5, 10), ylim=(0, 0.42), xticks=range(-8, 9, 4), yticks=[0, 0.1, 0.2, 0.3, 0.4])
        top.set(ylabel="density", title="The reward favours the two modes that the model finds rarely")
        top.legend(loc="upper center", ncols=3, frameon=False, fontsize=9)
        width, height = float(truth.edges[1] - truth.edges[0]), 1.32 * float(density.max())
        centres = [float((truth.mass * truth.grid)[cut].sum() / truth.mass[cut].sum()) for cut in _cuts(truth)]
        for key, method, colour in zip("abcdef", runs, [sky, sky, sky, green, blue, orange], strict=True):
            ax = axes[key]
            heights = [share / width for share in method["bins"][1:-1]]
            ax.stairs(heights, truth.edges.tolist(), fill=True, color=colour, alpha=0.75)
            ax.plot(x, density, color="black", lw=1.5)
            for centre, weight, exact in zip(centres, method["modes"], truth.modes.tolist(), strict=True):
                ax.text(centre, 0.985 * height, f"{weight['value']:.3f}", ha="center", va="top", color="black")
                ax.text(centre, 0.91 * height, f"({exact:.3f})", ha="center", va="top", color="0.4", fontsize=9)
            ax.set(xlim=(-9.5, 10), ylim=(0, height), xticks=range(-8, 9, 4), yticks=[0, 0.1, 0.2, 0.3])
            ax.set(xlabel="x" if key in "ef" else "", ylabel="density" if key in "ace" else "")
            name = method["name"].replace("SMC ", "SMC, batches of ")
            if name.startswith("SMC") and "by Z" not in name:
                name += ", equal weights"
            ax.set_title(f"{name}: {method['tv_modes']['value']:.1%} in the wrong mode", fontsize=9.5)
            ax.spines["right"].set_visible(False)
        share = next(m["rows"] for m in runs if m["name"] == "cd.sample") / (runs[0]["rows"] or 1)
        caption = (
            f"{record['n_samples']:,} samples each, at equal network evaluations; cd.sample stopped after"
            f" {share:.0%} of them.\nLine: exact target; numbers: weight of a mode (exact)"
        )
        fig.supxlabel(caption, fontsize=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        fig.savefig(path, dpi=150)
        plt.close(fig)


def _cuts(truth: Truth) -> list[Tensor]:
    mode = torch.bucketize(truth.grid, truth.borders)
    return [mode == k for k in range(len(truth.modes))]
