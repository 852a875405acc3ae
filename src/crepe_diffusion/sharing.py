"""Rows of a batch in blocks, and the blocks shared by several processes.

f(x) = cat(f(x[block]) for block)         blocks of a fixed size, the last one padded, whoever evaluates them

The last bits of a network's output depend on the shape of its batch. The shapes here depend on the number of rows and
on the size of a block, and not on the number of processes; so all of them get the same bits, however many they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Team", "alone", "by_blocks", "joined", "team"]

Rows = slice | Tensor


class Team(Protocol):
    """Several processes that do the same with the same states, and share what is expensive."""

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


def by_blocks(function: Callable[[Rows], tuple[Tensor, ...]], n: int, size: int) -> tuple[Tensor, ...]:
    """`function(rows)` of n rows, at most `size` at once; its tensors have one row for each.

    Rows are a slice, or numbers on the CPU: these index tensors of every device, and no device is waited for.

    >>> x = torch.arange(5.0)
    >>> by_blocks(lambda rows: (x[rows] ** 2,), 5, 2)[0].tolist()
    [0.0, 1.0, 4.0, 9.0, 16.0]
    """
    if n <= size:
        return function(slice(0, n))
    n_blocks, team = -(-n // size), _team.get()
    n_own = n_blocks if team is None else -(-n_blocks // team.size)
    first = 0 if team is None else team.rank * n_own

    def rows(block: int) -> Rows:
        if (block + 1) * size <= n:
            return slice(block * size, (block + 1) * size)
        return torch.arange(block * size, (block + 1) * size).clamp(max=n - 1)

    def own() -> tuple[Tensor, ...]:
        # A process without a block of its own takes the last one: it would wait for the others anyway.
        blocks = [min(block, n_blocks - 1) for block in range(first, first + n_own)]
        return tuple(torch.cat(parts) for parts in zip(*(function(rows(block)) for block in blocks), strict=True))

    out = own() if team is None else team.together(own)
    return tuple(z[:n] for z in out)
