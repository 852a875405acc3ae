"""The battery: problems whose truth is known, for cost and calibration of every method.

    pi_0(x)  ~  exp(r_0(x)) prod_j p_j(x)^{c_j}        at the noise t_0 of level 0

A `Problem` has a target, a ladder, scalars `f` with their exact `E_pi[f]`, and `log Z_0 / Z_M` where it is known.
Truths are computed when they are read: whole powers of a mixture are mixtures again, in closed form; modes that live in
a plane need a sum over a grid, whatever the dimension; tables of tokens are summed.

    battery()       the public problems, on which methods may be tuned
    random(seed)    held-out problems of the same kinds: choose a seed that was not used before, and report all of them

>>> problem = tempering(16, beta=2)
>>> [(name, round(value, 4)) for name, value in problem.truths.items()][0]
('second mode', 0.4957)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor

from crepe_diffusion import InputError, Ladder, Proposal, Stream, Target, anneal, guided, ladder
from crepe_diffusion.models import GaussianMixture, TokenTable
from crepe_diffusion.processes import Masked
from studies.kernels import problems as kernels
from studies.minibatch import study as minibatch

__all__ = [
    "Problem",
    "Truth",
    "battery",
    "black_box",
    "from_kernels",
    "mini_batches",
    "posterior",
    "random",
    "rare_tilt",
    "tempering",
    "tokens",
]

Scalar = Callable[[Tensor], Tensor]
SIGMA = (0.02, 10.0)


@dataclass(frozen=True)
class Truth:
    """`E_pi[f]` and `Var_pi[f]` of each scalar at level 0, and `log Z_0 / Z_M` (None where it is not known)."""

    means: dict[str, float]
    variances: dict[str, float]
    log_z: float | None = None

    @staticmethod
    def of_states(states: Tensor, share: Tensor, scalars: dict[str, Scalar], log_z: float | None = None) -> Truth:
        """Sums over all states, or a grid of them, with their shares."""
        values = {name: f(states).to(torch.float64) for name, f in scalars.items()}
        means = {name: float(share @ v) for name, v in values.items()}
        variances = {name: float(share @ (v - means[name]).square()) for name, v in values.items()}
        return Truth(means, variances, log_z)


@dataclass(frozen=True)
class Problem:
    """A target with known answers.

    - `ladder(n_levels, substeps)`: levels between the problem's own ends; `steps` of them in all is what we recommend;
    - `scalars`: functions of samples `(rows, *event)`; `truths`, `variances`: of each under the target at level 0;
    - `log_z`: `log Z_0 / Z_M`, or None; `hard`: needs ten times the budget of the others.
    """

    name: str
    target: Target
    scalars: dict[str, Scalar]
    exact: Callable[[], Truth] = field(repr=False)
    steps: int = 64
    ends: tuple[float, float] = SIGMA
    spacing: str = "karras"
    proposal: Proposal = field(default_factory=Proposal)
    hard: bool = False

    def ladder(self, n_levels: int, substeps: int = 1) -> Ladder:
        low, high = self.ends
        if self.spacing == "linear":
            return ladder.linear(n_levels, low, high, substeps)
        if self.spacing == "geometric":
            return ladder.geometric(n_levels, low, high, substeps)
        return ladder.karras(n_levels, low, high, substeps=substeps)

    @property
    def walk_rows(self) -> int:
        """About how many network rows a particle needs from noise to data, by `steps`."""
        first = self.target.models[0]
        rows = self.steps + 1
        if isinstance(first, TokenTable):
            # Masked tokens change in turn. Ratios of uniform ones need about three rows per step, and one per change.
            masked = isinstance(first.process(), Masked)
            rows = first.length + 1 if masked else (1 + 3) * self.steps + first.length
        return len(self.target.models) * rows

    @cached_property
    def truth(self) -> Truth:
        return self.exact()

    @property
    def truths(self) -> dict[str, float]:
        return self.truth.means

    @property
    def variances(self) -> dict[str, float]:
        return self.truth.variances

    @property
    def log_z(self) -> float | None:
        return self.truth.log_z

    def log_density(self, x: Tensor) -> Tensor:
        """The unnormalised log pi_0 at the data end."""
        if isinstance(self.target.models[0], TokenTable):
            return sum((c * m.log_prob(x, self.ends[0]) for m, c in self.target.factors), torch.zeros(len(x)))  # type: ignore[attr-defined]
        return kernels.log_density(self.target, x, self.ends[0])


# -- whole powers of mixtures -------------------------------------------------------------------------------


def power(model: GaussianMixture, beta: int, t: float) -> tuple[Tensor, Tensor, Tensor]:
    """`p_t^beta` as a mixture: log of each term's integral, means and variances, (terms,) and (terms, dim).

    `prod_i N(x; m_i, v_i) = N(x; m, v) * exp(constant)` with `1/v = sum 1/v_i` and `m = v sum m_i / v_i`.
    """
    log_w, means, variances = [], [], []
    all_variances = model.eigenvalues + t * t
    for chosen in itertools.product(range(len(model.weights)), repeat=beta):
        k = list(chosen)
        m_i, v_i = model.means[k], all_variances[k]
        v = 1 / (1 / v_i).sum(0)
        m = v * (m_i / v_i).sum(0)
        quadratic = (m_i.square() / v_i).sum(0) - m.square() / v
        log_scale = (2 * math.pi * v).log() - (2 * math.pi * v_i).log().sum(0)
        log_w.append(model.weights[k].log().sum() + 0.5 * (log_scale - quadratic).sum())
        means.append(m)
        variances.append(v)
    return torch.stack(log_w), torch.stack(means), torch.stack(variances)


def _two_modes(weights: Sequence[float], stds: Sequence[Sequence[float]], beta: int, name: str, hard: bool) -> Problem:
    """Two modes at -1.5 and 1.5 on the first axis."""
    dim = len(stds[0])
    means = torch.zeros(2, dim, dtype=torch.float64)
    means[:, 0] = torch.tensor([-1.5, 1.5])
    model = GaussianMixture(weights, means, torch.tensor(stds, dtype=torch.float64))

    def exact() -> Truth:
        log_w, m, v = power(model, beta, SIGMA[0])
        share = torch.softmax(log_w, 0)
        positive = 0.5 * (1 + torch.erf(m[:, 0] / (2 * v[:, 0]).sqrt()))
        square = m.square() + v
        fourth = m**4 + 6 * m.square() * v + 3 * v.square()
        first, second = (  # E[f] and E[f^2] of each scalar in each term
            (positive, m[:, 0], square[:, 1], square[:, -1]),
            (positive, square[:, 0], fourth[:, 1], fourth[:, -1]),
        )
        means = {name: float(share @ a) for name, a in zip(scalars, first, strict=True)}
        variances = {name: float(share @ b) - means[name] ** 2 for name, b in zip(scalars, second, strict=True)}
        return Truth(means, variances, float(log_w.logsumexp(0) - power(model, beta, SIGMA[1])[0].logsumexp(0)))

    scalars: dict[str, Scalar] = {
        "second mode": lambda x: (x[:, 0] > 0).to(torch.float64),
        "first coordinate": lambda x: x[:, 0],
        "square of the second": lambda x: x[:, 1].square(),
        "square of the last": lambda x: x[:, -1].square(),
    }
    return Problem(name, model ** float(beta), scalars, exact, hard=hard)


# Prior weights that leave about half of the mass of p^2 in each mode.
WEIGHTS = {16: (0.7, 0.3), 32: (0.844, 0.156), 64: (0.967, 0.033)}


def tempering(dim: int, *, beta: int = 2, stiff: bool = False) -> Problem:
    """Standard deviations .30 and .27 in every coordinate; stiff: all but the first from .05 to 1, in equal ratios."""
    if dim not in WEIGHTS:
        raise InputError(f"dim must be one of {', '.join(map(str, WEIGHTS))}, got {dim!r}")
    rest = [0.05 * 20 ** (i / (dim - 2)) if stiff else 0.30 for i in range(dim - 1)]
    stds = [[0.30, *rest], [0.27, *(0.9 * s for s in rest)]]
    name = f"tempering {'stiff' if stiff else 'isotropic'} d={dim} beta={beta}"
    return _two_modes(WEIGHTS[dim], stds, beta, name, hard=dim > 16)


# -- modes in a plane, with a reward there --------------------------------------------------------------------


def _plane(
    name: str,
    weights: Sequence[float],
    centres: Tensor,
    std: float,
    dim: int,
    reward: Callable[[Tensor], Tensor],
    guidance: str,
    annealing: Callable[[Tensor], Tensor],
) -> Problem:
    """Modes of one width whose means lie in the first two coordinates, tilted by a reward on the predicted ones.

    The remaining coordinates are then independent of these two: a sum over a grid of the plane is the truth.
    """
    means = torch.cat([centres, torch.zeros(len(centres), dim - 2, dtype=torch.float64)], dim=1)
    model = GaussianMixture(weights, means, [std] * len(means))
    flat = GaussianMixture(weights, centres, [std] * len(means))

    def nearest(x: Tensor) -> Tensor:
        return torch.cdist(x[:, :2].to(torch.float64), centres).argmin(1)

    scalars: dict[str, Scalar] = {
        "first mode": lambda x: (nearest(x) == 0).to(torch.float64),
        "second mode": lambda x: (nearest(x) == 1).to(torch.float64),
        "first coordinate": lambda x: x[:, 0],
        "square of the last": lambda x: x[:, -1].square(),
    }

    def exact() -> Truth:
        scale = math.hypot(std, SIGMA[0])
        axes = [
            torch.arange(float(c.min()) - 8 * scale, float(c.max()) + 8 * scale, scale / 6, dtype=torch.float64)
            for c in centres.T
        ]
        z = torch.cartesian_prod(*axes)
        t = torch.full((len(z),), SIGMA[0], dtype=torch.float64)
        log_p = flat.log_prob(z, SIGMA[0]) + 2 * math.log(scale / 6)
        log_pi = log_p + reward(flat.predict(z, t))
        share = torch.softmax(log_pi, 0)
        planar = {key: f for key, f in scalars.items() if key != "square of the last"}
        truth = Truth.of_states(z, share, planar, float(log_pi.logsumexp(0) - log_p.logsumexp(0)))
        truth.means["square of the last"], truth.variances["square of the last"] = scale**2, 2 * scale**4
        return truth

    target = model.tilt(lambda x: reward(x[:, :2]), guidance=guidance, anneal=annealing, negligible=0.0)
    return Problem(name, target, scalars, exact, hard=True)


def _ring(n: int, radius: float) -> Tensor:
    """The first on the first axis, the others at uneven angles."""
    angles = torch.tensor([0.0, *(1.1 + 4.2 * i / (n - 2) + 0.15 * (i % 2) for i in range(n - 1))], dtype=torch.float64)
    return radius * torch.stack([angles.cos(), angles.sin()], dim=1)


def _share_of_first(weights: Tensor, log_factor: Tensor) -> float:
    """The first mode's share, from `log E_k[exp(r)]` of each mode."""
    return float(torch.softmax(weights.log() + log_factor, 0)[0])


def _rare_first(n: int, prior: float) -> Tensor:
    """Prior weights: this for the first mode, the rest in the ratios 1 : 2 : 3 ... for the others."""
    others = torch.arange(1, n, dtype=torch.float64)
    return torch.cat([torch.tensor([prior], dtype=torch.float64), (1 - prior) * others / others.sum()])


def _solve(f: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Where a rising f takes this value, by halving."""
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) < wanted else (low, middle)
    return (low + high) / 2


RARE = 1e-4


def rare_tilt(
    *,
    gradient: bool = True,
    annealing: str = "power",
    dim: int = 32,
    share: float = 0.6,
    prior: float = RARE,
    radius: float = 4.0,
    n_modes: int = 6,
    name: str | None = None,
) -> Problem:
    """A linear tilt `kappa x_1` that gives this share of the target to a mode of that prior weight."""
    std, centres, weights = 0.3, _ring(n_modes, radius), _rare_first(n_modes, prior)
    # Every mode is equally wide, so that its own exp(kappa^2 std^2 / 2) cancels.
    kappa = _solve(lambda k: _share_of_first(weights, k * centres[:, 0]), share, 0.0, 50.0)
    how = {"power": anneal.power(5), "linear": anneal.linear()}[annealing]
    return _plane(
        name or f"rare tilt {'with' if gradient else 'without'} gradient, {annealing} annealing",
        weights.tolist(),
        centres,
        std,
        dim,
        lambda z: kappa * z[:, 0],
        "gradient" if gradient else "none",
        how,
    )


def posterior(
    *,
    dim: int = 32,
    share: float = 0.4,
    prior: float = 0.001,
    radius: float = 4.0,
    n_modes: int = 6,
    name: str | None = None,
) -> Problem:
    """`y = x_1 + N(0, tau^2)` observed where the rare mode has this share of the posterior."""
    std, tau, centres, weights = 0.3, 1.0, _ring(n_modes, radius), _rare_first(n_modes, prior)

    def log_evidence(y: float) -> Tensor:
        return -0.5 * (y - centres[:, 0]).square() / (tau**2 + std**2)

    y = _solve(lambda y: _share_of_first(weights, log_evidence(y)), share, -5 * radius, 50 * radius)
    return _plane(
        name or f"posterior of a mode of prior weight {prior:g}",
        weights.tolist(),
        centres,
        std,
        dim,
        lambda z: -0.5 * (y - z[:, 0]).square() / tau**2,
        "gradient",
        anneal.power(5),
    )


# -- a black box in many dimensions ---------------------------------------------------------------------------


def black_box(
    *, n_observed: int = 8, dim: int = 16, y: float = 2.0, tau: float = 0.5, name: str | None = None
) -> Problem:
    """Standard normal coordinates, some of which are observed at y with noise tau, without a gradient.

    One mode, so that nothing has to be found; but particles that walk without the reward's gradient miss what was
    observed in many dimensions at once, and their weights degenerate.
    """
    model = GaussianMixture([1.0], torch.zeros(1, dim, dtype=torch.float64), [1.0])
    scalars: dict[str, Scalar] = {
        "first observed": lambda x: x[:, 0],
        "last observed": lambda x: x[:, n_observed - 1],
        "mean of the observed": lambda x: x[:, :n_observed].mean(1),
        "square of the last": lambda x: x[:, -1].square(),
    }

    def exact() -> Truth:
        # The reward sees predictions, which are x times this at the noise of level 0.
        shrink = 1 / (1 + SIGMA[0] ** 2)
        variance = 1 / (shrink + shrink**2 / tau**2)
        mean = variance * shrink * y / tau**2
        means = dict(zip(scalars, (mean, mean, mean, 1 / shrink), strict=True))
        variances = dict(zip(scalars, (variance, variance, variance / n_observed, 2 / shrink**2), strict=True))
        spread = tau**2 + shrink
        return Truth(means, variances, 0.5 * n_observed * (math.log(tau**2 / spread) - y**2 / spread))

    def reward(z: Tensor) -> Tensor:
        return -0.5 * (z[:, :n_observed] - y).square().sum(1) / tau**2

    target = model.tilt(reward, anneal=anneal.power(5), negligible=0.0)
    return Problem(name or f"black box of {n_observed} coordinates", target, scalars, exact, hard=True)


# -- tokens --------------------------------------------------------------------------------------------------

STEEPNESS = {"mild": 3.0, "steep": 0.7}


def _dirichlet(concentration: float, shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    gamma = torch._standard_gamma(torch.full(shape, concentration, dtype=torch.float64), generator=generator)
    return gamma / gamma.sum()


def tokens(
    kind: str,
    length: int,
    vocab: int,
    *,
    steepness: str = "mild",
    w: float = 2.0,
    w_proposal: float = 2.0,
    seed: int = 0,
    name: str | None = None,
) -> Problem:
    """Guidance of strength w between two tables drawn from a Dirichlet law, proposed with strength `w_proposal`."""
    shape = (vocab,) * length
    p, q = (TokenTable(_dirichlet(STEEPNESS[steepness], shape, 2 * seed + i), kind) for i in (0, 1))
    log_pi = (1 - w) * p.probabilities.log() + w * q.probabilities.log()
    likeliest = p.states[log_pi.argmax()]
    scalars: dict[str, Scalar] = {
        "likeliest": lambda x: (x == likeliest).all(1).to(torch.float64),
        "first token is 0": lambda x: (x[:, 0] == 0).to(torch.float64),
        "neighbours agree": lambda x: (x[:, 1:] == x[:, :-1]).to(torch.float64).mean(1),
    }

    def exact() -> Truth:
        share = torch.softmax(log_pi, 0)
        # Both models are one law at the noise end, where Z is therefore 1.
        return Truth.of_states(p.states, share, scalars, float(log_pi.logsumexp(0)))

    return Problem(
        name or f"{kind} tokens {length}x{vocab} {steepness} w={w:g} w'={w_proposal:g}",
        guided(q, p, w),
        scalars,
        exact,
        steps=8,  # their ratios are exact for steps of any size, or nearly so
        ends=(0.0, 1.0),
        spacing="linear",
        proposal=Proposal(exponents=(1 - w_proposal, w_proposal)),
        hard=steepness == "steep",
    )


# -- from other studies --------------------------------------------------------------------------------------


def mini_batches() -> Problem:
    """The mini-batch study's mixture, at the noise of level 0: four modes on a line, `r = x^2 / 12`, no gradient."""
    model, sigma = minibatch.mixture(), (0.05, 20.0)
    borders = minibatch.Truth().borders

    def mode(x: Tensor) -> Tensor:
        return torch.bucketize(x[:, 0].contiguous(), borders)

    scalars: dict[str, Scalar] = {
        "leftmost mode": lambda x: (mode(x) == 0).to(torch.float64),
        "rightmost mode": lambda x: (mode(x) == 3).to(torch.float64),
        "mean": lambda x: x[:, 0],
    }

    def exact() -> Truth:
        grid = torch.linspace(-14, 14, 140_001, dtype=torch.float64)[:, None]
        t = torch.full((len(grid),), sigma[0], dtype=torch.float64)
        log_p = model.log_prob(grid, sigma[0])
        log_pi = log_p + minibatch.reward(model.predict(grid, t))
        share = torch.softmax(log_pi, 0)
        return Truth.of_states(grid, share, scalars, float(log_pi.logsumexp(0) - log_p.logsumexp(0)))

    target = model.tilt(minibatch.reward, anneal=anneal.power(5), negligible=0.0)
    return Problem("mini-batch mixture", target, scalars, exact, ends=sigma)


def from_kernels(setting: str, task: str) -> Problem:
    """One of the problems of the kernel study: the share of each mode."""
    found = [p for p in kernels.problems() if p.setting.name == setting and p.task.__name__ == task]
    if not found:
        raise InputError(f"no problem {setting!r} {task!r} in the kernel study")
    problem = found[0]

    def share_of(i: int, x: Tensor) -> Tensor:
        return (problem.modes(x) == i).to(torch.float64)

    scalars: dict[str, Scalar] = {f"mode {i}": partial(share_of, i) for i in range(len(problem.centres))}

    def exact() -> Truth:
        shares = {key: float(v) for key, v in zip(scalars, problem.mode_truth, strict=True)}
        return Truth(shares, {key: p * (1 - p) for key, p in shares.items()})

    ends = (problem.setting.sigma_min, problem.setting.sigma_max)
    return Problem(problem.name, problem.target, scalars, exact, ends=ends, spacing="geometric")


# -- all of them ---------------------------------------------------------------------------------------------

STRENGTHS = ((2.0, 2.0), (2.0, 1.0), (1.2, 2.0))


def battery() -> list[Problem]:
    """The public problems."""
    return [
        *(
            tempering(dim, beta=beta, stiff=stiff)
            for beta, stiff, dim in itertools.product((2, 3), (False, True), WEIGHTS)
        ),
        *(rare_tilt(gradient=g, annealing=a) for g, a in itertools.product((True, False), ("power", "linear"))),
        posterior(),
        black_box(),
        *(
            tokens(kind, *shape, steepness=steepness, w=w, w_proposal=other)
            for kind, shape, steepness, (w, other) in itertools.product(
                ("masked", "uniform"), ((4, 3), (8, 2)), STEEPNESS, STRENGTHS
            )
        ),
        mini_batches(),
        *(
            from_kernels(setting, task)
            for setting, task in (
                ("1d", "tilting"),
                ("2d", "guidance"),
                ("20d", "tempering"),
                ("20d-stiff", "composition"),
            )
        ),
    ]


def random(seed: int) -> list[Problem]:
    """Held-out problems, one of each kind, with sizes, weights, shares and tables drawn from the seed.

    Methods are tuned on `battery()`. To see whether what was learned holds elsewhere, take seeds that have not been
    used before, decide how many beforehand, and report every problem.

    >>> [p.name for p in random(7)] == [p.name for p in random(7)] != [p.name for p in random(8)]
    True
    """
    u = Stream(seed).at("held out").uniform((20,)).tolist()

    def between(i: int, low: float, high: float) -> float:
        return low + (high - low) * u[i]

    dim, beta = int(between(0, 8, 48)), 2 + int(2 * u[1])
    narrow = between(2, 0.82, 0.96)
    # Such that the second mode has a share of the target between a quarter and three quarters.
    odds = math.log(between(3, 1 / 3, 3.0)) + (beta - 1) * dim * math.log(narrow)
    second = 1 / (1 + math.exp(-odds / beta))
    ratio = between(4, 1.0, 15.0)
    first = [0.3, *(0.3 * ratio ** (-i / (dim - 2)) for i in range(dim - 1))]
    stds = [first, [narrow * s for s in first]]
    steepness = "steep" if u[5] < 0.5 else "mild"
    kind = "masked" if u[6] < 0.5 else "uniform"
    length, vocab = ((3, 4), (5, 2), (4, 3), (6, 2))[int(4 * u[7])]
    table = int(1e6 * u[8])
    return [
        _two_modes((1 - second, second), stds, beta, f"held out {seed}: tempering d={dim} beta={beta}", hard=dim > 24),
        rare_tilt(
            gradient=u[9] < 0.5,
            annealing="power" if u[10] < 0.5 else "linear",
            dim=int(between(11, 4, 40)),
            share=between(12, 0.3, 0.7),
            prior=10 ** between(13, -4, -2),
            name=f"held out {seed}: rare tilt",
        ),
        posterior(
            dim=int(between(11, 4, 40)),
            share=between(14, 0.25, 0.6),
            prior=10 ** between(13, -3, -1.5),
            name=f"held out {seed}: posterior",
        ),
        tokens(
            kind,
            length,
            vocab,
            steepness=steepness,
            w=between(15, 1.1, 2.5),
            w_proposal=between(10, 1.0, 2.5),
            seed=1000 + table,
            name=f"held out {seed}: {kind} tokens {length}x{vocab} {steepness}",
        ),
        black_box(
            n_observed=int(between(16, 1, 13)),
            dim=int(between(17, 13, 33)),
            y=between(18, 0.5, 3.0),
            tau=between(19, 0.3, 1.0),
            name=f"held out {seed}: black box",
        ),
    ]
