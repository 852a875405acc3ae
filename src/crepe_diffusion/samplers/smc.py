"""Sequential Monte Carlo on the same paths: particles walk down together, are weighted, and resampled.

    rne           log w += log_work(down)                                        any target, any proposal
    fkc           log w += (d/2)(|S|^2 - sum_j c_j |score_j|^2) + reward terms   Feynman-Kac correctors
    fkc-noise     the same weights with cooled noise in place of the full score
    twisted       log_work with the reward's gradient in the proposal, noising as trained
    fk-steering   log_work with the models' own proposal: a difference of rewards
    discrete-cfg  log_work for discrete guidance

Particles come in independent batches of `n_particles`; each batch has its own weights and log Z.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from crepe_diffusion.batches import IMPOSSIBLE, rows_like
from crepe_diffusion.errors import InputError, NonFiniteError, check_choice
from crepe_diffusion.evaluate import Counts, Evaluator
from crepe_diffusion.models import Model
from crepe_diffusion.paths import log_work, walk
from crepe_diffusion.processes import Evaluation, Process
from crepe_diffusion.processes.gaussian import GaussianProcess, score_of
from crepe_diffusion.proposals import Proposal
from crepe_diffusion.random import Stream
from crepe_diffusion.samplers.setup import Settings, finish, prepare
from crepe_diffusion.schedules import Ladder
from crepe_diffusion.targets import Target

__all__ = ["SMC", "Particles", "Plain", "resample"]

WEIGHTS = ("rne", "fkc", "fkc-noise", "twisted", "fk-steering", "discrete-cfg")
RESAMPLING = ("multinomial", "systematic", "stratified", "residual", "partial")


@dataclass(frozen=True)
class Particles:
    """Weighted draws: `x` (batches, particles, *event), normalised `log_weights`, and `log_z` of each batch."""

    x: Tensor
    log_weights: Tensor
    log_z: Tensor
    ess: Tensor
    n_resamplings: Tensor
    evaluations: Counts

    def flat(self) -> Tensor:
        return self.x.flatten(0, 1)

    def weights(self) -> Tensor:
        """Weights of all particles, each batch counting equally, (batches * particles,)."""
        return (self.log_weights.exp() / len(self.x)).flatten()

    def resampled(self, stream: Stream) -> Tensor:
        """Equally weighted draws, resampled within each batch."""
        index = resample(self.log_weights, "systematic", stream)
        return self.x[torch.arange(len(self.x))[:, None], index].flatten(0, 1)


class SMC:
    """The methods that CREPE is compared with, at exactly counted cost: `M * K + 1` evaluations a particle
    (Feynman-Kac correctors with a reward: `2 M K + 1`). `log_z` is relative to the noise law without its reward.

    >>> from crepe_diffusion.models import GaussianMixture
    >>> from crepe_diffusion.schedules import ladder
    >>> p = GaussianMixture(weights=[0.3, 0.7], means=[[-4.0], [3.0]], stds=[0.5, 0.4])
    >>> SMC(p ** 2.0, ladder.karras(11, 0.01, 20.0), n_particles=8, seed=0).sample().x.shape
    torch.Size([1, 8, 1])
    """

    def __init__(
        self,
        target: Target | Model,
        levels: Ladder,
        *,
        n_particles: int = 64,
        n_batches: int = 1,
        weights: str = "rne",
        resampling: str = "systematic",
        ess_threshold: float = 0.5,
        partial_share: float = 0.8,
        seed: int = 0,
        process: Process | None = None,
        proposal: Proposal | None = None,
        micro_batch: int | None = None,
        nonfinite: str = "raise",
        fit_samples: int = 256,
    ):
        check_choice("weights", weights, WEIGHTS)
        check_choice("resampling", resampling, RESAMPLING)
        for name, value in (("n_particles", n_particles), ("n_batches", n_batches)):
            if int(value) != value or value < 1:
                raise InputError(f"{name} must be a positive integer, got {value!r}")
        for name, share in (("ess_threshold", ess_threshold), ("partial_share", partial_share)):
            if not 0 <= share <= 1:
                raise InputError(f"{name} must be between 0 and 1, got {share!r}")
        self.stream = Stream(seed)
        self.n_particles, self.n_batches = int(n_particles), int(n_batches)
        self.weights, self.resampling = weights, resampling
        self.ess_threshold, self.partial_share = ess_threshold, partial_share
        proposal = proposal or Proposal()
        if weights == "twisted":
            proposal = replace(proposal, k="paper", guidance="gradient")
        if weights == "fk-steering":
            proposal = replace(proposal, k="paper", guidance="none")
        settings = Settings(proposal, micro_batch, nonfinite, fit_samples)
        self.evaluate = prepare(target, levels, process, settings, self.stream.at("setup"))
        if weights == "discrete-cfg" and not self.evaluate.process.is_discrete:
            raise InputError('weights="discrete-cfg" needs discrete models; "fkc" or "rne" serve Gaussian ones')
        if weights.startswith("fkc"):
            self._corrector = FeynmanKac(self.evaluate, cooled=weights == "fkc-noise")

    def sample(self) -> Particles:
        """One pass down the ladder for every batch."""
        evaluate, n, b = self.evaluate, self.n_particles, self.n_batches
        ladder, rows = evaluate.ladder, b * n
        k = ladder.substeps
        x = evaluate.noise(self.stream.at("noise"), rows)
        seen = evaluate(x, ladder.times[-1:].expand(rows))
        # Particles come from the noise law, which knows no reward: the first weight is that of r_M itself.
        log_w, log_z = _normalised(seen.reward.reshape(b, n) - math.log(n), ladder.n_levels - 1)
        n_resamplings = torch.zeros(b, dtype=torch.long)
        down = torch.full((rows,), -1)
        for m in range(ladder.n_levels - 1, 0, -1):
            stream = self.stream.at(m)
            if self.weights.startswith("fkc"):
                x, seen, gained = self._corrector.descend(x, seen, m, stream.at("walk"))
            else:
                path = walk(evaluate, x, seen, torch.full((rows,), m * k), down, k, stream.at("walk"))
                x, seen, gained = path.x, path.seen, log_work(path, evaluate.coefficients)
            log_w, total = _normalised(log_w + gained.reshape(b, n), m - 1)
            log_z = log_z + total
            if m > 1:
                index, log_w, chosen = self._resampled(log_w, stream.at("resample"))
                n_resamplings += chosen
                x, seen = x[index], seen.rows(index)
        ess = 1 / (2 * log_w).exp().sum(1)
        x = finish(evaluate, x, self.stream.at("finish"))
        return Particles(x.reshape(b, n, *x.shape[1:]), log_w, log_z, ess, n_resamplings, evaluate.counts.copy())

    def _resampled(self, log_w: Tensor, stream: Stream) -> tuple[Tensor, Tensor, Tensor]:
        """Row indices, new normalised log-weights, and which batches were resampled; the others keep their weights."""
        b, n = log_w.shape
        # Equal weights have an ESS of n only up to rounding, and a threshold of 1 means always.
        chosen = 1 / (2 * log_w).exp().sum(1) <= self.ess_threshold * n * (1 + 1e-12)
        stay = torch.arange(n).expand(b, n)
        if self.resampling == "partial":
            index, weights = partial(log_w, self.partial_share, stream)
        else:
            index, weights = resample(log_w, self.resampling, stream), torch.full_like(log_w, -math.log(n))
        index = torch.where(chosen[:, None], index, stay)
        log_w = torch.where(chosen[:, None], weights, log_w)
        return (index + torch.arange(b)[:, None] * n).flatten(), log_w, chosen


class Plain:
    """The uncorrected baseline: follow the proposal down, with no weights. Plain sampling if the target is a model."""

    def __init__(
        self,
        target: Target | Model,
        levels: Ladder,
        *,
        seed: int = 0,
        process: Process | None = None,
        proposal: Proposal | None = None,
        micro_batch: int | None = None,
        fit_samples: int = 256,
    ):
        self.stream = Stream(seed)
        settings = Settings(proposal or Proposal(), micro_batch, fit_samples=fit_samples)
        self.evaluate = prepare(target, levels, process, settings, self.stream.at("setup"))

    def sample(self, n: int) -> Tensor:
        """`n` draws, (n, *event)."""
        evaluate = self.evaluate
        times = evaluate.ladder.times
        x = evaluate.noise(self.stream.at("noise"), n)
        nobody = torch.zeros(n, dtype=torch.bool)
        for i in range(len(times) - 1, 0, -1):
            s, t = times[i - 1].expand(n), times[i].expand(n)
            seen = evaluate(x, t, rewards=False)
            x = evaluate.process.step(x, seen, s, t, nobody, self.stream.at(i), evaluate.coefficients)
        return finish(evaluate, x, self.stream.at("finish"))


class FeynmanKac:
    """Feynman-Kac correctors (Skreta et al. 2025) in the clock `u = -sigma^2`, for any exponents and rewards.

    With `S = sum_j c_j score_j`, the particle follows `S + grad r / 2` and its log-weight grows by

        (|S|^2 - sum_j c_j |score_j|^2) / 2 + S . grad r / 2 + d r_u / du        at fixed x

    Removing a Langevin move of variance delta leaves the weights unchanged; `cooled` removes 1 - 1/C of the noise.
    """

    def __init__(self, evaluate: Evaluator, cooled: bool):
        process = evaluate.process
        if not isinstance(process, GaussianProcess):
            raise InputError("Feynman-Kac correctors are for Gaussian diffusions")
        # The weights hold for the true gradient of the reward, not for one that was clipped or cut short.
        proposal = evaluate.proposal
        if proposal.clip or any((proposal.guidance or r.guidance) != "gradient" for r in evaluate.target.rewards):
            raise InputError(
                'Feynman-Kac correctors need rewards with guidance="gradient" and no clip; use "fk-steering" or "rne"'
            )
        if evaluate.coefficients.proposal != evaluate.coefficients.target:
            raise InputError(
                "Feynman-Kac correctors follow the target's own score: leave the proposal's exponents unset"
            )
        self.evaluate, self.process = evaluate, process
        self.removed = 1 - 1 / evaluate.coefficients.total if cooled else 0.0

    def descend(self, x: Tensor, seen: Evaluation, m: int, stream: Stream) -> tuple[Tensor, Evaluation, Tensor]:
        """From level m to m - 1: the new points and the log-weight gained."""
        evaluate, process, c = self.evaluate, self.process, self.evaluate.coefficients.target
        times, k = evaluate.ladder.times, evaluate.ladder.substeps
        gained = torch.zeros(len(x), dtype=torch.float64)
        for i in range(m * k, (m - 1) * k, -1):
            t, s = times[i].expand(len(x)), times[i - 1].expand(len(x))
            d = process.denoising_gain(s, t)
            scores = [process.project(score_of(p, x, t)) for p in seen.predictions]
            score = torch.stack([cj * sj for cj, sj in zip(c, scores, strict=True)]).sum(0)
            pull = process.project(seen.drift) - score
            squares = _dot(score, score) - sum(cj * _dot(sj, sj) for cj, sj in zip(c, scores, strict=True))
            gained = gained + d[:, 0] / 2 * (squares + _dot(score, pull))
            if evaluate.target.rewards:
                gained = gained + evaluate(x, s).reward - seen.reward
            drift = score + pull / 2 - self.removed / 2 * (score + pull)
            noise = process.scaled_noise(stream.at(i), x, (1 - self.removed) * d)
            x = x + rows_like(d[:, 0], x).to(x.dtype) * drift + noise
            seen = evaluate(x, s)
        return x, seen, gained


def _normalised(log_w: Tensor, level: int) -> tuple[Tensor, Tensor]:
    """Log-weights that sum to one in each batch, and the log of what they summed to before.

    A particle whose weight is no number (its path met a prediction that was not) or that came from where the
    target is zero has no weight.
    """
    log_w = log_w.where(log_w > IMPOSSIBLE / 2, -math.inf)
    total = log_w.logsumexp(1)
    vanished = ~total.isfinite()
    if vanished.any():
        bad = int(vanished.sum())
        raise NonFiniteError(
            f"all weights of {bad} of {len(log_w)} batches vanished at level {level}: use more particles"
        )
    return log_w - total[:, None], total


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).flatten(1).sum(1, dtype=torch.float64)


def resample(log_w: Tensor, method: str, stream: Stream) -> Tensor:
    """Ancestor indices (batches, particles) for normalised log-weights; every method is unbiased."""
    b, n = log_w.shape
    w = log_w.exp()
    if method == "residual":
        copies = (n * w + 1e-12).floor()
        rest = (n * w - copies).clamp(min=0)
        left = n - copies.sum(1, keepdim=True)
        drawn = _inverse(rest / rest.sum(1, keepdim=True).clamp(min=1e-300), stream.uniform((b, n)))
        kept = _inverse(
            copies / copies.sum(1, keepdim=True).clamp(min=1),
            (torch.arange(n) + 0.5).expand(b, n) / (n - left).clamp(min=1),
        )
        return torch.where(torch.arange(n) < n - left, kept, drawn)
    if method == "multinomial":
        u = stream.uniform((b, n))
    elif method == "stratified":
        u = (torch.arange(n) + stream.uniform((b, n))) / n
    else:
        u = (torch.arange(n) + stream.uniform((b, 1))) / n
    return _inverse(w, u)


def _inverse(w: Tensor, u: Tensor) -> Tensor:
    cumulative = w.cumsum(1)
    return torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True).clamp(max=w.shape[1] - 1)


def partial(log_w: Tensor, share: float, stream: Stream) -> tuple[Tensor, Tensor]:
    """Resample only the particles with the largest and the smallest weights, `share` of them in all.

    They get their common average weight and the others keep theirs, so the weighted law is unchanged in the mean.
    """
    b, n = log_w.shape
    size = max(2, round(share * n)) if n > 1 else 1
    order = log_w.argsort(1)
    group = torch.cat([order[:, : size // 2], order[:, n - (size - size // 2) :]], dim=1)
    inside = log_w.gather(1, group)
    total = inside.logsumexp(1, keepdim=True)
    ancestors = group.gather(1, resample(inside - total, "systematic", stream))
    index = torch.arange(n).expand(b, n).scatter(1, group, ancestors)
    return index, log_w.scatter(1, group, (total - math.log(size)).expand(-1, size))
