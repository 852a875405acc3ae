"""Rewards that stitch short trajectories into one: begin here, end there, hang together, pass by.

A plan is `(rows, segments, steps, coordinates)`: pieces that a `Segments` model draws one by one and that these
rewards couple. Each reward is a function of a batch, to be given to `tilt`, and works on its own.

All measure `l2 |z|^2 + l1 sum_i |z_i|` of a difference z: the square reaches far, the absolute value is sharp near
zero. The absolute value is rounded off within `smooth`, so that its gradient exists everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from crepe_diffusion.errors import InputError

__all__ = ["Junctions", "Reach", "WayPoint"]


@dataclass(frozen=True, kw_only=True)
class _Gap:
    """What all these rewards share: their weight and how they measure a difference."""

    weight: float = 100.0
    l1: float = 10.0
    l2: float = 1.0
    smooth: float = 3e-3

    def __post_init__(self) -> None:
        if min(self.weight, self.l1, self.l2) < 0 or self.l1 + self.l2 == 0:
            raise InputError(f"weight, l1 and l2 must not be negative, nor both of l1 and l2 zero; got {self}")
        if not self.smooth > 0:
            raise InputError(f"smooth must be a positive length, got {self.smooth!r}")

    def gap(self, z: Tensor) -> Tensor:
        """The size of each difference, over the last axis."""
        absolute = (z * z + self.smooth**2).sqrt() - self.smooth
        return (self.l2 * z * z + self.l1 * absolute).sum(-1)


def _plan(x: Tensor) -> Tensor:
    if x.ndim != 4:
        raise InputError(f"a batch of plans is (rows, segments, steps, coordinates), got shape {tuple(x.shape)}")
    return x


@dataclass(frozen=True)
class Reach(_Gap):
    """Point `step` of segment `segment` lies at `point`: (0, 0) is the start of a plan, (-1, -1) its goal.

    >>> plan = torch.zeros(1, 3, 64, 2)
    >>> Reach((0.0, 0.0))(plan).item(), round(Reach((0.1, 0.0), l1=0.0)(plan).item(), 3)
    (-0.0, -1.0)
    """

    point: tuple[float, ...]
    segment: int = 0
    step: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        return self.single(_plan(x)[:, self.segment])

    def single(self, segment: Tensor) -> Tensor:
        """The reward of that segment alone, (..., steps, coordinates)."""
        return -self.weight * self.gap(segment[..., self.step, :] - segment.new_tensor(self.point))


@dataclass(frozen=True)
class Junctions(_Gap):
    """The end of each segment is the beginning of the next.

    >>> Junctions()(torch.zeros(1, 3, 64, 2)).item()
    -0.0
    """

    def __call__(self, x: Tensor) -> Tensor:
        x = _plan(x)
        return -self.weight * self.gap(x[:, :-1, -1] - x[:, 1:, 0]).sum(-1)

    def link(self, left: Tensor, right: Tensor) -> Tensor:
        """The reward of every left segment followed by every right one, (..., n, m)."""
        return -self.weight * self.gap(left[..., :, None, -1, :] - right[..., None, :, 0, :])


@dataclass(frozen=True)
class WayPoint(_Gap):
    """Some point of the plan passes by `point`: the gaps of all points, weighted by a softmax of minus the gap.

    `focus` is the inverse temperature of the softmax; a large one means the nearest point alone.

    >>> plan = torch.linspace(0, 1, 64)[None, None, :, None].expand(1, 1, 64, 2)
    >>> bool(WayPoint((0.5, 0.5))(plan) > WayPoint((0.5, 0.0))(plan))
    True
    """

    point: tuple[float, ...]
    focus: float = 10.0

    def __call__(self, x: Tensor) -> Tensor:
        return self._nearest(self.gap(_plan(x) - x.new_tensor(self.point)).flatten(1))

    def some(self, segment: Tensor) -> Tensor:
        """The reward of a plan of which this segment passes by, (..., steps, coordinates)."""
        return self._nearest(self.gap(segment - segment.new_tensor(self.point)))

    def _nearest(self, gap: Tensor) -> Tensor:
        return -self.weight * (gap * torch.softmax(-self.focus * gap, -1)).sum(-1)
