"""Replace the segments of a whole plan by new ones, all at once, where rewards couple neighbours only.

A plan at level m has J segments. Its law is `pi_t ~ exp(r_t(x_1, .., x_J)) prod_j p_t(x_j)`. The move:

1. Draw n candidates from `p_t`, the law of one segment, by plain denoising.
2. Put them into one pool with the J segments of the present plan.
3. Draw a new plan, J different members of the pool in some order, with probability proportional to `exp(r_t)`.

This leaves `pi_t` invariant. Given the pool, every choice of J members has the density `exp(r_t(chosen))` times the
product of `p_t` over the whole pool, and that product is the same for every choice (Neal, Beal and Roweis, 2004, use
such pools for hidden Markov models). It is exact as far as plain denoising draws from `p_t`, for any number of
candidates; more candidates make larger moves.

Step 3 is a hidden Markov chain with the pool as its states: rewards that couple neighbours are its transitions and
rewards of one segment its observations, so that a pass from the last segment to the first sums over all plans and a
pass back draws one. A plan that uses a candidate twice is discarded. Other rewards cannot be summed over: several plans
are drawn without them, and one of these or the present plan is chosen by their weights.

Particles can start from a pool, too. With P members and the total weight T of all sequences, a plan drawn from it has
the proper weight `T / (P (P - 1) .. (P - J + 1))`, times the rewards that were left out, and 0 if it is discarded: for
every f the mean of `weight * f(plan)` is the integral of `exp(r_t) f prod_j p_t`. Given a plan that is kept, the rest
of its pool are independent draws, so conditional SMC starts from pools as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from crepe_diffusion.batches import IMPOSSIBLE, called
from crepe_diffusion.errors import InputError, NonFiniteError
from crepe_diffusion.evaluate import Evaluator
from crepe_diffusion.kernels import Start, State
from crepe_diffusion.paths import walk
from crepe_diffusion.processes import Evaluation
from crepe_diffusion.proposals import Proposal
from crepe_diffusion.random import Stream
from crepe_diffusion.rewards import Reward
from crepe_diffusion.schedules import ladder
from crepe_diffusion.stitching.rewards import AnySegmentReward, LinkReward, SegmentReward
from crepe_diffusion.stitching.segments import Segments

__all__ = ["Restitch"]


@dataclass(frozen=True)
class Restitch:
    """An explorer for `Segments`: in each iteration, with probability `chance`, one level is chosen between two times,
    and its plans are drawn again from new candidates.

    Rewards of the form `LinkReward` (`Junctions`) or `SegmentReward` (`Reach`) are summed over exactly. All others are
    computed on `n_plans` whole plans, of which one is chosen; an `AnySegmentReward` (`WayPoint`) makes plans more
    frequent that earn it. A move costs `n_candidates * (n_steps + 1)` network rows per chain, for the candidates, and
    one evaluation of the new plan. With few candidates, or at a level close to the data, no candidates fit together and
    the present plan stays.

    As the `starter` of `SMC` and `ParticleGibbs` it gives each batch one pool at the highest of these levels, and all
    particles of the batch start there as plans of that pool.

    >>> Restitch(n_candidates=512, between=(0.1, 0.3)).n_steps
    12
    """

    n_candidates: int = 2048
    chance: float = 0.05
    between: tuple[float, float] = (0.08, 0.2)
    n_steps: int = 12
    n_plans: int = 64
    renews: ClassVar[bool] = True
    gathers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("n_candidates", "n_steps", "n_plans"):
            if int(getattr(self, name)) != getattr(self, name) or getattr(self, name) < 1:
                raise InputError(f"{name} must be a positive integer, got {getattr(self, name)!r}")
        if not 0 < self.chance <= 1 or not 0 < self.between[0] < self.between[1]:
            raise InputError(f"need 0 < chance <= 1 and two increasing times, got {self.chance!r} and {self.between!r}")

    def check(self, evaluate: Evaluator) -> None:
        model = evaluate.target.models[0]
        if not isinstance(model, Segments) or evaluate.target.exponents != (1.0,):
            raise InputError("restitching needs one model of several segments, with exponent 1: Segments(model, n)")
        if model.model.process().needs_fit():
            raise InputError("restitching needs a measured process: give the model Gaussian(information=...)")
        if not any(isinstance(r.function, LinkReward) for r in evaluate.target.rewards):
            raise InputError("restitching needs a reward that couples neighbours, such as stitching.Junctions")
        if any(r.on != "prediction" for r in evaluate.target.rewards):
            raise InputError('restitching needs rewards on="prediction"')
        for reward in evaluate.target.rewards:
            _check_parts(reward, model)
        if not len(self._levels(evaluate)):
            raise InputError(f"no level of the ladder lies between {self.between[0]:g} and {self.between[1]:g}")

    def _levels(self, evaluate: Evaluator) -> Tensor:
        t = evaluate.ladder.levels
        return ((t >= self.between[0]) & (t <= self.between[1]) & (t < t[-1])).nonzero()[:, 0]

    def __call__(self, state: State, evaluate: Evaluator, stream: Stream) -> tuple[State, Tensor]:
        moved = torch.zeros(state.level.numel(), dtype=torch.bool)
        if float(stream.at("whether").uniform((1,))) > self.chance:
            return state, moved
        state = state.whole()
        levels = self._levels(evaluate)
        level = int(levels[int(stream.at("where").uniform((1,)) * len(levels))])
        t, rows = evaluate.ladder.levels[level], state.row_at(level)
        fresh, known, sound = self._candidates(evaluate, t, len(rows), stream.at("candidates"))
        pool = torch.cat([state.x[rows], fresh], 1)
        predictions = torch.cat([state.seen.predictions[0][rows], known], 1)
        present = torch.arange(_segments(evaluate).n).expand(len(rows), -1)
        sound = torch.cat([state.seen.possible[rows, None].expand_as(present), sound], 1)
        chosen = self._choose(evaluate, predictions, sound, t, present, stream)
        new_x = _pick(pool, chosen)
        new = evaluate(new_x, t.expand(len(rows)))
        moved[rows] = (chosen >= present.shape[1]).all(1)  # no segment of the old plan is left
        old = state.seen
        seen = Evaluation(
            (old.predictions[0].index_copy(0, rows, new.predictions[0]),),
            old.drift.index_copy(0, rows, new.drift),
            old.reward.index_copy(0, rows, new.reward),
        )
        return State(state.x.index_copy(0, rows, new_x), seen, state.level), moved

    def begin(self, evaluate: Evaluator, n_chains: int, stream: Stream) -> tuple[Tensor, int]:
        """Plans of candidates only, (chains, *event), and the level that they belong to: a point to start from."""
        level = self.start_level(evaluate)
        t = evaluate.ladder.levels[level]
        pool, predictions, sound = self._candidates(evaluate, t, n_chains, stream.at("candidates"))
        nothing = (torch.arange(_segments(evaluate).n) % self.n_candidates).expand(n_chains, -1)
        return _pick(pool, self._choose(evaluate, predictions, sound, t, nothing, stream)), level

    def start_level(self, evaluate: Evaluator) -> int:
        return int(self._levels(evaluate)[-1])

    def particles(
        self,
        evaluate: Evaluator,
        n_batches: int,
        n_particles: int,
        stream: Stream,
        kept: tuple[Tensor, Evaluation] | None = None,
    ) -> Start:
        """Plans of one pool per batch, with proper weights; a kept plan is part of the pool and particle 0."""
        level = self.start_level(evaluate)
        t, n_segments = evaluate.ladder.levels[level], _segments(evaluate).n
        pool, predictions, sound = self._candidates(evaluate, t, n_batches, stream.at("candidates"))
        plans = torch.zeros(n_batches, 0, n_segments, dtype=torch.long)
        if kept is not None:
            x, seen = kept
            pool, predictions = torch.cat([x, pool], 1), torch.cat([seen.predictions[0], predictions], 1)
            sound = torch.cat([seen.possible[:, None].expand(-1, n_segments), sound], 1)
            plans = torch.arange(n_segments).expand(n_batches, 1, -1)
        sums = self._sums(evaluate, predictions, sound, t)
        n_drawn = max(self.n_plans, 4 * n_particles) - plans.shape[1]
        drawn, good, log_total = _forward_backward(sums.single, sums.link, n_drawn, stream.at("plans"), sums.pivot)
        plans, good = torch.cat([plans, drawn], 1), torch.cat([good.new_ones(plans.shape[:2]), good], 1)
        log_weights = sums.left_out(evaluate, predictions, plans, t).where(good, -torch.inf)
        if not log_weights.isfinite().any(1).all():
            raise NonFiniteError(
                f"{self.n_candidates} candidates at t = {float(t):.3g} hold no plan that is possible: use more of them,"
                " or a higher level"
            )
        # Many plans are drawn and few go on, by weight: plans are cheap, and what is made of them is not.
        chosen = stream.at("chosen").categorical(log_weights[:, None].expand(-1, n_particles, -1))
        if kept is not None:
            chosen[:, 0] = 0
        plans = plans.gather(1, chosen[..., None].expand(-1, -1, n_segments))
        size = pool.shape[1]
        ways = math.lgamma(size + 1) - math.lgamma(size - n_segments + 1)
        log_z = log_total - ways + log_weights.logsumexp(1) - math.log(log_weights.shape[1])
        fresh = torch.full(plans.shape[:2], kept is None) | (plans >= n_segments).all(2)
        x = torch.stack([_pick(pool, plan) for plan in plans.unbind(1)], 1)
        return Start(x.flatten(0, 1), level, log_z[:, None].expand(-1, n_particles), fresh)

    def _candidates(
        self, evaluate: Evaluator, t: Tensor, n_chains: int, stream: Stream
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draws of p_t with their predictions, (chains, candidates, *event), and which of them are finite."""
        model = _segments(evaluate).model
        steps = ladder.karras(self.n_steps + 1, float(t), float(evaluate.ladder.times[-1]))
        plain = Evaluator(
            model.as_target(),
            steps,
            model.process(),
            Proposal("paper"),
            micro_batch=evaluate.micro_batch,
            nonfinite=evaluate.nonfinite,
            counts=evaluate.counts,
        )
        n = n_chains * self.n_candidates
        x = plain.noise(stream.at("noise"), n)
        top = torch.full((n,), self.n_steps)
        start = plain(x, steps.times[top])
        path = walk(plain, x, start, top, torch.full((n,), -1), self.n_steps, stream.at("walk"))
        sound = start.possible & path.seen.possible & path.models[0].isfinite()
        shape = (n_chains, self.n_candidates, *model.event_shape)
        return path.x.reshape(shape), path.seen.predictions[0].reshape(shape), sound.reshape(shape[:2])

    def _choose(
        self, evaluate: Evaluator, predictions: Tensor, sound: Tensor, t: Tensor, present: Tensor, stream: Stream
    ) -> Tensor:
        """Which member of the pool each segment becomes, (chains, segments), given the present choice."""
        n_chains = len(predictions)
        sums = self._sums(evaluate, predictions, sound, t)
        plans, good, _ = _forward_backward(sums.single, sums.link, self.n_plans, stream.at("plans"), sums.pivot)
        if not sums.whole:
            first = good.long().argmax(1)
            return torch.where(good.any(1)[:, None], plans[torch.arange(n_chains), first], present)
        plans = torch.cat([present[:, None], plans], 1)
        log_weights = sums.left_out(evaluate, predictions, plans, t)
        log_weights[:, 1:] = log_weights[:, 1:].where(good, -torch.inf)
        winner = stream.at("vote").categorical(log_weights)
        return plans[torch.arange(n_chains), winner]

    def _sums(self, evaluate: Evaluator, predictions: Tensor, sound: Tensor, t: Tensor) -> _Sums:
        """The rewards as functions of one member of the pool and of two; what is neither is left out."""
        n_chains, n = predictions.shape[:2]
        single = torch.zeros(n_chains, _segments(evaluate).n, n, dtype=torch.float64)
        single = single.where(sound[:, None], IMPOSSIBLE)  # predictions that are not finite
        link = torch.zeros(n_chains, n, n, dtype=torch.float64)
        whole: list[Reward] = []
        pivot: Tensor | None = None
        for term in evaluate.target.rewards:
            weight = term.weight(t[None], evaluate.ladder)
            reward = term.function
            if isinstance(reward, LinkReward):
                link += weight * reward.link(predictions, predictions).to(torch.float64)
            elif isinstance(reward, SegmentReward):
                single[:, reward.segment] += weight * reward.single(predictions).to(torch.float64)
            else:
                whole.append(term)
                if pivot is None and isinstance(reward, AnySegmentReward):
                    pivot = weight * reward.some(predictions).to(torch.float64)
        return _Sums(single, link, pivot, whole)


@dataclass(frozen=True)
class _Sums:
    """The rewards of plans of a pool: `single` (chains, segments, n) and `link` (chains, n, n) are summed over, `pivot`
    (chains, n) is what some segment should earn, and rewards of a `whole` plan are left out.
    """

    single: Tensor
    link: Tensor
    pivot: Tensor | None
    whole: list[Reward]

    def left_out(self, evaluate: Evaluator, predictions: Tensor, plans: Tensor, t: Tensor) -> Tensor:
        """What the weights of drawn plans (chains, plans, segments) lack, in logs, (chains, plans)."""
        found = torch.zeros(plans.shape[:2], dtype=torch.float64)
        if not self.whole:
            return found
        seen = torch.stack([_pick(predictions, plan) for plan in plans.unbind(1)], 1).flatten(0, 1)
        for term in self.whole:
            values = called(term.function, f"reward {term.name!r}", seen).to(torch.float64)
            value = term.weight(t[None], evaluate.ladder) * values
            found += value.reshape(found.shape)
        if self.pivot is not None:
            found -= self.pivot[torch.arange(len(plans))[:, None, None], plans].logsumexp(-1)
        return found


def _forward_backward(
    single: Tensor, link: Tensor, n_plans: int, stream: Stream, pivot: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Plans drawn from `exp(sum_j single_j + link)`, (chains, plans, segments), and which use no candidate twice; and
    the log of the total weight of all plans, (chains,).

    With a `pivot` (chains, n), the weight of a plan is multiplied by `sum_j exp(pivot_j)` over its segments: one of
    them, at any place in the plan, is the pivot.
    """
    n_chains, n_segments, _ = single.shape
    best = single.amax(-1, keepdim=True)
    own = (single - best).exp()
    link = link.exp()
    here = torch.zeros_like(own[:, 0]) if pivot is None else (pivot - pivot.amax(-1, keepdim=True)).exp()
    log_total = best.sum((1, 2)) + (0.0 if pivot is None else pivot.amax(-1))
    # The total weight of what follows each candidate: if the pivot came before it, and if it is there or comes later.
    free, due = [own[:, -1]], [own[:, -1] * here]
    reach = []
    for j in range(n_segments - 2, -1, -1):
        after = link @ torch.stack([free[-1], due[-1]], -1)
        now = torch.stack([own[:, j] * after[..., 0], own[:, j] * (here * after[..., 0] + after[..., 1])], -1)
        scale = now.flatten(1).amax(-1).clamp(min=1e-300)
        now, log_total = now / scale[:, None, None], log_total + scale.log()
        free.append(now[..., 0])
        due.append(now[..., 1])
        reach.append(after)
    free, due, reach = free[::-1], due[::-1], reach[::-1]
    first = free[0] if pivot is None else due[0]
    possible = (first.sum(-1) > 0)[:, None]
    chains = torch.arange(n_chains)[:, None]

    def draw(weight: Tensor, j: int) -> Tensor:  # impossible plans are drawn too, and discarded
        return stream.at(j).categorical(weight.where(possible[..., None], 1.0).log())

    drawn = [draw(first[:, None].expand(-1, n_plans, -1), 0)]
    waiting = torch.full((n_chains, n_plans), pivot is not None)
    for j in range(1, n_segments):
        last = drawn[-1]
        if pivot is not None:
            at, ahead = here[chains, last] * reach[j - 1][chains, last, 0], reach[j - 1][chains, last, 1]
            waiting = waiting & (stream.at(j, "pivot").uniform((n_chains, n_plans)) * (at + ahead) > at)
        ahead = torch.where(waiting[..., None], due[j][:, None], free[j][:, None])
        drawn.append(draw(link[chains, last] * ahead, j))
    plans = torch.stack(drawn, -1)
    distinct = (plans.sort(-1)[0].diff(dim=-1) > 0).all(-1)
    return plans, distinct & possible, log_total + first.sum(-1).log()


def _check_parts(reward: Reward, model: Segments) -> None:
    """Refuse a reward whose parts do not sum to the reward itself: the move would sample another law."""
    x, function = Stream(0).at("parts").normal((2, *model.event_shape), dtype=model.dtype), reward.function
    if isinstance(function, LinkReward):
        name, parts = "link", function.link(x, x).diagonal(offset=1, dim1=-2, dim2=-1).sum(-1)
    elif isinstance(function, SegmentReward):
        name, parts = "single", function.single(x[:, function.segment])
    else:
        return
    whole = function(x)
    if parts.shape != whole.shape or not torch.allclose(parts, whole, rtol=1e-3, atol=1e-6):
        raise InputError(
            f"reward {reward.name!r}: its method {name} gives {parts.tolist()} for two plans whose reward is"
            f" {whole.tolist()}; both must agree"
        )


def _segments(evaluate: Evaluator) -> Segments:
    model = evaluate.target.models[0]
    assert isinstance(model, Segments)
    return model


def _pick(pool: Tensor, chosen: Tensor) -> Tensor:
    """The chosen member of the pool for every segment, (chains, segments, *event)."""
    return pool[torch.arange(len(pool))[:, None], chosen]
