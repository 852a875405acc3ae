"""Where the time of replica exchange goes: the network, random numbers, and everything else.

    share outside the network  =  1 - time inside the network / time of an iteration

Both times come from the same iterations, so the ratio hardly depends on the machine or on who else is using it. The
networks have random weights: they cost what trained ones cost. A backward pass counts as time inside the network; a
reward and its own gradient do not. Every iteration must cost exactly `(M + 1) K` network evaluations a chain.

    share of the store  =  1 - time inside the sampler / time of a run in a folder

    python -m studies.bench
    python -m studies.bench --only store
"""

from __future__ import annotations

import argparse
import math
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import crepe_diffusion as cd
from crepe_diffusion.processes import FisherTable

__all__ = ["Case", "Network", "StoreCost", "Timing", "cases", "measure", "store_cost"]

DATA_SCALE = 0.5  # EDM's sigma_data


class Network(nn.Module):
    """A perceptron in EDM's preconditioning, which counts the seconds spent in it, forwards and backwards."""

    def __init__(self, event_shape: tuple[int, ...], width: int, depth: int, n_features: int = 32):
        super().__init__()
        n = math.prod(event_shape)
        self.frequencies = torch.linspace(0.0, 5.0, n_features).exp()
        sizes = [n + 2 * n_features, *[width] * depth]
        hidden = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.SiLU())]
        self.layers = nn.Sequential(*hidden, nn.Linear(width, n))
        self.seconds, self._started = 0.0, 0.0
        self.requires_grad_(False)

    def forward(self, y: Tensor, sigma: Tensor) -> Tensor:
        start = time.perf_counter()
        s = sigma[:, None]
        norm = (s * s + DATA_SCALE**2).sqrt()
        angles = s.log() / 4 * self.frequencies
        inputs = torch.cat([y.flatten(1) / norm, angles.cos(), angles.sin()], dim=1)
        skip, out = DATA_SCALE**2 / norm**2, s * DATA_SCALE / norm
        denoised = (skip * y.flatten(1) + out * self.layers(inputs)).reshape(y.shape)
        if denoised.requires_grad:
            denoised.register_hook(self._enter)
            y.register_hook(self._leave)
        self.seconds += time.perf_counter() - start
        return denoised

    def _enter(self, gradient: Tensor) -> None:
        self._started = time.perf_counter()

    def _leave(self, gradient: Tensor) -> None:
        self.seconds += time.perf_counter() - self._started


@dataclass(frozen=True)
class Case:
    """One setting to time."""

    name: str
    event_shape: tuple[int, ...]
    width: int
    depth: int
    n_segments: int
    n_levels: int
    substeps: int
    n_chains: int
    n_iterations: int
    guidance: str | None = None


@dataclass(frozen=True)
class Timing:
    """Seconds and network evaluations of one iteration."""

    case: Case
    seconds: float
    network: float
    random: float
    rows: int

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds

    @property
    def outside(self) -> float:
        return 1 - self.network / self.seconds


def cases(quick: bool = False) -> list[Case]:
    """Stitched trajectories with a wide network (the paper's maze), and a small network with few rows."""
    maze = {"event_shape": (64, 2), "width": 512, "depth": 5, "n_segments": 20, "substeps": 1, "n_chains": 1}
    small = {"event_shape": (16,), "width": 64, "depth": 2, "n_segments": 1, "substeps": 4, "n_chains": 4}
    n, levels = (2, (31, 6)) if quick else (8, (601, 51))
    return [
        Case("5x512, no reward", n_levels=levels[0], n_iterations=n, **maze),  # type: ignore[arg-type]
        Case("5x512, gradient", n_levels=levels[0], n_iterations=n, guidance="gradient", **maze),  # type: ignore[arg-type]
        Case("5x512, jacobian-free", n_levels=levels[0], n_iterations=n, guidance="jacobian-free", **maze),  # type: ignore[arg-type]
        Case("2x64, no reward", n_levels=levels[1], n_iterations=20 * n, **small),  # type: ignore[arg-type]
    ]


def joined(x: Tensor) -> Tensor:
    """Segments should begin where the one before ends, the first at -1 and the last at 1."""
    ends = x[:, :, :: x.shape[2] - 1]  # taken once: every slice of x would cost a full-size gradient
    gaps = (ends[:, 1:, 0] - ends[:, :-1, 1]).square().flatten(1).sum(1)
    return -10 * (gaps + (ends[:, 0, 0] + 1).square().sum(1) + (ends[:, -1, 1] - 1).square().sum(1))


def build(case: Case) -> tuple[cd.ReplicaExchange, Network]:
    """A chain for the case, and the network inside it."""
    torch.manual_seed(0)  # for the weights alone; the chain has its own stream
    network = Network(case.event_shape, case.width, case.depth)
    model: cd.models.Model = cd.models.Denoiser(network, case.event_shape)
    if case.n_segments > 1:
        model = cd.stitching.Segments(model, case.n_segments)
    target = model.as_target()
    if case.guidance is not None:
        target = target.tilt(joined, guidance=case.guidance)
    levels = cd.ladder.karras(case.n_levels, sigma_min=2e-3, sigma_max=80.0, substeps=case.substeps)
    # A table such as a fit would leave, without the time of the fit.
    information = levels.times**2 / (levels.times**2 + DATA_SCALE**2)
    mean = torch.zeros(1, math.prod(model.event_shape), dtype=torch.float64)
    process = cd.processes.Gaussian().fitted(FisherTable(levels.times, information[None, :, None], mean))
    return cd.ReplicaExchange(target, levels, n_chains=case.n_chains, process=process), network


def measure(case: Case, n_warm_up: int = 2, progress: Callable[[], None] = lambda: None) -> Timing:
    """Times iterations after a warm-up, and checks that each costs `(M + 1) K` rows a chain and segment.

    The faster half of the iterations is kept: what slows the others down is somebody else's program.
    """
    chain, network = build(case)
    rows = case.n_levels * case.substeps * case.n_chains * case.n_segments
    times = []
    for _ in range(n_warm_up + case.n_iterations):
        network.seconds, before = 0.0, chain.evaluate.counts.rows
        with stopwatch() as random:
            start = time.perf_counter()
            chain.step()
            times.append((time.perf_counter() - start, network.seconds, random[0]))
        if chain.evaluate.counts.rows - before != rows:
            raise AssertionError(
                f"{case.name}: {chain.evaluate.counts.rows - before} rows where (M + 1) K makes {rows}"
            )
        progress()
    fast = sorted(times[n_warm_up:])[: max(1, case.n_iterations // 2)]
    seconds, inside, drawing = (sum(column) / len(fast) for column in zip(*fast, strict=True))
    return Timing(case, seconds, inside, drawing, rows)


@contextmanager
def stopwatch() -> Iterator[list[float]]:
    """Adds up the seconds spent on drawing random numbers."""
    total, kept = [0.0], (cd.Stream.normal, cd.Stream.uniform)

    def timed(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **options: Any) -> Tensor:
            start = time.perf_counter()
            out = draw(*args, **options)
            total[0] += time.perf_counter() - start
            return out

        return call

    cd.Stream.normal, cd.Stream.uniform = map(timed, kept)  # type: ignore[method-assign]
    try:
        yield total
    finally:
        cd.Stream.normal, cd.Stream.uniform = kept  # type: ignore[method-assign]


@dataclass(frozen=True)
class StoreCost:
    """Seconds of a run in a folder, of the sampler within it, and of its report, which is written once."""

    seconds: float
    sampling: float
    report: float
    n_iterations: int
    n_flushes: int

    @property
    def share(self) -> float:
        """Everything but the sampler's own work: draws, trace, flushes, checkpoints, stop rules, requests."""
        return 1 - self.sampling / self.seconds

    def __str__(self) -> str:
        return (
            f"store {self.share:.2%} of {self.seconds:.0f} s, {self.n_iterations} iterations of"
            f" {1e3 * self.sampling / self.n_iterations:.1f} ms, {self.n_flushes} flushes; report {self.report:.1f} s"
        )


def store_cost(folder: Path, seconds: float = 60.0) -> StoreCost:
    """What a run costs besides its sampling, with the default cadences and a network about as small as they get."""
    from crepe_diffusion.report.report import write_report

    torch.manual_seed(0)
    target = cd.models.Denoiser(Network((16,), width=256, depth=2), (16,)) ** 1.5
    ladder = cd.ladder.karras(21, 0.02, 20.0, substeps=2)
    sampling = n_flushes = 0.0

    def timed(function: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            nonlocal sampling
            began = time.perf_counter()
            out = function()
            sampling += time.perf_counter() - began
            return out

        return call

    with cd.Run(folder, target, ladder, n_chains=4, explorer=cd.Bounce()) as run:
        chain, store = run.chain, run.store
        flush = store.flush

        def counted(**options: bool) -> None:
            nonlocal n_flushes
            n_flushes += 1
            flush(**options)

        chain.step, chain.output = timed(chain.step), timed(chain.output)  # type: ignore[method-assign]
        store.flush = counted  # type: ignore[method-assign]
        began = time.perf_counter()
        run.run(seconds=seconds)
        total = time.perf_counter() - began
    began = time.perf_counter()
    write_report(cd.read_run(folder), folder)
    return StoreCost(total, sampling, time.perf_counter() - began, chain.iteration, int(n_flushes))


def cells(timings: Sequence[Timing]) -> list[list[str]]:
    """The table of iterations as text: a header, and a line for each case."""
    lines = [["network, guidance", "rows", "rows/s", "ms", "outside", "random", "rest"]]
    for t in timings:
        random = t.random / t.seconds
        shares = [f"{share:.1%}" for share in (t.outside, random, t.outside - random)]
        cost = [f"{t.rows:,}", f"{t.rows_per_second:,.0f}", f"{1e3 * t.seconds:.1f}"]
        lines.append([t.case.name, *cost, *shares])
    return lines


def store_cells(cost: StoreCost) -> list[list[str]]:
    """The same for the store."""
    ms = 1e3 * cost.sampling / cost.n_iterations
    return [
        ["run", "iterations", "ms", "flushes", "store", "report"],
        [
            f"{cost.seconds:.0f} s",
            f"{cost.n_iterations:,}",
            f"{ms:.1f}",
            f"{cost.n_flushes}",
            f"{cost.share:.2%}",
            f"{cost.report:.1f} s",
        ],
    ]


TITLES = {"iterations": "One iteration", "store": "A run in its folder"}
NOTES = {
    "iterations": """An iteration's time outside the network is what random numbers, kernels, ratios, swaps and the
reward take. `5x512`: a perceptron of 5 layers of 512 on 601 levels x 20 segments of 64 x 2 numbers, K = 1, one chain.
`2x64`: 2 layers of 64 on 16 numbers, 51 levels x 4 sub-steps x 4 chains; so small a network takes less time than the
calls around it. Each iteration cost exactly `(M + 1) K` network evaluations a chain and segment. With gradient
guidance, the backward pass counts as time inside the network.""",
    "store": """Everything but the sampler's own work counts as the store's: draws and trace, flushes, checkpoints (the
last one too), stop rules, looking for requests. The run is as small as runs get, so others spend a smaller share: 2
layers of 256 on 16 numbers, 21 levels x 2 sub-steps x 4 chains, a bounce, every draw kept, default cadences. The report
is written once, at the end; its time includes reading the run and loading the plotting library.""",
}


def write_docs(tables: Mapping[str, list[list[str]]], path: Path) -> None:
    """Write these sections of the page; those that were not measured stay as they are, with their own command."""
    kept = path.read_text().split("\n## ")[1:] if path.exists() else []
    sections = {text.partition("\n")[0]: text.partition("\n")[2].strip() for text in kept}
    command = "python -m studies.bench"
    for name, (header, *lines) in tables.items():
        rows = ["| " + " | ".join(line) + " |" for line in [header, ["---", *["---:"] * (len(header) - 1)], *lines]]
        made = f"`{command} --only {name} --write-docs`, seed 0, {_machine()}."
        sections[TITLES[name]] = "\n\n".join([made, "\n".join(rows), NOTES[name]])
    page = ["# Where the time goes", f"<!-- Written by `{command} --write-docs`; do not edit. -->"]
    page += [f"## {title}\n\n{sections[title]}" for title in TITLES.values() if title in sections]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(page) + "\n")


def _machine() -> str:
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads on {platform.machine()}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", choices=list(TITLES), help="one part of it")
    parser.add_argument("--quick", action="store_true", help="short ladders and a short run, to see that it works")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.add_argument("--write-docs", action="store_true", help="also write docs/bench.md")
    options = parser.parse_args(arguments)
    if options.quick and options.write_docs:
        parser.error("--quick is no measurement: docs/bench.md is not written from it")

    from rich import box
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    console, n_warm_up = Console(), 2
    tables: dict[str, list[list[str]]] = {}
    with Progress(console=console, disable=options.quiet) as bars:
        if options.only != "store":
            timings = []
            for case in cases(options.quick):
                task = bars.add_task(f"{case.name:22}", total=case.n_iterations + n_warm_up)
                timings.append(measure(case, n_warm_up, lambda task=task: bars.advance(task)))  # type: ignore[misc]
            tables["iterations"] = cells(timings)
        if options.only != "iterations":
            bars.add_task(f"{TITLES['store']:22}", total=None)
            with tempfile.TemporaryDirectory() as folder:
                tables["store"] = store_cells(store_cost(Path(folder) / "run", 2.0 if options.quick else 60.0))
    for name, (header, *lines) in tables.items():
        title = f"{TITLES[name]}; {_machine()}"
        table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for i, label in enumerate(header):
            table.add_column(label, justify="left" if i == 0 else "right", no_wrap=True)
        for line in lines:
            table.add_row(*line)
        console.print(table)
        if not options.quick:
            console.print(NOTES[name].replace("\n", " "), highlight=False)
    if options.write_docs:
        write_docs(tables, Path("docs/bench.md"))
        console.print("Wrote docs/bench.md")


if __name__ == "__main__":
    main()
