"""Exchange the segments of a whole plan for fresh ones, all at once, where rewards only tie neighbours together.

Given its neighbours, a segment is independent of the others, so plans at one level form a hidden Markov chain. Some
thousand trajectories are drawn from the model's own marginal p_t and laid beside the J segments of the present plan.
Whichever J of them, in whatever order, are called the plan: the others are draws of p_t, and the density of all of them
together differs only by exp(r_t) of the plan. So a plan may be drawn from all of these at once, by that weight. A
forward-backward pass does so (as in Neal, Beal and Roweis, 2004); plans that use a trajectory twice are thrown away.
What rewards of other kinds say is accounted for by choosing among several such plans and the present one.

Leaves pi_t invariant as far as plain denoising draws from p_t. It changes the course of a plan as a whole, which swaps
alone would have to find by chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from crepe_diffusion.batches import IMPOSSIBLE
from crepe_diffusion.errors import InputError
from crepe_diffusion.evaluate import Evaluator
from crepe_diffusion.kernels.state import State
from crepe_diffusion.paths import walk
from crepe_diffusion.processes import Evaluation
from crepe_diffusion.proposals import Proposal
from crepe_diffusion.random import Stream
from crepe_diffusion.schedules import ladder
from crepe_diffusion.stitching.segments import Segments
from crepe_diffusion.targets import Reward

__all__ = ["Restitch"]


@dataclass(frozen=True)
class Restitch:
    """An explorer for `Segments`: with probability `chance`, one level between the given times is restitched.

    Rewards that tie neighbours (`Junctions`) or concern one segment (`Reach`) are summed over exactly; others are
    judged on `n_plans` whole plans, among which those that any one segment can fulfil (`WayPoint`) are sought out.
    A move costs `n_candidates * (n_steps + 1)` network rows a chain, for the fresh trajectories. With too few of them,
    or at a level too near the data, nothing fits together.
    """

    n_candidates: int = 2048
    chance: float = 0.05
    between: tuple[float, float] = (0.08, 0.2)
    n_steps: int = 12
    n_plans: int = 64
    renews: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("n_candidates", "n_steps", "n_plans"):
            if int(getattr(self, name)) != getattr(self, name) or getattr(self, name) < 1:
                raise InputError(f"{name} must be a positive integer, got {getattr(self, name)!r}")
        if not 0 < self.chance <= 1 or not 0 < self.between[0] < self.between[1]:
            raise InputError(f"need 0 < chance <= 1 and two increasing times, got {self.chance!r} and {self.between!r}")

    def check(self, evaluate: Evaluator) -> None:
        model = evaluate.target.models[0]
        if not isinstance(model, Segments) or evaluate.target.exponents != (1.0,):
            raise InputError("restitching needs one model of several segments, with exponent 1")
        if model.model.process().needs_fit():
            raise InputError("restitching needs a measured process: give the model Gaussian(information=...)")
        if not any(hasattr(r.function, "link") for r in evaluate.target.rewards):
            raise InputError("restitching needs a reward that ties neighbours, such as rewards.Junctions")
        if any(r.on != "prediction" for r in evaluate.target.rewards):
            raise InputError('restitching needs rewards on="prediction"')
        if not len(self._levels(evaluate)):
            raise InputError(f"no level of the ladder lies between {self.between[0]:g} and {self.between[1]:g}")

    def _levels(self, evaluate: Evaluator) -> Tensor:
        t = evaluate.ladder.levels
        return ((t >= self.between[0]) & (t <= self.between[1]) & (t < t[-1])).nonzero()[:, 0]

    def __call__(self, state: State, evaluate: Evaluator, stream: Stream) -> tuple[State, Tensor]:
        moved = torch.zeros(len(state.x), dtype=torch.bool)
        if float(stream.at("whether").uniform((1,))) > self.chance:
            return state, moved
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
        moved[rows] = (chosen >= present.shape[1]).all(1)  # nothing of the old plan is left
        x, *evaluations = (torch.index_copy(old, 0, rows, value) for old, value in _pairs(state, new_x, new))
        return State(x, Evaluation((evaluations[0],), evaluations[1], evaluations[2]), state.level), moved

    def begin(self, evaluate: Evaluator, n_chains: int, stream: Stream) -> tuple[Tensor, int]:
        """Plans of fresh trajectories alone, (chains, *event), and the level they belong to: a place to start from."""
        level = int(self._levels(evaluate)[-1])
        t = evaluate.ladder.levels[level]
        pool, predictions, sound = self._candidates(evaluate, t, n_chains, stream.at("candidates"))
        nothing = (torch.arange(_segments(evaluate).n) % self.n_candidates).expand(n_chains, -1)
        return _pick(pool, self._choose(evaluate, predictions, sound, t, nothing, stream)), level

    def _candidates(
        self, evaluate: Evaluator, t: Tensor, n_chains: int, stream: Stream
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Fresh trajectories at time t with their predictions, (chains, candidates, *event), and which are finite."""
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
        """Which trajectory each segment becomes, (chains, segments), given the present choice."""
        n_chains, n = predictions.shape[:2]
        n_segments = _segments(evaluate).n
        single = torch.zeros(n_chains, n_segments, n, dtype=torch.float64)
        single = single.where(sound[:, None], IMPOSSIBLE)  # of which a model says nothing finite
        link = torch.zeros(n_chains, n, n, dtype=torch.float64)
        whole: list[Reward] = []
        pivot: Tensor | None = None
        for term in evaluate.target.rewards:
            weight = term.weight(t[None], evaluate.ladder)
            reward: Any = term.function
            if hasattr(reward, "link"):
                link += weight * reward.link(predictions, predictions).to(torch.float64)
            elif hasattr(reward, "single"):
                single[:, reward.segment] += weight * reward.single(predictions).to(torch.float64)
            else:
                whole.append(term)
                if pivot is None and hasattr(reward, "some"):
                    pivot = weight * reward.some(predictions).to(torch.float64)
        plans, good = _forward_backward(single, link, self.n_plans, stream.at("plans"), pivot)
        if not whole:
            first = good.long().argmax(1)
            return torch.where(good.any(1)[:, None], plans[torch.arange(n_chains), first], present)
        plans = torch.cat([present[:, None], plans], 1)
        votes = torch.zeros(n_chains, self.n_plans + 1, dtype=torch.float64)
        seen = torch.stack([_pick(predictions, plan) for plan in plans.unbind(1)], 1).flatten(0, 1)
        for term in whole:
            value = term.weight(t[None], evaluate.ladder) * term.function(seen).to(torch.float64)
            votes += value.reshape(votes.shape)
        if pivot is not None:
            votes -= pivot[torch.arange(n_chains)[:, None, None], plans].logsumexp(-1)
        votes[:, 1:] = votes[:, 1:].where(good, -torch.inf)
        winner = stream.at("vote").categorical(votes)
        return plans[torch.arange(n_chains), winner]


def _forward_backward(
    single: Tensor, link: Tensor, n_plans: int, stream: Stream, pivot: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Plans drawn from `exp(sum_j single_j + link)`, (chains, plans, segments), and which use nothing twice.

    With a `pivot` (chains, n), the weight is multiplied by its sum over the segments, `sum_j exp(pivot_j)`: one of
    them, anywhere in the plan, is the one that counts.
    """
    n_chains, n_segments, _ = single.shape
    own = (single - single.amax(-1, keepdim=True)).exp()
    link = link.exp()
    here = torch.zeros_like(own[:, 0]) if pivot is None else (pivot - pivot.amax(-1, keepdim=True)).exp()
    # What may still come after each candidate: with the pivot behind it, and with the pivot there or ahead.
    free, due = [own[:, -1]], [own[:, -1] * here]
    reach = []
    for j in range(n_segments - 2, -1, -1):
        after = link @ torch.stack([free[-1], due[-1]], -1)
        now = torch.stack([own[:, j] * after[..., 0], own[:, j] * (here * after[..., 0] + after[..., 1])], -1)
        now = now / now.flatten(1).amax(-1)[:, None, None].clamp(min=1e-300)
        free.append(now[..., 0])
        due.append(now[..., 1])
        reach.append(after)
    free, due, reach = free[::-1], due[::-1], reach[::-1]
    first = free[0] if pivot is None else due[0]
    possible = (first.sum(-1) > 0)[:, None]
    chains = torch.arange(n_chains)[:, None]

    def draw(weight: Tensor, j: int) -> Tensor:  # what is not possible is drawn nevertheless, and thrown away
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
    return plans, distinct & possible


def _segments(evaluate: Evaluator) -> Segments:
    model = evaluate.target.models[0]
    assert isinstance(model, Segments)
    return model


def _pick(pool: Tensor, chosen: Tensor) -> Tensor:
    """The chosen trajectory of every segment, (chains, segments, *event)."""
    return pool[torch.arange(len(pool))[:, None], chosen]


def _pairs(state: State, x: Tensor, seen: Evaluation) -> list[tuple[Tensor, Tensor]]:
    old = state.seen
    return [(state.x, x), (old.predictions[0], seen.predictions[0]), (old.drift, seen.drift), (old.reward, seen.reward)]
