"""What one run of one method on one problem has given, as a record that every table is made of.

    cost  = E[(value - truth)^2] / variance * rows / rows of an independent draw

A record is a dictionary of plain numbers:

- `problem`, `method`, `budget`, `seed` (of the sampler), `group` (of those that share it), `seconds` of a processor;
- `rows`: network rows with set-up, as the run alone would have paid; `setup`: those of its set-up;
- `verdict`, `reasons`;
- `means`: for each scalar `value`, `error`, `dof`, `truth`, `covered` (by the 95 % interval), `ess`, and `variance`,
  that of the scalar under the target: an independent draw has this squared error;
- `log_z`: the same without the last two, or None where nothing is known;
- `levels` and others that a method adds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import crepe_diffusion as cd
from studies.battery.problems import Problem

__all__ = ["Group", "Record", "record"]

Record = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """The result of one of several runs that were made together, and the rows that it would have paid alone."""

    out: cd.samplers.Result
    rows: int
    setup: int
    more: Mapping[str, float | str] = field(default_factory=dict)


def record(problem: Problem, group: Group) -> Record:
    """As a user would see it: verdict, means and log Z of this run alone."""
    out, log_z = group.out, group.out.log_z
    verdict = out.verdict(problem.scalars)
    return {
        "rows": group.rows,
        "setup": group.setup,
        "verdict": verdict.level,
        "reasons": verdict.reasons,
        "means": {
            name: _judged(out.mean(f), problem.truths[name]) | {"variance": problem.variances[name], "ess": out.ess(f)}
            for name, f in problem.scalars.items()
        },
        "log_z": None if problem.log_z is None or math.isnan(log_z.value) else _judged(log_z, problem.log_z),
        **group.more,
    }


def failed(error: Exception) -> Record:
    """A run that broke off."""
    return {"rows": 0, "setup": 0, "verdict": "do not trust", "reasons": [str(error)], "means": {}, "log_z": None}


def _judged(e: cd.Estimate, truth: float) -> dict[str, float | bool]:
    low, high = e.interval()
    return {"value": e.value, "error": e.error, "dof": min(e.dof, 1e9), "truth": truth, "covered": low <= truth <= high}
