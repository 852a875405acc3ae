"""Replicas stay, levels move: rows of the state are replicas, and each row carries the level it stands at."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from crepe_diffusion.processes import Evaluation

__all__ = ["State"]


@dataclass(frozen=True)
class State:
    """All replicas of all chains; rows run over chains, then replicas.

    `x` is (chains * replicas, *event) with the `seen` that belongs to it, `level` is (chains, replicas). States are
    on the model's device, levels on the CPU.
    """

    x: Shaped[Tensor, "rows *event"]
    seen: Evaluation
    level: Int[Tensor, "chains replicas"]

    @property
    def n_chains(self) -> int:
        return self.level.shape[0]

    @property
    def n_levels(self) -> int:
        return self.level.shape[1]

    @cached_property
    def _replica_at(self) -> Tensor:
        return self.level.argsort(1)

    def replica_at(self) -> Tensor:
        """Which replica stands at each level, (chains, levels)."""
        return self._replica_at

    def row_at(self, level: int) -> Tensor:
        """The row that stands at this level, one per chain."""
        first = torch.arange(self.n_chains) * self.n_levels
        return first + self.replica_at()[:, level]

    def by_level(self, values: Tensor) -> Tensor:
        """Row values arranged as (chains, levels)."""
        return values.reshape(self.n_chains, self.n_levels).gather(1, self.replica_at())

    def to_rows(self, values: Tensor) -> Tensor:
        """Values given as (chains, levels) given to the rows that stand there."""
        return values.gather(1, self.level).flatten()

    def take(self, chosen: Tensor, x: Tensor, seen: Evaluation) -> tuple[Tensor, Evaluation]:
        """A new point with its own evaluation where chosen, the present ones elsewhere.

        The new tensors are overwritten: a proposal is used nowhere else, and only rejected rows are copied.
        """
        kept = (~chosen.cpu()).nonzero()[:, 0].to(x.device)
        news = (x, *seen.predictions, seen.drift, seen.reward)
        for new, old in zip(news, (self.x, *self.seen.predictions, self.seen.drift, self.seen.reward), strict=True):
            new.index_copy_(0, kept, old.index_select(0, kept))
        return x, seen
