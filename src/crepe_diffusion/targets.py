"""The law to sample from, as one data type with an algebra.

pi_t(x)  ~  exp(r_t(x)) * prod_j p_j,t(x)^{c_j},        r_t(x) = gamma_t * r(E[x_0 | x_t = x])

p ** 2.0                  tempering
p * q                     composition
guided(cond, uncond, w)   debiased classifier-free guidance
p.tilt(reward)            reward tilting, posterior sampling
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from crepe_diffusion.errors import InputError
from crepe_diffusion.models import Model
from crepe_diffusion.rewards import Reward

__all__ = ["Reward", "Target", "guided"]


@dataclass(frozen=True)
class Target:
    """Models with their exponents, and reward terms. Write `p ** 2 * q` and `.tilt(...)` rather than this.

    >>> from crepe_diffusion.models import GaussianMixture
    >>> p = GaussianMixture(weights=[1.0], means=[[0.0]], stds=[1.0])
    >>> (p ** 2.0 * p).exponents
    (3.0,)
    """

    factors: tuple[tuple[Model, float], ...]
    rewards: tuple[Reward, ...] = ()

    def __post_init__(self) -> None:
        merged: dict[int, tuple[Model, float]] = {}
        for model, c in self.factors:
            if not isinstance(model, Model):
                raise InputError(f"a factor must be a model of crepe_diffusion.models, got {model!r}")
            if not isinstance(c, (int, float)) or not math.isfinite(c):
                raise InputError(f"exponents must be finite numbers, got {c!r}")
            before = merged.get(id(model), (model, 0.0))[1]
            merged[id(model)] = (model, before + float(c))
        object.__setattr__(self, "factors", tuple(merged.values()))
        shapes = {m.event_shape for m in self.models}
        if len(shapes) != 1:
            raise InputError(f"models of one target must share their event shape, got {sorted(shapes)}")
        if len({m.dtype for m in self.models}) != 1:
            raise InputError(f"models of one target must share their dtype, got {[str(m.dtype) for m in self.models]}")
        names = [r.name for r in self.rewards]
        if len(set(names)) != len(names):
            raise InputError(f"reward terms need different names, got {names}")

    @property
    def models(self) -> tuple[Model, ...]:
        return tuple(model for model, _ in self.factors)

    @property
    def exponents(self) -> tuple[float, ...]:
        return tuple(c for _, c in self.factors)

    def __pow__(self, exponent: float) -> Target:
        if not isinstance(exponent, (int, float)) or not math.isfinite(exponent):
            raise InputError(f"an exponent must be a finite number, got {exponent!r}")
        factors = tuple((model, c * exponent) for model, c in self.factors)
        return Target(factors, tuple(replace(r, scale=r.scale * exponent) for r in self.rewards))

    def __mul__(self, other: Model | Target) -> Target:
        if isinstance(other, Model):
            other = other.as_target()
        if not isinstance(other, Target):
            raise InputError(f"a target multiplies with models and targets, got {other!r}")
        return Target(self.factors + other.factors, self.rewards + other.rewards)

    def tilt(self, reward: Callable[[Tensor], Tensor], *, name: str | None = None, **options: Any) -> Target:
        """Multiply by `exp(r)`; options are those of `Reward`. A black-box reward needs none of them."""
        if name is None:
            name = "reward" if not self.rewards else f"reward{len(self.rewards) + 1}"
        return replace(self, rewards=(*self.rewards, Reward(reward, name=name, **options)))

    def without(self, name: str) -> Target:
        """The same target without the reward term of that name."""
        if name not in [r.name for r in self.rewards]:
            raise InputError(f"no reward term {name!r}; there are {[r.name for r in self.rewards]}")
        return replace(self, rewards=tuple(r for r in self.rewards if r.name != name))


def guided(conditional: Model, unconditional: Model, scale: float) -> Target:
    """Debiased classifier-free guidance, `p^(1-w) p(.|c)^w` with `w = scale`."""
    return Target(((unconditional, 1.0 - scale), (conditional, float(scale))))
