"""Experiments that run in seconds, on models whose every answer is known: `crepe-diffusion list`.

Each function is a builder: its arguments are the `[options]` of a configuration, and `presets/` holds one to start
from. They are also examples of how to write your own.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from crepe_diffusion.errors import InputError
from crepe_diffusion.models import GaussianMixture, TokenTable
from crepe_diffusion.random import Stream
from crepe_diffusion.run import Experiment
from crepe_diffusion.targets import guided

__all__ = ["masked_tokens", "mixture_guidance", "mixture_tilt", "plane_tempering"]


def preset(name: str) -> dict[str, Any]:
    """The configuration that a built-in experiment starts from."""
    return tomllib.loads((files("crepe_diffusion.presets") / f"{name}.toml").read_text("utf-8"))


def linear(x: Tensor, slope: float = 1.0, axis: int = 0) -> Tensor:
    """`slope * x[axis]`."""
    return slope * x.flatten(1)[:, axis]


def near(x: Tensor, centre: float = 0.0, width: float = 1.0, axis: int = 0) -> Tensor:
    """`-((x[axis] - centre) / width)^2 / 2`."""
    return -0.5 * ((x.flatten(1)[:, axis] - centre) / width) ** 2


def coordinate(axis: int) -> Any:
    return lambda x: x.flatten(1)[:, axis]


MIXTURE_REWARDS: dict[str, Callable[..., Tensor]] = {"linear": linear, "near": near}


def mixture_tilt(
    weights: list[float] = [0.3, 0.5, 0.2],  # noqa: B006 - options are read, never changed
    means: list[float] = [-4.0, 0.0, 3.0],  # noqa: B006
    stds: list[float] = [0.5, 0.8, 0.4],  # noqa: B006
) -> Experiment:
    """A Gaussian mixture on a line, tilted by rewards of kind `linear` or `near`."""
    model = GaussianMixture(weights, [[m] for m in means], stds)
    last = len(means) - 1
    return Experiment(
        model.as_target(),
        rewards=MIXTURE_REWARDS,
        scalars={"x": coordinate(0), "last mode": lambda x: model.responsibilities(x)[:, last]},
        defaults=preset("mixture-tilt"),
    )


def plane_tempering(beta: float = 2.0, n_modes: int = 6, radius: float = 5.0) -> Experiment:
    """Modes of unequal width on a circle, tempered by `beta`."""
    if n_modes < 2:
        raise InputError(f"n_modes must be at least 2, got {n_modes!r}")
    angle = torch.arange(n_modes, dtype=torch.float64) * (2 * torch.pi / n_modes)
    means = radius * torch.stack([angle.cos(), angle.sin()], 1)
    stds = torch.linspace(0.3, 0.8, n_modes, dtype=torch.float64)
    model = GaussianMixture(torch.linspace(1.0, 2.0, n_modes), means, stds)
    return Experiment(
        model**beta,
        rewards=MIXTURE_REWARDS,
        scalars={
            "x": coordinate(0),
            "y": coordinate(1),
            "first mode": lambda x: model.responsibilities(x)[:, 0],
        },
        defaults=preset("plane-tempering"),
    )


def mixture_guidance(scale: float = 2.0) -> Experiment:
    """Guidance of strength `scale` towards a class whose modes overlap with the others."""
    means = [[-4.0, 0.0], [0.0, 1.0], [3.0, -1.0]]
    stds = [0.6, 0.8, 0.5]
    unconditional = GaussianMixture([0.4, 0.35, 0.25], means, stds)
    conditional = GaussianMixture([0.05, 0.35, 0.6], means, stds)
    return Experiment(
        guided(conditional, unconditional, scale),
        rewards=MIXTURE_REWARDS,
        scalars={"x": coordinate(0), "last mode": lambda x: conditional.responsibilities(x)[:, 2]},
        defaults=preset("mixture-guidance"),
    )


def token_count(p: Tensor, token: int = 0) -> Tensor:
    """How often a token is expected to occur."""
    return p[..., token].sum(-1)


def masked_tokens(length: int = 4, vocab_size: int = 3, seed: int = 0) -> Experiment:
    """A random joint law of a few tokens under the masked process, tilted by rewards of kind `token-count`."""
    if vocab_size**length > 4096:
        raise InputError(f"a table of {vocab_size}^{length} entries is too large; 4096 are plenty")
    logits = Stream(seed).at("table").normal((1, vocab_size**length)).reshape((vocab_size,) * length)
    model = TokenTable(logits.exp(), kind="masked")
    return Experiment(
        model.as_target(),
        rewards={"token-count": token_count},
        scalars={
            **{f"token {v}": _occurrences(v) for v in range(vocab_size)},
            "log p": model.log_prob,
        },
        defaults=preset("masked-tokens"),
    )


def _occurrences(token: int) -> Any:
    return lambda x: (x == token).sum(-1).to(torch.float64)
