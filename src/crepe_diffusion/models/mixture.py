"""A Gaussian mixture whose noised marginals, denoiser and samples are known exactly.

p_t(y) = sum_k w_k N(y; mu_k, C_k + t^2)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from crepe_diffusion.errors import InputError
from crepe_diffusion.models.base import Model
from crepe_diffusion.processes import Gaussian, Process
from crepe_diffusion.random import Stream

__all__ = ["GaussianMixture"]


class GaussianMixture(Model):
    """Weights `(k,)`, means `(k, *event)`, and `stds` (k,) or (k, *event) or full `covariances` (k, n, n).

    It lives on the device of `means`.

    >>> p = GaussianMixture(weights=[0.3, 0.7], means=[[-4.0], [3.0]], stds=[0.5, 0.4])
    >>> round(p.predict(torch.tensor([[2.9]], dtype=torch.float64), torch.tensor([0.1])).item(), 3)
    2.906
    """

    def __init__(
        self,
        weights: Sequence[float] | Tensor,
        means: Sequence[Sequence[float]] | Tensor,
        stds: Sequence[float] | Sequence[Sequence[float]] | Tensor | None = None,
        covariances: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float64,
        process: Process | None = None,
    ):
        mu = torch.as_tensor(means, dtype=dtype)
        w = torch.as_tensor(weights, dtype=dtype, device=mu.device)
        if w.ndim != 1 or (w <= 0).any():
            raise InputError(f"weights must be positive numbers, got {w.tolist()}")
        if mu.ndim < 2 or len(mu) != len(w):
            raise InputError(
                f"means must be (components, *event) with {len(w)} components, got shape {tuple(mu.shape)}"
            )
        if (stds is None) == (covariances is None):
            raise InputError("give stds or covariances, one of them")
        self.event_shape, self.dtype = tuple(mu.shape[1:]), dtype
        self.weights = w / w.sum()
        self.means = mu.flatten(1)
        n = self.means.shape[1]
        if covariances is not None:
            c = torch.as_tensor(covariances, dtype=dtype, device=mu.device)
            if c.shape != (len(w), n, n):
                raise InputError(f"covariances must have shape {(len(w), n, n)}, got {tuple(c.shape)}")
            eigenvalues, self.axes = torch.linalg.eigh(c)
        else:
            sd = torch.as_tensor(stds, dtype=dtype, device=mu.device)
            eigenvalues = (sd[:, None].expand(len(w), n) if sd.ndim == 1 else sd.flatten(1)) ** 2
            self.axes = None
        if eigenvalues.shape != (len(w), n) or (eigenvalues <= 0).any():
            raise InputError("scales must be positive, one per component or one per component and coordinate")
        self.eigenvalues = eigenvalues
        self._process = process or Gaussian()
        # A tenth of the narrowest scale changes it by half a per cent; at 20 times the widest nothing is left of it.
        wide = (self.weights @ (self.means - self.weights @ self.means).square()).max() + eigenvalues.max()
        self.sigma_range = (0.1 * float(eigenvalues.min()) ** 0.5, 20 * float(wide) ** 0.5)

    @property
    def device(self) -> torch.device:
        return self.means.device

    def process(self) -> Process:
        return self._process

    def _components(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Offsets in each component's axes, their variances at time t, and log w_k N_k(x)."""
        offset = x.flatten(1)[:, None] - self.means
        if self.axes is not None:
            offset = torch.einsum("rki,kij->rkj", offset, self.axes)
        variance = self.eigenvalues + (t * t).to(self.dtype)[:, None, None]
        quadratic = (offset * offset / variance + (2 * math.pi * variance).log()).sum(-1)
        return offset, variance, self.weights.log() - 0.5 * quadratic

    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        offset, variance, log_joint = self._components(x, t)
        shrunk = offset * (self.eigenvalues / variance)
        if self.axes is not None:
            shrunk = torch.einsum("rkj,kij->rki", shrunk, self.axes)
        posterior = torch.softmax(log_joint, dim=1)
        return torch.einsum("rk,rki->ri", posterior, shrunk + self.means).reshape(x.shape)

    def log_prob(self, x: Tensor, t: Tensor | float = 0.0) -> Tensor:
        """log p_t(x), exactly."""
        t = torch.as_tensor(t, dtype=self.dtype, device=x.device).expand(len(x))
        return self._components(x, t)[2].logsumexp(1)

    def responsibilities(self, x: Tensor, t: float = 0.0) -> Tensor:
        """The posterior probability of each component, (rows, components)."""
        return torch.softmax(self._components(x, torch.full((len(x),), t, dtype=self.dtype, device=x.device))[2], dim=1)

    def sample(self, n: int, stream: Stream, t: float = 0.0) -> Tensor:
        """Exact draws from p_t."""
        k = stream.at("component").categorical(self.weights.log().expand(n, -1))
        scale = (self.eigenvalues[k] + t * t).sqrt()
        offset = stream.at("offset").normal((n, self.means.shape[1]), dtype=self.dtype, device=self.device) * scale
        if self.axes is not None:
            offset = torch.einsum("rj,rij->ri", offset, self.axes[k])
        return (self.means[k] + offset).reshape(n, *self.event_shape)
