"""The picture of the page: means of pixels, in truth and as plain guidance has them, and errors of all methods."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from studies.digits.study import METHODS, cases
from studies.shared.results import Results

__all__ = ["draw"]


def draw(path: Path, results: Results) -> Path:
    """Errors of the pixels on the first two cases; bars end at the mean over seeds, dots are seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [case for case in cases() if f"{case.name} truth" in results][:3]
    figure, axes = plt.subplots(1, len(shown), figsize=(4.6 * len(shown), 3.4), sharey=True, squeeze=False)
    for axis, case in zip(axes[0], shown, strict=True):
        floor = results[f"{case.name} truth"]["floors"]["pixels"]
        for i, method in enumerate(METHODS):
            values = [
                results[n]["errors"]["pixels"] for n in results.names(f"{case.name} {method} ?".replace(" ", "-"))
            ]
            if values:
                axis.barh(
                    i, np.mean(values), color="#c8a27a" if "exchange" in method or "Gibbs" in method else "#b8b8b8"
                )
                axis.plot(values, [i] * len(values), "k.", markersize=4)
        axis.axvline(floor, color="#8b3a2b", linewidth=1.2)
        axis.set_title(f"{case.unconditional}, digit {case.digit}, w = {case.strength:g}, {case.kind}", fontsize=9)
        axis.set_xlabel("error of pixel means")
        axis.set_yticks(range(len(METHODS)), list(METHODS), fontsize=8)
        axis.invert_yaxis() if axis is axes[0][0] else None
    figure.suptitle("line: independent exact draws, as many as the rows pay for", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
