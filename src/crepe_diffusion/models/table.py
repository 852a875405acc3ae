"""A joint table over a few tokens: a discrete diffusion whose marginals and posteriors are sums.

p_t(x) = sum_{x_0} p(x_0) prod_i q_t(x^i | x_0^i)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from crepe_diffusion.devices import real
from crepe_diffusion.errors import InputError, check_choice
from crepe_diffusion.models.base import Model, check_prompt
from crepe_diffusion.processes import Masked, Process, Uniform

__all__ = ["TokenTable"]


class TokenTable(Model):
    """Probabilities of shape `(V,) * length`, for the masked or the uniform process; it lives on their device.

    >>> model = TokenTable(torch.tensor([[0.4, 0.1], [0.2, 0.3]]), kind="masked")
    >>> model.predict(torch.tensor([[0, 2]]), torch.tensor([0.5]))[0, 1].exp().tolist()   # P(second | first = 0)
    [0.8, 0.2]
    """

    def __init__(self, probabilities: Tensor, kind: str = "masked", *, prompt: Tensor | None = None):
        check_choice("kind", kind, ("masked", "uniform"))
        p = torch.as_tensor(probabilities, dtype=None if isinstance(probabilities, Tensor) else torch.float64)
        p = p.to(real(p.device))
        if p.ndim < 1 or len(set(p.shape)) != 1 or (p < 0).any() or not p.sum() > 0:
            raise InputError(f"a table needs shape (V, ..., V) and non-negative entries, got shape {tuple(p.shape)}")
        self.vocab_size, self.length = p.shape[0], p.ndim
        self.event_shape, self.dtype = (self.length,), p.dtype
        check_prompt(prompt, self.event_shape)
        self.probabilities = (p / p.sum()).flatten()
        index = torch.arange(self.vocab_size**self.length, device=p.device)
        powers = self.vocab_size ** torch.arange(self.length - 1, -1, -1, device=p.device)
        self.states = (index[:, None] // powers) % self.vocab_size
        self._process: Masked | Uniform = (Masked if kind == "masked" else Uniform)(self.vocab_size, prompt)
        # (states, length * V): a product with it counts how many tokens agree with each state.
        self._one_hot = one_hot(self.states, self.vocab_size).to(self.dtype).flatten(1)

    @property
    def device(self) -> torch.device:
        return self.probabilities.device

    def process(self) -> Process:
        return self._process

    def _log_joint(self, x: Tensor, t: Tensor) -> Tensor:
        """log p(x_0) q_t(x | x_0), (rows, states); frozen positions are clean at every time."""
        p = self._process
        free, clean = p.free(x), x < self.vocab_size
        there = one_hot(x.clamp(max=self.vocab_size - 1), self.vocab_size).to(self.dtype) * clean[..., None]
        frozen, loose = ((there * part[..., None]).flatten(1) @ self._one_hot.T for part in (~free, free))
        a, n_clean = (1 - t.to(self.dtype))[:, None], (clean & free).sum(1, keepdim=True)
        if isinstance(p, Masked):
            other, same = torch.zeros_like(a), a
        else:
            other, same = (1 - a) / self.vocab_size, a + (1 - a) / self.vocab_size
        n_masked = (free & ~clean).sum(1, keepdim=True)
        log_likelihood = _power(same, loose) + _power(other, n_clean - loose) + _power(1 - a, n_masked)
        possible = frozen == (~free).sum(1, keepdim=True)
        return self.probabilities.log() + log_likelihood.where(possible, -torch.inf)

    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        if isinstance(self._process, Masked):
            # The posterior does not depend on time there; 1/2 also serves states that cannot occur at t.
            t = torch.full_like(t, 0.5)
        posterior = torch.softmax(self._log_joint(x, t), dim=1)
        return (posterior @ self._one_hot).reshape(-1, self.length, self.vocab_size).log()

    def log_prob(self, x: Tensor, t: Tensor | float = 0.0) -> Tensor:
        """log p_t(x), exactly."""
        return self._log_joint(x, torch.as_tensor(t, dtype=self.dtype, device=x.device).expand(len(x))).logsumexp(1)

    def all_states(self) -> Tensor:
        """Every state that noise can reach, (n_states ** length, length)."""
        n = self._process.n_states
        index = torch.arange(n**self.length)
        return (index[:, None] // n ** torch.arange(self.length - 1, -1, -1)) % n

    def __len__(self) -> int:
        return int(math.prod([self.vocab_size] * self.length))


def _power(base: Tensor, exponent: Tensor) -> Tensor:
    """`log(base ** exponent)`, where 0 ** 0 is 1."""
    return torch.where(exponent == 0, 0.0, exponent * base.log())
