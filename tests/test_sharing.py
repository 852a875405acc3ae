"""What a team shares: threads play its processes, each counts the rows that it evaluates itself."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import crepe_diffusion as cd
from checks import refuted
from crepe_diffusion.sharing import Share, joined, team
from crepe_diffusion.stitching import Junctions, Restitch

SIZE, BLOCK = 2, 4
ROWS: Counter[str] = Counter()
"""Rows that went through a network or a reward, by thread."""


class Threads:
    """One member of a team whose members are threads of this process."""

    def __init__(self, rank: int, parts: list[Any], barrier: threading.Barrier):
        self.rank, self.size, self.parts, self.barrier = rank, len(parts), parts, barrier
        self.bytes = 0
        """What every member has got."""

    def together(self, own: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        try:
            self.parts[self.rank] = own()
        except Exception as error:
            self.parts[self.rank] = error
        self.barrier.wait(60)
        parts = list(self.parts)
        self.barrier.wait(60)
        for part in parts:
            if isinstance(part, Exception):
                raise part
        out = tuple(torch.cat(z) for z in zip(*parts, strict=True))
        self.bytes += sum(z.numel() * z.element_size() for z in out)
        return out


def by_threads(function: Callable[[], Any], size: int = SIZE) -> list[Any]:
    """`function()` by every member of a team."""
    parts, found, barrier = [None] * size, [None] * size, threading.Barrier(size)

    def run(rank: int) -> None:
        with joined(Threads(rank, parts, barrier)):
            found[rank] = function()

    threads = [threading.Thread(target=run, args=(rank,), name=f"process {rank}") for rank in range(size)]
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
LADDER, CLEAN = cd.ladder.karras(5, 0.05, 10.0), cd.ladder.linear(6, 0.02, 1.0)
OWN = {"micro_batch": BLOCK, "fit_samples": 16}
PIECES = {"micro_batch": 3 * BLOCK, "fit_samples": 16}


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


# -- rows have an owner --------------------------------------------------------------------------------------------

N_CHAINS, N_STEPS = 3, 4
"""15 rows of 5 levels in blocks of 4: the last one is short, and of 3 and 4 processes some have fewer blocks."""
LEVELS = cd.ladder.linear(5, 0.02, 1.0)
CONDITIONS = cd.models.Each([torch.full((4,), c) for c in (-1.0, 0.5, 2.0)])
EACH = cd.models.Denoiser(lambda y, t, c: denoise(y + c, t), (4,), condition=CONDITIONS, dtype=torch.float32)
PROMPTED = cd.models.TokenModel(tokens, (6,), vocab_size=3, prompt=torch.tensor([[c, *[-1] * 5] for c in (2, 1, 0)]))


def spoilt(x: Tensor) -> Tensor:
    """Not finite for a third of the rows."""
    return torch.where(x[:, 0] > 0.5, torch.nan, x[:, 0].to(torch.float64))


WALKS: dict[str, dict[str, Any]] = {
    "gaussian": {"target": TILTED, "ladder": cd.ladder.karras(5, 0.05, 10.0, substeps=2)},
    "a condition for each chain": {"target": EACH.as_target(), "ladder": LADDER},
    "bounce": {"target": TILTED, "ladder": LADDER, "explorer": cd.Bounce()},
    "langevin": {"target": TILTED, "ladder": LADDER, "explorer": cd.Langevin()},
    "masked tokens in turn": {"target": MASKED.tilt(reward), "ladder": LEVELS, "explorer": cd.Bounce()},
    "a prompt for each chain": {"target": PROMPTED.as_target(), "ladder": LEVELS},
    "single tokens": {"target": TOKENS.tilt(reward), "ladder": LEVELS, "explorer": cd.SingleToken()},
    "rows that are not finite": {"target": REAL.tilt(spoilt), "ladder": LADDER, "nonfinite": "reject"},
}


def walked(options: dict[str, Any], start: dict[str, Tensor] | None = None, n: int = N_STEPS) -> dict[str, Tensor]:
    """The snapshot after some iterations, the draws and the works; under `sent`, what was sent by one iteration."""
    chain = cd.ReplicaExchange(**options, n_chains=N_CHAINS, **OWN, start=start)
    found, works, sent = [], [], []
    for _ in range(n):
        before = getattr(team(), "bytes", 0)
        info = chain.step()
        sent.append(getattr(team(), "bytes", 0) - before)
        share = Share.of(15, BLOCK)
        assert len(chain.state.x) == len(chain.state.seen.drift) == share.here.stop - share.here.start
        works.append(info.swaps.log_work)
        found.append(chain.output())
    extra = {"draws": torch.stack(found), "works": torch.stack(works).nan_to_num(7.0), "sent": torch.tensor(max(sent))}
    return {**chain.snapshot(), **extra}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name in wanted.keys() - {"sent"}:
        assert torch.equal(found[name].nan_to_num(7.0), wanted[name].nan_to_num(7.0)), name


@cache
def alone_walked(name: str) -> dict[str, Tensor]:
    return walked(WALKS[name])


SOME = [(name, 3) for name in WALKS] + [(name, size) for name in ("bounce", "masked tokens in turn") for size in (2, 4)]


@pytest.mark.parametrize(("name", "size"), SOME)
def test_every_process_walks_its_own_rows_and_sends_numbers_only(name: str, size: int) -> None:
    options = WALKS[name]
    alone = alone_walked(name)
    assert name != "rows that are not finite" or len(alone["counts.nonfinite"])
    gathers = 1 if "explorer" not in options else 2
    for found in by_threads(lambda: walked(options), size):
        assert_same(found, alone)
        # A block has at most a work and two booleans for each row, four counts, and one for each level.
        assert 0 < found["sent"] <= gathers * -(-4 // size) * size * (BLOCK * 10 + 9 * 8)


def test_the_number_of_processes_may_change() -> None:
    options = WALKS["bounce"]
    alone = alone_walked("bounce")
    begun = by_threads(lambda: walked(options, n=2), 3)[1]
    start = {name: value for name, value in begun.items() if name not in ("draws", "works", "sent")}
    for found in by_threads(lambda: walked(options, start, N_STEPS - 2), 2):
        found["draws"], found["works"] = (torch.cat([begun[name], found[name]]) for name in ("draws", "works"))
        assert_same(found, alone)


def test_a_target_of_two_networks_cuts_the_rows_anew() -> None:
    """A state then costs two network rows, so that a block has half of the states, and rows change their owners."""
    other = cd.models.Denoiser(lambda y, t: denoise(y, t) + 1, (4,), dtype=torch.float32)

    def refined() -> dict[str, Tensor]:
        chain = cd.ReplicaExchange(REAL.as_target(), LADDER, n_chains=N_CHAINS, **OWN)
        chain.step()
        chain.target = cd.guided(REAL, other, 1.5)
        assert len(chain.state.x) == (15 if team() is None else (6, 6, 3)[team().rank])
        chain.step()
        return chain.snapshot()

    alone = refined()
    for found in by_threads(refined, 3):
        assert_same(found, alone)


def test_a_row_that_is_not_finite_stops_all_processes() -> None:
    """The error is that of the first block that has one, whoever has it."""
    options = WALKS["rows that are not finite"] | {"nonfinite": "raise"}

    def late(x: Tensor) -> Tensor:
        return torch.where(x[:, 0] > 1.5, torch.nan, x[:, 0].to(torch.float64))

    options["target"] = REAL.tilt(late)

    def failed() -> str:
        with pytest.raises(cd.NonFiniteError) as error:
            walked(options, n=50)
        return str(error.value)

    alone = failed()
    assert by_threads(failed, 3) == [alone] * 3


def test_restitch_gathers_rows_when_it_moves() -> None:
    explorer = Restitch(n_candidates=8, chance=0.5, n_steps=2, between=(0.1, 3.0))

    def moves() -> tuple[Tensor, list[int]]:
        chain, sent = cd.ReplicaExchange(PLANS, LADDER, n_chains=N_CHAINS, explorer=explorer, **PIECES), [0]
        for _ in range(5):
            chain.step()
            sent.append(getattr(team(), "bytes", 0))
        return chain.state.whole().x, [b - a for a, b in pairwise(sent)][1:]  # all have all rows at first

    alone, _ = moves()
    for x, sent in by_threads(moves, 3):
        assert torch.equal(x, alone)
        assert min(sent) < 10 * 4 * BLOCK * 8 < max(sent)


def test_random_numbers_are_those_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that are counted from the first row of a process, or of a block, fail the same tests."""
    whole = alone_walked("gaussian")

    def same() -> None:
        for found in by_threads(lambda: walked(WALKS["gaussian"]), 2):
            assert_same(found, whole)

    def local(self: cd.Stream, first_row: int) -> cd.Stream:
        last = threading.current_thread().name == "process 1"
        return replace(self, first_row=first_row - 8 * last)

    same()
    monkeypatch.setattr(cd.Stream, "from_row", local)
    refuted(same)


def test_blocks_change_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain that walks in blocks agrees with one that does not, to rounding; numbers of a block's own rows fail."""
    double = cd.models.Denoiser(lambda y, t: y.tanh() / (1 + t[:, None]), (4,), dtype=torch.float64)
    options = {"target": double**1.5, "ladder": LADDER, "n_chains": N_CHAINS, "fit_samples": 16}

    def same() -> None:
        whole, parts = (cd.ReplicaExchange(**options, micro_batch=size).sample(N_STEPS).x for size in (None, BLOCK))
        torch.testing.assert_close(parts, whole, rtol=0, atol=1e-9)

    same()
    monkeypatch.setattr(cd.Stream, "from_row", lambda self, first_row: self)
    refuted(same)
