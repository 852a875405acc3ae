"""Networks of small grey images that several studies train: a class-conditional U-Net, and a classifier.

Pixels enter and leave in blocks of 2 x 2, so nearly all work on images of 28 x 28 is done at 14 x 14 and 7 x 7: at full
size the same number of operations would buy a quarter of the channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pixel_shuffle, pixel_unshuffle, silu

__all__ = ["Classifier", "UNet"]


class Block(nn.Module):
    """Two convolutions with a skip; noise and label scale and shift the channels between them."""

    def __init__(self, n_in: int, n_out: int, n_embedding: int):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, n_in), nn.Conv2d(n_in, n_out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, n_out), nn.Conv2d(n_out, n_out, 3, padding=1)
        self.modulate = nn.Linear(n_embedding, 2 * n_out)
        self.skip = nn.Conv2d(n_in, n_out, 1) if n_in != n_out else nn.Identity()
        nn.init.zeros_(self.conv2.weight)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        h = self.conv1(silu(self.norm1(x)))
        scale, shift = self.modulate(embedding)[:, :, None, None].chunk(2, 1)
        h = self.conv2(silu(self.norm2(h) * (1 + scale) + shift))
        return self.skip(x) + h


class Attention(nn.Module):
    """All places look at each other: far strokes of one digit have to agree."""

    def __init__(self, width: int, n_heads: int = 4):
        super().__init__()
        self.n_heads = n_heads
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(8, width),
            nn.Conv2d(width, 3 * width, 1),
            nn.Conv2d(width, width, 1),
        )
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.qkv(self.norm(x)).reshape(len(x), 3, self.n_heads, -1, x[0, 0].numel()).transpose(-1, -2).unbind(1)
        )
        h = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(h.transpose(-1, -2).reshape(x.shape))


class UNet(nn.Module):
    """`F(y, c_noise, label)` for images of an even size; the label `n_classes` stands for "no label".

    Images (rows, n_in, size, size) become (rows, n_out, size, size): one and one for grey values, the length of an
    embedding and the number of levels for tokens.
    """

    waves: Tensor

    def __init__(self, width: int = 32, depth: int = 2, n_classes: int = 10, n_in: int = 1, n_out: int = 1):
        super().__init__()
        wide, n_embedding = 2 * width, 4 * width
        self.n_classes = n_classes
        self.register_buffer("waves", torch.linspace(0.5, 12.0, 16), persistent=False)
        self.noise = nn.Sequential(nn.Linear(32, n_embedding), nn.SiLU(), nn.Linear(n_embedding, n_embedding))
        self.label = nn.Embedding(n_classes + 1, n_embedding)
        self.first = nn.Conv2d(4 * n_in, width, 3, padding=1)
        self.down = nn.ModuleList(Block(width, width, n_embedding) for _ in range(depth))
        self.shrink = nn.Conv2d(width, wide, 3, stride=2, padding=1)
        self.middle = nn.ModuleList(Block(wide, wide, n_embedding) for _ in range(depth))
        self.attention = Attention(wide)
        self.after = nn.ModuleList(Block(wide, wide, n_embedding) for _ in range(depth))
        self.grow = nn.Conv2d(wide, width, 1)
        self.up = nn.ModuleList(Block(2 * width if i == 0 else width, width, n_embedding) for i in range(depth))
        self.norm, self.last = nn.GroupNorm(8, width), nn.Conv2d(width, 4 * n_out, 3, padding=1)
        nn.init.zeros_(self.last.weight)

    def forward(self, y: Tensor, c_noise: Tensor, label: Tensor) -> Tensor:
        waves = c_noise[:, None] * self.waves
        e = silu(self.noise(torch.cat([waves.sin(), waves.cos()], 1)) + self.label(label))
        h = self.first(pixel_unshuffle(y, 2))
        for block in self.down:
            h = block(h, e)
        kept, h = h, self.shrink(h)
        for block in self.middle:
            h = block(h, e)
        h = self.attention(h)
        for block in self.after:
            h = block(h, e)
        h = torch.cat([kept, interpolate(self.grow(h), kept.shape[-2:])], 1)
        for block in self.up:
            h = block(h, e)
        return pixel_shuffle(self.last(silu(self.norm(h))), 2)


class Classifier(nn.Module):
    """Log-probabilities of the classes of a clean image; `features` are what they are computed from."""

    def __init__(self, width: int = 32, n_features: int = 64, n_classes: int = 10, size: int = 28):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(2 * width * math.ceil(size / 4) ** 2, n_features),
            nn.GELU(),
        )
        self.head = nn.Linear(n_features, n_classes)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x)).log_softmax(1)
