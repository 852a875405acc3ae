"""What adapters of masked language models share: hidden prompts, forbidden tokens, and how much mass is left.

p(v) = w(v) / sum_{u allowed} w(u)   for allowed v, else 0        mass = sum_{u allowed} w(u), of normalised w
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from crepe_diffusion.errors import InputError
from crepe_diffusion.models.base import TokenModel

__all__ = ["LanguageModel", "TokenWeights", "as_logits", "language_model"]


def as_logits(out: Any) -> Tensor:
    """The logits in what a network returned: the tensor itself, `.logits`, `["logits"]`, or the first of a tuple."""
    if isinstance(out, dict) and "logits" in out:
        out = out["logits"]
    out = getattr(out, "logits", out)
    if isinstance(out, (tuple, list)) and out:
        out = out[0]
    if not isinstance(out, Tensor):
        raise InputError(f"a network of tokens returns logits (rows, length, V) or an object with .logits, got {out!r}")
    return out


@dataclass(frozen=True)
class TokenWeights(ABC):
    """`log p(v)` from what a network says of tokens with the ids of its own vocabulary.

    Called with states, times and, for each row, the positions that are hidden from the network by a mask.
    """

    network: Callable[..., Any]
    mask_id: int
    vocab_size: int
    forbidden: tuple[int, ...]
    pad_id: int | None = None

    @abstractmethod
    def log_weights(self, x: Tensor, t: Tensor, options: dict[str, Tensor]) -> Tensor:
        """What the network says, (rows, length, V), before anything is forbidden."""

    def check_visible(self, visible: Tensor) -> None:  # noqa: B027 - most networks take any input
        """Refuse a choice of frozen positions that the network sees, (length,), if it cannot work with them."""

    def normalised(self, log_w: Tensor) -> Tensor:
        """`log w` as the network means it, with a sum that should be 1."""
        return log_w

    def __call__(self, x: Tensor, t: Tensor, hidden: Tensor) -> Tensor:
        return self._allowed(self._weights(x, t, hidden)).log_softmax(-1)

    def log_mass(self, x: Tensor, t: Tensor, hidden: Tensor) -> Tensor:
        """Log of what the network gives to all allowed tokens, (rows, length)."""
        return self._allowed(self.normalised(self._weights(x, t, hidden))).logsumexp(-1)

    def _weights(self, x: Tensor, t: Tensor, hidden: Tensor) -> Tensor:
        options = {} if self.pad_id is None else {"attention_mask": (x != self.pad_id).long()}
        log_w = as_logits(self.log_weights(x.masked_fill(hidden, self.mask_id), t, options))
        if log_w.shape != (*x.shape, self.vocab_size):
            raise InputError(
                f"the network returned {tuple(log_w.shape)} for tokens {tuple(x.shape)} and vocab_size"
                f" {self.vocab_size}: one number for each token of its vocabulary is needed"
            )
        return log_w if log_w.dtype in (torch.float32, torch.float64) else log_w.to(torch.float32)

    def _allowed(self, log_w: Tensor) -> Tensor:
        never = torch.tensor((*self.forbidden, self.mask_id), device=log_w.device)
        return log_w.index_fill(-1, never, -torch.inf)


Texts = Callable[[list[list[int]]], Sequence[str]]
"""From the ids of several texts to these texts."""


class LanguageModel(TokenModel):
    """A `TokenModel` of a network with its own ids: what `from_masked_lm`, `from_sedd` and `from_mdlm` return.

    States are the ids of the network's tokenizer. `hidden` are the positions, (length,), that the network sees as masks
    though they are frozen: the unconditional partner of guidance by a prompt.
    """

    function: TokenWeights

    def __init__(self, weights: TokenWeights, prompt: Tensor, hidden: Tensor, texts: Texts | None = None):
        self._texts = texts
        weights.check_visible((prompt >= 0) & ~hidden)
        super().__init__(
            weights,
            tuple(prompt.shape[-1:]),
            weights.vocab_size,
            mask_id=weights.mask_id,
            prompt=prompt if bool((prompt >= 0).any()) else None,
            condition=hidden,
        )

    def noise(self, n: int = 1) -> Tensor:
        """States (n, length) with a mask wherever a token may be drawn."""
        prompt = self.process().prompt  # type: ignore[attr-defined]
        blank = torch.full((n, *self.event_shape), self.function.mask_id)
        return (blank if prompt is None else blank.where(prompt < 0, prompt)).to(self.device)

    def mass(self, x: Tensor, t: Tensor | float) -> Tensor:
        """What the network gives to all tokens that may appear, (rows, length); it matters at masked positions.

        Where it is far from 1, the network would rather say something forbidden, or its scores are not those of a law.
        """
        t = torch.as_tensor(t, dtype=self.dtype, device=x.device).expand(len(x))
        with torch.no_grad():
            return self.function.log_mass(x, t, self.condition.to(x.device).expand(x.shape)).exp()  # type: ignore[union-attr]

    def hiding(self, positions: Tensor | None = None) -> LanguageModel:
        """The same model with these frozen positions hidden, (length,) of booleans.

        By default the prompt without its forbidden tokens, which mark beginnings and ends and say nothing.
        """
        prompt = self.process().prompt  # type: ignore[attr-defined]
        if prompt is None:
            raise InputError("there is no prompt to hide: give prompt= to the adapter")
        if positions is None:
            said = ~torch.isin(prompt, torch.tensor(self.function.forbidden, dtype=prompt.dtype))
            positions = ((prompt >= 0) & said).reshape(-1, prompt.shape[-1]).any(0)
        return LanguageModel(self.function, prompt, check_hidden(positions, prompt), self._texts)

    def decode(self, x: Tensor) -> list[str]:
        """States (rows, length) as texts, by the tokenizer that was given to the adapter."""
        if self._texts is None:
            raise InputError("there is no tokenizer: give decode=tokenizer to the adapter")
        return list(self._texts(x.tolist()))


def language_model(
    make: Callable[[int, tuple[int, ...]], TokenWeights],
    network: Callable[..., Any],
    mask_id: int,
    prompt: Tensor | Sequence[int] | None,
    length: int | None,
    forbidden: Iterable[int],
    hidden: Tensor | None,
    vocab_size: int | None,
    decode: Any,
) -> LanguageModel:
    """What all adapters do: check their input, then `make` the weights from the vocabulary's size and the forbidden."""
    if not callable(network):
        raise InputError(f"network must be a function of ids (rows, length), got {network!r}")
    weights = make(*check_vocabulary(network, vocab_size, mask_id, forbidden))
    event = event_of(prompt, length, mask_id)
    _check_length(network, event.shape[-1])
    unseen = torch.zeros(event.shape[-1], dtype=torch.bool) if hidden is None else check_hidden(hidden, event)
    texts = getattr(decode, "batch_decode", decode)
    if texts is not None and not callable(texts):
        raise InputError(f"decode must be a tokenizer, or a function from lists of ids to texts, got {decode!r}")
    return LanguageModel(weights, event, unseen, texts)


def _check_length(network: Any, length: int) -> None:
    """Refuse texts that are longer than the table of positions of the network, where its configuration has one."""
    config = getattr(network, "config", None)
    if getattr(config, "position_embedding_type", "absolute") == "rotary":
        return
    most = getattr(config, "max_position_embeddings", None) or getattr(config, "max_sequence_length", None)
    if isinstance(most, int) and length > most:
        raise InputError(f"the network takes at most {most} tokens, got a prompt or length of {length}")


def check_hidden(hidden: Tensor, prompt: Tensor) -> Tensor:
    hidden = torch.as_tensor(hidden, dtype=torch.bool)
    if hidden.shape != prompt.shape[-1:] or bool((hidden & (prompt < 0)).any()):
        raise InputError(f"hidden positions are frozen ones, as booleans of shape {tuple(prompt.shape[-1:])}")
    return hidden


def event_of(prompt: Tensor | Sequence[int] | None, length: int | None, mask_id: int) -> Tensor:
    """The prompt as (length,): a token where a position is frozen, -1 where it is free (given as -1 or as the mask)."""
    if prompt is None:
        if length is None or int(length) != length or length < 1:
            raise InputError(
                f"give prompt= (ids, with the mask where a token is free) or length=, got length {length!r}"
            )
        return torch.full((int(length),), -1)
    try:
        ids = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(
            f"a prompt is a list of ids, as tokenizer(text)['input_ids'] gives, got {str(prompt)[:60]!r}"
        ) from None
    if ids.ndim == 2 and len(ids) == 1:  # as a tokenizer returns it
        ids = ids[0]
    if ids.ndim not in (1, 2) or ids.dtype.is_floating_point or (length is not None and ids.shape[-1] != length):
        raise InputError(
            f"a prompt is one id per position, (length,), or (chains, length), got {tuple(ids.shape)} of {ids.dtype}"
        )
    ids = torch.where(ids == mask_id, -1, ids).to(torch.long)
    if bool(((ids < 0) != (ids.reshape(-1, ids.shape[-1])[:1] < 0)).any()):
        raise InputError("all prompts must have their masks at the same positions: pad the shorter ones on the left")
    if not bool((ids < 0).any()):
        raise InputError(f"the prompt leaves no position free: write the mask ({mask_id}) where a token may be drawn")
    return ids


def check_vocabulary(
    network: Any, vocab_size: int | None, mask_id: int, forbidden: Iterable[int]
) -> tuple[int, tuple[int, ...]]:
    """The number of ids that the network knows, and the forbidden ones in order."""
    size = vocab_size or getattr(getattr(network, "config", None), "vocab_size", None)
    if size is None:
        raise InputError("the network has no config.vocab_size: give vocab_size=, the last axis of its logits")
    if isinstance(forbidden, str) or not isinstance(forbidden, Iterable):
        raise InputError(f"forbidden is a list of ids, such as tokenizer.all_special_ids, got {forbidden!r}")
    given = [*forbidden]
    for name, value in (("mask_id", mask_id), *(("forbidden", v) for v in given)):
        known = isinstance(value, (Integral, Tensor)) and not isinstance(value, bool)
        if not known or not 0 <= int(value) < size:
            raise InputError(f"{name} must be one of the network's ids 0 .. {size - 1}, got {value!r}")
    never = tuple(sorted({int(v) for v in given}))
    if len({*never, mask_id}) >= size - 1:
        raise InputError(f"{len(never)} of {size} tokens are forbidden: at least two must be left")
    return int(size), never
