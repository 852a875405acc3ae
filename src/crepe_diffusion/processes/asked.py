"""What is read of a prediction, so that the prediction itself need not be kept.

    tokens, log_p  =  asked.answer(predictions at some positions)       one token per position, one number per model

A prediction of a long text is large, and a walk needs little of it: the tokens that it draws, and their
log-probabilities. `Evaluator.ask` evaluates a model, hands over some positions at a time, and forgets the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from torch import Tensor

from crepe_diffusion.devices import as_real
from crepe_diffusion.processes.base import Coefficients
from crepe_diffusion.processes.discrete import BLOCK, Discrete, at_positions, pick
from crepe_diffusion.random import Stream, category

__all__ = ["Asked", "Conditionals", "Steps"]

A = TypeVar("A", bound="Asked")


@dataclass(frozen=True)
class Asked(ABC):
    """Every field has a row for each state; `positions`, (rows, k), and all that has a second axis belong together."""

    positions: Tensor

    @abstractmethod
    def answer(
        self, process: Discrete, x: Tensor, t: Tensor, predictions: tuple[Tensor, ...], coefficients: Coefficients
    ) -> tuple[Tensor, Tensor]:
        """Tokens (rows, k), and sums over the positions, (models + 1, rows): of each model, then of the proposal.

        `x` are the tokens of the states at these positions, (rows, k), and `predictions` those there, (rows, k, V). A
        draw that is impossible is -1.
        """

    def of(
        self, process: Discrete, x: Tensor, t: Tensor, predictions: tuple[Tensor, ...], coefficients: Coefficients
    ) -> tuple[Tensor, Tensor]:
        """The answer from predictions of whole states, `(rows, *event, V)`."""
        return self.answer(
            process, self.here(x), t, tuple(at_positions(p, self.positions) for p in predictions), coefficients
        )

    def here(self, x: Tensor) -> Tensor:
        """The tokens of states at the positions, (rows, k)."""
        return x.flatten(1).gather(1, self.positions)

    def rows(self: A, index: Tensor) -> A:
        return type(self)(*(getattr(self, f.name).index_select(0, index) for f in fields(self)))

    def columns(self, width: int) -> list[slice]:
        """Blocks of positions whose predictions, of so many numbers each, are small."""
        size = max(1, BLOCK // width)
        return [slice(k, k + size) for k in range(0, self.positions.shape[1], size)]

    def part(self: A, rows: slice | Tensor, columns: slice) -> A:
        """What is asked of some rows at some of the positions."""
        parts = (getattr(self, f.name) for f in fields(self))
        return type(self)(*(z[rows, columns] if z.ndim == 2 else z[rows] for z in parts))


@dataclass(frozen=True)
class Conditionals(Asked):
    """Tokens where `chosen`, and their log-probabilities.

    In rows that are `drawn`, (rows,), tokens come from the proposal by the uniforms `u`; elsewhere they are `given`.
    """

    chosen: Tensor
    given: Tensor
    drawn: Tensor
    u: Tensor

    def answer(
        self, process: Discrete, x: Tensor, t: Tensor, predictions: tuple[Tensor, ...], coefficients: Coefficients
    ) -> tuple[Tensor, Tensor]:
        log_q = process.drift(x, t, predictions, None, coefficients)
        draws = (self.chosen & self.drawn[:, None])[..., None]
        tokens = torch.where(self.drawn[:, None], category(log_q.where(draws, 0.0), self.u), self.given)
        log_p = torch.stack([as_real(pick(p, tokens.clamp(min=0))) for p in (*predictions, log_q)])
        return tokens, log_p.where(self.chosen, 0.0).sum(-1)


@dataclass(frozen=True)
class Steps(Asked):
    """The cleaner end of a step of all positions between s and t, and `log B - log F` of the step.

    It is asked at the noisier end. In rows that are `drawn` the cleaner end comes from the proposal by the uniforms
    `u`; elsewhere it is `given`. Positions that are not `free` stay.
    """

    free: Tensor
    given: Tensor
    drawn: Tensor
    u: Tensor
    s: Tensor

    @staticmethod
    def between(process: Discrete, x: Tensor, s: Tensor, up: Tensor, stream: Stream) -> Steps:
        """Steps of states x, which walk up from s where `up`, and else down to s."""
        given = x.flatten(1)
        positions = torch.arange(given.shape[1], device=x.device).expand(given.shape)
        u = stream.uniform(tuple(given.shape), device=x.device)
        return Steps(positions, process.free(x).flatten(1), given, ~up, u, s)

    def answer(
        self, process: Discrete, x: Tensor, t: Tensor, predictions: tuple[Tensor, ...], coefficients: Coefficients
    ) -> tuple[Tensor, Tensor]:
        log_q = process.drift(x, t, predictions, None, coefficients)
        moves = self.free & self.drawn[:, None]
        tokens = category(process.denoising(x, log_q, self.s, t).where(moves[..., None], 0.0), self.u)
        tokens = torch.where(moves, tokens, self.given)
        kernels = (*(process.in_kernel(x, p, t) for p in predictions), log_q)
        each = torch.stack([process.log_ratio(tokens.clamp(min=0), x, log_p, self.s, t) for log_p in kernels])
        return tokens, each.where(self.free, 0.0).sum(-1)
