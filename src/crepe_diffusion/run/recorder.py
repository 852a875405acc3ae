"""What a run keeps of its sampler: one row for each draw, one for each iteration of the trace, and checkpoints.

draws    x, iteration, target, scalars, and what the sampler keeps of a draw (its `draw_columns`)
trace    iteration, seconds, rows, and what the sampler keeps of an iteration (its `trace_columns`)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from crepe_diffusion.batches import called
from crepe_diffusion.errors import InputError
from crepe_diffusion.run.store import Column, Store, read_store, zarr_type
from crepe_diffusion.samplers.base import Continuing, Info

__all__ = ["Recorder", "Scalars"]

STEPS_AT_ONCE = 64
"""Rows of the trace are made together: one by one, these few numbers would cost half of what the store costs."""
LINEAGE = ("replica", "born")
OWN = ("x", "iteration", "target", "seconds", "rows")
Scalars = Mapping[str, Callable[[Tensor], Tensor]]


class Recorder:
    """Turns iterations into rows of the store of samples."""

    def __init__(self, root: Path, sampler: Continuing[Any], scalars: Scalars, run: str = ""):
        self.root, self.sampler, self.scalars = root, sampler, scalars
        self.infos: list[Info] = []
        self.seconds: list[float] = []
        self.store = Store(root, self._draw_columns(), self._trace_columns(), run)

    def _draw_columns(self) -> dict[str, Column]:
        empty, chains = self.sampler.evaluate.empty(0), self.sampler.n_chains
        event, dtype = tuple(empty.shape[1:]), zarr_type(empty.numpy(force=True).dtype)
        columns = {
            "x": Column(dtype, (chains, *event), ("chain", *(f"event_{i}" for i in range(len(event))))),
            "iteration": Column("int64"),
            "target": Column("int32"),
        }
        for name, column in self.sampler.draw_columns.items():
            columns[_free(name)] = Column(column.dtype, column.shape, column.names)
        for name in self.scalars:
            if not name or "/" in name or name.startswith("."):
                raise InputError(f"a scalar's name becomes a file: no '/' and no leading '.', got {name!r}")
            columns[f"scalars/{name}"] = Column("float64", (chains,), ("chain",))
        return columns

    def _trace_columns(self) -> dict[str, Column]:
        columns = {"iteration": Column("int64"), "seconds": Column("float64"), "rows": Column("int64")}
        for name, column in self.sampler.trace_columns.items():
            columns[_free(name)] = Column(column.dtype, column.shape, column.names, compressed=bool(column.shape))
        return columns

    @property
    def n_draws(self) -> int:
        return self.store.draws.n_rows

    @property
    def n_steps(self) -> int:
        return self.store.trace.n_rows + len(self.infos)

    def draw(self, info: Info, target: int) -> None:
        """Keep the draw of this iteration."""
        x = self.sampler.output()
        row = {"x": x.numpy(force=True), "iteration": info.iteration, "target": target, **self.sampler.draw_row(info)}
        for name, function in self.scalars.items():
            row[f"scalars/{name}"] = _scalar(name, function, x)
        self.store.draws.append(row)

    def step(self, info: Info, seconds: float) -> None:
        """Keep what happened in this iteration."""
        self.infos.append(info)
        self.seconds.append(seconds)
        if len(self.infos) == STEPS_AT_ONCE:
            self._write_steps()

    def _write_steps(self) -> None:
        if not self.infos:
            return
        infos, seconds, self.infos, self.seconds = self.infos, self.seconds, [], []
        own = {
            "iteration": np.array([i.iteration for i in infos]),
            "seconds": np.array(seconds),
            "rows": np.array([i.rows for i in infos]),
        }
        self.store.trace.extend({**own, **self.sampler.trace_rows(infos)})

    def flush(self, *, arrays: bool = True) -> None:
        """Make all rows visible to readers; without `arrays`, to those that read the manifest."""
        self._write_steps()
        self.store.flush(arrays=arrays)

    def flushed(self, names: list[str]) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The iterations of all draws, these scalars of them (draws, chains), and where they come from."""
        draws, _ = read_store(self.root, {"iteration", *LINEAGE, *(f"scalars/{name}" for name in names)})
        lineage = {name: draws[name] for name in LINEAGE if name in draws}
        return draws["iteration"], {name: draws[f"scalars/{name}"] for name in names}, lineage


def _free(name: str) -> str:
    if name in OWN or name.startswith("scalars") or "/" in name or name.startswith("."):
        raise InputError(f"a column of a sampler must not be called {name!r}: a run has files of that name")
    return name


def _scalar(name: str, function: Callable[[Tensor], Tensor], x: Tensor) -> np.ndarray:
    values = called(function, f"scalar {name!r}", x)
    if not isinstance(values, Tensor) or values.shape != (len(x),):
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise InputError(f"scalar {name!r} must give one number for each of {len(x)} samples, got {shape}")
    return values.numpy(force=True)
