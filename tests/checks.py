"""Shared by the tests: z-tests with a stated false-alarm rate, and broken twins that must fail a check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

# Two-sided normal tail beyond 5 is 5.7e-7: with a thousand such comparisons one suite in 1,700 raises a false alarm,
# and seeds are fixed, so a test that passes once passes always.
Z = 5.0
P_VALUE = 1e-6


def f64(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def refuted(check: Callable[..., Any], *args: Any, **options: Any) -> None:
    """The same check on something broken must fail."""
    with pytest.raises(AssertionError):
        check(*args, **options)


def assert_near(what: str, found: Tensor, expected: Tensor, **tolerance: float) -> None:
    """`assert_close` that prints the largest difference: `pytest -s` fills the table of docs/your-model.md."""
    torch.testing.assert_close(found, expected, **tolerance)
    error, size = (float(z.detach().abs().max()) for z in (found - expected, expected))
    print(f"largest difference, {what}: {error:.1e} of {size:.2g}")


def assert_mean(values: Tensor, truth: Tensor | float, z: float = Z) -> None:
    """Independent rows of values (n, ...) have this mean, to z standard errors each."""
    values = values.to(torch.float64)
    error = values.std(0) / len(values) ** 0.5
    deviation = (values.mean(0) - truth).abs()
    assert bool((deviation <= z * error + 1e-12).all()), f"means {values.mean(0)} +- {error}, wanted {truth}"


def assert_frequencies(drawn: Tensor, probabilities: Tensor) -> None:
    """Counts of drawn categories fit the probabilities (chi-square), and nothing impossible was drawn."""
    from scipy.stats import chisquare

    p = probabilities.to(torch.float64).numpy()
    counts = np.bincount(drawn.flatten().numpy(), minlength=len(p))
    assert len(counts) == len(p)
    assert counts[p == 0].sum() == 0, f"impossible categories were drawn: {counts[p == 0]}"
    if (p > 0).sum() > 1:
        assert chisquare(counts[p > 0], p[p > 0] / p.sum() * counts.sum()).pvalue > P_VALUE


def assert_uncorrelated(a: Tensor, b: Tensor, z: float = Z) -> None:
    """Two equally long series have no correlation beyond z standard errors."""
    a, b = a.flatten().to(torch.float64), b.flatten().to(torch.float64)
    a, b = (a - a.mean()) / a.std(), (b - b.mean()) / b.std()
    assert abs(float((a * b).mean())) * len(a) ** 0.5 < z
