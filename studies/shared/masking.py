"""Train a masked diffusion: the log-probabilities of hidden tokens, for every number of them.

    loss  =  E[ mean_{i in S} -log p(x^i | x outside of S, label) ],    |S| ~ U{1 .. L},  S uniform given its size

This is the bound on `-log p(x) / L` that every masked diffusion is trained on, with the share of masked positions drawn
instead of the time. A row of a batch is the tokens and then a label; a share of the labels is replaced by "no label",
so that one network is the conditional model and the unconditional one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["MaskedLoss", "held_out", "hide"]


def hide(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Which positions are hidden, (rows, L): of row r a share that is uniform over the rows, at random places.

    >>> hide((4, 6), torch.Generator().manual_seed(0)).sum(1).sort().values.tolist()
    [1, 3, 4, 5]
    """
    n, length = shape
    through = (torch.arange(n) + torch.rand(n, generator=generator)) / n  # spread evenly: less noise than n draws
    count = (through * length).floor().long().clamp(max=length - 1) + 1
    rank = torch.rand(shape, generator=generator).argsort(1).argsort(1)
    return rank < count[:, None]


@dataclass(frozen=True)
class MaskedLoss:
    """The loss of a network `logits(x, label, where)`, which gives (hidden positions, V) where `where` is true.

    Tokens are `0 .. mask - 1`, labels `0 .. no_label - 1`; `dropped` is the share of labels that is taken away. A place
    that has the mask in the data itself is unknown: it is never shown, and nothing is asked of it.
    """

    mask: int
    no_label: int
    dropped: float = 0.25

    def __call__(self, network: nn.Module, batch: Tensor, settings: object, generator: torch.Generator) -> Tensor:
        x, label = batch[:, :-1], batch[:, -1]
        label = label.where(torch.rand(len(x), generator=generator) >= self.dropped, self.no_label)
        return self.at(network, x, label, hide((x.shape[0], x.shape[1]), generator))

    def at(self, network: nn.Module, x: Tensor, label: Tensor, hidden: Tensor) -> Tensor:
        """The mean over rows of the mean over their hidden positions."""
        asked = hidden & (x != self.mask)
        logits = network.logits(x.masked_fill(hidden, self.mask), label, asked)  # type: ignore[operator]
        each = nn.functional.cross_entropy(logits, x[asked], reduction="none")
        weight = (1 / hidden.sum(1)).repeat_interleave(asked.sum(1))
        return (each * weight).sum() / len(x)


def held_out(rows: Tensor, loss: MaskedLoss, seed: int = 0, batch: int = 256) -> Callable[[nn.Module], float]:
    """A function that gives the loss on these rows with their labels, always with the same positions hidden."""

    def measure(network: nn.Module) -> float:
        generator = torch.Generator().manual_seed(seed)
        total = 0.0
        with torch.no_grad():
            for part in rows.split(batch):
                x = part[:, :-1]
                hidden = hide((x.shape[0], x.shape[1]), generator)
                total += float(loss.at(network, x, part[:, -1], hidden)) * len(x)
        return total / len(rows)

    return measure
