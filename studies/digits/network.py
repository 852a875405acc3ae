"""A masked diffusion of grey digits, in the setting of the paper's figure: from data to weights, and as models.

    log p(x^i = v | pixels that are not masked, label),    v = 0 .. 15: level of grey, label = 0 .. 9, or 10: any digit

No time goes in: the share of masked pixels, which the network computes from its input, says all that it could say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import crepe_diffusion as cd
from studies.digits.laws import N_CLASSES, WEIGHTS, read_digits
from studies.shared.masking import MaskedLoss, held_out
from studies.shared.networks import UNet
from studies.shared.training import Settings, load_weights, save_weights, train

__all__ = ["PRESETS", "SETTINGS", "Pixels", "Sizes", "grey_digits", "load_models", "load_network", "train_network"]

SIDE = 28
FILE = WEIGHTS / "network.safetensors"


@dataclass(frozen=True)
class Sizes:
    """Size of a network: `levels` of grey are its tokens."""

    levels: int = 16
    embedding: int = 8
    width: int = 32
    depth: int = 1


PRESETS = {"small": Sizes(), "paper": Sizes(levels=256, embedding=16, width=152, depth=3)}
"""`small` was trained for the shipped weights; `paper`, 19 M parameters and all 256 levels, is for other machines."""
SETTINGS = {
    "small": Settings(n_steps=5_000, batch=64, rate=2e-3, warm_up=200, average=0.998),
    "paper": Settings(n_steps=250_000, batch=256, rate=2e-4, warm_up=2_000, average=0.9999),
}
EVERY = 250
"""Steps between two checkpoints."""


class Pixels(nn.Module):
    """`forward(x, t, label)`: log-probabilities (rows, 28, 28, levels) of pixels x (rows, 28, 28); t is not looked at.

    >>> network = Pixels(Sizes(levels=4, width=8))
    >>> network(torch.full((2, 28, 28), 4), torch.ones(2), torch.tensor([3, 10])).exp().sum(-1).mean().round().item()
    1.0
    """

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.sizes = sizes
        self.tokens = nn.Embedding(sizes.levels + 1, sizes.embedding)  # the mask is the last one
        self.body = UNet(sizes.width, sizes.depth, N_CLASSES, sizes.embedding, sizes.levels)

    def logits(self, x: Tensor, label: Tensor, where: Tensor | None = None) -> Tensor:
        """Logits (rows, 784, levels) of pixels x (rows, 784), or (hidden, levels) of those where `where` is true."""
        masked = (x == self.sizes.levels).float().mean(1)
        seen = self.tokens(x.reshape(-1, SIDE, SIDE)).movedim(-1, 1)
        out = self.body(seen, masked, label).movedim(1, -1).reshape(*x.shape, -1)
        return out if where is None else out[where]

    def forward(self, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
        return self.logits(x.flatten(1), label).log_softmax(-1).reshape(*x.shape, -1)


def grey_digits(path: Path, levels: int, part: str = "train") -> Tensor:
    """Rows (n, 785): levels of grey, 0 for paper and `levels - 1` for ink, then the label."""
    grey, labels = read_digits(path, part)
    return torch.cat([(torch.from_numpy(grey) * (levels - 1)).round().long().flatten(1), labels[:, None]], 1)


def train_network(
    mnist: Path, folder: Path, preset: str = "small", settings: Settings | None = None
) -> Iterator[dict[str, float]]:
    """Train or go on, and write `folder/network.safetensors`, the averaged weights, at every yield."""
    sizes, settings = PRESETS[preset], settings or SETTINGS[preset]
    rows, test = (grey_digits(mnist, sizes.levels, part) for part in ("train", "test"))
    torch.manual_seed(settings.seed)
    network, average = Pixels(sizes), Pixels(sizes)
    loss = MaskedLoss(sizes.levels, N_CLASSES, dropped=0.2)

    def batches(n: int, generator: torch.Generator) -> Tensor:
        return rows[torch.randint(len(rows), (n,), generator=generator)]

    validate = held_out(test[:1024], loss)
    for line in train(network, batches, settings, folder / preset, objective=loss, validate=validate, every=EVERY):
        average.load_state_dict(load_weights(folder / preset / "average.safetensors")[0])
        about = {"sizes": asdict(sizes), "settings": asdict(settings), "log": line}
        save_weights(folder / "network.safetensors", average, {k: json.dumps(v) for k, v in about.items()})
        yield line


def load_network(path: Path = FILE) -> Pixels:
    """A trained network, ready to predict."""
    tensors, about = load_weights(path)
    network = Pixels(Sizes(**json.loads(about["sizes"])))
    network.load_state_dict({name: value.float() for name, value in tensors.items()})
    return network.eval().requires_grad_(False)


def load_models(network: Pixels) -> list[cd.models.TokenModel]:
    """The laws of the digits 0 to 9 and, last, of any digit: conditions of one network."""
    return [
        cd.models.TokenModel(network, (SIDE, SIDE), network.sizes.levels, condition=torch.tensor(c))
        for c in range(N_CLASSES + 1)
    ]
