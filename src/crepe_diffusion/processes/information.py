"""The Fisher information of the models, which decides how much noise a denoising step adds.

    A_j,t = t^2 I_j,t,    I_j,t = E[score_j score_j^T] under model j's own marginal      symmetric, 0 <= A <= 1

Every kernel is a function of A: noise is scaled by `sqrt(d (1 - d/t^2 A))`, densities need its inverse and its
determinant, the mean Jacobian of a denoiser is `1 - A`. So eigenvalues and eigenvectors are all that a process needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from crepe_diffusion.devices import resident
from crepe_diffusion.errors import InputError

__all__ = ["Adaptive", "FisherTable", "GaussianData", "Information", "Isotropic", "Measured", "Spectrum"]

M = TypeVar("M", bound="Measured")


@dataclass(frozen=True)
class Spectrum:
    """A symmetric matrix per row, by its eigenvalues `values`, (rows, 1 or coordinates).

    Without `vectors` it is diagonal in the coordinates of the process (one value: a multiple of the identity). Else
    `vectors` is (n, k, k) with eigenvectors as columns, and `which` (rows,) is the number of each row's matrix. Rows
    of more than k coordinates are cut into pieces of k that share the eigenvectors.

    >>> turned = Spectrum(torch.tensor([[1.0, 4.0]]), torch.tensor([[[0.6, -0.8], [0.8, 0.6]]]), torch.tensor([0]))
    >>> turned.times(torch.tensor([[0.6, 0.8]])).allclose(torch.tensor([[0.6, 0.8]]))
    True
    """

    values: Tensor
    vectors: Tensor | None = None
    which: Tensor | None = None

    def with_values(self, values: Tensor) -> Spectrum:
        """The matrix with the same eigenvectors and these eigenvalues."""
        return replace(self, values=values)

    def into(self, z: Tensor) -> Tensor:
        """z (rows, coordinates) in the eigenvectors' coordinates."""
        return z if self.vectors is None else self.turned(z, self.vectors)

    def out_of(self, z: Tensor) -> Tensor:
        """The inverse of `into`."""
        return z if self.vectors is None else self.turned(z, self.vectors.mT)

    def times(self, z: Tensor) -> Tensor:
        """The matrix of each row times its z."""
        return self.out_of(self.into(z) * self.values.to(z.dtype))

    def turned(self, z: Tensor, matrices: Tensor) -> Tensor:
        """Each piece of each row times the row's own matrix among `matrices`, (n, k, m)."""
        assert self.which is not None
        n, k, m = matrices.shape
        out = z.new_empty(len(z), z.shape[1] // k * m)
        for i in range(n):
            rows = (self.which == i).nonzero()[:, 0]
            out[rows] = (z[rows].reshape(-1, k) @ matrices[i].to(z)).reshape(len(rows), -1)
        return out

    def expand(self, n_rows: int) -> Spectrum:
        """One row's matrix for this many rows."""
        which = None if self.which is None else self.which.expand(n_rows)
        return Spectrum(self.values.expand(n_rows, -1), self.vectors, which)

    @staticmethod
    def total(spectra: Sequence[Spectrum], weights: Sequence[float]) -> Spectrum:
        """`sum_j w_j A_j`, of matrices that belong to the same rows."""
        first = spectra[0]
        if len(spectra) == 1:
            return first.with_values(weights[0] * first.values)
        values = torch.stack([w * a.values for w, a in zip(weights, spectra, strict=True)]).sum(0)
        if first.vectors is None or first.which is None:
            return first.with_values(values)
        any_row = first.which.new_empty(len(first.vectors))
        any_row[first.which] = torch.arange(len(first.which), device=first.which.device)
        k = first.vectors.shape[1]
        pieces = values.shape[1] // k
        dense = torch.zeros_like(first.vectors)
        for w, a in zip(weights, spectra, strict=True):
            assert a.vectors is not None
            dense = dense + w * (a.vectors * a.values[any_row, None, :k]) @ a.vectors.mT
        eigenvalues, vectors = torch.linalg.eigh(dense)
        return Spectrum(eigenvalues[first.which].repeat(1, pieces), vectors, first.which)


class Information(ABC):
    """`A_j,t` of every model, in the coordinates of the process."""

    @abstractmethod
    def of(self, model: int, t: Tensor) -> Spectrum:
        """A of this model at the time of each row, with eigenvalues between 0 and 1."""

    def centre(self, model: int) -> Tensor | None:
        """`E[x_0]` of this model, (coordinates,); None where it is not known."""
        return None

    def repeated(self, n: int) -> Information:
        """The information of n such events side by side."""
        return _Repeated(self, n)

    def state_dict(self) -> dict[str, Tensor]:
        """What was measured, as tensors; nothing where it was assumed."""
        return {}


@dataclass(frozen=True)
class _Repeated(Information):
    one: Information
    n: int

    def of(self, model: int, t: Tensor) -> Spectrum:
        a = self.one.of(model, t)
        return a if a.vectors is None and a.values.shape[1] == 1 else a.with_values(a.values.repeat(1, self.n))

    def centre(self, model: int) -> Tensor | None:
        centre = self.one.centre(model)
        return None if centre is None else centre.repeat(self.n)

    def state_dict(self) -> dict[str, Tensor]:
        return self.one.state_dict()


@dataclass(frozen=True)
class GaussianData(Information):
    """The information of data of scale `rho`: `I_t = 1 / (t^2 + rho^2)`.

    Exact for Gaussian data at any step size. `rho = 0` is the DDPM posterior variance, `rho = inf` gives `v = d`.
    """

    rho: float

    def __post_init__(self) -> None:
        if not self.rho >= 0:
            raise InputError(f"rho must be a scale >= 0 (0: DDPM, inf: v = d), got {self.rho!r}")

    def of(self, model: int, t: Tensor) -> Spectrum:
        return Spectrum((1 / (1 + (self.rho / t) ** 2)).reshape(-1, 1))

    def repeated(self, n: int) -> GaussianData:
        return self


@dataclass(frozen=True)
class Measured(Information):
    """Measured A on a grid of times, linear in log t between them; the base of every information that is fitted.

    `values` is (models, times, ...), each entry as `of_scores` returns it; `mean` (models, coordinates) is `E[x_0]`.
    A table of one model serves every model of a target.
    """

    times: Tensor
    values: Tensor
    mean: Tensor

    is_isotropic: ClassVar[bool] = False
    """Whether A is a multiple of the identity, as a process on a zero-mean subspace needs it."""

    @staticmethod
    @abstractmethod
    def of_scores(score: Tensor, t: float, dimension: int) -> Tensor:
        """`t^2 E[score score^T]` from the scores of samples at noise t, (samples, coordinates) in float64."""

    @staticmethod
    @abstractmethod
    def of_errors(error: Tensor, t: float, dimension: int) -> Tensor:
        """`1 - E[error error^T] / t^2` from the errors `x_0 - E[x_0 | x_t]` of predictions at noise t."""

    def interpolated(self, model: int, t: Tensor) -> Tensor:
        """The entry of this model at the time of each row, (rows, ...)."""
        values = resident(self.values, t.device, t.dtype)[model if len(self.values) > 1 else 0]
        if len(self.times) == 1:
            return values.expand(len(t), *values.shape[1:])
        grid, x = resident(self.times, t.device, t.dtype).log(), t.log()
        high = torch.searchsorted(grid, x).clamp(1, len(grid) - 1)
        weight = ((x - grid[high - 1]) / (grid[high] - grid[high - 1])).clamp(0, 1)
        return torch.lerp(values[high - 1], values[high], weight.reshape(-1, *(1,) * (values.ndim - 1)))

    def centre(self, model: int) -> Tensor:
        return self.mean[model if len(self.mean) > 1 else 0]

    def state_dict(self) -> dict[str, Tensor]:
        return {"times": self.times, "values": self.values, "mean": self.mean}

    @classmethod
    def from_state_dict(cls: type[M], state: dict[str, Tensor]) -> M:
        return cls(**state)


@dataclass(frozen=True)
class FisherTable(Measured):
    """One number per coordinate: `values` is (models, times, coordinates), or (models, times, 1) for all of them."""

    @staticmethod
    def of_scores(score: Tensor, t: float, dimension: int) -> Tensor:
        return (t * t * score.square().mean(0)).clamp(0, 1)

    @staticmethod
    def of_errors(error: Tensor, t: float, dimension: int) -> Tensor:
        return (1 - error.square().mean(0) / (t * t)).clamp(0, 1)

    def of(self, model: int, t: Tensor) -> Spectrum:
        return Spectrum(self.interpolated(model, t))

    def repeated(self, n: int) -> FisherTable:
        values = self.values if self.values.shape[2] == 1 else self.values.repeat(1, 1, n)
        return replace(self, values=values, mean=self.mean.repeat(1, n))


@dataclass(frozen=True)
class Isotropic(FisherTable):
    """One number for all coordinates: `values` is (models, times, 1)."""

    is_isotropic: ClassVar[bool] = True

    @staticmethod
    def of_scores(score: Tensor, t: float, dimension: int) -> Tensor:
        return (t * t * (score.square().sum(1).mean()[None] / dimension)).clamp(0, 1)

    @staticmethod
    def of_errors(error: Tensor, t: float, dimension: int) -> Tensor:
        return (1 - error.square().sum(1).mean()[None] / dimension / (t * t)).clamp(0, 1)


@dataclass(frozen=True)
class Adaptive(FisherTable):
    """One number per coordinate, drawn towards their mean by what chance alone explains of their differences.

    `A_i = mean + (1 - noise / spread) (a_i - mean)`, where `spread` is the variance of the measured `a_i` between
    coordinates and `noise` the mean variance of measuring one of them (James and Stein 1961, with its positive part).
    Equal scales give nearly one variance for all, stiff data one for each.

    >>> score = torch.tensor([[1.0, -3.0], [-1.0, 3.0], [1.0, 3.0]], dtype=torch.float64)
    >>> Adaptive.of_scores(score, t=0.3, dimension=2).tolist()       # no noise: each is what was measured
    [0.09, 0.81]
    """

    @staticmethod
    def of_scores(score: Tensor, t: float, dimension: int) -> Tensor:
        return _shrunk(t * t * score.square()).clamp(0, 1)

    @staticmethod
    def of_errors(error: Tensor, t: float, dimension: int) -> Tensor:
        return (1 - _shrunk(error.square()) / (t * t)).clamp(0, 1)


def _shrunk(squares: Tensor) -> Tensor:
    """Means of (samples, coordinates) drawn towards their common mean."""
    each = squares.mean(0)
    mean = each.mean()
    if len(each) == 1 or len(squares) < 2:
        return mean.expand_as(each)
    spread, noise = each.var(), (squares.var(0) / len(squares)).mean()
    share = (1 - noise / spread).clamp(0, 1).where(spread > 0, 0.0)
    return mean + share * (each - mean)
