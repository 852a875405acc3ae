"""`python -m studies.battery calibrate`: are stated errors and verdicts right?"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.progress import track

from studies.battery import calibration
from studies.battery.problems import random
from studies.shared.pages import fill

PAGE = Path(__file__).parent / "README.md"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.battery", description=__doc__)
    commands = parser.add_subparsers(required=True)
    sub = commands.add_parser("calibrate", help="coverage of intervals, and of verdicts")
    sub.add_argument("--seeds", type=int, default=20)
    sub.add_argument("--budgets", type=int, nargs="+", default=[20_000, 200_000])
    sub.add_argument("--problems", nargs="+", metavar="NAME", help="default: one of every kind")
    sub.add_argument("--held-out", type=int, metavar="SEED", help="the problems that this seed makes instead")
    sub.add_argument("--methods", nargs="+", default=list(calibration.METHODS))
    sub.add_argument("--workers", type=int, default=2)
    sub.add_argument("--out", type=Path, default=Path("results/calibration"))
    sub.add_argument("--write", action="store_true", help="put the table into the README of the study")
    given = parser.parse_args(arguments)
    names = given.problems or list(calibration.DEFAULT)
    if given.held_out is not None:
        names = [f"held out {given.held_out}: {p.name}" for p in random(given.held_out)]
    jobs = [
        calibration.Job(name, method, budget, seed)
        for budget in given.budgets
        for seed in range(given.seeds)
        for name in names
        for method in given.methods
    ]
    records = list(track(calibration.run_all(jobs, given.out, given.workers), "calibration", total=len(jobs)))
    print(calibration.by_problem(records))
    print()
    print(calibration.table(records))
    if given.write:
        fill(PAGE, {"calibration": calibration.table(records), "by problem": calibration.by_problem(records)})


if __name__ == "__main__":
    main()
