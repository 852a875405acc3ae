"""What goes wrong, by name. Every message says which value was wrong and what would be right."""

from __future__ import annotations

__all__ = ["InputError", "NonFiniteError"]


class InputError(ValueError):
    """An argument that cannot be right; raised before anything long starts."""


class NonFiniteError(ArithmeticError):
    """A prediction or a reward was NaN or infinite, and the sampler was told to stop at that."""
