"""Discrete diffusions over tokens, with survival `a = 1 - t`: a token is untouched at time t with probability a.

    log B - log F   per position, summed over the event

    masked    revealed as v       log p(v) + log(a_s / (1 - a_t))
              masked throughout   log((1 - a_s) / (1 - a_t))
              kept throughout     log(a_s / a_t)
    uniform   log sum_{x_0} p(x_0) q_s(x_s | x_0) / q_t(x_t | x_0),   q_t(x | x_0) = a_t [x = x_0] + (1 - a_t) / V

A model predicts `log p(x_0^i = v | x_t)` as `(rows, *event, V)`. These kernels are exact for one position and for
independent ones, and approximate to first order in the step where several dependent positions move at once.
The prediction of a position that is already known is not used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Shaped
from numpy.polynomial.legendre import leggauss
from torch import Tensor
from torch.nn.functional import one_hot

from crepe_diffusion.batches import rows_like
from crepe_diffusion.devices import as_real, is_home, real, resident
from crepe_diffusion.errors import InputError
from crepe_diffusion.processes.base import Coefficients, Evaluation, Process
from crepe_diffusion.random import Stream, category

__all__ = ["Asked", "Counted", "Discrete", "Euler", "InTurn", "Masked", "TokenMoves", "Uniform"]

LOG_ZERO = float("-inf")
SOFTEST = 1e-3
"""The uniform process integrates over log(t + this): densities may be steep on this scale of times."""
MOST_TURNS = 128
"""Positions change one by one up to this many of them: a descent then costs as many evaluations as there are tokens."""
MOST_KEPT = 2**18
"""A prediction of one state is kept up to this many numbers (128 positions of 2,048 tokens): 2 MB in float64."""
BLOCK = 2**16
"""Numbers of a prediction that are combined and normalised at a time, in float64."""


@dataclass(frozen=True)
class Discrete(Process):
    """Tokens `0 .. vocab_size - 1`. Positions where `prompt >= 0` are frozen at that token.

    Several prompts, (n, *event), are for as many chains, or groups of chains; they freeze the same positions.
    """

    vocab_size: int
    prompt: Tensor | None = None
    is_discrete: ClassVar[bool] = True

    def check_times(self, times: Tensor) -> None:
        if float(times[-1]) > 1:
            raise InputError(f"a discrete ladder ends at t = 1 (survival 0) or below, got {float(times[-1]):g}")

    def __post_init__(self) -> None:
        if int(self.vocab_size) != self.vocab_size or self.vocab_size < 2:
            raise InputError(f"vocab_size must be an integer of at least 2, got {self.vocab_size!r}")
        if self.prompt is not None and int(self.prompt.max()) >= self.vocab_size:
            raise InputError(f"prompt holds token {int(self.prompt.max())}, but vocab_size is {self.vocab_size}")

    # -- what the two processes differ in ----------------------------------------------------------------

    @property
    @abstractmethod
    def n_states(self) -> int:
        """How many values a position can take, the mask included."""

    @abstractmethod
    def noising(self, x_s: Tensor, s: Tensor, t: Tensor) -> Tensor:
        """log F(. | x_s) per position, `(rows, *event, n_states)`."""

    @abstractmethod
    def denoising(self, x_t: Tensor, log_p: Tensor, s: Tensor, t: Tensor) -> Tensor:
        """log B(. | x_t) per position for the prediction `log_p`, `(rows, *event, n_states)`."""

    @abstractmethod
    def log_ratio(self, x_s: Tensor, x_t: Tensor, log_p: Tensor, s: Tensor, t: Tensor) -> Tensor:
        """log B - log F per position in closed form."""

    @abstractmethod
    def log_concrete(self, x: Tensor, log_p: Tensor, t: Tensor) -> Tensor:
        """Concrete scores: log p_t(x with position i set to v) / p_t(x), for each v that one jump can reach."""

    # -- shared ------------------------------------------------------------------------------------------

    def free(self, x: Tensor) -> Tensor:
        """Which positions may change."""
        if self.prompt is None:
            return torch.ones_like(x, dtype=torch.bool)
        prompt = resident(self.prompt, x.device)
        return ((prompt[0] if prompt.ndim == x.ndim else prompt) < 0).expand_as(x)

    def n_prompts(self, event: torch.Size) -> int:
        return len(self.prompt) if self.prompt is not None and self.prompt.ndim > len(event) else 1

    def n_free(self, event: torch.Size) -> int:
        """How many positions may change."""
        return int(self.free(torch.empty(1, *event, dtype=torch.long)).sum())

    def multiplies(self, event: torch.Size) -> bool:
        return self.log_probs is None and self.n_free(event) > 1

    def with_prompt(self, x: Tensor) -> Tensor:
        if self.prompt is None:
            return x
        prompt = resident(self.prompt, x.device)
        if prompt.ndim == x.ndim:
            if len(x) % len(prompt):
                raise InputError(
                    f"{len(prompt)} prompts need a number of chains that is a multiple of it, got {len(x)} rows"
                )
            prompt = prompt.repeat_interleave(len(x) // len(prompt), 0)
        return torch.where(self.free(x), x, prompt.expand_as(x))

    def check_event(self, event: torch.Size) -> None:
        prompt = self.prompt
        if prompt is None or prompt.shape == event:
            return
        if prompt.shape[1:] != event:
            raise InputError(f"a prompt needs the shape of the event {tuple(event)}, got {tuple(prompt.shape)}")
        if bool(((prompt < 0) != (prompt[:1] < 0)).any()):
            raise InputError("all prompts must freeze the same positions: pad the shorter ones on the left")

    def drift(
        self, x: Tensor, t: Tensor, predictions: tuple[Tensor, ...], guidance: Tensor | None, coefficients: Coefficients
    ) -> Tensor:
        """Tokens from the normalised product `prod_j p_j^{c'_j}`."""
        return torch.log_softmax(_combined(predictions, coefficients.proposal), dim=-1)

    def step(
        self,
        x: Shaped[Tensor, "rows *event"],
        seen: Evaluation,
        s: Float[Tensor, " rows"],
        t: Float[Tensor, " rows"],
        up: Bool[Tensor, " rows"],
        stream: Stream,
        coefficients: Coefficients,
    ) -> Shaped[Tensor, "rows *event"]:
        log_probs = torch.where(
            rows_like(up, x)[..., None],
            self.noising(x, s, t),
            self.denoising(x, as_real(seen.drift), s, t),
        )
        still = (rows_like(s == t, x) | ~self.free(x))[..., None]
        log_probs = torch.where(still, self._stay(x), log_probs)
        return stream.categorical(log_probs)

    def kernel_ratios(
        self,
        x_s: Shaped[Tensor, "rows *event"],
        x_t: Shaped[Tensor, "rows *event"],
        at_s: Evaluation,
        at_t: Evaluation,
        s: Float[Tensor, " rows"],
        t: Float[Tensor, " rows"],
        coefficients: Coefficients,
    ) -> tuple[Float[Tensor, "models rows"], Float[Tensor, " rows"]]:
        free = self.free(x_s)

        def total(log_p: Tensor) -> Tensor:
            each = self.log_ratio(x_s, x_t, as_real(log_p), s, t)
            return torch.where(free, each, 0.0).flatten(1).sum(1)

        return torch.stack([total(p) for p in at_t.predictions]), total(at_t.drift)

    def expectation(self, x: Tensor, t: Tensor, predictions: tuple[Tensor, ...], coefficients: Coefficients) -> Tensor:
        """Probabilities of each token, `(rows, *event, V)`; one-hot where the token is known."""
        shape = (x.numel(), predictions[0].shape[-1])
        p = torch.empty(shape, dtype=real(x.device), device=x.device)
        for block, part in self._combined_blocks(predictions, coefficients):
            p[block] = part
        known = (~self.free(x) | self.known(x, t)).flatten()[:, None]
        token = x.flatten()[:, None].clamp(max=self.vocab_size - 1)
        return p.masked_fill_(known, 0.0).scatter_add_(1, token, known.to(p.dtype)).reshape(*x.shape, -1)

    def mode(self, x: Tensor, t: Tensor, predictions: tuple[Tensor, ...], coefficients: Coefficients) -> Tensor:
        """The most probable token of each position, (rows, *event)."""
        token = x.flatten().clone()
        for block, part in self._combined_blocks(predictions, coefficients):
            token[block] = part.argmax(-1)
        return torch.where(~self.free(x) | self.known(x, t), x, token.reshape(x.shape))

    def _combined_blocks(
        self, predictions: tuple[Tensor, ...], coefficients: Coefficients
    ) -> Iterator[tuple[slice, Tensor]]:
        """Probabilities of the combined models for some positions at a time, since those of a long text are large."""
        weights = tuple(c / coefficients.total for c in coefficients.target)
        flat = tuple(p.flatten(0, -2) for p in predictions)
        size = max(1, BLOCK // flat[0].shape[1])
        for block in (slice(i, i + size) for i in range(0, len(flat[0]), size)):
            yield block, torch.softmax(_combined(tuple(p[block] for p in flat), weights), dim=-1)

    @abstractmethod
    def known(self, x: Tensor, t: Tensor) -> Tensor:
        """Positions whose clean token is certain."""

    def _stay(self, x: Tensor) -> Tensor:
        return as_real(one_hot(x, self.n_states)).log()


def _combined(predictions: tuple[Tensor, ...], weights: tuple[float, ...]) -> Tensor:
    """`sum_j w_j log p_j`, where a token that some model with a positive weight excludes stays excluded."""
    total = torch.zeros_like(predictions[0], dtype=real(predictions[0].device))
    excluded = torch.zeros_like(total, dtype=torch.bool)
    for w, log_p in zip(weights, predictions, strict=True):
        if w == 0:
            continue
        impossible = log_p == LOG_ZERO
        excluded |= impossible & (w > 0)
        total = total + w * torch.where(impossible, -1e4, as_real(log_p))
    return torch.where(excluded, LOG_ZERO, total)


def _check_at_once(n: int | str | None) -> None:
    if n is not None and n != "auto" and (isinstance(n, (bool, str)) or int(n) != n or n < 1):
        raise InputError(f'at_once must be a positive number of positions, "auto" or None, got {n!r}')


def _most_at_once(at_once: int | str | None, n_positions: int) -> int:
    """How many of so many free positions may change together."""
    if at_once == "auto":
        return max(1, -(-n_positions // MOST_TURNS))
    return n_positions if at_once is None else int(at_once)


@dataclass(frozen=True)
class Asked:
    """What a turn needs to know: tokens at `positions` (rows, k), where `chosen`, and their log-probabilities.

    In rows that are `drawn`, (rows,), tokens come from the proposal by the uniforms `u`; elsewhere they are `given`.
    """

    positions: Tensor
    chosen: Tensor
    given: Tensor
    drawn: Tensor
    u: Tensor

    def rows(self, index: Tensor) -> Asked:
        return Asked(*(getattr(self, f.name).index_select(0, index) for f in fields(self)))

    def columns(self, width: int) -> list[slice]:
        """Blocks of positions whose predictions, of so many numbers each, are small."""
        size = max(1, BLOCK // width)
        return [slice(k, k + size) for k in range(0, self.positions.shape[1], size)]

    def part(self, rows: slice | Tensor, columns: slice) -> Asked:
        """What is asked of some rows at some of the positions."""
        positions, chosen, given, u = (z[rows, columns] for z in (self.positions, self.chosen, self.given, self.u))
        return Asked(positions, chosen, given, self.drawn[rows], u)


class InTurn(Discrete):
    """Discrete processes whose positions can change one after the other between two times.

    Coins decide which positions change, and a uniformly random order decides when: they depend on no model, and the
    order has the same probability both ways. At most `at_once` positions change in one turn.
    """

    takes_turns = True
    """Whether `turns` has an answer, which is then computed on the CPU."""

    @abstractmethod
    def turns(self, x: Tensor, s: Tensor, t: Tensor, up: Tensor, stream: Stream) -> Tensor | None:
        """In which turn each position changes, 0 for never, as (rows, positions); None if all change in one step."""

    @abstractmethod
    def change(self, x: Tensor, positions: Tensor, chosen: Tensor, log_q: Tensor, up: Tensor, stream: Stream) -> Tensor:
        """Change the chosen ones of these positions (rows, k); `log_q` is the proposal's prediction there."""

    @abstractmethod
    def coin_ratio(self, x_s: Tensor, x_t: Tensor, s: Tensor, t: Tensor) -> Tensor:
        """What `log p_s(x_s) - log p_t(x_t)` of every model has besides the conditionals of its tokens, (rows,)."""

    @abstractmethod
    def noisier(self, x: Tensor, asked: Asked) -> Tensor:
        """The noisier end of a change of these positions, at which the conditionals of their tokens are read."""

    def asked(self, x: Tensor, turns: Tensor, turn: int, up: Tensor, stream: Stream) -> Asked:
        """The tokens of this turn: those that x has where it walks up, and new ones elsewhere."""
        positions, chosen = (part.to(x.device) for part in self.turn(turns, turn))
        given = x.flatten(1).gather(1, positions).clamp(max=self.vocab_size - 1)
        return Asked(positions, chosen, given, ~up, stream.uniform(tuple(positions.shape), device=x.device))

    def answer(
        self, x: Tensor, t: Tensor, predictions: tuple[Tensor, ...], asked: Asked, coefficients: Coefficients
    ) -> tuple[Tensor, Tensor]:
        """The tokens (rows, k), and the sums of their log-probabilities: of each model, then of the proposal.

        `predictions` are those at the asked positions, (rows, k, V). A draw that is impossible is -1.
        """
        log_q = self.drift(x, t, predictions, None, coefficients)
        draws = (asked.chosen & asked.drawn[:, None])[..., None]
        tokens = torch.where(asked.drawn[:, None], category(log_q.where(draws, 0.0), asked.u), asked.given)
        log_p = torch.stack([as_real(_pick(p, tokens.clamp(min=0))) for p in (*predictions, log_q)])
        return tokens, log_p.where(asked.chosen, 0.0).sum(-1)

    def changed(self, noisy: Tensor, asked: Asked, tokens: Tensor) -> Tensor:
        """The state after a turn: the noisier end itself, or with its new tokens where they were drawn."""
        flat = noisy.flatten(1)
        new = torch.where(asked.chosen & asked.drawn[:, None], tokens, flat.gather(1, asked.positions))
        return flat.scatter(1, asked.positions, new).reshape(noisy.shape)

    @abstractmethod
    def single(self, x: Tensor, stream: Stream) -> Asked:
        """A change of one random position, for `SingleToken`: a draw where it is noise, else the token it has."""

    @abstractmethod
    def single_ratios(self, asked: Asked, log_p: Tensor, t: Tensor) -> Tensor:
        """From its answer: `log p_t(y) - log p_t(x)` of each model, then the same for the chance to propose it."""

    def turn(self, turns: Tensor, turn: int) -> tuple[Tensor, Tensor]:
        """The positions that change in this turn, (rows, k), and which of them are meant: rows may have fewer."""
        here = (turns == turn).int()
        values, positions = here.topk(max(1, int(here.sum(1).max())), dim=1)
        return positions, values.bool()

    def at(self, log_p: Tensor, positions: Tensor) -> Tensor:
        """Predictions `(rows, *event, V)` at these positions, (rows, k, V)."""
        flat = log_p.flatten(1, -2)
        return flat.gather(1, positions[..., None].expand(-1, -1, flat.shape[-1]))

    def log_conditionals(self, seen: Evaluation, x: Tensor, positions: Tensor, chosen: Tensor) -> Tensor:
        """Log-probability of the tokens that x has at the chosen positions: of each model, then of the proposal."""
        tokens = x.flatten(1).gather(1, positions).clamp(max=self.vocab_size - 1)
        index = positions * self.vocab_size + tokens
        log_p = torch.stack([as_real(p.flatten(1).gather(1, index)) for p in (*seen.predictions, seen.drift)])
        return log_p.where(chosen, 0.0).sum(-1)


class TokenMoves(ABC):
    """Processes that propose to change one token at one time: what `SingleToken` needs besides density ratios."""

    moves_single: ClassVar[bool] = True
    """Whether a state stays one of its level when a single token changes."""

    @abstractmethod
    def local_move(self, x: Tensor, drift: Tensor, stream: Stream) -> Tensor:
        """A state that differs from x in one position."""

    @abstractmethod
    def local_log_q(self, x: Tensor, y: Tensor, at_x: Evaluation, at_y: Evaluation) -> Tensor:
        """Log-probability of the move from x to y less that of the move back, (rows,)."""


def _changed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The position in which y differs from x, as an index into the flattened event, and whether there is one."""
    differs = (x != y).flatten(1)
    if is_home(x) and len(x) and int(most := differs.sum(1).max()) > 1:  # elsewhere, looking would wait
        raise InputError(f"density ratios of tokens need states that differ in one position at most, got {int(most)}")
    return differs.int().argmax(1), differs.any(1)


def _survival(t: Tensor, x: Tensor) -> Tensor:
    return rows_like(1 - t, x)


def _pick(log_p: Tensor, tokens: Tensor) -> Tensor:
    return log_p.gather(-1, tokens[..., None])[..., 0]


def _position(x: Tensor, free: Tensor, stream: Stream) -> Tensor:
    """One free position per row, uniformly, as an index into the flattened event."""
    return stream.categorical(torch.where(free.flatten(1), 0.0, LOG_ZERO))


@dataclass(frozen=True)
class Masked(InTurn, TokenMoves):
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
        _check_at_once(self.at_once)
        if self.mask_id is not None and not 0 <= self.mask_id <= self.vocab_size:
            raise InputError(f"mask_id must be between 0 and vocab_size = {self.vocab_size}, got {self.mask_id!r}")
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

    @property
    def takes_turns(self) -> bool:  # type: ignore[override]
        return self.at_once is not None

    def multiplies(self, event: torch.Size) -> bool:
        return self.log_probs is None and _most_at_once(self.at_once, self.n_free(event)) > 1

    def model_time(self, x: Tensor, t: Tensor) -> Tensor:
        if self.at_once is None:
            return t
        free = self.free(x).flatten(1)
        return ((x == self.mask).flatten(1) & free).sum(1).to(t.dtype) / free.sum(1).clamp(min=1)

    def turns(self, x: Tensor, s: Tensor, t: Tensor, up: Tensor, stream: Stream) -> Tensor | None:
        if self.at_once is None:
            return None
        may = (self.free(x) & ((x == self.mask) != rows_like(up, x)) & rows_like(s != t, x)).flatten(1)
        n = _most_at_once(self.at_once, self.n_free(x.shape[1:]))
        return (self.ranks(x, may, s, t, up, stream) + n - 1).div(n, rounding_mode="floor")

    def ranks(self, x: Tensor, may: Tensor, s: Tensor, t: Tensor, up: Tensor, stream: Stream) -> Tensor:
        """The order (1, 2, ...) in which positions change of those that `may`, (rows, positions), 0 for the others."""
        a_s, a_t = 1 - s, 1 - t
        chance = torch.where(up, 1 - a_t / a_s, (a_s - a_t) / (1 - a_t))
        coins = stream.at("coins").bernoulli(rows_like(chance.log(), may).where(may, LOG_ZERO))
        return stream.at("order").order(coins)

    def change(self, x: Tensor, positions: Tensor, chosen: Tensor, log_q: Tensor, up: Tensor, stream: Stream) -> Tensor:
        """Masked where `up`, elsewhere revealed as a token of the proposal."""
        nothing = torch.full_like(log_q, LOG_ZERO)
        nothing[..., 0] = 0
        tokens = stream.categorical(torch.where((chosen & ~up[:, None])[..., None], log_q, nothing))
        flat = x.flatten(1)
        new = torch.where(up[:, None], self.mask, tokens)
        return flat.scatter(1, positions, torch.where(chosen, new, flat.gather(1, positions))).reshape(x.shape)

    def noisier(self, x: Tensor, asked: Asked) -> Tensor:
        flat = x.flatten(1)
        new = torch.where(asked.chosen, self.mask, flat.gather(1, asked.positions))
        return flat.scatter(1, asked.positions, new).reshape(x.shape)

    def keeps_predictions(self, event: torch.Size) -> bool:
        """Always where all positions change at once; else for small events, since a walk needs single tokens only."""
        return self.at_once is None or event.numel() * self.vocab_size <= MOST_KEPT

    def coin_ratio(self, x_s: Tensor, x_t: Tensor, s: Tensor, t: Tensor) -> Tensor:
        certain = torch.zeros(1, dtype=real(x_s.device), device=x_s.device).expand(*x_s.shape, self.vocab_size)
        each = self.log_ratio(x_s, x_t, certain, s, t)
        return torch.where(self.free(x_s), each, 0.0).flatten(1).sum(1)

    def counted(self) -> Counted:
        """The same process with a fixed number of masks at every time."""
        return Counted(**{f.name: getattr(self, f.name) for f in fields(self)})

    @property
    def mask(self) -> int:
        return self.vocab_size if self.mask_id is None else self.mask_id

    def noise(self, stream: Stream, like: Tensor, t: float, coefficients: Coefficients) -> Tensor:
        return self.with_prompt(torch.full_like(like, self.mask))

    def known(self, x: Tensor, t: Tensor) -> Tensor:
        return x != self.mask

    def noising(self, x_s: Tensor, s: Tensor, t: Tensor) -> Tensor:
        keep = (_survival(t, x_s) / _survival(s, x_s)).clamp(0, 1)[..., None]
        here = as_real(one_hot(x_s, self.n_states))
        masked = torch.zeros_like(here)
        masked[..., self.mask] = 1
        return (here * keep + masked * (1 - keep)).log()

    def denoising(self, x_t: Tensor, log_p: Tensor, s: Tensor, t: Tensor) -> Tensor:
        a_s, a_t = _survival(s, x_t), _survival(t, x_t)
        reveal, wait = ((a_s - a_t) / (1 - a_t))[..., None], (1 - a_s) / (1 - a_t)
        at_mask = self._all_states(log_p + reveal.log(), wait.log())
        return torch.where((x_t == self.mask)[..., None], at_mask, self._stay(x_t))

    def log_ratio(self, x_s: Tensor, x_t: Tensor, log_p: Tensor, s: Tensor, t: Tensor) -> Tensor:
        a_s, a_t = _survival(s, x_t), _survival(t, x_t)
        masked_s, masked_t = x_s == self.mask, x_t == self.mask
        revealed = _pick(log_p, x_s.clamp(max=self.vocab_size - 1)) + (a_s / (1 - a_t)).log()
        kept = (a_s / a_t).log().expand(x_s.shape)
        waited = ((1 - a_s) / (1 - a_t)).log().expand(x_s.shape)
        ratio = torch.where(masked_t, torch.where(masked_s, waited, revealed), kept)
        return torch.where(masked_s & ~masked_t, LOG_ZERO, ratio)

    def log_concrete(self, x: Tensor, log_p: Tensor, t: Tensor) -> Tensor:
        a = _survival(t, x)[..., None]
        score = self._all_states(log_p + (a / (1 - a)).log(), LOG_ZERO)
        return torch.where((x == self.mask)[..., None], score, torch.full_like(score, LOG_ZERO))

    def local_move(self, x: Tensor, drift: Tensor, stream: Stream) -> Tensor:
        """At a random position, mask a token or reveal one from the proposal's own prediction."""
        position = _position(x, self.free(x), stream.at("position"))
        flat = x.flatten(1)
        here = flat.gather(1, position[:, None])[:, 0]
        at = position[:, None, None].expand(-1, 1, self.vocab_size)
        log_q = as_real(drift.flatten(1, -2).gather(1, at)[:, 0])
        to_token = self._all_states(log_q, LOG_ZERO)
        to_mask = self._all_states(torch.full_like(log_q, LOG_ZERO), 0.0)
        new = stream.at("token").categorical(torch.where((here == self.mask)[:, None], to_token, to_mask))
        return flat.scatter(1, position[:, None], new[:, None]).reshape(x.shape)

    def single(self, x: Tensor, stream: Stream) -> Asked:
        position = _position(x, self.free(x), stream.at("position"))[:, None]
        here = x.flatten(1).gather(1, position)
        u = stream.at("token").uniform((len(x), 1), device=x.device)
        given = here.clamp(max=self.vocab_size - 1)
        return Asked(position, torch.ones_like(here, dtype=torch.bool), given, here[:, 0] == self.mask, u)

    def single_ratios(self, asked: Asked, log_p: Tensor, t: Tensor) -> Tensor:
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
        position, moved = _changed(x, y)
        here, there = (z.flatten(1).gather(1, position[:, None])[:, 0] for z in (x, y))
        reveals = here == self.mask
        if is_home(x) and (moved & ~reveals & (there != self.mask)).any():
            raise InputError("masked states are compared where one of them is masked, got two different tokens")
        token = torch.where(reveals, there, here).clamp(max=self.vocab_size - 1)
        at = position[:, None, None].expand(-1, 1, self.vocab_size)
        log_p = as_real(torch.where(rows_like(reveals, at_x), at_x, at_y).flatten(1, -2).gather(1, at)[:, 0])
        sign = as_real(torch.where(reveals, 1.0, -1.0))
        return (sign * (_pick(log_p, token) + odds)).where(moved, 0.0)


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
                " the ladder that it began with, and a pilot for it has one level per position"
            )
        rank = stream.at("order").order(may)
        return rank.where(rank <= (at_t - at_s)[:, None], 0)

    def coin_ratio(self, x_s: Tensor, x_t: Tensor, s: Tensor, t: Tensor) -> Tensor:
        """Nothing: sets of positions are equally likely, and their number is a constant of the level."""
        return torch.zeros(len(x_s), dtype=real(x_s.device), device=x_s.device)


@dataclass(frozen=True)
class Uniform(Discrete, TokenMoves):
    """Every token is replaced by a uniformly drawn one at the noising rate.

    All positions change together in a step. With `at_once` (a number of positions) the ratio of densities is computed
    along a way of its own between the two ends of the step: at the upper time, at most `at_once` positions change after
    each evaluation, and then time moves while the state stays, by Gauss-Legendre quadrature of

        d/dt log p_t(x) = sum_i (1 - p_i) / t - p_i (V - 1) / (1 + (V - 1) (1 - t)),   p_i = P(x_0^i = x^i | x_t = x)

    at `nodes` times, in the clock `log(t + 0.001)`. With `at_once=1` the ratio is exact up to the quadrature. A step
    then costs one evaluation per changed position but the first, and `nodes` more. None: the product over positions,
    which costs nothing more. `"auto"` as for `Masked`.
    """

    at_once: int | str | None = "auto"
    nodes: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_at_once(self.at_once)
        if isinstance(self.nodes, bool) or int(self.nodes) != self.nodes or self.nodes < 1:
            raise InputError(f"nodes must be a positive number of times, got {self.nodes!r}")

    def multiplies(self, event: torch.Size) -> bool:
        return self.log_probs is None and _most_at_once(self.at_once, self.n_free(event)) > 1

    def positions_at_once(self, x: Tensor) -> int | None:
        """How many positions may change together on the way of a ratio; None if it has no way of its own.

        One position alone has a closed form, and so have known densities.
        """
        n = self.n_free(x.shape[1:])
        return None if self.at_once is None or self.log_probs is not None or n < 2 else _most_at_once(self.at_once, n)

    def log_jump(self, x: Tensor, y: Tensor, log_p: Tensor, t: Tensor) -> Tensor:
        """`log p_t(y) - log p_t(x)` from the prediction at x, exact where y differs in one position."""
        each = _pick(self.log_concrete(x, as_real(log_p), t), y)
        return torch.where(x != y, each, 0.0).flatten(1).sum(1)

    def time_slope(self, x: Tensor, log_p: Tensor, t: Tensor) -> Tensor:
        """`d/dt log p_t(x)` at fixed x, exactly: the mean of `d/dt log q_t(x | x_0)` given x."""
        p, more = _pick(as_real(log_p), x).exp(), self.vocab_size - 1
        t = rows_like(t, x)
        each = (1 - p) / t - p * more / (1 + more * (1 - t))
        return torch.where(self.free(x), each, 0.0).flatten(1).sum(1)

    def quadrature(self, s: Tensor, t: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Times and weights (rows,) of an integral from s to t.

        A state that is rarer than its neighbours by a factor r has `log p_t(x) ~ log(1 + r t)`: the clock `log(t + e)`
        makes it smooth for factors up to 1 / e.
        """
        low, high = (s + SOFTEST).log(), (t + SOFTEST).log()
        middle, half = (low + high) / 2, (high - low) / 2
        soft = [((middle + float(z) * half).exp(), float(w)) for z, w in zip(*leggauss(self.nodes), strict=True)]
        return [(shifted - SOFTEST, w * half * shifted) for shifted, w in soft]

    @property
    def n_states(self) -> int:
        return self.vocab_size

    def noise(self, stream: Stream, like: Tensor, t: float, coefficients: Coefficients) -> Tensor:
        flat = torch.zeros(*like.shape, self.vocab_size, dtype=real(like.device), device=like.device)
        frozen = ~self.free(like)
        if self.prompt is not None:
            flat = torch.where(frozen[..., None], self._stay(self.with_prompt(torch.zeros_like(like))), flat)
        return stream.categorical(flat)

    def known(self, x: Tensor, t: Tensor) -> Tensor:
        return rows_like(t == 0, x).expand(x.shape)

    def noising(self, x_s: Tensor, s: Tensor, t: Tensor) -> Tensor:
        keep = (_survival(t, x_s) / _survival(s, x_s)).clamp(0, 1)[..., None]
        return (one_hot(x_s, self.vocab_size) * keep + (1 - keep) / self.vocab_size).log()

    def _log_w(self, x_t: Tensor, log_p: Tensor, t: Tensor) -> Tensor:
        """log p(x_0) / q_t(x_t | x_0), for each x_0."""
        a = _survival(t, x_t)[..., None]
        return log_p - (one_hot(x_t, self.vocab_size) * a + (1 - a) / self.vocab_size).log()

    def _log_marginal(self, log_w: Tensor, t: Tensor, x: Tensor) -> Tensor:
        """log sum_{x_0} w(x_0) q_t(v | x_0), for each v."""
        a = _survival(t, x)[..., None]
        spread = ((1 - a) / self.vocab_size).log() + log_w.logsumexp(-1, keepdim=True)
        return torch.logaddexp(a.log() + log_w, spread)

    def denoising(self, x_t: Tensor, log_p: Tensor, s: Tensor, t: Tensor) -> Tensor:
        # F is symmetric, so F(x_t | v) over v is the noising row of x_t.
        return self.noising(x_t, s, t) + self._log_marginal(self._log_w(x_t, log_p, t), s, x_t)

    def log_ratio(self, x_s: Tensor, x_t: Tensor, log_p: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return _pick(self._log_marginal(self._log_w(x_t, log_p, t), s, x_t), x_s)

    def log_concrete(self, x: Tensor, log_p: Tensor, t: Tensor) -> Tensor:
        score = self._log_marginal(self._log_w(x, log_p, t), t, x)
        return torch.where(one_hot(x, self.vocab_size).bool(), LOG_ZERO, score)

    def local_move(self, x: Tensor, drift: Tensor, stream: Stream) -> Tensor:
        """At a random position, another token, uniformly."""
        position = _position(x, self.free(x), stream.at("position"))
        flat = x.flatten(1)
        here = flat.gather(1, position[:, None])[:, 0]
        others = torch.where(one_hot(here, self.vocab_size).bool(), LOG_ZERO, 0.0)
        token = stream.at("token").categorical(others)
        return flat.scatter(1, position[:, None], token[:, None]).reshape(x.shape)

    def local_log_q(self, x: Tensor, y: Tensor, at_x: Evaluation, at_y: Evaluation) -> Tensor:
        return torch.zeros(len(x), dtype=real(x.device), device=x.device)

    def density_ratios(self, x: Tensor, y: Tensor, at_x: Evaluation, at_y: Evaluation, t: Tensor) -> Tensor:
        """The concrete score at x, of the token that y has."""
        position, moved = _changed(x, y)
        token = y.flatten(1).gather(1, position[:, None])[:, 0]
        at = position[:, None, None].expand(-1, 1, self.vocab_size)

        def score(log_p: Tensor) -> Tensor:
            log_score = self.log_concrete(x, as_real(log_p), t).flatten(1, -2)
            return _pick(log_score.gather(1, at)[:, 0], token).where(moved, 0.0)

        return torch.stack([score(p) for p in at_x.predictions])


@dataclass(frozen=True)
class Euler(Discrete):
    """The paper's Euler kernels from concrete scores, for a masked or a uniform base process.

    Probabilities are `[v = x] + rate * dt`, clipped at `floor` and normalised, the same where a step is drawn and
    where its density is evaluated. The proposal multiplies concrete scores, `prod_j score_j^{c'_j}`, without
    normalising over tokens, so its rates may differ from every model's. Needs a noise end with `t < 1`.
    """

    vocab_size: int = 2
    base: Masked | Uniform = None  # type: ignore[assignment]
    floor: float = 1e-8

    def __post_init__(self) -> None:
        if not isinstance(self.base, (Masked, Uniform)):
            raise InputError(f"base must be a Masked or Uniform process, got {self.base!r}")
        object.__setattr__(self, "vocab_size", self.base.vocab_size)
        object.__setattr__(self, "prompt", self.base.prompt)

    @property
    def n_states(self) -> int:
        return self.base.n_states

    def noise(self, stream: Stream, like: Tensor, t: float, coefficients: Coefficients) -> Tensor:
        return self.base.noise(stream, like, t, coefficients)

    def known(self, x: Tensor, t: Tensor) -> Tensor:
        return self.base.known(x, t)

    def drift(
        self, x: Tensor, t: Tensor, predictions: tuple[Tensor, ...], guidance: Tensor | None, coefficients: Coefficients
    ) -> Tensor:
        """log prod_j score_j^{c'_j}, over the states that one jump can reach."""
        t = t.clamp(max=1 - 1e-6)
        scores = tuple(self.base.log_concrete(x, as_real(p), t) for p in predictions)
        return _combined(scores, coefficients.proposal)

    def _jump(self, x: Tensor, log_rates: Tensor) -> Tensor:
        """Jump probabilities with what is left on staying, clipped and normalised."""
        here = as_real(one_hot(x, self.n_states))
        p = log_rates.exp() * (1 - here)
        p = torch.where(here.bool(), 1 - p.sum(-1, keepdim=True), p).clamp(min=self.floor)
        return (p / p.sum(-1, keepdim=True)).log()

    def noising(self, x_s: Tensor, s: Tensor, t: Tensor) -> Tensor:
        # The rate of a = 1 - t is 1 / a; the step is frozen at its start, as in the paper.
        rate = (rows_like(t - s, x_s) / _survival(s, x_s))[..., None]
        if isinstance(self.base, Masked):
            rates = torch.zeros(*x_s.shape, self.n_states, dtype=real(x_s.device), device=x_s.device)
            rates[..., self.base.mask] = 1
            return self._jump(x_s, (rates * rate).log())
        return self._jump(x_s, (rate / self.vocab_size).log().expand(*x_s.shape, self.n_states))

    def denoising(self, x_t: Tensor, log_p: Tensor, s: Tensor, t: Tensor) -> Tensor:
        """Here `log_p` holds log concrete scores: of one model, or of the proposal's product."""
        t = t.clamp(max=1 - 1e-6)
        rate = (rows_like(t - s, x_t) / _survival(t, x_t))[..., None]
        if isinstance(self.base, Uniform):
            rate = rate / self.vocab_size
        return self._jump(x_t, log_p + rate.log())

    def log_ratio(self, x_s: Tensor, x_t: Tensor, log_p: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return _pick(self.denoising(x_t, log_p, s, t), x_s) - _pick(self.noising(x_s, s, t), x_t)

    def kernel_ratios(
        self,
        x_s: Shaped[Tensor, "rows *event"],
        x_t: Shaped[Tensor, "rows *event"],
        at_s: Evaluation,
        at_t: Evaluation,
        s: Float[Tensor, " rows"],
        t: Float[Tensor, " rows"],
        coefficients: Coefficients,
    ) -> tuple[Float[Tensor, "models rows"], Float[Tensor, " rows"]]:
        clipped = t.clamp(max=1 - 1e-6)
        scores = tuple(self.base.log_concrete(x_t, as_real(p), clipped) for p in at_t.predictions)
        return super().kernel_ratios(x_s, x_t, at_s, Evaluation(scores, at_t.drift, at_t.reward), s, t, coefficients)

    def log_concrete(self, x: Tensor, log_p: Tensor, t: Tensor) -> Tensor:
        return self.base.log_concrete(x, log_p, t)

    def density_ratios(self, x: Tensor, y: Tensor, at_x: Evaluation, at_y: Evaluation, t: Tensor) -> Tensor:
        return self.base.density_ratios(x, y, at_x, at_y, t)
