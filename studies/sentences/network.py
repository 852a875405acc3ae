"""A transformer that sees all tokens at once and says what the hidden ones are.

    log p(x^i = v | tokens that are not masked, label)

The label scales and shifts what goes into every layer, and has a bias of its own over the vocabulary, which begins at
the frequencies of tokens with this label: what a bag of words says of it need not be learned. The output layer
is the table of tokens itself. No time goes in: which tokens are masked says all that the time could say.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

__all__ = ["PRESETS", "Sizes", "Transformer"]


@dataclass(frozen=True)
class Sizes:
    """Size of a network; `n_labels` does not count "no label"."""

    vocabulary: int = 4096
    length: int = 16
    width: int = 128
    depth: int = 4
    heads: int = 4
    n_labels: int = 2


PRESETS = {
    "small": Sizes(),
    "medium": Sizes(width=192, heads=6),
    "large": Sizes(width=256, depth=6, heads=8),
    "paper": Sizes(vocabulary=50257, length=1024, width=1024, depth=24, heads=16),
}
"""`medium` was trained for the shipped weights; `paper` has the size of SEDD-medium, which needs other machines."""


class Block(nn.Module):
    """Attention and a two-layer network, each added to what comes in."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: Tensor, label: Tensor) -> Tensor:
        """`label` (rows, 4 width): scale and shift of what attention sees, then of what the other one sees."""
        rows, length, width = h.shape
        scale, shift, scale_mlp, shift_mlp = label[:, None].chunk(4, -1)
        seen = torch.addcmul(shift, self.before_attention(h), 1 + scale)
        qkv = self.query_key_value(seen).reshape(rows, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        h = h + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, length, width))
        return h + self.down(nn.functional.gelu(self.up(torch.addcmul(shift_mlp, self.before_mlp(h), 1 + scale_mlp))))


class Transformer(nn.Module):
    """`forward(tokens, t, label)` gives log-probabilities (rows, length, vocabulary); t is not looked at."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.sizes = sizes
        self.tokens = nn.Embedding(sizes.vocabulary + 1, sizes.width)  # the mask is the last one
        self.labels = nn.Embedding(sizes.n_labels + 1, sizes.depth * 4 * sizes.width)  # "no label" is the last one
        self.places = nn.Parameter(0.02 * torch.randn(sizes.length, sizes.width))
        self.blocks = nn.ModuleList(Block(sizes.width, sizes.heads) for _ in range(sizes.depth))
        self.last = nn.LayerNorm(sizes.width)
        self.bias = nn.Parameter(torch.zeros(sizes.n_labels + 1, sizes.vocabulary))
        for table in (self.tokens, self.labels):
            nn.init.normal_(table.weight, std=0.02)

    def logits(self, x: Tensor, label: Tensor, where: Tensor | None = None) -> Tensor:
        """Logits of all positions, or of those where `where` is true, (hidden, vocabulary)."""
        h = self.tokens(x) + self.places[: x.shape[1]]
        for block, way in zip(self.blocks, self.labels(label).chunk(len(self.blocks), -1), strict=True):
            h = block(h, way)
        h = self.last(h if where is None else h[where])
        of_label = label[:, None] if where is None else label.repeat_interleave(where.sum(1))
        return linear(h, self.tokens.weight[:-1]) + self.bias[of_label]

    @torch.no_grad()
    def begin_with(self, rows: Tensor, smoothing: float = 5.0) -> None:
        """Set the biases to log frequencies of the tokens of rows (tokens, label); rare ones differ less by label."""
        counts = torch.zeros(self.sizes.n_labels, self.sizes.vocabulary + 1, dtype=torch.float64)
        for label, each in enumerate(counts):
            each += torch.bincount(rows[rows[:, -1] == label, :-1].flatten(), minlength=len(each))
        counts = counts[:, :-1]
        total, share = counts.sum(0), (counts.sum(1, keepdim=True) + 1) / (counts.sum() + len(counts))
        log_frequency = (total + 0.5).log() - (total + 0.5).sum().log()
        of_label = (counts + smoothing * share) / (total + smoothing) / share
        self.bias.copy_(torch.cat([log_frequency + of_label.log(), log_frequency[None]]))

    def forward(self, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
        return self.logits(x, label).log_softmax(-1)
