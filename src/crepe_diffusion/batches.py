"""Batches of rows: one state per row, with one number per row beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from crepe_diffusion.errors import InputError

__all__ = ["IMPOSSIBLE", "blocks", "called", "rows_like"]

T = TypeVar("T")

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


def blocks(x: Tensor) -> list[slice]:
    """Rows to compute at once: few enough that temporaries stay in a processor's cache; all of them elsewhere."""
    n = x.shape[0]
    size = max(1, 2**18 // max(1, x.numel() // n)) if n and x.device.type == "cpu" else n
    return [slice(i, i + size) for i in range(0, n, size)] if size < n else [slice(0, n)]


def called(function: Callable[..., T], what: str, *inputs: Tensor) -> T:
    """`function(*inputs)` for a function of the user's; one that writes into its input is refused by name.

    What it raises gets a note that names it, and the shapes that it was called with.

    It gets copies: what is passed here are the replicas themselves, and they stay as they were.

    >>> called(lambda x: x.zero_(), "reward 'zero'", torch.ones(2))
    Traceback (most recent call last):
    crepe_diffusion.errors.InputError: reward 'zero' changed its input in place (+=, mul_, zero_, out= or numpy): work\
 on a copy, x = x.clone()
    """
    copies = [z.clone() for z in inputs]
    versions = [None if z.is_inference() else z._version for z in copies]
    try:
        out = function(*copies)
    except SystemExit as error:  # it would end the process, and with it a run, without a word
        raise RuntimeError(f"{what} raised SystemExit, which ends a program") from error
    except Exception as error:
        shapes = ", ".join(f"{str(z.dtype).removeprefix('torch.')} {tuple(z.shape)}" for z in inputs)
        error.add_note(f"This was raised by {what}, which was called with {shapes} on {inputs[0].device}.")
        raise
    for z, copy, version in zip(inputs, copies, versions, strict=True):
        rewritten = version is not None and copy._version != version
        # What NumPy writes does not count as a version. It cannot reach other devices, where comparing would wait.
        if rewritten or (z.device.type == "cpu" and not _equal(z, copy)):
            raise InputError(
                f"{what} changed its input in place (+=, mul_, zero_, out= or numpy): work on a copy, x = x.clone()"
            )
    return out


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or torch.equal(a.nan_to_num(), b.nan_to_num())
