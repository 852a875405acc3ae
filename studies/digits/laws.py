"""Trees as models of the library, guided laws of them, and the truth about these laws.

    pi(x)  ~  p(x | c)^w p(x)^(1 - w)  =  p(x | c) (p(x | c) / p(x))^(w - 1)

So draws of `p(x | c)` with these weights are draws of `pi`, whatever `p(x)` is. Two choices of it:

    mixture    p(x) = sum_c p(x | c) / 10: the models agree with each other, and the weights are p(c | x)^(w - 1) <= 1
    own tree   p(x) is a tree fitted to all digits: a model that disagrees with the others, as networks do
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

import crepe_diffusion as cd
from crepe_diffusion.errors import InputError, check_choice
from crepe_diffusion.processes import Masked, Process, Uniform
from studies.digits.trees import Forest, chow_liu
from studies.shared.exact import Truth
from studies.shared.training import load_weights

__all__ = ["Guided", "TreeModel", "Truth", "binary_digits", "fit_trees", "load_trees", "read_digits"]

N_CLASSES = 10
SIDES = (7, 14, 28)
WEIGHTS = Path(__file__).parent / "weights"
BLOCK = 128
"""Rows of one pass through the trees: larger ones leave the caches."""


def read_digits(path: Path, part: str = "train") -> tuple[np.ndarray, Tensor]:
    """Pictures (n, 28, 28), 0 for paper and 1 for ink, and their labels, from `mnist.npz`."""
    if not path.exists():
        raise InputError(f"no file {path}: it holds x_train, y_train, x_test, y_test of MNIST as arrays of numpy")
    with np.load(path, allow_pickle=False) as file:
        return file[f"x_{part}"].astype("float32") / 255, torch.from_numpy(file[f"y_{part}"].astype("int64"))


def binary_digits(path: Path, side: int, part: str = "train") -> tuple[Tensor, Tensor]:
    """Pictures (n, side * side) of 0 and 1, and their labels, from `mnist.npz`; fewer than 28 a side are means."""
    if side not in SIDES:
        raise InputError(f"side must be 7, 14 or 28, got {side!r}")
    grey, labels = read_digits(path, part)
    n = len(grey)
    grey = grey.reshape(n, side, 28 // side, side, 28 // side).mean((2, 4))
    return torch.from_numpy(grey > 0.5).reshape(n, -1).long(), labels


def fit_trees(x: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """A tree for each digit, and one for all of them, as tensors to be saved."""
    trees = [chow_liu(x[labels == c]) for c in range(N_CLASSES)] + [chow_liu(x)]
    return {
        "parents": torch.stack([parents for parents, _ in trees]).to(torch.int16),
        "tables": torch.stack([tables for _, tables in trees]).to(torch.float32),
    }


def load_trees(side: int, folder: Path = WEIGHTS) -> Forest:
    """The shipped trees: those of the digits 0 to 9, then the one of all digits."""
    tensors, _ = load_weights(folder / f"trees-{side}.safetensors")
    return Forest(tensors["parents"], tensors["tables"])


class TreeModel(cd.models.Model):
    """A mixture of the trees of a forest, as a masked or uniform diffusion with exact predictions.

    Models of one forest are evaluated together: one pass through its trees serves them all.

    >>> forest = Forest(torch.tensor([[-1, 0]]), torch.tensor([[[0.5, 0.5], [0.1, 0.8]]]))
    >>> model = TreeModel(forest, [1.0], (2,))
    >>> model.predict(torch.tensor([[1, 2]]), torch.ones(1)).exp()[0, 1].round(decimals=6).tolist()   # given a one
    [0.2, 0.8]
    """

    dtype = torch.float64

    def __init__(self, forest: Forest, weights: Sequence[float], event_shape: tuple[int, ...], kind: str = "masked"):
        check_choice("kind", kind, ("masked", "uniform"))
        self.forest, self.kind, self.event_shape = forest, kind, event_shape
        self.log_weights = torch.tensor(weights, dtype=torch.float64).log()
        if len(weights) != forest.n_trees or math.prod(event_shape) != forest.n_pixels:
            raise InputError(
                f"{len(weights)} weights and an event of shape {event_shape} do not fit a forest of"
                f" {forest.n_trees} trees over {forest.n_pixels} pixels"
            )
        self._process = Masked(2) if kind == "masked" else Uniform(2)

    def process(self) -> Process:
        return self._process

    @property
    def network(self) -> Hashable:
        return (id(self.forest), self.kind)

    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        return self.predict_together([self], x, t)[0]

    def predict_together(self, models: Sequence[cd.models.Model], x: Tensor, t: Tensor) -> list[Tensor]:
        parts = [self._together(models, *part) for part in zip(x.flatten(1).split(BLOCK), t.split(BLOCK), strict=True)]
        return [torch.cat(found).reshape(*x.shape, 2) for found in zip(*parts, strict=True)]

    def _together(self, models: Sequence[cd.models.Model], x: Tensor, t: Tensor) -> list[Tensor]:
        marginals, log_evidence = self.forest.posterior(self.likelihood(x, t))
        out = []
        for model in models:
            assert isinstance(model, TreeModel)
            shares = (model.log_weights[:, None] + log_evidence).softmax(0)[..., None, None]
            used = model.log_weights.isfinite().nonzero()[:, 0].tolist()
            mean = marginals[used[0]] * shares[used[0]]
            for k in used[1:]:
                mean.addcmul_(marginals[k], shares[k])
            out.append(mean.contiguous().log())
        return out

    def likelihood(self, x: Tensor, t: Tensor) -> Tensor:
        """`q_t(x | x_0 = v)` of every pixel, up to factors that do not depend on v, (rows, pixels, 2)."""
        if self.kind == "masked":
            known = one_hot(x.clamp(max=1), 2).to(torch.float64)
            return torch.where((x == 2)[..., None], 1.0, known)
        a = (1 - t.to(torch.float64))[:, None, None]
        return a * one_hot(x, 2) + (1 - a) / 2

    def log_prob(self, x: Tensor) -> Tensor:
        """`log p(x)` of clean pictures."""
        return (self.log_weights[:, None] + self.forest.log_prob(x.flatten(1))).logsumexp(0)


@dataclass(frozen=True)
class Guided:
    """Guidance towards a digit with strength w; `unconditional` is `"mixture"` or `"own tree"`.

    >>> problem = Guided(load_trees(14), digit=9, strength=3.0)
    >>> problem.target.exponents
    (-2.0, 3.0)
    """

    trees: Forest
    digit: int
    strength: float
    unconditional: str = "mixture"
    kind: str = "masked"

    def __post_init__(self) -> None:
        check_choice("unconditional", self.unconditional, ("mixture", "own tree"))
        if self.digit not in range(N_CLASSES):
            raise InputError(f"digit must be 0 to 9, got {self.digit!r}")

    @property
    def side(self) -> int:
        return math.isqrt(self.trees.n_pixels)

    @cached_property
    def models(self) -> tuple[TreeModel, TreeModel]:
        """The conditional and the unconditional model, over the trees that they need."""
        if self.unconditional == "mixture":
            forest = self.trees[range(N_CLASSES)]
            one = [float(c == self.digit) for c in range(N_CLASSES)]
            both = (one, [1 / N_CLASSES] * N_CLASSES)
        else:
            forest, both = self.trees[[self.digit, N_CLASSES]], ([1.0, 0.0], [0.0, 1.0])
        event = (self.side, self.side)
        return TreeModel(forest, both[0], event, self.kind), TreeModel(forest, both[1], event, self.kind)

    @property
    def target(self) -> cd.Target:
        return cd.guided(*self.models, self.strength)

    def truth(self, n: int, seed: int = 0) -> Truth:
        """`n` draws of `p(x | c)` and their weights; the error of everything below falls as one over sqrt(share n)."""
        x = self.trees.sample(n, self.digit, torch.Generator().manual_seed(seed))
        conditional, unconditional = self.models
        log_w = torch.cat([conditional.log_prob(part) - unconditional.log_prob(part) for part in x.split(4096)])
        log_w = (self.strength - 1) * log_w
        return Truth(x, log_w.softmax(0), float(log_w.logsumexp(0)) - math.log(n))

    def statistics(self, x: Tensor) -> dict[str, Tensor]:
        """What errors are measured of, (rows, numbers): `P(digit | x)`, all pixels, products of all neighbours."""
        flat = x.flatten(1)
        picture = flat.reshape(-1, self.side, self.side).to(torch.float64)
        right, down = picture[:, :, 1:] * picture[:, :, :-1], picture[:, 1:] * picture[:, :-1]
        log_p = self.trees.log_prob(flat)[:N_CLASSES]
        return {
            "posterior": log_p.softmax(0)[self.digit][:, None],
            "pixels": picture.flatten(1),
            "pairs": torch.cat([right.flatten(1), down.flatten(1)], 1),
        }
