"""How replicas and particles propose to move.

    up     mean y_s + k_up   d S(y_s)        S = sum_j c'_j score_j + guidance of the reward
    down   mean y_t + k_down d S(y_t)

Any choice of `c'_j`, `k_up` and `k_down` is legal: the log-work accounts for it. A good one is accepted more often.
"""

from __future__ import annotations

from dataclasses import dataclass

from crepe_diffusion.errors import InputError, check_choice
from crepe_diffusion.processes import Coefficients
from crepe_diffusion.rewards import GUIDANCE
from crepe_diffusion.targets import Target

__all__ = ["Proposal"]


@dataclass(frozen=True)
class Proposal:
    """How replicas propose to move; any choice is legal, a good one is accepted more often.

    - `k`: `"balanced"` (both directions follow pi_t), `"paper"` (noising is left as trained), or `(k_up, k_down)`;
    - `exponents`: its own exponents, one per model (another guidance strength), default the target's;
    - `guidance`: the same for all rewards, in place of the `guidance` of each;
    - `clip`: the largest norm of t times the reward's gradient, per event: the gradient relative to the noise.

    >>> from crepe_diffusion.models import GaussianMixture
    >>> p = GaussianMixture(weights=[1.0], means=[[0.0]], stds=[1.0])
    >>> numbers = Proposal().coefficients(p ** 2.0)
    >>> numbers.k_up, numbers.k_down
    (0.25, 0.75)
    """

    k: str | tuple[float, float] = "balanced"
    exponents: tuple[float, ...] | None = None
    guidance: str | None = None
    clip: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.k, str):
            check_choice("k", self.k, ("balanced", "paper"))
        elif len(self.k) != 2:
            raise InputError(f"k must be (k_up, k_down), got {self.k!r}")
        if self.guidance is not None:
            check_choice("guidance", self.guidance, GUIDANCE)
        if self.clip is not None and not self.clip > 0:
            raise InputError(f"clip must be a positive norm, got {self.clip!r}")

    def coefficients(self, target: Target) -> Coefficients:
        """The numbers of this proposal for that target."""
        c = target.exponents
        total = sum(c)
        if not total > 0:
            raise InputError(f"exponents must sum to a positive number, got {c} with sum {total:g}")
        own = c if self.exponents is None else tuple(float(e) for e in self.exponents)
        if len(own) != len(c):
            raise InputError(f"the proposal has {len(own)} exponents for {len(c)} models: {own}")
        if isinstance(self.k, str):
            k_up, k_down = (0.0, 1.0) if self.k == "paper" else ((total - 1) / (2 * total), (total + 1) / (2 * total))
        else:
            k_up, k_down = self.k
        return Coefficients(c, own, k_up, k_down)
