"""What a second process brings, with one thread each, for a large and a small network.

speed-up  =  seconds of an iteration with one process / with two        (wall clock; needs two free cores)
bound     =  the same if the two had nothing to tell each other         (two chains at once, each by itself)
work      =  processor seconds of one process / of the busier of two    (what the speed-up would be without waiting)
whole     =  processor seconds of one process that does not cut its rows into blocks
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, TypeVar

import torch

import crepe_diffusion as cd
from crepe_diffusion.run import distributed
from studies.bench.bench import Case, Cells, build, cases

__all__ = ["Gain", "by_processes", "even", "gain", "gain_cases", "gain_table", "in_blocks", "pilot_table"]

T = TypeVar("T")

N_BLOCKS = 6
"""Blocks per batch: an even number, so that two processes have equal shares."""
N_ROUNDS = 3
FREE = 0.9
"""The share of the clock that a process with a core of its own computes."""


@dataclass(frozen=True)
class Gain:
    """Seconds of an iteration, by the clock and of the processor, with one process and with two."""

    name: str
    wall: tuple[float, float]
    work: tuple[float, float]
    apart: tuple[float, float]
    """Clock and processor of the slower of two processes that run at once and know nothing of each other."""
    whole: float
    """Processor of one process without blocks."""

    @property
    def is_free(self) -> bool:
        """Whether two cores had nothing else to do: those two hardly waited. The clock tells nothing otherwise."""
        return self.apart[1] > FREE * self.apart[0]

    @property
    def speed_up(self) -> float:
        return self.wall[0] / self.wall[1]

    @property
    def bound(self) -> float:
        """What two processes could reach on this machine if they had nothing to tell each other."""
        return 2 * self.wall[0] / self.apart[0]

    @property
    def work_ratio(self) -> float:
        return self.work[0] / self.work[1]


def even(case: Case) -> Case:
    """The same with a number of rows that is cut evenly."""
    rows = case.n_levels * case.n_chains
    return replace(case, n_levels=case.n_levels - rows % N_BLOCKS // case.n_chains, guidance=None)


def in_blocks(case: Case) -> int:
    """The micro-batch that cuts the rows into blocks."""
    return -(-case.n_levels * case.n_chains // N_BLOCKS) * case.n_segments


def _measure(case: Case, cut: bool = True) -> tuple[float, float]:
    """Seconds of an iteration by the clock and of the processor."""
    chain, _ = build(case, in_blocks(case) if cut else None)
    chain.step()
    times = []
    for _ in range(case.n_iterations):
        wall, work = time.perf_counter(), time.process_time()
        chain.step()
        times.append((time.perf_counter() - wall, time.process_time() - work))
    return median(t[0] for t in times), median(t[1] for t in times)


def _join(
    rank: int, size: int, port: int, groups: int, function: Callable[..., T], arguments: tuple[Any, ...], results: Any
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if size <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})  # else two that have the same niceness may sit on one core for long
    with distributed(groups):
        results.put(function(*arguments))


def by_processes(size: int, function: Callable[..., T], *arguments: Any, groups: int = 1) -> list[T]:
    """`function(*arguments)` in so many processes that share their evaluations within each group."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = (size, port, groups, function, arguments, results)
    children = [context.Process(target=_join, args=(rank, *shared)) for rank in range(size)]
    for child in children:
        child.start()
    found = [results.get(timeout=1800) for _ in children]
    for child in children:
        child.join()
    return found


def gain(case: Case) -> Gain:
    """One process, two that share, and two that do not, in turn; of each the best of its rounds counts."""
    case, settings = even(case), ((1, 1), (2, 1), (2, 2))
    rounds = [[by_processes(n, _measure, case, groups=groups) for n, groups in settings] for _ in range(N_ROUNDS)]
    # Of two processes the later and the busier one.
    found = [
        [(max(w for w, _ in each), max(w for _, w in each)) for each in kind] for kind in zip(*rounds, strict=True)
    ]
    one, two, apart = ((min(w for w, _ in kind), min(w for _, w in kind)) for kind in found)
    whole = min(work for _ in range(N_ROUNDS) for _, work in by_processes(1, _measure, case, False))
    return Gain(case.name.partition(",")[0], (one[0], two[0]), (one[1], two[1]), apart, whole)


def gain_cases(quick: bool) -> list[Case]:
    """The large and the small network of the other table."""
    large, *_, small = cases(quick)
    return [large, small]


def gain_table(gains: list[Gain]) -> Cells:
    header = ["network", "ms, 1", "ms, 2", "speed-up", "bound", "cpu ms, whole", "cpu ms, 1", "cpu ms, 2", "work"]
    lines = [
        [
            g.name,
            *(f"{1000 * s:.1f}" if g.is_free else "-" for s in g.wall),
            *(f"{ratio:.2f}" if g.is_free else "-" for ratio in (g.speed_up, g.bound)),
            *(f"{1000 * s:.1f}" for s in (g.whole, *g.work)),
            f"{g.work_ratio:.2f}",
        ]
        for g in gains
    ]
    return header, lines


# -- the pilot -------------------------------------------------------------------------------------------------------

PARTICLES, STEPS = 24, 33


def _pilot(case: Case) -> tuple[float, float]:
    chain, _ = build(case)
    steps = cd.ladder.karras(STEPS, sigma_min=2e-3, sigma_max=80.0)
    options = {"process": chain.evaluate.process, "micro_batch": PARTICLES // N_BLOCKS * case.n_segments}
    wall, work = time.perf_counter(), time.process_time()
    cd.pilot(chain.target, steps, n=PARTICLES, progress=False, **options)  # type: ignore[arg-type]
    return time.perf_counter() - wall, time.process_time() - work


def pilot_table(chosen: list[Case]) -> tuple[list[list[float]], Cells]:
    """Seconds of a pilot by one process, which a broadcast would come on top of, and by two that share it."""
    found, lines = [], []
    for case in chosen:
        rounds = [[by_processes(n, _pilot, case) for n in (1, 2)] for _ in range(N_ROUNDS)]
        best = [min(max(each[i] for each in r[k]) for r in rounds) for i in (0, 1) for k in (0, 1)]
        found.append(best)
        lines.append([case.name.partition(",")[0], *(f"{s:.2f}" for s in best)])
    return found, (["network", "s, once", "s, shared", "cpu s, once", "cpu s, shared"], lines)
