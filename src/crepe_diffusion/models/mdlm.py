"""MDLM: a masked diffusion whose network may ignore the time.

p(x_0^i = v | x_t)  =  softmax of the network's output over all tokens but the mask,     sigma = -log(1 - t), or 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crepe_diffusion.models.sedd import sigmabar
from crepe_diffusion.models.tokens import LanguageModel, TokenWeights, as_logits, language_model

__all__ = ["from_mdlm"]


@dataclass(frozen=True)
class TimedLogits(TokenWeights):
    """`log w` are logits, or log-probabilities, of a network that gets the total noise or zeros."""

    time_conditioning: bool = False

    def log_weights(self, x: Tensor, t: Tensor, options: dict[str, Tensor]) -> Tensor:
        noise = sigmabar(t) if self.time_conditioning else torch.zeros_like(t)
        return as_logits(self.network(x, noise, **options))

    def normalised(self, log_w: Tensor) -> Tensor:
        return log_w.log_softmax(-1)


def from_mdlm(
    network: Callable[..., Any],
    *,
    mask_id: int,
    time_conditioning: bool = False,
    prompt: Tensor | Sequence[int] | None = None,
    length: int | None = None,
    forbidden: Iterable[int] = (),
    hidden: Tensor | None = None,
    vocab_size: int | None = None,
    decode: Any = None,
) -> LanguageModel:
    """A network `f(ids, sigma)` of logits or log-probabilities (rows, length, V), the mask included.

    - `time_conditioning`: whether it was trained with the time. The published networks were not: they get `sigma = 0`;
    - the others are those of `from_masked_lm`. MDLM appends a mask to the vocabulary of a tokenizer that has none: then
      `mask_id` is the last id, and `vocab_size` one more than the tokenizer's.

    Its own sampler ends with an argmax over what is still masked; nothing is masked at the end of a ladder that begins
    at 0.

    >>> logits = lambda ids, sigma: torch.tensor([0.2, 0.8, 5.0]).log().expand(*ids.shape, 3)
    >>> model = from_mdlm(logits, mask_id=2, length=4, vocab_size=3)
    >>> [round(v, 3) for v in model.predict(torch.full((1, 4), 2), torch.ones(1))[0, 0].exp().tolist()]
    [0.2, 0.8, 0.0]
    """

    def weights(size: int, never: tuple[int, ...]) -> TokenWeights:
        return TimedLogits(network, mask_id, size, never, time_conditioning=time_conditioning)

    return language_model(weights, network, mask_id, prompt, length, forbidden, hidden, vocab_size, decode)
