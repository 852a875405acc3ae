"""Conditions of a model: a tensor, or tuples and dictionaries of tensors, without a batch axis."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from crepe_diffusion.errors import InputError

__all__ = ["Condition", "check_condition", "map_leaves", "structure"]

Condition = Tensor | tuple[Any, ...] | dict[str, Any]


def map_leaves(function: Callable[..., Tensor], *conditions: Any) -> Any:
    """Apply a function to the tensors at the same place of conditions that have the same structure.

    >>> import torch
    >>> map_leaves(torch.add, {"a": torch.ones(1)}, {"a": torch.ones(1)})
    {'a': tensor([2.])}
    """
    first = conditions[0]
    if isinstance(first, Tensor):
        return function(*conditions)
    if isinstance(first, dict):
        return {key: map_leaves(function, *(c[key] for c in conditions)) for key in first}
    parts = [map_leaves(function, *leaves) for leaves in zip(*conditions, strict=True)]
    return first._make(parts) if hasattr(first, "_make") else tuple(parts)


def structure(condition: Condition | None) -> Hashable:
    """What conditions must have in common to be evaluated in one batch: keys, shapes and dtypes."""
    if condition is None:
        return None
    if isinstance(condition, Tensor):
        return (tuple(condition.shape), condition.dtype)
    if isinstance(condition, dict):
        return ("dict", tuple((key, structure(condition[key])) for key in sorted(condition, key=str)))
    return (type(condition), tuple(structure(c) for c in condition))


def check_condition(condition: object, place: str = "condition") -> None:
    """Refuse anything but tensors, and tuples and dictionaries of them."""
    if isinstance(condition, Tensor):
        return
    if not isinstance(condition, (tuple, dict)) or not condition:
        raise InputError(
            f"{place} must be a tensor, or a tuple or dictionary of tensors, without a batch axis; got {condition!r}"
        )
    for key, value in condition.items() if isinstance(condition, dict) else enumerate(condition):
        check_condition(value, f"{place}[{key!r}]")
