"""The model of hot molecules: how it is trained, kept and loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crepe_diffusion.errors import InputError
from crepe_diffusion.experiments.molecules.network import EGNN, PairForces
from crepe_diffusion.experiments.training import Settings, load_weights, loss, save_weights, train
from crepe_diffusion.models import Denoiser
from crepe_diffusion.models.edm import EDM
from crepe_diffusion.processes import Gaussian

__all__ = ["NETWORKS", "SETTINGS", "by_noise", "load", "train_model"]

NETWORKS: dict[str, dict[str, Any]] = {
    "pairs": {"kind": "pairs", "n_layers": 4, "width": 384},
    "pairs-small": {"kind": "pairs", "n_layers": 4, "width": 256},
    "pairs-tiny": {"kind": "pairs", "n_layers": 3, "width": 128},
    "egnn": {"kind": "egnn", "n_layers": 4, "width": 64},
}
# Bonds matter at sigma near their own 0.003 nm and the shape of the whole near 0.2 nm: the noise is centred between.
SETTINGS = Settings(n_steps=45_000, batch=512, rate=1e-3, noise_mean=-3.6, noise_std=1.8, average=0.9995)


def build(network: dict[str, Any], n_atoms: int, sigma_data: float, centres: Tensor | None = None) -> EDM:
    """The untrained denoiser; `centres` (centre and three neighbours) are what tells it left from right."""
    sizes = {"n_layers": network["n_layers"], "width": network["width"]}
    if network["kind"] == "egnn":
        return EDM(EGNN(n_atoms, **sizes), sigma_data)
    if network["kind"] == "pairs":
        return EDM(PairForces(n_atoms, sigma_data, centres=centres, **sizes), sigma_data)
    raise InputError(f'the kind of a network must be "pairs" or "egnn", got {network["kind"]!r}')


def train_model(
    frames: tuple[np.ndarray, np.ndarray],
    folder: Path,
    name: str,
    network: dict[str, Any],
    settings: Settings = SETTINGS,
    centres: np.ndarray | None = None,
    groups: np.ndarray | None = None,
    about: dict[str, str] | None = None,
    every: int = 500,
) -> Iterator[dict[str, float]]:
    """Train on frames (training, validation); yields the log. `folder/NAME.safetensors` is the model when it ends.

    `groups` are methyl groups (carbon and hydrogens) whose hydrogens are renamed at random in every batch.
    """
    training, validation = (torch.from_numpy(f).float() for f in frames)
    sigma_data = float(training.std())
    torch.manual_seed(settings.seed)  # the network's first weights
    model = build(network, training.shape[1], sigma_data, None if centres is None else torch.from_numpy(centres))
    if isinstance(model.network, PairForces):
        model.network.fit(training)

    def batches(n: int, generator: torch.Generator) -> Tensor:
        return renamed(training[torch.randint(len(training), (n,), generator=generator)], groups, generator)

    fixed = torch.Generator().manual_seed(1)
    held_out = renamed(validation[torch.randint(len(validation), (4096,), generator=fixed)], groups, fixed)

    @torch.no_grad()
    def validate(average: EDM) -> float:
        return float(loss(average, held_out, settings, torch.Generator().manual_seed(2)))

    description = {"network": json.dumps(network), "sigma_data": repr(sigma_data), "n_atoms": str(training.shape[1])}
    description |= {"settings": json.dumps(asdict(settings)), **(about or {})}
    for line in train(model, batches, settings, folder, validate=validate, every=every):
        yield line
    save_weights(folder / f"{name}.safetensors", model, description | {"last": json.dumps(line)})


def renamed(x: Tensor, groups: np.ndarray | None, generator: torch.Generator) -> Tensor:
    """Two hydrogens of each methyl group trade names in half of the rows.

    Distances do not show in which sense hydrogens are named, so a network draws both. It has to know both, or half of
    its samples are unlike anything it has seen.
    """
    x = x.clone()
    for _, _, b, c in () if groups is None else groups.tolist():
        rows = torch.rand(len(x), generator=generator) < 0.5
        x[rows, b], x[rows, c] = x[rows, c], x[rows, b]
    return x


def load(name: str | Path) -> Denoiser:
    """The model of molecules (atoms, 3) by the name of a shipped one or from a file, with isotropic Fisher variance."""
    path = Path(name)
    if path.suffix != ".safetensors":
        path = Path(str(files("crepe_diffusion.experiments.molecules") / "weights")) / f"{name}.safetensors"
    weights, about = load_weights(path)
    n_atoms = int(about["n_atoms"])
    model = build(json.loads(about["network"]), n_atoms, float(about["sigma_data"]), weights.get("network.centres"))
    model.load_state_dict(weights)
    return denoiser(model, n_atoms)


def denoiser(model: EDM, n_atoms: int) -> Denoiser:
    """Turning a molecule turns every direction into every other, so no fixed basis can be better than isotropy."""
    return Denoiser(model.eval().requires_grad_(False), (n_atoms, 3), process=Gaussian(zero_mean=0))


@torch.no_grad()
def by_noise(model: EDM, x: Tensor, sigmas: Tensor, seed: int = 0) -> Tensor:
    """The weighted loss at each noise level: 1 for the best linear denoiser, less where the model knows more."""
    out, n = [], x.shape[1]
    for i, sigma in enumerate(sigmas):
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed + i))
        y = x + sigma * (noise - noise.mean(1, keepdim=True))
        error = (model(y, sigma.expand(len(x))) - x).square().mean() * (n / (n - 1))  # one atom's worth is not free
        out.append(model.weight(sigma[None])[0] * error)
    return torch.stack(out)
