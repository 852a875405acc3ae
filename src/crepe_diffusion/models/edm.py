"""The preconditioning of Karras et al. (2022) around a bare network: one scale for all directions, or one for each."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from crepe_diffusion.errors import InputError
from crepe_diffusion.models.conditions import Condition

__all__ = ["EDM"]


class EDM(nn.Module):
    """`D(y, sigma) = c_skip y + c_out F(c_in y, c_noise)`: inputs and targets of `F` have unit variance at any noise.

    `sigma_data` is the scale of the data, or one scale for each row of an orthonormal `basis` of the flattened event;
    `F` then sees the coordinates in that basis. With the data's main directions as the basis, `F` has to learn only
    what a linear denoiser cannot do. That matters where scales differ much, as along smooth curves. A condition, if
    there is one, is passed on to `F` as its third argument.

    >>> from crepe_diffusion.models import Denoiser
    >>> network = lambda y, c_noise: torch.zeros_like(y)          # with nothing learned: the best linear denoiser
    >>> model = Denoiser(EDM(network, sigma_data=1.0), event_shape=(3,))
    >>> model.predict(torch.ones(1, 3), torch.ones(1)).tolist()
    [[0.5, 0.5, 0.5]]
    """

    scales: Tensor
    basis: Tensor | None

    def __init__(self, network: nn.Module, sigma_data: float | Tensor, basis: Tensor | None = None):
        super().__init__()
        scales = torch.as_tensor(sigma_data, dtype=torch.float32).reshape(-1)
        if not (scales > 0).all():
            raise InputError(f"sigma_data is the standard deviation of the data, got {sigma_data!r}")
        if len(scales) != (1 if basis is None else len(basis)):
            raise InputError(f"sigma_data needs one scale for each row of the basis, got {len(scales)}")
        if basis is not None and basis.shape[0] != basis.shape[1]:
            raise InputError(f"the basis of an event must be square, got shape {tuple(basis.shape)}")
        self.network = network
        self.register_buffer("scales", scales)
        self.register_buffer("basis", None if basis is None else basis.to(torch.float32).contiguous())

    def forward(self, y: Tensor, sigma: Tensor, *condition: Condition) -> Tensor:
        z = y.flatten(1)
        if self.basis is not None:
            z = z @ self.basis.T.to(y.dtype)
        s, scales = sigma[:, None], self.scales.to(y.dtype)
        total = s**2 + scales**2
        inner = self.network((z * total.rsqrt()).reshape(y.shape), sigma.log() / 4, *condition).flatten(1)
        z = (scales**2 / total) * z + (s * scales * total.rsqrt()) * inner
        if self.basis is not None:
            z = z @ self.basis.to(y.dtype)
        return z.reshape(y.shape)

    def weight(self, sigma: Tensor) -> Tensor:
        """The weight of a mean squared error that makes all noise levels count the same at the beginning."""
        s = sigma[:, None] ** 2
        return 1 / (s * self.scales**2 / (s + self.scales**2)).mean(1)
