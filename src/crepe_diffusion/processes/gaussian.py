"""Gaussian diffusions in the variance-exploding coordinate, `y_t = x_0 + t * eps`, with `d = t^2 - s^2`.

    noising     F   = N(y_s, d)                                   exact
    denoising   B_j = N(y_t + d * score_j(y_t), d - d^2 I_j,t)    mean exact, variance optimal (Fisher)
    proposal    up    N(y_s + k_up   * d * S(y_s), d)
                down  N(y_t + k_down * d * S(y_t), d - d^2 I_Q,t)

`I_j,t` is the Fisher information of model j under its own marginal: one number, one per coordinate, or a matrix
(`information.py`). The paper's Euler-Maruyama pair has variances `2 s (t - s)` up and `2 t (t - s)` down instead of
one `d` for both.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from crepe_diffusion.batches import blocks, rows_like
from crepe_diffusion.devices import real, resident
from crepe_diffusion.errors import InputError
from crepe_diffusion.processes.base import Coefficients, Evaluation, Process
from crepe_diffusion.processes.information import (
    Adaptive,
    FisherTable,
    GaussianData,
    Information,
    Isotropic,
    Measured,
    Spectrum,
)
from crepe_diffusion.random import Stream

__all__ = ["EulerMaruyama", "Gaussian", "GaussianProcess", "score_of"]

G = TypeVar("G", bound="GaussianProcess")
K = TypeVar("K", bound="Gaussian")


def score_of(prediction: Tensor, y: Tensor, t: Tensor) -> Tensor:
    """`(D(y, t) - y) / t^2`, the score of the marginal at noise t (Tweedie)."""
    return (prediction - y) / rows_like(t * t, y).to(y.dtype)


@dataclass(frozen=True)
class GaussianProcess(Process):
    """Shared by the two discretisations; events of any shape, in their own coordinates or a given basis.

    - `basis`: orthonormal rows (k, n) over the flattened event, in which the variance is diagonal. Fewer rows
      than coordinates restrict the process to their span. An event of several times n entries is cut into pieces of n
      that each use it.
    - `zero_mean`: an axis of the event (0-based) whose mean is always zero, such as the atoms of a molecule.
    - `mask`: booleans of the shape of the event, False where an event is padded. These entries are zero always, are not
      drawn and not counted, whatever the models say of them.
    """

    basis: Tensor | None = None
    zero_mean: int | None = None
    mask: Tensor | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.mask is not None:
            if self.mask.dtype != torch.bool or not bool(self.mask.any()):
                raise InputError(f"mask must hold booleans, True for what is no padding, got {self.mask!r}")
            if self.basis is not None:
                raise InputError("give either basis or mask: rows of a basis that are zero on the padding do the same")
        if self.basis is None:
            return
        b = self.basis
        if b.ndim != 2 or b.shape[0] > b.shape[1]:
            raise InputError(f"basis must be (k, n) with k <= n orthonormal rows, got shape {tuple(b.shape)}")
        error = (b @ b.T - torch.eye(len(b), dtype=b.dtype, device=b.device)).abs().max().item()
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
        if self.mask is not None and self.mask.shape != event:
            raise InputError(f"mask needs the shape of the event {tuple(event)}, got {tuple(self.mask.shape)}")

    def check_times(self, times: Tensor) -> None:
        if float(times[0]) <= 0:
            raise InputError("a Gaussian ladder must end above sigma = 0; samples are finished below level 0")

    # -- coordinates -------------------------------------------------------------------------------------

    def project(self, z: Tensor) -> Tensor:
        """The part of z inside the subspace on which the process lives."""
        if self.mask is not None:
            z = z.where(resident(self.mask, z.device), 0.0)
        if self.zero_mean is not None:
            return self._centred(z, self.zero_mean + 1)
        if self.basis is not None and self.basis.shape[0] < self.basis.shape[1]:
            return self.embed(self._in(z), z)
        return z

    def _centred(self, z: Tensor, axis: int) -> Tensor:
        """Without the mean along this axis, of what is no padding."""
        if self.mask is None:
            return z - z.mean(dim=axis, keepdim=True)
        real_ones = resident(self.mask, z.device, z.dtype)
        return z - real_ones * (z.sum(axis, keepdim=True) / real_ones.sum(axis - 1, keepdim=True).clamp(min=1))

    def dimension(self, event: torch.Size) -> int:
        """How many coordinates are free."""
        n = self.n_coordinates(event)
        if self.zero_mean is None:
            return n
        mask = torch.ones(event, dtype=torch.bool) if self.mask is None else self.mask
        return n - int(mask.any(self.zero_mean).sum())

    def n_coordinates(self, event: torch.Size) -> int:
        """How many coordinates a state has: in the basis, or those of the event that are no padding."""
        if self.mask is not None:
            return int(self.mask.sum())
        n = math.prod(event)
        return n if self.basis is None else n // self.basis.shape[1] * len(self.basis)

    def coordinates(self, z: Tensor) -> Tensor:
        """The coordinates of `project(z)`, (rows, coordinates): in the basis, or else the flattened event."""
        return self._in(self.project(z))

    @cached_property
    def _places(self) -> Tensor:
        """Where the flattened event is no padding."""
        assert self.mask is not None
        return self.mask.flatten().nonzero()[:, 0]

    def _in(self, z: Tensor) -> Tensor:
        if self.mask is not None:
            return z.flatten(1).index_select(1, resident(self._places, z.device))
        if self.basis is None:
            return z.flatten(1)
        basis = resident(self.basis, z.device, z.dtype)
        return (z.reshape(-1, basis.shape[1]) @ basis.T).reshape(len(z), -1)

    def embed(self, flat: Tensor, like: Tensor) -> Tensor:
        """The states with these coordinates, of the shape of `like`."""
        if self.mask is not None:
            flat_event = torch.zeros(len(flat), self.mask.numel(), dtype=flat.dtype, device=flat.device)
            return flat_event.index_copy_(1, resident(self._places, flat.device), flat).reshape(like.shape)
        if self.basis is None:
            return flat.reshape(like.shape)
        basis = resident(self.basis, flat.device, flat.dtype)
        return (flat.reshape(-1, len(basis)) @ basis).reshape(like.shape)

    def scaled_noise(self, stream: Stream, like: Tensor, variance: Tensor | Spectrum, first_row: int = 0) -> Tensor:
        """Centred noise inside the subspace; its variance is (rows, 1), (rows, coordinates) or a matrix per row."""
        spectrum = variance if isinstance(variance, Spectrum) else Spectrum(variance)
        n = self.n_coordinates(like.shape[1:])
        z = stream.normal((len(like), n), first_row=first_row, dtype=like.dtype, device=like.device)
        z = self.embed(spectrum.out_of(z.mul_(spectrum.values.sqrt().to(like.dtype))), like)
        return self.project(z) if self.zero_mean is not None else z

    # -- the kernels -------------------------------------------------------------------------------------

    def schedule(self, s: Tensor, t: Tensor, coefficients: Coefficients) -> Schedule:
        """Variances and gains of the steps between these times.

        A step and its ratio have the same times, so the last ones are remembered, by the identity of the tensors.
        """
        for name in ("_whole", "_part"):
            last = self.__dict__.get(name)
            if last is not None and last.s is s and last.t is t and last.coefficients == coefficients:
                return last
        return self._remember("_whole", Schedule(self, s, t, coefficients))

    def ends(
        self, times: Tensor, index: Tensor, direction: Tensor, coefficients: Coefficients
    ) -> tuple[Tensor, Tensor]:
        table = self._table(times, coefficients)
        if table is None:
            return super().ends(times, index, direction, coefficients)
        # Steps come first in the table, then the times of rows that stay.
        step = torch.where(direction == 0, index + (times.shape[0] - 1), index + direction.clamp(max=0))
        many = len(step) * table.proposal.values.shape[1] > MOST_PICKED
        # Of many variances, those of one block of rows are picked at a time.
        at = self._remember("_whole", Picked(table, step) if many else table.rows(step))
        return at.s, at.t

    def some(self, s: Tensor, t: Tensor, rows: Tensor | slice, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
        if isinstance(rows, slice) and rows.indices(len(s))[:2] == (0, len(s)):
            return s, t
        part = self._remember("_part", self.schedule(s, t, coefficients).rows(rows))
        return part.s, part.t

    def _remember(self, name: str, schedule: Schedule) -> Schedule:
        self.__dict__[name] = schedule
        return schedule

    def _table(self, times: Tensor, coefficients: Coefficients) -> Schedule | None:
        """The schedule of all steps of a ladder, computed once; None where its variances would fill the memory."""
        kept = self.__dict__.get("_ladder")
        if kept is None or kept[0] is not times or kept[1] != coefficients:
            first = self.proposal_variance(times[:1], times[1:2], coefficients)
            n_values = 2 * len(times) * first.values.shape[1] * (1 + len(coefficients.target))
            table = None
            if first.vectors is None and n_values <= MOST_KEPT:
                table = Schedule(self, torch.cat([times[:-1], times]), torch.cat([times[1:], times]), coefficients)
                for name in KNOWN:
                    getattr(table, name)
            kept = self.__dict__["_ladder"] = (times, coefficients, table)
        return kept[2]

    @abstractmethod
    def noising_variance(self, s: Tensor, t: Tensor) -> Tensor:
        """Variance of a noising step, which is also its gain, (rows, 1)."""

    @abstractmethod
    def denoising_gain(self, s: Tensor, t: Tensor) -> Tensor:
        """Gain of a denoising step, (rows, 1)."""

    @abstractmethod
    def model_variance(self, model: int, s: Tensor, t: Tensor) -> Spectrum:
        """Variance of a denoising step of this model."""

    @abstractmethod
    def proposal_variance(self, s: Tensor, t: Tensor, coefficients: Coefficients) -> Spectrum:
        """Variance of a denoising step of the proposal."""

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
        s = mixed.mul_(rows_like((t * t).reciprocal(), x).to(x.dtype))
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
        for rows in blocks(x):
            at, rises = self.schedule(*self.some(s, t, rows, coefficients), coefficients), up[rows, None]
            gain = torch.where(rises, coefficients.k_up * at.noising, coefficients.k_down * at.gain)
            variance = at.proposal.with_values(torch.where(rises, at.noising, at.proposal.values))
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
        n, at = self.dimension(x_s.shape[1:]), self.schedule(s, t, coefficients)
        up, pull_gain = at.noising, at.pull.to(x_s.dtype)
        gap = self.coordinates(x_t - x_s)
        noising = _quadratic(gap, up)
        models = []
        for prediction, variance, log_scale in zip(at_t.predictions, at.models, at.log_scales, strict=False):
            pull = self.coordinates(prediction - x_t) * pull_gain
            models.append(_ratio(noising, pull.add_(gap), variance, log_scale, n))
        if coefficients.k_up:
            push = self.coordinates(at_s.drift) * (-coefficients.k_up * up).to(x_s.dtype)
            noising = _quadratic(push.add_(gap), up)
        pull = self.coordinates(at_t.drift) * (coefficients.k_down * at.gain).to(x_s.dtype)
        proposal = _ratio(noising, pull.add_(gap), at.proposal, at.log_scales[-1], n)
        correction = self._correction(x_s, x_t, s, t)
        if correction is not None:
            return torch.stack(models) + correction, proposal + correction
        return torch.stack(models), proposal

    def expectation(self, x: Tensor, t: Tensor, predictions: tuple[Tensor, ...], coefficients: Coefficients) -> Tensor:
        """`sum_j c_j D_j / C`: the prediction that belongs to the combined score at unit temperature."""
        mixed = predictions[0] * (coefficients.target[0] / coefficients.total)
        for c, prediction in zip(coefficients.target[1:], predictions[1:], strict=True):
            mixed = mixed + prediction * (c / coefficients.total)
        return mixed if self.mask is None else mixed.where(resident(self.mask, mixed.device), 0.0)

    def noise(self, stream: Stream, like: Tensor, t: float, coefficients: Coefficients) -> Tensor:
        """`N(mu, 1 / sum_j c_j I_j)`, which is `N(0, t^2 / C)` where the models' scale is not known."""
        key = (t, coefficients, like.device)
        kept = self.__dict__.get("_noise_end")
        if kept is None or kept[0] != key:
            time = torch.full((1,), t, dtype=real(like.device), device=like.device)
            kept = self.__dict__["_noise_end"] = (key, self._top(time, coefficients))
        precision, mean = kept[1]
        noise = self.scaled_noise(stream, like, precision.with_values(1 / precision.values).expand(len(like)))
        return noise + self.embed(mean.to(like).expand(len(like), -1), like) if mean is not None else noise

    def _top(self, t: Tensor, coefficients: Coefficients) -> tuple[Spectrum, Tensor | None]:
        """Precision of the noise end, and its mean (1, coordinates) where that is not zero."""
        return Spectrum(coefficients.total / (t * t)[:, None]), None

    def density_ratios(self, x: Tensor, y: Tensor, at_x: Evaluation, at_y: Evaluation, t: Tensor) -> Tensor:
        """The trapezoid rule along the line from x to y, `(score_j(x) + score_j(y)) / 2 . (y - x)`.

        Exact for Gaussian data; otherwise its error is of third order in `y - x`.
        """
        gap, middle = self.project(y - x).flatten(1), (x + y) / 2
        force = [(p + q) / 2 - middle for p, q in zip(at_x.predictions, at_y.predictions, strict=True)]
        return torch.stack([(f.flatten(1) * gap).sum(1, dtype=t.dtype) / (t * t) for f in force])

    def repeated(self: G, n: int) -> G:
        one = super().repeated(n)
        axis = None if self.zero_mean is None else self.zero_mean + 1
        mask = None if self.mask is None else self.mask.expand(n, *self.mask.shape).clone()
        return one if axis is None and mask is None else replace(one, zero_mean=axis, mask=mask)


def _quadratic(z: Tensor, variance: Tensor) -> Tensor:
    """`sum_i z_i^2 / v_i` in the variance's float64, for (rows, 1) or (rows, coordinates) variances."""
    if variance.shape[1] == 1:
        return _sum_squares(z, variance.dtype) / variance[:, 0]
    return (z * z / variance.to(z.dtype)).sum(1, dtype=variance.dtype)


PIECE = 1024
"""Squares are summed in the state's own precision over this many coordinates, and beyond that in float64."""


def _sum_squares(z: Tensor, dtype: torch.dtype) -> Tensor:
    """`sum_i z_i^2`. In float32 alone, a sum of n squares is off by n/10^7, which is a whole unit for a large image."""
    whole = z.shape[1] // PIECE * PIECE
    if z.shape[1] <= PIECE or z.dtype == dtype:
        return torch.linalg.vector_norm(z, dim=1).to(dtype).square()
    pieces = torch.linalg.vector_norm(z[:, :whole].unflatten(1, (-1, PIECE)), dim=2)
    rest = torch.linalg.vector_norm(z[:, whole:], dim=1)
    return pieces.to(dtype).square().sum(1) + rest.to(dtype).square()


def _ratio(noising: Tensor, residual: Tensor, variance: Spectrum, log_scale: Tensor, n: int) -> Tensor:
    """log N(residual; 0, variance) - log N(gap; 0, up), where `noising` is the quadratic form of the gap.

    `log_scale` is the sum of `log(variance / up)` over the numbers that the variance has.
    """
    log_det = n * log_scale if variance.values.shape[1] == 1 else log_scale
    return 0.5 * (noising - _quadratic(variance.into(residual), variance.values) - log_det)


KNOWN = ("noising", "gain", "pull", "proposal", "models", "log_scales")
MOST_KEPT = 2**21
"""Variances of all steps of a ladder are kept up to this many numbers, 16 MB."""
MOST_PICKED = 2**18
"""They are picked for all rows at once up to this many numbers."""


class Schedule:
    """What the kernels of a step need to know of its times, one row per step; computed when it is first needed."""

    def __init__(self, process: GaussianProcess, s: Tensor, t: Tensor, coefficients: Coefficients):
        self.process, self.s, self.t, self.coefficients = process, s, t, coefficients

    @cached_property
    def noising(self) -> Tensor:
        return self.process.noising_variance(self.s, self.t)

    @cached_property
    def gain(self) -> Tensor:
        return self.process.denoising_gain(self.s, self.t)

    @cached_property
    def pull(self) -> Tensor:
        """The gain on `D - x` in place of the score."""
        return self.gain / (self.t * self.t)[:, None]

    @cached_property
    def proposal(self) -> Spectrum:
        return self.process.proposal_variance(self.s, self.t, self.coefficients)

    @cached_property
    def models(self) -> tuple[Spectrum, ...]:
        return tuple(self.process.model_variance(j, self.s, self.t) for j in range(len(self.coefficients.target)))

    @cached_property
    def log_scales(self) -> tuple[Tensor, ...]:
        """`log(variance / noising)` of the models, then of the proposal, summed over the numbers of each row."""
        return tuple((v.values / self.noising).log().sum(1) for v in (*self.models, self.proposal))

    def rows(self, index: Tensor | slice) -> Schedule:
        """The same for some rows, with all that is known already."""
        part = Schedule(self.process, _picked(self.s, index), _picked(self.t, index), self.coefficients)
        for name in KNOWN:
            if name in self.__dict__:
                part.__dict__[name] = _rows(self.__dict__[name], index)
        return part


class Picked(Schedule):
    """Rows of a table that are picked when some of them are asked for."""

    def __init__(self, table: Schedule, index: Tensor):
        super().__init__(table.process, _picked(table.s, index), _picked(table.t, index), table.coefficients)
        self.table, self.index = table, index

    def rows(self, index: Tensor | slice) -> Schedule:
        return self.table.rows(self.index[index])


def _rows(known: Tensor | Spectrum | tuple[Tensor | Spectrum, ...], index: Tensor | slice) -> object:
    if isinstance(known, tuple):
        return tuple(_rows(k, index) for k in known)
    if isinstance(known, Spectrum):
        which = None if known.which is None else _picked(known.which, index)
        return Spectrum(_picked(known.values, index), known.vectors, which)
    return _picked(known, index)


def _picked(values: Tensor, index: Tensor | slice) -> Tensor:
    return values[index] if isinstance(index, slice) else values.index_select(0, index)


@dataclass(frozen=True)
class Gaussian(GaussianProcess):
    """Exact noising with the Fisher variance on the way down: the default for Gaussian diffusions.

    `variance` is measured before the run: `"auto"` (one per coordinate as far as they differ by more than the error of
    measuring them; on a zero-mean subspace the same for all), `"fisher"` (the same for all coordinates),
    `"fisher-diagonal"` (one per coordinate), or a subclass of `Measured` (any other form, such as a full matrix). Or it
    is a number `rho`: the information of Gaussian data of that scale (0: DDPM posterior, inf: `v = d`).
    `information` is what was measured, or any `Information` to use as it is.

    >>> Gaussian(variance=1.0).needs_fit(), Gaussian().needs_fit()
    (False, True)
    """

    variance: str | float | type[Measured] = "auto"
    information: Information | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.variance, (str, type)):
            object.__setattr__(self, "information", GaussianData(float(self.variance)))
            return
        named = self.variance in ("auto", "fisher", "fisher-diagonal")
        if not named and not (isinstance(self.variance, type) and issubclass(self.variance, Measured)):
            raise InputError(
                'variance must be "auto", "fisher", "fisher-diagonal", a subclass of Measured or a scale rho,'
                f" got {self.variance!r}"
            )
        if not self._kind.is_isotropic and self.zero_mean is not None:
            raise InputError("a diagonal variance on a zero-mean subspace needs a basis of it, not zero_mean")

    # -- what is measured --------------------------------------------------------------------------------

    @property
    def _kind(self) -> type[Measured]:
        if isinstance(self.variance, type):
            return self.variance
        if self.variance == "auto":
            return Adaptive if self.zero_mean is None else Isotropic
        return FisherTable if self.variance == "fisher-diagonal" else Isotropic

    def to_measure(self) -> type[Measured] | None:
        return self._kind if self.information is None else None

    def fitted(self: K, information: Information) -> K:
        return replace(self, information=information)

    def state_dict(self) -> dict[str, Tensor]:
        return {} if self.information is None else self.information.state_dict()

    def restored(self: K, state: dict[str, Tensor]) -> K:
        return self.fitted(self._kind.from_state_dict(state))

    def repeated(self: K, n: int) -> K:
        one = super().repeated(n)
        return one if self.information is None else replace(one, information=self.information.repeated(n))

    def _of(self, model: int, t: Tensor) -> Spectrum:
        if self.information is None:
            raise InputError("the Fisher information has not been measured yet: samplers measure it before they start")
        return self.information.of(model, t)

    def _total(self, t: Tensor, weights: Sequence[float]) -> Spectrum:
        return Spectrum.total([self._of(j, t) for j in range(len(weights))], weights)

    # -- what follows from it ----------------------------------------------------------------------------

    def pull_back(self, g: Tensor, t: Tensor, coefficients: Coefficients) -> Tensor:
        """The Jacobian's mean over the data is `1 - t^2 I_t`, which the Fisher information gives for free."""
        a = self._total(t, [c / coefficients.total for c in coefficients.target])
        mean = a.with_values((1 - a.values).clamp(0, 1))
        if mean.values.shape[1] == 1:
            return g * rows_like(mean.values[:, 0].to(g.dtype), g)
        return self.embed(mean.times(self._in(g)), g)

    def posterior_variance(self, t: Tensor, event: tuple[int, ...]) -> Tensor:
        """`E Var[x_0 | x_t]` of each coordinate under the first model, `t^2 (1 - t^2 I_t)`, (times, *event)."""
        a = self._of(0, t)
        v = (t * t)[:, None] * (1 - a.values)
        v = v.expand(-1, self.n_coordinates(torch.Size(event)))
        if a.vectors is not None:
            axes = a.vectors.mT if self.basis is None else a.vectors.mT @ self.basis.to(a.vectors)
            v = a.turned(v, axes.square())
        elif self.basis is not None:
            v = (v.reshape(-1, len(self.basis)) @ self.basis.to(v).square()).reshape(len(t), -1)
        if self.mask is not None:
            v = self.embed(v, v.new_empty(len(t), *event))
        if self.zero_mean is not None:
            mask = torch.ones(event, dtype=torch.bool) if self.mask is None else self.mask
            n_atoms = mask.sum(self.zero_mean, keepdim=True).clamp(min=1).to(v)
            v = v.reshape(len(t), *event) * (1 - 1 / n_atoms)
        return v.reshape(len(t), *event)

    def noising_variance(self, s: Tensor, t: Tensor) -> Tensor:
        return ((t - s) * (t + s))[:, None]

    def denoising_gain(self, s: Tensor, t: Tensor) -> Tensor:
        return ((t - s) * (t + s))[:, None]

    def _variance(self, s: Tensor, t: Tensor, a: Spectrum) -> Spectrum:
        """`d - d^2 I_t = d (1 - d/t^2 A)`."""
        d, share = self.noising_variance(s, t), ((t - s) * (t + s) / (t * t))[:, None]
        return a.with_values(d * (1 - share * a.values))

    def model_variance(self, model: int, s: Tensor, t: Tensor) -> Spectrum:
        return self._variance(s, t, self._of(model, t))

    def proposal_variance(self, s: Tensor, t: Tensor, coefficients: Coefficients) -> Spectrum:
        # Reversing the upward kernel under pi gives the curvature (1 - 2 k_up) sum_j c_j I_j; no law that was
        # noised by t has more than 1/t^2 of it, which keeps the variance positive for any exponents.
        a = self._total(t, coefficients.target)
        return self._variance(s, t, a.with_values(((1 - 2 * coefficients.k_up) * a.values).clamp(0, 1)))

    def _top(self, t: Tensor, coefficients: Coefficients) -> tuple[Spectrum, Tensor | None]:
        spectra = [self._of(j, t) for j in range(len(coefficients.target))]
        centres = [self.information.centre(j) for j in range(len(spectra))] if self.information is not None else []
        parts = [a.with_values(c * a.values / (t * t)) for c, a in zip(coefficients.target, spectra, strict=True)]
        precision = Spectrum.total(parts, [1.0] * len(parts))
        unknown, _ = super()._top(t, coefficients)
        if any(centre is None for centre in centres):
            return unknown, None
        pulls = [
            a.times(resident(centre, t.device, t.dtype)[None])
            for a, centre in zip(parts, centres, strict=True)
            if centre is not None
        ]
        mean = precision.out_of(precision.into(torch.stack(pulls).sum(0)) / precision.values)
        # A measured precision that is not positive is of no use; decided without looking, since that would wait.
        useful = (precision.values > 0).all()
        return precision.with_values(torch.where(useful, precision.values, unknown.values)), mean.where(useful, 0.0)


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

    def model_variance(self, model: int, s: Tensor, t: Tensor) -> Spectrum:
        return Spectrum(self.denoising_gain(s, t))

    def proposal_variance(self, s: Tensor, t: Tensor, coefficients: Coefficients) -> Spectrum:
        return Spectrum(self.denoising_gain(s, t))

    def _correction(self, x_s: Tensor, x_t: Tensor, s: Tensor, t: Tensor) -> Tensor | None:
        if self.reference is None:
            return None
        n = self.dimension(x_s.shape[1:])
        up, down = self.noising_variance(s, t), self.denoising_gain(s, t)
        var_s, var_t = (s * s + self.reference**2)[:, None], (t * t + self.reference**2)[:, None]
        y_s, y_t = self.coordinates(x_s), self.coordinates(x_t)
        gap = y_t - y_s
        residual = gap - (down / var_t).to(gap.dtype) * y_t
        discretised = _ratio(_quadratic(gap, up), residual, Spectrum(down), (down / up).log()[:, 0], n)
        exact = _ratio(_quadratic(y_t, var_t), y_s, Spectrum(var_s), (var_s / var_t).log()[:, 0], n)
        return exact - discretised
