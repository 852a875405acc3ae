"""The sentence model from data to weights, and as a model of the library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

import crepe_diffusion as cd
from studies.sentences.network import PRESETS, Sizes, Transformer
from studies.shared.masking import MaskedLoss, held_out
from studies.shared.results import Results
from studies.shared.training import Settings, load_weights, save_weights, train

__all__ = ["LABELS", "PRESETS", "SETTINGS", "conditional", "load_network", "train_network"]

LABELS = ("negative", "positive")
SETTINGS = Settings(n_steps=10_000, batch=64, rate=1e-3, warm_up=400, average=0.998)
EVERY = 200
"""Steps between two checkpoints."""
WEIGHTS = Path(__file__).parent / "weights" / "sentences.safetensors"


def train_network(folder: Path, preset: str = "small", settings: Settings = SETTINGS) -> Iterator[dict[str, float]]:
    """Train on the rows that `data` wrote to this folder, and write `sentences.safetensors` there at every yield."""
    rows = {name: torch.from_numpy(a) for name, a in Results(folder).arrays("rows").items()}
    sizes = PRESETS[preset]
    torch.manual_seed(settings.seed)
    network = Transformer(sizes)
    loss = MaskedLoss(sizes.vocabulary, sizes.n_labels)

    def batches(n: int, generator: torch.Generator) -> Tensor:
        chosen = rows["train"][torch.randint(len(rows["train"]), (n,), generator=generator)]
        return chosen.long()

    validate = held_out(rows["held_out"].long(), loss)
    for line in train(network, batches, settings, folder / preset, objective=loss, validate=validate, every=EVERY):
        tensors, _ = load_weights(folder / preset / "average.safetensors")
        average = Transformer(sizes)
        average.load_state_dict(tensors)
        about = {"sizes": json.dumps(asdict(sizes)), "log": json.dumps(line)}
        save_weights(folder / "sentences.safetensors", average, about)
        yield line


def load_network(path: Path = WEIGHTS) -> Transformer:
    """A trained network, ready to predict."""
    tensors, about = load_weights(path)
    network = Transformer(Sizes(**json.loads(about["sizes"])))
    network.load_state_dict({name: value.float() for name, value in tensors.items()})
    return network.eval().requires_grad_(False)


def conditional(network: Transformer, label: int | None, prompt: Tensor | None = None) -> cd.models.TokenModel:
    """The law of sentences with this label; None: of all sentences."""
    sizes = network.sizes
    condition = torch.tensor(sizes.n_labels if label is None else label)
    return cd.models.TokenModel(network, (sizes.length,), sizes.vocabulary, condition=condition, prompt=prompt)
