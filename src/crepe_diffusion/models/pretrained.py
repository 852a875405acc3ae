"""A checkpoint as a model: one network, how it is read as a denoiser, its own noise levels, and its pictures.

D(y, sigma | c) = c_skip y + c_out F(c_in y, c_noise | c)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from crepe_diffusion.batches import rows_like
from crepe_diffusion.devices import real
from crepe_diffusion.errors import InputError
from crepe_diffusion.models.base import Denoiser
from crepe_diffusion.models.conditions import Condition, Each, structure
from crepe_diffusion.models.networks import as_tensor
from crepe_diffusion.models.parametrisations import Parametrisation
from crepe_diffusion.processes import Process
from crepe_diffusion.schedules import Ladder

__all__ = ["Decode", "Network", "Pretrained", "pixels"]

Decode = Callable[[Tensor], Tensor]
"""From states (rows, *event) to images (rows, channels, height, width) with values from 0 to 1."""


@dataclass(frozen=True)
class Network:
    """A network with its way of being called, `call(network, x, c_noise, condition)`. Equal ones share a batch."""

    network: Any
    call: Callable[[Any, Tensor, Tensor, Any], Tensor]
    parametrisation: Parametrisation

    def denoise(self, y: Tensor, sigma: Tensor, condition: Condition | None = None) -> Tensor:
        # In float64 where the device has it: a training step is found among a thousand close ones.
        c_in, c_skip, c_out, c_noise = self.parametrisation.coefficients(sigma.to(real(sigma.device)))
        dtype = self.dtype or y.dtype
        step = c_noise.to(torch.float32) if c_noise.dtype.is_floating_point and dtype != torch.float64 else c_noise
        x = rows_like(c_in.to(y.dtype), y) * y
        out = as_tensor(self.call(self.network, x.to(dtype), step, condition), "the network").to(y.dtype)
        if out.shape != y.shape:
            raise InputError(f"the network returned shape {tuple(out.shape)} for states {tuple(y.shape)}")
        return rows_like(c_skip.to(y.dtype), y) * y + rows_like(c_out.to(y.dtype), y) * out

    @property
    def dtype(self) -> torch.dtype | None:
        """The precision of its weights, None where it has none."""
        first = next(self.network.parameters(), None) if isinstance(self.network, nn.Module) else None
        return None if first is None else first.dtype


class Pretrained(Denoiser):
    """A denoiser made from a checkpoint by one of the `from_...` functions.

    - `ladder(n_levels, substeps)`: a ladder on the checkpoint's own schedule;
    - `given(condition)`: the same network with another condition, such as the empty prompt; both share one batch;
    - `decode(x)`: states as images with values from 0 to 1, None where the checkpoint does not make images;
      `images(x)`: the same as a list of Pillow's.

    >>> from crepe_diffusion.models import from_velocity
    >>> p = from_velocity(lambda x, t: x / (1 - 2 * t + 2 * t**2).unsqueeze(1) * (2 * t - 1).unsqueeze(1),
    ...                   event_shape=(3,), noise_at=1.0)                         # N(0, 1) data
    >>> p.predict(torch.ones(1, 3), torch.ones(1)).tolist()
    [[0.5, 0.5, 0.5]]
    >>> p.ladder(n_levels=3).n_levels
    3
    """

    def __init__(
        self,
        network: Network,
        event_shape: Sequence[int],
        condition: Any = None,
        *,
        encode: Callable[[Any], Condition | None] | None = None,
        decode: Decode | None = None,
        dtype: torch.dtype = torch.float32,
        process: Process | None = None,
    ):
        self.shared, self.encode = network, encode or _as_it_is
        several = isinstance(condition, Each)
        encoded = Each(tuple(map(self.encode, condition.conditions))) if several else self.encode(condition)
        super().__init__(network.denoise, event_shape, condition=encoded, dtype=dtype, process=process)
        self.decode = decode

    @property
    def network(self) -> Hashable:
        return (self.shared, structure(self.condition))

    def given(self, condition: Any) -> Pretrained:
        """The same model under another condition."""
        return Pretrained(
            self.shared,
            self.event_shape,
            condition,
            encode=self.encode,
            decode=self.decode,
            dtype=self.dtype,
            process=self.process(),
        )

    def images(self, x: Tensor, batch_size: int = 4) -> list[Any]:
        """Draws (n, *event) as n images of Pillow, decoded a few at once."""
        if self.decode is None:
            raise InputError("this model has no decoder: give decode=, a function from states to images from 0 to 1")
        try:
            from PIL import Image
        except ImportError:
            raise InputError("images need Pillow: pip install 'crepe-diffusion[diffusers]'") from None
        if x.ndim != 1 + len(self.event_shape):
            raise InputError(f"images takes draws (n, {', '.join(map(str, self.event_shape))}), got {tuple(x.shape)}")
        with torch.no_grad():
            pictures = [self._picture(z) for z in x.split(batch_size)]
        parts = [picture.clamp(0, 1).mul(255).round().to(torch.uint8).cpu() for picture in pictures]
        # One channel is gray: Pillow wants it without its axis.
        arrays = [image.movedim(0, -1).numpy() for part in parts for image in part]
        return [Image.fromarray(a[..., 0] if a.shape[-1] == 1 else a) for a in arrays]

    def _picture(self, z: Tensor) -> Tensor:
        assert self.decode is not None
        out = self.decode(z)
        if not isinstance(out, Tensor) or out.ndim != 4 or len(out) != len(z) or out.shape[1] not in (1, 3, 4):
            got = tuple(out.shape) if isinstance(out, Tensor) else f"an object of type {type(out).__name__!r}"
            raise InputError(f"decode must return images ({len(z)}, 1 or 3, height, width) from 0 to 1, got {got}")
        return out

    def ladder(
        self,
        n_levels: int,
        substeps: int = 1,
        *,
        sigma_min: float | None = None,
        sigma_max: float | None = None,
        finish: bool = True,
    ) -> Ladder:
        """Equal steps of the schedule that the network was trained on, between its least and its largest noise.

        A schedule that ends without signal starts below that, at a noise of at most 200 unless `sigma_max` says
        otherwise. With `finish`, draws are denoised from level 0 to no noise by one more step.
        """
        for name, value in (("n_levels", n_levels), ("substeps", substeps)):
            if not isinstance(value, int) or value < (2 if name == "n_levels" else 1):
                raise InputError(
                    f"{name} must be an integer of at least {2 if name == 'n_levels' else 1}, got {value!r}"
                )
        low, high = self.shared.parametrisation.ends
        low, high = (low if sigma_min is None else sigma_min), (high if sigma_max is None else sigma_max)
        if not 0 < low < high:
            raise InputError(f"a ladder needs 0 < sigma_min < sigma_max, got {low:g} and {high:g}")
        times = self.shared.parametrisation.spaced(low, high, (n_levels - 1) * substeps + 1)
        return Ladder(times, substeps, (0.0,) if finish else ())


def pixels(x: Tensor) -> Tensor:
    """Images from 0 to 1 of pixels from -1 to 1."""
    return x / 2 + 0.5


def _as_it_is(condition: Any) -> Condition | None:
    """Conditions that are tensors already; a number becomes one."""
    if isinstance(condition, (bool, int, float)):
        return torch.tensor(condition)
    if isinstance(condition, str):
        raise InputError(f"this model has no text encoder, got the prompt {condition!r}: give tensors as its condition")
    return condition
