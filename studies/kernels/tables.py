"""The tables of this study's pages and its figure, from the measured numbers alone.

relative error = geometric mean over tasks of  error / error of (Fisher variance, balanced proposal)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from studies.shared.pages import markdown

__all__ = ["figure", "readme_tables", "tables"]

Record = dict[str, Any]


def readme_tables(results: Record) -> dict[str, str]:
    """Tables of README.md, by name."""
    return {
        "exponents that do not sum to 1": relative(results, unit=False),
        "exponents that sum to 1": relative(results, unit=True),
        "checks": checks(results),
    }


def tables(results: Record) -> dict[str, str]:
    """Tables of tables.md, by name."""
    settings = names(results["kernels"], "setting")
    return {
        "order": order(results),
        "oracle": oracle(results),
        **{f"samplers {setting}": samplers(results, setting) for setting in settings},
        **{f"kernels {setting}": kernels(results, setting) for setting in settings},
    }


def number(x: float) -> str:
    """Three digits, and all of those before the point.

    >>> number(0.04567), number(48021.7)
    ('0.0457', '48,022')
    """
    return f"{x:.3g}" if abs(x) < 1000 else f"{x:,.0f}"


def with_error(pair: tuple[float, float]) -> str:
    """A value with two digits of its standard error; alone if one replicate left the error unknown.

    >>> with_error((0.04348, 0.00817)), with_error((0.7975, math.nan))
    ('0.0435 ± 0.0082', '0.797')
    """
    value, error = pair
    if math.isnan(error):
        return f"{value:.3f}"
    digits = 3 if not error > 0 else max(0, min(4, 1 - math.floor(math.log10(error))))
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def law_error(r: Record) -> tuple[float, float]:
    """Distance of the pooled draws from the truth without its Monte Carlo part, and the noise of that distance.

    Square root of the energy distance in 20 dimensions, total variation over cells elsewhere.
    """
    if r["energy"] is not None:
        squared, error = r["energy"]
        return math.sqrt(max(squared, 0.0)), math.sqrt(error)
    return math.sqrt(max(r["tv"] ** 2 - r["tv_floor"] ** 2, 0.0)), r["tv_floor"] / 2


def shown_error(r: Record) -> str:
    value, noise = law_error(r)
    return number(value) if value > noise else f"< {number(noise)}"


def names(items: list[Record], key: str) -> list[str]:
    return list(dict.fromkeys(r[key] for r in items))


def task_name(task: str) -> str:
    return task.replace("_", " ")


def ratio_to_default(
    results: Record, setting: str, kernel: str, proposal: str, unit: bool, of: Callable[[Record], float]
) -> float | None:
    """Geometric mean over tasks of a quantity, relative to the Fisher variance with the balanced proposal.

    None for a kernel that was not measured in this setting.
    """
    chosen = [r for r in results["kernels"] if r["setting"] == setting and (r["total_exponent"] == 1) == unit]
    mine = {r["task"]: of(r) for r in chosen if (r["kernel"], r["proposal"]) == (kernel, proposal)}
    default = {r["task"]: of(r) for r in chosen if (r["kernel"], r["proposal"]) == ("Fisher", "balanced")}
    return math.exp(sum(math.log(mine[t] / default[t]) for t in mine) / len(mine)) if mine else None


def floored_error(r: Record) -> float:
    return max(*law_error(r))


def cost(r: Record) -> float:
    return r["rows_per_ess"]


def relative(results: Record, unit: bool) -> str:
    """Error / rows per effective sample of every kernel and proposal, in every setting."""
    settings = names(results["kernels"], "setting")
    chosen = [r for r in results["kernels"] if (r["total_exponent"] == 1) == unit]
    rows = []
    for kernel, proposal in dict.fromkeys((r["kernel"], r["proposal"]) for r in chosen):
        row = [kernel] if unit else [kernel, proposal]
        for setting in settings:
            error = ratio_to_default(results, setting, kernel, proposal, unit, floored_error)
            rows_per_ess = ratio_to_default(results, setting, kernel, proposal, unit, cost)
            row.append("" if error is None or rows_per_ess is None else f"{error:.2g} / {rows_per_ess:.2g}")
        rows.append(row)
    return markdown((["kernel"] if unit else ["kernel", "proposal"]) + settings, rows)


def checks(results: Record) -> str:
    """What all problems together show: the order, the oracle, and who won at equal rows."""
    orders = [r["order"][0] for r in results["orders"] if r["order"]]
    z = [abs(v) for r in results["oracle"] for v in r["modes"]]
    cells = [v for r in results["oracle"] for v in r["cells"]]
    best: Counter[str] = Counter()
    for problem in names(results["versus"], "problem"):
        rows_of = [r for r in results["versus"] if r["problem"] == problem and r["sampler"] != "guidance alone"]
        best[min(rows_of, key=lambda r: r["mode_error"][0])["sampler"].split(",")[0]] += 1
    return markdown(
        ["quantity", "measured"],
        [
            ["series of errors that resolve an order", f"{len(orders)} of {len(results['orders'])}"],
            ["their order", mean_and_range(orders) if orders else "not resolved"],
            [
                "exact log-densities: mode weights beyond 2 standard errors",
                f"{sum(v > 2 for v in z)} of {len(z)} (chance: {0.046 * len(z):.0f}), the largest {max(z):.1f}",
            ],
            [f"exact log-densities: root mean square of z over {len(cells)} cells", f"{rms(cells):.2f}"],
            *(
                [f"problems on which {name} has the smallest error at equal rows", f"{n} of {best.total()}"]
                for name, n in best.most_common()
            ),
        ],
    )


def mean_and_range(values: list[float]) -> str:
    return f"{sum(values) / len(values):.2f} on average, {min(values):.2f} to {max(values):.2f}"


def rms(values: list[float]) -> float:
    return math.sqrt(sum(v * v for v in values) / len(values))


def order(results: Record) -> str:
    """Error against the number of steps, and the fitted order."""
    steps = results["effort"]["steps"]
    rows = []
    for r in results["orders"]:
        cells = [f"{p['error']:.3f} ± {min(p['noise'], 9.0):.3f}" if p["error"] else "0" for p in r["points"]]
        fitted = with_error(r["order"]) if r["order"] else "not resolved"
        rows.append([r["problem"], *cells, fitted, r["n_used"]])
    return markdown(["problem", *(f"{n} steps" for n in steps), "order", "points"], rows)


def oracle(results: Record) -> str:
    """z-scores of the chain with exact log-densities."""
    rows = [
        [r["problem"], f"{largest(r['modes']):.1f}", f"{rms(r['cells']):.2f}", f"{largest(r['cells']):.1f}"]
        for r in results["oracle"]
    ]
    return markdown(["problem", "modes, largest abs z", "cells, rms z", "cells, largest abs z"], rows)


def largest(values: list[float]) -> float:
    return max(map(abs, values))


def samplers(results: Record, setting: str) -> str:
    """Error of the mode weights of every sampler on every task."""
    chosen = [r for r in results["versus"] if r["setting"] == setting]
    tasks = names(chosen, "task")
    rows = []
    for sampler in names(results["versus"], "sampler"):
        by_task = {r["task"]: with_error(r["mode_error"]) for r in chosen if r["sampler"] == sampler}
        rows.append([sampler, *(by_task.get(t, "") for t in tasks)])
    paid = [number(max(r["rows"] for r in chosen if r["task"] == t)) for t in tasks]
    return markdown(["sampler", *map(task_name, tasks)], [*rows, ["most rows paid", *paid]])


def kernels(results: Record, setting: str) -> str:
    """Every kernel with every proposal on every task."""
    chosen = [r for r in results["kernels"] if r["setting"] == setting]
    wide = chosen[0]["energy"] is not None
    header = ["task", "kernel", "proposal", "energy distance" if wide else "total variation", "modes"]
    header += ["worst variance"] if wide else []
    rows = [
        [
            task_name(r["task"]), r["kernel"], r["proposal"] if r["total_exponent"] != 1 else "either",
            shown_error(r), with_error(r["mode_error"]), *([number(r["worst_variance"])] if wide else []),
            with_error(r["barrier"]), number(cost(r)), number(r["rows"]),
        ]
        for r in chosen
    ]  # fmt: skip
    return markdown([*header, "Lambda", "rows / ESS", "rows"], rows)


def figure(results: Record, path: Path) -> None:
    """Error against steps for every problem, one panel per setting; points within their noise are hollow."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    settings = names(results["kernels"], "setting")
    fig, axes = plt.subplots(2, 3, figsize=(10.5, 6.4), sharex=True, sharey=True, layout="constrained")
    colours = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]
    for ax, setting in zip(axes.flat, settings, strict=False):
        chosen = [r for r in results["orders"] if r["setting"] == setting and r["metric"] == "total variation"]
        for colour, r in zip(colours, chosen, strict=False):
            points = [(p["steps"], p["error"], p["noise"]) for p in r["points"] if p["error"] > 0]
            steps, errors, noise = zip(*points, strict=True)
            label = r["problem"].removeprefix(setting + " ")
            ax.errorbar(steps, errors, noise, color=colour, marker="o", ms=4, lw=1.2, capsize=2, label=label)
            hidden = [(n, error) for n, error, e in points if error <= 2 * e]
            if hidden:
                ax.plot(*zip(*hidden, strict=True), "o", ms=4, mfc="white", mec=colour, zorder=3)
        n = [float(s) for s in results["effort"]["steps"]]
        ax.plot(n, [1.2 / s for s in n], color="0.4", ls="--", lw=1, label="first order")
        ax.set(xscale="log", yscale="log", title=setting, ylim=(3e-3, 0.6))
        ax.set_xticks(n, [f"{s:g}" for s in n])
        ax.minorticks_off()
    for ax in axes[-1]:
        ax.set_xlabel("denoising steps")
    for ax in axes[:, 0]:
        ax.set_ylabel("total variation (bias)")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=110)
    plt.close(fig)
