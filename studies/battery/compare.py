"""What each method costs, in units of independent draws, at equal network rows with set-up paid.

    cost = mean over scalars of  E[(value - truth)^2] / variance * rows / rows of one walk from noise to data

    python -m studies.battery compare [--seeds 2] [--groups 8] [--budgets 20000 200000] [--problems NAME ...]

Independent draws of the target at the price of one walk each would cost 1. Replicates are the groups of all seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from studies.battery.calibration import chosen
from studies.battery.records import Record
from studies.shared.pages import markdown

__all__ = ["DEFAULT", "METHODS", "Cost", "costs", "figure", "summary", "table"]

METHODS = ("SMC", "particle Gibbs", "exchange, few chains", "cd.sample")
DEFAULT = (
    "tempering isotropic d=16 beta=2",
    "tempering isotropic d=32 beta=2",
    "tempering isotropic d=64 beta=2",
    "tempering stiff d=16 beta=2",
    "tempering isotropic d=16 beta=3",
    "rare tilt with gradient, linear annealing",
    "posterior of a mode of prior weight 0.001",
    "black box of 8 coordinates",
    "masked tokens 4x3 mild w=2 w'=2",
    "masked tokens 4x3 steep w=2 w'=2",
    "masked tokens 8x2 mild w=2 w'=1",
    "uniform tokens 4x3 mild w=2 w'=2",
    "mini-batch mixture",
    "1d tilting",
    "2d guidance",
    "20d tempering",
    "20d-stiff composition",
)
LEAST_EFFECTIVE = 10
"""A method works on a problem if its error is that of so many independent draws at least."""


@dataclass(frozen=True)
class Cost:
    """The cost of one method on one problem with one budget, its standard error, and the effective draws per run."""

    problem: str
    method: str
    budget: int
    value: float
    error: float
    effective: float

    @property
    def works(self) -> bool:
        return self.effective >= LEAST_EFFECTIVE


def costs(records: Sequence[Record]) -> list[Cost]:
    """One for each problem, method and budget, from all runs; a run that broke off counts as one that found nothing."""
    found = []
    for problem, budget in sorted({(r["problem"], r["budget"]) for r in records}, key=lambda key: key[::-1]):
        walk = chosen(problem).walk_rows
        for method in dict.fromkeys(r["method"] for r in records):
            those = [r for r in records if (r["problem"], r["budget"], r["method"]) == (problem, budget, method)]
            if not those:
                continue
            # A broken run has no means: an error of one standard deviation, at the price of the whole budget.
            relative = np.array(
                [np.mean([_squared(m) for m in r["means"].values()]) if r["means"] else 1.0 for r in those]
            )
            each = relative * np.array([r["rows"] or budget for r in those]) / walk
            error = float(each.std(ddof=1) / np.sqrt(len(each))) if len(each) > 1 else float("nan")
            found.append(Cost(problem, method, budget, float(each.mean()), error, 1 / float(relative.mean())))
    return found


def _squared(mean: Record) -> float:
    return float((mean["value"] - mean["truth"]) ** 2 / mean["variance"])


def table(found: Sequence[Cost]) -> str:
    """One line per problem and budget; in bold the smallest cost."""
    methods = list(dict.fromkeys(c.method for c in found))
    rows = []
    for problem, budget in dict.fromkeys((c.problem, c.budget) for c in found):
        of = {c.method: c for c in found if (c.problem, c.budget) == (problem, budget)}
        best = min(c.value for c in of.values())
        cells = [f"{_digits(of[m].value)} ± {_digits(of[m].error)}" if m in of else "-" for m in methods]
        cells = [
            f"**{cell}**" if m in of and of[m].value == best else cell for m, cell in zip(methods, cells, strict=True)
        ]
        rows.append([problem, f"{budget:,}", *cells])
    return markdown(["problem", "rows", *methods], rows)


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 20 else f"{value:.2g}"


MARKS = (("particle Gibbs", "SMC", 2.0), ("exchange, few chains", "SMC", 5.0), ("cd.sample", None, 1.5))
"""A method, what it is compared with (None: the best of the others), and the ratio that is wanted."""


def summary(found: Sequence[Cost]) -> str:
    """How many problems meet each mark, with and without the benefit of the doubt of two standard errors."""
    rows = []
    for method, other, mark in MARKS:
        ratios, sure = [], []
        for problem, budget in dict.fromkeys((c.problem, c.budget) for c in found):
            of = {c.method: c for c in found if (c.problem, c.budget) == (problem, budget)}
            rest = [c for m, c in of.items() if m != method and other in (None, m)]
            if method not in of or not rest:
                continue
            best = min(rest, key=lambda c: c.value)
            if other is not None and not best.works:
                continue
            ratio = of[method].value / best.value
            spread = ratio * np.hypot(of[method].error / of[method].value, best.error / best.value)
            ratios.append(ratio)
            sure.append(ratio - 2 * spread <= mark)
        if ratios:
            met = sum(r <= mark for r in ratios)
            against = "the best of the others" if other is None else f"{other}, where it works"
            median = f"{np.median(ratios):.2g}"
            rows.append(
                [method, against, f"{mark:g}", median, f"{met} of {len(ratios)}", f"{sum(sure)} of {len(ratios)}"]
            )
    return markdown(["method", "against", "mark", "median ratio", "met", "met within two errors"], rows)


def figure(found: Sequence[Cost], path: Path) -> None:
    """Cost of every method on every problem, one panel per budget; independent draws stand at 1."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    budgets = sorted({c.budget for c in found})
    problems = list(dict.fromkeys(c.problem for c in sorted(found, key=lambda c: c.value)))
    methods = list(dict.fromkeys(c.method for c in found))
    colours = dict(zip(methods, ("#0072B2", "#009E73", "#D55E00", "#000000", "#CC79A7"), strict=False))
    markers = dict(zip(methods, "osD*^", strict=False))
    height = 1.6 + 0.34 * len(problems)
    fig, axes = plt.subplots(
        1, len(budgets), figsize=(4.5 + 4 * len(budgets), height), sharey=True, squeeze=False, layout="constrained"
    )
    for ax, budget in zip(axes[0], budgets, strict=True):
        for m in methods:
            own = [c for c in found if (c.method, c.budget) == (m, budget)]
            y = [problems.index(c.problem) for c in own]
            x = np.array([c.value for c in own])
            spread = np.array([min(c.error, 0.9 * c.value) for c in own])
            size = 9 if m == "cd.sample" else 6
            ax.errorbar(x, y, xerr=spread, fmt=markers[m], color=colours[m], ms=size, lw=1, label=m, alpha=0.85)
        ax.axvline(1, color="0.6", lw=1, ls="--")
        ax.set(xscale="log", xlabel="cost relative to independent draws", title=f"{budget:,} network rows")
        ax.set_yticks(range(len(problems)), problems)
        ax.grid(axis="y", color="0.92")
        ax.spines[["top", "right"]].set_visible(False)
    fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=len(methods), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=130)
    plt.close(fig)
