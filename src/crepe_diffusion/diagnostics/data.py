"""What a run has produced, as plain arrays: all that reports, verdicts and notebooks need.

x[draw, chain, *event] drawn at iteration[draw] under targets[target[draw]]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crepe_diffusion.diagnostics.estimates import Estimate
from crepe_diffusion.diagnostics.exchange import Diagnostics
from crepe_diffusion.diagnostics.starting import StartingPass
from crepe_diffusion.errors import InputError
from crepe_diffusion.evaluate import Counts

__all__ = ["RunData"]


@dataclass(frozen=True)
class RunData:
    """A run, or an in-memory chain, at one moment.

    The first `n_burnt` draws are not to be judged. `columns` (draws, chains) are what the sampler keeps of its draws:
    for replica exchange `replica`, and `born`, the iteration in which that one was at the noise end last.
    `diagnostics` begin after burn-in and with the target now in force; of a running run they are as old as its last
    checkpoint, and they are None where nothing is exchanged. `trace` holds one row per recorded iteration: `iteration`,
    `seconds` and `rows` (both since the beginning), and for replica exchange `acceptance` (rows, pairs; the mean of
    min(1, alpha) over chains, NaN where a pair did not meet), `explored` (rows, levels), and `level` (rows, chains,
    replicas) unless it would be large. `started_from` is the pass from which the chains started, if there was one.
    Where scalars are known as functions, `starting_means` holds its means of them, and `starting_shifts` what it
    measured of the size of the steps.
    """

    name: str
    path: Path | None
    config: dict[str, Any]
    status: str
    x: np.ndarray
    iteration: np.ndarray
    target: np.ndarray
    targets: list[dict[str, Any]]
    n_burnt: int
    scalars: dict[str, np.ndarray]
    trace: dict[str, np.ndarray]
    levels: np.ndarray
    substeps: int
    diagnostics: Diagnostics | None
    counts: Counts
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    started_from: StartingPass | None = None
    starting_means: dict[str, Estimate] = field(default_factory=dict)
    starting_shifts: dict[str, Estimate] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def n_draws(self) -> int:
        return len(self.x)

    @property
    def n_chains(self) -> int:
        return self.x.shape[1]

    @staticmethod
    def of(
        samples: Any,
        chain: Any = None,
        scalars: dict[str, Callable[[Tensor], Tensor]] | None = None,
        name: str = "chain",
    ) -> RunData:
        """What `ReplicaExchange.sample` returned; without burn-in and trace. The sampler adds the names of rewards."""
        functions = default_scalars(samples.x.shape[1:]) if scalars is None else scalars
        x, start = samples.chains, samples.started_from
        rewards = [] if chain is None else [{"name": r.name} for r in chain.target.rewards]
        return RunData(
            name=name,
            path=None,
            config={},
            status="finished",
            x=x.numpy(force=True),
            iteration=samples.iteration.numpy(force=True),
            target=np.zeros(len(x), dtype=np.int64),
            targets=[{"from_iteration": 1, "rewards": rewards}],
            n_burnt=0,
            scalars={key: samples.scalar(f).numpy(force=True) for key, f in functions.items()},
            trace={},
            levels=samples.ladder.levels.numpy(),
            substeps=samples.ladder.substeps,
            diagnostics=samples.diagnostics,
            counts=samples.evaluations,
            columns={"replica": samples.replica.numpy(force=True), "born": samples.born.numpy(force=True)},
            started_from=start,
            starting_means={} if start is None else {key: start.mean(f) for key, f in functions.items()},
            starting_shifts={} if start is None else {key: start.shift(f) for key, f in functions.items()},
        )

    def to_xarray(self) -> Any:
        """An `xarray.Dataset` of the draws, chains first as ArviZ likes them."""
        try:
            import xarray
        except ImportError:
            raise InputError("to_xarray needs xarray: pip install 'crepe-diffusion[run]'") from None
        event = [f"event_{i}" for i in range(self.x.ndim - 2)]
        variables: dict[str, Any] = {
            "x": (["chain", "draw", *event], self.x.swapaxes(0, 1)),
            "target": (["draw"], self.target),
        }
        for name, values in self.columns.items():
            more = [f"{name}_{i}" for i in range(values.ndim - 2)]
            variables[name] = (["chain", "draw", *more], values.swapaxes(0, 1))
        for name, values in self.scalars.items():
            variables[f"scalar {name}" if name in variables else name] = (["chain", "draw"], values.T)
        coordinates = {"chain": np.arange(self.n_chains), "draw": np.arange(self.n_draws)}
        data = xarray.Dataset(variables, coordinates, {"name": self.name, "n_burnt": self.n_burnt})
        return data.assign_coords(iteration=("draw", self.iteration))


def default_scalars(event_shape: tuple[int, ...]) -> dict[str, Callable[[Tensor], Tensor]]:
    """The first coordinates of an event, where no scalars were chosen."""
    n = int(torch.Size(event_shape).numel())
    return {f"x[{i}]": _coordinate(i) for i in range(min(n, 4))}


def _coordinate(i: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.flatten(1)[:, i]
