"""Are stated errors and verdicts right? Many runs of every sampler on problems whose truth is known.

    python -m studies.battery calibrate [--seeds 4] [--groups 5] [--budgets 20000 200000] [--problems NAME ...]

For each run: the 95 % interval of every scalar's mean and of log Z, whether it holds the truth, and the verdict. Runs
of one seed are made in one batch (`methods.py` states what they share). Each batch is kept when it is done, so that a
study that was stopped goes on; counts of all that was measured are kept in `calibration.json` and `held-out.json`.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import crepe_diffusion as cd
from studies.battery.methods import METHODS
from studies.battery.problems import Problem, battery, random
from studies.battery.records import Record, failed, record
from studies.shared.pages import markdown
from studies.shared.results import Results

__all__ = [
    "DEFAULT",
    "Cell",
    "Job",
    "by_problem",
    "cells",
    "chosen",
    "collect",
    "jobs",
    "kept",
    "reasons",
    "run_all",
    "run_job",
    "table",
    "with_plenty",
]

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
ENOUGH = 10
"""Effective draws that a run needs."""


@dataclass(frozen=True)
class Job:
    """One sampler on one problem with one budget of network rows per group and one seed: `n_groups` runs."""

    problem: str
    method: str
    budget: int
    seed: int
    n_groups: int

    @property
    def name(self) -> str:
        return f"{self.problem} {self.method} {self.budget} seed {self.seed} x {self.n_groups}".replace("/", "-")


def chosen(name: str) -> Problem:
    """The problem of this name; `held out 7: ...` is one of those that seed 7 makes."""
    found = {p.name: p for p in battery()}
    if name.startswith("held out "):
        found = {p.name: p for p in random(int(name.removeprefix("held out ").partition(":")[0]))}
    if name not in found:
        raise cd.InputError(f"no problem {name!r}; there are {', '.join(found)}")
    return found[name]


def jobs(
    names: Iterable[str], methods: Iterable[str], budgets: Iterable[int], hard: int | None, seeds: int, n_groups: int
) -> list[Job]:
    """All budgets for all problems, and one more, `hard`, for those that are; the cheap ones first."""
    wanted = [(budget, name) for budget in budgets for name in names]
    wanted += [(hard, name) for name in names if hard is not None and chosen(name).hard]
    return [
        Job(name, method, budget, seed, n_groups)
        for budget, name in wanted
        for seed in range(seeds)
        for method in methods
    ]


def run_job(job: Job, folder: Path) -> list[Record]:
    """The records of its groups, from the folder if they are there."""
    results = Results(folder)
    found: list[Record] | None = results.get(job.name)
    if found is None:
        torch.set_num_threads(1)
        problem, began = chosen(job.problem), time.process_time()
        try:
            found = [record(problem, g) for g in METHODS[job.method](problem, job.budget, job.seed, job.n_groups)]
        except cd.NonFiniteError as error:
            found = [failed(error) for _ in range(job.n_groups)]
        of_job = {"problem": job.problem, "method": job.method, "budget": job.budget, "seed": job.seed}
        of_job["seconds"] = (time.process_time() - began) / job.n_groups
        found = [{**of_job, "group": i, **r} for i, r in enumerate(found)]
        results.save(job.name, found)
    return found


def _work(task: tuple[Job, Path]) -> list[Record]:
    return run_job(*task)


def run_all(jobs: list[Job], folder: Path, workers: int) -> Iterator[list[Record]]:
    """The records of all jobs, as they are done."""
    tasks = [(job, folder) for job in jobs]
    if workers == 1:
        yield from map(_work, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap_unordered(_work, tasks)


def collect(folder: Path, names: Collection[str]) -> list[Record]:
    """All records of these problems that are in the folder."""
    results = Results(folder)
    return [r for name in results.names() for r in results[name] if r["problem"] in names]


# -- tables ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """All runs of one method on one problem with one budget.

    Intervals are counted as (those that cover, all of them), of all runs and of those that were judged OK. So many
    independent draws as `effective` would have the error of the scalar that is known worst; `error` is the mean error
    of the first scalar, and `spread` its standard error.
    """

    problem: str
    method: str
    budget: int
    runs: int
    ok: int
    means: tuple[int, int]
    means_ok: tuple[int, int]
    log_z: tuple[int, int]
    log_z_ok: tuple[int, int]
    effective: float
    error: float
    spread: float

    @property
    def key(self) -> tuple[str, str, int]:
        return self.problem, self.method, self.budget


def cells(records: list[Record]) -> list[Cell]:
    """What the tables need of these records."""
    found: dict[tuple[str, str, int], list[Record]] = {}
    for r in sorted(records, key=lambda r: (r["problem"], r["method"], r["budget"])):
        found.setdefault((r["problem"], r["method"], r["budget"]), []).append(r)
    return [_cell(*key, those) for key, those in found.items()]


def _cell(problem: str, method: str, budget: int, records: list[Record]) -> Cell:
    ok = [r for r in records if r["verdict"] == "ok"]
    errors = [m["value"] - m["truth"] for r in records for m in list(r["means"].values())[:1]]
    spread = float(np.std(errors, ddof=1)) / math.sqrt(len(errors)) if len(errors) > 1 else math.nan
    return Cell(
        problem,
        method,
        budget,
        runs=len(records),
        ok=len(ok),
        means=_count([m for r in records for m in r["means"].values()]),
        means_ok=_count([m for r in ok for m in r["means"].values()]),
        log_z=_count([r["log_z"] for r in records if r["log_z"]]),
        log_z_ok=_count([r["log_z"] for r in ok if r["log_z"]]),
        effective=_effective(records),
        error=float(np.mean(errors)) if errors else math.nan,
        spread=spread,
    )


def _count(judged: list[Record]) -> tuple[int, int]:
    return sum(bool(m.get("covered")) for m in judged), len(judged)


def kept(folder: Path, name: str, found: list[Cell]) -> list[Cell]:
    """These cells and those that were measured before, which a file of this name holds; new ones replace old ones."""
    results = Results(folder)
    before = [_read(c) for c in results.get(name) or []]
    merged = {c.key: c for c in (*before, *found)}
    ordered = [merged[key] for key in sorted(merged)]
    results.save(name, [asdict(c) for c in ordered])
    return ordered


def _read(stored: dict[str, Any]) -> Cell:
    pairs: dict[str, Any] = {name: tuple(stored[name]) for name in ("means", "means_ok", "log_z", "log_z_ok")}
    return Cell(**{**stored, **pairs})


def table(found: list[Cell]) -> str:
    """Coverage by method and budget: of all runs, and of those that were judged OK."""
    rows = []
    for method, budget in sorted({(c.method, c.budget) for c in found}):
        those = [c for c in found if (c.method, c.budget) == (method, budget)]
        runs, ok = sum(c.runs for c in those), sum(c.ok for c in those)
        rows.append((method, f"{budget:,}", runs, f"{100 * ok / runs:.0f} %", *_shares(those)))
    header = ["method", "rows", "runs", "judged OK", "means covered, all", "OK", "log Z covered, all", "OK"]
    return markdown(header, rows)


def by_problem(found: list[Cell]) -> str:
    """The same for each problem, at each budget; then effective draws, and the mean error of the first scalar."""
    rows = []
    for c in found:
        error = "-" if math.isnan(c.error) else f"{c.error:+.4f} ± {c.spread:.4f}"
        head = (c.problem, c.method, f"{c.budget:,}", f"{c.ok} / {c.runs}")
        rows.append((*head, *_shares([c]), f"{c.effective:.0f}", error))
    header = ["problem", "method", "rows", "OK", "means, all", "OK", "log Z, all", "OK", "effective", "error"]
    return markdown(header, rows)


def with_plenty(found: list[Cell]) -> str:
    """How many runs are judged OK with ten times the rows that they need.

    A run needs as many rows as give all of its scalars an error of a third of a standard deviation, as ten independent
    draws do. The error is measured against the truth over all runs of a problem, method and budget.
    """
    rows = []
    for method in sorted({c.method for c in found}):
        those = [c for c in found if c.method == method and c.effective >= 10 * ENOUGH]
        if those:
            runs, ok = sum(c.runs for c in those), sum(c.ok for c in those)
            rows.append((method, len(those), runs, f"{100 * ok / runs:.0f} %"))
    return markdown(["method", "problems and budgets", "runs", "judged OK"], rows)


def _effective(records: list[Record]) -> float:
    """Independent draws whose mean would have the same error, for the scalar that is known worst."""
    names = {name for r in records for name in r["means"]}
    squares = [
        [(m["value"] - m["truth"]) ** 2 / m["variance"] for r in records if (m := r["means"].get(name))]
        for name in names
    ]
    return min((1 / max(float(np.mean(s)), 1e-12) for s in squares), default=0.0)


def _shares(found: list[Cell]) -> tuple[str, str, str, str]:
    """Of means and log Z, of all runs and of those judged OK."""
    runs, ok = sum(c.runs for c in found), sum(c.ok for c in found)
    log_z, log_z_ok = [c.log_z for c in found], [c.log_z_ok for c in found]
    return (
        _share([c.means for c in found], runs),
        _share([c.means_ok for c in found], ok),
        _share(log_z, sum(n for _, n in log_z)),
        _share(log_z_ok, sum(n for _, n in log_z_ok)),
    )


def _share(counts: list[tuple[int, int]], runs: int) -> str:
    """Of all intervals; its error is that of runs, as if all intervals of a run covered together or not."""
    n = sum(n for _, n in counts)
    if not n:
        return "-"
    p = sum(covered for covered, _ in counts) / n
    return f"{100 * p:.0f} ± {100 * max(math.sqrt(p * (1 - p)), 1 / math.sqrt(runs)) / math.sqrt(runs):.0f} %"


def reasons(records: list[Record]) -> str:
    """Why runs were not judged OK: the words of each finding before its numbers, and how often."""
    counts: Counter[tuple[str, str, int, str]] = Counter()
    for r in records:
        for kind in {_kind(reason) for reason in r["reasons"]}:
            counts[r["problem"], r["method"], r["budget"], kind] += 1
    return markdown(["problem", "method", "rows", "reason", "runs"], [(*k, n) for k, n in sorted(counts.items())])


def _kind(reason: str) -> str:
    words = reason.split(":")[0].split()
    return " ".join(w for w in words if not any(c.isdigit() for c in w))[:60]
