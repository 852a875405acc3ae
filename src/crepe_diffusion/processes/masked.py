"""The masked process: a token turns into the mask, and is revealed again.

q_t(x | x_0) = a [x = x_0] + (1 - a) [x = mask],     a = 1 - t
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from crepe_diffusion.batches import rows_like
from crepe_diffusion.devices import as_real, is_home, real
from crepe_diffusion.errors import InputError
from crepe_diffusion.processes.asked import Asked, Conditionals
from crepe_diffusion.processes.base import Coefficients, Evaluation
from crepe_diffusion.processes.discrete import (
    LOG_ZERO,
    Discrete,
    TokenMoves,
    changed_position,
    check_at_once,
    in_turn,
    most_at_once,
    pick,
    random_position,
    survival,
    with_entry,
)
from crepe_diffusion.random import Stream

__all__ = ["Counted", "Masked"]


@dataclass(frozen=True)
class Masked(Discrete, TokenMoves):
    """Absorbing diffusion: a token turns into the mask, whose id is `mask_id`, or `vocab_size` where none is given.

    A mask with an id below `vocab_size` has an entry in every prediction, which must be minus infinity.

    `at_once` bounds how many positions change together on a walk, with an evaluation after each such change:

    - `1`: the ratio of densities is exact by the chain rule, and a descent costs one evaluation per position;
    - a larger number: fewer evaluations, and the tokens of one turn are multiplied as if they were independent;
    - `None`: all positions that change between two times of the ladder;
    - `"auto"`: 1 for up to 128 positions, beyond them so many that a descent takes about 128 turns.

    Unless it is None, the models get the share of masked positions in place of the time. What is masked decides the law
    of the tokens, and the time adds nothing, so a prediction holds at all times and is never evaluated twice.

    >>> process = Masked(vocab_size=3)
    >>> process.noising(torch.tensor([[0]]), torch.tensor([0.0]), torch.tensor([0.5])).exp().tolist()
    [[[0.5, 0.0, 0.0, 0.5]]]
    """

    at_once: int | str | None = "auto"
    mask_id: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_once(self.at_once)
        given = self.mask_id
        if given is not None and (isinstance(given, bool) or int(given) != given or not 0 <= given <= self.vocab_size):
            raise InputError(f"mask_id must be an integer from 0 to vocab_size = {self.vocab_size}, got {given!r}")
        if self.prompt is not None and bool((self.prompt == self.mask).any()):
            raise InputError(f"prompt freezes the mask, {self.mask}: write -1 where a position is free")

    @property
    def n_states(self) -> int:
        return max(self.vocab_size, self.mask + 1)

    def _all_states(self, log_p: Tensor, log_mask: Tensor | float) -> Tensor:
        """Predictions with an entry for the mask, (*x.shape, n_states)."""
        if self.mask == self.vocab_size:
            log_p = torch.cat([log_p, torch.empty_like(log_p[..., :1])], dim=-1)
        else:
            log_p = log_p.clone()
        log_p[..., self.mask] = log_mask
        return log_p

    def multiplies(self, event: torch.Size) -> bool:
        return self.log_probs is None and most_at_once(self.at_once, self.n_free(event)) > 1

    def model_time(self, x: Tensor, t: Tensor) -> Tensor:
        if self.at_once is None:
            return t
        free = self.free(x).flatten(1)
        return ((x == self.mask).flatten(1) & free).sum(1).to(t.dtype) / free.sum(1).clamp(min=1)

    # -- positions change one after the other ------------------------------------------------------------
    # Coins decide which positions change between two times, and a uniformly random order decides when: they depend on
    # no model, and the order has the same probability both ways. At most `at_once` positions change in one turn.

    @property
    def takes_turns(self) -> bool:
        return self.at_once is not None

    def turns(self, x: Tensor, s: Tensor, t: Tensor, up: Tensor, stream: Stream) -> Tensor:
        """In which turn each position changes, 0 for never, as (rows, positions); computed on the CPU."""
        may = (self.free(x) & ((x == self.mask) != rows_like(up, x)) & rows_like(s != t, x)).flatten(1)
        n = most_at_once(self.at_once, self.n_free(x.shape[1:]))
        return (self.ranks(x, may, s, t, up, stream) + n - 1).div(n, rounding_mode="floor")

    def ranks(self, x: Tensor, may: Tensor, s: Tensor, t: Tensor, up: Tensor, stream: Stream) -> Tensor:
        """The order (1, 2, ...) in which positions change of those that `may`, (rows, positions), 0 for the others."""
        a_s, a_t = 1 - s, 1 - t
        chance = torch.where(up, 1 - a_t / a_s, (a_s - a_t) / (1 - a_t))
        coins = stream.at("coins").bernoulli(rows_like(chance.log(), may).where(may, LOG_ZERO))
        return stream.at("order").order(coins)

    def change(self, x: Tensor, positions: Tensor, chosen: Tensor, log_q: Tensor, up: Tensor, stream: Stream) -> Tensor:
        """The chosen positions (rows, k) masked where `up`, and elsewhere revealed by `log_q`, (rows, k, V)."""
        nothing = torch.full_like(log_q, LOG_ZERO)
        nothing[..., 0] = 0
        tokens = stream.categorical(torch.where((chosen & ~up[:, None])[..., None], log_q, nothing))
        flat = x.flatten(1)
        new = torch.where(up[:, None], self.mask, tokens)
        return flat.scatter(1, positions, torch.where(chosen, new, flat.gather(1, positions))).reshape(x.shape)

    def log_conditionals(self, seen: Evaluation, x: Tensor, positions: Tensor, chosen: Tensor) -> Tensor:
        """Log-probability of the tokens that x has at the chosen positions: of each model, then of the proposal."""
        tokens = x.flatten(1).gather(1, positions).clamp(max=self.vocab_size - 1)
        index = positions * self.vocab_size + tokens
        log_p = torch.stack([as_real(p.flatten(1).gather(1, index)) for p in (*seen.predictions, seen.drift)])
        return log_p.where(chosen, 0.0).sum(-1)

    def asked(self, x: Tensor, turns: Tensor, turn: int, up: Tensor, stream: Stream) -> Conditionals:
        """The tokens of this turn: those that x has where it walks up, and new ones elsewhere."""
        positions, chosen = (part.to(x.device) for part in in_turn(turns, turn))
        given = x.flatten(1).gather(1, positions).clamp(max=self.vocab_size - 1)
        return Conditionals(positions, chosen, given, ~up, stream.uniform(tuple(positions.shape), device=x.device))

    def noisier(self, x: Tensor, asked: Asked) -> Tensor:
        assert isinstance(asked, Conditionals)
        flat = x.flatten(1)
        new = torch.where(asked.chosen, self.mask, flat.gather(1, asked.positions))
        return flat.scatter(1, asked.positions, new).reshape(x.shape)

    def changed(self, noisy: Tensor, asked: Asked, tokens: Tensor) -> Tensor:
        """The state after a turn: the noisier end itself, or with its new tokens where they were drawn."""
        assert isinstance(asked, Conditionals)
        new = torch.where(asked.chosen & asked.drawn[:, None], tokens, asked.here(noisy))
        return noisy.flatten(1).scatter(1, asked.positions, new).reshape(noisy.shape)

    def coin_ratio(self, x_s: Tensor, x_t: Tensor, s: Tensor, t: Tensor) -> Tensor:
        """What `log p_s(x_s) - log p_t(x_t)` of every model has besides the conditionals of its tokens, (rows,)."""
        certain = torch.zeros(1, dtype=real(x_s.device), device=x_s.device).expand(*x_s.shape, self.vocab_size)
        each = self.log_ratio(x_s, x_t, certain, s, t)
        return torch.where(self.free(x_s), each, 0.0).flatten(1).sum(1)

    def counted(self) -> Counted:
        """The same process with a fixed number of masks at every time."""
        return Counted(**{f.name: getattr(self, f.name) for f in fields(self)})

    # -- all positions change together -------------------------------------------------------------------

    @property
    def mask(self) -> int:
        return self.vocab_size if self.mask_id is None else self.mask_id

    def noise(self, stream: Stream, like: Tensor, t: float, coefficients: Coefficients) -> Tensor:
        return self.with_prompt(torch.full_like(like, self.mask))

    def known(self, x: Tensor, t: Tensor) -> Tensor:
        return x != self.mask

    def noising(self, x_s: Tensor, s: Tensor, t: Tensor) -> Tensor:
        keep = (survival(t, x_s) / survival(s, x_s)).clamp(0, 1)[..., None]
        p = torch.zeros(*x_s.shape, self.n_states, dtype=keep.dtype, device=x_s.device)
        with_entry(p, x_s, keep)[..., self.mask] += (1 - keep)[..., 0]
        return p.log()

    def denoising(self, x_t: Tensor, log_p: Tensor, s: Tensor, t: Tensor) -> Tensor:
        a_s, a_t = survival(s, x_t), survival(t, x_t)
        reveal, wait = ((a_s - a_t) / (1 - a_t))[..., None], (1 - a_s) / (1 - a_t)
        at_mask = self._all_states(log_p + reveal.log(), wait.log())
        return torch.where((x_t == self.mask)[..., None], at_mask, self.stay(x_t))

    def log_ratio(self, x_s: Tensor, x_t: Tensor, log_p: Tensor, s: Tensor, t: Tensor) -> Tensor:
        a_s, a_t = survival(s, x_t), survival(t, x_t)
        masked_s, masked_t = x_s == self.mask, x_t == self.mask
        revealed = pick(log_p, x_s.clamp(max=self.vocab_size - 1)) + (a_s / (1 - a_t)).log()
        kept = (a_s / a_t).log().expand(x_s.shape)
        waited = ((1 - a_s) / (1 - a_t)).log().expand(x_s.shape)
        ratio = torch.where(masked_t, torch.where(masked_s, waited, revealed), kept)
        return torch.where(masked_s & ~masked_t, LOG_ZERO, ratio)

    def log_concrete(self, x: Tensor, log_p: Tensor, t: Tensor) -> Tensor:
        a = survival(t, x)[..., None]
        score = self._all_states(log_p + (a / (1 - a)).log(), LOG_ZERO)
        return torch.where((x == self.mask)[..., None], score, torch.full_like(score, LOG_ZERO))

    def local_move(self, x: Tensor, drift: Tensor, stream: Stream) -> Tensor:
        """At a random position, mask a token or reveal one from the proposal's own prediction."""
        position = random_position(x, self.free(x), stream.at("position"))
        flat = x.flatten(1)
        here = flat.gather(1, position[:, None])[:, 0]
        at = position[:, None, None].expand(-1, 1, self.vocab_size)
        log_q = as_real(drift.flatten(1, -2).gather(1, at)[:, 0])
        to_token = self._all_states(log_q, LOG_ZERO)
        to_mask = self._all_states(torch.full_like(log_q, LOG_ZERO), 0.0)
        new = stream.at("token").categorical(torch.where((here == self.mask)[:, None], to_token, to_mask))
        return flat.scatter(1, position[:, None], new[:, None]).reshape(x.shape)

    def single(self, x: Tensor, stream: Stream) -> Asked:
        position = random_position(x, self.free(x), stream.at("position"))[:, None]
        here = x.flatten(1).gather(1, position)
        u = stream.at("token").uniform((len(x), 1), device=x.device)
        given = here.clamp(max=self.vocab_size - 1)
        return Conditionals(position, torch.ones_like(here, dtype=torch.bool), given, here[:, 0] == self.mask, u)

    def single_ratios(self, asked: Asked, log_p: Tensor, t: Tensor) -> Tensor:
        assert isinstance(asked, Conditionals)
        log_p = torch.cat([log_p[:-1] + ((1 - t) / t).log(), log_p[-1:]])
        return torch.where(asked.drawn, log_p, -log_p)

    def density_ratios(self, x: Tensor, y: Tensor, at_x: Evaluation, at_y: Evaluation, t: Tensor) -> Tensor:
        """`p_t(v) / p_t(mask) = p(v) a / (1 - a)`, read off the prediction of the end that is masked there."""
        odds = ((1 - t) / t).log()
        return torch.stack(
            [self._revealed(x, y, a, b, odds) for a, b in zip(at_x.predictions, at_y.predictions, strict=True)]
        )

    def local_log_q(self, x: Tensor, y: Tensor, at_x: Evaluation, at_y: Evaluation) -> Tensor:
        return self._revealed(x, y, at_x.drift, at_y.drift, torch.zeros(len(x), dtype=real(x.device), device=x.device))

    def _revealed(self, x: Tensor, y: Tensor, at_x: Tensor, at_y: Tensor, odds: Tensor) -> Tensor:
        """`log p(v) + odds` where y reveals token v, less that where y masks it, 0 where y is x."""
        position, moved = changed_position(x, y)
        here, there = (z.flatten(1).gather(1, position[:, None])[:, 0] for z in (x, y))
        reveals = here == self.mask
        if is_home(x) and (moved & ~reveals & (there != self.mask)).any():
            raise InputError("masked states are compared where one of them is masked, got two different tokens")
        token = torch.where(reveals, there, here).clamp(max=self.vocab_size - 1)
        at = position[:, None, None].expand(-1, 1, self.vocab_size)
        log_p = as_real(torch.where(rows_like(reveals, at_x), at_x, at_y).flatten(1, -2).gather(1, at)[:, 0])
        sign = as_real(torch.where(reveals, 1.0, -1.0))
        return (sign * (pick(log_p, token) + odds)).where(moved, 0.0)


@dataclass(frozen=True)
class Counted(Masked):
    """Absorbing diffusion without coins: at time t, exactly `round(t n)` of the n free positions are masked.

    Which ones is uniformly random, so the law at the data end is that of `Masked`. Levels between the ends differ. With
    coins the number of masks is part of a level's law, and every token that is revealed multiplies the weight by
    `sum_v prod_j p_j(v)^{c_j}`, which is not 1 unless the target is one model. Levels then prefer states with few
    masks (guidance) or with many (products, powers), particles are resampled for that alone, and the weights that
    were removed come back below. Here all states of a level have equally many masks, and nothing of that is left.

    Replicas of a level must keep their number of masks: `SingleToken` is refused, and a ladder is not moved while a
    chain runs. `model.process().counted()` makes one from a model's own process.

    >>> process = Counted(vocab_size=3)
    >>> process.n_masked(torch.tensor([0.0, 0.3, 1.0]), 4).tolist()
    [0, 1, 4]
    """

    moves_single: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.at_once is None:
            raise InputError('at_once must be a number of positions or "auto" where masks are counted, got None')

    def n_masked(self, t: Tensor, n_free: int) -> Tensor:
        """How many of so many free positions are masked at these times."""
        return (t * n_free).round().long()

    def noise(self, stream: Stream, like: Tensor, t: float, coefficients: Coefficients) -> Tensor:
        n = self.n_free(like.shape[1:])
        if int(self.n_masked(torch.tensor(t), n)) < n:
            raise InputError(f"a ladder that ends at t = {t:g} leaves some of {n} positions unmasked: let it end at 1")
        return super().noise(stream, like, t, coefficients)

    def ranks(self, x: Tensor, may: Tensor, s: Tensor, t: Tensor, up: Tensor, stream: Stream) -> Tensor:
        n = self.n_free(x.shape[1:])
        at_s, at_t = self.n_masked(s, n), self.n_masked(t, n)
        found, wanted = may.sum(1), torch.where(up, n - at_s, at_t).where(s != t, 0)
        if not torch.equal(found, wanted):
            row = int((found != wanted).nonzero()[0, 0])
            masks, right = (int(n - c[row] if up[row] else c[row]) for c in (found, wanted))
            raise InputError(
                f"a state has {masks} masks where {right} of {n} positions are masked: a chain of counted masks keeps"
                " the ladder that it began with, and levels that start from a pilot stand at its steps"
            )
        rank = stream.at("order").order(may)
        return rank.where(rank <= (at_t - at_s)[:, None], 0)

    def coin_ratio(self, x_s: Tensor, x_t: Tensor, s: Tensor, t: Tensor) -> Tensor:
        """Nothing: sets of positions are equally likely, and their number is a constant of the level."""
        return torch.zeros(len(x_s), dtype=real(x_s.device), device=x_s.device)
