"""`python -m studies.battery calibrate`: are stated errors and verdicts right?"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.progress import track

from studies.battery import calibration
from studies.battery.methods import METHODS
from studies.battery.problems import random
from studies.shared.pages import fill

PAGE = Path(__file__).parent / "README.md"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.battery", description=__doc__)
    commands = parser.add_subparsers(required=True)
    sub = commands.add_parser("calibrate", help="coverage of intervals, and of verdicts")
    sub.add_argument("--seeds", type=int, default=4, help="samplers per problem, method and budget")
    sub.add_argument("--groups", type=int, default=5, help="runs that share a sampler")
    sub.add_argument("--budgets", type=int, nargs="+", default=[20_000, 200_000], help="network rows per run")
    sub.add_argument("--hard", type=int, default=2_000_000, help="a further budget for hard problems; 0: none")
    sub.add_argument("--problems", nargs="+", metavar="NAME", help="default: one of every kind")
    sub.add_argument("--held-out", type=int, nargs="+", metavar="SEED", help="the problems of these seeds instead")
    sub.add_argument("--methods", nargs="+", default=["replica exchange", "SMC"], choices=list(METHODS))
    sub.add_argument("--workers", type=int, default=2)
    sub.add_argument("--out", type=Path, default=Path("results/calibration"))
    sub.add_argument("--reasons", action="store_true", help="print why runs were not judged OK")
    sub.add_argument("--write", action="store_true", help="put the tables into the README of the study")
    given = parser.parse_args(arguments)
    names = given.problems or list(calibration.DEFAULT)
    if given.held_out is not None:
        names = [p.name for seed in given.held_out for p in random(seed)]
    jobs = calibration.jobs(names, given.methods, given.budgets, given.hard or None, given.seeds, given.groups)
    done = calibration.run_all(jobs, given.out, given.workers)
    records = [r for batch in track(done, "calibration", total=len(jobs)) for r in batch]
    print(calibration.by_problem(records))
    print()
    print(calibration.table(records))
    print()
    print(calibration.with_plenty(records))
    if given.reasons:
        print()
        print(calibration.reasons(records))
    if given.write:
        kind = "calibration" if given.held_out is None else "held out"
        made = {kind: calibration.table(records), f"{kind} by problem": calibration.by_problem(records)}
        fill(PAGE, made if given.held_out else made | {"ten times": calibration.with_plenty(records)})


if __name__ == "__main__":
    main()
