"""What a run keeps of its chain: one row for each draw and one for each iteration of the trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from crepe_diffusion.diagnostics.exchange import accept_probability
from crepe_diffusion.errors import InputError
from crepe_diffusion.run.store import Column, Store, zarr_type
from crepe_diffusion.samplers import Exchange, ReplicaExchange

__all__ = ["Scalars", "Step", "draw_row", "make_store", "step", "trace_rows"]

MOST_LEVELS_TRACED = 1024
Scalars = Mapping[str, Callable[[Tensor], Tensor]]


def make_store(root: Path, chain: ReplicaExchange, scalars: Scalars) -> Store:
    """An empty store with a column for everything below."""
    chains, replicas = chain.state.level.shape
    x = chain.state.x
    event = tuple(x.shape[1:])
    dtype = zarr_type(x[:0].numpy(force=True).dtype)
    draws = {
        "x": Column(dtype, (chains, *event), ("chain", *(f"event_{i}" for i in range(len(event))))),
        "iteration": Column("int64"),
        "target": Column("int32"),
        "replica": Column("int32", (chains,), ("chain",)),
        "born": Column("int64", (chains,), ("chain",)),
    }
    for name in scalars:
        if not name or "/" in name or name.startswith("."):
            raise InputError(f"a scalar's name becomes a file: no '/' and no leading '.', got {name!r}")
        draws[f"scalars/{name}"] = Column("float64", (chains,), ("chain",))
    trace = {
        "iteration": Column("int64"),
        "seconds": Column("float64"),
        "rows": Column("int64"),
        "acceptance": Column("float32", (replicas - 1,), ("pair",), compressed=True),
    }
    if chains * replicas <= MOST_LEVELS_TRACED:
        trace["level"] = Column("int16", (chains, replicas), ("chain", "replica"), compressed=True)
    if chain.explorer is not None and not chain.renews:
        trace["explored"] = Column("float32", (replicas,), ("level",), compressed=True)
    return Store(root, draws, trace)


def draw_row(chain: ReplicaExchange, info: Exchange, target: int, scalars: Scalars) -> dict[str, Any]:
    """The sample of this iteration."""
    x = chain.output()
    row: dict[str, Any] = {
        "x": x.numpy(force=True),
        "iteration": info.iteration,
        "target": target,
        "replica": info.replica.numpy(force=True),
        "born": info.born.numpy(force=True),
    }
    for name, function in scalars.items():
        row[f"scalars/{name}"] = _scalar(name, function, x)
    return row


class Step(NamedTuple):
    """What happened in one iteration, as it came from the chain."""

    iteration: int
    seconds: float
    rows: int
    log_work: Tensor
    active: Tensor
    level: Tensor
    explored: Tensor | None


def step(info: Exchange, seconds: float) -> Step:
    swaps = info.swaps
    return Step(info.iteration, seconds, info.rows, swaps.log_work, swaps.active, info.level, info.explored)


def trace_rows(steps: Sequence[Step]) -> dict[str, Any]:
    """Rows of the trace, many at once: one by one, these few numbers would cost half of what the store costs."""
    work, active = torch.stack([s.log_work for s in steps]), torch.stack([s.active for s in steps])
    alpha = accept_probability(work[..., 1:], work[..., :-1]).mean(1)
    explored = [s.explored for s in steps if s.explored is not None]
    rows = {name: np.array([getattr(s, name) for s in steps]) for name in ("iteration", "seconds", "rows")}
    rows["acceptance"] = alpha.where(active, math.nan).numpy(force=True)
    rows["level"] = torch.stack([s.level for s in steps]).numpy(force=True)
    if explored:
        rows["explored"] = torch.stack(explored).to(torch.float32).mean(1).numpy(force=True)
    return rows


def _scalar(name: str, function: Callable[[Tensor], Tensor], x: Tensor) -> np.ndarray:
    values = function(x)
    if not isinstance(values, Tensor) or values.shape != (len(x),):
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise InputError(f"scalar {name!r} must give one number for each of {len(x)} samples, got {shape}")
    return values.numpy(force=True)
