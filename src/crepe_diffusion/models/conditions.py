"""Conditions of a model: a tensor, or tuples and dictionaries of tensors, with no batch axis; or several, by `Each`."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from crepe_diffusion.devices import resident
from crepe_diffusion.errors import InputError

__all__ = ["Condition", "Each", "check_condition", "for_rows", "map_leaves", "structure"]

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


@dataclass(frozen=True)
class Each:
    """One condition for each chain, or for each of equal groups of chains in their order.

    Conditions are those that a model takes: tensors, or what a checkpoint makes tensors of, such as texts.
    Rows of a batch run over chains first. Every chain then has a law of its own: look at the results of some of them by
    `out.of_chains([i])`, and of the batches of SMC by `out.of_batches([i])`.

    >>> import torch
    >>> each = Each((torch.tensor(3), torch.tensor(7)))
    >>> each.rows(each.which(4)).tolist()
    [3, 3, 7, 7]
    """

    conditions: tuple[Any, ...]

    def __post_init__(self) -> None:
        if isinstance(self.conditions, (str, dict)) or not len(self.conditions):
            raise InputError(f"Each takes a list of conditions, one for each chain, got {self.conditions!r}")
        object.__setattr__(self, "conditions", tuple(self.conditions))

    @cached_property
    def _together(self) -> Any:
        return map_leaves(lambda *leaves: torch.stack(leaves), *self.conditions)

    def which(self, n_rows: int) -> Tensor:
        """The condition of each row of a whole batch, (rows,)."""
        return self.which_of(len(self.conditions), n_rows)

    @staticmethod
    def which_of(n: int, n_rows: int) -> Tensor:
        """The same for n conditions."""
        if n_rows % n:
            raise InputError(f"{n} conditions need a number of chains that is a multiple of {n}, got {n_rows} rows")
        return torch.arange(n).repeat_interleave(n_rows // n)

    def rows(self, which: Tensor) -> Any:
        """The conditions of these rows, with the rows as first axis."""
        return map_leaves(lambda c: resident(c, which.device)[which], self._together)


def for_rows(condition: Condition | Each, which: Tensor | None, x: Tensor) -> Any:
    """A condition with one row per state of x; `which` says whose condition a row has, where there are several."""
    if isinstance(condition, Each):
        return condition.rows((condition.which(len(x)) if which is None else which).to(x.device))
    return map_leaves(lambda c: resident(c, x.device).expand(len(x), *c.shape), condition)


def structure(condition: Condition | Each | None) -> Hashable:
    """What conditions must have in common to be evaluated in one batch: keys, shapes and dtypes."""
    if condition is None:
        return None
    if isinstance(condition, Each):
        return structure(condition.conditions[0])
    if isinstance(condition, Tensor):
        return (tuple(condition.shape), condition.dtype)
    if isinstance(condition, dict):
        return ("dict", tuple((key, structure(condition[key])) for key in sorted(condition, key=str)))
    return (type(condition), tuple(structure(c) for c in condition))


def check_condition(condition: object, place: str = "condition") -> None:
    """Refuse anything but tensors, and tuples and dictionaries of them."""
    if isinstance(condition, Tensor):
        return
    if isinstance(condition, Each):
        for i, one in enumerate(condition.conditions):
            check_condition(one, f"{place} {i}")
        if len({structure(c) for c in condition.conditions}) != 1:
            raise InputError(
                "conditions of several chains need the same keys, shapes and dtypes, got"
                f" {[structure(c) for c in condition.conditions]}: pad texts to one length"
            )
        return
    if not isinstance(condition, (tuple, dict)) or not condition:
        raise InputError(
            f"{place} must be a tensor, or a tuple or dictionary of tensors, without a batch axis; got {condition!r}"
        )
    for key, value in condition.items() if isinstance(condition, dict) else enumerate(condition):
        check_condition(value, f"{place}[{key!r}]")
