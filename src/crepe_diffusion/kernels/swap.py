"""Communication: neighbouring replicas walk towards each other's level and trade places or stay.

    log_alpha = log_work(down) - log_work(up)

Leaves `prod_m pi_m` invariant as far as `log_work` is exact. One network batch per sub-step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from crepe_diffusion.devices import home
from crepe_diffusion.evaluate import Evaluator
from crepe_diffusion.kernels.state import Moved, State, by_rows
from crepe_diffusion.paths import log_work, walk
from crepe_diffusion.random import Stream

__all__ = ["Accept", "Swaps", "directions", "metropolis", "swap"]

Accept = Callable[[Tensor, Stream], Tensor]


def metropolis(log_alpha: Float[Tensor, "*shape"], stream: Stream) -> Bool[Tensor, "*shape"]:
    """Accept with probability min(1, exp(log_alpha)); NaN is never accepted."""
    return stream.bernoulli(log_alpha.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf))


def directions(level: Int[Tensor, "chains levels"], n: int, n_levels: int) -> Int[Tensor, "chains levels"]:
    """Down (-1), up (+1) or no partner (0) for each replica: level m pairs with m - 1 where m = n mod 2.

    Alternating parity makes replicas drift through the ladder instead of diffusing (Syed et al. 2022).
    """
    direction = torch.where((level - n) % 2 == 0, -1, 1)
    partner = level + direction
    return torch.where((partner < 0) | (partner >= n_levels), 0, direction)


@dataclass(frozen=True)
class Swaps:
    """What happened between neighbours: pair m joins levels m and m + 1.

    `log_work` is (chains, levels), down for the upper and up for the lower member of a pair, NaN where idle, minus
    infinity where the replica began outside the support;
    `accepted` is (chains, pairs), and `active` (pairs,) marks the pairs that met.
    """

    log_work: Float[Tensor, "chains levels"]
    accepted: Bool[Tensor, "chains pairs"]
    active: Bool[Tensor, " pairs"]


def swap(state: State, evaluate: Evaluator, n: int, stream: Stream, accept: Accept = metropolis) -> tuple[State, Swaps]:
    """One communication step of parity n over all pairs of that parity.

    The noise-end replica is drawn again while it has no partner, inside the same network batch, so that it is new
    each time it walks down.
    """
    state, levels, k = state.own(evaluate), state.n_levels, evaluate.ladder.substeps
    direction = directions(state.level, n, levels)
    ways = direction.flatten()

    def walked(part: State, evaluate: Evaluator, rows: slice) -> Moved:
        index, branch = part.level.flatten() * k, stream.at("walk").from_row(rows.start)
        path = walk(evaluate, part.x, part.seen, index, ways[rows], k, branch)
        work = log_work(path, evaluate.coefficients)
        return path.x, path.seen, home(work, part.seen.possible, path.seen.possible)

    x, seen, (work, before, possible) = by_rows(_refreshed(state, evaluate, ways, stream.at("noise")), evaluate, walked)
    work = state.by_level(work.where(ways != 0, torch.nan))
    active = (torch.arange(1, levels) - n) % 2 == 0
    before, after = state.by_level(before), state.by_level(possible)
    log_alpha = _leave(work[:, 1:] - work[:, :-1], before, after)
    accepted = accept(log_alpha, stream.at("accept")) & active

    # Accepted pairs trade levels and keep their own walks; replicas without a partner keep what they became.
    lower = torch.cat([accepted, torch.zeros_like(accepted[:, :1])], dim=1)
    upper = torch.cat([torch.zeros_like(accepted[:, :1]), accepted], dim=1)
    moved = state.to_rows(lower | upper)
    idle = (ways == 0) & possible  # the noise end is not redrawn outside the support
    x, seen = state.take((moved | idle)[state.here], x, seen)
    level = state.level + torch.where(moved.reshape(state.level.shape), direction, 0)
    return State(x, seen, level, state.share), Swaps(work.where(before, -torch.inf), accepted, active)


def _leave(log_alpha: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Pairs that begin where the target has no weight: any walk that does not lead further out is taken.

    The target has no mass there, so nothing needs to be balanced; it lets chains that begin outside find their way in.
    """
    if before.all():
        return log_alpha
    n_before, n_after = (p[:, 1:].long() + p[:, :-1].long() for p in (before, after))
    return torch.where(n_before == 2, log_alpha, torch.where(n_after >= n_before, torch.inf, -torch.inf))


def _refreshed(state: State, evaluate: Evaluator, direction: Tensor, stream: Stream) -> State:
    """The state with the idle replica at the noise end redrawn from its reference law."""
    idle_top = (direction == 0) & (state.level.flatten() == state.n_levels - 1)
    if not idle_top.any():
        return state
    idle = idle_top.nonzero()[:, 0]
    noise = evaluate.noise(stream, len(idle))  # of all chains, since chains may differ in their prompts
    if len(state.x) < len(idle_top):
        own = (idle >= state.here.start) & (idle < state.here.stop)
        idle, noise = idle[own] - state.here.start, noise[own.to(noise.device)]
    return replace(state, x=state.x.index_copy(0, idle.to(state.x.device), noise))
