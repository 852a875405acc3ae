"""A stranger's classes, in a module that a file can name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.models import Model
from crepe_diffusion.run import Experiment
from crepe_diffusion.samplers.base import Column, Info
from crepe_diffusion.samplers.setup import finish, packed, prepare, prepare_again


def never(log_alpha: Tensor, stream: cd.Stream) -> Tensor:
    """A rule that accepts nothing."""
    return torch.zeros_like(log_alpha, dtype=torch.bool)


@dataclass(frozen=True)
class Counting(cd.Bounce):
    """A subclass of ours with a field of its own."""

    label: str = "mine"


@dataclass(frozen=True)
class Holder:
    """Takes a word, a number or a class, and an object of any kind."""

    form: str | float | type[cd.Bounce] = "fisher"
    inner: cd.Bounce | None = None


class Restarting:
    """A sampler that can go on: an autoregressive walk at level 0 whose state is all that it needs."""

    def __init__(
        self,
        target: cd.Target | Model,
        ladder: cd.Ladder,
        *,
        n_chains: int = 1,
        seed: int = 0,
        memory: float = 0.5,
        start: dict[str, Tensor] | None = None,
    ):
        self.n_chains, self.seed, self.memory, self.stream = n_chains, seed, memory, cd.Stream(seed)
        self.evaluate = prepare(
            target,
            ladder,
            self.stream.at("setup"),
            process=None,
            proposal=None,
            micro_batch=None,
            nonfinite="raise",
            fit_samples=16,
            start=start,
        )
        self.iteration = 0 if start is None else int(start["iteration"])
        self.x = self.evaluate.empty(n_chains) if start is None else start["x"].clone()

    diagnostics = None

    @property
    def draw_columns(self) -> Mapping[str, Column]:
        return {"step": Column("float64", (self.n_chains,), ("chain",))}

    @property
    def trace_columns(self) -> Mapping[str, Column]:
        return {"parity": Column("int16")}

    def step(self) -> Info:
        self.iteration += 1
        noise = self.stream.at(self.iteration).normal(tuple(self.x.shape), dtype=self.x.dtype)
        seen = self.evaluate(self.x, self.ladder.times[:1].expand(self.n_chains))
        self.last = self.x
        self.x = self.memory * self.x + (1 - self.memory) * seen.predictions[0] + noise + seen.reward[:, None]
        return Info(self.iteration, self.evaluate.counts.rows)

    def output(self) -> Tensor:
        return finish(self.evaluate, self.x, self.stream.at(self.iteration, "finish"))

    def draw_row(self, info: Info) -> dict[str, np.ndarray]:
        return {"step": (self.x - self.last).flatten(1).norm(dim=1).numpy()}

    def trace_rows(self, infos: Sequence[Info]) -> dict[str, np.ndarray]:
        return {"parity": np.array([i.iteration % 2 for i in infos])}

    def snapshot(self) -> dict[str, Tensor]:
        return packed(self.evaluate, {"": {"x": self.x, "iteration": torch.tensor(self.iteration)}})

    def restart_diagnostics(self) -> None:
        """There are none."""

    @property
    def target(self) -> cd.Target:
        return self.evaluate.target

    @target.setter
    def target(self, target: cd.Target | Model) -> None:
        self.evaluate = prepare_again(
            self.evaluate, target, self.ladder, self.stream.at("again"), process=None, fit_samples=16
        )

    @property
    def ladder(self) -> cd.Ladder:
        return self.evaluate.ladder


def latents() -> Experiment:
    """States of four channels with a decoder, as a latent diffusion has."""
    model = cd.models.GaussianMixture([1.0], torch.zeros(1, 4, 8, 8), [1.0], dtype=torch.float32)
    return Experiment(model.as_target(), decode=lambda x: x[:, :3].sigmoid().repeat_interleave(2, -1))
