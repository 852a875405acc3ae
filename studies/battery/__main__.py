"""`python -m studies.battery calibrate`: are stated errors and verdicts right? `compare`: what do methods cost?"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.progress import track

from studies.battery import calibration, compare
from studies.battery.methods import METHODS
from studies.battery.problems import random
from studies.battery.records import Record
from studies.shared.pages import fill

PAGE = Path(__file__).parent / "README.md"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.battery", description=__doc__)
    commands = parser.add_subparsers(required=True)
    sub = commands.add_parser("calibrate", help="coverage of intervals, and of verdicts")
    _common(sub, seeds=4, groups=5, methods=["replica exchange", "SMC"], out="results/calibration")
    sub.add_argument("--reasons", action="store_true", help="print why runs were not judged OK")
    sub.set_defaults(run=_calibrate)
    sub = commands.add_parser("compare", help="what each method costs, relative to independent draws")
    _common(sub, seeds=2, groups=8, methods=list(compare.METHODS), out="results/compare")
    sub.set_defaults(run=_compare)
    sub = commands.add_parser("arrivals", help="walks per arrival of replica exchange, beside what it costs")
    sub.add_argument("--budget", type=int, default=200_000)
    sub.add_argument("--write", action="store_true", help="put the table into the README of the study")
    sub.set_defaults(run=_arrivals)
    given = parser.parse_args(arguments)
    given.run(given)


def _common(sub: argparse.ArgumentParser, seeds: int, groups: int, methods: list[str], out: str) -> None:
    sub.add_argument("--seeds", type=int, default=seeds, help="samplers per problem, method and budget")
    sub.add_argument("--groups", type=int, default=groups, help="runs that share a sampler")
    sub.add_argument("--budgets", type=int, nargs="+", default=[20_000, 200_000], help="network rows per run")
    sub.add_argument("--hard", type=int, default=2_000_000, help="a further budget for hard problems; 0: none")
    sub.add_argument("--problems", nargs="+", metavar="NAME", help="default: one of every kind")
    sub.add_argument("--held-out", type=int, nargs="+", metavar="SEED", help="the problems of these seeds instead")
    sub.add_argument("--methods", nargs="+", default=methods, choices=list(METHODS))
    sub.add_argument("--workers", type=int, default=2)
    sub.add_argument("--out", type=Path, default=Path(out))
    sub.add_argument("--collect", action="store_true", help="run nothing: tables of all records that are there")
    sub.add_argument("--write", action="store_true", help="put the tables into the README of the study")


def _measured(given: argparse.Namespace, default: tuple[str, ...], name: str) -> list[Record]:
    names = given.problems or list(default)
    if given.held_out is not None:
        names = [p.name for seed in given.held_out for p in random(seed)]
    if given.collect:
        return calibration.collect(given.out, names)
    jobs = calibration.jobs(names, given.methods, given.budgets, given.hard or None, given.seeds, given.groups)
    done = calibration.run_all(jobs, given.out, given.workers)
    records = [r for batch in track(done, name, total=len(jobs)) for r in batch]
    print(f"{sum(r.get('seconds', 0.0) for r in records) / 60:.0f} minutes of one core")
    return records


def _compare(given: argparse.Namespace) -> None:
    records = _measured(given, compare.DEFAULT, "comparison")
    found = compare.costs(records)
    if given.write and given.held_out is None:
        found = compare.kept(PAGE.parent, found)
    made = {"": compare.table(found), " summary": compare.summary(found), " forecasts": compare.forecasts(found)}
    if given.hard and given.held_out is None and any(r["budget"] == given.hard for r in records):
        made[" signed"] = compare.signed(records, given.hard)
    print("\n\n".join(made.values()))
    compare.figure(found, given.out / "compare.png")
    print(f"Figure: {given.out / 'compare.png'}")
    if given.write:
        kind = "costs" if given.held_out is None else "held out costs"
        fill(PAGE, {f"{kind}{name}": text for name, text in made.items()})
        if given.held_out is None:
            compare.figure(found, PAGE.parent / "compare.png")


def _arrivals(given: argparse.Namespace) -> None:
    made = compare.arrivals(compare.kept(PAGE.parent, []), given.budget)
    print(made)
    if given.write:
        fill(PAGE, {"arrivals": made})


def _calibrate(given: argparse.Namespace) -> None:
    records = _measured(given, calibration.DEFAULT, "calibration")
    found, kind = calibration.cells(records), "calibration" if given.held_out is None else "held out"
    if given.write:
        found = calibration.kept(PAGE.parent, kind.replace(" ", "-"), found)
    made = {kind: calibration.table(found), f"{kind} by problem": calibration.by_problem(found)}
    if given.held_out is None:
        made["ten times"] = calibration.with_plenty(found)
    print("\n\n".join(made.values()))
    if given.reasons:
        print(f"\n{calibration.reasons(records)}")
    if given.write:
        fill(PAGE, made)


if __name__ == "__main__":
    main()
