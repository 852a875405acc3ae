"""Rows of a batch in blocks, and the blocks shared by several processes.

f(x) = cat(f(x[block]) for block)         blocks of a fixed size, whoever evaluates them

The last bits of a network's output depend on the shape of its batch. The shapes here depend on the number of rows and
on the size of a block, and not on the number of processes; so all of them get the same bits, however many they are.
Where every row moves by itself (`kernels.state.by_rows`), a process keeps the rows of its blocks; elsewhere all have
all rows, and share what is evaluated (`by_blocks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Share", "Team", "alone", "by_blocks", "joined", "team"]

Rows = slice | Tensor


class Team(Protocol):
    """Several processes that take the same decisions, and share what is expensive."""

    rank: int
    size: int

    def together(self, own: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Every process computes tensors of the same shapes, and gets those of all, joined along the first axis.

        What one of them raises is raised by all.
        """


_team: ContextVar[Team | None] = ContextVar("team", default=None)


def team() -> Team | None:
    """The processes that share their evaluations at present; None if there is one."""
    return _team.get()


@contextmanager
def joined(team: Team | None) -> Iterator[None]:
    """Share evaluations with these processes, which must all do the same meanwhile."""
    token = _team.set(team)
    try:
        yield
    finally:
        _team.reset(token)


def alone() -> AbstractContextManager[None]:
    """Evaluate here what other processes do not evaluate at the same time."""
    return joined(None)


@dataclass(frozen=True)
class Share:
    """The rows of a batch that this process has: as many blocks as the others have at most, all where it is alone.

    Blocks have `size` rows, the last one what is left. A process that comes after the last block has that one, too: it
    would wait for the others anyway.

    >>> Share.of(10, 4).blocks
    [slice(0, 4, None), slice(4, 8, None), slice(8, 10, None)]
    """

    n: int
    size: int
    team: Team | None = None

    @classmethod
    def of(cls, n: int, size: int) -> Share:
        return cls(n, size, _team.get())

    @property
    def n_blocks(self) -> int:
        return -(-self.n // self.size)

    @property
    def most(self) -> int:
        """How many blocks a process has at most."""
        return self.n_blocks if self.team is None else -(-self.n_blocks // self.team.size)

    @property
    def here(self) -> slice:
        """The rows of this process."""
        first = 0 if self.team is None else min(self.team.rank * self.most, self.n_blocks - 1) * self.size
        return slice(first, min(first + self.most * self.size, self.n))

    @property
    def blocks(self) -> list[slice]:
        """The rows of each block of this process."""
        here = self.here
        return [slice(i, min(i + self.size, here.stop)) for i in range(here.start, here.stop, self.size)]

    def together(self, of_block: Callable[[slice], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What every block gives, by the process that has it: tensors of one shape, (blocks, ...)."""

        def own() -> tuple[Tensor, ...]:
            found = [of_block(rows) for rows in self.blocks]
            found += found[-1:] * (self.most - len(found))
            return tuple(torch.stack(parts) for parts in zip(*found, strict=True))

        out = own() if self.team is None else self.team.together(own)
        return tuple(z[: self.n_blocks] for z in out)

    def padded(self, z: Tensor) -> Tensor:
        """Values of a block as those of a full one."""
        return z if len(z) == self.size else torch.cat([z, z[-1:].expand(self.size - len(z), *z.shape[1:])])

    def rows(self, z: Tensor) -> Tensor:
        """Values of all blocks, (blocks, size, ...), as those of all rows."""
        return z.flatten(0, 1)[: self.n]

    def pick(self, own: Tensor, rows: Tensor) -> Tensor:
        """Some rows of a batch of which every process has its own."""
        if self.team is None:
            return own[rows.to(own.device)]
        here = (rows - self.here.start).clamp(0, len(own) - 1).to(own.device)
        (found,) = self.team.together(lambda: (own[here],))
        owner = rows // (self.most * self.size)
        return found[(owner * len(rows) + torch.arange(len(rows))).to(own.device)]


def by_blocks(function: Callable[[Rows], tuple[Tensor, ...]], n: int, size: int) -> tuple[Tensor, ...]:
    """`function(rows)` of n rows, at most `size` at once; its tensors have one row for each.

    Rows are a slice, or numbers on the CPU: these index tensors of every device, and no device is waited for. The last
    block is padded.

    >>> x = torch.arange(5.0)
    >>> by_blocks(lambda rows: (x[rows] ** 2,), 5, 2)[0].tolist()
    [0.0, 1.0, 4.0, 9.0, 16.0]
    """
    if n <= size:
        return function(slice(0, n))
    share = Share.of(n, size)

    def full(rows: slice) -> Rows:
        whole = rows.stop - rows.start == size
        return rows if whole else torch.arange(rows.start, rows.start + size).clamp(max=n - 1)

    return tuple(share.rows(z) for z in share.together(lambda rows: function(full(rows))))
