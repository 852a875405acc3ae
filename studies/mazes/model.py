"""The model of short trajectories: how it is trained, kept and loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from crepe_diffusion.errors import InputError
from crepe_diffusion.models import Denoiser
from crepe_diffusion.models.edm import EDM
from crepe_diffusion.processes import FisherTable, Gaussian
from crepe_diffusion.random import Stream
from crepe_diffusion.samplers.setup import information_from_data
from crepe_diffusion.schedules import ladder
from studies.mazes import data
from studies.mazes.maze import Maze
from studies.mazes.network import TrajectoryMLP
from studies.shared.training import Settings, load_weights, loss, save_weights, train

__all__ = ["NETWORKS", "SETTINGS", "load", "shipped", "train_model", "weights_folder"]

NETWORKS = {
    "giant": {"n_layers": 5, "width": 512},
    "large": {"n_layers": 5, "width": 512},
    "medium": {"n_layers": 4, "width": 256},
}
SETTINGS = {
    "giant": Settings(n_steps=50_000, batch=512, noise_mean=-1.2, noise_std=1.5),
    "large": Settings(n_steps=30_000, batch=512, noise_mean=-1.2, noise_std=1.5),
    "medium": Settings(n_steps=30_000, batch=512, noise_mean=-1.2, noise_std=1.5),
}


def build(network: dict[str, int], scales: Tensor, basis: Tensor) -> EDM:
    return EDM(TrajectoryMLP(length=data.LENGTH, **network), scales, basis)


def main_directions(training: Tensor, n: int = 50_000) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, scales and an orthonormal basis of trajectories, the largest scale first.

    Trajectories are smooth: the course of one is known long before its jitter, so one preconditioning or one variance
    for all directions would be wrong for most of them.
    """
    x = data.windows(training, n, torch.Generator().manual_seed(0)).flatten(1).double()
    variances, axes = torch.linalg.eigh(torch.cov(x.T))
    return x.mean(0), variances.clamp(min=1e-10).sqrt().flip(0), axes.T.flip(0).contiguous()


def train_model(
    name: str, folder: Path, episodes: Path, network: dict[str, int] | None = None, settings: Settings | None = None
) -> Iterator[dict[str, float]]:
    """Train on the windows of a data file; yields the log. `folder/NAME.safetensors` is the model when it ends."""
    maze, training, validation = data.load(episodes)
    network, settings = network or NETWORKS[name], settings or SETTINGS[name]
    training, validation = maze.normalise(training), maze.normalise(validation)
    _, scales, basis = main_directions(training)
    torch.manual_seed(settings.seed)  # the network's first weights
    model = build(network, scales, basis)
    held_out = data.windows(validation, 4096, torch.Generator().manual_seed(1))

    def batches(n: int, generator: torch.Generator) -> Tensor:
        return data.windows(training, n, generator)

    @torch.no_grad()
    def validate(average: EDM) -> float:
        return float(loss(average, held_out, settings, torch.Generator().manual_seed(2)))

    about = {"maze": maze.to_json(), "network": json.dumps(network)}
    for line in train(model, batches, settings, folder, validate=validate):
        yield line
    about |= {"settings": json.dumps(asdict(settings)), "last": json.dumps(line)}
    save_weights(folder / f"{name}.safetensors", model, about, measure(model, training))


def measure(model: EDM, training: Tensor, n: int = 2048) -> dict[str, Tensor]:
    """What the kernels want to know of the model: its Fisher information in the main directions."""
    process = Gaussian(variance="fisher-diagonal", basis=main_directions(training)[2])
    denoiser = Denoiser(model.eval().requires_grad_(False), (data.LENGTH, 2))
    x = data.windows(training, n, torch.Generator().manual_seed(1))
    table = information_from_data(denoiser, x, ladder.karras(101, 0.001, 20.0).times, process, Stream(0))
    return {f"process.{k}": v for k, v in table.state_dict().items()}


def shipped() -> list[str]:
    return sorted(
        p.name.removesuffix(".safetensors") for p in weights_folder().iterdir() if p.name.endswith(".safetensors")
    )


def weights_folder() -> Path:
    """Where the package keeps its weights."""
    return Path(str(files("studies.mazes") / "weights"))


def load(name: str | Path) -> tuple[Maze, Denoiser]:
    """A maze and the model of its trajectories (64, 2), by the name of a shipped one or from a file."""
    path = Path(name)
    if path.suffix != ".safetensors":
        path = weights_folder() / f"{name}.safetensors"
        if not path.exists():
            raise InputError(f"no shipped weights for {str(name)!r}; there are {', '.join(shipped())}, or give a file")
    weights, about = load_weights(path)
    measured = {k: weights.pop(k) for k in list(weights) if k.startswith("process.")}
    model = build(json.loads(about["network"]), weights["scales"], weights["basis"])
    model.load_state_dict(weights)
    model.eval().requires_grad_(False)
    table = FisherTable(measured["process.times"], measured["process.values"], measured["process.mean"])
    process = Gaussian(variance="fisher-diagonal", basis=weights["basis"].double(), information=table)
    return Maze.from_json(about["maze"]), Denoiser(model, (data.LENGTH, 2), process=process)
