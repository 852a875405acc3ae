"""Which steps to join to levels, found by playing the exchange on the works of a pilot; no network is evaluated.

    rows per iteration   (M + 1) K          for M pairs of K sub-steps each; less where tokens change in turn
    tour                 the time that one arrival from the noise end spends at the data end, returns included
    effective arrivals   (sum of tours)^2 / sum of their squares, over those that began after the start

Few levels make short trips but large works, which are refused more often. Many levels filter arrivals on their way, but
single steps are noisier than sums of them. An arrival where the target favours it stays long, one where it does not is
soon pushed out, so that arrivals do not count equally.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from crepe_diffusion.processes import Counted
from crepe_diffusion.schedules import Ladder

if TYPE_CHECKING:
    from crepe_diffusion.samplers.pilot import Pilot

__all__ = ["Cut", "Plan", "plan"]

TOLERANCE = 0.05
"""Cuts whose number of steps in all differs by more than this share from the pilot's are not considered."""

PLAYED, CHAINS = 256, 128
"""Iterations and chains of a played exchange.

It begins with the pilot's population, and only what has come from the noise end since counts: on many levels the first
arrivals come late. The horizon is that of a run that costs four times as much as a pilot of 64 particles.
"""

NEAREST = 4
"""A particle that turns around goes on as one of so many nearest ones that walked the other way.

With all of them instead of four, replicas would forget their mode wherever they turn: arrivals would then be as many as
rejections alone allow, and effective arrivals two to four times too many.
"""


@dataclass(frozen=True)
class Cut:
    """Predictions for M `pairs` of K `substeps` each.

    `rejection` is `sum r` and `delay` is `sum r / (1 - r)`. Per 1,000 network rows, `arrivals` is what the
    delay allows once trips have begun (`1 / (2 + 2 delay)` per iteration), `effective` what the played exchange gave.
    """

    pairs: int
    substeps: int
    rejection: float
    delay: float
    arrivals: float
    effective: float


@dataclass(frozen=True)
class Plan:
    """The ladder that is predicted to give most effective arrivals for its rows, and all cuts that were compared."""

    ladder: Ladder
    best: Cut
    cuts: tuple[Cut, ...]

    def __str__(self) -> str:
        head = "     pairs x sub-steps   sum r   sum r/(1-r)   arrivals   effective, per 1,000 rows"
        lines = [
            f"  {'->' if c is self.best else '  '} {c.pairs:5d} x {c.substeps:<9d}   {c.rejection:5.2f}"
            f"   {c.delay:11.2f}   {c.arrivals:8.2f}   {c.effective:9.2f}"
            for c in self.cuts
        ]
        return "\n".join([head, *lines])


def plan(pilot: Pilot) -> Plan:
    """Compare all cuts into blocks of equally many steps, or nearly so."""
    steps = pilot.n_steps
    nearest = [(m, round(steps / m)) for m in range(1, steps + 1)]
    exact = [(m, k) for m, k in nearest if m == round(steps / k) and abs(m * k - steps) <= TOLERANCE * steps]
    cuts = tuple(_predict(pilot, m, k) for m, k in exact)
    best = max(cuts, key=lambda cut: cut.effective)
    positions = torch.linspace(0, steps, best.pairs + 1, dtype=torch.float64)
    if isinstance(pilot.process, Counted):
        positions = positions.round()  # the population between two steps has another number of masks
    return Plan(pilot.ladder.moved(positions, best.substeps), best, cuts)


def _predict(pilot: Pilot, pairs: int, substeps: int) -> Cut:
    ends = torch.linspace(0, pilot.n_steps, pairs + 1).round().long()
    r = 1 - pilot.acceptance(ends)
    cost = pilot.iteration_rows(pairs, substeps) / 1000
    delay = float((r / (1 - r).clamp(min=1e-12)).sum())
    return Cut(pairs, substeps, float(r.sum()), delay, 1 / (2 + 2 * delay) / cost, _play(pilot, ends) / cost)


def _play(pilot: Pilot, ends: Tensor) -> float:
    """Effective arrivals per iteration and chain of an exchange whose replicas are the pilot's particles.

    A replica is a particle of the walk down or of the walk up, at the time of its level. It walks down with the works
    of a particle of the first kind, up with those of the second; one that turns around goes on as a particle of the
    other kind that is alike there, so that what the works owe to the mode stays with it and their noise is new.
    """
    rng = np.random.default_rng(0)
    ends_list = ends.tolist()
    top = len(ends_list) - 1
    blocks = list(pairwise(ends_list))
    down = torch.stack([pilot.down[a:b].sum(0) for a, b in blocks]).nan_to_num(nan=-math.inf).numpy()
    up = torch.stack([pilot.up[a:b].sum(0) for a, b in blocks]).nan_to_num(nan=math.inf).numpy()
    alike = [_alike(pilot.features[0, e], pilot.features[1, e]) for e in ends_list]
    # turned[kind, level, particle]: the particles of the other kind that are alike there
    turned = np.stack([np.stack([a[kind] for a in alike]) for kind in (0, 1)])
    cumulative = pilot.log_weights[ends].exp().cumsum(1).numpy()

    chains = np.arange(CHAINS)
    kind = np.zeros((CHAINS, top + 1), dtype=np.int64)
    slot = np.stack([np.searchsorted(c / c[-1], rng.random(CHAINS)) for c in cumulative], 1)
    tour = chains[:, None] * (top + 1) + np.arange(top + 1)
    n_tours, seen = CHAINS * (top + 1), []
    for i in range(PLAYED):
        # The noise end is drawn again: a new tour.
        slot[:, top] = np.searchsorted(cumulative[top] / cumulative[top, -1], rng.random(CHAINS))
        kind[:, top] = 0
        tour[:, top] = n_tours + chains
        n_tours += CHAINS
        m = np.arange(1 + i % 2, top + 1, 2)
        if len(m):
            k = rng.integers(NEAREST, size=(2, CHAINS, len(m))) % turned.shape[-1]
            high, low = slot[:, m], slot[:, m - 1]
            high = np.where(kind[:, m] == 0, high, turned[1, m, high, k[0]])
            low = np.where(kind[:, m - 1] == 1, low, turned[0, m - 1, low, k[1]])
            accepted = np.log(rng.random(high.shape)) < down[m - 1, high] - up[m - 1, low]
            rows, cols = np.nonzero(accepted)
            above = m[cols]
            slot[rows, above - 1], slot[rows, above] = high[rows, cols], low[rows, cols]
            kind[rows, above - 1], kind[rows, above] = 0, 1
            tour[rows, above - 1], tour[rows, above] = tour[rows, above], tour[rows, above - 1]
        seen.append(tour[:, 0].copy())
    number, lengths = np.unique(np.concatenate(seen), return_counts=True)
    fresh = lengths[number >= CHAINS * (top + 1)].astype(float)
    effective = float(fresh.sum() ** 2 / (fresh**2).sum()) if len(fresh) else 0.0
    return effective / (CHAINS * PLAYED)


def _alike(down: Tensor, up: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """For each particle on its way down the nearest ones on their way up, and the other way round, (n, NEAREST)."""
    distance = torch.cdist(down, up)
    k = min(NEAREST, len(down))
    return distance.topk(k, 1, largest=False)[1].numpy(), distance.T.topk(k, 1, largest=False)[1].numpy()
