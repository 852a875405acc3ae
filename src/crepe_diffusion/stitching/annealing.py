"""Annealing by the variance of predictions: at each time a reward is as sharp as predictions are.

gamma(t) = w^2 / (w^2 + V_t - V_first)      for a squared error of width w on what is predicted with variance V_t
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from crepe_diffusion.errors import InputError
from crepe_diffusion.schedules import interpolate

__all__ = ["Matched"]


@dataclass(frozen=True)
class Matched:
    """`gamma(t) = w^2 / (w^2 + V_t - V_first)`, a function of time rather than of the ladder's index.

    If x_0 given x_t were Gaussian of variance V_t around its prediction, a squared error of width w would have the
    expected weight `N(z; 0, w^2 + V_t)`: the annealed reward is then close to the final reward on average.

    >>> gamma = Matched(0.1, torch.tensor([0.01, 1.0]), torch.tensor([0.0, 0.99]))
    >>> [round(g, 6) for g in gamma(torch.tensor([0.01, 1.0])).tolist()]
    [1.0, 0.01]
    """

    width: float
    times: Tensor
    variances: Tensor
    of_time: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.width > 0:
            raise InputError(f"the width of a squared error must be positive, got {self.width!r}")
        t, v = self.times, self.variances
        rising = t.ndim == 1 and len(t) > 1 and t[0] > 0 and bool((t.diff() > 0).all())
        if not rising or t.shape != v.shape or not (v >= 0).all():
            raise InputError("matched annealing needs two or more increasing times > 0 with one variance >= 0 each")

    def __call__(self, t: Tensor) -> Tensor:
        i = interpolate(t.log(), self.times.log())
        low = i.floor().clamp(max=len(self.times) - 2).long()
        v = self.variances.to(t)
        more = torch.lerp(v[low], v[low + 1], i - low) - v[0]
        return self.width**2 / (self.width**2 + more.clamp(min=0))
