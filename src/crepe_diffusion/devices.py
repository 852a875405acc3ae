"""Where numbers live: states beside the model, decisions on the CPU.

    states, predictions, noise, times, works     the model's device
    levels, decisions, counts, diagnostics       the CPU

A processor that asks an accelerator for a value waits until everything queued there is done. So values of rows are
brought home together, once per decision, and what does not change is copied to the device once.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["as_real", "home", "is_home", "real", "resident"]

_COPIES = WeakTensorKeyDictionary()


def is_home(x: Tensor) -> bool:
    """Whether values can be looked at without waiting for a device."""
    return x.device.type == "cpu"


@lru_cache
def real(device: torch.device) -> torch.dtype:
    """The dtype of works, rewards and times: float64 wherever the device has it, else float32.

    >>> real(torch.device("cpu"))
    torch.float64
    """
    try:
        torch.empty(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


def as_real(x: Tensor) -> Tensor:
    """The same numbers in the dtype of works."""
    return x.to(real(x.device))


def resident(constant: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor that does not change, on this device; it is copied once, and again if it was written to.

    >>> grid = torch.arange(3)
    >>> resident(grid, grid.device) is grid, resident(grid, grid.device, torch.float64) is grid
    (True, False)
    """
    dtype = dtype or constant.dtype
    if constant.device == device and constant.dtype == dtype:
        return constant
    if constant.is_inference():  # has no version, so a copy could be out of date
        return constant.to(device, dtype)
    copies = _COPIES.setdefault(constant, {})
    key = (device, dtype)
    if key not in copies or copies[key][0] != constant._version:
        copies[key] = (constant._version, constant.detach().to(device, dtype))
    return copies[key][1]


def home(*values: Tensor) -> tuple[Tensor, ...]:
    """Values of the same rows on the CPU, in float64 or as booleans: one transfer for all of them."""
    if is_home(values[0]):
        return values
    dtype = real(values[0].device)
    rows = torch.stack([v.to(dtype) for v in values]).cpu().to(torch.float64)
    return tuple(row.to(torch.bool) if v.dtype == torch.bool else row for row, v in zip(rows, values, strict=True))
