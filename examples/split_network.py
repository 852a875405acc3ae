"""A network whose layers are split over several processes, for networks that no single device holds.

    y = W_2 silu(W_1 x)        each process holds some rows of W_1 and the columns of W_2 that belong to them

Processes form a mesh of rows x model: neighbours along `model` hold one network between them and evaluate the same
rows, neighbours along `rows` share the rows of a batch. `torch.distributed.tensor.parallel` splits the layers;
`fully_shard` takes the same mesh. The network stands for a checkpoint of yours. Two processes with half of it each:

    torchrun --nproc-per-node 2 -m crepe_diffusion run examples/split_network.toml --out runs/split --model-processes 2
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import crepe_diffusion as cd
from crepe_diffusion.run import Experiment, model_mesh


class Network(nn.Module):
    """A residual perceptron; its weights are a function of a seed, where yours would be loaded."""

    def __init__(self, dim: int = 8, width: int = 64):
        super().__init__()
        self.first, self.second = nn.Linear(dim + 1, width), nn.Linear(width, dim)
        for i, layer in enumerate((self.first, self.second)):
            layer.weight.data = cd.Stream(i).normal(layer.weight.shape, dtype=torch.float32) / layer.in_features**0.5
            layer.bias.data.zero_()

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        scale = (1 + t[:, None] ** 2).sqrt()
        features = torch.cat([y / scale, t[:, None].log() / 4], 1)
        return y / scale**2 + t[:, None] / scale * self.second(nn.functional.silu(self.first(features)))


def experiment(dim: int = 8) -> Experiment:
    """Alone, the network is whole."""
    network, mesh = Network(dim).eval().requires_grad_(False), model_mesh()
    if mesh is not None:
        parallelize_module(network, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    model = cd.models.Denoiser(network, event_shape=(dim,), dtype=torch.float32)
    rewards = {"right": lambda x, slope=1.0: slope * x[:, 0]}
    return Experiment(model.as_target(), rewards=rewards, scalars={"x": lambda x: x[:, 0]})
