"""The errors of this package. Every message names the wrong value and what would be right."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["InputError", "NonFiniteError", "StoppedError", "check_choice", "optional"]


class InputError(ValueError):
    """An argument that cannot be right; raised before anything long starts."""


class NonFiniteError(ArithmeticError):
    """A prediction or a reward was NaN or infinite, and the sampler was set to stop at that (`nonfinite="raise"`)."""


class StoppedError(RuntimeError):
    """A callback stopped a call that has nothing to return until it is complete."""


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise an error that lists the choices, unless the value is one of them."""
    if value not in choices:
        raise InputError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def optional(module: str, what: str, extra: str) -> Any:
    """A module of an optional dependency; the error tells how to install it."""
    try:
        return import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise InputError(f"{what} needs {package}: pip install 'crepe-diffusion[{extra}]'") from None
