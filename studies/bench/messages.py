"""What processes send each other, how long that takes, and what it means for a thousand devices.

seconds of a call  =  ceil(blocks / shares) * block  +  latency(shares)  +  rows * bytes per row / bandwidth

The latency is measured here with gloo on this machine, by gathers of a few bytes; the rest of the model is arithmetic.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from statistics import median

import torch

from crepe_diffusion.run.team import group
from studies.bench.bench import Case, Cells, build
from studies.bench.processes import by_processes, even, in_blocks

__all__ = ["Plan", "Sent", "gather_seconds", "gather_table", "plan_table", "plans", "sent", "sent_table"]

SIZES = (8, 2**10, 2**16, 2**20, 2**24)
"""Bytes that every process has after a gather."""


def _times(n: int) -> list[float]:
    team, out = group(), []
    assert team is not None
    for size in SIZES:
        own = torch.zeros(1, size // team.size, dtype=torch.uint8)
        team.together(lambda own=own: (own,))  # type: ignore[misc]
        times = []
        for _ in range(max(3, min(n, 2**28 // size))):
            began = time.perf_counter()
            team.together(lambda own=own: (own,))  # type: ignore[misc]
            times.append(time.perf_counter() - began)
        out.append(median(times))
    return out


def gather_seconds(n_processes: int, n: int) -> list[float]:
    """The median time of a gather of each size, in the slowest of the processes."""
    return [max(times) for times in zip(*by_processes(n_processes, _times, n), strict=True)]


def gather_table(seconds: dict[int, list[float]]) -> Cells:
    names = ["8 B", "1 KiB", "64 KiB", "1 MiB", "16 MiB"]
    rows = [[str(n), *(f"{1e3 * s:.2f}" for s in times)] for n, times in seconds.items()]
    return ["processes", *(f"ms, {name}" for name in names)], rows


# -- what travels ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sent:
    """Bytes that every process gets: of one iteration and its gathers, of a draw that is kept, of a checkpoint; and of
    an iteration if all processes had all rows, and shared evaluations only."""

    name: str
    gathers: int
    bytes: int
    draw: int
    checkpoint: int
    evaluations: int


def _count(case: Case) -> list[tuple[int, int]]:
    team = group()
    assert team is not None
    chain, _ = build(case, in_blocks(case))
    out = []
    for action in (chain.step, chain.output, chain.snapshot):
        before = team.gathers, team.bytes
        action()
        out.append((team.gathers - before[0], team.bytes - before[1]))
    return out


def sent(case: Case) -> Sent:
    """Counted, so it does not depend on the machine."""
    case = even(case)
    (step, draw, checkpoint), _ = by_processes(2, _count, case)
    # A prediction and a drift in float32, the reward in float64, and whether all is finite, of each call.
    row = 2 * 4 * case.n_segments * math.prod(case.event_shape) + 8 + 1
    evaluations = case.n_levels * case.n_chains * case.substeps * row
    return Sent(case.name.partition(",")[0], step[0], step[1], draw[1], checkpoint[1], evaluations)


def sent_table(found: list[Sent]) -> Cells:
    rows = [
        [s.name, str(s.gathers), *(f"{n / 1e3:.1f}" for n in (s.bytes, s.draw, s.checkpoint, s.evaluations))]
        for s in found
    ]
    return ["network", "gathers", "kB", "kB, a draw", "kB, a checkpoint", "kB, evaluations"], rows


# -- many devices ----------------------------------------------------------------------------------------------------


NUMBERS = 10
"""Bytes of a row that has an owner: its log-work, and whether it was possible before and after."""


@dataclass(frozen=True)
class Plan:
    """Devices in groups; a group has so many rows per call, of so many bytes, in blocks of so many seconds."""

    devices: int
    groups: int
    rows: int
    row_bytes: float
    block_rows: int
    block_seconds: float
    bandwidth: float

    def efficiency(self, latency: float, row_bytes: float) -> float:
        """Which share of their time the devices are in networks; `latency` per further process of a group."""
        shares = self.devices // self.groups
        blocks = math.ceil(self.rows / self.block_rows)
        waits = latency * (shares - 1) + self.rows * row_bytes / self.bandwidth if shares > 1 else 0.0
        spent = math.ceil(blocks / shares) * self.block_seconds + waits
        return blocks * self.block_seconds / (shares * spent)


def plans() -> list[Plan]:
    """Images of 3 x 64 x 64 in float32, a prediction and a drift; blocks of 8 rows in 0.2 s; 10 Gbit/s."""
    image = {"row_bytes": 2 * 3 * 64 * 64 * 4, "block_rows": 8, "block_seconds": 0.2, "bandwidth": 1.25e9}
    arrangements = [(8, 1, 64), (64, 1, 512), (64, 8, 64), (1000, 1, 8000), (1000, 125, 64), (1000, 1000, 8)]
    return [Plan(devices, groups, rows, **image) for devices, groups, rows in arrangements]  # type: ignore[arg-type]


def plan_table(found: list[Plan], latency: float) -> Cells:
    rows = [
        [
            f"{p.devices:,}",
            f"{p.groups:,}",
            f"{p.rows:,}",
            f"{p.efficiency(latency, NUMBERS):.0%}",
            f"{p.efficiency(latency, p.row_bytes):.0%}",
            f"{p.rows * p.row_bytes / 1e6:.1f}",
        ]
        for p in found
    ]
    own = f"in networks, {1e3 * latency:.2f} ms"
    return ["devices", "groups", "rows of a group", own, "all rows", "MB, all rows"], rows
