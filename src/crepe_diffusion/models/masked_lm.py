"""Masked language models (BERT, RoBERTa, ESM, LLaDA, DPLM) as masked diffusions.

    p(x_0^i = v | x_t)  =  softmax of the logits at masked position i, over the tokens that are allowed

Such a network has no time input: what is masked says it all. Its conditionals need not belong to one joint law, so that
the order in which positions are revealed matters. Positions are revealed in uniformly random order here, and the law of
a model is the random-order one, `p(x) = E_order prod_i p(x^i | the positions before i)`. SMC is exact for it; chains
walk up in an order of their own, which is exact only where the order does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from crepe_diffusion.errors import InputError
from crepe_diffusion.models.tokens import LanguageModel, TokenWeights, as_logits, language_model

__all__ = ["from_masked_lm"]


@dataclass(frozen=True)
class MaskedLogits(TokenWeights):
    """`log w` are logits."""

    def log_weights(self, x: Tensor, t: Tensor, options: dict[str, Tensor]) -> Tensor:
        return as_logits(self.network(x, **options))

    def check_visible(self, visible: Tensor) -> None:
        if getattr(getattr(self.network, "config", None), "token_dropout", False) and not bool(visible.any()):
            raise InputError(
                "ESM with token_dropout divides by the share of visible tokens, so one must be frozen and visible: give"
                " a prompt that begins with <cls> and ends with <eos>"
            )

    def normalised(self, log_w: Tensor) -> Tensor:
        return log_w.log_softmax(-1)


def from_masked_lm(
    network: Callable[..., Any],
    *,
    mask_id: int,
    prompt: Tensor | Sequence[int] | None = None,
    length: int | None = None,
    forbidden: Iterable[int] = (),
    hidden: Tensor | None = None,
    pad_id: int | None = None,
    vocab_size: int | None = None,
    decode: Any = None,
) -> LanguageModel:
    """A masked language model of Hugging Face, or any function from ids (rows, length) to logits (rows, length, V).

    - `mask_id`: the network's own id of the mask, anywhere in its vocabulary. It is never drawn;
    - `prompt`: the ids of one text, with the mask wherever a token is to be drawn. All else is frozen. Several texts,
      (n, length), are for n chains, or groups of chains; they have masks at the same positions. Without a prompt give
      the `length`;
    - `forbidden`: ids that must never appear, such as `tokenizer.all_special_ids`; they may be part of the prompt;
    - `hidden`: frozen positions that the network sees as masks, (length,). `model.hiding()` hides the prompt's words:
      `cd.guided(model, model.hiding(), scale)` is guidance by the prompt, in one call of the network;
    - `pad_id`: the network gets an `attention_mask` that leaves this token out;
    - `vocab_size`: the last axis of the logits, where `network.config.vocab_size` does not tell;
    - `decode`: the tokenizer, or a function from lists of ids to texts, for `model.decode(out.x)`.

    The law is that of revealing tokens in random order. BERT, RoBERTa and ESM were trained with about 15 % of the
    tokens masked, and are used far from it where nearly all are. ESM with `token_dropout` multiplies all embeddings by
    `0.88 / (1 - share of masks)`, so at least one token has to be visible always.

    >>> import torch
    >>> logits = lambda ids: torch.zeros(*ids.shape, 6)                     # a network that knows nothing
    >>> model = from_masked_lm(logits, mask_id=2, forbidden=[0, 1], prompt=[0, 4, 2, 1], vocab_size=6)
    >>> [round(p, 3) for p in model.predict(torch.tensor([[0, 4, 2, 1]]), torch.ones(1))[0, 2].exp().tolist()]
    [0.0, 0.0, 0.0, 0.333, 0.333, 0.333]
    """

    if pad_id is not None and pad_id == mask_id:
        raise InputError(f"pad_id must not be the mask, {mask_id}: the network would not see what it has to fill in")

    def weights(size: int, never: tuple[int, ...]) -> TokenWeights:
        return MaskedLogits(network, mask_id, size, never, pad_id)

    return language_model(weights, network, mask_id, prompt, length, forbidden, hidden, vocab_size, decode)
