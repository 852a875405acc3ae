"""The contract of samplers that can go on, so that a run in a folder needs nothing else of them.

step()      one iteration; returns what happened in it
output()    the present draws, one per chain
snapshot()  all that the following iterations depend on
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from torch import Tensor

from crepe_diffusion.diagnostics import Diagnostics
from crepe_diffusion.evaluate import Evaluator
from crepe_diffusion.models import Model
from crepe_diffusion.schedules import Ladder
from crepe_diffusion.targets import Target

__all__ = ["Column", "Continuing", "Info"]


@dataclass(frozen=True)
class Column:
    """One row of an array that a store keeps: its type as NumPy writes it, its shape, and the names of its axes."""

    dtype: str
    shape: tuple[int, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Info:
    """What happened in one iteration: its number, and the network rows since the beginning."""

    iteration: int
    rows: int


InfoT = TypeVar("InfoT", bound=Info)


@runtime_checkable
class Continuing(Protocol[InfoT]):
    """A sampler that makes one draw per chain and iteration, for as long as one likes.

    The class takes `(target, ladder, *, n_chains, seed, process, proposal, micro_batch, nonfinite, fit_samples, start)`
    and may take more (the chains of `SMC` are its `n_batches`). `start` is the `snapshot()` of a sampler with the same
    settings and seed: the new one goes on from there, bit for bit, and neither fits nor denoises first. Iteration n
    depends on the state before it, the seed and n alone.

    What a store keeps beside `x`, `iteration` and the clock is described by two tables of columns. `draw_row` gives
    the values of `draw_columns` for the draw of one iteration, `trace_rows` those of `trace_columns` for several
    iterations at once, the iteration as first axis. An `Info` may be kept: later steps leave it as it is.

    `diagnostics` is None where a sampler has no levels to exchange.
    """

    n_chains: int
    iteration: int
    evaluate: Evaluator

    @property
    def diagnostics(self) -> Diagnostics | None:
        """What was recorded since the beginning, or since `restart_diagnostics`."""

    @property
    def target(self) -> Target: ...

    @target.setter
    def target(self, target: Target | Model) -> None:
        """Go on with another target (online refinement); one that cannot be evaluated leaves all as it was."""

    @property
    def ladder(self) -> Ladder: ...

    @property
    def draw_columns(self) -> Mapping[str, Column]: ...

    @property
    def trace_columns(self) -> Mapping[str, Column]: ...

    def step(self) -> InfoT:
        """One iteration."""

    def output(self) -> Tensor:
        """The draws of the last iteration, (chains, *event); the same at every call.

        Finishing below level 0 may cost network rows each time.
        """

    def draw_row(self, info: InfoT) -> dict[str, np.ndarray]:
        """The values of `draw_columns` for one iteration."""

    def trace_rows(self, infos: Sequence[InfoT]) -> dict[str, np.ndarray]:
        """The values of `trace_columns`, (iterations, ...)."""

    def snapshot(self) -> dict[str, Tensor]:
        """All that the next iterations depend on besides target, settings and seed."""

    def restart_diagnostics(self) -> None:
        """Forget what was recorded, after burn-in or when the target changed."""
