"""Many small batches of SMC, or one run of CREPE? About two minutes of one core.

python -m studies.minibatch                 progress, tables, a figure and a report, in results/minibatch
python -m studies.minibatch --write-docs    fill the tables of README.md and draw its figure besides
python -m studies.minibatch --from-json     measure nothing: fill them again from results.json
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import crepe_diffusion as cd
from crepe_diffusion.report import write_report
from studies.minibatch.study import BATCHES, Truth, run
from studies.minibatch.tables import Record, cells, figure, tables
from studies.shared.pages import fill
from studies.shared.results import Results

HERE = Path(__file__).parent
TITLES = {"weights": "Weight of each mode, and distance from the truth", "costs": "Costs", "chain": "One run of CREPE"}
READING = """0.187(2) stands for 0.187 +- 0.002. TV is the total variation from the truth; it is never negative, so
compare it with that of as many exact draws. Lines `by Z` hold the same particles, with each batch weighted by its own
estimate of Z."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.minibatch", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=150_000, help="per method, a multiple of 1000")
    parser.add_argument("--out", type=Path, default=Path("results/minibatch"), help="folder for results and figure")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.add_argument("--write-docs", action="store_true", help="also fill the study's README.md")
    parser.add_argument("--from-json", action="store_true", help="fill README.md from results.json")
    options = parser.parse_args(arguments)
    if options.from_json:
        return write(Results(HERE)["results"], HERE)

    console = Console()
    torch.set_num_threads(1)  # batches this small gain nothing from a second thread, which then waits and disturbs
    folder = options.out / "crepe"
    shutil.rmtree(folder, ignore_errors=True)  # the demo starts again each time
    with _bars(console, options.samples, options.quiet) as progress:
        study = run(options.samples, options.seed, progress, folder)
    record = study.record()
    for name, (header, lines) in cells(record, study.truth).items():
        console.print(_table(f"{TITLES[name]}; seed {study.seed}", header, lines))
    console.print(READING.replace("\n", " "), highlight=False)
    Results(options.out).save("results", record)
    figure(record, study.truth, options.out / "minibatch.png")
    console.print(f"Figure: {options.out / 'minibatch.png'}")
    console.print(f"Report of the CREPE run: {write_report(cd.read_run(folder), folder / 'report.html')}")
    console.print(f"\ncd.sample(target, ladder): {study.choice}", highlight=False)
    if options.write_docs:
        Results(HERE).save("results", record)
        write(record, HERE)
        console.print(f"Filled {HERE / 'README.md'}")


def write(record: Record, folder: Path) -> None:
    """The tables of `folder`'s README.md, and its figure."""
    truth = Truth()
    fill(folder / "README.md", tables(record, truth))
    figure(record, truth, folder / "minibatch.png")


@contextmanager
def _bars(console: Console, n_samples: int, quiet: bool) -> Iterator[Callable[[str, int], None]]:
    """One progress bar per method."""
    columns = (TextColumn("{task.description:15}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=quiet) as bars:
        names = [*(f"SMC {b}" for b in BATCHES), "CREPE", "particle Gibbs"]
        tasks = {name: bars.add_task(name, total=n_samples, start=False) for name in names}

        def progress(name: str, n: int) -> None:
            bars.start_task(tasks[name])
            bars.advance(tasks[name], n)

        yield progress


def _table(title: str, header: list[str], lines: list[list[str]]) -> Table:
    out = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for i, name in enumerate(header):
        out.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    for line in lines:
        out.add_row(*line, style="bold" if line[0] == "CREPE" else None)
    return out


if __name__ == "__main__":
    main()
