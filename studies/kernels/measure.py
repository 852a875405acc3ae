"""Measure kernels, proposals and samplers on problems with known truth.

    error    =  distance of the draws at level 0 from the exact law, less what Monte Carlo noise alone would show
    cost     =  network rows, as the samplers count them, set-up and burn-in included

Four parts per problem: kernels at equal rows, the order of the error in the number of steps, the chain with exact
log-densities, and samplers at equal rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.kernels import Explorer
from crepe_diffusion.models import GaussianMixture
from crepe_diffusion.processes import EulerMaruyama, Gaussian, Process
from studies.kernels.problems import SETTINGS, TASKS, Problem
from studies.kernels.tables import Record

__all__ = ["QUICK", "Effort", "measure", "measure_again"]

SMALL_BATCHES = "SMC, rne, batches of 64"
Errors = tuple[list[float], float]
"""The error of each replicate, and the rows that one of them paid."""


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
    proposal: cd.Proposal | None = None,
    explorer: Explorer | None = None,
    burn_in: float = 0.25,
) -> Run:
    """Replica exchange on `rows` network rows for each group of `n_chains` chains.

    Groups share one batch and one measurement of the Fisher variance, which is charged to each of them.
    """
    chain = cd.ReplicaExchange(
        problem.target, problem.ladder(n_levels, substeps), n_chains=n_chains * n_groups, seed=seed,
        process=process or FISHER, proposal=proposal, explorer=explorer,
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
        replicates=list(out.chains.split(n_chains, 1)),
        rows=fit + (out.evaluations.rows - fit) / n_groups,
        sampling_rows=step * (n - skip),
        barrier=out.diagnostics.barrier().value,
    )


FISHER = Gaussian(variance="fisher")
"""One variance for all coordinates: what every comparison here starts from."""

# -- the four parts ------------------------------------------------------------------------------------------


def kernels(problem: Problem) -> Iterator[tuple[str, Process]]:
    """The kernels that apply; a diagonal variance only where scales differ, the default only where it may be one."""
    p = problem.target.models[0]
    assert isinstance(p, GaussianMixture)
    mean = p.weights @ p.means
    total = p.weights @ (p.eigenvalues + (p.means - mean) ** 2)
    yield "Fisher", FISHER
    if problem.setting.dimension > 1:
        yield "Fisher, default", Gaussian()
    if "stiff" in problem.name and problem.setting.dimension > 1:
        yield "Fisher, diagonal", Gaussian(variance="fisher-diagonal")
    yield "v = d", Gaussian(variance=math.inf)
    yield "DDPM", Gaussian(variance=0.0)
    yield "Euler", EulerMaruyama()
    if sum(problem.target.exponents) != 1:
        yield "Euler, reference", EulerMaruyama(reference=float(total.mean().sqrt()))


def compare_kernels(problem: Problem, effort: Effort, seed: int, only: Collection[str] = ()) -> Iterator[Record]:
    """Error, barrier and cost of each kernel with each proposal, at equal rows; of those in `only`, or of all."""
    proposals = ("balanced",) if sum(problem.target.exponents) == 1 else ("balanced", "paper")
    iterations = effort.kernel_iterations_20d if problem.setting.dimension == 20 else effort.kernel_iterations
    rows = iterations * effort.kernel_chains * effort.n_levels * len(problem.target.models)
    for kernel, process in kernels(problem):
        for k in proposals if kernel in only or not only else ():
            runs = [
                run_chain(
                    problem, effort.n_levels, 1, rows=rows, n_chains=effort.kernel_chains, n_groups=effort.n_groups,
                    seed=seed + i, process=process, proposal=cd.Proposal(k),
                )
                for i in range(effort.n_seeds)
            ]  # fmt: skip
            draws = torch.cat([r.draws for r in _equal_length(runs)], 1)
            tv, floor = problem.total_variation(problem.per_chain(problem.cell_weights, draws))
            energy = problem.energy_distance(draws, cd.Stream(seed).at("energy")) if len(problem.setting.rest) else None
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
                {"steps": steps, "levels": n_levels, **part(problem, run.draws, cd.Stream(seed).at("energy", steps))}
            )
    for metric, series in points.items():
        usable = [p for p in series if p["error"] > 2 * p["noise"]]
        yield {
            "problem": problem.name, "setting": problem.setting.name, "task": problem.task.__name__,
            "metric": metric, "points": series, "order": fitted_order(usable), "n_used": len(usable),
        }  # fmt: skip


def _energy(problem: Problem, draws: Tensor, stream: cd.Stream) -> Record:
    """The square root of the energy distance, and its noise."""
    squared, error = problem.energy_distance(draws, stream)
    value = math.sqrt(max(squared, 0.0))
    return {"error": value, "noise": math.sqrt(error) if squared < error else error / (2 * value), "raw": squared}


def _variation(problem: Problem, draws: Tensor, stream: cd.Stream) -> Record:
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
    log_probs = tuple(m.log_prob for m in problem.target.models if isinstance(m, GaussianMixture))
    chain = cd.ReplicaExchange(
        problem.target,
        problem.ladder(13, 2),
        n_chains=64,
        seed=seed,
        process=Gaussian(variance="fisher", log_probs=log_probs),
    )
    out = chain.sample(effort.oracle_iterations, burn_in=effort.oracle_iterations // 3)
    return {
        "problem": problem.name, "setting": problem.setting.name, "task": problem.task.__name__,
        "modes": z_scores(problem.per_chain(problem.mode_weights, out.chains), problem.mode_truth),
        "cells": z_scores(problem.per_chain(problem.cell_weights, out.chains), problem.cell_truth),
    }  # fmt: skip


def z_scores(shares: Tensor, truth: Tensor) -> list[float]:
    """How far the mean over chains is from the truth, in standard errors."""
    return ((shares.mean(0) - truth) / (shares.std(0) / math.sqrt(len(shares)))).tolist()


def compare_samplers(problem: Problem, effort: Effort, seed: int, only: Collection[str] = ()) -> Iterator[Record]:
    """Error of the mode weights of each sampler at equal rows for each replicate; of those in `only`, or of all."""
    rows, groups, n_levels = effort.versus_rows * len(problem.target.models), effort.versus_groups, effort.n_levels

    def exchange(explorer: Explorer | None, seed: int) -> Errors:
        run = run_chain(
            problem, n_levels // 2 + 1, 2, rows=rows, n_chains=4, n_groups=groups, seed=seed, explorer=explorer
        )
        return [problem.mode_error(x.flatten(0, 1)) for x in run.replicates], run.rows

    def smc(weight: cd.Weight, batch: int | None, seed: int) -> Errors:
        replicates, cost = run_smc(problem, n_levels, weight, rows, groups, seed, batch)
        return [problem.mode_error(x, w) for x, w in replicates], cost

    variants: dict[str, cd.Weight] = {
        "rne": cd.PathWork(),
        "fkc": cd.FeynmanKac(),
        "fkc-noise": cd.FeynmanKac(cooled=True),
    }
    if problem.target.rewards:
        variants |= {"twisted": cd.Twisted(), "fk-steering": cd.Steering()}
    runs: dict[str, Callable[[int], Errors]] = {
        "CREPE": partial(exchange, None),
        "CREPE, Bounce": partial(exchange, cd.Bounce()),
        "CREPE, Langevin": partial(exchange, cd.Langevin()),
        **{f"SMC, {name}": partial(smc, weight, None) for name, weight in variants.items()},
        SMALL_BATCHES: partial(smc, cd.PathWork(), 64),
        "guidance alone": partial(_guidance, problem, rows, groups, n_levels),
    }
    for name, run in runs.items():
        if name in only or not only:
            parts = [run(seed + i) for i in range(effort.n_seeds)]
            yield _versus(problem, name, [e for errors, _ in parts for e in errors], [cost for _, cost in parts])


def _guidance(problem: Problem, rows: float, n_groups: int, n_levels: int, seed: int) -> Errors:
    errors, costs = [], []
    for i in range(n_groups):
        sampler = cd.Plain(problem.target, problem.ladder(n_levels), seed=seed + i, process=FISHER)
        fit = sampler.evaluate.counts.rows
        x = sampler.sample(max(1, int((rows - fit) / ((n_levels - 1) * len(problem.target.models))))).x
        errors.append(problem.mode_error(x))
        costs.append(sampler.evaluate.counts.rows)
    return errors, sum(costs) / len(costs)


def run_smc(
    problem: Problem, n_levels: int, weight: cd.Weight, rows: float, n_groups: int, seed: int, batch: int | None
) -> tuple[list[tuple[Tensor, Tensor]], float]:
    """Weighted draws of each replicate and what it paid; one batch of particles each, or as many of `batch` as fit."""
    # Feynman-Kac correctors use no denoising variance, so none is measured for them.
    process = Gaussian(variance=0.0) if isinstance(weight, cd.FeynmanKac) else None
    n_models = len(problem.target.models)
    per_particle = n_levels * n_models
    if isinstance(weight, cd.FeynmanKac) and problem.target.rewards:
        per_particle += (n_levels - 1) * n_models
    fit = 0 if process else (256 * n_levels + 2) * n_models
    n = int((rows - fit) / per_particle)
    n_batches, n = (n // batch, batch) if batch else (1, n)
    smc = cd.SMC(
        problem.target, problem.ladder(n_levels), n_particles=n, n_batches=n_batches * n_groups, weight=weight,
        seed=seed, process=process or FISHER,
    )  # fmt: skip
    fit = smc.evaluate.counts.rows
    out = smc.sample()
    paid = fit + (out.evaluations.rows - fit) / n_groups
    # Batches of a replicate are pooled by their estimates of Z.
    parts = [out.of_batches(range(i * n_batches, (i + 1) * n_batches)) for i in range(n_groups)]
    return [(part.x, part.weights) for part in parts], paid


def _versus(problem: Problem, sampler: str, errors: list[float], costs: list[float]) -> Record:
    return {
        "problem": problem.name, "setting": problem.setting.name, "task": problem.task.__name__, "sampler": sampler,
        "mode_error": mean_and_error(errors), "rows": sum(costs) / len(costs), "n": len(errors),
    }  # fmt: skip


def measure_again(
    results: Record, names: Collection[str], effort: Effort, done: Callable[[str], None] = lambda name: None
) -> Record:
    """The same results with these samplers and kernels measured again, or for the first time."""
    versus = {(r["problem"], r["sampler"]): r for r in results["versus"]}
    of_kernels = {(r["problem"], r["kernel"], r["proposal"]): r for r in results["kernels"]}
    for setting in SETTINGS:
        for task in TASKS:
            problem = Problem(setting, task, torch.float32)
            versus |= {
                (r["problem"], r["sampler"]): r for r in compare_samplers(problem, effort, results["seed"], names)
            }
            of_kernels |= {
                (r["problem"], r["kernel"], r["proposal"]): r
                for r in compare_kernels(problem, effort, results["seed"], names)
            }
            done(problem.name)
    order = list(dict.fromkeys(r["problem"] for r in results["kernels"]))
    return {
        **results,
        "versus": list(versus.values()),
        "kernels": sorted(of_kernels.values(), key=lambda r: order.index(r["problem"])),
    }


def measure(effort: Effort, seed: int, done: Callable[[str], None] = lambda name: None) -> Record:
    """All parts on all problems; `done` is called with the name of each problem after it was measured."""
    results: Record = {"effort": asdict(effort), "seed": seed, "kernels": [], "orders": [], "oracle": [], "versus": []}
    for setting in SETTINGS:
        for task in TASKS:
            problem = Problem(setting, task, torch.float32)
            results["kernels"] += compare_kernels(problem, effort, seed)
            results["orders"] += measure_order(problem, effort, seed)
            results["oracle"].append(check_oracle(problem, effort, seed))
            results["versus"] += compare_samplers(problem, effort, seed)
            done(problem.name)
    return results
