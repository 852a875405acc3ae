"""Integrals over the logarithm of a positive number, of functions that are expensive to evaluate.

    I  =  integral of K(y) d log y   from low to top,     K(y) = y d/dy log sum_k A_k y^k,   A_k >= 0

for many rows at once, each with its own ends and its own K. With `A_0 > 0` the integral exists from low = 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from numpy.polynomial.legendre import leggauss
from torch import Tensor

__all__ = ["log_integral"]

FACTOR = 10.0
"""The longest panel: y falls by this much."""
STRAIGHT = 0.05
"""K is taken for smooth in y, from 0 on, where y times the change of K / y over the lower half of a panel is less."""
DEEPEST = 6
"""Panels on the way to 0: below 1e-6 of the top, K is taken for smooth in y whatever it is."""


def log_integral(low: Tensor, top: Tensor, k: Callable[[Tensor, Tensor], Tensor], nodes: int) -> Tensor:
    """The integrals of some functions, (functions, rows); `low` and `top`, (rows,), are on the CPU.

    `k(rows, y)` returns K of all functions in these rows at their y, (functions, these rows), on any device. A panel of
    a factor 10 has `nodes` Gauss-Legendre nodes in log y, a shorter one as many as give it the same accuracy. Panels
    follow each other downwards; where K falls like y, the rest has `nodes - 1` nodes in y itself. A panel waits for the
    device once.
    """
    total, going = torch.zeros(0), torch.arange(len(low))

    def add(rows: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """`K / y` at nodes whose K is added with these weights."""
        nonlocal total
        found = k(rows, y)
        total = total if len(total) else found.new_zeros(len(found), len(low))
        total[:, rows.to(found.device)] += weight.to(found) * found
        return found / y.to(found)

    for panel in range(DEEPEST):
        bottom = torch.maximum(low[going], top[going] / FACTOR)
        width = (top[going] / bottom).log()
        n, rates = _enough(width, nodes), []
        for i in range(int(n.max()) if len(n) else 0):
            here = (n > i).nonzero()[:, 0]
            z, w = (v[n[here], i] for v in _gauss(nodes))
            y = bottom[here] * (width[here] * z).exp()
            rate = add(going[here], y, width[here] * w)
            rates.append(rate.new_zeros(len(rate), len(going)).index_copy(1, here.to(rate.device), rate))
        unfinished = bottom > low[going]
        if not bool(unfinished.any()):
            break
        # Rows that go on had a whole panel, so they are in all of its nodes: here from the middle to the lowest one.
        change = (rates[-1] - rates[(nodes - 1) // 2]).abs().amax(0).cpu()
        change = change * bottom * FACTOR ** float(_gauss(nodes)[0][nodes, -1])
        smooth = unfinished & (~(change > STRAIGHT) | (panel == DEEPEST - 1))
        if bool(smooth.any()):
            rows, start, length = going[smooth], low[going[smooth]], (bottom - low[going])[smooth]
            for z, w in zip(*(v[nodes - 1, : nodes - 1].tolist() for v in _gauss(nodes)), strict=True):
                y = start + length * z
                add(rows, y, w * length / y)
        top = top.index_copy(0, going, bottom)
        going = going[unfinished & ~smooth]
    return total


def _enough(width: Tensor, nodes: int) -> Tensor:
    """How many nodes have the accuracy of `nodes` in a whole panel.

    The sum of `A_k y^k` has no roots near the positive axis: where two terms meet, the next are at +- i pi in log y.
    The error of n nodes then falls like rho^(-2n), with rho the sum of the half-axes of the ellipse through them.
    """

    def log_rho(width: Tensor) -> Tensor:
        return (2 * math.pi / width).asinh()

    whole = nodes * log_rho(torch.tensor(math.log(FACTOR), dtype=width.dtype))
    return (whole / log_rho(width) - 1e-9).ceil().clamp(1, nodes).long()


@lru_cache
def _gauss(most: int) -> tuple[Tensor, Tensor]:
    """Points on (0, 1), from the highest to the lowest, and weights: row n has those of n nodes."""
    points, weights = (torch.zeros(most + 1, most, dtype=torch.float64) for _ in range(2))
    for n in range(1, most + 1):
        z, w = leggauss(n)
        points[n, :n], weights[n, :n] = torch.tensor((1 + z[::-1]) / 2), torch.tensor(w / 2)
    return points, weights
