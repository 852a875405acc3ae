"""The pass of particles from which a chain started: another estimate of the same means and the same log Z.

error^2 = sum_e (sum_{i in e} w_i (f_i - mean))^2 / (1 - sum_e w_e^2)        over the Eves e

A chain cannot see what it has never met; a pass that was made before, and independently of its exchange, may.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from crepe_diffusion.batches import called
from crepe_diffusion.diagnostics.estimates import Estimate
from crepe_diffusion.errors import InputError

__all__ = ["METHODS", "StartingPass", "by_eve", "clustered", "with_steps"]

METHODS = ("down", "up", "bar")


@dataclass(frozen=True)
class StartingPass:
    """What a chain keeps of its pilot: the numbers, and weighted particles at the data end.

    `eve` (n,) is the particle at the noise end from which each one descends. Relatives are one cluster, whatever their
    correlation. `log_z` has an estimate for each method, `discretisation` is the part of each that is due to the size
    of the steps, to first order; `steps` (n,) is what double steps would add to the weight of each particle.

    >>> weights = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    >>> start = StartingPass(torch.arange(3.0), weights.log(), torch.tensor([0, 1, 1]), torch.zeros(3), {}, {}, 8, 51)
    >>> start.mean(lambda x: x).value
    0.75
    """

    x: Tensor
    log_weights: Tensor
    eve: Tensor
    steps: Tensor
    log_z: dict[str, Estimate]
    discretisation: dict[str, Estimate]
    n_steps: int
    rows: int

    def mean(self, function: Callable[[Tensor], Tensor]) -> Estimate:
        """The target's mean of a scalar, (n, *event) to (n,), with its standard error."""
        w, values = self.log_weights.exp(), self._values(function)
        value = float(w @ values)
        return clustered(value, w * (values - value), w, self.eve)

    def shift(self, function: Callable[[Tensor], Tensor]) -> Estimate:
        """How much too large the mean of a scalar is by paths down because the steps are not small, to first order."""
        w, values = self.log_weights.exp(), self._values(function)
        if not bool(self.steps.any()):
            return Estimate(0.0, 0.0)
        products = (values - w @ values) * (self.steps - w @ self.steps)
        value = float(w @ products)
        return clustered(value, w * (products - value), w, self.eve)

    def _values(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        values = called(function, "a scalar of the particles", self.x)
        if not isinstance(values, Tensor) or values.shape != (len(self.x),):
            got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else repr(type(values).__name__)
            raise InputError(f"a scalar must be one number per particle, shape ({len(self.x)},); got {got}")
        return values.to(torch.float64)

    def state_dict(self) -> dict[str, Tensor]:
        estimates = [of[m] for of in (self.log_z, self.discretisation) for m in METHODS]
        return {
            "x": self.x,
            "log_weights": self.log_weights,
            "eve": self.eve,
            "steps": self.steps,
            "estimates": torch.tensor([(e.value, e.error, e.dof) for e in estimates], dtype=torch.float64),
            "numbers": torch.tensor([self.n_steps, self.rows]),
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Tensor]) -> StartingPass:
        estimates = [Estimate(*row) for row in state["estimates"].tolist()]
        n_steps, rows = state["numbers"].tolist()
        # Snapshots of earlier versions have one number for all methods, and nothing of single particles.
        log_z, size = (dict(zip(METHODS, of, strict=False)) for of in (estimates, 3 * estimates[3:]))
        steps = state.get("steps", torch.zeros(len(state["x"]), dtype=torch.float64))
        return cls(state["x"], state["log_weights"], state["eve"], steps, log_z, size, n_steps, rows)


def with_steps(estimate: Estimate, size: Estimate | None) -> Estimate:
    """A mean or log Z with an error that contains the part due to the size of the steps, where that was measured.

    What was measured is added as it is: its own error makes it larger on average, never smaller.
    """
    return estimate if size is None else replace(estimate, error=math.hypot(estimate.error, size.value))


def by_eve(values: Tensor, eve: Tensor) -> Tensor:
    """Sums over all descendants of each particle at the noise end, (n,)."""
    return torch.zeros(eve.shape[-1], dtype=torch.float64).index_add(0, eve.flatten(), values.flatten())


def clustered(value: float, parts: Tensor, w: Tensor, eve: Tensor) -> Estimate:
    """An estimate whose error comes from what each Eve's descendants add; infinite where all descend from one."""
    shares = float(by_eve(w, eve).square().sum())
    if shares > 1 - 1e-12:
        return Estimate(value, math.inf, 1.0)
    return Estimate(value, float(by_eve(parts, eve).norm()) / math.sqrt(1 - shares), max(1.0, 1 / shares - 1))
