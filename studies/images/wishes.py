"""Wishes that a person can name and a picture can be judged by, as rewards.

    r(x) = strength * sum_i sign_i (measure_i(x) - mean_i) / sd_i         black box; mean and sd of the class
    r(x) = strength * log p(other class | x)                              by the classifier, with its gradient

A strength of 3 asks for what lies about three standard deviations out, if the measure is Gaussian within the class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import crepe_diffusion as cd

if TYPE_CHECKING:
    from studies.images.model import Painter

__all__ = ["IMPOSSIBLE", "MEASURES", "WISHES", "Wish"]


def _brightness(x: Tensor) -> Tensor:
    """(rows, height, width) in [0, 1]."""
    return ((x[:, 0] + 1) / 2).clamp(0, 1)


def ink(x: Tensor) -> Tensor:
    """The mean brightness."""
    return _brightness(x).flatten(1).mean(1)


def thick(x: Tensor) -> Tensor:
    """Area per length of the outline: half of the width of a long stroke, in pixels."""
    b = _brightness(x)
    outline = b.diff(dim=1).abs().sum((1, 2)) + b.diff(dim=2).abs().sum((1, 2))
    return 2 * b.sum((1, 2)) / (outline + 1e-3)


def _second_moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Variance to the right, covariance, and variance downwards, of the brightness as a distribution of places."""
    b = _brightness(x)
    mass = b.sum((1, 2)) + 1e-3
    down = torch.linspace(-1, 1, b.shape[1], dtype=b.dtype, device=b.device)[:, None]
    right = torch.linspace(-1, 1, b.shape[2], dtype=b.dtype, device=b.device)[None]
    mean_d, mean_r = ((b * axis).sum((1, 2)) / mass for axis in (down, right))
    d, r = down - mean_d[:, None, None], right - mean_r[:, None, None]
    rr, rd, dd = ((b * product).sum((1, 2)) / mass for product in (r * r, r * d, d * d))
    return rr, rd, dd


def left(x: Tensor) -> Tensor:
    """How far the top leans to the left, per height: the slope of the line through the strokes."""
    _, rd, dd = _second_moments(x)
    return rd / (dd + 1e-3)


def wide(x: Tensor) -> Tensor:
    """Width over height."""
    rr, _, dd = _second_moments(x)
    return (rr / (dd + 1e-3)).clamp(min=1e-6).sqrt()


MEASURES: dict[str, Callable[[Tensor], Tensor]] = {"ink": ink, "thick": thick, "left": left, "wide": wide}


@dataclass(frozen=True)
class Wish:
    """Signs of measures, or a class that the image should look like."""

    text: str
    label: int
    signs: Mapping[str, float] = field(default_factory=dict)
    like: int | None = None
    strength: float = 3.0

    def reward(self, painter: Painter) -> Callable[[Tensor], Tensor]:
        """Larger is better; in units of log-probability."""
        if self.like is not None:
            like, classifier = self.like, painter.classifier
            return lambda x: self.strength * classifier(x)[:, like]
        names = list(MEASURES)

        def reward(x: Tensor) -> Tensor:
            total = torch.zeros(len(x), dtype=x.dtype, device=x.device)
            for name, sign in self.signs.items():
                mean, sd = painter.moments[names.index(name), self.label].tolist()
                total = total + sign * (MEASURES[name](x) - mean) / sd
            return self.strength * total

        return reward

    def tilt(self, target: cd.Target, painter: Painter, name: str = "wish") -> cd.Target:
        """The target with this wish; the gradient is used where there is one."""
        guidance = "none" if self.like is None else "gradient"
        return target.tilt(self.reward(painter), guidance=guidance, name=name, anneal=cd.anneal.power(3))


WISHES = {
    "mnist": (
        Wish("a thick, left-leaning seven", 7, {"thick": 1, "left": 1}),
        Wish("a left-leaning one", 1, {"left": 1}),
        Wish("a narrow zero", 0, {"wide": -1}),
        Wish("a mostly dark three", 3, {"ink": -1}),
        Wish("a four that looks like a nine", 4, like=9),
    ),
    "fashion": (
        Wish("a sneaker that looks like a sandal", 7, like=5),
        Wish("a mostly dark pullover", 2, {"ink": -1}),
        Wish("a wide bag", 8, {"wide": 1}),
        Wish("a narrow dress", 3, {"wide": -1}),
        Wish("a bright T-shirt", 0, {"ink": 1}),
    ),
}
IMPOSSIBLE = {
    "mnist": Wish("a one that looks like an eight", 1, like=8),
    "fashion": Wish("trousers that look like a bag", 1, like=8),
}
