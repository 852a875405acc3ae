"""Kernels, proposals and samplers compared on problems with known truth; writes docs/kernels.md.

    python -m crepe_diffusion.experiments.kernel_table [--quick] [--seed 0] [--out docs/kernels.md] [--from-json]

Every number and every sentence with a number in that page comes from the JSON file beside it, which this command
writes first. Costs are network rows as the samplers count them, set-up included.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crepe_diffusion.experiments.problems import SETTINGS, TASKS, Problem
from crepe_diffusion.kernels import Bounce, Explorer, Langevin
from crepe_diffusion.models import GaussianMixture
from crepe_diffusion.processes import EulerMaruyama, Gaussian, Oracle, Process
from crepe_diffusion.random import Stream
from crepe_diffusion.samplers import SMC, Guidance, ReplicaExchange
from crepe_diffusion.targets import Proposal

__all__ = ["main"]

Record = dict[str, Any]


@dataclass(frozen=True)
class Effort:
    """How much to run. Iterations are those of a chain whose set-up is free; set-up is then paid out of them."""

    n_seeds: int = 1
    n_groups: int = 4
    n_levels: int = 33
    kernel_chains: int = 12
    kernel_iterations: int = 160
    kernel_iterations_20d: int = 260
    order_rows: float = 2e5
    oracle_iterations: int = 160
    versus_rows: float = 5e4
    versus_groups: int = 6
    steps: tuple[int, ...] = (8, 16, 32, 64)


QUICK = Effort(
    n_seeds=1, kernel_chains=6, kernel_iterations=20, kernel_iterations_20d=20, order_rows=1e4,
    oracle_iterations=20, versus_rows=12e3, versus_groups=2, n_levels=17, steps=(8, 16),
)  # fmt: skip


def mean_and_error(values: list[float]) -> tuple[float, float]:
    v = torch.tensor(values, dtype=torch.float64)
    return float(v.mean()), float(v.std() / math.sqrt(len(v))) if len(v) > 1 else math.nan


def mode_ess(problem: Problem, x: Tensor) -> float:
    """Effective sample size of the mode that mixes worst, of those that hold more than 2 % of the truth.

    From the variance between chains. The autocorrelation of one chain misses a small but long tail: replicas of
    different lineage alternate at level 0 and look independent, while the share of the ladder that sits in a mode
    changes slowly.
    """
    shares = problem.per_chain(problem.mode_weights, x)[:, problem.mode_truth > 0.02]
    w = shares.mean(0)
    return float((len(shares) * w * (1 - w) / shares.var(0)).min())


@dataclass(frozen=True)
class Run:
    """Draws of several replicates, each of which paid `rows` network rows, set-up included."""

    replicates: list[Tensor]
    rows: float
    sampling_rows: float
    barrier: float

    @property
    def draws(self) -> Tensor:
        return torch.cat(self.replicates, 1)


def run_chain(
    problem: Problem,
    n_levels: int,
    substeps: int,
    *,
    rows: float,
    n_chains: int,
    n_groups: int,
    seed: int,
    process: Process | None = None,
    proposal: Proposal | None = None,
    explorer: Explorer | None = None,
    burn_in: float = 0.25,
) -> Run:
    """Replica exchange on `rows` network rows for each group of `n_chains` chains.

    Groups share one batch and one measurement of the Fisher variance, which is charged to each of them.
    """
    chain = ReplicaExchange(
        problem.target, problem.ladder(n_levels, substeps), n_chains=n_chains * n_groups, seed=seed,
        process=process, proposal=proposal, explorer=explorer,
    )  # fmt: skip
    counts = chain.evaluate.counts
    initial = n_chains * n_groups * len(chain.ladder.times) * chain.evaluate.network_rows
    fit = counts.rows - initial
    chain.step()
    step = counts.rows - initial - fit
    n = max(8, int((n_groups * (rows - fit) - initial) / step) - 1)
    skip = int(burn_in * n)
    out = chain.sample(n - skip, burn_in=skip)
    return Run(
        replicates=list(out.x.split(n_chains, 1)),
        rows=fit + (out.evaluations.rows - fit) / n_groups,
        sampling_rows=step * (n - skip),
        barrier=out.diagnostics.barrier().value,
    )


# -- the four parts ------------------------------------------------------------------------------------------


def kernels(problem: Problem) -> Iterator[tuple[str, Process]]:
    """The kernels that apply; a diagonal variance only where scales differ between coordinates."""
    p = problem.target.models[0]
    assert isinstance(p, GaussianMixture)
    mean = p.weights @ p.means
    total = p.weights @ (p.eigenvalues + (p.means - mean) ** 2)
    yield "Fisher", Gaussian()
    if "stiff" in problem.name and problem.setting.dimension > 1:
        yield "Fisher, diagonal", Gaussian(variance="fisher-diagonal")
    yield "v = d", Gaussian(variance=math.inf)
    yield "DDPM", Gaussian(variance=0.0)
    yield "Euler", EulerMaruyama()
    if sum(problem.target.exponents) != 1:
        yield "Euler, reference", EulerMaruyama(reference=float(total.mean().sqrt()))


def compare_kernels(problem: Problem, effort: Effort, seed: int) -> Iterator[Record]:
    """Error, barrier and cost of each kernel with each proposal, at equal rows."""
    proposals = ("balanced",) if sum(problem.target.exponents) == 1 else ("balanced", "paper")
    iterations = effort.kernel_iterations_20d if problem.setting.dimension == 20 else effort.kernel_iterations
    rows = iterations * effort.kernel_chains * effort.n_levels * len(problem.target.models)
    for kernel, process in kernels(problem):
        for k in proposals:
            runs = [
                run_chain(
                    problem, effort.n_levels, 1, rows=rows, n_chains=effort.kernel_chains, n_groups=effort.n_groups,
                    seed=seed + i, process=process, proposal=Proposal(k),
                )
                for i in range(effort.n_seeds)
            ]  # fmt: skip
            draws = torch.cat([r.draws for r in _equal_length(runs)], 1)
            tv, floor = problem.total_variation(problem.per_chain(problem.cell_weights, draws))
            energy = problem.energy_distance(draws, Stream(seed).at("energy")) if len(problem.setting.rest) else None
            errors = [problem.mode_error(x.flatten(0, 1)) for r in runs for x in r.replicates]
            effective = mode_ess(problem, draws)
            scale = problem.standardised(draws.flatten(0, 1)).var(0)[problem.setting.n_core :]
            yield {
                "problem": problem.name, "setting": problem.setting.name, "task": problem.task.__name__,
                "total_exponent": sum(problem.target.exponents), "kernel": kernel, "proposal": k,
                "tv": tv, "tv_floor": floor, "energy": energy,
                "mode_error": mean_and_error(errors), "barrier": mean_and_error([r.barrier for r in runs]),
                "rows_per_ess": sum(r.sampling_rows for r in runs) / effective,
                # Chains that never change their mode still differ from one another: what is seen is then a bound.
                "stuck": effective < 2 * draws.shape[1], "rows": sum(r.rows for r in runs) / len(runs),
                "worst_variance": float(scale[(scale - 1).abs().argmax()]) if len(scale) else None,
            }  # fmt: skip


def _equal_length(runs: list[Run]) -> list[Run]:
    n = min(len(r.draws) for r in runs)
    return [Run([x[:n] for x in r.replicates], r.rows, r.sampling_rows, r.barrier) for r in runs]


def measure_order(problem: Problem, effort: Effort, seed: int) -> Iterator[Record]:
    """Error against the number of steps of the default kernel, and the slope of their logarithms."""
    points: dict[str, list[Record]] = {"total variation": []}
    if problem.setting.rest:
        points["energy distance"] = []
    for steps in effort.steps:
        n_levels, substeps = steps // 2 + 1, 2
        # A replica needs M iterations from end to end; the rows that are left go into more chains.
        iterations = max(120, 16 * (n_levels - 1))
        rows = effort.order_rows * steps / effort.steps[1]
        n_chains = max(16, int(rows / (iterations * n_levels * substeps)))
        run = run_chain(
            problem, n_levels, substeps, rows=rows * len(problem.target.models), n_chains=n_chains, n_groups=1,
            seed=seed + steps,
        )  # fmt: skip
        for metric, series in points.items():
            part = _variation if metric == "total variation" else _energy
            series.append(
                {"steps": steps, "levels": n_levels, **part(problem, run.draws, Stream(seed).at("energy", steps))}
            )
    for metric, series in points.items():
        usable = [p for p in series if p["error"] > 2 * p["noise"]]
        yield {
            "problem": problem.name, "setting": problem.setting.name, "task": problem.task.__name__,
            "metric": metric, "points": series, "order": fitted_order(usable), "n_used": len(usable),
        }  # fmt: skip


def _energy(problem: Problem, draws: Tensor, stream: Stream) -> Record:
    """The square root of the energy distance, and its noise."""
    squared, error = problem.energy_distance(draws, stream)
    value = math.sqrt(max(squared, 0.0))
    return {"error": value, "noise": math.sqrt(error) if squared < error else error / (2 * value), "raw": squared}


def _variation(problem: Problem, draws: Tensor, stream: Stream) -> Record:
    """Total variation without its Monte Carlo part, and the noise of what is left by a jackknife over chains."""
    shares = problem.per_chain(problem.cell_weights, draws)
    raw, floor = problem.total_variation(shares)
    groups = shares.split(max(1, len(shares) // 8))
    parts = [problem.total_variation(torch.cat(groups[:i] + groups[i + 1 :]))[0] for i in range(len(groups))]
    spread = torch.tensor(parts, dtype=torch.float64)
    noise = float(((len(parts) - 1) * spread.var(unbiased=False)).sqrt())
    return {"error": math.sqrt(max(raw**2 - floor**2, 0.0)), "noise": max(noise, floor / 4), "raw": raw, "floor": floor}


def fitted_order(points: list[Record]) -> tuple[float, float] | None:
    """Slope of log error against -log steps by weighted least squares; its error is widened where the fit is poor."""
    if len(points) < 3:
        return None
    x = -torch.tensor([math.log(p["steps"]) for p in points], dtype=torch.float64)
    y = torch.tensor([math.log(p["error"]) for p in points], dtype=torch.float64)
    w = torch.tensor([(p["error"] / p["noise"]) ** 2 for p in points], dtype=torch.float64).clamp(max=400)
    x_mean, y_mean = (w @ x) / w.sum(), (w @ y) / w.sum()
    s_xx = w @ (x - x_mean) ** 2
    slope = (w @ ((x - x_mean) * (y - y_mean))) / s_xx
    chi2 = (w @ (y - y_mean - slope * (x - x_mean)) ** 2) / (len(points) - 2)
    return float(slope), float((chi2.clamp(min=1) / s_xx).sqrt())


def check_oracle(problem: Problem, effort: Effort, seed: int) -> Record:
    """The chain with exact log-densities in place of L_j against the truth, in standard errors over chains."""
    problem = Problem(problem.setting, problem.task)
    oracle = Oracle(Gaussian(), tuple(m.log_prob for m in problem.target.models if isinstance(m, GaussianMixture)))
    chain = ReplicaExchange(problem.target, problem.ladder(13, 2), n_chains=64, seed=seed, process=oracle)
    out = chain.sample(effort.oracle_iterations, burn_in=effort.oracle_iterations // 3)
    return {
        "problem": problem.name, "setting": problem.setting.name, "task": problem.task.__name__,
        "modes": z_scores(problem.per_chain(problem.mode_weights, out.x), problem.mode_truth),
        "cells": z_scores(problem.per_chain(problem.cell_weights, out.x), problem.cell_truth),
    }  # fmt: skip


def z_scores(shares: Tensor, truth: Tensor) -> list[float]:
    """How far the mean over chains is from the truth, in standard errors."""
    return ((shares.mean(0) - truth) / (shares.std(0) / math.sqrt(len(shares)))).tolist()


def compare_samplers(problem: Problem, effort: Effort, seed: int) -> Iterator[Record]:
    """Error of the mode weights of each sampler at equal rows for each replicate."""
    n_models = len(problem.target.models)
    rows, groups, n_levels = effort.versus_rows * n_models, effort.versus_groups, effort.n_levels
    explorers: list[tuple[str, Explorer | None]] = [
        ("CREPE", None),
        ("CREPE, Bounce", Bounce()),
        ("CREPE, Langevin", Langevin()),
    ]
    for name, explorer in explorers:
        errors, costs = [], []
        for i in range(effort.n_seeds):
            run = run_chain(
                problem, n_levels // 2 + 1, 2, rows=rows, n_chains=4, n_groups=groups, seed=seed + i, explorer=explorer
            )
            errors += [problem.mode_error(x.flatten(0, 1)) for x in run.replicates]
            costs.append(run.rows)
        yield _versus(problem, name, errors, costs)
    variants = ["rne", "fkc", "fkc-noise"] + (["twisted", "fk-steering"] if problem.target.rewards else [])
    for weights, small in [(v, False) for v in variants] + [("rne", True)]:
        errors, costs = [], []
        for i in range(effort.n_seeds):
            replicates, cost = run_smc(problem, n_levels, weights, rows, groups, seed + i, 64 if small else None)
            errors += [problem.mode_error(x, w) for x, w in replicates]
            costs.append(cost)
        yield _versus(problem, f"SMC, {weights}" + (", batches of 64" if small else ""), errors, costs)
    errors, costs = [], []
    for i in range(effort.n_seeds * groups):
        sampler = Guidance(problem.target, problem.ladder(n_levels), seed=seed + i)
        fit = sampler.evaluate.counts.rows
        x = sampler.sample(max(1, int((rows - fit) / ((n_levels - 1) * n_models))))
        errors.append(problem.mode_error(x))
        costs.append(sampler.evaluate.counts.rows)
    yield _versus(problem, "guidance alone", errors, costs)


def run_smc(
    problem: Problem, n_levels: int, weights: str, rows: float, n_groups: int, seed: int, batch: int | None
) -> tuple[list[tuple[Tensor, Tensor]], float]:
    """Weighted draws of each replicate and what it paid; one batch of particles each, or as many of `batch` as fit."""
    # Feynman-Kac correctors use no denoising variance, so none is measured for them.
    process = Gaussian(variance=0.0) if weights.startswith("fkc") else None
    n_models = len(problem.target.models)
    per_particle = n_levels * n_models
    if weights.startswith("fkc") and problem.target.rewards:
        per_particle += (n_levels - 1) * n_models
    fit = 0 if process else (256 * n_levels + 2) * n_models
    n = int((rows - fit) / per_particle)
    n_batches, n = (n // batch, batch) if batch else (1, n)
    smc = SMC(
        problem.target, problem.ladder(n_levels), n_particles=n, n_batches=n_batches * n_groups, weights=weights,
        seed=seed, process=process,
    )  # fmt: skip
    fit = smc.evaluate.counts.rows
    out = smc.sample()
    x, w = out.x.split(n_batches), (out.log_weights.exp() / n_batches).split(n_batches)
    paid = fit + (out.evaluations.rows - fit) / n_groups
    return [(a.flatten(0, 1), b.flatten()) for a, b in zip(x, w, strict=True)], paid


def _versus(problem: Problem, sampler: str, errors: list[float], costs: list[float]) -> Record:
    return {
        "problem": problem.name, "setting": problem.setting.name, "task": problem.task.__name__, "sampler": sampler,
        "mode_error": mean_and_error(errors), "rows": sum(costs) / len(costs), "n": len(errors),
    }  # fmt: skip


def measure(effort: Effort, seed: int, advance: Callable[[str, Record], None]) -> Record:
    """All parts on all problems."""
    results: Record = {"effort": asdict(effort), "seed": seed, "kernels": [], "orders": [], "oracle": [], "versus": []}
    for setting in SETTINGS:
        for task in TASKS:
            problem = Problem(setting, task, torch.float32)
            advance(problem.name, results)
            results["kernels"] += compare_kernels(problem, effort, seed)
            results["orders"] += measure_order(problem, effort, seed)
            results["oracle"].append(check_oracle(problem, effort, seed))
            results["versus"] += compare_samplers(problem, effort, seed)
    return results


# -- the page ------------------------------------------------------------------------------------------------


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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m crepe_diffusion.experiments.kernel_table", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="a minute or two, to see that it runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("docs/kernels.md"))
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--from-json", action="store_true", help="write the page anew from the numbers beside it")
    options = parser.parse_args(arguments)
    store = options.out.with_suffix(".json")
    command = "python -m crepe_diffusion.experiments.kernel_table" + (" --quick" if options.quick else "")
    if options.from_json:
        results = json.loads(store.read_text())
    else:
        from rich.progress import Progress

        torch.set_num_threads(1)  # batches this small gain nothing from a second thread
        with Progress(disable=options.quiet) as bars:
            bar = bars.add_task("problems", total=len(SETTINGS) * len(TASKS) + 1)

            def advance(name: str, _: Record) -> None:
                bars.update(bar, advance=1, description=name)

            results = measure(QUICK if options.quick else Effort(), options.seed, advance)
        store.parent.mkdir(parents=True, exist_ok=True)
        store.write_text(json.dumps(results))
    figure(results, options.out.parent / "figures" / "kernels-order.png")
    options.out.write_text(page(results, command))
    print(f"Wrote {options.out}, {store} and {options.out.parent / 'figures' / 'kernels-order.png'}", file=sys.stderr)


if __name__ == "__main__":
    main()
