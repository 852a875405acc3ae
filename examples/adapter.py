"""A network of your own, in one file: an epsilon-prediction network with class labels becomes a model of this library.

    x = sqrt(abar) x_0 + sqrt(1 - abar) eps           what the network was trained on (variance preserving)
    y = x / sqrt(abar) = x_0 + sigma eps              what this library runs, sigma = sqrt((1 - abar) / abar)
    D(y, sigma, label) = y - sigma * eps(x, time, label)

Only `denoiser` is the adapter; the network stands for a checkpoint of yours. `experiment` is for files such as
`adapter.toml`. Run it: `python examples/adapter.py`, or `crepe-diffusion run examples/adapter.toml --out runs/adapter`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import crepe_diffusion as cd
from crepe_diffusion.run import Experiment

MEANS = torch.tensor([[0.0, 0.0], [2.0, -1.0], [-1.0, 1.5]])  # class 0 stands for "no class"
STDS = torch.tensor([2.0, 0.5, 0.8])
ABAR = torch.linspace(0.9999, 0.001, 1000, dtype=torch.float64)  # a table of the training steps, as in most checkpoints


class Network(nn.Module):
    """Predicts the noise in x at a training step. Here it is exact, for Gaussian data with one mean per class."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, step: Tensor, label: Tensor) -> Tensor:
        self.calls += 1
        low = step.floor().long().clamp(max=len(ABAR) - 2)
        abar = torch.lerp(ABAR[low], ABAR[low + 1], step.double() - low)[:, None].to(x)
        mean, variance = MEANS.to(x)[label], STDS.to(x)[label, None] ** 2
        return (1 - abar).sqrt() * (x - abar.sqrt() * mean) / (abar * variance + 1 - abar)


def denoiser(network: Network, label: int) -> cd.models.Denoiser:
    """The adapter. A new closure is made for every label, and all of them still share one call of the network."""

    def denoise(y: Tensor, sigma: Tensor, label: Tensor) -> Tensor:
        abar = 1 / (1 + sigma**2)
        # The fractional training step of this noise: ABAR falls, searchsorted wants a rising table.
        high = (len(ABAR) - torch.searchsorted(ABAR.flip(0).to(abar), abar)).clamp(1, len(ABAR) - 1)
        upper, lower = ABAR.to(abar)[high - 1], ABAR.to(abar)[high]
        step = high - 1 + (upper - abar) / (upper - lower)
        return y - sigma[:, None] * network(abar.sqrt()[:, None] * y, step, label)

    return cd.models.Denoiser(denoise, event_shape=(2,), condition=torch.tensor(label), dtype=torch.float64)


def experiment(scale: float = 1.5, label: int = 1) -> Experiment:
    """Guidance towards one class, for a configuration; a checkpoint would be loaded here."""
    network = Network().eval()
    target = cd.guided(denoiser(network, label), denoiser(network, 0), scale)
    return Experiment(target, scalars={"x": lambda x: x[:, 0], "y": lambda x: x[:, 1]})


def main(n_draws: int = 200) -> None:
    network = Network().eval()
    target = cd.guided(denoiser(network, 1), denoiser(network, 0), scale=1.5)
    ladder = cd.ladder.karras(9, sigma_min=0.05, sigma_max=20.0, substeps=2)
    chain = cd.ReplicaExchange(target, ladder, n_chains=4, seed=0)
    calls = network.calls
    out = chain.sample(n_draws)
    print(f"{(network.calls - calls) / n_draws:.1f} network calls per iteration, for two models")
    print(f"mean of the guided law: {[round(v, 2) for v in out.x.mean(0).tolist()]}")


if __name__ == "__main__":
    main()
