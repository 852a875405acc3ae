"""What a team shares: threads play its processes, each counts the rows that it evaluates itself."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.sharing import joined
from crepe_diffusion.stitching import Junctions, Restitch

SIZE, BLOCK = 2, 4
ROWS: Counter[str] = Counter()
"""Rows that went through a network or a reward, by thread."""


class Threads:
    """One member of a team whose members are threads of this process."""

    def __init__(self, rank: int, parts: list[Any], barrier: threading.Barrier):
        self.rank, self.size, self.parts, self.barrier = rank, SIZE, parts, barrier

    def together(self, own: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        self.parts[self.rank] = own()
        self.barrier.wait(60)
        out = tuple(torch.cat(z) for z in zip(*self.parts, strict=True))
        self.barrier.wait(60)
        return out


def by_threads(function: Callable[[], Any]) -> list[Any]:
    """`function()` by every member of a team."""
    parts, found, barrier = [None] * SIZE, [None] * SIZE, threading.Barrier(SIZE)

    def run(rank: int) -> None:
        with joined(Threads(rank, parts, barrier)):
            found[rank] = function()

    threads = [threading.Thread(target=run, args=(rank,), name=f"process {rank}") for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert all(value is not None for value in found)
    return found


def counted(rows: int) -> None:
    ROWS[threading.current_thread().name] += rows


WEIGHTS = cd.Stream(4).normal((4, 4), dtype=torch.float32)


def denoise(y: Tensor, t: Tensor) -> Tensor:
    counted(len(y))
    z = y.flatten(1) / (1 + t[:, None] ** 2).sqrt()
    return (z / (1 + t[:, None] ** 2).sqrt() + torch.tanh(z @ WEIGHTS) / 4).reshape(y.shape)


def tokens(x: Tensor, t: Tensor) -> Tensor:
    counted(len(x))
    near = torch.nn.functional.one_hot(x.roll(1, 1).clamp(max=2), 3).to(torch.float32)
    return near.log_softmax(-1)


def reward(x: Tensor) -> Tensor:
    counted(len(x))
    return x.flatten(1)[:, 0].to(torch.float64)


REAL = cd.models.Denoiser(denoise, (4,), dtype=torch.float32)
TILTED = REAL.tilt(lambda x: x[:, 0], guidance="gradient")
TOKENS = cd.models.TokenModel(tokens, (6,), vocab_size=3, kind="uniform")
MASKED = cd.models.TokenModel(tokens, (6,), vocab_size=3)
SEGMENT = cd.models.Denoiser(denoise, (2, 2), dtype=torch.float32, process=cd.processes.Gaussian(variance=1.0))
PLANS = cd.stitching.Segments(SEGMENT, 3).tilt(Junctions())
LADDER, CLEAN = cd.ladder.karras(5, 0.05, 10.0), cd.ladder.linear(5, 0.02, 1.0)
OWN = {"micro_batch": BLOCK, "fit_samples": 16}


def exchange(target: Any, ladder: cd.Ladder, explorer: Any = None) -> Callable[[], Tensor]:
    return lambda: cd.ReplicaExchange(target, ladder, n_chains=4, explorer=explorer, **OWN).sample(4).x


def explored(target: Any, ladder: cd.Ladder, explorer: Any) -> Callable[[], Tensor]:
    """One move of the explorer alone."""

    def move() -> Tensor:
        chain = cd.ReplicaExchange(target, ladder, n_chains=4, **OWN)
        del ROWS[threading.current_thread().name]
        return explorer(chain.state, chain.evaluate, cd.Stream(3))[0].x

    return move


def from_pilot() -> Tensor:
    found = cd.pilot(TILTED, cd.ladder.karras(9, 0.05, 10.0), n=16, micro_batch=BLOCK)
    return torch.cat(
        [found.x.flatten(), cd.ReplicaExchange(TILTED, pilot=found, n_chains=4, **OWN).sample(2).x.flatten()]
    )


CASES: dict[str, Callable[[], Tensor]] = {
    "swaps": exchange(TILTED, LADDER),
    "langevin": explored(TILTED, LADDER, cd.Langevin()),
    "bounce": explored(TILTED, LADDER, cd.Bounce()),
    "single tokens": explored(TOKENS, CLEAN, cd.SingleToken()),
    "uniform tokens": exchange(TOKENS, CLEAN),
    "masked tokens, a reward that is no network": exchange(MASKED.tilt(reward), CLEAN),
    "restitch": explored(PLANS, LADDER, Restitch(n_candidates=8, chance=1.0, n_steps=2, between=(0.1, 3.0))),
    "smc": lambda: cd.SMC(TILTED, LADDER, n_particles=16, n_batches=2, **OWN).sample(1).x,
    "particle gibbs": lambda: cd.ParticleGibbs(TILTED, LADDER, n_particles=8, n_chains=2, **OWN).sample(2).x,
    "plain": lambda: cd.Plain(TILTED, LADDER, n_chains=16, **OWN).sample(1).x,
    "pilot": from_pilot,
}


@pytest.mark.parametrize("name", CASES)
def test_everybody_evaluates_a_share_and_gets_the_same(name: str) -> None:
    ROWS.clear()
    alone = CASES[name]()
    total = sum(ROWS.values())
    ROWS.clear()
    for found in by_threads(CASES[name]):
        assert torch.equal(found, alone)
    # Twice half of the rows, and what an odd number of blocks adds; somebody who did everything would have all.
    assert len(ROWS) == SIZE
    assert max(ROWS.values()) < 0.7 * total, (dict(ROWS), total)
