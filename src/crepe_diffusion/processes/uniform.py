"""The uniform process: a token is replaced by any other.

q_t(x | x_0) = a [x = x_0] + (1 - a) / V,     a = 1 - t
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from crepe_diffusion.batches import rows_like
from crepe_diffusion.devices import as_real, real
from crepe_diffusion.errors import InputError
from crepe_diffusion.processes.asked import Asked
from crepe_diffusion.processes.base import Coefficients, Evaluation
from crepe_diffusion.processes.discrete import (
    LOG_ZERO,
    Discrete,
    TokenMoves,
    changed_position,
    check_at_once,
    most_at_once,
    pick,
    random_position,
    survival,
    with_entry,
)
from crepe_diffusion.processes.quadrature import log_integral
from crepe_diffusion.random import Stream

__all__ = ["Uniform"]


@dataclass(frozen=True)
class Jumps(Asked):
    """`log p_t(y) - log p_t(x)`, where y has the tokens `given` at the `chosen` positions; 0 for a proposal."""

    chosen: Tensor
    given: Tensor

    def answer(
        self, process: Discrete, x: Tensor, t: Tensor, predictions: tuple[Tensor, ...], coefficients: Coefficients
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(process, Uniform)
        y = torch.where(self.chosen, self.given, x)
        return y, torch.stack([*(process.log_jump(x, y, p, t) for p in predictions), torch.zeros_like(t)])


@dataclass(frozen=True)
class Replaced(Asked):
    """The expected number of `free` positions whose token was replaced by another one; 0 for a proposal."""

    free: Tensor

    @staticmethod
    def anywhere(process: Uniform, x: Tensor) -> Replaced:
        free = process.free(x).flatten(1)
        return Replaced(torch.arange(free.shape[1], device=x.device).expand(free.shape), free)

    def answer(
        self, process: Discrete, x: Tensor, t: Tensor, predictions: tuple[Tensor, ...], coefficients: Coefficients
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(process, Uniform)
        return x, torch.stack([*(process.n_replaced(x, p, self.free) for p in predictions), torch.zeros_like(t)])


@dataclass(frozen=True)
class Uniform(Discrete, TokenMoves):
    """Every token is replaced by a uniformly drawn one at the noising rate.

    All positions change together in a step. With `at_once` (a number of positions) the ratio of densities is computed
    along a way of its own between the two ends of the step: at the upper time, at most `at_once` positions change after
    each evaluation, and then time moves while the state stays. In the clock log y, where y is the odds of a replaced
    token, `y = (t / V) / (1 - t + t / V)`, densities of n free positions change by

        log p_t(x) = n log(1 - t + t / V) + log sum_k A_k(x) y^k,    d/dlog y of the sum = K = sum_i P(x_0^i != x^i | x)

    where A_k is the probability of all states that differ from x in k positions. The integral of K is a Gauss-Legendre
    quadrature with at most `nodes` nodes for each factor of ten in y, fewer for short steps. In a step that touches
    t = 0 it goes down until K falls like y, so rarer states have more nodes. With `at_once=1` the ratio is exact up
    to this quadrature, whose error falls geometrically with `nodes`. A step costs one evaluation per changed position
    but the first, and the nodes. None: the product over positions, which costs nothing more. `"auto"` as for `Masked`.
    """

    at_once: int | str | None = "auto"
    nodes: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_once(self.at_once)
        if isinstance(self.nodes, bool) or int(self.nodes) != self.nodes or self.nodes < 2:
            raise InputError(f"nodes must be a number of times, 2 or more, got {self.nodes!r}")

    def multiplies(self, event: torch.Size) -> bool:
        return self.log_probs is None and most_at_once(self.at_once, self.n_free(event)) > 1

    def positions_at_once(self, x: Tensor) -> int | None:
        """How many positions may change together on the way of a ratio; None if it has no way of its own.

        One position alone has a closed form, and so have known densities.
        """
        n = self.n_free(x.shape[1:])
        return None if self.at_once is None or self.log_probs is not None or n < 2 else most_at_once(self.at_once, n)

    def log_jump(self, x: Tensor, y: Tensor, log_p: Tensor, t: Tensor) -> Tensor:
        """`log p_t(y) - log p_t(x)` from the prediction at x, exact where y differs in one position."""
        each = pick(self.log_concrete(x, as_real(log_p), t), y)
        return torch.where(x != y, each, 0.0).flatten(1).sum(1)

    def n_replaced(self, x: Tensor, log_p: Tensor, free: Tensor) -> Tensor:
        """K: how many of the positions that are `free` have another token than x_0, as the model expects."""
        return torch.where(free, -torch.expm1(pick(as_real(log_p), x)), 0.0).flatten(1).sum(1)

    def kept(self, t: Tensor) -> Tensor:
        """`q_t(x | x)`: the chance that a position has its own token."""
        return 1 - t * (1 - 1 / self.vocab_size)

    def odds(self, t: Tensor) -> Tensor:
        """y: the chance that a position has one certain other token, over that of its own."""
        return t / self.vocab_size / self.kept(t)

    def log_time_ratios(
        self, n_free: int, s: Tensor, t: Tensor, replaced: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """`log p_s(x) - log p_t(x)` at fixed x, (models, rows), of times (rows,) on the CPU.

        `replaced(rows, times)` returns K of some of the rows, (models, these). Its times depend on x, s and t alone, so
        that the ratio is the same for both directions of a step.
        """

        def k(rows: Tensor, y: Tensor) -> Tensor:
            return replaced(rows, y * self.vocab_size / (1 + y * (self.vocab_size - 1)))

        integral = log_integral(self.odds(s), self.odds(t), k, self.nodes)
        return (n_free * (self.kept(s) / self.kept(t)).log()).to(integral) - integral

    @property
    def n_states(self) -> int:
        return self.vocab_size

    def noise(self, stream: Stream, like: Tensor, t: float, coefficients: Coefficients) -> Tensor:
        return self.with_prompt(stream.integers(tuple(like.shape), self.vocab_size, device=like.device))

    def known(self, x: Tensor, t: Tensor) -> Tensor:
        return rows_like(t == 0, x).expand(x.shape)

    def noising(self, x_s: Tensor, s: Tensor, t: Tensor) -> Tensor:
        keep = (survival(t, x_s) / survival(s, x_s)).clamp(0, 1)[..., None]
        return self._noised(x_s, keep).log()

    def _log_w(self, x_t: Tensor, log_p: Tensor, t: Tensor) -> Tensor:
        """log p(x_0) / q_t(x_t | x_0), for each x_0."""
        a = survival(t, x_t)[..., None]
        return log_p - self._noised(x_t, a).log()

    def _noised(self, x: Tensor, keep: Tensor) -> Tensor:
        """Probabilities `keep [v = x] + (1 - keep) / V`, for each v."""
        others = (1 - keep) / self.vocab_size
        return with_entry(others.expand(*x.shape, self.vocab_size).clone(), x, keep + others)

    def _log_marginal(self, log_w: Tensor, t: Tensor, x: Tensor) -> Tensor:
        """log sum_{x_0} w(x_0) q_t(v | x_0), for each v."""
        a = survival(t, x)[..., None]
        spread = ((1 - a) / self.vocab_size).log() + log_w.logsumexp(-1, keepdim=True)
        return torch.logaddexp(a.log() + log_w, spread)

    def denoising(self, x_t: Tensor, log_p: Tensor, s: Tensor, t: Tensor) -> Tensor:
        # F is symmetric, so F(x_t | v) over v is the noising row of x_t.
        return self.noising(x_t, s, t) + self._log_marginal(self._log_w(x_t, log_p, t), s, x_t)

    def log_ratio(self, x_s: Tensor, x_t: Tensor, log_p: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return pick(self._log_marginal(self._log_w(x_t, log_p, t), s, x_t), x_s)

    def log_concrete(self, x: Tensor, log_p: Tensor, t: Tensor) -> Tensor:
        score = self._log_marginal(self._log_w(x, log_p, t), t, x)
        return with_entry(score, x, LOG_ZERO)

    def local_move(self, x: Tensor, drift: Tensor, stream: Stream) -> Tensor:
        """At a random position, another token, uniformly."""
        position = random_position(x, self.free(x), stream.at("position"))
        flat = x.flatten(1)
        here = flat.gather(1, position[:, None])[:, 0]
        token = stream.at("token").categorical(self._others(here))
        return flat.scatter(1, position[:, None], token[:, None]).reshape(x.shape)

    def _others(self, here: Tensor) -> Tensor:
        return with_entry(torch.zeros(*here.shape, self.vocab_size, device=here.device), here, LOG_ZERO)

    def single(self, x: Tensor, stream: Stream) -> Asked:
        position = random_position(x, self.free(x), stream.at("position"))[:, None]
        token = stream.at("token").categorical(self._others(x.flatten(1).gather(1, position)[:, 0]))
        return Jumps(position, torch.ones_like(position, dtype=torch.bool), token[:, None])

    def noisier(self, x: Tensor, asked: Asked) -> Tensor:
        return x

    def changed(self, noisy: Tensor, asked: Asked, tokens: Tensor) -> Tensor:
        return noisy.flatten(1).scatter(1, asked.positions, tokens).reshape(noisy.shape)

    def single_ratios(self, asked: Asked, log_p: Tensor, t: Tensor) -> Tensor:
        return log_p

    def local_log_q(self, x: Tensor, y: Tensor, at_x: Evaluation, at_y: Evaluation) -> Tensor:
        return torch.zeros(len(x), dtype=real(x.device), device=x.device)

    def density_ratios(self, x: Tensor, y: Tensor, at_x: Evaluation, at_y: Evaluation, t: Tensor) -> Tensor:
        """The concrete score at x, of the token that y has."""
        position, moved = changed_position(x, y)
        token = y.flatten(1).gather(1, position[:, None])[:, 0]
        at = position[:, None, None].expand(-1, 1, self.vocab_size)

        def score(log_p: Tensor) -> Tensor:
            log_score = self.log_concrete(x, as_real(log_p), t).flatten(1, -2)
            return pick(log_score.gather(1, at)[:, 0], token).where(moved, 0.0)

        return torch.stack([score(p) for p in at_x.predictions])
