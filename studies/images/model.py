"""Two networks per set of images: a class-conditional denoiser and a classifier; how they are trained and loaded.

D(y, sigma, c) = E[x_0 | y, c],  c = 0..9, or 10 for "any class"          log p(c | x_0)
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

import crepe_diffusion as cd
from studies.images.data import Images, load_images
from studies.images.network import Classifier, UNet
from studies.shared.training import Settings, load_weights, loss, save_weights, train

__all__ = [
    "DROPPED",
    "NETWORK",
    "SETTINGS",
    "SHAPE",
    "load_classifier",
    "load_model",
    "train_classifier",
    "train_model",
]

SHAPE = (1, 28, 28)
NETWORK = {"width": 32, "depth": 1, "n_classes": 10}
SETTINGS = Settings(n_steps=10_000, batch=64, rate=1e-3, warm_up=200, noise_mean=-1.0, noise_std=1.3)
DROPPED = 0.15  # the share of labels that are hidden in training: D(y, sigma, 10) is the unconditional model
SIGMA_DATA = 0.6  # the standard deviation of pixels is .62 for digits and .71 for clothes


def build(network: dict[str, int]) -> cd.models.EDM:
    return cd.models.EDM(UNet(**network), SIGMA_DATA)


def labelled(images: Images, n: int, generator: torch.Generator, none: int) -> tuple[Tensor, Tensor]:
    """n images with their labels, a share of which is hidden."""
    which = torch.randint(len(images.x), (n,), generator=generator)
    hidden = torch.rand(n, generator=generator) < DROPPED
    return images.x[which], images.label[which].masked_fill(hidden, none)


def train_model(
    name: str, data: Path, folder: Path, network: dict[str, int] = NETWORK, settings: Settings = SETTINGS
) -> Iterator[dict[str, float]]:
    """Train the denoiser or continue its training; yields the log. `folder/NAME.safetensors` is the model so far."""
    training, test = load_images(name, data)
    torch.manual_seed(settings.seed)  # the network's first weights
    model = build(network)
    none = network["n_classes"]
    held_out = labelled(test, 1024, torch.Generator().manual_seed(1), none)

    def batches(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return labelled(training, n, generator, none)

    @torch.no_grad()
    def validate(average: cd.models.EDM) -> float:
        return float(loss(average, held_out, settings, torch.Generator().manual_seed(2)))

    work = folder / name
    average = build(network)
    for line in train(model, batches, settings, work, validate=validate, every=min(250, settings.n_steps)):
        yield line
        average.load_state_dict(load_weights(work / "average.safetensors")[0])
        about = {"images": name, "network": network, "settings": asdict(settings), "last": line}
        save_weights(folder / f"{name}.safetensors", average, {k: json.dumps(v) for k, v in about.items()})


def train_classifier(name: str, data: Path, folder: Path, n_epochs: int = 3, batch: int = 128) -> dict[str, float]:
    """Train the classifier, a minute per epoch; it is kept as `folder/NAME-classifier.safetensors`.

    A third of the batches is noised a little, so that its opinion of an image does not hang on single pixels.
    """
    training, test = load_images(name, data)
    torch.manual_seed(0)
    model = Classifier()
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    n_steps = n_epochs * len(training.x) // batch
    rate = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=n_steps)
    generator, began = torch.Generator().manual_seed(0), time.perf_counter()
    for step in range(n_steps):
        which = torch.randint(len(training.x), (batch,), generator=generator)
        x = training.x[which]
        if step % 3 == 0:
            x = x + 0.15 * torch.randn(x.shape, generator=generator)
        value = torch.nn.functional.nll_loss(model(x), training.label[which])
        optimiser.zero_grad(set_to_none=True)
        value.backward()
        optimiser.step()
        rate.step()
    with torch.no_grad():
        log_p = torch.cat([model(x) for x in test.x.split(1000)])
    found = {
        "accuracy": float((log_p.argmax(1) == test.label).double().mean()),
        "log-probability": float(log_p.gather(1, test.label[:, None]).double().mean()),
        "seconds": time.perf_counter() - began,
    }
    about = {"images": json.dumps(name), "test": json.dumps(found)}
    save_weights(folder / f"{name}-classifier.safetensors", model, about)
    return found


def weights_folder() -> Path:
    return Path(__file__).parent / "weights"


def load_model(name: str, folder: Path | None = None) -> tuple[list[cd.models.Denoiser], cd.models.Denoiser]:
    """The conditional models, one per class, and the unconditional one: all conditions of one network."""
    weights, about = load_weights((folder or weights_folder()) / f"{name}.safetensors")
    network = json.loads(about["network"])
    model = build(network)
    model.load_state_dict(weights)
    model.eval().requires_grad_(False)
    *classes, none = (
        cd.models.Denoiser(model, SHAPE, condition=torch.tensor(c)) for c in range(network["n_classes"] + 1)
    )
    return classes, none


def load_classifier(name: str, folder: Path | None = None) -> Classifier:
    weights, _ = load_weights((folder or weights_folder()) / f"{name}-classifier.safetensors")
    model = Classifier()
    model.load_state_dict(weights)
    return model.eval().requires_grad_(False)
