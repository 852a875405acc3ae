"""Are stated errors and verdicts right? Many runs of every sampler on problems whose truth is known.

    python -m studies.battery calibrate [--seeds 4] [--groups 5] [--budgets 20000 200000] [--problems NAME ...]

For each run: the 95 % interval of every scalar's mean and of log Z, whether it holds the truth, and the verdict. Runs
of one seed are made in one batch (`methods.py` states what they share). Each batch is kept when it is done, so that a
study that was stopped goes on.
"""

from __future__ import annotations

import math
import multiprocessing
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

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
    "Job",
    "by_problem",
    "chosen",
    "collect",
    "jobs",
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
        problem = chosen(job.problem)
        try:
            found = [record(problem, g) for g in METHODS[job.method](problem, job.budget, job.seed, job.n_groups)]
        except cd.NonFiniteError as error:
            found = [failed(error) for _ in range(job.n_groups)]
        of_job = {"problem": job.problem, "method": job.method, "budget": job.budget, "seed": job.seed}
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


def table(records: list[Record]) -> str:
    """Coverage by method and budget: of all runs, and of those that were judged OK."""
    rows = []
    for method, budget in sorted({(r["method"], r["budget"]) for r in records}):
        those = [r for r in records if (r["method"], r["budget"]) == (method, budget)]
        ok = [r for r in those if r["verdict"] == "ok"]
        head = (method, f"{budget:,}", len(those), f"{100 * len(ok) / len(those):.0f} %")
        rows.append((*head, _means(those), _means(ok), _log_z(those), _log_z(ok)))
    header = ["method", "rows", "runs", "judged OK", "means covered, all", "OK", "log Z covered, all", "OK"]
    return markdown(header, rows)


def by_problem(records: list[Record]) -> str:
    """The same for each problem, at each budget; then effective draws, and the mean error of the first scalar."""
    rows = []
    for (problem, method, budget), those in _cells(records).items():
        ok = [r for r in those if r["verdict"] == "ok"]
        head = (problem, method, f"{budget:,}", f"{len(ok)} / {len(those)}")
        last = (f"{_effective(those):.0f}", _mean_error(those))
        rows.append((*head, _means(those), _means(ok), _log_z(those), _log_z(ok), *last))
    header = ["problem", "method", "rows", "OK", "means, all", "OK", "log Z, all", "OK", "effective", "error"]
    return markdown(header, rows)


def with_plenty(records: list[Record]) -> str:
    """How many runs are judged OK with ten times the rows that they need.

    A run needs as many rows as give all of its scalars an error of a third of a standard deviation, as ten independent
    draws do. The error is measured against the truth over all runs of a problem, method and budget.
    """
    cells: dict[str, list[list[Record]]] = {}
    for those in _cells(records).values():
        if _effective(those) >= 10 * ENOUGH:
            cells.setdefault(those[0]["method"], []).append(those)
    rows = []
    for method, found in sorted(cells.items()):
        ok = [r["verdict"] == "ok" for those in found for r in those]
        rows.append((method, len(found), len(ok), f"{100 * sum(ok) / len(ok):.0f} %"))
    return markdown(["method", "problems and budgets", "runs", "judged OK"], rows)


def _cells(records: list[Record]) -> dict[tuple[str, str, int], list[Record]]:
    """Records by problem, method and budget."""
    cells: dict[tuple[str, str, int], list[Record]] = {}
    for r in sorted(records, key=lambda r: (r["problem"], r["method"], r["budget"])):
        cells.setdefault((r["problem"], r["method"], r["budget"]), []).append(r)
    return cells


def _effective(records: list[Record]) -> float:
    """Independent draws whose mean would have the same error, for the scalar that is known worst."""
    names = {name for r in records for name in r["means"]}
    squares = [
        [(m["value"] - m["truth"]) ** 2 / m["variance"] for r in records if (m := r["means"].get(name))]
        for name in names
    ]
    return min((1 / max(float(np.mean(s)), 1e-12) for s in squares), default=0.0)


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


def _means(records: list[Record]) -> str:
    return _share([[m["covered"] for m in r["means"].values()] for r in records])


def _log_z(records: list[Record]) -> str:
    return _share([[r["log_z"]["covered"]] for r in records if r["log_z"]])


def _mean_error(records: list[Record]) -> str:
    errors = [m["value"] - m["truth"] for r in records for m in list(r["means"].values())[:1]]
    if not errors:
        return "-"
    spread = np.std(errors, ddof=1) / math.sqrt(len(errors)) if len(errors) > 1 else math.nan
    return f"{np.mean(errors):+.4f} ± {spread:.4f}"


def _share(hits: list[list[bool]]) -> str:
    """Of all intervals; its error is that of runs, whose intervals belong together."""
    hits = [h for h in hits if h]
    if not hits:
        return "-"
    p, n = float(np.mean([h for run in hits for h in run])), len(hits)
    spread = float(np.std([np.mean(run) for run in hits])) if n > 1 else 0.0
    return f"{100 * p:.0f} ± {100 * max(spread, 1 / math.sqrt(n)) / math.sqrt(n):.0f} %"
