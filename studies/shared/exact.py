"""A law that is known by weighted draws: `E f = sum_i w_i f(x_i)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Known", "Truth"]


@dataclass(frozen=True)
class Known:
    """Means of all statistics, their variances for one draw, log Z, and the share of draws that counts."""

    means: dict[str, Tensor]
    variances: dict[str, float]
    log_z: float
    share: float


@dataclass(frozen=True)
class Truth:
    """Exact draws (n, *event) with normalised weights (n,), and `log Z`."""

    x: Tensor
    weights: Tensor
    log_z: float

    @property
    def share(self) -> float:
        """The effective share of the draws."""
        return 1 / (len(self.x) * float(self.weights.square().sum()))

    def known(self, statistics: Callable[[Tensor], dict[str, Tensor]]) -> Known:
        """Moments of statistics (rows, numbers) of the draws, in pieces."""
        sums: dict[str, list[Tensor]] = {}
        for x, w in zip(self.x.split(4096), self.weights.split(4096), strict=True):
            for name, values in statistics(x).items():
                first, second = sums.setdefault(name, [torch.zeros(()), torch.zeros(())])
                sums[name] = [first + w @ values, second + w @ values.square()]
        means = {name: first for name, (first, _) in sums.items()}
        variances = {name: float((second - first.square()).mean()) for name, (first, second) in sums.items()}
        return Known(means, variances, self.log_z, self.share)
