"""The pass of particles from which a chain started: another estimate of the same means and the same log Z.

error^2 = sum_e (sum_{i in e} w_i (f_i - mean))^2 / (1 - sum_e w_e^2)        over the Eves e

A chain cannot see what it has never met; a pass that was made before, and independently of its exchange, may.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from crepe_diffusion.batches import called
from crepe_diffusion.diagnostics.estimates import Estimate
from crepe_diffusion.errors import InputError

__all__ = ["METHODS", "StartingPass", "by_eve", "clustered", "heaviest", "with_steps"]

METHODS = ("down", "up", "bar")
# What is expected so often among independent draws is met by none of them with a probability of exp(-3) = 5 %.
EXPECTED = 3
# In place of an infinite work; its exponential is one.
HUGE = 1e6


@dataclass(frozen=True)
class StartingPass:
    """What a chain keeps of its pilot: the numbers, and weighted particles at the data end.

    `eve` (n,) is the particle at the noise end from which each one descends. Relatives are one cluster, whatever their
    correlation. `log_z` has an estimate for each method, `discretisation` is the part of each that is due to the size
    of the steps, to first order; `steps` (n,) is what double steps would add to the weight of each particle. `heavy`
    (2, j) is what walks up showed of the heaviest paths: of walks down they are this share, of the weight that.

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
    heavy: Tensor = field(default_factory=lambda: torch.zeros(2, 0, dtype=torch.float64))

    def unseen(self, n: int) -> float:
        """The share of the weight that n walks down may well miss: paths that are expected three times or less."""
        share, weight = self.heavy
        return max(weight[share <= EXPECTED / n].tolist(), default=0.0)

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
            "heavy": self.heavy,
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Tensor]) -> StartingPass:
        estimates = [Estimate(*row) for row in state["estimates"].tolist()]
        n_steps, rows = state["numbers"].tolist()
        # Snapshots of earlier versions have one number for all methods, and nothing of single particles.
        log_z, size = (dict(zip(METHODS, of, strict=False)) for of in (estimates, 3 * estimates[3:]))
        steps = state.get("steps", torch.zeros(len(state["x"]), dtype=torch.float64))
        heavy = state.get("heavy", torch.zeros(2, 0, dtype=torch.float64))
        return cls(state["x"], state["log_weights"], state["eve"], steps, log_z, size, n_steps, rows, heavy)


def heaviest(log_weights: Tensor, works: Tensor) -> Tensor:
    """The shares of walks down and of the weight, (2, j), that the heaviest paths of a step have together.

    From the works of walks up, (steps, n), which meet paths as often as the target has them, and the log-weights with
    which these began each step. Whoever is met by w in the target is met by `w exp(-work)` on the way down. For each
    share of walks down it is the step with the largest share of the weight that counts.

    >>> equal = torch.tensor([[0.5, 0.5]], dtype=torch.float64).log()
    >>> heaviest(equal, torch.tensor([[0.0, 99.0]]).log1p()).tolist()      # one path is a hundred times as heavy
    [[0.01, 1.0], [0.5, 1.0]]
    """
    works = works.nan_to_num(nan=HUGE, posinf=HUGE, neginf=-HUGE)
    order = works.argsort(1, descending=True)
    down = (log_weights - works).log_softmax(1)
    share, weight = (log_w.gather(1, order).exp().cumsum(1) for log_w in (down, log_weights))
    share, index = share.flatten().sort()
    weight = weight.flatten()[index].cummax(0).values
    new = weight > torch.cat([torch.zeros(1, dtype=weight.dtype), weight[:-1]])
    return torch.stack([share[new], weight[new]])


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
