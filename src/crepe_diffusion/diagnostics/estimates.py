"""Means of correlated draws with their errors: effective sample size and R-hat of a scalar (draws, chains)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from crepe_diffusion.errors import InputError

__all__ = ["Estimate", "effective_sizes", "ess", "mean_of", "rhat"]


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.4g} +- {self.error:.2g}"


def ess(values: Tensor) -> float:
    """Effective sample size of the mean of a scalar, given as (draws, chains); a constant one has none."""
    array = _chains_first(values)
    if array.std() == 0 or array.shape[1] < 4:
        return 0.0
    return float(effective_sizes(array[None])[0])


def effective_sizes(x: np.ndarray) -> np.ndarray:
    """ESS of several scalars, (scalars, chains, draws), by ArviZ."""
    from arviz_stats.base.array import array_stats

    return np.asarray(array_stats.ess(x, chain_axis=1, draw_axis=2, method="mean"))


def rhat(values: Tensor) -> float:
    """Rank-normalised split R-hat of a scalar, given as (draws, chains), by ArviZ.

    One chain is compared with itself, its first half against its second.
    """
    array = _chains_first(values)
    if array.std() == 0 or array.shape[1] < 8:
        return math.nan
    if array.shape[0] == 1:
        half = array.shape[1] // 2
        array = np.stack([array[0, :half], array[0, half : 2 * half]])
    from arviz_stats.base.array import array_stats

    return float(array_stats.rhat(array, chain_axis=0, draw_axis=1))


def _chains_first(values: Tensor) -> np.ndarray:
    v = torch.as_tensor(values, dtype=torch.float64)
    if v.ndim != 2:
        raise InputError(f"a scalar of a chain is given as (draws, chains), got shape {tuple(v.shape)}")
    if not torch.isfinite(v).all():
        raise InputError(f"{int((~torch.isfinite(v)).sum())} of {v.numel()} values are not finite")
    return v.T.contiguous().numpy()


def mean_of(series: Tensor) -> Estimate:
    """The mean of a series (draws, chains), with the error that its effective sample size allows."""
    if series.numel() < 2:
        return Estimate(math.nan, math.nan)
    n, deviation = ess(series), float(series.std())
    error = deviation / math.sqrt(n) if n else math.nan  # too short a series has no error that could be stated
    return Estimate(float(series.mean()), error if deviation else 0.0)
