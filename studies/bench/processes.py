"""What a second process brings, with one thread each, for a large and a small network.

speed-up  =  seconds of an iteration with one process / with two        (wall clock; needs two free cores)
work      =  processor seconds of one process / of the busier of two    (what the speed-up would be without waiting)
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from crepe_diffusion.run import distributed
from studies.bench.bench import Case, Cells, build, cases

__all__ = ["Gain", "gain", "gain_cases", "gain_table"]

N_BLOCKS = 6
"""Blocks per batch: an even number, so that two processes have equal shares."""


@dataclass(frozen=True)
class Gain:
    """Seconds of an iteration, by the clock and of the processor, with one process and with two."""

    name: str
    wall: tuple[float, float]
    work: tuple[float, float]
    is_free: bool
    """Whether two cores had nothing else to do; the clock tells nothing otherwise."""

    @property
    def speed_up(self) -> float:
        return self.wall[0] / self.wall[1]

    @property
    def work_ratio(self) -> float:
        return self.work[0] / self.work[1]


def _blocks(case: Case) -> Case:
    """The same with a number of rows that is cut evenly."""
    rows = case.n_levels * case.n_chains
    return replace(case, n_levels=case.n_levels - rows % N_BLOCKS // case.n_chains, guidance=None)


def _measure(rank: int, size: int, port: int, case: Case, results: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    with distributed():
        micro_batch = -(-case.n_levels * case.n_chains // N_BLOCKS) * case.n_segments
        chain, _ = build(case, micro_batch)
        chain.step()
        times = []
        for _ in range(case.n_iterations):
            wall, work = time.perf_counter(), time.process_time()
            chain.step()
            times.append((time.perf_counter() - wall, time.process_time() - work))
    results.put((rank, *(median(z) for z in zip(*times, strict=True))))


def _run(size: int, case: Case) -> tuple[float, float]:
    """The clock and the busiest processor."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [context.Process(target=_measure, args=(rank, size, port, case, results)) for rank in range(size)]
    for child in children:
        child.start()
    found = [results.get(timeout=1800) for _ in children]
    for child in children:
        child.join()
    return max(wall for _, wall, _ in found), max(work for _, _, work in found)


def gain(case: Case) -> Gain:
    """One process and two, one after the other."""
    case, is_free = _blocks(case), os.getloadavg()[0] < (os.cpu_count() or 1) - 1.5
    one, two = (_run(size, case) for size in (1, 2))
    return Gain(case.name.partition(",")[0], (one[0], two[0]), (one[1], two[1]), is_free)


def gain_cases(quick: bool) -> list[Case]:
    """The large and the small network of the other table."""
    large, *_, small = cases(quick)
    return [large, small]


def gain_table(gains: list[Gain]) -> Cells:
    header = ["network", "ms, 1", "ms, 2", "speed-up", "cpu ms, 1", "cpu ms, 2", "work"]
    lines = [
        [
            g.name,
            *(f"{1000 * s:.1f}" if g.is_free else "-" for s in g.wall),
            f"{g.speed_up:.2f}" if g.is_free else "-",
            *(f"{1000 * s:.1f}" for s in g.work),
            f"{g.work_ratio:.2f}",
        ]
        for g in gains
    ]
    return header, lines
