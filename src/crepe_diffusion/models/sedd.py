"""SEDD with the absorbing process: a network of log concrete scores.

    p(x_0^i = v | x_t)  =  score_v (e^sigmabar - 1),     sigmabar = -log(1 - t),     t = 1 - survival

For exact scores these numbers sum to one over v. How far they do not is `model.mass(x, t)`; they are normalised here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crepe_diffusion.models.tokens import LanguageModel, TokenWeights, as_logits, language_model

__all__ = ["from_sedd"]

LEAST, MOST = 1e-5, 1 - 1e-3
"""The times of its training: beyond them sigmabar is 0 or infinite."""


def sigmabar(t: Tensor) -> Tensor:
    """The total noise at time t, inside of the times of training."""
    return -torch.log1p(-t.clamp(LEAST, MOST))


@dataclass(frozen=True)
class ConcreteScores(TokenWeights):
    """`log w = log score + log(e^sigmabar - 1)`."""

    def log_weights(self, x: Tensor, t: Tensor, options: dict[str, Tensor]) -> Tensor:
        noise = sigmabar(t)
        return as_logits(self.network(x, noise, **options)).to(t.dtype) + noise.expm1().log()[:, None, None]


def from_sedd(
    network: Callable[..., Any],
    *,
    mask_id: int,
    prompt: Tensor | Sequence[int] | None = None,
    length: int | None = None,
    forbidden: Iterable[int] = (),
    hidden: Tensor | None = None,
    vocab_size: int | None = None,
    decode: Any = None,
) -> LanguageModel:
    """A network `f(ids, sigmabar)` of log concrete scores (rows, length, V), the mask included, as in SEDD-absorb.

    Arguments are those of `from_masked_lm`. For the published checkpoints `mask_id=50257` and `vocab_size=50258`; end
    the ladder at `t = 0.999`. The network gets the share of masked positions as its time (see `processes.Masked`), or
    the time of the ladder with `process=Masked(vocab_size, mask_id=mask_id, at_once=None)`.

    >>> p = torch.tensor([0.2, 0.8, 0.0])                                      # two tokens, and the mask
    >>> scores = lambda ids, noise: (p / noise.expm1()[:, None, None]).log().expand(*ids.shape, 3)
    >>> model = from_sedd(scores, mask_id=2, length=4, vocab_size=3)
    >>> x, t = torch.full((1, 4), 2), torch.tensor([0.7])
    >>> [round(v, 3) for v in model.predict(x, t)[0, 0].exp().tolist()], round(model.mass(x, t)[0, 0].item(), 3)
    ([0.2, 0.8, 0.0], 1.0)
    """

    def weights(size: int, never: tuple[int, ...]) -> TokenWeights:
        return ConcreteScores(network, mask_id, size, never)

    return language_model(weights, network, mask_id, prompt, length, forbidden, hidden, vocab_size, decode)
