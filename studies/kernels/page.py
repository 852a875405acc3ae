"""The page that `kernel_table` writes: tables, findings in sentences made of the numbers, and a figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["figure", "page"]

Record = dict[str, Any]


def number(x: float) -> str:
    return f"{x:.3g}" if abs(x) < 1000 else f"{x:,.0f}"


def with_error(pair: tuple[float, float]) -> str:
    value, error = pair
    digits = 3 if not error > 0 else max(0, min(4, 1 - math.floor(math.log10(error))))
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def law_error(r: Record) -> tuple[float, float]:
    """Distance of the pooled draws from the truth without its Monte Carlo part, and the noise of that.

    Square root of the energy distance in 20 dimensions, total variation over cells elsewhere.
    """
    if r["energy"] is not None:
        squared, error = r["energy"]
        return math.sqrt(max(squared, 0.0)), math.sqrt(error)
    return math.sqrt(max(r["tv"] ** 2 - r["tv_floor"] ** 2, 0.0)), r["tv_floor"] / 2


def shown_error(r: Record) -> str:
    value, noise = law_error(r)
    return number(value) if value > noise else f"< {number(noise)}"


def geometric(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def names(items: list[Record], key: str) -> list[str]:
    return list(dict.fromkeys(r[key] for r in items))


def task_name(task: str) -> str:
    return task.replace("_", " ")


def ratio_to_default(
    results: Record, setting: str, kernel: str, proposal: str, unit: bool, of: Callable[[Record], float]
) -> float | None:
    """Geometric mean over tasks of a quantity, relative to the Fisher variance with the balanced proposal."""
    chosen = [r for r in results["kernels"] if r["setting"] == setting and (r["total_exponent"] == 1) == unit]
    mine = {r["task"]: of(r) for r in chosen if (r["kernel"], r["proposal"]) == (kernel, proposal)}
    default = {r["task"]: of(r) for r in chosen if (r["kernel"], r["proposal"]) == ("Fisher", "balanced")}
    return geometric([mine[t] / default[t] for t in mine]) if mine else None


def floored_error(r: Record) -> float:
    return max(*law_error(r))


def cost(r: Record) -> float:
    return r["rows_per_ess"]


def summary(results: Record, unit: bool) -> str:
    settings = names(results["kernels"], "setting")
    pairs = list(
        dict.fromkeys((r["kernel"], r["proposal"]) for r in results["kernels"] if (r["total_exponent"] == 1) == unit)
    )
    rows = []
    for kernel, proposal in pairs:
        row = [kernel] if unit else [kernel, proposal]
        for setting in settings:
            error = ratio_to_default(results, setting, kernel, proposal, unit, floored_error)
            rows_per_ess = ratio_to_default(results, setting, kernel, proposal, unit, cost)
            row.append("" if error is None or rows_per_ess is None else f"{error:.2g} / {rows_per_ess:.2g}")
        rows.append(row)
    return table((["kernel"] if unit else ["kernel", "proposal"]) + settings, rows)


def kernel_tables(results: Record) -> Iterator[str]:
    for setting in names(results["kernels"], "setting"):
        chosen = [r for r in results["kernels"] if r["setting"] == setting]
        wide = chosen[0]["energy"] is not None
        yield f"### {setting}\n"
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
        yield table([*header, "Lambda", "rows / ESS", "rows"], rows) + "\n"


def order_table(results: Record) -> str:
    steps = results["effort"]["steps"]
    rows = []
    for r in results["orders"]:
        cells = [f"{p['error']:.3f} ± {min(p['noise'], 9.0):.3f}" if p["error"] else "0" for p in r["points"]]
        order = with_error(r["order"]) if r["order"] else "not resolved"
        rows.append([r["problem"], *cells, order, str(r["n_used"])])
    return table(["problem", *(f"{n} steps" for n in steps), "order", "points"], rows)


def oracle_table(results: Record) -> str:
    rms = lambda z: math.sqrt(sum(v * v for v in z) / len(z))  # noqa: E731
    largest = lambda z: max(map(abs, z))  # noqa: E731
    rows = [
        [r["problem"], f"{largest(r['modes']):.1f}", f"{rms(r['cells']):.2f}", f"{largest(r['cells']):.1f}"]
        for r in results["oracle"]
    ]
    return table(["problem", "modes, largest abs z", "cells, rms z", "cells, largest abs z"], rows)


def versus_tables(results: Record) -> Iterator[str]:
    for setting in names(results["versus"], "setting"):
        chosen = [r for r in results["versus"] if r["setting"] == setting]
        tasks = names(chosen, "task")
        yield f"### {setting}\n"
        rows = []
        for sampler in names(results["versus"], "sampler"):
            by_task = {r["task"]: with_error(r["mode_error"]) for r in chosen if r["sampler"] == sampler}
            rows.append([sampler, *(by_task.get(t, "") for t in tasks)])
        paid = [number(max(r["rows"] for r in chosen if r["task"] == t)) for t in tasks]
        yield table(["sampler", *map(task_name, tasks)], [*rows, ["most rows paid", *paid]]) + "\n"


def findings(results: Record) -> Iterator[str]:
    """What the numbers say, in sentences made of them."""
    wide = [s for s in names(results["kernels"], "setting") if s.startswith("20d")]
    for setting in wide:
        error = ratio_to_default(results, setting, "Fisher", "paper", False, floored_error)
        rows = ratio_to_default(results, setting, "Fisher", "paper", False, cost)
        euler_error = ratio_to_default(results, setting, "Euler, reference", "paper", False, floored_error)
        euler_rows = ratio_to_default(results, setting, "Euler, reference", "paper", False, cost)
        if error is None or rows is None or euler_error is None or euler_rows is None:
            continue
        yield (
            f"**{setting}, exponents that do not sum to 1.** Leaving the noising as trained (the paper's proposal) instead"
            f" of balancing costs {rows:.2g} times the rows per effective sample and makes {error:.2g} times the error at"
            f" equal rows; the paper's own setting (Euler with reference, its proposal) costs {euler_rows:.2g} times the"
            f" rows at {euler_error:.2g} times the error."
        )
        for kernel in ("v = d", "DDPM", "Euler"):
            tempered = ratio_to_default(results, setting, kernel, "balanced", False, floored_error)
            unit = ratio_to_default(results, setting, kernel, "balanced", True, floored_error)
            if tempered and unit:
                yield (
                    f"{setting}, {kernel} in place of the Fisher variance, all with the balanced proposal: {tempered:.2g}"
                    f" times the error where exponents do not sum to 1, {unit:.2g} times where they do."
                )
    flat = [s for s in names(results["kernels"], "setting") if not s.startswith("20d")]
    errors = [
        v for s in flat for k in ("v = d", "DDPM", "Euler") for u in (False, True)
        if (v := ratio_to_default(results, s, k, "balanced", u, floored_error))
    ]  # fmt: skip
    yield (
        f"**One and two dimensions.** There the kernels differ little: between {min(errors):.2g} and {max(errors):.2g}"
        " times the error of the Fisher variance, with the balanced proposal."
    )
    diagonal = [
        (s, ratio_to_default(results, s, "Fisher, diagonal", "balanced", u, floored_error))
        for s in names(results["kernels"], "setting") for u in (False, True)
    ]  # fmt: skip
    for setting, value in diagonal:
        if value:
            yield f"{setting}: one variance per coordinate makes {value:.2g} times the error of the isotropic one."
    orders = [r["order"][0] for r in results["orders"] if r["order"]]
    if orders:
        yield (
            f"**Order.** Where it can be resolved ({len(orders)} of {len(results['orders'])} series), the error falls with"
            f" the number of steps at the order {sum(orders) / len(orders):.2f} on average"
            f" ({min(orders):.2f} to {max(orders):.2f}): first order."
        )
    z = [abs(v) for r in results["oracle"] for v in r["modes"]]
    cells = [v for r in results["oracle"] for v in r["cells"]]
    yield (
        f"**Oracle.** With exact log-densities, {sum(v > 2 for v in z)} of {len(z)} mode weights are more than two standard"
        f" errors from the truth (chance: {0.046 * len(z):.0f}), the largest {max(z):.1f}; over {len(cells)} cells the root"
        f" mean square of z is {math.sqrt(sum(v * v for v in cells) / len(cells)):.2f}."
    )
    best: dict[str, int] = {}
    for problem in names(results["versus"], "problem"):
        rows_of = [r for r in results["versus"] if r["problem"] == problem and r["sampler"] != "guidance alone"]
        winner = min(rows_of, key=lambda r: r["mode_error"][0])["sampler"].split(",")[0]
        best[winner] = best.get(winner, 0) + 1
    counts = ", ".join(f"{name} on {n}" for name, n in sorted(best.items(), key=lambda item: -item[1]))
    yield (
        f"**CREPE and SMC at equal rows.** The smallest error of the mode weights, burn-in and set-up paid for: {counts}"
        " problems. These targets are easy and the budgets small, which favours SMC with a good proposal: RNE weights on"
        " the balanced proposal are the method to beat, and they are the same `log_work` that CREPE accepts with. The"
        " weights of Feynman-Kac correctors, and twisted or steered particles, degenerate where exponents do not sum to 1"
        " in 20 dimensions."
    )


def figure(results: Record, path: Path) -> None:
    """Error against steps for every problem, one panel a setting."""
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


def page(results: Record, command: str) -> str:
    effort = results["effort"]
    parts = [
        "# Kernels, proposals and samplers compared\n",
        f"Written by `{command}` with seed {results['seed']}; the numbers are in `kernels.json` beside this page.\n",
        "Six settings (1, 2 and 20 dimensions; isotropic, and stiff with scales from 0.05 to 1) times six tasks (the four of"
        " the paper and two combinations), all Gaussian mixtures whose target is known. `experiments/problems.py` defines"
        f" them. CREPE runs on {effort['n_levels']} levels with one sub-step unless said otherwise; costs are network rows,"
        " set-up and burn-in included.\n",
        "## What came out\n",
        *(f"- {sentence}" for sentence in findings(results)),
        "\n## Relative to the Fisher variance with the balanced proposal\n",
        "Error / rows per effective sample, geometric means over tasks, at equal rows. Exponents that do not sum to 1"
        " (tempering, composition and their combinations):\n",
        summary(results, False),
        "\nExponents that sum to 1 (tilting, guidance), where both proposals coincide and the reference cancels:\n",
        summary(results, True),
        "\n## Error against the number of steps\n",
        "Distance to the truth at level 0 with its Monte Carlo part removed, for the default kernel, and the slope of its"
        " logarithm over the points that stand out of the noise. A second line for a problem in 20 dimensions is the"
        " square root of the energy distance.\n",
        "![Error against steps](figures/kernels-order.png)\n",
        order_table(results),
        "\n## With exact log-densities\n",
        "z-scores over 64 chains of the chain that uses exact log-densities in place of `L_j`: no discretisation error is"
        " left, so what remains is Monte Carlo.\n",
        oracle_table(results),
        "\n## Samplers at equal network rows\n",
        "Total variation of the mode weights, mean over replicates.\n",
        *versus_tables(results),
        "## All kernels on all problems\n",
        "`modes` is the error of the mode weights; `worst variance` is that of the coordinate whose variance is furthest"
        " from the truth (1) after tempering, product and guidance; a value behind `<` is hidden by Monte Carlo noise.\n",
        *kernel_tables(results),
    ]
    return "\n".join(parts).replace("\n\n\n", "\n\n")
