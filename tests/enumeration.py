"""Enumerate the shipped iteration: every outcome of every draw, with its probability.

A `Script` stands in for the random stream. Its draws are written beforehand; at the first that is not, it stops and
says what could come. `transition` extends the script outcome by outcome until the iteration runs to its end, for all
joint states at once (they are the chains), and so yields the exact transition matrix of `ReplicaExchange.step`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.diagnostics import Diagnostics
from crepe_diffusion.kernels import State


class UnwrittenError(Exception):
    def __init__(self, probabilities: Tensor):
        self.probabilities = probabilities


class Script(cd.Stream):
    """A stream whose draws are known beforehand."""

    def __init__(self, outcomes: list[Tensor]):
        super().__init__(0)
        self.__dict__.update(outcomes=outcomes, position=0)

    def at(self, *names: object) -> Script:
        return self

    def categorical(self, log_p: Tensor) -> Tensor:
        return self._draw(torch.softmax(log_p.to(torch.float64), dim=-1))

    def integers(self, shape: tuple[int, ...], n: int, **_: object) -> Tensor:
        return self.categorical(torch.zeros(*shape, n))

    def bernoulli(self, log_p: Tensor) -> Tensor:
        p = log_p.clamp(max=0).exp()
        return self._draw(torch.stack([1 - p, p], dim=-1)).bool()

    def order(self, chosen: Tensor) -> Tensor:
        """One after the other: each of those that are left is as likely to be the next."""
        rank, left = torch.zeros_like(chosen, dtype=torch.long), chosen.clone()
        first = torch.zeros_like(chosen, dtype=torch.float64)
        first[:, 0] = 1
        for i in range(1, int(chosen.sum(1).max()) + 1):
            p = torch.where(left.any(1, keepdim=True), left.double() / left.sum(1, keepdim=True).clamp(min=1), first)
            following = self._draw(p)[:, None]
            rank = torch.where(left & (torch.arange(left.shape[1]) == following), i, rank)
            left = left & (rank == 0)
        return rank

    def _draw(self, p: Tensor) -> Tensor:
        if self.position == len(self.outcomes):
            raise UnwrittenError(p)
        self.__dict__["position"] += 1
        return self.outcomes[self.position - 1].reshape(p.shape[:-1])


@dataclass
class Leaves:
    """Branches of the tree: which joint state each began with, its draws so far, its probability."""

    source: Tensor
    outcomes: list[Tensor]
    weight: Tensor

    def extended(self, p: Tensor) -> Leaves:
        p = p.reshape(len(self.source), -1, p.shape[-1])
        branch = torch.arange(len(self.source))
        drawn, weight = torch.zeros(len(branch), 0, dtype=torch.long), self.weight
        for d in range(p.shape[1]):
            rows, values = (p[branch, d] > 0).nonzero(as_tuple=True)
            weight = weight[rows] * p[branch[rows], d, values]
            drawn, branch = torch.cat([drawn[rows], values[:, None]], dim=1), branch[rows]
        return Leaves(self.source[branch], [o[branch] for o in self.outcomes] + [drawn], weight)


def transition(chain: cd.ReplicaExchange, joint: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """All outcomes of iteration n from `joint` (states, levels, *event): source index, end states, probability."""
    n_levels, times = chain.ladder.n_levels, chain.ladder.levels
    leaves = Leaves(torch.arange(len(joint)), [], torch.ones(len(joint), dtype=torch.float64))
    while True:
        x = joint[leaves.source].flatten(0, 1)
        t = times.repeat(len(leaves.source))
        level = torch.arange(n_levels).expand(len(leaves.source), -1).clone()
        chain.stream = Script(leaves.outcomes)
        chain.state = State(x, chain.evaluate(x, t), level)
        chain.diagnostics = Diagnostics(level)
        chain.iteration = n - 1
        try:
            chain.step()
        except UnwrittenError as missing:
            leaves = leaves.extended(missing.probabilities)
            continue
        end = chain.state.x.reshape(len(level), n_levels, *x.shape[1:])
        order = chain.state.replica_at().reshape(*level.shape, *[1] * (x.ndim - 1)).expand_as(end)
        return leaves.source, end.gather(1, order), leaves.weight


def violation(chain: cd.ReplicaExchange, states: Tensor, log_pi: Tensor, n: int) -> float:
    """`max |pi P - pi|` for the product over levels of exp(log_pi), given as (levels, states)."""
    pi = torch.softmax(log_pi, dim=1)
    possible = [p.nonzero()[:, 0].tolist() for p in pi]
    index = torch.tensor(list(itertools.product(*possible)))
    weight = torch.stack([pi[m, index[:, m]] for m in range(len(pi))]).prod(0)
    source, end, p = transition(chain, states[index], n)
    assert abs(float((weight[source] * p).sum()) - 1) < 1e-12, "the tree of outcomes must have total probability one"
    same = (end[:, :, None] == states).flatten(3).all(3)
    arrived = same.long().argmax(2)
    shape = tuple(len(states) for _ in pi)
    flat = torch.tensor([len(states) ** (len(pi) - 1 - m) for m in range(len(pi))])
    after = torch.zeros(torch.Size(shape).numel(), dtype=torch.float64)
    after.index_add_(0, (arrived * flat).sum(1), weight[source] * p)
    before = torch.zeros_like(after)
    before.index_add_(0, (index * flat).sum(1), weight)
    return float((after - before).abs().max())
