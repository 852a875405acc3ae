"""A move, a reward and an annealing of one's own, named in `my_moves.toml` and nowhere else.

Run it: `crepe-diffusion run examples/my_moves.toml --out runs/mine`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.evaluate import Evaluator
from crepe_diffusion.kernels import State
from crepe_diffusion.run import Experiment


@dataclass(frozen=True)
class Twice:
    """An explorer: any explorer of yours, applied `n` times; invariant because each of them is."""

    move: cd.Bounce = field(default_factory=cd.Bounce)
    n: int = 2

    def check(self, evaluate: Evaluator) -> None:
        if self.n < 1:
            raise cd.InputError(f"n must be a positive integer, got {self.n!r}")
        self.move.check(evaluate)

    def __call__(self, state: State, evaluate: Evaluator, stream: cd.Stream) -> tuple[State, Tensor]:
        moved = torch.zeros(len(state.x), dtype=torch.bool)
        for i in range(self.n):
            state, now = self.move(state, evaluate, stream.at(i))
            moved = moved | now
        return state, moved


@dataclass(frozen=True)
class Near:
    """A reward: `-|x - centre|^2 / (2 width^2)`."""

    centre: float
    width: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return -0.5 * ((x - self.centre) / self.width).square().flatten(1).sum(1)


@dataclass(frozen=True)
class Blurred:
    """An annealing in time: `gamma(t) = w^2 / (w^2 + t^2)`, as sharp as the noise lets a width of w be seen."""

    width: float
    of_time: ClassVar[bool] = True

    def __call__(self, t: Tensor) -> Tensor:
        return self.width**2 / (self.width**2 + t**2)


def two_modes(distance: float = 3.0) -> Experiment:
    """The models that are sampled; arguments are the `[options]` of a file."""
    p = cd.models.GaussianMixture([0.4, 0.6], [[-distance], [distance]], [0.5, 0.7])
    return Experiment(p.as_target(), scalars={"x": lambda x: x[:, 0], "right": lambda x: (x[:, 0] > 0).double()})
