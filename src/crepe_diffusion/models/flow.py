"""Flow matching: a velocity field along an affine path becomes a denoiser.

x_t = alpha(t) x_0 + s(t) eps,    u = alpha' D + s' E[eps | x_t]    =>    D = (s' x - s u) / (s' alpha - s alpha')
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from crepe_diffusion.errors import InputError
from crepe_diffusion.models.base import check_arguments
from crepe_diffusion.models.parametrisations import AffinePath, Parametrisation, RectifiedFlow
from crepe_diffusion.models.pretrained import Decode, Network, Pretrained
from crepe_diffusion.processes import Process

__all__ = ["from_velocity"]


def from_velocity(
    velocity: Callable[..., Tensor],
    event_shape: Sequence[int],
    *,
    noise_at: float,
    path: Callable[[Tensor], Any] | None = None,
    condition: Any = None,
    decode: Decode | None = None,
    dtype: torch.dtype = torch.float32,
    process: Process | None = None,
) -> Pretrained:
    """A flow `velocity(x, t)`, or `velocity(x, t, condition)`, with one time per row, as a model.

    `noise_at` is the time of pure noise: 0 in `flow_matching` and `torchcfm`, 1 in diffusers and SiT; data are at the
    other end of [0, 1]. `path(t)` gives `(alpha, s, alpha', s')` of `x_t = alpha x_0 + s eps`, as the schedulers of
    `flow_matching` do; without it the path is the straight line. The noise must have been drawn independently of the
    data: after minibatch optimal transport, reflow or distillation a velocity is no denoiser.

    >>> p = from_velocity(lambda x, t: torch.zeros_like(x), event_shape=(2,), noise_at=0)
    >>> p.predict(torch.full((1, 2), 4.0), torch.tensor([3.0])).tolist()           # x = y / (1 + sigma) = D
    [[1.0, 1.0]]
    """
    if not callable(velocity):
        raise InputError(f"a flow is a function velocity(x, t), got {velocity!r}")
    if noise_at not in (0, 1):
        raise InputError(
            f"noise_at is the time of pure noise, 0 (flow_matching, torchcfm) or 1 (diffusers, SiT), got {noise_at!r}"
        )
    if path is not None and not callable(path):
        raise InputError(f"a path is a function of the time that gives (alpha, s, alpha', s'), got {path!r}")
    parametrisation: Parametrisation = RectifiedFlow(scale=1.0, backwards=noise_at == 0)
    if path is not None:
        parametrisation = AffinePath(path, float(noise_at), 1.0 - float(noise_at))
        _ = parametrisation.ends  # a path that runs the other way is refused here
    network = Network(velocity, _velocity, parametrisation)
    made = Pretrained(network, event_shape, condition, decode=decode, dtype=dtype, process=process)
    # After the condition was read: a prompt that nothing can encode is the better explanation.
    check_arguments(velocity, 2 if condition is None else 3)
    return made


def _velocity(network: Any, x: Tensor, t: Tensor, condition: Any) -> Tensor:
    t = t.to(x.dtype)
    out: Tensor = network(x, t) if condition is None else network(x, t, condition)
    return out
