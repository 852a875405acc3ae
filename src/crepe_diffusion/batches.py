"""Batches of rows: one state per row, with one number per row beside it."""

from __future__ import annotations

from torch import Tensor

__all__ = ["IMPOSSIBLE", "block_rows", "rows_like"]

IMPOSSIBLE = -1e12
"""The reward of a row that the target gives no weight: minus infinity, or a prediction that is not finite.

A finite number, since differences of rewards must not become NaN.
"""


def rows_like(values: Tensor, x: Tensor) -> Tensor:
    """One value per row, shaped to broadcast against x.

    >>> import torch
    >>> (rows_like(torch.tensor([1.0, 2.0]), torch.ones(2, 3)) * torch.ones(2, 3)).tolist()
    [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]
    """
    return values.reshape(values.shape + (1,) * (x.ndim - values.ndim))


def block_rows(x: Tensor) -> int:
    """How many rows to compute at once so that the temporaries stay in the processor's cache."""
    return max(1, 2**18 // max(1, x[0].numel()))
