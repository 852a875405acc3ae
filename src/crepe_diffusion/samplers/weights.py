"""How particles of SMC walk down one level, and by how much their log-weights grow.

    PathWork          log_work(down)                                                any target, any proposal
    FeynmanKac        (d/2)(|S|^2 - sum_j c_j |score_j|^2) + reward terms           Feynman-Kac correctors
    Twisted           log_work with the reward's gradient in the proposal, noising as trained
    Steering          log_work with the models' own proposal: a difference of rewards
    DiscreteGuidance  log_work for discrete guidance

A weight is any object with the contract of `Weight`; subclasses inherit what they do not change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from crepe_diffusion.batches import rows_like
from crepe_diffusion.devices import real
from crepe_diffusion.errors import InputError
from crepe_diffusion.evaluate import Evaluator
from crepe_diffusion.paths import log_work, walk
from crepe_diffusion.processes import Evaluation
from crepe_diffusion.processes.gaussian import GaussianProcess, score_of
from crepe_diffusion.proposals import Proposal
from crepe_diffusion.random import Stream

__all__ = ["DiscreteGuidance", "FeynmanKac", "PathWork", "Steering", "Twisted", "Weight"]


class Weight(Protocol):
    """A sequence of laws from the noise end to the target, and a walk down it.

    Properly weighted particles stay so: the mean of `exp(log_gain) f(x_s)` over the walk from x_t is, up to what the
    kernels approximate, the integral of `gamma_s f` wherever x_t is weighted by `gamma_t`. The last law, at level 0,
    is the target with all of its rewards; those above it are free.
    """

    def proposal(self, proposal: Proposal) -> Proposal:
        """The proposal that this weight needs, given the user's."""
        return proposal

    def check(self, evaluate: Evaluator) -> None:
        """Refuse a target that this weight cannot serve."""
        return None

    def first(self, evaluate: Evaluator, x: Tensor, seen: Evaluation) -> Tensor:
        """Log-weights (rows,) of draws from the noise law, which has no reward in it."""
        return seen.reward

    def descend(
        self, evaluate: Evaluator, x: Tensor, seen: Evaluation, m: int, stream: Stream
    ) -> tuple[Tensor, Evaluation, Tensor]:
        """From level m to m - 1: the new points, their evaluation, and the log-weight gained, (rows,) in float64.

        Unless overridden, a walk by the proposal that gains the work of its path.
        """
        k = evaluate.ladder.substeps
        index, down = torch.full((len(x),), m * k), torch.full((len(x),), -1)
        path = walk(evaluate, x, seen, index, down, k, stream)
        return path.x, path.seen, log_work(path, evaluate.coefficients)


@dataclass(frozen=True)
class PathWork(Weight):
    """`log_work(down)`, the Radon-Nikodym estimator (RNE); for any target, process and proposal."""


@dataclass(frozen=True)
class Twisted(Weight):
    """The twisted diffusion sampler: the reward's gradient guides the walk, noising is left as trained."""

    def proposal(self, proposal: Proposal) -> Proposal:
        return replace(proposal, k="paper", guidance="gradient")


@dataclass(frozen=True)
class Steering(Weight):
    """Feynman-Kac steering: particles walk as the models do, and the weight is a difference of rewards."""

    def proposal(self, proposal: Proposal) -> Proposal:
        return replace(proposal, k="paper", guidance="none")


@dataclass(frozen=True)
class DiscreteGuidance(Weight):
    """`log_work` for guided discrete models; refuses others."""

    def check(self, evaluate: Evaluator) -> None:
        if not evaluate.process.is_discrete:
            raise InputError("DiscreteGuidance needs discrete models; PathWork or FeynmanKac serve Gaussian ones")


@dataclass(frozen=True)
class FeynmanKac(Weight):
    """Feynman-Kac correctors (Skreta et al. 2025) in the clock `u = -sigma^2`, for any exponents and rewards.

    With `S = sum_j c_j score_j`, the particle follows `S + grad r / 2` and its log-weight grows by

        (|S|^2 - sum_j c_j |score_j|^2) / 2 + S . grad r / 2 + d r_u / du        at fixed x

    Removing a Langevin move of variance delta leaves the weights unchanged; `cooled` removes 1 - 1/C of the noise.
    """

    cooled: bool = False

    def check(self, evaluate: Evaluator) -> None:
        _gaussian(evaluate)
        # The weights hold for the true gradient of the reward, not for one that was clipped or cut short.
        proposal = evaluate.proposal
        if proposal.clip or any((proposal.guidance or r.guidance) != "gradient" for r in evaluate.target.rewards):
            raise InputError(
                'FeynmanKac needs rewards with guidance="gradient" and no clip; use Steering or PathWork for others'
            )
        if evaluate.coefficients.proposal != evaluate.coefficients.target:
            raise InputError("FeynmanKac follows the target's own score: leave the proposal's exponents unset")

    def descend(
        self, evaluate: Evaluator, x: Tensor, seen: Evaluation, m: int, stream: Stream
    ) -> tuple[Tensor, Evaluation, Tensor]:
        process, c = _gaussian(evaluate), evaluate.coefficients.target
        removed = 1 - 1 / evaluate.coefficients.total if self.cooled else 0.0
        times, k = evaluate.times, evaluate.ladder.substeps
        gained = torch.zeros(len(x), dtype=evaluate.real, device=x.device)
        for i in range(m * k, (m - 1) * k, -1):
            t, s = times[i].expand(len(x)), times[i - 1].expand(len(x))
            below = evaluate.ladder.times[i - 1].expand(len(x))
            d = process.denoising_gain(s, t)
            scores = [process.project(score_of(p, x, t)) for p in seen.predictions]
            score = torch.stack([cj * sj for cj, sj in zip(c, scores, strict=True)]).sum(0)
            pull = process.project(seen.drift) - score
            squares = _dot(score, score) - sum(cj * _dot(sj, sj) for cj, sj in zip(c, scores, strict=True))
            gained = gained + d[:, 0] / 2 * (squares + _dot(score, pull))
            if evaluate.target.rewards:
                gained = gained + evaluate(x, below).reward - seen.reward
            drift = score + pull / 2 - removed / 2 * (score + pull)
            noise = process.scaled_noise(stream.at(i), x, (1 - removed) * d)
            x = x + rows_like(d[:, 0], x).to(x.dtype) * drift + noise
            seen = evaluate(x, below)
        return x, seen, gained


def _gaussian(evaluate: Evaluator) -> GaussianProcess:
    process = evaluate.process
    if not isinstance(process, GaussianProcess):
        raise InputError(f"FeynmanKac is for Gaussian diffusions, got {process!r}")
    return process


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).flatten(1).sum(1, dtype=real(a.device))
