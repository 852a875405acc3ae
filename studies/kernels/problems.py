"""Problems with known truth: mixtures in 1, 2 and 20 dimensions under every task of the package.

    pi_t(x)  ~  exp(r_t) prod_j p_j,t(x)^{c_j}  =  core_t(z) * prod_i N(y_i),        (z, y) = frame @ x

All modes live in one or two coordinates z, the core; in the others every model is one Gaussian. So quadrature over z
gives the law of a 20-dimensional target exactly, at the noise where the ladder ends, with nothing left to sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from crepe_diffusion.models import GaussianMixture
from crepe_diffusion.processes import Gaussian
from crepe_diffusion.proposals import Proposal
from crepe_diffusion.random import Stream
from crepe_diffusion.schedules import Ladder, ladder
from crepe_diffusion.targets import Target, guided

__all__ = ["SETTINGS", "TASKS", "Problem", "Setting", "log_density", "problems"]

See = Callable[[Tensor], Tensor]
Task = Callable[[GaussianMixture, GaussianMixture, GaussianMixture, See], Target]


@dataclass(frozen=True)
class Core:
    """A mixture in the coordinates that hold the modes, and the one Gaussian that it is in all others."""

    weights: list[float]
    means: list[list[float]]
    stds: list[list[float]]
    rest_mean: float = 0.0
    rest_scale: float = 1.0


@dataclass(frozen=True)
class Setting:
    """Where a problem lives: three models, the scales of the remaining coordinates, and a rotation.

    `p` is the model that is tempered, tilted and left as unconditional; `conditional` has its modes with other
    weights; `other` is what it is multiplied with.
    """

    name: str
    p: Core
    conditional: Core
    other: Core
    centres: list[list[float]]
    sigma_min: float
    sigma_max: float = 40.0
    rest: list[float] = field(default_factory=list)
    rotated: bool = False

    @property
    def n_core(self) -> int:
        return len(self.centres[0])

    @property
    def dimension(self) -> int:
        return self.n_core + len(self.rest)

    def frame(self) -> Tensor:
        """Orthonormal rows: the core's coordinates first."""
        if not self.rotated:
            return torch.eye(self.dimension, dtype=torch.float64)
        return torch.linalg.qr(Stream(20).at(self.name).normal((self.dimension, self.dimension)))[0].T

    def model(self, core: Core, dtype: torch.dtype) -> GaussianMixture:
        means = torch.tensor(core.means, dtype=torch.float64)
        stds = torch.tensor(core.stds, dtype=torch.float64)
        rest = core.rest_scale * torch.tensor(self.rest, dtype=torch.float64)
        means = torch.cat([means, torch.full((len(means), len(rest)), core.rest_mean, dtype=torch.float64)], 1)
        stds = torch.cat([stds, rest.expand(len(stds), -1)], 1)
        if self.rotated and not torch.allclose(stds, stds[:1, :1]):
            raise ValueError(f"{self.name}: only isotropic components may be rotated")
        return GaussianMixture(core.weights, means @ self.frame(), stds, dtype=dtype)

    def core_model(self, core: Core) -> GaussianMixture:
        return GaussianMixture(core.weights, core.means, torch.tensor(core.stds, dtype=torch.float64))


def reward(z: Tensor) -> Tensor:
    """Rises along the first axis and bends at 1; in two dimensions it also pulls towards 0.5 on the second."""
    r = 0.3 * z[:, 0] - 0.15 * (z[:, 0] - 1).abs()
    return r if z.shape[1] == 1 else r - 0.1 * (z[:, 1] - 0.5) ** 2


def tempering(p: GaussianMixture, conditional: GaussianMixture, other: GaussianMixture, see: See) -> Target:
    return p**2.0


def tilting(p: GaussianMixture, conditional: GaussianMixture, other: GaussianMixture, see: See) -> Target:
    return p.tilt(lambda x: reward(see(x)), guidance="gradient")


def composition(p: GaussianMixture, conditional: GaussianMixture, other: GaussianMixture, see: See) -> Target:
    return p * other


def guidance(p: GaussianMixture, conditional: GaussianMixture, other: GaussianMixture, see: See) -> Target:
    return guided(conditional, p, 2.0)


def tempered_tilting(p: GaussianMixture, conditional: GaussianMixture, other: GaussianMixture, see: See) -> Target:
    return (p**1.5).tilt(lambda x: reward(see(x)), guidance="gradient")


def tilted_guided_product(p: GaussianMixture, conditional: GaussianMixture, other: GaussianMixture, see: See) -> Target:
    return (guided(conditional, p, 1.5) * other).tilt(lambda x: reward(see(x)), guidance="gradient")


TASKS: tuple[Task, ...] = (tempering, tilting, composition, guidance, tempered_tilting, tilted_guided_product)


def _isotropic(std: float, n: int, modes: int) -> list[list[float]]:
    return [[std] * n] * modes


_LINE = [[-4.0], [0.5], [3.5]]
_PLANE = [[-3.0, -1.5], [0.5, 3.0], [3.0, -1.0]]
_PLANE_NEAR = [[-2.6, -1.2], [0.2, 2.5], [2.7, -1.3]]
# Eighteen scales from 0.05 to 1, in equal ratios.
_STIFF = [0.05 * 20 ** (i / 17) for i in range(18)]

SETTINGS: tuple[Setting, ...] = (
    Setting(
        "1d",
        p=Core([0.25, 0.45, 0.30], _LINE, [[0.5], [0.8], [0.4]]),
        conditional=Core([0.55, 0.25, 0.20], _LINE, [[0.45], [0.75], [0.4]]),
        other=Core([0.3, 0.3, 0.4], [[-3.6], [0.2], [3.2]], [[0.9], [1.0], [0.8]]),
        centres=_LINE,
        sigma_min=0.05,
    ),
    Setting(
        "1d-stiff",
        p=Core([0.30, 0.45, 0.25], _LINE, [[0.05], [1.0], [0.2]]),
        conditional=Core([0.55, 0.25, 0.20], _LINE, [[0.05], [0.9], [0.2]]),
        other=Core([0.4, 0.3, 0.3], [[-3.9], [0.2], [3.2]], [[0.2], [1.0], [0.4]]),
        centres=_LINE,
        sigma_min=0.02,
    ),
    Setting(
        "2d",
        p=Core([0.25, 0.35, 0.40], _PLANE, [[0.4] * 2, [0.6] * 2, [0.5] * 2]),
        conditional=Core([0.5, 0.3, 0.2], _PLANE, [[0.4] * 2, [0.55] * 2, [0.5] * 2]),
        other=Core([0.4, 0.35, 0.25], _PLANE_NEAR, [[0.8] * 2, [0.9] * 2, [0.7] * 2]),
        centres=_PLANE,
        sigma_min=0.05,
    ),
    Setting(
        "2d-stiff",
        p=Core([0.25, 0.35, 0.40], _PLANE, [[0.05, 1.0], [0.08, 0.8], [0.06, 0.9]]),
        conditional=Core([0.5, 0.3, 0.2], _PLANE, [[0.05, 1.0], [0.08, 0.7], [0.06, 0.9]]),
        other=Core([0.4, 0.35, 0.25], [[-2.9, -1.0], [0.4, 2.5], [2.95, -1.3]], [[0.12, 1.0], [0.1, 1.0], [0.1, 0.9]]),
        centres=_PLANE,
        sigma_min=0.02,
    ),
    Setting(
        "20d",
        p=Core([0.25, 0.35, 0.40], _PLANE, _isotropic(0.5, 2, 3), 0.2, 0.5),
        conditional=Core([0.5, 0.3, 0.2], _PLANE, _isotropic(0.45, 2, 3), 0.2, 0.45),
        other=Core([0.4, 0.35, 0.25], _PLANE_NEAR, _isotropic(0.8, 2, 3), 0.0, 0.8),
        centres=_PLANE,
        sigma_min=0.05,
        rest=[1.0] * 18,
        rotated=True,
    ),
    Setting(
        "20d-stiff",
        p=Core([0.25, 0.35, 0.40], _PLANE, [[0.3, 1.0], [0.35, 0.8], [0.3, 0.9]], 0.02),
        conditional=Core([0.5, 0.3, 0.2], _PLANE, [[0.3, 1.0], [0.35, 0.75], [0.3, 0.9]], 0.02, 0.9),
        other=Core([0.4, 0.35, 0.25], _PLANE_NEAR, [[0.5, 1.0], [0.5, 1.0], [0.5, 0.9]], 0.0, 1.2),
        centres=_PLANE,
        sigma_min=0.02,
        rest=_STIFF,
    ),
)  # fmt: skip


def log_density(target: Target, x: Tensor, t: float) -> Tensor:
    """The unnormalised log pi_t(x) at the data end, where rewards are at full strength."""
    at = torch.full((len(x),), t, dtype=torch.float64)
    predictions = tuple(m.predict(x, at) for m in target.models)
    expected = Gaussian(variance=0.0).expectation(x, at, predictions, Proposal().coefficients(target))
    models = sum(c * m.log_prob(x, t).to(torch.float64) for m, c in target.factors if isinstance(m, GaussianMixture))
    return models + sum((r.scale * r.function(expected).to(torch.float64) for r in target.rewards), torch.zeros(len(x)))


class Problem:
    """One task in one setting, with its truth at the noise `sigma_min` at which the ladder ends."""

    def __init__(self, setting: Setting, task: Task, dtype: torch.dtype = torch.float64):
        self.setting, self.task = setting, task
        self.name = f"{setting.name} {task.__name__.replace('_', ' ')}"
        self.frame = setting.frame()
        self.centres = torch.tensor(setting.centres, dtype=torch.float64)
        three = (setting.p, setting.conditional, setting.other)
        p, conditional, other = (setting.model(core, dtype) for core in three)
        self.target = task(p, conditional, other, self.core)
        p, conditional, other = (setting.core_model(core) for core in three)
        self.core_target = task(p, conditional, other, lambda z: z)

    def core(self, x: Tensor) -> Tensor:
        """The coordinates that hold the modes."""
        return x @ self.frame[: self.setting.n_core].T.to(x)

    def ladder(self, n_levels: int, substeps: int = 1) -> Ladder:
        return ladder.geometric(n_levels, self.setting.sigma_min, self.setting.sigma_max, substeps)

    def log_density(self, x: Tensor) -> Tensor:
        return log_density(self.target, x, self.setting.sigma_min)

    # -- truth -------------------------------------------------------------------------------------------

    @cached_property
    def _axes(self) -> tuple[Tensor, ...]:
        """Grid points of each core axis, out to seven standard deviations of every component.

        The sum over a grid is exact for smooth laws once the spacing is below their scale: five points to the
        narrowest component leave nothing to be seen. One dimension is free, and gets more.
        """
        axes = []
        for i in range(self.setting.n_core):
            lows, highs, narrowest = [], [], math.inf
            for model in self.core_target.models:
                assert isinstance(model, GaussianMixture)
                sd = (model.eigenvalues[:, i] + self.setting.sigma_min**2).sqrt()
                lows.append(float((model.means[:, i] - 7 * sd).min()))
                highs.append(float((model.means[:, i] + 7 * sd).max()))
                narrowest = min(narrowest, float(sd.min()))
            step = narrowest / (40 if self.setting.n_core == 1 else 5)
            axes.append(torch.arange(min(lows), max(highs), step, dtype=torch.float64))
        return tuple(axes)

    @cached_property
    def grid(self) -> tuple[Tensor, Tensor]:
        """Points of the core and their probabilities."""
        points = torch.cartesian_prod(*self._axes).reshape(-1, self.setting.n_core)
        parts = [log_density(self.core_target, part, self.setting.sigma_min) for part in points.split(200_000)]
        return points, torch.softmax(torch.cat(parts), 0)

    @cached_property
    def mode_truth(self) -> Tensor:
        points, mass = self.grid
        return _shares(self._nearest(points), len(self.centres), mass)

    @cached_property
    def _cells(self) -> tuple[Tensor, Tensor | None]:
        """Borders of cells of about equal probability: 30 on a line; 6 strips of 5 cells in a plane."""
        mass = self.grid[1].reshape([len(a) for a in self._axes])
        if mass.ndim == 1:
            return _borders(self._axes[0], mass, 30), None
        strips = _borders(self._axes[0], mass.sum(1), 6)
        strip = torch.searchsorted(strips, self._axes[0])
        return strips, torch.stack([_borders(self._axes[1], mass[strip == i].sum(0), 5) for i in range(6)])

    def cell(self, z: Tensor) -> Tensor:
        """The cell of each point of the core."""
        first, second = self._cells
        strip = torch.searchsorted(first, z[:, 0].contiguous().to(torch.float64))
        if second is None:
            return strip
        return 5 * strip + (z[:, 1:].to(torch.float64) > second[strip]).sum(1)

    @cached_property
    def cell_truth(self) -> Tensor:
        points, mass = self.grid
        return _shares(self.cell(points), 30, mass)

    @cached_property
    def rest_law(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the coordinates outside the core."""
        n, precision, pull = self.setting.n_core, torch.zeros(1), torch.zeros(1)
        for model, c in self.target.factors:
            assert isinstance(model, GaussianMixture)
            share = c / (model.eigenvalues[0, n:].to(torch.float64) + self.setting.sigma_min**2)
            mean = (model.means[0].to(torch.float64) @ self.frame.T)[n:]
            precision, pull = precision + share, pull + share * mean
        return pull / precision, precision.rsqrt()

    def exact(self, n: int, stream: Stream) -> Tensor:
        """Independent draws of the truth; in the core they are points of the quadrature grid."""
        points, mass = self.grid
        cumulative = mass.cumsum(0)
        index = torch.searchsorted(cumulative, stream.at("point").uniform((n,)) * cumulative[-1], right=True)
        mean, std = self.rest_law
        rest = mean + std * stream.at("rest").normal((n, len(self.setting.rest)))
        return torch.cat([points[index.clamp(max=len(points) - 1)], rest], 1) @ self.frame

    @cached_property
    def scales(self) -> Tensor:
        """Standard deviation of the truth along each row of the frame."""
        points, mass = self.grid
        mean = mass @ points
        return torch.cat([(mass @ (points - mean) ** 2).sqrt(), self.rest_law[1]])

    # -- how far samples are from it ---------------------------------------------------------------------

    def modes(self, x: Tensor) -> Tensor:
        """The mode nearest to each point, in the core."""
        return self._nearest(self.core(x).to(torch.float64))

    def _nearest(self, z: Tensor) -> Tensor:
        return torch.stack([(z - c).square().sum(1) for c in self.centres]).argmin(0)

    def mode_weights(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """The share of the samples nearest to each mode."""
        return _shares(self.modes(x), len(self.centres), weights)

    def mode_error(self, x: Tensor, weights: Tensor | None = None) -> float:
        """Total variation between the mode weights of samples and of the truth."""
        return float((self.mode_weights(x, weights) - self.mode_truth).abs().sum() / 2)

    def cell_weights(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        return _shares(self.cell(self.core(x)), len(self.cell_truth), weights)

    def per_chain(self, weights: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`mode_weights` or `cell_weights` of each chain of draws (draws, chains, dim), as (chains, weights)."""
        return torch.stack([weights(x[:, i]) for i in range(x.shape[1])])

    def total_variation(self, shares: Tensor) -> tuple[float, float]:
        """From the truth over the cells, given the shares of each chain; what exact chains this noisy would show."""
        noise = shares.std(0) / math.sqrt(len(shares))
        # The mean of |z| is sqrt(2 / pi) for a standard normal z.
        floor = float(noise.sum() / 2 * math.sqrt(2 / math.pi))
        return float((shares.mean(0) - self.cell_truth).abs().sum() / 2), floor

    def energy_distance(self, x: Tensor, stream: Stream, n: int = 4000) -> tuple[float, float]:
        """`2 E|X - Y| - E|X - X'| - E|Y - Y'|` of draws (draws, chains, dim) from the truth, with its error.

        In standardised coordinates. Draws are compared between chains only, so the value is unbiased and may be
        negative; the error is a jackknife over chains.
        """
        n_chains = x.shape[1]
        thin = max(1, x.shape[0] * n_chains // n)
        draws = self.standardised(x[::thin]).to(torch.float32)
        exact = self.standardised(self.exact(n, stream)).to(torch.float32)
        spread = torch.cdist(exact, exact).sum(dtype=torch.float64) / (n * (n - 1))
        across = torch.stack([torch.cdist(c, exact).mean(dtype=torch.float64) for c in draws.unbind(1)])
        chains = draws.transpose(0, 1).reshape(-1, draws.shape[-1])
        between = torch.cdist(chains, chains).reshape(n_chains, len(draws), n_chains, len(draws)).mean((1, 3)).double()
        between.fill_diagonal_(0)

        def distance(a: Tensor, b: Tensor) -> Tensor:
            return 2 * a.mean() - b.sum() / (len(b) * (len(b) - 1)) - spread

        keep = ~torch.eye(n_chains, dtype=torch.bool)
        left_out = torch.stack([distance(across[k], between[k][:, k]) for k in keep])
        error = ((n_chains - 1) * left_out.var(unbiased=False)).sqrt()
        return float(distance(across, between)), float(error)

    def standardised(self, x: Tensor) -> Tensor:
        """Coordinates of the frame in units of the truth's standard deviations."""
        return (x.to(torch.float64) @ self.frame.T) / self.scales


def _shares(index: Tensor, n: int, weights: Tensor | None) -> Tensor:
    mass = torch.ones(len(index)) if weights is None else weights
    return torch.bincount(index, mass.to(torch.float64), n) / mass.sum()


def _borders(axis: Tensor, mass: Tensor, n: int) -> Tensor:
    """`n - 1` borders half-way between grid points, where the cumulative probability passes i / n."""
    cumulative = mass.cumsum(0) / mass.sum()
    after = torch.searchsorted(cumulative, torch.arange(1, n, dtype=torch.float64) / n)
    return axis[after] + (axis[1] - axis[0]) / 2


def problems(dtype: torch.dtype = torch.float64) -> list[Problem]:
    """Every task in every setting."""
    return [Problem(setting, task, dtype) for setting in SETTINGS for task in TASKS]
