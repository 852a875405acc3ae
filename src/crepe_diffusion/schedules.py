"""Ladders of noise levels, and how a reward is annealed along them.

    0 <= t_0 < t_1 < ... < t_{MK},   level m stands at t_{mK},   K sub-steps between two levels

Time is noise: `sigma` for Gaussian diffusions (in the variance-exploding coordinate), `1 - survival` for
discrete ones. Level 0 is the data end. `finish` holds the times below level 0 at which samples are
finished by plain denoising.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from numbers import Integral
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from crepe_diffusion.devices import resident
from crepe_diffusion.errors import InputError

__all__ = ["Annealing", "Constant", "Ladder", "Linear", "Power", "anneal", "interpolate", "ladder"]


@dataclass(frozen=True)
class Ladder:
    """Increasing times `(M*K + 1,)`, every `substeps`-th of which is a level.

    >>> steps = ladder.of([0.1, 0.2, 0.5, 1.0, 2.0], substeps=2)
    >>> steps.n_levels, steps.levels.tolist()
    (3, [0.1, 0.5, 2.0])
    """

    times: Tensor
    substeps: int = 1
    finish: tuple[float, ...] = ()
    # Annealing follows the first ladder's index, kept as a function of time when levels are moved.
    origin: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        given = self.times
        times = given.cpu().to(torch.float64) if isinstance(given, Tensor) else torch.tensor(given, dtype=torch.float64)
        object.__setattr__(self, "times", times)
        _integer("substeps", self.substeps, "a positive integer", 1)
        if times.ndim != 1 or len(times) < 2:
            raise InputError(f"a ladder needs at least two times in one dimension, got shape {tuple(times.shape)}")
        if (len(times) - 1) % self.substeps:
            raise InputError(f"{len(times)} times do not make levels of {self.substeps} sub-steps each")
        if not torch.isfinite(times).all() or times[0] < 0:
            raise InputError(f"times must be finite and not negative, got {times.tolist()}")
        gaps = times.diff()
        if (gaps <= 0).any():
            i = int((gaps <= 0).nonzero()[0])
            raise InputError(f"times must increase: entry {i + 1} is {times[i + 1].item():g} after {times[i].item():g}")
        below = [float(times[0]), *self.finish]
        if not all(a > b >= 0 for a, b in pairwise(below)):
            raise InputError(f"finish times must fall from below {below[0]:g} and not be negative, got {self.finish}")
        if self.origin is None:
            object.__setattr__(self, "origin", times)

    @property
    def n_levels(self) -> int:
        return (len(self.times) - 1) // self.substeps + 1

    @property
    def levels(self) -> Tensor:
        return self.times[:: self.substeps].contiguous()

    def progress(self, t: Tensor) -> Tensor:
        """The share of the way from the noise end (0) to the data end (1), along the first ladder's index."""
        assert self.origin is not None
        return 1 - interpolate(t, self.origin) / (len(self.origin) - 1)

    def moved(self, positions: Tensor, substeps: int | None = None) -> Ladder:
        """The ladder whose levels stand at these fractional positions of this one's time index."""
        k = substeps or self.substeps
        fractions = torch.arange(k, dtype=positions.dtype) / k
        inner = positions[:-1, None] + positions.diff()[:, None] * fractions
        index = torch.cat([inner.flatten(), positions[-1:]])
        low = index.floor().clamp(0, len(self.times) - 2).long()
        weight = (index - low).to(self.times)
        times = torch.lerp(self.times[low], self.times[low + 1], weight)
        times[0], times[-1] = self.times[0], self.times[-1]
        return replace(self, times=times, substeps=k)

    def state_dict(self) -> dict[str, Tensor]:
        assert self.origin is not None
        finish = torch.tensor(self.finish, dtype=torch.float64)
        return {"times": self.times, "substeps": torch.tensor(self.substeps), "finish": finish, "origin": self.origin}

    @classmethod
    def from_state_dict(cls, state: dict[str, Tensor]) -> Ladder:
        return cls(state["times"], int(state["substeps"]), tuple(state["finish"].tolist()), state["origin"])


def interpolate(t: Tensor, grid: Tensor) -> Tensor:
    """Fractional index of t in an increasing grid, linear between entries, clamped at the ends."""
    grid = resident(grid, t.device, t.dtype)
    high = torch.searchsorted(grid, t.contiguous()).clamp(1, len(grid) - 1)
    low_t, high_t = grid[high - 1], grid[high]
    return (high - 1) + ((t - low_t) / (high_t - low_t)).clamp(0, 1)


class ladder:
    """Constructors of ladders. All take `n_levels` (M + 1) and `substeps` (K); level 0 is the data end."""

    @staticmethod
    def karras(
        n_levels: int,
        sigma_min: float = 1e-3,
        sigma_max: float = 10.0,
        rho: float = 7.0,
        substeps: int = 1,
        n_finish: int = 0,
    ) -> Ladder:
        """Equal steps in `sigma^(1/rho)` (Karras et al. 2022), the lowest `n_finish` of them below level 0.

        >>> ladder.karras(51, 1e-3, 10, substeps=4).times.shape      # the paper's molecules
        torch.Size([201])
        """
        _positive(sigma_min=sigma_min, sigma_max=sigma_max, rho=rho)
        ends = torch.tensor([sigma_min, sigma_max], dtype=torch.float64) ** (1 / rho)
        return _cut(torch.lerp(ends[0], ends[1], _unit(n_levels, substeps, n_finish)) ** rho, substeps, n_finish)

    @staticmethod
    def geometric(
        n_levels: int, sigma_min: float = 1e-3, sigma_max: float = 10.0, substeps: int = 1, n_finish: int = 0
    ) -> Ladder:
        """Equal ratios of sigma."""
        _positive(sigma_min=sigma_min, sigma_max=sigma_max)
        ends = torch.tensor([sigma_min, sigma_max], dtype=torch.float64).log()
        return _cut(torch.lerp(ends[0], ends[1], _unit(n_levels, substeps, n_finish)).exp(), substeps, n_finish)

    @staticmethod
    def linear(n_levels: int, t_min: float = 0.0, t_max: float = 1.0, substeps: int = 1, n_finish: int = 0) -> Ladder:
        """Equal steps of time; for discrete diffusions, where `t = 1 - survival`, 0 is data and 1 is noise."""
        if not 0 <= t_min < t_max:
            raise InputError(f"need 0 <= t_min < t_max, got t_min={t_min!r}, t_max={t_max!r}")
        return _cut(t_min + (t_max - t_min) * _unit(n_levels, substeps, n_finish), substeps, n_finish)

    @staticmethod
    def of(times: Sequence[float] | Tensor, substeps: int = 1, finish: Sequence[float] = ()) -> Ladder:
        """Any increasing times."""
        return Ladder(torch.as_tensor(times, dtype=torch.float64), substeps, tuple(finish))


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise InputError(f"{name} must be positive, got {value!r}")


def _integer(name: str, value: object, wanted: str, least: int) -> None:
    if not isinstance(value, Integral) or int(value) < least:
        raise InputError(f"{name} must be {wanted}, got {value!r}")


def _unit(n_levels: int, substeps: int, n_finish: int) -> Tensor:
    _integer("n_levels", n_levels, "an integer of at least 2", 2)
    _integer("substeps", substeps, "a positive integer", 1)
    _integer("n_finish", n_finish, "a non-negative integer", 0)
    return torch.linspace(0, 1, (n_levels - 1) * substeps + 1 + n_finish, dtype=torch.float64)


def _cut(times: Tensor, substeps: int, n_finish: int) -> Ladder:
    return Ladder(times[n_finish:], substeps, tuple(times[:n_finish].flip(0).tolist()))


class Annealing(Protocol):
    """How the weight of a reward grows from the noise end to the data end: any function of a batch of numbers.

    It gets the progress u, 0 at the noise end and 1 at the data end, and returns `gamma(u)`, one number for each. An
    annealing with an attribute `of_time = True` gets the time t instead (`sigma`, or `1 - survival`): make one from a
    function by `anneal.of_time`, or set the attribute in a class of your own. `gamma` should be 1 at the data end, and
    small at the noise end, which is drawn from a law without rewards.
    """

    def __call__(self, u: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class _OfTime:
    function: Callable[[Tensor], Tensor]
    of_time: ClassVar[bool] = True

    def __call__(self, t: Tensor, /) -> Tensor:
        return self.function(t)


@dataclass(frozen=True)
class Power(Annealing):
    """`gamma(u) = (f + (1 - f) u)^exponent` with `f = floor^(1/exponent)`: the paper's 5 (images) and 10 (mazes).

    >>> Power(10)(torch.tensor([0.0, 1.0], dtype=torch.float64)).tolist()
    [1e-10, 1.0]
    """

    exponent: float = 5.0
    floor: float = 1e-10

    def __post_init__(self) -> None:
        if not self.exponent > 0 or not 0 <= self.floor < 1:
            raise InputError(f"need exponent > 0 and 0 <= floor < 1, got {self.exponent!r} and {self.floor!r}")

    def __call__(self, u: Tensor, /) -> Tensor:
        start = self.floor ** (1 / self.exponent)
        return (start + (1 - start) * u) ** self.exponent


@dataclass(frozen=True)
class Linear(Annealing):
    """`gamma(u) = u`."""

    def __call__(self, u: Tensor, /) -> Tensor:
        return u


@dataclass(frozen=True)
class Constant(Annealing):
    """`gamma = 1` at every level; the noise end is then only approximately Gaussian."""

    def __call__(self, u: Tensor, /) -> Tensor:
        return torch.ones_like(u)


class anneal:
    """Reward annealing `gamma(u)`, where u runs from 0 at the noise end to 1 at the data end; see `Annealing`."""

    power = Power
    linear = Linear
    constant = Constant

    @staticmethod
    def of_time(function: Callable[[Tensor], Tensor]) -> Annealing:
        """Mark a function as one of the time t instead of the progress u. Also a decorator.

        >>> @anneal.of_time
        ... def fading(t):
        ...     return 1 / (1 + t**2)
        >>> fading(torch.tensor([0.0, 1.0])).tolist()
        [1.0, 0.5]
        """
        if not callable(function):
            raise InputError(f"anneal.of_time marks a function of the time, got {function!r}")
        return _OfTime(function)
