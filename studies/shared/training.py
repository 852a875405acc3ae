"""Train a network: Adam, an average of the weights, checkpoints to continue from. EDM's loss, unless given another.

    loss  =  E[ weight(sigma) mean_i (D(x + sigma noise, sigma) - x)_i^2 ],    log sigma ~ N(noise_mean, noise_std^2)

Every step draws from a generator that is seeded by the number of the step, so a training that was stopped and resumed
gives the same weights as one that was not.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

import crepe_diffusion as cd
from crepe_diffusion.models import EDM
from crepe_diffusion.run import publish

__all__ = ["Settings", "load_weights", "loss", "save_tensors", "save_weights", "train"]

Trained = TypeVar("Trained", bound=nn.Module)


@dataclass(frozen=True)
class Settings:
    """How to train: noise is `exp(N(noise_mean, noise_std^2))`; the rate warms up, then falls as a cosine.

    `average` is the share of the averaged weights that a step keeps, `clip` the largest norm of a gradient.

    >>> settings = Settings(n_steps=1000, rate=1e-3, warm_up=100)
    >>> [round(1e3 * settings.rate_at(step), 2) for step in (0, 99, 500, 1000)]
    [0.01, 0.98, 0.5, 0.0]
    """

    n_steps: int
    batch: int = 1024
    rate: float = 1e-3
    warm_up: int = 500
    average: float = 0.999
    noise_mean: float = -1.2
    noise_std: float = 1.2
    clip: float = 1.0
    seed: int = 0

    def rate_at(self, step: int) -> float:
        """The learning rate of this step, the first of which is 0."""
        through = min(1.0, step / self.n_steps)
        return self.rate * min(1.0, (step + 1) / self.warm_up) * 0.5 * (1 + math.cos(math.pi * through))


def loss(model: EDM, batch: Tensor | tuple[Tensor, Tensor], settings: Settings, generator: torch.Generator) -> Tensor:
    """The weighted squared error of one batch x (rows, *event), or (x, labels), at one noise level per row."""
    x, *label = batch if isinstance(batch, tuple) else (batch,)
    sigma = (settings.noise_mean + settings.noise_std * torch.randn(len(x), generator=generator)).exp()
    noise = torch.randn(x.shape, generator=generator)
    y = x + noise * sigma.reshape(-1, *[1] * (x.ndim - 1))
    return (model.weight(sigma) * (model(y, sigma, *label) - x).square().flatten(1).mean(1)).mean()


def train(
    model: Trained,
    batches: Callable[[int, torch.Generator], Tensor | tuple[Tensor, Tensor]],
    settings: Settings,
    folder: Path,
    *,
    objective: Callable[[Any, Any, Settings, torch.Generator], Tensor] = loss,
    validate: Callable[[Trained], float] | None = None,
    every: int = 500,
) -> Iterator[dict[str, float]]:
    """Train in place; yields a line of the log after every `every` steps, once their checkpoint is written.

    `batches(n, generator)` draws n samples, or n samples and their labels, and `objective` is the loss of such a batch.
    Continues from the checkpoint in `folder` if there is one. At every yield
    `folder/average.safetensors` holds the averaged weights; at the end the model has them.

    >>> import tempfile
    >>> class Line(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layer = torch.nn.Linear(1, 1)
    ...     def forward(self, y, c_noise):
    ...         return self.layer(y)
    >>> model, settings = EDM(Line(), sigma_data=1.0), Settings(n_steps=20, batch=16)
    >>> draw = lambda n, generator: torch.randn(n, 1, generator=generator)
    >>> [line["step"] for line in train(model, draw, settings, Path(tempfile.mkdtemp()), every=10)]
    [10, 20]
    """
    average = copy.deepcopy(model).eval().requires_grad_(False)
    # One pass over the weights instead of a dozen: 8 for 39 ms with 6 million of them.
    optimiser = torch.optim.Adam(model.parameters(), lr=settings.rate, betas=(0.9, 0.99), fused=True)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "checkpoint.safetensors"
    step = _restore(checkpoint, model, average, optimiser, settings) if checkpoint.exists() else 0
    total, n, began = 0.0, 0, time.perf_counter()
    while step < settings.n_steps:
        # Torch's generator looks at the low 32 bits of its seed alone; an odd factor keeps the trainings apart.
        generator = torch.Generator().manual_seed((settings.seed * 0x9E3779B1 + step) % 2**32)
        for group in optimiser.param_groups:
            group["lr"] = settings.rate_at(step)
        value = objective(model, batches(settings.batch, generator), settings, generator)
        optimiser.zero_grad(set_to_none=True)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimiser.step()
        step += 1
        with torch.no_grad():
            keep = min(settings.average, (1 + step) / (10 + step))
            for a, b in zip(average.parameters(), model.parameters(), strict=True):
                a.lerp_(b, 1 - keep)
        total, n = total + value.item(), n + 1
        if not math.isfinite(total):
            raise FloatingPointError(f"the loss is not finite at step {step}; the checkpoint before it is kept")
        if step % every == 0 or step == settings.n_steps:
            line = {"step": step, "loss": total / n, "seconds": time.perf_counter() - began}
            if validate is not None:
                line["validation"] = validate(average)
            publish(folder / "average.safetensors", save(average.state_dict()))
            publish(checkpoint, _pack(step, model, average, optimiser, settings))
            with (folder / "log.jsonl").open("a") as log:
                log.write(json.dumps(line) + "\n")
            total, n, began = 0.0, 0, time.perf_counter()
            yield line
    model.load_state_dict(average.state_dict())


def _pack(step: int, model: nn.Module, average: nn.Module, optimiser: torch.optim.Adam, settings: Settings) -> bytes:
    tensors = {f"model.{k}": v for k, v in model.state_dict().items()}
    tensors |= {f"average.{k}": v for k, v in average.state_dict().items()}
    for name, p in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            tensors[f"{key}.{name}"] = optimiser.state[p][key]
    return save(tensors, {"step": str(step), "settings": json.dumps(asdict(settings))})


def _restore(path: Path, model: nn.Module, average: nn.Module, optimiser: torch.optim.Adam, settings: Settings) -> int:
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    before = json.loads(metadata["settings"])
    if before != asdict(settings):
        changed = {k: (v, asdict(settings)[k]) for k, v in before.items() if v != asdict(settings)[k]}
        raise cd.InputError(f"{path} was written with other settings {changed}; choose another folder to start again")
    tensors = load_file(path)
    for prefix, module in (("model", model), ("average", average)):
        module.load_state_dict(
            {k.removeprefix(f"{prefix}."): v for k, v in tensors.items() if k.startswith(f"{prefix}.")}
        )
    step = int(metadata["step"])
    for name, p in model.named_parameters():
        optimiser.state[p] = {
            "step": torch.tensor(float(step)),
            "exp_avg": tensors[f"exp_avg.{name}"],
            "exp_avg_sq": tensors[f"exp_avg_sq.{name}"],
        }
    return step


def save_weights(
    path: Path, model: torch.nn.Module, about: dict[str, str], others: dict[str, Tensor] | None = None
) -> None:
    """Write the model's weights with `about`, the facts needed to use them, and other tensors beside them."""
    save_tensors(path, {**model.state_dict(), **(others or {})}, about)


def save_tensors(path: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    """Write tensors with the facts needed to use them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    publish(path, save({name: value.contiguous() for name, value in tensors.items()}, about))


def load_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the facts that `save_weights` wrote."""
    if not path.exists():
        raise cd.InputError(f"no weights at {path}; save_weights writes such a file")
    with safe_open(path, "pt") as file:
        about = file.metadata() or {}
    return load_file(path), about
