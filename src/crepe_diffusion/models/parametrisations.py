"""What a network was trained to predict, as four coefficients of one formula, and the schedule of its training.

    D(y, sigma) = c_skip y + c_out F(c_in y, c_noise),        y = x_0 + sigma eps

| trained on | c_in | c_skip | c_out |
|---|---|---|---|
| variance preserving, noise | 1 / sqrt(1 + sigma^2) | 1 | -sigma |
| variance preserving, v | 1 / sqrt(1 + sigma^2) | 1 / (1 + sigma^2) | -sigma / sqrt(1 + sigma^2) |
| variance preserving, sample | 1 / sqrt(1 + sigma^2) | 0 | 1 |
| rectified flow | 1 / (1 + sigma) | 1 / (1 + sigma) | -sigma / (1 + sigma) |
| any path x = alpha x_0 + s eps, w = s' alpha - s alpha' | alpha | s' alpha / w | -s / w |
| Karras et al. (2022), q^2 = sigma^2 + sigma_data^2 | 1 / q | sigma_data^2 / q^2 | sigma sigma_data / q |

A schedule has a coordinate of its own, such as the training step: equal steps of it make a ladder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crepe_diffusion.devices import resident
from crepe_diffusion.errors import InputError, check_choice
from crepe_diffusion.schedules import interpolate

__all__ = ["AffinePath", "Direct", "Karras", "Parametrisation", "Preconditioning", "RectifiedFlow", "TrainingSteps"]

LARGEST = 200.0
"""The top of a ladder where a schedule ends at infinite noise: data of unit scale are 2.5e-5 of the variance there."""


class Preconditioning(NamedTuple):
    """The coefficients of `D = c_skip y + c_out F(c_in y, c_noise)`, one of each per row."""

    c_in: Tensor
    c_skip: Tensor
    c_out: Tensor
    c_noise: Tensor


class Parametrisation(ABC):
    """How a network is read as a denoiser, and the noise levels it was trained on.

    >>> flow = RectifiedFlow()
    >>> [round(float(c), 3) for c in flow.coefficients(torch.tensor([3.0]))]
    [0.25, 0.25, -0.75, 750.0]
    """

    @property
    @abstractmethod
    def ends(self) -> tuple[float, float]:
        """The least and the largest noise of the schedule that a ladder uses."""

    @abstractmethod
    def coefficients(self, sigma: Tensor) -> Preconditioning:
        """The coefficients at these noises."""

    @abstractmethod
    def position(self, sigma: Tensor) -> Tensor:
        """The schedule's own coordinate, which increases with the noise."""

    @abstractmethod
    def noise(self, position: Tensor) -> Tensor:
        """The inverse of `position`."""

    def spaced(self, low: float, high: float, n: int) -> Tensor:
        """`n` noises from low to high, equally far apart in the schedule's own coordinate."""
        ends = torch.tensor([low, high], dtype=torch.float64)
        first, last = self.position(ends).tolist()
        times = self.noise(torch.linspace(first, last, n, dtype=torch.float64))
        times[0], times[-1] = ends[0], ends[1]
        return times


@dataclass(frozen=True)
class TrainingSteps(Parametrisation):
    """Variance preserving, with a table of the noise at each training step; the network gets the step.

    Between two steps it is interpolated in log sigma; with `nearest`, the network gets the nearest step as an integer.
    """

    sigmas: tuple[float, ...]
    prediction: str = "epsilon"
    nearest: bool = False
    continuous: bool = False
    """The network gets `log(sigma) / 4` in place of a step."""

    def __post_init__(self) -> None:
        check_choice("prediction_type", self.prediction, ("epsilon", "v_prediction", "sample"))
        table = torch.tensor(self.sigmas, dtype=torch.float64)
        if len(table) < 2 or not (table.isfinite().all() and table[0] > 0 and (table.diff() > 0).all()):
            raise InputError(
                "a schedule needs at least two noises that are finite, positive and increase with the step"
            )

    @cached_property
    def _log_table(self) -> Tensor:
        return torch.tensor(self.sigmas, dtype=torch.float64).log()

    @property
    def ends(self) -> tuple[float, float]:
        usable = [s for s in self.sigmas if s <= max(LARGEST, self.sigmas[1])]
        return usable[0], usable[-1]

    def position(self, sigma: Tensor) -> Tensor:
        return interpolate(sigma.log(), resident(self._log_table, sigma.device, sigma.dtype))

    def noise(self, position: Tensor) -> Tensor:
        low = position.floor().clamp(0, len(self.sigmas) - 2).long()
        return torch.lerp(self._log_table[low], self._log_table[low + 1], position - low).exp()

    def spaced(self, low: float, high: float, n: int) -> Tensor:
        times = super().spaced(low, high, n)
        if not self.nearest:
            return times
        steps = self.position(times).round().long()
        if (steps.diff() <= 0).any():
            raise InputError(f"{n} times do not fit on training steps {int(steps[0])} to {int(steps[-1])}: take fewer")
        return torch.tensor(self.sigmas, dtype=torch.float64)[steps]

    def coefficients(self, sigma: Tensor) -> Preconditioning:
        c_in = (1 + sigma**2).rsqrt()
        ones = torch.ones_like(sigma)
        if self.prediction == "epsilon":
            c_skip, c_out = ones, -sigma
        elif self.prediction == "v_prediction":
            c_skip, c_out = c_in**2, -sigma * c_in
        else:
            c_skip, c_out = torch.zeros_like(sigma), ones
        if self.continuous:
            return Preconditioning(c_in, c_skip, c_out, sigma.log() / 4)
        step = self.position(sigma)
        return Preconditioning(c_in, c_skip, c_out, step.round().long() if self.nearest else step)


@dataclass(frozen=True)
class Karras(Parametrisation):
    """The preconditioning of Karras et al. (2022) and their schedule: equal steps of `sigma^(1/rho)`."""

    sigma_data: float = 0.5
    sign: float = 1.0
    sigma_min: float = 0.002
    sigma_max: float = 80.0
    rho: float = 7.0

    @property
    def ends(self) -> tuple[float, float]:
        return self.sigma_min, self.sigma_max

    def position(self, sigma: Tensor) -> Tensor:
        return sigma ** (1 / self.rho)

    def noise(self, position: Tensor) -> Tensor:
        return position**self.rho

    def coefficients(self, sigma: Tensor) -> Preconditioning:
        q2, data = sigma**2 + self.sigma_data**2, self.sigma_data
        return Preconditioning(q2.rsqrt(), data**2 / q2, self.sign * sigma * data * q2.rsqrt(), sigma.log() / 4)


@dataclass(frozen=True)
class Direct(Karras):
    """A network that is a denoiser already: `D(y, sigma) = F(y, sigma)`."""

    def coefficients(self, sigma: Tensor) -> Preconditioning:
        ones = torch.ones_like(sigma)
        return Preconditioning(ones, torch.zeros_like(sigma), ones, sigma)


@dataclass(frozen=True)
class RectifiedFlow(Parametrisation):
    """`x = (1 - tau) x_0 + tau eps`, velocity `eps - x_0`, `sigma = tau / (1 - tau)`; the network gets `scale * tau`.

    The schedule is `tau = shift u / (1 + (shift - 1) u)` with equal steps of u in (0, 1). With `backwards`, time runs
    from noise to data: the network gets `scale * (1 - tau)` and its velocity is `x_0 - eps`.
    """

    shift: float = 1.0
    scale: float = 1000.0
    n_steps: int = 1000
    backwards: bool = False

    def __post_init__(self) -> None:
        if not self.shift > 0:
            raise InputError(f"the shift of a flow schedule must be positive, got {self.shift!r}")

    @property
    def ends(self) -> tuple[float, float]:
        return float(self.noise(torch.tensor(1 / self.n_steps, dtype=torch.float64))), LARGEST

    def position(self, sigma: Tensor) -> Tensor:
        tau = sigma / (1 + sigma)
        return tau / (self.shift - (self.shift - 1) * tau)

    def noise(self, position: Tensor) -> Tensor:
        return self.shift * position / (1 - position)

    def coefficients(self, sigma: Tensor) -> Preconditioning:
        rest = 1 / (1 + sigma)
        tau = sigma * rest
        if self.backwards:
            return Preconditioning(rest, rest, tau, self.scale * rest)
        return Preconditioning(rest, rest, -tau, self.scale * tau)


@dataclass(frozen=True)
class AffinePath(Parametrisation):
    """`x = alpha(t) x_0 + s(t) eps` and a network that predicts `dx/dt`, with the noise end at t = `noise_at`.

    `path(t)` returns `(alpha, s, alpha', s')`, or an object that has them as `alpha_t`, `sigma_t`, `d_alpha_t`,
    `d_sigma_t`. The time of a noise is found by bisection, so `s / alpha` has to be monotone. The schedule has equal
    steps of t.
    """

    path: Callable[[Tensor], Any]
    noise_at: float
    data_at: float
    sigma_max: float = LARGEST
    n_steps: int = 1000

    def at(self, t: Tensor) -> tuple[Tensor, ...]:
        """`(alpha, s, alpha', s')` at these times."""
        out = self.path(t)
        if not isinstance(out, tuple) and hasattr(out, "alpha_t"):
            out = (out.alpha_t, out.sigma_t, out.d_alpha_t, out.d_sigma_t)
        if not isinstance(out, tuple) or len(out) != 4:
            raise InputError(f"a path returns (alpha, s, alpha', s') at its times, got {out!r}")
        return tuple(torch.as_tensor(z, dtype=t.dtype, device=t.device).expand(t.shape) for z in out)

    def _sigma(self, u: Tensor) -> Tensor:
        """The noise at the share u of the way from data to noise."""
        alpha, s, _, _ = self.at(self.data_at + (self.noise_at - self.data_at) * u)
        return s / alpha

    @cached_property
    def ends(self) -> tuple[float, float]:
        u = torch.tensor([1 / self.n_steps, 1 - 1 / self.n_steps], dtype=torch.float64)
        low, high = self._sigma(u).tolist()
        if not 0 < low < high:
            raise InputError(
                f"s / alpha of this path is {low:g} near t = {self.data_at:g} (data) and {high:g} near"
                f" t = {self.noise_at:g} (noise); it should grow: is the noise at the other end (noise_at)?"
            )
        return low, min(high, self.sigma_max)

    def position(self, sigma: Tensor) -> Tensor:
        low, high = torch.zeros_like(sigma), torch.ones_like(sigma)
        for _ in range(60):
            middle = (low + high) / 2
            below = self._sigma(middle) < sigma
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (low + high) / 2

    def noise(self, position: Tensor) -> Tensor:
        return self._sigma(position)

    def coefficients(self, sigma: Tensor) -> Preconditioning:
        t = self.data_at + (self.noise_at - self.data_at) * self.position(sigma)
        alpha, s, d_alpha, d_s = self.at(t)
        w = d_s * alpha - s * d_alpha
        return Preconditioning(alpha, d_s * alpha / w, -s / w, t)
