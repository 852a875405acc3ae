"""The denoiser of short trajectories: an MLP inside EDM's preconditioning."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

__all__ = ["TrajectoryMLP"]


class TrajectoryMLP(nn.Module):
    """`n_layers` hidden layers of `width` units with skips between them; the noise level enters as waves.

    The first coordinates, where the trajectory is and where it leads, enter as waves as well: the network must
    distinguish neighbouring corridors, which a smooth function of bare coordinates learns late.
    """

    N_COURSE = 4
    noise_waves: Tensor
    octaves: Tensor

    def __init__(self, length: int = 64, n_layers: int = 5, width: int = 512, n_octaves: int = 4):
        super().__init__()
        self.register_buffer("noise_waves", torch.linspace(0.4, 12.0, 16), persistent=False)
        self.register_buffer("octaves", 2.0 ** torch.arange(1, n_octaves + 1), persistent=False)
        n_in = 2 * length + 2 * len(self.noise_waves) + 2 * self.N_COURSE * n_octaves
        self.first = nn.Linear(n_in, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(n_layers - 1))
        self.last = nn.Linear(width, 2 * length)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, y: Tensor, c_noise: Tensor) -> Tensor:
        z = y.flatten(1)
        waves = torch.cat(
            [c_noise[:, None] * self.noise_waves, (z[:, : self.N_COURSE, None] * self.octaves).flatten(1)], 1
        )
        h = silu(self.first(torch.cat([z, waves.sin(), waves.cos()], 1)))
        for layer in self.hidden:
            h = h + silu(layer(h))
        return self.last(h).reshape(y.shape)
