"""Means of correlated draws with their errors: effective sample size and R-hat of a scalar, given as (draws, chains).

    tour     all draws that descend from one arrival at the noise end: equal (chain, replica, born)
    error^2  = G / (G - 1) sum_g (sum_{i in g} f_i - mean)^2 / n^2          over the G tours
    ESS      = variance / error^2

Draws of replica exchange repeat at short lags, and relatives return after a trip through the ladder. Estimators that
follow the autocorrelation stop between the two and miss the second part; tours do not. On few levels tours depend on
each other too: whoever stands at a level decides who may pass. Chains are independent, so their spread counts as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from crepe_diffusion.errors import InputError

__all__ = ["Estimate", "apart", "deviates", "effective_sizes", "ess", "mean_of", "rhat", "tours", "tours_of"]

# Autocorrelations of fewer draws than this per chain are guesses.
LEAST_DRAWS = 4
# The spread of fewer chains is hardly known: with four, Student's interval is wider by 60 %.
LEAST_CHAINS = 4


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error, and the degrees of freedom that the error was estimated with.

    >>> print(Estimate(1.0, 0.1)), Estimate(1.0, 0.1, dof=3).interval()
    1 +- 0.1
    (None, (0.68, 1.31))
    """

    value: float
    error: float
    dof: float = math.inf

    def __str__(self) -> str:
        return f"{self.value:.4g} +- {self.error:.2g}"

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """The interval that covers the truth with this probability, by Student's t."""
        from scipy.special import stdtrit

        if not 0 < level < 1:
            raise InputError(f"level must be a probability between 0 and 1, got {level!r}")
        t = float(stdtrit(min(self.dof, 1e9), (1 + level) / 2))
        return self.value - t * self.error, self.value + t * self.error


def deviates(difference: float, error: float, dof: float) -> float:
    """A difference in standard errors, as improbable as that many of a normal law if the error is known so badly.

    >>> round(deviates(3.0, 1.0, 1e9), 2), round(deviates(3.0, 1.0, 5), 2)
    (3.0, 2.17)
    """
    from scipy.special import log_ndtr, ndtri_exp, stdtr

    if not error > 0:
        return 0.0
    t = abs(difference) / error
    p = float(stdtr(min(max(dof, 1.0), 1e9), -t))
    # Far out Student's tail is below the smallest number only for many degrees of freedom, where it is the normal one.
    return float(-ndtri_exp(math.log(p) if p > 0 else log_ndtr(-t)))


def apart(a: Estimate, b: Estimate) -> float:
    """How far two independent estimates of one number are apart, in `deviates`; their degrees of freedom by Welch.

    >>> round(apart(Estimate(0.0, 1.0), Estimate(5.0, 0.0)), 6)
    5.0
    """
    v, w = a.error**2, b.error**2
    if not (math.isfinite(v + w) and v + w > 0):
        return 0.0
    return deviates(a.value - b.value, math.sqrt(v + w), (v + w) ** 2 / (v * v / a.dof + w * w / b.dof + 1e-300))


def tours(replica: Tensor, born: Tensor) -> Tensor:
    """A number for the tour of each draw, (draws, chains), from its replica and the iteration of its birth.

    Draws of replicas that were never at the noise end of the chain are one tour if they come from the same start: from
    one trajectory per chain (born at 0), or from one particle at the noise end of a pilot (born before, at -1 less the
    number of the particle), whatever the chain.

    >>> tours(torch.tensor([[0], [0], [1]]), torch.tensor([[3], [3], [5]]))[:, 0].tolist()
    [0, 0, 1]
    """
    replica, born = torch.as_tensor(replica), torch.as_tensor(born)
    chain = torch.arange(born.shape[1]).expand_as(born)
    key = torch.stack([torch.where(born < 0, -1, chain), torch.where(born > 0, replica, -1), born], -1).reshape(-1, 3)
    return key.unique(dim=0, return_inverse=True)[1].reshape(born.shape)


def tours_of(columns: Mapping[str, np.ndarray]) -> Tensor | None:
    """The tours of draws whose sampler keeps `replica` and `born` of them; None for other samplers, or no draws."""
    if "born" not in columns or not columns["born"].size:
        return None
    return tours(torch.as_tensor(columns["replica"]), torch.as_tensor(columns["born"]))


def ess(values: Tensor, tours: Tensor | None = None) -> float:
    """Effective sample size of the mean of a scalar, given as (draws, chains); a constant one has none.

    With `tours` (draws, chains) it is not more than their number, nor than what their spread allows.
    """
    array = _chains_first(values)
    if array.std() == 0 or array.shape[1] < LEAST_DRAWS:
        return 0.0
    by_lags = float(effective_sizes(array[None])[0])
    if tours is None:
        return by_lags
    error, dof = _tour_error(array.T, tours)
    return min(by_lags, dof + 1, float(array.var()) / error**2 if error > 0 else math.inf)


def _tour_error(values: np.ndarray, tours: Tensor) -> tuple[float, float]:
    """The standard error of a mean by tours, and its degrees of freedom: large tours count for more than small ones."""
    label = np.unique(np.asarray(tours).ravel(), return_inverse=True)[1]
    sums, sizes = np.bincount(label, (values - values.mean()).ravel()), np.bincount(label)
    n = len(sums)
    if n < 2:
        return math.inf, 0.0
    error = math.sqrt(n / (n - 1) * float((sums**2).sum())) / values.size
    return error, float(sizes.sum() ** 2 / (sizes.astype(float) ** 2).sum()) - 1


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


def mean_of(series: Tensor, tours: Tensor | None = None) -> Estimate:
    """The mean of a series (draws, chains), with the largest of its errors.

    By autocorrelation, by tours, and by the spread of independent chains where there are four or more.
    """
    if series.numel() < 2:
        return Estimate(math.nan, math.nan)
    n, deviation, mean = ess(series), float(series.std()), float(series.mean())
    error = deviation / math.sqrt(n) if n else math.nan  # too short a series has no error that could be given
    if not deviation:
        return Estimate(mean, 0.0)
    if tours is None:
        return Estimate(mean, error)
    by_tours, dof = _tour_error(series.numpy(force=True), tours)
    found = Estimate(mean, max(error, by_tours) if n else by_tours, max(dof, 1.0))
    chains = series.shape[1]
    if chains >= LEAST_CHAINS:
        spread = float(series.mean(0).std()) / math.sqrt(chains)
        found = max(found, Estimate(mean, spread, chains - 1), key=lambda e: e.error)
    return found
