"""What each method costs, in units of independent draws, at equal network rows with set-up paid.

    cost = mean over scalars of  E[(value - truth)^2] / variance * rows / rows of one walk from noise to data

    python -m studies.battery compare [--seeds 2] [--groups 8] [--budgets 20000 200000] [--problems NAME ...]

Independent draws of the target at the price of one walk each would cost 1. Replicates are the groups of all seeds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from studies.battery.calibration import chosen
from studies.battery.methods import small_pilot
from studies.battery.records import Record
from studies.shared.pages import markdown
from studies.shared.results import Results

__all__ = [
    "DEFAULT",
    "METHODS",
    "SMC",
    "Cost",
    "arrivals",
    "costs",
    "figure",
    "forecasts",
    "kept",
    "signed",
    "summary",
    "table",
]

SMC = "SMC, small pilot"
METHODS = (SMC, "particle Gibbs", "exchange, few chains", "cd.sample")
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
REPLICATES = 16
"""Cells of tables that have fewer or more state their number."""
LEAST_EFFECTIVE = 10
"""A method works on a problem if its error is that of so many independent draws at least."""


@dataclass(frozen=True)
class Cost:
    """The cost of one method on one problem with one budget, its standard error, and the effective draws per run.

    Of `cd.sample` also how often each method was `chosen`, and the median of what each was predicted to cost.
    """

    problem: str
    method: str
    budget: int
    value: float
    error: float
    effective: float
    replicates: int = REPLICATES
    chosen: dict[str, int] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)

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
            value, effective = float(each.mean()), 1 / float(relative.mean())
            found.append(Cost(problem, method, budget, value, error, effective, len(those), *_choice(those, walk)))
    return found


FORECAST = {"SMC": SMC, "particle Gibbs": "particle Gibbs", "replica exchange": "exchange, few chains"}
"""What `cd.sample` calls a method, and what the battery calls it."""


def _choice(those: Sequence[Record], walk: int) -> tuple[dict[str, int], dict[str, float]]:
    """How often each method was chosen, and the median of the costs that were predicted."""
    made = [r for r in those if "chosen" in r]
    if not made:
        return {}, {}
    ideal = 1000 / walk
    predicted = {FORECAST[name]: float(np.median([ideal / max(r[name], 1e-9) for r in made])) for name in FORECAST}
    return dict(Counter(FORECAST[r["chosen"]] for r in made)), predicted


def kept(folder: Path, found: Sequence[Cost]) -> list[Cost]:
    """These costs and those that were measured before, which `costs.json` holds; the new ones replace the old ones."""
    results = Results(folder)
    cells = {_key(c): c for c in (Cost(**c) for c in results.get("costs") or [])} | {_key(c): c for c in found}
    order = {name: i for i, name in enumerate(("SMC", *METHODS))}
    merged = sorted(cells.values(), key=lambda c: (c.budget, c.problem, order.get(c.method, 9)))
    results.save("costs", [asdict(c) for c in merged])
    return merged


def _key(c: Cost) -> tuple[str, str, int]:
    return c.problem, c.method, c.budget


def forecasts(found: Sequence[Cost]) -> str:
    """What `cd.sample` predicted each method to cost, what it cost, and which one it chose."""
    rows = []
    for own in (c for c in found if c.predicted):
        of = {c.method: c for c in found if (c.problem, c.budget) == (own.problem, own.budget)}
        of = {SMC: of["SMC"], **of} if "SMC" in of else of
        cells = [f"{_digits(own.predicted[m])} / {_digits(of[m].value) if m in of else '-'}" for m in FORECAST.values()]
        picked = ", ".join(f"{m} {n}" for m, n in sorted(own.chosen.items(), key=lambda item: -item[1]))
        rows.append([own.problem, f"{own.budget:,}", *cells, picked])
    return markdown(["problem", "rows", *FORECAST.values(), "chosen"], rows)


def _squared(mean: Record) -> float:
    return float((mean["value"] - mean["truth"]) ** 2 / mean["variance"])


def table(found: Sequence[Cost]) -> str:
    """One line per problem and budget; in bold the smallest cost."""
    methods = list(dict.fromkeys(c.method for c in found))
    rows = []
    for problem, budget in dict.fromkeys((c.problem, c.budget) for c in found):
        of = {c.method: c for c in found if (c.problem, c.budget) == (problem, budget)}
        best = min(c.value for c in of.values())
        cells = [_cell(of[m]) if m in of else "-" for m in methods]
        cells = [
            f"**{cell}**" if m in of and of[m].value == best else cell for m, cell in zip(methods, cells, strict=True)
        ]
        rows.append([problem, f"{budget:,}", *cells])
    return markdown(["problem", "rows", *methods], rows)


def _cell(c: Cost) -> str:
    number = "" if c.replicates == REPLICATES else f" ({c.replicates})"
    return f"{_digits(c.value)} ± {_digits(c.error)}{number}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 20 else f"{value:.2g}"


MARKS = (("particle Gibbs", "SMC", 2.0), ("exchange, few chains", "SMC", 5.0), ("cd.sample", "", 1.5))
"""A method, how the names of those begin with the best of which it is compared, and the ratio that is wanted."""


@dataclass(frozen=True)
class Comparison:
    """A method on one problem with one budget, and those with the best of which it is compared."""

    own: Cost
    rest: tuple[Cost, ...]

    @property
    def best(self) -> Cost:
        return min(self.rest, key=lambda c: c.value)

    @property
    def ratio(self) -> float:
        return self.own.value / self.best.value

    @property
    def spread(self) -> float:
        """The standard error of the ratio."""
        return self.ratio * float(np.hypot(_relative(self.own), _relative(self.best)))

    def by_chance(self, true: float, rng: np.random.Generator) -> np.ndarray:
        """Ratios that would be measured with these errors if the true one were this; errors are lognormal."""

        def measured(c: Cost, value: float) -> np.ndarray:
            width = np.sqrt(np.log1p(_relative(c) ** 2))
            return value * np.exp(rng.normal(-(width**2) / 2, width, DRAWN))

        rest = np.min([measured(c, c.value) for c in self.rest], axis=0)
        return np.asarray(measured(self.own, true * self.best.value) / rest)


DRAWN = 4000
"""Tables that are drawn to see what chance does to them."""


def _relative(c: Cost) -> float:
    return c.error / c.value


def compared(found: Sequence[Cost], method: str, other: str) -> list[Comparison]:
    """The method with those whose names begin like this, wherever these work."""
    pairs = []
    for problem, budget in dict.fromkeys((c.problem, c.budget) for c in found):
        of = {c.method: c for c in found if (c.problem, c.budget) == (problem, budget)}
        rest = tuple(c for m, c in of.items() if m != method and m.startswith(other))
        if method in of and rest:
            pair = Comparison(of[method], rest)
            if not other or pair.best.works:
                pairs.append(pair)
    return pairs


def summary(found: Sequence[Cost]) -> str:
    """How many problems meet each mark, with the benefit of the doubt of two standard errors, and by chance.

    The last column: how many would meet it on average if the true ratio were the median one everywhere, and all else
    noise. The best of several noisy costs is too small, so this is less than all even where the median is far below.
    """
    rows, rng = [], np.random.default_rng(0)
    for method, other, mark in MARKS:
        pairs = compared(found, method, other)
        if not pairs:
            continue
        against = f"the best {other}, where it works" if other else "the best of the others"
        median = float(np.median([p.ratio for p in pairs]))
        counts = [sum(p.ratio <= mark for p in pairs), sum(p.ratio - 2 * p.spread <= mark for p in pairs)]
        chance = sum(float((p.by_chance(median, rng) <= mark).mean()) for p in pairs)
        cells = [f"{n} of {len(pairs)}" for n in counts]
        rows.append([method, against, f"{mark:g}", f"{median:.2g}", *cells, f"{chance:.1f}"])
    return markdown(["method", "against", "mark", "median ratio", "met", "met within two errors", "by chance"], rows)


def arrivals(found: Sequence[Cost], budget: int) -> str:
    """Replica exchange against the best SMC, and how many walks' rows it spends on one arrival from the noise end.

    SMC spends one walk on each particle. With `delay = sum r / (1 - r)` over pairs, a chain has an arrival every
    `2 + 2 delay` iterations, each of which costs as much as a walk; the pilot of the same seed predicts it.
    """
    rows = []
    for p in compared(found, "exchange, few chains", "SMC"):
        if p.own.budget == budget:
            walks = [2 + 2 * small_pilot(chosen(p.own.problem), budget, seed).plan().best.delay for seed in (0, 1)]
            mean = sum(walks) / 2
            ratio = f"{p.ratio:.1f} ± {p.spread:.1f}"
            rows.append([p.own.problem, f"{budget:,}", ratio, f"{mean:.1f}", f"{p.ratio / mean:.1f}"])
    return markdown(["problem", "rows", "cost / SMC", "walks per arrival", "ratio of both"], rows)


def signed(records: Sequence[Record], budget: int) -> str:
    """Mean errors of each set-up with this budget: of the first scalar, in standard deviations, and of log Z.

    An error that all replicates of a set-up share is a bias: of the size of the steps, or of what was measured for it.
    """
    rows = []
    for problem, method, seed in dict.fromkeys((r["problem"], r["method"], r["seed"]) for r in records):
        own = [
            r for r in records if (r["problem"], r["method"], r["seed"], r["budget"]) == (problem, method, seed, budget)
        ]
        if len(own) > 1 and own[0]["means"]:
            name = next(iter(own[0]["means"]))
            means = [(m["value"] - m["truth"]) / m["variance"] ** 0.5 for r in own for m in (r["means"][name],)]
            log_z = [r["log_z"]["value"] - r["log_z"]["truth"] for r in own if r["log_z"]]
            rows.append([problem, method, seed, len(own), name, *(_mean(v) if v else "-" for v in (means, log_z))])
    return markdown(["problem", "method", "set-up", "replicates", "scalar", "error / sd", "error of log Z"], rows)


def _mean(values: Sequence[float]) -> str:
    return f"{np.mean(values):+.4f} ± {np.std(values, ddof=1) / np.sqrt(len(values)):.4f}"


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
