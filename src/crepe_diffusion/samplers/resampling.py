"""Rules of resampling: which particles go on, and with which weights.

    E[sum_i w'_i f(x_{a_i})] = sum_i w_i f(x_i)        for every f

A rule is any object with the contract of `Resampling`. `log_weights` (batches, particles) are normalised in each batch,
and each batch is resampled on its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from crepe_diffusion.errors import InputError
from crepe_diffusion.random import Stream

__all__ = ["Multinomial", "Partial", "Resampling", "Residual", "Stratified", "Systematic", "ancestors"]


class Resampling(Protocol):
    """Ancestors and new normalised log-weights, both (batches, particles), that keep every weighted mean unbiased."""

    def __call__(self, log_weights: Tensor, stream: Stream) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Systematic:
    """One uniform per batch: particle i gets `n w_i` copies, rounded up or down."""

    def __call__(self, log_weights: Tensor, stream: Stream) -> tuple[Tensor, Tensor]:
        b, n = log_weights.shape
        u = (torch.arange(n) + stream.uniform((b, 1))) / n
        return ancestors(log_weights.exp(), u), _equal(log_weights)


@dataclass(frozen=True)
class Stratified:
    """One uniform in each of n equal strata."""

    def __call__(self, log_weights: Tensor, stream: Stream) -> tuple[Tensor, Tensor]:
        b, n = log_weights.shape
        u = (torch.arange(n) + stream.uniform((b, n))) / n
        return ancestors(log_weights.exp(), u), _equal(log_weights)


@dataclass(frozen=True)
class Multinomial:
    """Independent draws by weight; the noisiest rule."""

    def __call__(self, log_weights: Tensor, stream: Stream) -> tuple[Tensor, Tensor]:
        b, n = log_weights.shape
        return ancestors(log_weights.exp(), stream.uniform((b, n))), _equal(log_weights)


@dataclass(frozen=True)
class Residual:
    """The integer part of `n w_i` copies for certain, independent draws for the rest."""

    def __call__(self, log_weights: Tensor, stream: Stream) -> tuple[Tensor, Tensor]:
        b, n = log_weights.shape
        w = log_weights.exp()
        copies = (n * w + 1e-12).floor()
        rest, certain = (n * w - copies).clamp(min=0), copies.sum(1, keepdim=True)
        drawn = ancestors(rest, stream.uniform((b, n)))
        kept = ancestors(copies, (torch.arange(n) + 0.5) / certain)
        return torch.where(torch.arange(n) < certain, kept, drawn), _equal(log_weights)


@dataclass(frozen=True)
class Partial:
    """Only the particles with the largest and the smallest weights, `share` of them in all, are resampled.

    They get their common average weight and the others keep theirs, so the weighted law is unchanged in the mean.
    """

    share: float = 0.8

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise InputError(f"share must be between 0 and 1, got {self.share!r}")

    def __call__(self, log_weights: Tensor, stream: Stream) -> tuple[Tensor, Tensor]:
        b, n = log_weights.shape
        size = max(2, round(self.share * n)) if n > 1 else 1
        order = log_weights.argsort(1)
        group = torch.cat([order[:, : size // 2], order[:, n - (size - size // 2) :]], dim=1)
        inside = log_weights.gather(1, group)
        total = inside.logsumexp(1, keepdim=True)
        within, _ = Systematic()(inside - total, stream)
        index = torch.arange(n).expand(b, n).scatter(1, group, group.gather(1, within))
        return index, log_weights.scatter(1, group, (total - math.log(size)).expand(-1, size))


def ancestors(weights: Tensor, u: Tensor) -> Tensor:
    """The particles in whose share of the total weight the uniforms fall, (batches, particles)."""
    cumulative = weights.cumsum(1)
    return torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True).clamp(max=weights.shape[1] - 1)


def _equal(log_weights: Tensor) -> Tensor:
    return torch.full_like(log_weights, -math.log(log_weights.shape[1]))
