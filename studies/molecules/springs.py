"""A denoising covariance that turns with the molecule: that of a network of springs.

    B     =  N(y_t + d score(y_t), a + b P^-1),      a = d s^2/t^2,   b = (d/t^2)^2,   d = t^2 - s^2
    P     =  1/t^2 + k_0 + sum_pairs k_c u_ij u_ij^T / var d_ij            estimates Cov[x_0 | y_t]^-1
    u_ij  =  the unit vector from D_j(y_t) to D_i(y_t) at atom i, and its opposite at atom j

`a + b Cov[x_0 | y_t]` is the exact covariance of a denoising step. One variance for all directions is far from it:
bonds are a hundred times stiffer than torsions, and no fixed basis turns with a molecule. The prediction `D` shows
where bonds point. Pairs are those with one, two and three bonds between, each kind with a strength `k_c(t)`, found from
errors `e = x_0 - D` of the model on its own samples at each of some noise levels:

    max over k of  E[ log det P - e^T P e ]                                concave
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from crepe_diffusion import InputError
from crepe_diffusion.models import Denoiser
from crepe_diffusion.processes import Coefficients, Evaluation, Gaussian
from crepe_diffusion.random import Stream

__all__ = ["KINDS", "Network", "Springs", "measured", "strengths"]

KINDS = 3
"""Pairs with as many bonds between them, and fewer."""
FLOOR = 0.001
"""nm; bonds to hydrogen have no spread of their own, and the model's is about this."""

N_ERRORS = 128
"""Rows whose errors show four strengths; all samples show the spread of pairs."""

MOST = 12.0
"""The logarithms of strengths stay within this."""


@dataclass(frozen=True)
class Network:
    """Springs of `n_atoms` atoms between `pairs` (pairs, 2).

    They are of `kind` (pairs,), and `stiffness` (pairs,) is what their spread in data tells. `strengths`
    (times, 1 + kinds) are the logarithms of `k_0` and of `k_c` at `times`.
    """

    n_atoms: int
    pairs: Tensor
    kind: Tensor
    stiffness: Tensor
    times: Tensor
    strengths: Tensor

    @staticmethod
    def of(bonds: np.ndarray, frames: Tensor) -> Network:
        """The pairs of a molecule with these bonds, and their spread in frames (rows, atoms, 3); not fitted yet."""
        n_atoms = frames.shape[1]
        near = torch.eye(n_atoms, dtype=torch.bool)
        joined = torch.zeros_like(near)
        joined[tuple(torch.from_numpy(bonds).T)] = True
        joined |= joined.T.clone()
        between = torch.full((n_atoms, n_atoms), KINDS + 1)
        for k in range(1, KINDS + 1):
            reached = (near.double() @ joined.double() > 0) & ~near
            between[reached] = k
            near = near | reached
        pairs = (between <= KINDS).triu(1).nonzero()
        d = (frames[:, pairs[:, 0]] - frames[:, pairs[:, 1]]).double().norm(dim=-1)
        kind = between[pairs[:, 0], pairs[:, 1]]
        nothing = torch.zeros(0, 1 + KINDS, dtype=torch.float64)
        return Network(n_atoms, pairs, kind, 1 / (d.var(0) + FLOOR**2), nothing[:, 0], nothing)

    def at(self, t: Tensor) -> Tensor:
        """`k_0` and the `k_c` at each of these times, (rows, 1 + kinds)."""
        place = torch.from_numpy(np.interp(t.log().numpy(), self.times.log().numpy(), np.arange(len(self.times))))
        low = place.long().clamp(max=len(self.times) - 2)
        share = (place - low)[:, None]
        return ((1 - share) * self.strengths[low] + share * self.strengths[low + 1]).exp()

    def precision(self, prediction: Tensor, t: Tensor, k: Tensor) -> Tensor:
        """P of each row, (rows, n, n), with strengths k (rows or 1, 1 + kinds).

        It has the dtype of the prediction: P is a thousand times stiffer in some directions than in others, at most.
        """
        rows, n_atoms = prediction.shape[:2]
        i, j = self.pairs.T
        u = torch.nn.functional.normalize(prediction[:, i] - prediction[:, j], dim=2)
        along = (k[:, self.kind] * self.stiffness).to(u)[:, :, None] * u
        blocks = along[:, :, :, None] * u[:, :, None]  # (rows, pairs, 3, 3)
        p = blocks.new_zeros(rows, n_atoms, 3, n_atoms, 3)
        p[:, i, :, j] = -blocks.transpose(0, 1)
        p[:, j, :, i] = -blocks.transpose(0, 1)
        at_atoms = (self.ends.to(u) @ blocks.flatten(2)).unflatten(2, (3, 3))
        still = (1 / t.double() ** 2 + k[:, 0]).to(u)[:, None, None, None] * torch.eye(3).to(u)
        everyone = torch.arange(n_atoms)
        p[:, everyone, :, everyone] = (at_atoms + still).transpose(0, 1)
        return p.reshape(rows, 3 * n_atoms, 3 * n_atoms)

    @cached_property
    def ends(self) -> Tensor:
        """Which pairs an atom is in, (atoms, pairs) of 0 and 1."""
        one = torch.eye(self.n_atoms, dtype=torch.float64)
        return (one[self.pairs[:, 0]] + one[self.pairs[:, 1]]).T.contiguous()


def strengths(network: Network, prediction: Tensor, error: Tensor, t: float, begin: Tensor | None = None) -> Tensor:
    """The logarithms of `k_0` and of the `k_c` (1 + kinds,) that fit errors (rows, atoms, 3) of predictions best.

    Errors have no mean over the atoms, so P is fitted where there is none. Where noise is so small that springs do not
    show, a little weight keeps them near 1. To `begin` with those of a noise nearby saves most of the time; for `k_0`,
    which has no slope where it is small, the search begins at the pull of the noise.
    """
    first = torch.zeros(1 + KINDS, dtype=torch.float64) if begin is None else begin.clone()
    first[0] = min(-2 * math.log(t), MOST / 2)
    free = (MOST * (first / MOST).atanh()).requires_grad_(True)
    prediction, e, times = prediction.double(), error.double().flatten(1), torch.full((len(error),), t)

    def log_k() -> Tensor:
        return MOST * (free / MOST).tanh()

    def loss() -> Tensor:
        k = log_k().exp()
        p = network.precision(prediction, times, k[None])
        of_mean = 3 * (1 / t**2 + k[0]).log()
        log_det = _log_det(torch.linalg.cholesky(p)) - of_mean
        fit = 0.5 * ((e[:, None] @ p @ e[:, :, None])[:, 0, 0] - log_det).mean() / e.shape[1]
        return fit + 1e-6 * free.square().sum()

    search = torch.optim.LBFGS([free], max_iter=60, line_search_fn="strong_wolfe", tolerance_change=1e-9)

    def closure() -> Tensor:
        search.zero_grad()
        value = loss()
        value.backward()
        return value

    with torch.enable_grad():
        search.step(closure)
    return log_k().detach()


def measured(
    model: Denoiser, bonds: np.ndarray, samples: Tensor, times: np.ndarray, generator: torch.Generator
) -> Network:
    """The network whose springs fit the model's errors on `N_ERRORS` samples (rows, atoms, 3) at these noise levels."""
    network, project, x = Network.of(bonds, samples), model.process().project, samples[:N_ERRORS]
    found: list[Tensor] = []
    for t in times.tolist():
        y = x + t * project(torch.randn(x.shape, generator=generator))
        prediction = model.predict(y, torch.full((len(y),), t))
        error = project(x - prediction)
        found.append(strengths(network, prediction, error, t, found[-1] if found else None))
    return replace(network, times=torch.from_numpy(times), strengths=torch.stack(found))


@dataclass(frozen=True)
class Springs(Gaussian):
    """Denoising with the covariance of a network of springs; the noise end has the measured variance, as always.

    For one model and the balanced proposal, whose denoising steps then have the covariance of the model's.
    """

    network: Network | None = None

    def _factors(
        self, seen: Evaluation, s: Tensor, t: Tensor, coefficients: Coefficients
    ) -> tuple[Tensor, Tensor, Tensor]:
        """P of each row, a and b."""
        if self.network is None or len(coefficients.target) != 1:
            raise InputError("springs are of one model, and need a network: springs.measured makes it")
        if abs((1 - 2 * coefficients.k_up) * coefficients.total - 1) > 1e-9:
            raise InputError('springs need the proposal "balanced", whose steps have the covariance of the model\'s')
        share = 1 - (s / t).square()  # d / t^2
        p = self.network.precision(seen.predictions[0], t, self.network.at(t))
        return p, share * s.square(), share.square()

    def step(
        self, x: Tensor, seen: Evaluation, s: Tensor, t: Tensor, up: Tensor, stream: Stream, coefficients: Coefficients
    ) -> Tensor:
        n, d = x[0].numel(), (t - s) * (t + s)
        z = stream.normal((len(x), 2 * n), dtype=torch.float64)
        noise = d.sqrt()[:, None] * z[:, :n]
        down = (~up).nonzero()[:, 0]
        p, a, b = self._factors(seen.rows(down), s[down], t[down], coefficients)
        soft = torch.linalg.solve_triangular(torch.linalg.cholesky(p).mT, z[down, n:, None].to(p), upper=True)[:, :, 0]
        noise[down] = a.sqrt()[:, None] * z[down, :n] + b.sqrt()[:, None] * soft
        gain = torch.where(up, coefficients.k_up * d, coefficients.k_down * d).to(x.dtype)
        return x + self.project(noise.reshape(x.shape).to(x.dtype) + gain[:, None, None] * seen.drift)

    def kernel_ratios(
        self,
        x_s: Tensor,
        x_t: Tensor,
        at_s: Evaluation,
        at_t: Evaluation,
        s: Tensor,
        t: Tensor,
        coefficients: Coefficients,
    ) -> tuple[Tensor, Tensor]:
        d = (t - s) * (t + s)
        p, a, b = self._factors(at_t, s, t, coefficients)
        still = d <= 0  # rows that stay: any kernel will do, their ratio is 1
        d, a = d.where(~still, 1.0), a.where(~still, 1.0)
        gap = self.coordinates(x_t - x_s).double()
        pull = self.coordinates(at_t.predictions[0] - x_t).double() * (d / t.square())[:, None]
        drift = self.coordinates(at_t.drift).double() * (coefficients.k_down * d)[:, None]
        rise = gap - self.coordinates(at_s.drift).double() * (coefficients.k_up * d)[:, None]
        residuals = torch.stack([gap + pull, gap + drift], 2).to(p)
        # (a + b P^-1)^-1 = P (a P + b)^-1, and the mean position, which does not move, is no part of the density.
        both = a.to(p)[:, None, None] * p
        both.diagonal(dim1=1, dim2=2).add_(b.to(p)[:, None])
        root = torch.linalg.cholesky(both)
        squares = ((p @ residuals) * torch.cholesky_solve(residuals, root)).sum(1)
        log_det = _log_det(root) - _log_det(torch.linalg.cholesky(p))
        mean = 1 / t.double().square() + self.network.at(t)[:, 0]  # type: ignore[union-attr]
        n, n_whole = self.dimension(x_s.shape[1:]), p.shape[1]
        log_det = log_det - (n_whole - n) * ((a * mean + b).log() - mean.log())
        up = torch.stack([gap.square().sum(1), rise.square().sum(1)], 1) / d[:, None]
        found = 0.5 * (up - squares - (log_det - n * d.log())[:, None])
        found = found.where(~still[:, None], 0.0)
        return found[:, :1].T, found[:, 1]


def _log_det(root: Tensor) -> Tensor:
    """Of the matrices whose Cholesky factors these are, (rows,)."""
    return 2 * root.diagonal(dim1=1, dim2=2).double().log().sum(1)
