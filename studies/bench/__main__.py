"""Where the time goes. About five minutes.

python -m studies.bench                            all parts
python -m studies.bench --only store               one of them
python -m studies.bench --only store --write-docs  also fill its table in README.md and write its numbers
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from studies.bench.bench import Cells, cases, iteration_table, measure, store_cost, store_table
from studies.bench.messages import gather_seconds, gather_table, plan_table, plans, sent, sent_table
from studies.bench.processes import gain, gain_cases, gain_table, pilot_table
from studies.shared.pages import fill, markdown
from studies.shared.results import Results

HERE = Path(__file__).parent
TITLES = {
    "iterations": "One iteration",
    "store": "A run in its folder",
    "processes": "Two processes",
    "pilot": "A pilot, once or shared",
    "sent": "What travels",
    "messages": "What a gather takes",
    "devices": "A thousand devices",
}
N_WARM_UP = 2


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", choices=list(TITLES), help="one part of it")
    parser.add_argument("--quick", action="store_true", help="short ladders and a short run, to see that it works")
    parser.add_argument("--threads", type=int, help="threads of PyTorch; with 1, time of the processor is measured")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.add_argument("--write-docs", action="store_true", help="also fill the tables of the study's README.md")
    options = parser.parse_args(arguments)
    if options.quick and options.write_docs:
        parser.error("--quick is no measurement: README.md is not filled from it")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    console = Console()
    for part in [options.only] if options.only else TITLES:
        with Progress(console=console, disable=options.quiet) as bars:
            record, table = PARTS[part](bars, options.quick)
        console.print(_shown(f"{TITLES[part]}; {machine()}", table))
        if options.write_docs:
            Results(HERE).save(part, {"machine": machine(), "measured": record})
            fill(HERE / "README.md", {part: f"Seed 0, {machine()}:\n\n{markdown(*table)}"})
            console.print(f"Filled {HERE / 'README.md'}")


def iterations(bars: Progress, quick: bool) -> tuple[list[Any], Cells]:
    timings = []
    for case in cases(quick):
        task = bars.add_task(f"{case.name:22}", total=case.n_iterations + N_WARM_UP)
        timings.append(measure(case, N_WARM_UP, lambda task=task: bars.advance(task)))  # type: ignore[misc]
    return [asdict(t) for t in timings], iteration_table(timings)


def store(bars: Progress, quick: bool) -> tuple[dict[str, Any], Cells]:
    bars.add_task(f"{TITLES['store']:22}", total=None)
    with tempfile.TemporaryDirectory() as folder:
        cost = store_cost(Path(folder) / "run", 2.0 if quick else 60.0)
    return asdict(cost), store_table(cost)


def processes(bars: Progress, quick: bool) -> tuple[list[Any], Cells]:
    chosen = gain_cases(quick)
    task = bars.add_task(f"{TITLES['processes']:22}", total=len(chosen))
    gains = []
    for case in chosen:
        gains.append(gain(case))
        bars.advance(task)
    return [asdict(g) for g in gains], gain_table(gains)


def pilots(bars: Progress, quick: bool) -> tuple[list[Any], Cells]:
    bars.add_task(f"{TITLES['pilot']:22}", total=None)
    return pilot_table(gain_cases(quick))


def travels(bars: Progress, quick: bool) -> tuple[list[Any], Cells]:
    bars.add_task(f"{TITLES['sent']:22}", total=None)
    found = [sent(case) for case in gain_cases(quick)]
    return [asdict(s) for s in found], sent_table(found)


def messages(bars: Progress, quick: bool) -> tuple[dict[str, Any], Cells]:
    bars.add_task(f"{TITLES['messages']:22}", total=None)
    found = {n: gather_seconds(n, 3 if quick else 200) for n in (2, 4)}
    return {str(n): times for n, times in found.items()}, gather_table(found)


def devices(bars: Progress, quick: bool) -> tuple[dict[str, Any], Cells]:
    """From the gathers that were measured last."""
    saved = Results(HERE).get("messages")
    seconds = saved["measured"] if saved else messages(bars, quick)[0]
    latency = max(times[0] / (int(n) - 1) for n, times in seconds.items())
    return {"latency": latency, "plans": [asdict(p) for p in plans()]}, plan_table(plans(), latency)


PARTS: dict[str, Callable[[Progress, bool], tuple[Any, Cells]]] = {
    "iterations": iterations,
    "store": store,
    "processes": processes,
    "pilot": pilots,
    "sent": travels,
    "messages": messages,
    "devices": devices,
}


def machine() -> str:
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads on {platform.machine()}"


def _shown(title: str, cells: Cells) -> Table:
    header, lines = cells
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for i, label in enumerate(header):
        table.add_column(label, justify="left" if i == 0 else "right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    return table


if __name__ == "__main__":
    main()
