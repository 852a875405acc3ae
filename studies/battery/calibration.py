"""Are stated errors and verdicts right? Many seeds of every sampler on problems whose truth is known.

    python -m studies.battery calibrate [--seeds 20] [--budgets 20000 200000] [--problems NAME ...] [--workers 2]

For each run: the 95 % interval of every scalar's mean and of log Z, whether it holds the truth, and the verdict. Every
run pays for its own set-up. Results are kept one by one, so that a study that was stopped goes on.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import crepe_diffusion as cd
from studies.battery.problems import Problem, battery, random
from studies.shared.pages import markdown
from studies.shared.results import Results

__all__ = ["DEFAULT", "METHODS", "Job", "chosen", "run_all", "run_job", "table"]

DEFAULT = (
    "tempering isotropic d=16 beta=2",
    "tempering isotropic d=32 beta=2",
    "tempering isotropic d=16 beta=3",
    "tempering stiff d=16 beta=2",
    "rare tilt with gradient, power annealing",
    "posterior of a mode of prior weight 0.001",
    "masked tokens 4x3 mild w=2 w'=2",
    "masked tokens 4x3 steep w=2 w'=2",
    "uniform tokens 4x3 mild w=2 w'=2",
    "uniform tokens 4x3 steep w=2 w'=2",
    "mini-batch mixture",
    "1d tilting",
    "20d tempering",
)
"""One problem of every kind, the hard ones among them."""
N_CHAINS = 8
TOKEN_LEVELS = 5
N_PARTICLES = 64
BURN_IN = 0.25
"""The share of a chain's iterations that is dropped."""


@dataclass(frozen=True)
class Job:
    """One sampler on one problem with one budget of network rows and one seed."""

    problem: str
    method: str
    budget: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.problem} {self.method} {self.budget} seed {self.seed}".replace("/", "-")


def chosen(name: str) -> Problem:
    """The problem of this name; `held out 7: ...` is one of those that seed 7 makes."""
    found = {p.name: p for p in battery()}
    if name.startswith("held out "):
        seed = name.removeprefix("held out ").partition(": ")[0]
        found |= {f"held out {seed}: {p.name}": p for p in random(int(seed))}
    if name not in found:
        raise cd.InputError(f"no problem {name!r}; there are {', '.join(found)}")
    return found[name]


def _is_masked(problem: Problem) -> bool:
    return isinstance(problem.target.models[0].process(), cd.processes.Masked)


def pilot(problem: Problem, budget: int, seed: int) -> cd.samplers.Pilot:
    """A pass that costs about a fifth of the budget, less for large ones."""
    n = min(256, max(16, budget // (10 * problem.steps)))
    steps = problem.ladder(problem.steps + 1)
    return cd.pilot(problem.target, steps, n=n, seed=seed, proposal=problem.proposal, fit_samples=n)


def replica_exchange(problem: Problem, budget: int, seed: int) -> dict[str, Any]:
    """Planned by a pilot and started from it; a quarter of the iterations is dropped.

    Walks of masked tokens cost as many rows as tokens change, however many levels there are: few levels, and no plan.
    """
    if _is_masked(problem):
        found, ladder = None, problem.ladder(TOKEN_LEVELS)
    else:
        found, ladder = pilot(problem, budget, seed), None
    chain = cd.ReplicaExchange(
        problem.target, ladder, pilot=found, n_chains=N_CHAINS, seed=seed, proposal=problem.proposal
    )
    before = chain.evaluate.counts.rows
    chain.step()
    each = chain.evaluate.counts.rows - before
    n = max(8, (budget - before) // each - 1)
    burn_in = int(BURN_IN * n)
    out = chain.sample(n - burn_in, burn_in=burn_in)
    bias = 0.0 if found is None else found.discretisation.value
    return _record(problem, out, bias) | {"levels": chain.ladder.n_levels}


def smc(problem: Problem, budget: int, seed: int) -> dict[str, Any]:
    """As many batches of 64 particles as the budget allows, pooled by their estimates of Z; fitted by a pilot."""
    found = None if _is_masked(problem) else pilot(problem, budget, seed)
    ladder = problem.ladder(TOKEN_LEVELS if found is None else problem.steps + 1)
    sampler = cd.SMC(
        problem.target,
        ladder,
        n_particles=N_PARTICLES,
        seed=seed,
        proposal=problem.proposal,
        process=None if found is None else found.process,
    )
    rows = sampler.sample().evaluations.rows  # what one batch costs; it is paid for and drawn again
    paid = rows + (0 if found is None else found.rows)
    sampler.n_batches = max(2, (budget - paid) // rows)
    out = sampler.sample()
    return _record(problem, out, 0.0 if found is None else found.discretisation.value)


METHODS: dict[str, Callable[[Problem, int, int], dict[str, Any]]] = {"replica exchange": replica_exchange, "SMC": smc}


def _record(problem: Problem, out: cd.samplers.Result, discretisation: float) -> dict[str, Any]:
    """The error of log Z has two parts: chance, and what the pilot measured of the size of the steps."""
    verdict = out.verdict(problem.scalars)
    means = {name: out.mean(f) for name, f in problem.scalars.items()}
    log_z = out.log_z
    log_z = cd.Estimate(log_z.value, math.hypot(log_z.error, discretisation), log_z.dof)
    return {
        "rows": out.evaluations.rows,
        "verdict": verdict.level,
        "reasons": verdict.reasons,
        "means": {name: _estimate(m, problem.truths[name]) for name, m in means.items()},
        "ess": {name: out.ess(f) for name, f in problem.scalars.items()},
        "log_z": None if problem.log_z is None or math.isnan(log_z.value) else _estimate(log_z, problem.log_z),
    }


def _estimate(e: cd.Estimate, truth: float) -> dict[str, float | bool]:
    low, high = e.interval()
    return {"value": e.value, "error": e.error, "dof": min(e.dof, 1e9), "truth": truth, "covered": low <= truth <= high}


def run_job(job: Job, folder: Path) -> dict[str, Any]:
    results = Results(folder)
    found = results.get(job.name)
    if found is None:
        torch.set_num_threads(1)
        try:
            found = METHODS[job.method](chosen(job.problem), job.budget, job.seed)
        except cd.NonFiniteError as error:
            found = {"rows": 0, "verdict": "do not trust", "reasons": [str(error)]}
            found |= {"means": {}, "ess": {}, "log_z": None}
        found |= {"problem": job.problem, "method": job.method, "budget": job.budget, "seed": job.seed}
        results.save(job.name, found)
    return dict(found)


def _work(task: tuple[Job, Path]) -> dict[str, Any]:
    return run_job(*task)


def run_all(jobs: list[Job], folder: Path, workers: int) -> Iterator[dict[str, Any]]:
    """The records of all jobs, as they are done."""
    tasks = [(job, folder) for job in jobs]
    if workers == 1:
        yield from map(_work, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap_unordered(_work, tasks)


def table(records: list[dict[str, Any]]) -> str:
    """Coverage by method and budget: of all runs, and of those that were judged OK."""
    rows = []
    for method, budget in sorted({(r["method"], r["budget"]) for r in records}):
        those = [r for r in records if (r["method"], r["budget"]) == (method, budget)]
        ok = [r for r in those if r["verdict"] == "ok"]
        rows.append(
            (
                method,
                f"{budget:,}",
                len(those),
                f"{100 * len(ok) / len(those):.0f} %",
                _share([m["covered"] for r in those for m in r["means"].values()]),
                _share([m["covered"] for r in ok for m in r["means"].values()]),
                _share([r["log_z"]["covered"] for r in those if r["log_z"]]),
                _share([r["log_z"]["covered"] for r in ok if r["log_z"]]),
            )
        )
    header = ["method", "rows", "runs", "judged OK", "means covered, all", "OK", "log Z covered, all", "OK"]
    return markdown(header, rows)


def by_problem(records: list[dict[str, Any]]) -> str:
    """The same for each problem, at each budget."""
    rows = []
    for problem, method, budget in sorted({(r["problem"], r["method"], r["budget"]) for r in records}):
        those = [r for r in records if (r["problem"], r["method"], r["budget"]) == (problem, method, budget)]
        ok = [r for r in those if r["verdict"] == "ok"]
        z = [(m["value"] - m["truth"]) for r in those for m in list(r["means"].values())[:1]]
        rows.append(
            (
                problem,
                method,
                f"{budget:,}",
                f"{len(ok)} / {len(those)}",
                _share([m["covered"] for r in those for m in r["means"].values()]),
                _share([m["covered"] for r in ok for m in r["means"].values()]),
                _share([r["log_z"]["covered"] for r in those if r["log_z"]]),
                f"{np.mean(z):+.4f}" if z else "-",
            )
        )
    header = ["problem", "method", "rows", "OK", "means, all", "means, OK", "log Z, all", "mean error, first scalar"]
    return markdown(header, rows)


def _share(hits: list[bool]) -> str:
    if not hits:
        return "-"
    p, n = float(np.mean(hits)), len(hits)
    return f"{100 * p:.0f} ± {100 * math.sqrt(max(p * (1 - p), 1 / n) / n):.0f} %"
