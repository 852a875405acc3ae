"""The pictures of the page: errors of all methods on trees; digits of the network, and the path of one chain."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from studies.digits import grey
from studies.digits.study import METHODS, Case, cases
from studies.shared.results import Results

__all__ = ["draw_all"]

SHOWN = {"digits.png": (0, 2, 5), "mixture.png": (1, 4)}
"""The cases of the pictures of errors."""


def draw_all(folder: Path, results: Results) -> list[Path]:
    """All pictures whose measurements are there."""
    import matplotlib

    matplotlib.use("Agg")
    drawn = []
    for name, numbers in SHOWN.items():
        shown = [cases()[i] for i in numbers if f"{cases()[i].name} truth" in results]
        if shown:
            drawn.append(draw_errors(folder / name, shown, results))
    if results.names("grey-real-?"):
        drawn.append(draw_samples(folder / "samples.png", results))
    if "grey path" in results:
        drawn.append(draw_path(folder / "path.png", results))
    return drawn


def draw_samples(path: Path, results: Results) -> Path:
    """Sixteen draws of every digit by every method: a column of rows of eight for each method."""
    import matplotlib.pyplot as plt

    digits = [int(name[-1]) for name in results.names("grey-real-?")]
    columns = {"real": "grey real {}", **{method: f"grey {method} {{}} 0" for method in grey.METHODS}}
    figure, axes = plt.subplots(1, len(columns), figsize=(2.1 * len(columns), 0.56 * len(digits) + 0.4), squeeze=False)
    for axis, (title, name) in zip(axes[0], columns.items(), strict=True):
        there = [d for d in digits if name.format(d) in results]
        shown = [results.arrays(name.format(d))["shown"][:16] for d in there]
        rows = [np.concatenate(list(x[i : i + 8]), axis=1) for x in shown for i in range(0, len(x) - len(x) % 8, 8)]
        if rows:
            axis.imshow(np.concatenate(rows), cmap="gray_r", interpolation="nearest")
        axis.set_title(title, fontsize=8)
        axis.axis("off")
    figure.tight_layout(pad=0.4)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def draw_path(path: Path, results: Results) -> Path:
    """One chain: levels from noise (left) to data (right), iterations downwards; masked pixels are blue."""
    import matplotlib.pyplot as plt

    seen = results.arrays("grey path")["path"][::4, ::-1]
    n_levels = seen.shape[1]
    which = np.unique(np.linspace(0, n_levels - 1, min(n_levels, 13)).round().astype(int))
    picture = np.concatenate([np.concatenate(list(row[which]), axis=1) for row in seen])
    levels = seen.max()
    colours = plt.get_cmap("gray_r")(picture / (levels - 1))
    colours[picture == levels] = (0.55, 0.68, 0.83, 1.0)
    figure, axis = plt.subplots(figsize=(0.62 * len(which), 0.62 * len(seen) + 0.4))
    axis.imshow(colours, interpolation="nearest")
    axis.set_xticks([14, 28 * len(which) - 14], ["noise", "data"], fontsize=8)
    axis.set_yticks([28 * i + 14 for i in range(len(seen))], [str(1 + 4 * i) for i in range(len(seen))], fontsize=7)
    axis.set_ylabel("iteration", fontsize=8)
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    figure.tight_layout(pad=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def draw_errors(path: Path, shown: list[Case], results: Results) -> Path:
    """Errors of the pixels on some cases; bars end at the mean over seeds, dots are seeds."""
    import matplotlib.pyplot as plt

    def errors(case: Case, method: str) -> list[float]:
        names = results.names(f"{case.name} {method} ?".replace(" ", "-"))
        return [results[name]["errors"]["pixels"] for name in names]

    methods = [method for method in METHODS if any(errors(case, method) for case in shown)]
    figure, axes = plt.subplots(1, len(shown), figsize=(4.6 * len(shown), 3.0), sharey=True, squeeze=False)
    for axis, case in zip(axes[0], shown, strict=True):
        for i, method in enumerate(methods):
            values = errors(case, method)
            if values:
                chain = "exchange" in method or "Gibbs" in method
                axis.barh(i, np.mean(values), color="#c8a27a" if chain else "#b8b8b8")
                axis.plot(values, [i] * len(values), "k.", markersize=4)
        axis.axvline(results[f"{case.name} truth"]["floors"]["pixels"], color="#8b3a2b", linewidth=1.2)
        law = f"{case.unconditional}, digit {case.digit}, w = {case.strength:g}"
        about = f"{law}, {case.side} x {case.side}, {case.rows:,} rows"
        axis.set_title(about, fontsize=8)
        axis.set_xlabel("error of pixel means")
        axis.set_yticks(range(len(methods)), methods, fontsize=8)
    axes[0][0].invert_yaxis()
    figure.suptitle("line: independent exact draws, as many as the rows pay for", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
