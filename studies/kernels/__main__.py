"""Compare kernels, proposals and samplers on problems with known truth.

    python -m studies.kernels                the whole study: 25 minutes of one core; fills README.md and tables.md
    python -m studies.kernels --from-json    fill them again from results.json
    python -m studies.kernels --only "SMC, rne"    measure this sampler or kernel again, keep the rest
    python -m studies.kernels --quick        a minute or two, into results/kernels-quick

Every number of the tables comes from results.json, which this command writes first.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from studies.kernels.measure import QUICK, Effort, measure, measure_again
from studies.kernels.problems import SETTINGS, TASKS
from studies.kernels.tables import Record, figure, readme_tables, tables
from studies.shared.pages import fill
from studies.shared.results import Results

HERE = Path(__file__).parent


def write(results: Record, folder: Path) -> None:
    """The figure and both pages in `folder`; pages that are not there yet begin as copies of the study's."""
    folder.mkdir(parents=True, exist_ok=True)
    figure(results, folder / "order.png")
    for page, made in (("README.md", readme_tables(results)), ("tables.md", tables(results))):
        if not (folder / page).exists():
            shutil.copy(HERE / page, folder / page)
        fill(folder / page, made)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.kernels", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="short runs, to see that everything works")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder of results.json, the figure and the pages")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--from-json", action="store_true", help="measure nothing: read results.json")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure these again and keep all other results")
    options = parser.parse_args(arguments)
    folder = options.out or (Path("results/kernels-quick") if options.quick else HERE)
    store = Results(folder)
    if not options.from_json:
        from rich.progress import Progress

        torch.set_num_threads(1)  # batches this small gain nothing from a second thread
        with Progress(disable=options.quiet) as bars:
            bar = bars.add_task("problems", total=len(SETTINGS) * len(TASKS))

            def done(name: str) -> None:
                bars.update(bar, advance=1, description=name)

            effort = QUICK if options.quick else Effort()
            if options.only:
                found = measure_again(store["results"], options.only, effort, done)
            else:
                found = measure(effort, options.seed, done)
            store.save("results", found)
    write(store["results"], folder)
    print(f"Wrote results.json, order.png and the tables of README.md and tables.md in {folder}")


if __name__ == "__main__":
    main()
