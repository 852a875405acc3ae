"""Rewards that join short trajectories into one plan: start here, end there, connect, pass by a point.

A plan is `(rows, segments, steps, coordinates)`: segments that a `Segments` model draws independently and that these
rewards couple. Each reward is a function of a batch of plans, to be given to `tilt`.

All of them measure `l2 |z|^2 + l1 sum_i |z_i|` of a difference z: the square acts at large distances, the absolute
value
is sharp near zero. The absolute value is smooth within `smooth` of zero, so that its gradient exists everywhere.

`Restitch` draws whole plans at once. For this it must split a reward into parts that depend on few segments. The three
protocols `LinkReward`, `SegmentReward` and `AnySegmentReward` describe the parts; a reward of your own that has one of
these methods is used in the same way as ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from crepe_diffusion.errors import InputError

__all__ = ["AnySegmentReward", "Junctions", "LinkReward", "Reach", "SegmentReward", "WayPoint"]


@runtime_checkable
class LinkReward(Protocol):
    """A reward that is a sum over neighbouring segments: `r(x) = sum_j link(x_j, x_{j+1})`.

    `link(left, right)` takes (..., n, *segment) and (..., m, *segment) and returns the term of every left segment
    followed by every right one, (..., n, m). It must be the same function for all j.

    >>> class SameHeight:                                   # each segment starts at the height where the last one ended
    ...     def __call__(self, x):
    ...         return -(x[:, :-1, -1, 1] - x[:, 1:, 0, 1]).square().sum(-1)
    ...     def link(self, left, right):
    ...         return -(left[..., :, None, -1, 1] - right[..., None, :, 0, 1]).square()
    >>> isinstance(SameHeight(), LinkReward), isinstance(Junctions(), LinkReward)
    (True, True)
    """

    def __call__(self, x: Tensor, /) -> Tensor: ...

    def link(self, left: Tensor, right: Tensor, /) -> Tensor: ...


@runtime_checkable
class SegmentReward(Protocol):
    """A reward of one segment: `r(x) = single(x[:, segment])`.

    `single` takes (..., *segment) and returns (...).
    """

    segment: int

    def __call__(self, x: Tensor, /) -> Tensor: ...

    def single(self, segment: Tensor, /) -> Tensor: ...


@runtime_checkable
class AnySegmentReward(Protocol):
    """A reward that any one segment of the plan can earn.

    `some` takes (..., *segment) and returns what a plan earns if this segment is the one, (...). Restitch uses it to
    propose plans, and corrects with the reward itself, so an estimate is enough.
    """

    def __call__(self, x: Tensor, /) -> Tensor: ...

    def some(self, segment: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class _Gap:
    """What these rewards share: their weight, and how they measure a difference."""

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
    """Some point of the plan is near `point`: the mean gap of all points, weighted by a softmax of minus the gap.

    `focus` is the inverse temperature of the softmax; with a large one only the nearest point counts.

    >>> plan = torch.linspace(0, 1, 64)[None, None, :, None].expand(1, 1, 64, 2)
    >>> bool(WayPoint((0.5, 0.5))(plan) > WayPoint((0.5, 0.0))(plan))
    True
    """

    point: tuple[float, ...]
    focus: float = 10.0

    def __call__(self, x: Tensor) -> Tensor:
        return self._nearest(self.gap(_plan(x) - x.new_tensor(self.point)).flatten(1))

    def some(self, segment: Tensor) -> Tensor:
        """The reward of a plan that consists of this segment, (..., steps, coordinates)."""
        return self._nearest(self.gap(segment - segment.new_tensor(self.point)))

    def _nearest(self, gap: Tensor) -> Tensor:
        return -self.weight * (gap * torch.softmax(-self.focus * gap, -1)).sum(-1)
