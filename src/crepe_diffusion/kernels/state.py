"""Replicas stay, levels move: rows of the state are replicas, and each row carries the level it stands at.

So no row needs another row's point. Of several processes each keeps the points of its own rows, and the others get a
few numbers per row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from crepe_diffusion.evaluate import Evaluator
from crepe_diffusion.processes import Evaluation
from crepe_diffusion.sharing import Share, alone

__all__ = ["State", "by_rows"]


@dataclass(frozen=True)
class State:
    """All replicas of all chains; rows run over chains, then replicas.

    `x` is (chains * replicas, *event) with the `seen` that belongs to it, `level` is (chains, replicas). States are
    on the model's device, levels on the CPU. Of several processes, each has all levels, and may have the points of its
    `share` of the rows only.
    """

    x: Shaped[Tensor, "rows *event"]
    seen: Evaluation
    level: Int[Tensor, "chains replicas"]
    share: Share | None = None

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
        for new, old in zip(news, self._values(), strict=True):
            new.index_copy_(0, kept, old.index_select(0, kept))
        return x, seen

    def _part(self, rows: slice) -> list[Tensor]:
        """The values of some rows that are here."""
        first = self.here.start
        return [z[rows.start - first : rows.stop - first] for z in self._values()]

    def _values(self) -> tuple[Tensor, ...]:
        return (self.x, *self.seen.predictions, self.seen.drift, self.seen.reward)

    # -- several processes -------------------------------------------------------------------------------

    @property
    def here(self) -> slice:
        """The rows whose points this process has."""
        return slice(0, len(self.x)) if self.share is None else self.share.here

    def own(self, evaluate: Evaluator) -> State:
        """The rows of this process, in the blocks of the evaluator; all of them where there is one process."""
        share = Share.of(self.level.numel(), evaluate.block(self.level.numel()))
        if self.share == share:
            return self
        whole = self.whole()
        if share.here == slice(0, share.n):
            return replace(whole, share=share)
        return _state(whole._part(share.here), self.level, share)

    def whole(self) -> State:
        """All rows. All processes must ask for them at once."""
        share = self.share
        if share is None or len(self.x) == share.n:
            return self
        values = share.together(lambda rows: tuple(share.padded(z) for z in self._part(rows)))
        return _state([share.rows(z) for z in values], self.level)

    def at(self, level: int) -> Tensor:
        """The points at this level, (chains, *event). All processes must ask for them at once."""
        rows = self.row_at(level)
        return self.x[rows.to(self.x.device)] if self.share is None else self.share.pick(self.x, rows)


def _state(values: list[Tensor], level: Tensor, share: Share | None = None) -> State:
    x, *predictions, drift, reward = values
    return State(x, Evaluation(tuple(predictions), drift, reward), level, share)


Moved = tuple[Tensor, Evaluation, tuple[Tensor, ...]]


def by_rows(state: State, evaluate: Evaluator, move: Callable[[State, Evaluator, slice], Moved]) -> Moved:
    """Move every row by itself, in blocks: the new points of own rows with their evaluations, and numbers of all rows.

    `move(part, evaluate, rows)` gets the block of these rows as if it were one chain, with `level` (1, rows), and an
    evaluator for it; its numbers are on the CPU. A block moves alone, so its bits do not depend on who has it.
    """
    share = state.share
    assert share is not None  # see State.own
    if share.n_blocks == 1:
        return move(state, evaluate, slice(0, share.n))
    level = state.level.flatten()
    moved: list[tuple[Tensor, Evaluation]] = []
    n_levels = evaluate.ladder.n_levels if evaluate.nonfinite == "reject" else 0

    def of_block(rows: slice) -> tuple[Tensor, ...]:
        part = evaluate.part(rows, share.n)
        x, seen, numbers = move(_state(state._part(rows), level[None, rows]), part, rows)
        moved.append((x, seen))
        return *(share.padded(z) for z in numbers), torch.tensor(part.counts.numbers(n_levels))

    with alone():
        *numbers, counts = share.together(of_block)
    evaluate.counts.add(counts.sum(0).tolist())
    x, seen = zip(*moved, strict=True)
    return torch.cat(x), Evaluation.cat(list(seen)), tuple(share.rows(z) for z in numbers)
