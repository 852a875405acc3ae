"""What every diffusion process offers: kernels up and down between s < t, and the ratio of its kernels.

    L_j = log B_j(x_s | x_t) - log F(x_t | x_s)      estimates log p_j,s(x_s) - log p_j,t(x_t)
    L_Q = the same with the kernels that the proposal really uses

`log_ratios` is direction-free: it does not depend on whether the step was walked up or down.

Where the densities of the models are known, `log_probs` replaces the kernels of the models:

    L_j = log p_j,s(x_s) - log p_j,t(x_t)

A chain then reaches the truth up to Monte Carlo error, which separates a bug from a discretisation error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, TypeVar

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from crepe_diffusion.batches import IMPOSSIBLE, blocks, rows_like
from crepe_diffusion.devices import real
from crepe_diffusion.errors import InputError
from crepe_diffusion.processes.information import Information, Measured
from crepe_diffusion.random import Stream

__all__ = ["Coefficients", "Evaluation", "Process"]

P = TypeVar("P", bound="Process")


@dataclass(frozen=True)
class Coefficients:
    """The exponents c_j of the target and c'_j of its proposal, and how far the proposal follows its drift each way."""

    target: tuple[float, ...]
    proposal: tuple[float, ...]
    k_up: float
    k_down: float

    @property
    def total(self) -> float:
        return sum(self.target)


@dataclass(frozen=True)
class Evaluation:
    """What is stored of a point at its time: the prediction of each model, the proposal's drift, r_t(x)."""

    predictions: tuple[Shaped[Tensor, "rows ..."], ...]
    drift: Shaped[Tensor, "rows ..."]
    reward: Float[Tensor, " rows"]

    @property
    def possible(self) -> Tensor:
        """Rows to which the target gives a positive weight, (rows,)."""
        return self.reward > IMPOSSIBLE / 2

    def rows(self, index: Tensor) -> Evaluation:
        return Evaluation(
            tuple(p.index_select(0, index) for p in self.predictions),
            self.drift.index_select(0, index),
            self.reward.index_select(0, index),
        )

    @staticmethod
    def nothing(x: Tensor) -> Evaluation:
        """Of points of which no prediction is kept: no reward yet."""
        zero = torch.zeros(len(x), dtype=real(x.device), device=x.device)
        return Evaluation((), zero[:, None][:, :0], zero)

    @staticmethod
    def cat(evaluations: list[Evaluation]) -> Evaluation:
        return Evaluation(
            tuple(torch.cat(p) for p in zip(*(v.predictions for v in evaluations), strict=True)),
            torch.cat([v.drift for v in evaluations]),
            torch.cat([v.reward for v in evaluations]),
        )


@dataclass(frozen=True)
class Process(ABC):
    """A noising process with its kernels. Times are `(rows,)`, states `(rows, *event)`.

    `log_probs[j](x, t)` are the exact log-densities of the models where they are known, one function per model of the
    target; they replace the ratios of the models' kernels. The proposal stays the same.
    """

    log_probs: tuple[Callable[[Tensor, Tensor], Tensor], ...] | None = field(default=None, kw_only=True, repr=False)
    is_discrete: ClassVar[bool] = False
    """Whether states are integers."""

    def check_times(self, times: Tensor) -> None:  # noqa: B027 - most processes take any ladder
        """Refuse a ladder on which this process is not defined."""

    def check_event(self, event: torch.Size) -> None:  # noqa: B027
        """Refuse events on which this process is not defined."""

    def multiplies(self, event: torch.Size) -> bool:
        """Whether ratios multiply conditionals of several positions as if they were independent.

        On steep targets that is an error which no number of levels removes.
        """
        return False

    def n_prompts(self, event: torch.Size) -> int:
        """How many groups of chains have frozen positions of their own."""
        return 1

    def keeps_predictions(self, event: torch.Size) -> bool:
        """Whether a point keeps its predictions until it moves; if not, models are asked for single tokens instead."""
        return True

    def project(self, z: Tensor) -> Tensor:
        """The part of z inside the subspace on which the process lives."""
        return z

    def model_time(self, x: Tensor, t: Tensor) -> Tensor:
        """The time that the models get for a state x at time t, (rows,)."""
        return t

    @abstractmethod
    def noise(self, stream: Stream, like: Tensor, t: float, coefficients: Coefficients) -> Tensor:
        """Draws from the law at the noise end, one per row of `like`."""

    @abstractmethod
    def drift(
        self, x: Tensor, t: Tensor, predictions: tuple[Tensor, ...], guidance: Tensor | None, coefficients: Coefficients
    ) -> Tensor:
        """The direction of the proposal at x: a score, or log-probabilities of tokens."""

    def ends(
        self, times: Tensor, index: Tensor, direction: Tensor, coefficients: Coefficients
    ) -> tuple[Tensor, Tensor]:
        """The lower and upper time of each row's next step from `times[index]`, up (+1) or down (-1); equal for 0."""
        return times[index + direction.clamp(max=0)], times[index + direction.clamp(min=0)]

    def some(self, s: Tensor, t: Tensor, rows: Tensor | slice, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
        """These times of some rows."""
        return s[rows], t[rows]

    @abstractmethod
    def step(
        self, x: Tensor, seen: Evaluation, s: Tensor, t: Tensor, up: Tensor, stream: Stream, coefficients: Coefficients
    ) -> Tensor:
        """Draw the other end of a step from the proposal: x_t where `up`, x_s elsewhere; s = t stays put."""

    @abstractmethod
    def kernel_ratios(
        self,
        x_s: Tensor,
        x_t: Tensor,
        at_s: Evaluation,
        at_t: Evaluation,
        s: Tensor,
        t: Tensor,
        coefficients: Coefficients,
    ) -> tuple[Tensor, Tensor]:
        """`log_ratios` from the kernels of the models and of the proposal.

        `at_s` may come without predictions, and with a drift of zero where `k_up` is 0.
        """

    def log_ratios(
        self,
        x_s: Tensor,
        x_t: Tensor,
        at_s: Evaluation,
        at_t: Evaluation,
        s: Tensor,
        t: Tensor,
        coefficients: Coefficients,
    ) -> tuple[Tensor, Tensor]:
        """`L_j` as (models, rows) and `L_Q` as (rows,), summed over the event."""
        models, proposal = self.kernel_ratios(x_s, x_t, at_s, at_t, s, t, coefficients)
        return self.known_ratios(models, x_s, x_t, s, t), proposal

    def known_ratios(self, models: Tensor, x_s: Tensor, x_t: Tensor, s: Tensor, t: Tensor) -> Tensor:
        """`L_j` from the exact log-densities where they are known, and else the given ones, (models, rows)."""
        if self.log_probs is None:
            return models
        return torch.stack([log_prob(x_s, s) - log_prob(x_t, t) for log_prob in self.log_probs])

    def step_ratios(
        self,
        x: Tensor,
        x_new: Tensor,
        seen: Evaluation,
        seen_new: Evaluation,
        s: Tensor,
        t: Tensor,
        up: Tensor,
        coefficients: Coefficients,
    ) -> tuple[Tensor, Tensor]:
        """`log_ratios` of a step from x to x_new, which rose where `up` and fell elsewhere."""
        models = torch.empty(len(seen.predictions), len(x), dtype=t.dtype, device=x.device)
        proposal = torch.empty(len(x), dtype=t.dtype, device=x.device)
        for rows, of in _by_direction(up, blocks(seen.drift)):
            predictions = tuple(of(new, old) for old, new in zip(seen.predictions, seen_new.predictions, strict=True))
            drift_t = of(seen_new.drift, seen.drift)
            at_t = Evaluation(predictions, drift_t, of(seen_new.reward, seen.reward))
            # Noising that follows no drift needs none: zeros that take no memory.
            drift_s = of(seen.drift, seen_new.drift) if coefficients.k_up else drift_t.new_zeros(()).expand_as(drift_t)
            at_s = Evaluation((), drift_s, of(seen.reward, seen_new.reward))
            x_s, x_t = of(x, x_new), of(x_new, x)
            s_rows, t_rows = self.some(s, t, rows, coefficients)
            models[:, rows], proposal[rows] = self.log_ratios(x_s, x_t, at_s, at_t, s_rows, t_rows, coefficients)
        return models, proposal

    @abstractmethod
    def expectation(self, x: Tensor, t: Tensor, predictions: tuple[Tensor, ...], coefficients: Coefficients) -> Tensor:
        """E[x_0 | x_t = x] of the combined models: what a reward on predictions sees."""

    def pull_back(self, g: Tensor, t: Tensor, coefficients: Coefficients) -> Tensor:
        """A gradient in E[x_0 | x] as one in x, by what replaces the network's Jacobian where it is not computed."""
        return g

    def density_ratios(self, x: Tensor, y: Tensor, at_x: Evaluation, at_y: Evaluation, t: Tensor) -> Tensor:
        """`log_density_ratios` from the predictions at both points."""
        raise InputError(f"{type(self).__name__} has no ratio of densities at one time: give it log_probs")

    def log_density_ratios(self, x: Tensor, y: Tensor, at_x: Evaluation, at_y: Evaluation, t: Tensor) -> Tensor:
        """`log p_j,t(y) - log p_j,t(x)` of every model at one time, (models, rows).

        Gaussian states: by the trapezoid rule between x and y, exact for Gaussian data and otherwise with an error of
        third order in their distance. Tokens: exact for the model's conditionals, where at most one position differs.
        """
        if self.log_probs is not None:
            return torch.stack([log_prob(y, t) - log_prob(x, t) for log_prob in self.log_probs])
        return self.density_ratios(x, y, at_x, at_y, t)

    def repeated(self: P, n: int) -> P:
        """The process of n such events side by side: the event gets a leading axis of length n."""
        if self.log_probs is None:
            return self
        return replace(self, log_probs=tuple(_side_by_side(log_prob, n) for log_prob in self.log_probs))

    # -- what is measured before a run -------------------------------------------------------------------

    def to_measure(self) -> type[Measured] | None:
        """The form of the models' Fisher information that must be measured before the kernels can be used, if any."""
        return None

    def needs_fit(self) -> bool:
        return self.to_measure() is not None

    def fitted(self: P, information: Information) -> P:
        """The same process with this information."""
        raise InputError(f"{type(self).__name__} uses no Fisher information")

    def state_dict(self) -> dict[str, Tensor]:
        """What was measured, as tensors; a snapshot keeps it."""
        return {}

    def restored(self: P, state: dict[str, Tensor]) -> P:
        """The same process with what `state_dict` returned."""
        return self


Rows = Tensor | slice
Choice = Callable[[Tensor, Tensor], Tensor]


def _by_direction(up: Tensor, parts: list[slice]) -> list[tuple[Rows, Choice]]:
    """Rows, and a function that takes them from its first argument where they rise and else from its second.

    A large batch is gathered by direction in parts that fit into a cache: choosing entry by entry would take longer. A
    small one, or one on another device, is chosen from as a whole: fewer operations, and nothing to wait for.
    """
    if len(parts) == 1:
        return [(slice(None), partial(_chosen, up))]
    by_direction = [(rising, (up == rising).nonzero()[:, 0]) for rising in (True, False)]
    size = parts[0].stop
    pieces = [(rising, rows) for rising, every in by_direction for rows in every.split(size) if len(rows)]
    return [(rows, partial(_gathered, rising, rows)) for rising, rows in pieces]


def _chosen(up: Tensor, above: Tensor, below: Tensor) -> Tensor:
    return torch.where(rows_like(up, above), above, below)


def _gathered(rising: bool, rows: Tensor, above: Tensor, below: Tensor) -> Tensor:
    return (above if rising else below).index_select(0, rows)


def _side_by_side(log_prob: Callable[[Tensor, Tensor], Tensor], n: int) -> Callable[[Tensor, Tensor], Tensor]:
    def total(x: Tensor, t: Tensor) -> Tensor:
        return log_prob(x.flatten(0, 1), t.repeat_interleave(n)).reshape(len(x), n).sum(1)

    return total
