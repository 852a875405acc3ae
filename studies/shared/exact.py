"""A law that is known by weighted draws: `E f = sum_i w_i f(x_i)`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Truth"]


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
