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
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from crepe_diffusion.batches import rows_like
from crepe_diffusion.devices import as_real, is_home, real, resident
from crepe_diffusion.errors import InputError
from crepe_diffusion.processes.base import Coefficients, Evaluation, Process
from crepe_diffusion.random import Stream, category

if TYPE_CHECKING:
    from crepe_diffusion.processes.asked import Asked

__all__ = ["Discrete", "TokenMoves"]

LOG_ZERO = float("-inf")
MOST_TURNS = 128
"""Positions change one by one up to this many of them: a descent then costs as many evaluations as there are tokens."""
MOST_KEPT = 2**16
"""A prediction of one state is kept up to this many numbers (128 positions of 512 tokens): 512 kB in float64."""
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
        if self.prompt is not None and int(self.prompt.min()) < -1:
            raise InputError(f"prompt holds {int(self.prompt.min())}: free positions are -1, others are tokens")

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

    def in_kernel(self, x: Tensor, log_p: Tensor, t: Tensor) -> Tensor:
        """A prediction in the form that `denoising` and `log_ratio` take, which is also that of a `drift`."""
        return as_real(log_p)

    # -- shared ------------------------------------------------------------------------------------------

    def keeps_predictions(self, event: torch.Size) -> bool:
        return event.numel() * self.vocab_size <= MOST_KEPT

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

    def total(self, x: Tensor, log_p: Tensor, what: str) -> Tensor:
        """What the probabilities of one position sum to, 1 if all tokens are known: a scalar, which nobody waits for.

        Positions whose token is known do not count, since their predictions are not used.
        """
        if log_p.shape[-1] != self.vocab_size:
            raise InputError(
                f"{what} returned {log_p.shape[-1]} log-probabilities per position, but vocab_size is {self.vocab_size}"
            )
        unknown = (self.free(x) & ~self.known(x, torch.ones(len(x), device=x.device))).flatten().int()
        there = log_p.detach().flatten(0, -2).index_select(0, unknown.argmax()[None])[0]
        return there.to(torch.float32).logsumexp(-1).exp().where(unknown.max() > 0, 1.0)

    def drift(
        self, x: Tensor, t: Tensor, predictions: tuple[Tensor, ...], guidance: Tensor | None, coefficients: Coefficients
    ) -> Tensor:
        """Tokens from the normalised product `prod_j p_j^{c'_j}`."""
        return torch.log_softmax(combined(predictions, coefficients.proposal), dim=-1)

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
        log_probs = torch.where(still, self.stay(x), log_probs)
        return stream.categorical(log_probs)

    def noised(self, x_s: Tensor, s: Tensor, t: Tensor, stream: Stream) -> Tensor:
        """The noisier end of a step up, as `step` draws it, for some positions at a time."""
        flat, n = x_s.flatten(), x_s[0].numel()
        u = stream.uniform(tuple(x_s.shape), device=x_s.device).flatten()
        parts = []
        for i in torch.arange(len(flat), device=flat.device).split(max(1, BLOCK // self.n_states)):
            rows = i.div(n, rounding_mode="floor")
            parts.append(category(self.noising(flat[i], s[rows], t[rows]), u[i]))
        return torch.cat(parts).reshape(x_s.shape).where(self.free(x_s), x_s)

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

        return torch.stack([total(self.in_kernel(x_t, p, t)) for p in at_t.predictions]), total(at_t.drift)

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
            yield block, torch.softmax(combined(tuple(p[block] for p in flat), weights), dim=-1)

    @abstractmethod
    def known(self, x: Tensor, t: Tensor) -> Tensor:
        """Positions whose clean token is certain."""

    def stay(self, x: Tensor) -> Tensor:
        """The law of the token that x has, as log-probabilities."""
        shape = (*x.shape, self.n_states)
        return with_entry(torch.full(shape, LOG_ZERO, dtype=real(x.device), device=x.device), x, 0.0)


def combined(predictions: tuple[Tensor, ...], weights: tuple[float, ...]) -> Tensor:
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


def check_at_once(n: int | str | None) -> None:
    if n is not None and n != "auto" and (isinstance(n, (bool, str)) or int(n) != n or n < 1):
        raise InputError(f'at_once must be a positive number of positions, "auto" or None, got {n!r}')


def most_at_once(at_once: int | str | None, n_positions: int) -> int:
    """How many of so many free positions may change together."""
    if at_once == "auto":
        return max(1, -(-n_positions // MOST_TURNS))
    return n_positions if at_once is None else int(at_once)


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

    # The same move where no prediction is kept: something is asked at one state, and the answer gives the other.

    @abstractmethod
    def single(self, x: Tensor, stream: Stream) -> Asked:
        """What to ask for a change of one random position."""

    @abstractmethod
    def noisier(self, x: Tensor, asked: Asked) -> Tensor:
        """Where to ask it: at the noisier end of the change."""

    @abstractmethod
    def changed(self, noisy: Tensor, asked: Asked, tokens: Tensor) -> Tensor:
        """The state after the change, from the tokens of the answer."""

    @abstractmethod
    def single_ratios(self, asked: Asked, log_p: Tensor, t: Tensor) -> Tensor:
        """From the answer: `log p_t(y) - log p_t(x)` of each model, then the same for the chance to propose it."""


def changed_position(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The position in which y differs from x, as an index into the flattened event, and whether there is one."""
    differs = (x != y).flatten(1)
    if is_home(x) and len(x) and int(most := differs.sum(1).max()) > 1:  # elsewhere, looking would wait
        raise InputError(f"density ratios of tokens need states that differ in one position at most, got {int(most)}")
    return differs.int().argmax(1), differs.any(1)


def in_turn(turns: Tensor, turn: int) -> tuple[Tensor, Tensor]:
    """The positions that change in this turn, (rows, k), and which of them are meant: rows may have fewer."""
    here = (turns == turn).int()
    values, positions = here.topk(max(1, int(here.sum(1).max())), dim=1)
    return positions, values.bool()


def at_positions(log_p: Tensor, positions: Tensor) -> Tensor:
    """Predictions `(rows, *event, V)` at these positions (rows, k), as (rows, k, V)."""
    flat = log_p.flatten(1, -2)
    return flat.gather(1, positions[..., None].expand(-1, -1, flat.shape[-1]))


def with_entry(values: Tensor, x: Tensor, entry: Tensor | float) -> Tensor:
    """These values (*x.shape, V), which are overwritten, with another one at the token of x."""
    if isinstance(entry, Tensor):
        return values.scatter_(-1, x[..., None], entry.expand(*x.shape, 1))
    return values.scatter_(-1, x[..., None], entry)


def survival(t: Tensor, x: Tensor) -> Tensor:
    return rows_like(1 - t, x)


def pick(log_p: Tensor, tokens: Tensor) -> Tensor:
    return log_p.gather(-1, tokens[..., None])[..., 0]


def random_position(x: Tensor, free: Tensor, stream: Stream) -> Tensor:
    """One free position per row, uniformly, as an index into the flattened event."""
    return stream.categorical(torch.where(free.flatten(1), 0.0, LOG_ZERO))
