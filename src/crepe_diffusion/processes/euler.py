"""The paper's kernels: one Euler step of a jump process whose rates come from concrete scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from crepe_diffusion.batches import rows_like
from crepe_diffusion.devices import as_real, real
from crepe_diffusion.errors import InputError
from crepe_diffusion.processes.base import Coefficients, Evaluation
from crepe_diffusion.processes.discrete import Discrete, combined, pick, survival, with_entry
from crepe_diffusion.processes.masked import Masked
from crepe_diffusion.processes.uniform import Uniform
from crepe_diffusion.random import Stream

__all__ = ["Euler"]


@dataclass(frozen=True)
class Euler(Discrete):
    """The paper's Euler kernels from concrete scores, for a masked or a uniform base process.

    Probabilities are `[v = x] + rate * dt`, clipped at `floor` and normalised, the same where a step is drawn and
    where its density is evaluated. The proposal multiplies concrete scores, `prod_j score_j^{c'_j}`, without
    normalising over tokens, so its rates may differ from every model's. Needs a noise end with `t < 1`.
    """

    vocab_size: int = 2
    base: Masked | Uniform = None  # type: ignore[assignment]
    floor: float = 1e-8

    def __post_init__(self) -> None:
        if not isinstance(self.base, (Masked, Uniform)):
            raise InputError(f"base must be a Masked or Uniform process, got {self.base!r}")
        object.__setattr__(self, "vocab_size", self.base.vocab_size)
        object.__setattr__(self, "prompt", self.base.prompt)

    @property
    def n_states(self) -> int:
        return self.base.n_states

    def noise(self, stream: Stream, like: Tensor, t: float, coefficients: Coefficients) -> Tensor:
        return self.base.noise(stream, like, t, coefficients)

    def known(self, x: Tensor, t: Tensor) -> Tensor:
        return self.base.known(x, t)

    def drift(
        self, x: Tensor, t: Tensor, predictions: tuple[Tensor, ...], guidance: Tensor | None, coefficients: Coefficients
    ) -> Tensor:
        """log prod_j score_j^{c'_j}, over the states that one jump can reach."""
        return combined(tuple(self.in_kernel(x, p, t) for p in predictions), coefficients.proposal)

    def in_kernel(self, x: Tensor, log_p: Tensor, t: Tensor) -> Tensor:
        """Log concrete scores."""
        return self.base.log_concrete(x, as_real(log_p), t.clamp(max=1 - 1e-6))

    def _jump(self, x: Tensor, log_rates: Tensor) -> Tensor:
        """Jump probabilities with what is left on staying, clipped and normalised."""
        p = with_entry(log_rates.exp(), x, 0.0)
        p = with_entry(p, x, 1 - p.sum(-1, keepdim=True)).clamp_(min=self.floor)
        return (p / p.sum(-1, keepdim=True)).log()

    def noising(self, x_s: Tensor, s: Tensor, t: Tensor) -> Tensor:
        # The rate of a = 1 - t is 1 / a; the step is frozen at its start, as in the paper.
        rate = (rows_like(t - s, x_s) / survival(s, x_s))[..., None]
        if isinstance(self.base, Masked):
            rates = torch.zeros(*x_s.shape, self.n_states, dtype=real(x_s.device), device=x_s.device)
            rates[..., self.base.mask] = 1
            return self._jump(x_s, (rates * rate).log())
        return self._jump(x_s, (rate / self.vocab_size).log().expand(*x_s.shape, self.n_states))

    def denoising(self, x_t: Tensor, log_p: Tensor, s: Tensor, t: Tensor) -> Tensor:
        """Here `log_p` holds log concrete scores: of one model, or of the proposal's product."""
        t = t.clamp(max=1 - 1e-6)
        rate = (rows_like(t - s, x_t) / survival(t, x_t))[..., None]
        if isinstance(self.base, Uniform):
            rate = rate / self.vocab_size
        return self._jump(x_t, log_p + rate.log())

    def log_ratio(self, x_s: Tensor, x_t: Tensor, log_p: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return pick(self.denoising(x_t, log_p, s, t), x_s) - pick(self.noising(x_s, s, t), x_t)

    def log_concrete(self, x: Tensor, log_p: Tensor, t: Tensor) -> Tensor:
        return self.base.log_concrete(x, log_p, t)

    def density_ratios(self, x: Tensor, y: Tensor, at_x: Evaluation, at_y: Evaluation, t: Tensor) -> Tensor:
        return self.base.density_ratios(x, y, at_x, at_y, t)
