"""Problems about images whose answer is known: guidance, rewards and posteriors of a fitted mixture.

    guided       p(x|c)^w p(x)^(1-w)                exact draws by rejection
    tilted       p(x|c) exp(r(E[x_0|x]))            draws of a tilted mixture, weighted; r is linear
    posterior    p(x) N(observed; H E[x_0|x], s^2)  draws of a conjugate posterior, weighted

All laws are meant at the noise of level 0, where samplers end: nothing below it can hide an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn.functional import conv2d

import crepe_diffusion as cd
from crepe_diffusion.run import publish
from studies.images.data import load_images
from studies.images.mixture import FactorLaw, FactorMixture, fit_law, guided_draws, guided_log_mass, measured_process

__all__ = [
    "SIGMA_MAX",
    "SIGMA_MIN",
    "Problem",
    "blurred",
    "cluster",
    "errors",
    "exact_errors",
    "frechet",
    "frechet_of_moments",
    "guided",
    "half",
    "ink",
    "keep_law",
    "known_law",
    "moments_of",
    "posterior",
    "tilted",
    "widened",
]

LAWS = Path(__file__).parent / "weights"
SIGMA_MIN, SIGMA_MAX = 0.1, 20.0
N_TRUTH = 10_000
N_AXES = 20


def known_law(images: str, size: int, data: Path, kept: Path = LAWS) -> FactorLaw:
    """The law of the first 20,000 training images at this size, 14 (means of 2 x 2 pixels) or 28.

    It is read from `kept` if it is there, and else fitted to the images in `data`.
    """
    path = kept / f"law-{images}-{size}.safetensors"
    if path.exists():
        return FactorLaw.from_tensors(load_file(path))
    training, _ = load_images(images, data, size)
    return fit_law(training.x[:20_000], training.label[:20_000])


def keep_law(images: str, size: int, data: Path, kept: Path = LAWS) -> Path:
    """Write the law to a file, in float64: what is measured with it is then the same to the last bit."""
    path = kept / f"law-{images}-{size}.safetensors"
    kept.mkdir(parents=True, exist_ok=True)
    publish(path, save(known_law(images, size, data, kept).to_tensors()))
    return path


@dataclass(frozen=True)
class Problem:
    """A target, kernels for it, and weighted draws of the truth; `judge` tells components apart."""

    name: str
    target: cd.Target
    process: cd.processes.Gaussian
    truth: Tensor
    weights: Tensor
    judge: FactorMixture
    kept: float
    """How much a simple sampler's draws would count: of p(x|c), or of the conjugate posterior."""
    log_z: float | None = None
    """log of the normaliser at level 0 over that at the noise end, where it is known."""

    def shares(self, x: Tensor, weights: Tensor) -> Tensor:
        """The share of each component of the judge."""
        return weights @ torch.cat([self.judge.responsibilities(rows, SIGMA_MIN) for rows in x.split(4096)])

    @cached_property
    def true_shares(self) -> Tensor:
        return self.shares(self.truth, self.weights)

    @cached_property
    def axes(self) -> Tensor:
        """The first principal directions of the truth, (n, N_AXES)."""
        return torch.linalg.eigh(moments_of(self.truth.flatten(1), self.weights)[1])[1][:, -N_AXES:]


def guided(law: FactorLaw, label: int, scale: float, steps: cd.Ladder, seed: int = 0) -> Problem:
    conditional, unconditional = law.conditional(label), law.unconditional()
    process = measured_process([unconditional, conditional], steps, seed=seed)
    target = cd.guided(conditional, unconditional, scale)
    x, kept = guided_draws(law, label, scale, N_TRUTH, cd.Stream(seed).at("truth"), SIGMA_MIN)
    weights = torch.full((len(x),), 1 / len(x)).double()
    # Both normalisers have the factor p(c)^(1-w), which cancels.
    log_z = math.log(kept) - guided_log_mass(law, label, scale, cd.Stream(seed).at("noise end"), float(steps.times[-1]))
    return Problem(f"w = {scale:g}", target, process, x, weights, conditional, kept, log_z)


@dataclass(frozen=True)
class Linear:
    """`r(x) = direction . x - offset`."""

    direction: Tensor
    offset: float

    def __call__(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.direction - self.offset


def tilted(law: FactorLaw, label: int, name: str, reward: Linear, steps: cd.Ladder, seed: int = 0) -> Problem:
    """`kept` is the share of draws of `p(x|c)` that would count if they were weighted by the reward."""
    model = law.conditional(label)
    x, log_q = tilted_draws(model, reward, N_TRUTH, cd.Stream(seed).at("truth"))
    weights = torch.softmax(_log_target(model, reward, x) - log_q, 0)
    free = model.sample(N_TRUTH, cd.Stream(seed).at("free"), SIGMA_MIN)
    counted = torch.softmax(reward(model.predict(free, free.new_full((N_TRUTH,), SIGMA_MIN))), 0)
    kept = 1 / float(N_TRUTH * counted.square().sum())
    process = measured_process([model], steps, seed=seed)
    return Problem(name, model.tilt(reward, guidance="gradient"), process, x, weights, model, kept)


def _log_target(model: FactorMixture, reward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`log p_t(x) + r(E[x_0 | x])` at the noise of level 0."""
    return model.log_prob(x, SIGMA_MIN) + reward(model.predict(x, x.new_full((len(x),), SIGMA_MIN)))


def tilted_draws(model: FactorMixture, reward: Linear, n: int, stream: cd.Stream) -> tuple[Tensor, Tensor]:
    """Draws of the tilted law, up to how each component predicts, and their log-density.

    Within component k the prediction is linear, and a linear tilt moves the mean of `x` by `C_k g`.
    """
    law, g = model.law, reward.direction
    along = torch.einsum("knq,n->kq", law.axes, g)
    shift = torch.einsum("knq,kq->kn", law.axes, along * law.variances) + law.floor * g  # C_k g
    # g^T C (C + t^2)^-1 C g, along the factors and across them
    t2, inside = SIGMA_MIN**2, law.variances + law.floor
    across = (g.square().sum() - along.square().sum(1)) * law.floor**2 / (law.floor + t2)
    gain = (along.square() * inside.square() / (inside + t2)).sum(1) + across
    log_share = (model.weights.log() + law.means @ g + 0.5 * gain).log_softmax(0)
    moved = FactorMixture(replace(law, means=law.means + shift), log_share.exp())
    x = moved.sample(n, stream, SIGMA_MIN)
    return x, moved.log_prob(x, SIGMA_MIN)


def ink(law: FactorLaw, label: int, strength: float) -> Linear:
    """`strength` per standard deviation of the mean brightness within the class: positive asks for thick strokes."""
    mean = law.conditional(label).sample(4000, cd.Stream(1)).flatten(1).mean(1)
    n, unit = law.means.shape[1], strength / float(mean.std())
    return Linear(torch.full((n,), unit / n, dtype=torch.float64), unit * float(mean.mean()))


def cluster(law: FactorLaw, label: int, strength: float) -> Linear:
    """`strength` times the way from the mean of a class (0) to its rarest cluster of 2 % or more (1)."""
    w = law.conditional(label).weights
    rare = int(w.masked_fill(w < 0.02, math.inf).argmin())
    mean = w @ law.means
    line = law.means[rare] - mean
    direction = strength * line / line.square().sum()
    return Linear(direction, float(mean @ direction))


# -- posteriors --------------------------------------------------------------------------------------------


def half(size: int) -> Tensor:
    """The operator (m, n) that observes the upper half of an image: the lower half is to be painted."""
    return torch.eye(size * size, dtype=torch.float64)[: size * size // 2]


def blurred(size: int) -> Tensor:
    """The operator (m, n) that blurs by a Gaussian of 1.5 pixels and keeps every second pixel of both axes."""
    r = torch.arange(-4, 5, dtype=torch.float64)
    kernel = torch.exp(-(r[:, None].square() + r.square()) / (2 * 1.5**2))
    identity = torch.eye(size * size, dtype=torch.float64).reshape(-1, 1, size, size)
    rows = conv2d(identity, (kernel / kernel.sum())[None, None], padding=4)[:, 0, ::2, ::2]
    return rows.flatten(1).T.contiguous()


def posterior(law: FactorLaw, operator: Tensor, noise: float, name: str, steps: cd.Ladder, seed: int = 0) -> Problem:
    """A fresh image of the law is seen through `operator` with this noise; which images may it have been?"""
    model = law.unconditional()
    stream = cd.Stream(seed).at("posterior", name)
    hidden = model.sample(1, stream.at("image"))
    seen = hidden.flatten(1) @ operator.T + noise * stream.at("noise").normal((1, len(operator)))

    def reward(x: Tensor) -> Tensor:
        return -0.5 * (x.flatten(1) @ operator.T - seen).square().sum(1) / noise**2

    x, log_q = conjugate_draws(law, operator, noise, seen[0], N_TRUTH, stream.at("truth"))
    weights = torch.softmax(_log_target(model, reward, x) - log_q, 0)
    process = measured_process([model], steps, seed=seed)
    kept = 1 / float(len(x) * weights.square().sum())
    target = model.tilt(reward, guidance="gradient", anneal=cd.anneal.of_time(widened(noise)))
    return Problem(name, target, process, x, weights, model, kept)


def widened(noise: float) -> Callable[[Tensor], Tensor]:
    """At noise t, a prediction is off by about `t / sqrt(1 + t^2)`: an observation is worth less by that much."""
    return lambda t: noise**2 / (noise**2 + t * t / (1 + t * t) - SIGMA_MIN**2 / (1 + SIGMA_MIN**2))


def conjugate_draws(
    law: FactorLaw, operator: Tensor, noise: float, seen: Tensor, n: int, stream: cd.Stream
) -> tuple[Tensor, Tensor]:
    """Draws of `p_t(x) N(seen; H x_0(x), noise^2)`, up to how each component predicts, and their log-density.

    Within component k the prediction is linear, `x_0 = mu + G (x - mu)`, so `x` is Gaussian given what was seen.
    """
    size = law.means.shape[1]
    eye = torch.eye(size, dtype=torch.float64)
    logs, gaussians = [], []
    for k in range(len(law.weights)):
        covariance = (law.axes[k] * law.variances[k]) @ law.axes[k].T + law.floor * eye
        wide = covariance + SIGMA_MIN**2 * eye
        h = operator @ covariance @ torch.linalg.inv(wide)
        total = h @ wide @ h.T + noise**2 * torch.eye(len(operator), dtype=torch.float64)
        gain = torch.linalg.solve(total, h @ wide).T
        mean = law.means[k] + gain @ (seen - operator @ law.means[k])
        left = wide - gain @ h @ wide
        logs.append(_log_normal(seen - operator @ law.means[k], torch.linalg.cholesky(total)) + law.weights[k].log())
        gaussians.append((mean, torch.linalg.cholesky((left + left.T) / 2)))
    log_share = torch.stack(logs).log_softmax(0)
    which = stream.at("component").categorical(log_share.expand(n, -1))
    z = stream.at("noise").normal((n, size))
    x = torch.zeros_like(z)
    for k in which.unique().tolist():
        x[which == k] = gaussians[k][0] + z[which == k] @ gaussians[k][1].T
    likely = (log_share > log_share.max() - 30).nonzero()[:, 0].tolist()
    log_q = torch.stack([log_share[k] + _log_normal(x - gaussians[k][0], gaussians[k][1]) for k in likely])
    return x.reshape(n, *law.event_shape), log_q.logsumexp(0)


def _log_normal(offset: Tensor, factor: Tensor) -> Tensor:
    z = torch.linalg.solve_triangular(factor, offset.reshape(-1, len(factor)).T, upper=False)
    log_p = -0.5 * z.square().sum(0) - factor.diagonal().log().sum() - 0.5 * len(factor) * math.log(2 * math.pi)
    return log_p.reshape(offset.shape[:-1])


# -- errors ------------------------------------------------------------------------------------------------


def frechet(x: Tensor, w: Tensor, y: Tensor, v: Tensor) -> float:
    """`|mean difference|^2 + tr(A + B - 2 (A B)^(1/2))` of two weighted samples of features (n, k).

    Rows may be fewer than features: with `A = R^T R` and `B = S^T S`, the trace of the root is the nuclear norm of
    `R S^T`, whose size is that of the smaller samples.
    """
    return _frechet(_factored(x, w), _factored(y, v))


def frechet_of_moments(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> float:
    """The same from means and covariances."""

    def factored(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(covariance)
        return mean, (vectors * values.clamp(min=0).sqrt()).T

    return _frechet(factored(*one), factored(*other))


def _factored(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted mean, and R with `R^T R` the covariance, of at most as many rows as columns."""
    w = w / w.sum()
    mean = w @ x
    rows = (x - mean) * w.sqrt()[:, None]
    return mean, rows if len(rows) <= rows.shape[1] else torch.linalg.qr(rows, mode="r").R


def _frechet(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> float:
    (a, r), (b, s) = one, other
    cross = torch.linalg.svdvals(r @ s.T).sum()
    return float((a - b).square().sum() + r.square().sum() + s.square().sum() - 2 * cross)


def moments_of(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of weighted rows."""
    w = w / w.sum()
    mean = w @ x
    offset = x - mean
    return mean, (offset * w[:, None]).T @ offset


def errors(problem: Problem, x: Tensor, weights: Tensor) -> dict[str, float]:
    """How far weighted draws are from the truth.

    `shares`: total variation between the shares of components; `frechet`: in the first principal coordinates of the
    truth; `spread`: their total variance relative to the truth's.
    """
    w, v = weights.double(), problem.weights
    ours, theirs = x.double().flatten(1) @ problem.axes, problem.truth.flatten(1) @ problem.axes
    tv = 0.5 * float((problem.shares(x.double(), w) - problem.true_shares).abs().sum())
    spread = float(moments_of(ours, w)[1].trace() / moments_of(theirs, v)[1].trace())
    return {"shares": tv, "frechet": frechet(ours, w, theirs, v), "spread": spread}


def exact_errors(problem: Problem, n: int, stream: cd.Stream) -> dict[str, float]:
    """The errors of n independent draws of the truth: what no sampler with so many draws can beat."""
    index = stream.categorical(problem.weights.log().expand(n, -1))
    return errors(problem, problem.truth[index], torch.full((n,), 1 / n).double())
