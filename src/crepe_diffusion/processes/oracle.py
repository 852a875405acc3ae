"""Exact log-densities in place of `L_j`: what the sampler would do with a perfect ratio.

    L_j = log p_j,s(x_s) - log p_j,t(x_t)

With it a chain reaches the truth up to Monte Carlo error, which tells a bug from a discretisation error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from crepe_diffusion.processes.base import Coefficients, Evaluation, Process
from crepe_diffusion.random import Stream

__all__ = ["Oracle"]


@dataclass(frozen=True)
class Oracle(Process):
    """The proposal of `base`, with known log-densities `log_probs[j](x, t)`, one for each model of the target."""

    base: Process
    log_probs: tuple[Callable[[Tensor, Tensor], Tensor], ...]

    @property
    def is_discrete(self) -> bool:  # type: ignore[override]
        return self.base.is_discrete

    @property
    def kernels(self) -> Process:
        return self.base.kernels

    def check_times(self, times: Tensor) -> None:
        self.base.check_times(times)

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
        _, proposal = self.base.log_ratios(x_s, x_t, at_s, at_t, s, t, coefficients)
        return torch.stack([log_prob(x_s, s) - log_prob(x_t, t) for log_prob in self.log_probs]), proposal

    def noise(self, stream: Stream, like: Tensor, t: float, coefficients: Coefficients) -> Tensor:
        return self.base.noise(stream, like, t, coefficients)

    def drift(
        self, x: Tensor, t: Tensor, predictions: tuple[Tensor, ...], guidance: Tensor | None, coefficients: Coefficients
    ) -> Tensor:
        return self.base.drift(x, t, predictions, guidance, coefficients)

    def step(
        self, x: Tensor, seen: Evaluation, s: Tensor, t: Tensor, up: Tensor, stream: Stream, coefficients: Coefficients
    ) -> Tensor:
        return self.base.step(x, seen, s, t, up, stream, coefficients)

    def expectation(self, x: Tensor, t: Tensor, predictions: tuple[Tensor, ...], coefficients: Coefficients) -> Tensor:
        return self.base.expectation(x, t, predictions, coefficients)

    def pull_back(self, g: Tensor, t: Tensor, coefficients: Coefficients) -> Tensor:
        return self.base.pull_back(g, t, coefficients)

    def needs_fit(self) -> bool:
        return self.base.needs_fit()

    def fitted(self, table: Any) -> Oracle:
        return replace(self, base=self.base.fitted(table))
