"""Plain denoising by the proposal, without correction: what every sampler is compared with.

for i = M K, ..., 1
    x  ~  proposal(x_{t_{i-1}} | x_{t_i})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from crepe_diffusion.errors import InputError, StoppedError
from crepe_diffusion.models import Model
from crepe_diffusion.paths import denoise
from crepe_diffusion.processes import Process
from crepe_diffusion.progress import Callback, Track
from crepe_diffusion.proposals import Proposal
from crepe_diffusion.random import Stream
from crepe_diffusion.samplers.base import Column, Info
from crepe_diffusion.samplers.result import Independent
from crepe_diffusion.samplers.setup import finish, packed, positive, prepare, prepare_again
from crepe_diffusion.schedules import Ladder
from crepe_diffusion.targets import Target

__all__ = ["Plain"]


class Plain:
    """The uncorrected baseline: follow the proposal down, with no weights. Plain sampling if the target is a model.

    All arguments are those of `ReplicaExchange`. Costs `M * K` rows of each network per draw.

    >>> from crepe_diffusion.models import GaussianMixture
    >>> from crepe_diffusion.schedules import ladder
    >>> p = GaussianMixture(weights=[0.3, 0.7], means=[[-4.0], [3.0]], stds=[0.5, 0.4])
    >>> out = Plain(p, ladder.karras(31, 0.01, 20.0), seed=0).sample(200)
    >>> right = out.mean(lambda x: x[:, 0] > 0)
    >>> abs(right.value - 0.7) < 4 * right.error
    True
    """

    def __init__(
        self,
        target: Target | Model,
        ladder: Ladder,
        *,
        n_chains: int = 1,
        seed: int = 0,
        process: Process | None = None,
        proposal: Proposal | None = None,
        micro_batch: int | None = None,
        nonfinite: str = "raise",
        fit_samples: int = 256,
        start: dict[str, Tensor] | None = None,
    ):
        self.n_chains, self.seed, self.stream = positive("n_chains", n_chains), seed, Stream(seed)
        self.process, self.fit_samples = process, fit_samples
        self.evaluate = prepare(
            target,
            ladder,
            self.stream.at("setup"),
            process=process,
            proposal=proposal,
            micro_batch=micro_batch,
            nonfinite=nonfinite,
            fit_samples=fit_samples,
            start=start,
        )
        self.iteration = 0 if start is None else int(start["iteration"])
        self.x = self.evaluate.empty(self.n_chains)
        if start is not None:
            if start["x"].shape != self.x.shape:
                raise InputError(f"the snapshot holds draws {tuple(start['x'].shape)}, not {tuple(self.x.shape)}")
            self.x = start["x"].to(self.evaluate.device, copy=True)

    diagnostics = None
    draw_columns: Mapping[str, Column] = {}
    trace_columns: Mapping[str, Column] = {}

    def sample(self, n: int, *, progress: bool | None = None, callback: Callback | None = None) -> Independent:
        """`n` draws per chain in one pass; the same ones at every call, and others than those of `step`.

        `callback` is called after every step of the pass. If it stops the pass before the end, no draw is complete,
        and `StoppedError` is raised.
        """
        with Track(len(self.ladder.times) - 1, "steps", progress, callback) as track:
            x = self._descend(positive("n", n) * self.n_chains, self.stream, track)
        return Independent(x.cpu(), self.evaluate.counts.copy())

    def step(self) -> Info:
        """One fresh draw per chain."""
        self.x = self._descend(self.n_chains, self.stream.at("iteration", self.iteration + 1), None)
        self.iteration += 1
        return Info(self.iteration, self.evaluate.counts.rows)

    def _descend(self, rows: int, stream: Stream, track: Track | None) -> Tensor:
        evaluate, times = self.evaluate, self.ladder.times
        x = evaluate.noise(stream.at("noise"), rows)
        for i in range(len(times) - 1, 0, -1):
            x = denoise(evaluate, x, float(times[i - 1]), float(times[i]), stream.at(i))
            if track is not None and track.advance() and i > 1:
                raise StoppedError(f"stopped {i - 1} steps before the data end: no draw is complete")
        return finish(evaluate, x, stream.at("finish"))

    def output(self) -> Tensor:
        """The draws of the last `step`, (chains, *event)."""
        if not self.iteration:
            raise InputError("there are no draws before the first step: call step() first")
        return self.x

    def draw_row(self, info: Info) -> dict[str, np.ndarray]:
        return {}

    def trace_rows(self, infos: Sequence[Info]) -> dict[str, np.ndarray]:
        return {}

    def restart_diagnostics(self) -> None:
        """There are none."""

    @property
    def target(self) -> Target:
        return self.evaluate.target

    @target.setter
    def target(self, target: Target | Model) -> None:
        self.evaluate = prepare_again(
            self.evaluate,
            target,
            self.ladder,
            self.stream.at(self.iteration, "setup"),
            process=self.process,
            fit_samples=self.fit_samples,
        )

    @property
    def ladder(self) -> Ladder:
        return self.evaluate.ladder

    def snapshot(self) -> dict[str, Tensor]:
        """All that the next iterations depend on besides target, settings and seed."""
        return packed(self.evaluate, {"": {"x": self.x, "iteration": torch.tensor(self.iteration)}})
