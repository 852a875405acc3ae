"""How much of the weight SMC may have missed by its pilot's walks up, and what log Z covers without it and with it.

python -m studies.battery.unseen [--seeds 0 1 2 3] [--budget 200000] [--problems NAME ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import torch

import crepe_diffusion as cd
from studies.battery.calibration import chosen
from studies.battery.methods import smc
from studies.battery.problems import Problem
from studies.battery.records import Group, Record, record
from studies.shared.pages import markdown

PROBLEMS = (
    "uniform tokens 4x3 steep w=2 w'=2",
    "masked tokens 4x3 steep w=2 w'=2",
    "mini-batch mixture",
    "tempering isotropic d=16 beta=3",
)
HEADER = ("problem", "rows", "runs", "missed", "covers without", "covers with", "OK", "covers without", "covers with")


def row(problem: Problem, budget: int, groups: Sequence[Group]) -> tuple[str | int, ...]:
    """One line of the table, of all runs and of those that are judged OK."""
    parts = [_particles(g).unseen for g in groups]
    without = [record(problem, _blind(g)) for g in groups]
    judged = [record(problem, g) for g in groups]
    ok = [r["verdict"] == "ok" for r in judged]

    def share(records: list[Record], of: Sequence[bool]) -> str:
        hits = [r["log_z"]["covered"] for r, counts in zip(records, of, strict=True) if counts]
        return f"{100 * sum(hits) / len(hits):.0f} %" if hits else "-"

    everyone = [True] * len(groups)
    return (
        problem.name,
        f"{budget:,}",
        len(groups),
        f"{min(parts):.3f} to {max(parts):.3f}",
        share(without, everyone),
        share(judged, everyone),
        sum(ok),
        share(without, ok),
        share(judged, ok),
    )


def _particles(group: Group) -> cd.samplers.Particles:
    assert isinstance(group.out, cd.samplers.Particles)
    return group.out


def _blind(group: Group) -> Group:
    """The run as if its pilot had not looked at heavy paths."""
    out = _particles(group)
    assert out.started_from is not None
    start = replace(out.started_from, heavy=torch.zeros(2, 0, dtype=torch.float64))
    return replace(group, out=replace(out, started_from=start))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3], help="five runs of each")
    parser.add_argument("--budget", type=int, default=200_000, help="network rows of each run")
    parser.add_argument("--problems", nargs="+", default=PROBLEMS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for problem in map(chosen, given.problems):
        rows.append(row(problem, given.budget, [g for s in given.seeds for g in smc(problem, given.budget, s, 5)]))
    print(markdown(HEADER, rows))


if __name__ == "__main__":
    main()
