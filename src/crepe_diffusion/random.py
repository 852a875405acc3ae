"""Randomness as a value: a draw is a function of (seed, path, row, element).

    stream.at(n, "walk", k).normal((rows, dim))[r]  =  f(seed, n, "walk", k, r)

A stream holds no position. Each row of a draw owns a fixed range of the counter of one Philox generator,
so a draw does not depend on micro-batches, on how rows are split between processes, or on what was drawn
before; and a run resumes from its iteration number alone. The words are the same on every device; logarithms, sines
and cosines of float32 may differ in their last bits.
"""

from __future__ import annotations

import hashlib
import math
import threading
from dataclasses import dataclass
from operator import index

import numpy as np
import torch
from torch import Tensor

from crepe_diffusion.devices import is_home, real, resident
from crepe_diffusion.errors import InputError, NonFiniteError

__all__ = ["Stream", "category"]


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
    first_row: int = 0
    """The number of the first row of every draw: that of a part of a batch."""

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, (int, np.integer)) or self.seed < 0:
            raise InputError(f"seed must be a non-negative integer, got {self.seed!r}")

    def at(self, *names: int | str) -> Stream:
        """The branch below this one with these names."""
        # Integers of any type name the same branch: an iteration read back from an array continues its run.
        path = self.path + tuple(n if isinstance(n, str) else index(n) for n in names)
        return Stream(self.seed, path, self.first_row)

    def from_row(self, first_row: int) -> Stream:
        """The same numbers for a part of the rows that begins here.

        >>> stream = Stream(0).at("walk")
        >>> bool((stream.from_row(3).at(1).uniform((2,)) == stream.at(1).uniform((5,))[3:]).all())
        True
        """
        return self if first_row == self.first_row else Stream(self.seed, self.path, first_row)

    def uniform(self, shape: tuple[int, ...], *, first_row: int = 0, device: torch.device | str = "cpu") -> Tensor:
        """Independent uniforms in the open interval (0, 1); the first axis counts rows.

        float64, or float32 on a device that has no other; 52 or 23 bits.
        """
        return _open_unit(self._words(shape, first_row, torch.device(device)))

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
        n_rows, n_values, device = shape[0], math.prod(shape[1:]), torch.device(device)
        half = (n_values + 1) // 2
        # All radii first, then all angles: each operation runs over one piece of memory, however short rows are.
        if dtype == torch.float64:
            words = self._words((n_rows, 2 * half), first_row, device).view(n_rows, 2, half)
            u = _open_unit(words.transpose(0, 1).contiguous())
        else:
            words = self._words((n_rows, half), first_row, device).view(torch.int32).view(n_rows, 2, half)
            u = words.transpose(0, 1).to(torch.float32, memory_format=torch.contiguous_format)
            # 32 signed bits to (0, 1): the clamp keeps log(0) out after rounding to 24 bits.
            u = u.mul_(2.0**-32).add_(0.5).clamp_(2.0**-33, 1 - 2.0**-24)
        radius, angle = u[0].log_().mul_(-2.0).sqrt_(), u[1].mul_(2 * math.pi)
        z = torch.empty(n_rows, 2 * half, dtype=u.dtype, device=device)
        torch.mul(angle.cos(), radius, out=z[:, :half])
        torch.mul(angle.sin_(), radius, out=z[:, half:])
        return (z if n_values % 2 == 0 else z[:, :n_values]).reshape(shape).to(dtype)

    def bernoulli(self, log_p: Tensor) -> Tensor:
        """True with probability min(1, exp(log_p)), independently; the first axis counts rows."""
        u = self.uniform(tuple(log_p.shape), device=log_p.device)
        return u.log() < log_p

    def order(self, chosen: Tensor) -> Tensor:
        """A uniformly random order of the true entries of each row: their ranks 1, 2, ..., and 0 elsewhere."""
        key = self.uniform(tuple(chosen.shape), device=chosen.device)
        rank = torch.where(chosen, key, 2.0).argsort(1).argsort(1) + 1
        return torch.where(chosen, rank, 0)

    def integers(self, shape: tuple[int, ...], n: int, *, device: torch.device | str = "cpu") -> Tensor:
        """Independent integers 0 .. n - 1, all equally likely; the first axis counts rows."""
        return (self.uniform(shape, device=device) * n).long().clamp(max=n - 1)

    def categorical(self, log_p: Tensor) -> Tensor:
        """Indices along the last axis, drawn from (unnormalised) log-probabilities; see `category`."""
        return category(log_p, self.uniform(tuple(log_p.shape[:-1]), device=log_p.device))

    def _words(self, shape: tuple[int, ...], first_row: int, device: torch.device) -> Tensor:
        """Row r owns the counter blocks [r * blocks, (r + 1) * blocks) of this branch's generator; as int64."""
        n_rows, n_words, first_row = shape[0], math.prod(shape[1:]), self.first_row + first_row
        blocks = -(-n_words // 4)  # Philox gives four words per tick of its counter
        digest = hashlib.blake2b(repr((int(self.seed), self.path)).encode(), digest_size=16).digest()
        key = np.frombuffer(digest, dtype=np.uint64)
        if device.type == "cpu":
            words = torch.from_numpy(_numpy_words(key, first_row * blocks, n_rows * blocks)).view(torch.int64)
        else:
            first = first_row * blocks + 1  # NumPy's generator ticks before it gives its first block
            counter = torch.arange(first, first + n_rows * blocks, device=device)
            words = _philox(counter, (int(key[0]), int(key[1])))
        if n_words % 4:
            words = words.view(n_rows, blocks * 4)[:, :n_words].contiguous()
        return words.view(shape)


def category(log_p: Tensor, u: Tensor) -> Tensor:
    """The index along the last axis at which the cumulative probability passes u, in float64 (see `devices.real`).

    A draw without a category of positive probability is an error. On a device, where looking for one would wait, it
    is -1, and the evaluation of such a state is the error.
    """
    p = torch.softmax(log_p.to(real(log_p.device)), dim=-1)
    impossible = p[..., 0].isnan()
    if is_home(p) and impossible.any():
        raise NonFiniteError(
            f"{int(impossible.sum())} of {impossible.numel()} draws have no category of positive probability"
        )
    cumulative = p.cumsum(-1)
    # `right` never lands on a category of probability zero.
    drawn = torch.searchsorted(cumulative, u[..., None] * cumulative[..., -1:], right=True)[..., 0]
    drawn = drawn.clamp_(max=log_p.shape[-1] - 1)
    return drawn if is_home(p) else drawn.where(~impossible, -1)


_LOCAL = threading.local()


def _numpy_words(key: np.ndarray, counter: int, n_blocks: int) -> np.ndarray:
    """The words of NumPy's Philox with this key, from this counter on.

    One generator per thread is set anew each time: making one costs more than a small draw, since it asks the system
    for entropy that a key replaces.
    """
    generator = getattr(_LOCAL, "generator", None)
    if generator is None:
        generator = _LOCAL.generator = np.random.Philox(key=0)
    place = np.array([counter, 0, 0, 0], dtype=np.uint64)
    generator.state = {
        "bit_generator": "Philox",
        "state": {"counter": place, "key": key},
        "buffer": place,
        "buffer_pos": 4,  # nothing is left in the buffer
        "has_uint32": 0,
        "uinteger": 0,
    }
    return generator.random_raw(4 * n_blocks)


def _open_unit(words: Tensor) -> Tensor:
    """64-bit words to (0, 1): 52 bits (23 of float32) and half a unit, so neither end is reached, nor rounded to."""
    dtype = real(words.device)
    bits = 52 if dtype == torch.float64 else 23
    return ((words >> (64 - bits)) & (2**bits - 1)).to(dtype).add_(0.5).mul_(2.0**-bits)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


LOW = 2**32 - 1
MULTIPLIERS = torch.tensor([[_signed(0xD2E7470EE14C6C93)], [_signed(0xCA5A826395121157)]])
WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)


def _philox(counter: Tensor, key: tuple[int, int]) -> Tensor:
    """Philox4x64 of ten rounds (Salmon et al. 2011), (n, 4) words for n counters below 2^63, as NumPy computes it.

    In integer operations that every device has, so the words are the same everywhere. A counter is c_0..c_3; `even`
    holds c_0 and c_2, which are multiplied, and `odd` the others.
    """
    keys = torch.tensor([[_signed((k + i * w) % 2**64) for k, w in zip(key, WEYL, strict=True)] for i in range(10)])
    keys, even = keys[:, :, None].to(counter.device), torch.stack([counter, torch.zeros_like(counter)])
    odd = torch.zeros_like(even)
    for i in range(10):
        high, low = _product(even, resident(MULTIPLIERS, counter.device))
        even, odd = high.flip(0) ^ odd ^ keys[i], low.flip(0)
    return torch.stack([even[0], odd[0], even[1], odd[1]], 1)


def _product(a: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 64 bits of the unsigned 128-bit product; shifts of int64 keep the sign, so they are masked."""
    a_high, a_low, m_high, m_low = (a >> 32) & LOW, a & LOW, (m >> 32) & LOW, m & LOW
    middle = a_high * m_low + ((a_low * m_low >> 32) & LOW)
    rest = a_low * m_high + (middle & LOW)
    return a_high * m_high + ((middle >> 32) & LOW) + ((rest >> 32) & LOW), a * m
