"""Randomness as a value: a draw is a function of (seed, path, row, element).

    stream.at(n, "walk", k).normal((rows, dim))[r]  =  f(seed, n, "walk", k, r)

A stream holds no position. Each row of a draw owns a fixed range of the counter of one Philox generator,
so a draw does not depend on micro-batches, on how rows are split between processes, or on what was drawn
before; and a run resumes from its iteration number alone.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from operator import index

import numpy as np
import torch
from torch import Tensor

from crepe_diffusion.errors import InputError, NonFiniteError

__all__ = ["Stream"]


@dataclass(frozen=True)
class Stream:
    """A branch of the tree of random numbers that grows from one seed.

    >>> stream = Stream(0).at(3, "swap")
    >>> bool((stream.uniform((5,)) == stream.uniform((5,))).all())   # a value, not a position
    True
    >>> whole, tail = stream.normal((5, 2)), stream.normal((2, 2), first_row=3)
    >>> bool((whole[3:] == tail).all())                              # a shard sees its own rows
    True
    """

    seed: int
    path: tuple[int | str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, (int, np.integer)) or self.seed < 0:
            raise InputError(f"seed must be a non-negative integer, got {self.seed!r}")

    def at(self, *names: int | str) -> Stream:
        """The branch below this one with these names."""
        # Integers of any type name the same branch: an iteration read back from an array continues its run.
        return Stream(self.seed, self.path + tuple(n if isinstance(n, str) else index(n) for n in names))

    def uniform(self, shape: tuple[int, ...], *, first_row: int = 0, device: torch.device | str = "cpu") -> Tensor:
        """Independent uniforms in the open interval (0, 1), float64; the first axis counts rows."""
        return _open_unit(self._words(shape, first_row)).to(device)

    def normal(
        self,
        shape: tuple[int, ...],
        *,
        first_row: int = 0,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Independent standard normals (Box-Muller); the first axis counts rows.

        float32 takes two values out of each 64-bit word, float64 one.
        """
        n_rows, n_values = shape[0], math.prod(shape[1:])
        half = (n_values + 1) // 2
        if dtype == torch.float64:
            u = _open_unit(self._words((n_rows, 2 * half), first_row)).view(n_rows, 2, half)
        else:
            words = self._words((n_rows, half), first_row)
            u = torch.from_numpy(words.view(np.int32)).to(torch.float32)
            # 32 signed bits to (0, 1): the clamp keeps log(0) out after rounding to 24 bits.
            u = u.mul_(2.0**-32).add_(0.5).clamp_(2.0**-33, 1 - 2.0**-24).view(n_rows, 2, half)
        radius = u[:, 0].log().mul_(-2.0).sqrt_()
        angle = u[:, 1].mul_(2 * math.pi)
        z = torch.empty_like(u)
        torch.cos(angle, out=z[:, 0]).mul_(radius)
        torch.sin(angle, out=z[:, 1]).mul_(radius)
        return z.view(n_rows, 2 * half)[:, :n_values].reshape(shape).to(device=device, dtype=dtype)

    def bernoulli(self, log_p: Tensor) -> Tensor:
        """True with probability min(1, exp(log_p)), independently; the first axis counts rows."""
        u = self.uniform(tuple(log_p.shape), device=log_p.device)
        return u.log() < log_p

    def order(self, chosen: Tensor) -> Tensor:
        """A uniformly random order of the true entries of each row: their ranks 1, 2, ..., and 0 elsewhere."""
        key = self.uniform(tuple(chosen.shape), device=chosen.device)
        rank = torch.where(chosen, key, 2.0).argsort(1).argsort(1) + 1
        return torch.where(chosen, rank, 0)

    def categorical(self, log_p: Tensor) -> Tensor:
        """Indices along the last axis, drawn from (unnormalised) log-probabilities in float64."""
        p = torch.softmax(log_p.to(torch.float64), dim=-1)
        if p.isnan().any():
            bad = int(p.isnan().any(-1).sum())
            raise NonFiniteError(f"{bad} of {p[..., 0].numel()} draws have no category of positive probability")
        u = self.uniform(tuple(log_p.shape[:-1]), device=log_p.device)
        cumulative = p.cumsum(-1)
        # Inverting the cumulative sum: `right` never lands on a category of probability zero.
        drawn = torch.searchsorted(cumulative, u[..., None] * cumulative[..., -1:], right=True)[..., 0]
        return drawn.clamp_(max=log_p.shape[-1] - 1)

    def _words(self, shape: tuple[int, ...], first_row: int) -> np.ndarray:
        """Row r owns the counter blocks [r * blocks, (r + 1) * blocks) of this branch's generator."""
        n_rows, n_words = shape[0], math.prod(shape[1:])
        blocks = -(-n_words // 4)  # Philox gives four words per tick of its counter
        digest = hashlib.blake2b(repr((int(self.seed), self.path)).encode(), digest_size=16).digest()
        key = np.frombuffer(digest, dtype=np.uint64)
        generator = np.random.Philox(key=key, counter=first_row * blocks)
        words = np.asarray(generator.random_raw(n_rows * blocks * 4), dtype=np.uint64)
        return np.ascontiguousarray(words.reshape(n_rows, blocks * 4)[:, :n_words]).reshape(shape)


def _open_unit(words: np.ndarray) -> Tensor:
    """64-bit words to float64 in (0, 1): 52 bits and half a unit, so neither end is reached, nor rounded to."""
    return torch.from_numpy(((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52)
