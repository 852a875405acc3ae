"""Two networks per set of images: a class-conditional denoiser and a classifier; how they are trained and loaded.

D(y, sigma, c) = E[x_0 | y, c],  c = 0..9, or 10 for "any class"          log p(c | x_0)
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.processes import FisherTable, Gaussian
from studies.images.data import CLASSES, SIZES, Images, load_images
from studies.images.wishes import MEASURES
from studies.shared.networks import Classifier, UNet
from studies.shared.training import Settings, load_weights, loss, save_weights, train

__all__ = [
    "NETWORKS",
    "NOISE",
    "SETTINGS",
    "Painter",
    "load_painter",
    "ship",
    "shipped",
    "train_classifier",
    "train_model",
]

NOISE = (0.02, 20.0)  # between which the network is measured and used
WEIGHTS = Path(__file__).parent / "weights"
NETWORKS = {
    14: {"size": 14, "width": 32, "depth": 1, "n_classes": 10},
    28: {"size": 28, "width": 32, "depth": 1, "n_classes": 10},
}
SETTINGS = {
    14: Settings(n_steps=3_000, batch=64, rate=2e-3, warm_up=200, noise_mean=-1.0, noise_std=1.3),
    28: Settings(n_steps=10_000, batch=64, rate=1e-3, warm_up=200, noise_mean=-1.0, noise_std=1.3),
}
EVERY = 250
DROPPED = 0.15  # the share of labels that are hidden in training: D(y, sigma, 10) is the unconditional model
SIGMA_DATA = 0.6  # the standard deviation of pixels is .62 for digits and .71 for clothes


def build(network: dict[str, int]) -> cd.models.EDM:
    return cd.models.EDM(UNet(network["width"], network["depth"], network["n_classes"]), SIGMA_DATA)


def file_name(name: str, size: int) -> str:
    return name if size == 28 else f"{name}-{size}"


def labelled(images: Images, n: int, generator: torch.Generator, none: int) -> tuple[Tensor, Tensor]:
    """n images with their labels, a share of which is hidden."""
    which = torch.randint(len(images.x), (n,), generator=generator)
    hidden = torch.rand(n, generator=generator) < DROPPED
    return images.x[which], images.label[which].masked_fill(hidden, none)


def train_model(
    name: str, data: Path, folder: Path, network: dict[str, int], settings: Settings
) -> Iterator[dict[str, float]]:
    """Train the denoiser or continue its training; yields the log. `folder/NAME.safetensors` is the model so far."""
    training, test = load_images(name, data, network["size"])
    torch.manual_seed(settings.seed)  # the network's first weights
    model = build(network)
    none = network["n_classes"]
    held_out = labelled(test, 1024, torch.Generator().manual_seed(1), none)

    def batches(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return labelled(training, n, generator, none)

    @torch.no_grad()
    def validate(average: cd.models.EDM) -> float:
        return float(loss(average, held_out, settings, torch.Generator().manual_seed(2)))

    stem = file_name(name, network["size"])
    work = folder / stem
    average = build(network)
    for line in train(model, batches, settings, work, validate=validate, every=min(EVERY, settings.n_steps)):
        yield line
        average.load_state_dict(load_weights(work / "average.safetensors")[0])
        about = {"images": name, "network": network, "settings": asdict(settings), "last": line}
        save_weights(folder / f"{stem}.safetensors", average, {k: json.dumps(v) for k, v in about.items()})


def train_classifier(
    name: str, data: Path, folder: Path, size: int = 28, n_epochs: int = 3, batch: int = 128
) -> dict[str, float]:
    """Train the classifier, a minute per epoch; it is kept as `folder/NAME-classifier.safetensors`.

    A third of the batches is noised a little, so that its opinion of an image does not hang on single pixels.
    """
    training, test = load_images(name, data, size)
    torch.manual_seed(0)
    model = Classifier(size=size)
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
    save_weights(folder / f"{file_name(name, size)}-classifier.safetensors", model, about)
    return found


# -- what is shipped ---------------------------------------------------------------------------------------


def cosines(n: int = 28) -> Tensor:
    """The orthonormal cosine transform of images (n, n), (n^2, n^2): smooth images have few large coordinates in it."""
    k = torch.arange(n, dtype=torch.float64)
    rows = torch.cos(math.pi / n * (k + 0.5) * k[:, None]) * math.sqrt(2 / n)
    rows[0] /= math.sqrt(2)
    return torch.kron(rows, rows)


@dataclass(frozen=True)
class Painter:
    """A trained network with what was measured of it, and the classifier that judges its images.

    `models` are the conditional models and, last, the unconditional one. `moments` (measures, classes, 2) are mean and
    standard deviation of the real images' measures (`wishes.MEASURES`); `features` are the means (classes, k) and
    covariances (classes, k, k) of the classifier's features of real images.
    """

    images: str
    models: list[cd.models.Denoiser]
    table: FisherTable
    classifier: Classifier
    moments: Tensor
    features: tuple[Tensor, Tensor]
    about: dict[str, Any]
    examples: Tensor | None = None
    """One test image of each class, (classes, 1, size, size)."""

    @property
    def size(self) -> int:
        return self.models[0].event_shape[-1]

    @property
    def name(self) -> str:
        """By which results and figures are told apart: "mnist" is of 28 x 28 pixels, "mnist-14" of 14 x 14."""
        return file_name(self.images, self.size)

    def conditional(self, label: int) -> cd.Target:
        return self.models[label].as_target()

    def guided(self, label: int, scale: float) -> cd.Target:
        return cd.guided(self.models[label], self.models[-1], scale)

    def process(self, target: cd.Target) -> Gaussian:
        """Kernels for a target of these models, with one variance per cosine."""
        which = [j for model in target.models for j, own in enumerate(self.models) if own is model]
        table = FisherTable(self.table.times, self.table.values[which], self.table.mean[which])
        return Gaussian(variance="fisher-diagonal", basis=cosines(self.size), information=table)


class InBlocks(torch.nn.Module):
    """The same network on at most n rows at once: what fits into the cache is a quarter faster, and no row is added."""

    def __init__(self, model: torch.nn.Module, n: int):
        super().__init__()
        self.model, self.n = model, n

    def forward(self, y: Tensor, sigma: Tensor, label: Tensor) -> Tensor:
        parts = zip(y.split(self.n), sigma.split(self.n), label.split(self.n), strict=True)
        return torch.cat([self.model(*part) for part in parts])


def as_models(model: cd.models.EDM, network: dict[str, int]) -> list[cd.models.Denoiser]:
    """One model per class and, last, the unconditional one: all are conditions of one network."""
    model.eval().requires_grad_(False)
    shape = (1, network["size"], network["size"])
    blocks = InBlocks(model, 100_000 // network["size"] ** 2)
    return [cd.models.Denoiser(blocks, shape, condition=torch.tensor(c)) for c in range(network["n_classes"] + 1)]


def ship(name: str, data: Path, trained: Path, out: Path, size: int = 28, n: int = 256, n_times: int = 15) -> Path:
    """Measure a trained network on training images and write all that `load_painter` needs to one file."""
    stem = file_name(name, size)
    weights, about = load_weights(trained / f"{stem}.safetensors")
    network = json.loads(about["network"])
    model = build(network)
    model.load_state_dict(weights)
    judged, found = load_weights(trained / f"{stem}-classifier.safetensors")
    judge = classifier_of(judged, size)
    about |= {"classifier": found.get("test", "{}")}
    training, test = load_images(name, data, size)
    times = cd.ladder.karras(n_times, *NOISE).times
    process = Gaussian(variance="fisher-diagonal", basis=cosines(size))
    groups = [training.of_class(c) for c in range(network["n_classes"])]
    drawn = [*(x[:n] for x in groups), training.x[:n]]
    tables = [
        cd.information_from_data(denoiser, x, times, process, cd.Stream(j)).state_dict()
        for j, (denoiser, x) in enumerate(zip(as_models(model, network), drawn, strict=True))
    ]
    with torch.no_grad():
        seen = [judge.features(x[:2000]).double() for x in groups]
        measured = torch.stack([torch.stack([f(x[:2000]) for x in groups]) for f in MEASURES.values()])
    others = {
        "measured.times": times,
        "measured.values": torch.cat([t["values"] for t in tables]).half(),
        "measured.mean": torch.cat([t["mean"] for t in tables]).float(),
        "measured.moments": torch.stack([measured.mean(2), measured.std(2)], 2),
        "measured.feature_mean": torch.stack([x.mean(0) for x in seen]).float(),
        "measured.feature_covariance": torch.stack([torch.cov(x.T) for x in seen]).float(),
        "measured.examples": torch.stack([test.of_class(c)[0] for c in range(network["n_classes"])]),
        **{f"classifier.{k}": v for k, v in judge.state_dict().items()},
    }
    path = out / f"{stem}.safetensors"
    save_weights(path, model, about, others)
    return path


def shipped(folder: Path = WEIGHTS) -> list[str]:
    """Of each set of images the network with the largest images that is there."""
    found = []
    for images in CLASSES:
        stems = [file_name(images, size) for size in sorted(SIZES, reverse=True)]
        found += [stem for stem in stems if (folder / f"{stem}.safetensors").exists()][:1]
    return found


def load_painter(name: str | Path) -> Painter:
    """A shipped network, such as "mnist" or "mnist-14", or one from a file that `ship` wrote."""
    path = Path(name)
    if path.suffix != ".safetensors":
        path = WEIGHTS / f"{name}.safetensors"
    tensors, about = load_weights(path)
    measured = {k.removeprefix("measured."): tensors.pop(k) for k in list(tensors) if k.startswith("measured.")}
    judged = {k.removeprefix("classifier."): tensors.pop(k) for k in list(tensors) if k.startswith("classifier.")}
    facts = {key: json.loads(value) for key, value in about.items()}
    model = build(facts["network"])
    model.load_state_dict(tensors)
    return Painter(
        facts["images"],
        as_models(model, facts["network"]),
        FisherTable(measured["times"].double(), measured["values"].double(), measured["mean"].double()),
        classifier_of(judged, facts["network"]["size"]),
        measured["moments"],
        (measured["feature_mean"].double(), measured["feature_covariance"].double()),
        facts,
        measured.get("examples"),
    )


def classifier_of(weights: dict[str, Tensor], size: int) -> Classifier:
    """The classifier with these weights, for images of this size."""
    n_classes, n_features = weights["head.weight"].shape
    model = Classifier(len(weights["body.0.weight"]), n_features, n_classes, size)
    model.load_state_dict(weights)
    return model.eval().requires_grad_(False)
