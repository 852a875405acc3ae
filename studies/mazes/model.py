"""The model of short trajectories: how it is trained, kept and loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

import crepe_diffusion as cd
from studies.mazes import data
from studies.mazes.maze import Maze
from studies.mazes.network import TrajectoryMLP
from studies.shared.results import Results
from studies.shared.training import Settings, load_weights, loss, save_weights, train

__all__ = ["NETWORKS", "SETTINGS", "load_maze_model", "shipped", "train_model", "weights_folder"]

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


def build(network: dict[str, int], scales: Tensor, basis: Tensor) -> cd.models.EDM:
    return cd.models.EDM(TrajectoryMLP(length=data.LENGTH, **network), scales, basis)


def main_directions(training: Tensor, n: int = 50_000) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, scales and an orthonormal basis of trajectories, the largest scale first.

    Trajectories are smooth: their course is settled at much higher noise than their jitter, so one preconditioning or
    one variance for all directions would be wrong for most of them.
    """
    x = data.windows(training, n, torch.Generator().manual_seed(0)).flatten(1).double()
    variances, axes = torch.linalg.eigh(torch.cov(x.T))
    return x.mean(0), variances.clamp(min=1e-10).sqrt().flip(0), axes.T.flip(0).contiguous()


def train_model(
    name: str, folder: Path, network: dict[str, int] | None = None, settings: Settings | None = None
) -> Iterator[dict[str, float]]:
    """Train on the episodes in `folder`; yields the log. At the end, `folder/NAME/NAME.safetensors` is the model."""
    maze, training, validation = data.load_episodes(name, Results(folder))
    network, settings = network or NETWORKS[name], settings or SETTINGS[name]
    training, validation = maze.normalise(training), maze.normalise(validation)
    _, scales, basis = main_directions(training)
    torch.manual_seed(settings.seed)  # the network's first weights
    model = build(network, scales, basis)
    held_out = data.windows(validation, 4096, torch.Generator().manual_seed(1))

    def batches(n: int, generator: torch.Generator) -> Tensor:
        return data.windows(training, n, generator)

    @torch.no_grad()
    def validate(average: cd.models.EDM) -> float:
        return float(loss(average, held_out, settings, torch.Generator().manual_seed(2)))

    for line in train(model, batches, settings, folder / name, validate=validate):
        yield line
    about = {"maze": asdict(maze), "network": network, "settings": asdict(settings), "last": line}
    texts = {key: json.dumps(value) for key, value in about.items()}
    save_weights(folder / name / f"{name}.safetensors", model, texts, measure(model, training))


def measure(model: cd.models.EDM, training: Tensor, n: int = 2048) -> dict[str, Tensor]:
    """The Fisher information of the model in the main directions, from which the kernels take their variances."""
    process = cd.processes.Gaussian(variance="fisher-diagonal", basis=main_directions(training)[2])
    denoiser = cd.models.Denoiser(model.eval().requires_grad_(False), (data.LENGTH, 2))
    x = data.windows(training, n, torch.Generator().manual_seed(1))
    table = cd.information_from_data(denoiser, x, cd.ladder.karras(101, 0.001, 20.0).times, process, cd.Stream(0))
    return {f"process.{k}": v for k, v in table.state_dict().items()}


def shipped() -> list[str]:
    """Names of the models whose weights lie beside this file."""
    return sorted(path.stem for path in weights_folder().glob("*.safetensors"))


def weights_folder() -> Path:
    return Path(__file__).parent / "weights"


def load_maze_model(name: str | Path) -> tuple[Maze, cd.models.Denoiser]:
    """A maze and the model of its trajectories (64, 2), by the name of a shipped one or from a file of weights."""
    path = Path(name)
    if path.suffix != ".safetensors":
        path = weights_folder() / f"{name}.safetensors"
        if not path.exists():
            raise cd.InputError(
                f"no shipped weights for {str(name)!r}; there are {', '.join(shipped())}, or give a file"
            )
    weights, about = load_weights(path)
    measured = {k: weights.pop(k) for k in list(weights) if k.startswith("process.")}
    model = build(json.loads(about["network"]), weights["scales"], weights["basis"])
    model.load_state_dict(weights)
    model.eval().requires_grad_(False)
    table = cd.processes.FisherTable(measured["process.times"], measured["process.values"], measured["process.mean"])
    process = cd.processes.Gaussian(variance="fisher-diagonal", basis=weights["basis"].double(), information=table)
    return Maze.from_fields(json.loads(about["maze"])), cd.models.Denoiser(model, (data.LENGTH, 2), process=process)
