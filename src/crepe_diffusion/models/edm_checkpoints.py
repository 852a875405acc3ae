"""Networks of EDM and EDM2 (NVlabs), which are denoisers already: `D(y, sigma | label) = net(y, sigma, label)`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from crepe_diffusion.errors import InputError
from crepe_diffusion.models.conditions import Condition
from crepe_diffusion.models.parametrisations import Direct
from crepe_diffusion.models.pretrained import Decode, Network, Pretrained, pixels
from crepe_diffusion.processes import Process

__all__ = ["edm2_decoder", "from_edm"]

# Mean and standard deviation, by channel, of the latents on which the EDM2 networks were trained, as published.
LATENT_MEAN = (5.81, 3.25, 0.12, -2.15)
LATENT_STD = (4.17, 4.62, 3.71, 3.28)
SIGMA_MIN, SIGMA_MAX = 0.002, 80.0
"""Where the samplers of both papers end, unless a network states narrower bounds."""


def from_edm(
    net: Callable[..., Tensor],
    label: int | Tensor | None = None,
    *,
    event_shape: Sequence[int] | None = None,
    decode: Decode | None = None,
    dtype: torch.dtype = torch.float32,
    process: Process | None = None,
) -> Pretrained:
    """A network of EDM or EDM2, `net(x, sigma, labels)`, as a model of one class.

    `label` is a class or a vector of `net.label_dim` entries. The unconditional partner of a guided pair is a network
    of its own: `cd.guided(from_edm(net, 207), from_edm(unconditional_net), 1.5)`. A conditional network without a label
    gets a vector of zeros, which it was not trained on unless with label dropout: a warning says so. `decode` is by
    default that of pixels from -1 to 1; for latents give `edm2_decoder(vae)`. Load weights by `convert_edm`.

    >>> class Net(torch.nn.Module):                                              # N(0, 1) data
    ...     img_channels, img_resolution, label_dim = 1, 4, 0
    ...     def forward(self, x, sigma, labels=None):
    ...         return x / (1 + sigma.reshape(-1, 1, 1, 1) ** 2)
    >>> p = from_edm(Net())
    >>> p.event_shape, float(p.predict(torch.ones(1, 1, 4, 4), torch.ones(1)).mean())
    ((1, 4, 4), 0.5)
    """
    if not callable(net):
        raise InputError(
            f"from_edm takes a network net(x, sigma, labels), got an object of type {type(net).__name__!r}; a pickle is"
            " converted by convert_edm and loaded into the network's own class"
        )
    channels, size = getattr(net, "img_channels", None), getattr(net, "img_resolution", None)
    if event_shape is None:
        if channels is None or size is None:
            raise InputError("the network states no img_channels and img_resolution: give event_shape=(3, 64, 64)")
        event_shape = (int(channels), int(size), int(size))
    low, high = float(getattr(net, "sigma_min", 0.0)), float(getattr(net, "sigma_max", float("inf")))
    parametrisation = Direct(sigma_min=max(SIGMA_MIN, low), sigma_max=min(SIGMA_MAX, high))
    n = int(getattr(net, "label_dim", 0))

    def encode(label: Any) -> Condition | None:
        return _label(label, n, _trained_without_label(net))

    if decode is None and channels in (1, 3):
        decode = pixels
    network = Network(net, _call, parametrisation)
    return Pretrained(network, event_shape, label, encode=encode, decode=decode, dtype=dtype, process=process)


def _trained_without_label(net: Any) -> bool:
    return float(getattr(getattr(net, "model", None), "label_dropout", 0.0) or 0.0) > 0


def _label(label: Any, n: int, dropout: bool) -> Condition | None:
    if label is None:
        if n and not dropout:
            warnings.warn(
                f"this network has {n} classes and was trained with a label at all times: without one it gets a vector"
                " of zeros, whose predictions are of no trained law. Give a label, and an unconditional network as the"
                " partner of guidance",
                UserWarning,
                stacklevel=5,
            )
        return torch.zeros(n) if n else None
    if n == 0:
        raise InputError(f"this network has no labels (label_dim is 0), got {label!r}")
    if isinstance(label, Tensor) and label.shape == (n,):
        return label.to(torch.float32)
    if not isinstance(label, int) or not 0 <= label < n:
        raise InputError(f"a label is a class from 0 to {n - 1} or a vector of {n} entries, got {label!r}")
    return torch.eye(n)[label]


def _call(net: Any, x: Tensor, sigma: Tensor, label: Any) -> Tensor:
    sigma = sigma.to(torch.float32)
    out: Tensor = net(x, sigma) if label is None else net(x, sigma, label)
    return out


def edm2_decoder(vae: Any) -> Decode:
    """Images of EDM2 latents by the autoencoder that they were made with, `AutoencoderKL("stabilityai/sd-vae-ft-mse")`.

    EDM2 gave it pixels from 0 to 1 and used its latents without the factor 0.18215.
    """
    if not hasattr(vae, "decode"):
        raise InputError(
            f"edm2_decoder takes an AutoencoderKL of diffusers, got an object of type {type(vae).__name__!r}"
        )

    def decode(x: Tensor) -> Tensor:
        mean, std = (
            torch.tensor(v, dtype=x.dtype, device=x.device).reshape(4, 1, 1) for v in (LATENT_MEAN, LATENT_STD)
        )
        first = next(vae.parameters())
        return vae.decode((x * std / 0.5 + mean).to(first), return_dict=False)[0].to(x.dtype)

    return decode
