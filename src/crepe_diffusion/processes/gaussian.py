"""Gaussian diffusions in the variance-exploding coordinate, `y_t = x_0 + t * eps`, with `d = t^2 - s^2`.

    noising     F   = N(y_s, d)                                   exact
    denoising   B_j = N(y_t + d * score_j(y_t), d - d^2 I_j,t)    mean exact, variance optimal (Fisher)
    proposal    up    N(y_s + k_up   * d * S(y_s), d)
                down  N(y_t + k_down * d * S(y_t), d - d^2 I_Q,t)

`I_j,t = E |score_j(y_t)|^2 / dim` under the model's own marginal, isotropic or one per coordinate. The paper's
Euler-Maruyama pair has variances `2 s (t - s)` up and `2 t (t - s)` down instead of one `d` for both.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from crepe_diffusion.batches import block_rows, rows_like
from crepe_diffusion.errors import InputError
from crepe_diffusion.processes.base import Coefficients, Evaluation, Process
from crepe_diffusion.random import Stream

__all__ = ["EulerMaruyama", "FisherTable", "Gaussian", "GaussianData", "GaussianProcess", "score_of"]


def score_of(prediction: Tensor, y: Tensor, t: Tensor) -> Tensor:
    """`(D(y, t) - y) / t^2`, the score of the marginal at noise t (Tweedie)."""
    return (prediction - y) / rows_like(t * t, y).to(y.dtype)


@dataclass(frozen=True)
class GaussianData:
    """The Fisher information of data of scale `rho`: `I_t = 1 / (t^2 + rho^2)`.

    Exact for Gaussian data at any step size. `rho = 0` is the DDPM posterior variance, `rho = inf` gives `v = d`.
    """

    rho: float

    def __post_init__(self) -> None:
        if not self.rho >= 0:
            raise InputError(f"rho must be a scale >= 0 (0: DDPM, inf: v = d), got {self.rho!r}")

    def scaled(self, t: Tensor) -> Tensor:
        """`t^2 I_t` as (1, rows, 1)."""
        return (1 / (1 + (self.rho / t) ** 2)).reshape(1, -1, 1)


@dataclass(frozen=True)
class FisherTable:
    """Measured `t^2 I_j,t` (between 0 and 1) on a grid of times, linear in log t between them.

    `values` is (models, times, 1) or (models, times, coordinates); `mean` (models, coordinates) holds E[x_0].
    """

    times: Tensor
    values: Tensor
    mean: Tensor

    def scaled(self, t: Tensor) -> Tensor:
        grid, x = self.times.log().to(t), t.log()
        high = torch.searchsorted(grid, x).clamp(1, len(grid) - 1)
        weight = ((x - grid[high - 1]) / (grid[high] - grid[high - 1])).clamp(0, 1)
        values = self.values.to(t)
        return torch.lerp(values[:, high - 1], values[:, high], weight[None, :, None])

    def tiled(self, n: int) -> FisherTable:
        """The table of an event that is n such events side by side."""
        values = self.values if self.values.shape[2] == 1 else self.values.repeat(1, 1, n)
        return FisherTable(self.times, values, self.mean.repeat(1, n))

    def state_dict(self) -> dict[str, Tensor]:
        return {"times": self.times, "values": self.values, "mean": self.mean}


@dataclass(frozen=True)
class GaussianProcess(Process):
    """Shared by the two discretisations; events of any shape, in their own coordinates or a given basis.

    - `basis`: orthonormal rows (k, n) over the flattened event, in which the variance is diagonal. Fewer rows
      than coordinates restrict the process to their span. An event of several times n entries is cut into pieces of n
      that each use it.
    - `zero_mean`: an axis of the event (0-based) whose mean is always zero, such as the atoms of a molecule.
    """

    basis: Tensor | None = None
    zero_mean: int | None = None

    def __post_init__(self) -> None:
        if self.basis is None:
            return
        b = self.basis
        if b.ndim != 2 or b.shape[0] > b.shape[1]:
            raise InputError(f"basis must be (k, n) with k <= n orthonormal rows, got shape {tuple(b.shape)}")
        error = (b @ b.T - torch.eye(len(b), dtype=b.dtype)).abs().max().item()
        if error > 1e-4:
            raise InputError(f"the rows of basis must be orthonormal; they are off by {error:.2g}")
        if self.zero_mean is not None:
            raise InputError("give either basis or zero_mean: a basis already defines the subspace")

    def check_event(self, event: torch.Size) -> None:
        n = math.prod(event)
        if self.basis is not None and n % self.basis.shape[1]:
            raise InputError(
                f"an event {tuple(event)} of {n} entries cannot be cut into pieces of {self.basis.shape[1]}"
            )

    def check_times(self, times: Tensor) -> None:
        if float(times[0]) <= 0:
            raise InputError("a Gaussian ladder must end above sigma = 0; samples are finished below level 0")

    # -- coordinates -------------------------------------------------------------------------------------

    def project(self, z: Tensor) -> Tensor:
        """The part of z inside the subspace on which the process lives."""
        if self.zero_mean is not None:
            return z - z.mean(dim=self.zero_mean + 1, keepdim=True)
        if self.basis is not None and self.basis.shape[0] < self.basis.shape[1]:
            return self.embed(self._in(z), z)
        return z

    def dimension(self, event: torch.Size) -> int:
        """How many coordinates are free."""
        n = math.prod(event)
        if self.zero_mean is not None:
            return n - n // event[self.zero_mean]
        return n if self.basis is None else n // self.basis.shape[1] * len(self.basis)

    def coordinates(self, z: Tensor) -> Tensor:
        """The coordinates of `project(z)`, (rows, coordinates): in the basis, or else the flattened event."""
        return self._in(self.project(z))

    def _in(self, z: Tensor) -> Tensor:
        if self.basis is None:
            return z.flatten(1)
        return (z.reshape(-1, self.basis.shape[1]) @ self.basis.T.to(z)).reshape(len(z), -1)

    def embed(self, flat: Tensor, like: Tensor) -> Tensor:
        """The states with these coordinates, of the shape of `like`."""
        if self.basis is None:
            return flat.reshape(like.shape)
        return (flat.reshape(-1, len(self.basis)) @ self.basis.to(flat)).reshape(like.shape)

    def scaled_noise(self, stream: Stream, like: Tensor, variance: Tensor, first_row: int = 0) -> Tensor:
        """Centred noise of the given variance, (rows, 1) or (rows, coordinates), inside the subspace."""
        n = math.prod(like.shape[1:]) if self.basis is None else self.dimension(like.shape[1:])
        z = stream.normal((len(like), n), first_row=first_row, dtype=like.dtype, device=like.device)
        z = self.embed(z.mul_(variance.sqrt().to(like.dtype)), like)
        return self.project(z) if self.zero_mean is not None else z

    # -- the kernels -------------------------------------------------------------------------------------

    @abstractmethod
    def noising_variance(self, s: Tensor, t: Tensor) -> Tensor:
        """Variance of a noising step, which is also its gain, (rows, 1)."""

    @abstractmethod
    def denoising_gain(self, s: Tensor, t: Tensor) -> Tensor:
        """Gain of a denoising step, (rows, 1)."""

    @abstractmethod
    def _variances(self, s: Tensor, t: Tensor, n_models: int) -> Tensor:
        """Denoising variance of each model, (models, rows, 1 or coordinates)."""

    @abstractmethod
    def _proposal_variance(self, s: Tensor, t: Tensor, coefficients: Coefficients) -> Tensor:
        """Denoising variance of the proposal, (rows, 1 or coordinates)."""

    def _correction(self, x_s: Tensor, x_t: Tensor, s: Tensor, t: Tensor) -> Tensor | None:
        """Added to every log-ratio; zero unless a reference process is used."""
        return None

    def drift(
        self, x: Tensor, t: Tensor, predictions: tuple[Tensor, ...], guidance: Tensor | None, coefficients: Coefficients
    ) -> Tensor:
        """`S = sum_j c'_j score_j + guidance`."""
        total = sum(coefficients.proposal)
        first, *others = predictions
        mixed = (
            first - x if coefficients.proposal == (1.0,) else (first * coefficients.proposal[0]).sub_(x, alpha=total)
        )
        for c, prediction in zip(coefficients.proposal[1:], others, strict=True):
            mixed = mixed.add_(prediction, alpha=c)
        s = mixed.mul_(rows_like(1 / (t * t), x).to(x.dtype))
        return s if guidance is None else s.add_(guidance)

    def step(
        self,
        x: Shaped[Tensor, "rows *event"],
        seen: Evaluation,
        s: Float[Tensor, " rows"],
        t: Float[Tensor, " rows"],
        up: Bool[Tensor, " rows"],
        stream: Stream,
        coefficients: Coefficients,
    ) -> Shaped[Tensor, "rows *event"]:
        """One draw serves both directions: only the gain and the variance differ between rows."""
        out = torch.empty_like(x)
        size = block_rows(x)
        for rows in (slice(i, i + size) for i in range(0, len(x), size)):
            s_, t_, rises = s[rows], t[rows], up[rows, None]
            gain = torch.where(
                rises,
                coefficients.k_up * self.noising_variance(s_, t_),
                coefficients.k_down * self.denoising_gain(s_, t_),
            )
            variance = torch.where(rises, self.noising_variance(s_, t_), self._proposal_variance(s_, t_, coefficients))
            noise = self.scaled_noise(stream, x[rows], variance, rows.start)
            push = rows_like(gain[:, 0], x).to(x.dtype)
            torch.add(noise.addcmul_(push, self.project(seen.drift[rows])), x[rows], out=out[rows])
        return out

    def kernel_ratios(
        self,
        x_s: Shaped[Tensor, "rows *event"],
        x_t: Shaped[Tensor, "rows *event"],
        at_s: Evaluation,
        at_t: Evaluation,
        s: Float[Tensor, " rows"],
        t: Float[Tensor, " rows"],
        coefficients: Coefficients,
    ) -> tuple[Float[Tensor, "models rows"], Float[Tensor, " rows"]]:
        n = self.dimension(x_s.shape[1:])
        up, down = self.noising_variance(s, t), self.denoising_gain(s, t)
        gap = self.coordinates(x_t - x_s)
        noising = _quadratic(gap, up)
        variances = self._variances(s, t, len(at_t.predictions))
        models = []
        for prediction, v in zip(at_t.predictions, variances, strict=True):
            pull = self.coordinates(prediction - x_t) * (down / (t * t)[:, None]).to(x_s.dtype)
            models.append(_ratio(noising, pull.add_(gap), v, up, n))
        v = self._proposal_variance(s, t, coefficients)
        if coefficients.k_up:
            push = self.coordinates(at_s.drift) * (-coefficients.k_up * up).to(x_s.dtype)
            noising = _quadratic(push.add_(gap), up)
        pull = self.coordinates(at_t.drift) * (coefficients.k_down * down).to(x_s.dtype)
        proposal = _ratio(noising, pull.add_(gap), v, up, n)
        correction = self._correction(x_s, x_t, s, t)
        if correction is not None:
            return torch.stack(models) + correction, proposal + correction
        return torch.stack(models), proposal

    def expectation(self, x: Tensor, t: Tensor, predictions: tuple[Tensor, ...], coefficients: Coefficients) -> Tensor:
        """`sum_j c_j D_j / C`: the prediction that belongs to the combined score at unit temperature."""
        mixed = predictions[0] * (coefficients.target[0] / coefficients.total)
        for c, prediction in zip(coefficients.target[1:], predictions[1:], strict=True):
            mixed = mixed + prediction * (c / coefficients.total)
        return mixed

    def noise(self, stream: Stream, like: Tensor, t: float, coefficients: Coefficients) -> Tensor:
        """`N(mu, 1 / sum_j c_j I_j)`, which is `N(0, t^2 / C)` where the models' scale is not known."""
        precision, mean = self._top(torch.tensor([t], dtype=torch.float64), coefficients)
        noise = self.scaled_noise(stream, like, (1 / precision).expand(len(like), -1))
        return noise + self.embed(mean.to(like).expand(len(like), -1), like) if mean is not None else noise

    def _top(self, t: Tensor, coefficients: Coefficients) -> tuple[Tensor, Tensor | None]:
        return coefficients.total / (t * t)[:, None], None


def _quadratic(z: Tensor, variance: Tensor) -> Tensor:
    """`sum_i z_i^2 / v_i` in float64, for (rows, 1) or (rows, coordinates) variances."""
    if variance.shape[1] == 1:
        return torch.linalg.vector_norm(z, dim=1).to(torch.float64).square() / variance[:, 0]
    return (z * z / variance.to(z.dtype)).sum(1, dtype=torch.float64)


def _ratio(noising: Tensor, residual: Tensor, variance: Tensor, up: Tensor, n: int) -> Tensor:
    """log N(residual; 0, variance) - log N(gap; 0, up), where `noising` is the quadratic form of the gap."""
    log_scale = (variance / up).log()
    log_det = n * log_scale[:, 0] if log_scale.shape[1] == 1 else log_scale.sum(1)
    return 0.5 * (noising - _quadratic(residual, variance) - log_det)


@dataclass(frozen=True)
class Gaussian(GaussianProcess):
    """Exact noising with the Fisher variance on the way down: the default for Gaussian diffusions.

    `variance` is `"fisher"` (measured before the run, isotropic), `"fisher-diagonal"` (one per coordinate), or a
    number `rho`: the information of Gaussian data of that scale (0: DDPM posterior, inf: `v = d`).

    >>> Gaussian(variance=1.0).needs_fit(), Gaussian().needs_fit()
    (False, True)
    """

    variance: str | float = "fisher"
    information: FisherTable | GaussianData | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.variance, str):
            if self.variance not in ("fisher", "fisher-diagonal"):
                raise InputError(f'variance must be "fisher", "fisher-diagonal" or a scale rho, got {self.variance!r}')
            if self.variance == "fisher-diagonal" and self.zero_mean is not None:
                raise InputError("a diagonal variance on a zero-mean subspace needs a basis of it, not zero_mean")
        else:
            object.__setattr__(self, "information", GaussianData(float(self.variance)))

    def needs_fit(self) -> bool:
        return self.information is None

    def fitted(self, table: FisherTable) -> Gaussian:
        """The same process with measured information."""
        return replace(self, information=table)

    @property
    def is_diagonal(self) -> bool:
        return self.variance == "fisher-diagonal"

    def pull_back(self, g: Tensor, t: Tensor, coefficients: Coefficients) -> Tensor:
        """The Jacobian's mean over the data is `1 - t^2 I_t`, which the Fisher information gives for free."""
        c = torch.tensor(coefficients.target, dtype=t.dtype, device=t.device)[:, None, None] / coefficients.total
        mean = (1 - (c * self._scaled(t, len(coefficients.target))).sum(0)).clamp(0, 1).to(g.dtype)
        return g * rows_like(mean[:, 0], g) if mean.shape[1] == 1 else self.embed(self._in(g) * mean, g)

    def posterior_variance(self, t: Tensor, event: tuple[int, ...]) -> Tensor:
        """`E Var[x_0 | x_t]` of each coordinate under the first model, `t^2 (1 - t^2 I_t)`, (times, *event)."""
        v = (t * t)[:, None] * (1 - self._scaled(t, 1)[0]).clamp(0, 1)
        v = v.expand(-1, self.dimension(torch.Size(event)) if self.zero_mean is None else math.prod(event))
        if self.basis is not None:
            v = (v.reshape(-1, len(self.basis)) @ self.basis.to(v).square()).reshape(len(t), -1)
        if self.zero_mean is not None:
            v = v * (1 - 1 / event[self.zero_mean])
        return v.reshape(len(t), *event)

    def _scaled(self, t: Tensor, n_models: int) -> Tensor:
        if self.information is None:
            raise InputError("the Fisher variance has not been measured yet: samplers do so, or call fit_information")
        return self.information.scaled(t).expand(n_models, -1, -1)

    def noising_variance(self, s: Tensor, t: Tensor) -> Tensor:
        return ((t - s) * (t + s))[:, None]

    def denoising_gain(self, s: Tensor, t: Tensor) -> Tensor:
        return ((t - s) * (t + s))[:, None]

    def _variances(self, s: Tensor, t: Tensor, n_models: int) -> Tensor:
        d, share = self.noising_variance(s, t), ((t - s) * (t + s) / (t * t))[:, None]
        return d * (1 - share * self._scaled(t, n_models))

    def _proposal_variance(self, s: Tensor, t: Tensor, coefficients: Coefficients) -> Tensor:
        # Reversing the upward kernel under pi gives the curvature (1 - 2 k_up) sum_j c_j I_j; no law that was
        # noised by t has more than 1/t^2 of it, which keeps the variance positive for any exponents.
        c = torch.tensor(coefficients.target, dtype=t.dtype, device=t.device)[:, None, None]
        scaled = ((1 - 2 * coefficients.k_up) * (c * self._scaled(t, len(coefficients.target))).sum(0)).clamp(0, 1)
        d, share = self.noising_variance(s, t), ((t - s) * (t + s) / (t * t))[:, None]
        return d * (1 - share * scaled)

    def _top(self, t: Tensor, coefficients: Coefficients) -> tuple[Tensor, Tensor | None]:
        if not isinstance(self.information, FisherTable):
            return super()._top(t, coefficients)
        c = torch.tensor(coefficients.target, dtype=t.dtype)[:, None]
        information = c * self.information.scaled(t)[:, 0] / (t * t)
        precision = information.sum(0, keepdim=True)
        if (precision <= 0).any():
            return super()._top(t, coefficients)
        return precision, (information * self.information.mean.to(t)).sum(0, keepdim=True) / precision


@dataclass(frozen=True)
class EulerMaruyama(GaussianProcess):
    """The paper's pair: drift and noise of `dx = sqrt(2 t) dW` frozen at the start of each step.

    `reference` is the scale of Gaussian data whose exact log-density replaces the discretised one in every ratio
    (He et al. 2025). It adds the same number to each `L_j` and to `L_Q`, so it changes nothing where the exponents
    sum to one.
    """

    reference: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference is not None and not self.reference >= 0:
            raise InputError(f"reference must be a scale >= 0 or None, got {self.reference!r}")

    def noising_variance(self, s: Tensor, t: Tensor) -> Tensor:
        return (2 * s * (t - s))[:, None]

    def denoising_gain(self, s: Tensor, t: Tensor) -> Tensor:
        return (2 * t * (t - s))[:, None]

    def _variances(self, s: Tensor, t: Tensor, n_models: int) -> Tensor:
        return self.denoising_gain(s, t).expand(n_models, -1, -1)

    def _proposal_variance(self, s: Tensor, t: Tensor, coefficients: Coefficients) -> Tensor:
        return self.denoising_gain(s, t)

    def _correction(self, x_s: Tensor, x_t: Tensor, s: Tensor, t: Tensor) -> Tensor | None:
        if self.reference is None:
            return None
        n = self.dimension(x_s.shape[1:])
        up, down = self.noising_variance(s, t), self.denoising_gain(s, t)
        var_s, var_t = (s * s + self.reference**2)[:, None], (t * t + self.reference**2)[:, None]
        y_s, y_t = self.coordinates(x_s), self.coordinates(x_t)
        gap = y_t - y_s
        discretised = _ratio(_quadratic(gap, up), gap - (down / var_t).to(gap.dtype) * y_t, down, up, n)
        exact = _ratio(_quadratic(y_t, var_t), y_s, var_s, var_t, n)
        return exact - discretised
