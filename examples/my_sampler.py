"""A sampler of one's own that runs in folders: independent descents from the noise end, with an acceptance test.

    x', w' from a walk down by the proposal,  w' = exp(log_work);    accepted with probability min(1, w' / w)

The law of (x, w) that this leaves invariant has the target as the law of x, as far as `log_work` is exact. It is the
simplest corrected sampler, and slow wherever weights vary much; `cd.SMC` in a run does the same with many particles.
Run it: `python examples/my_sampler.py`, or `crepe-diffusion run examples/my_sampler.toml --out runs/own`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.evaluate import Evaluator
from crepe_diffusion.kernels import metropolis
from crepe_diffusion.kernels.swap import Accept
from crepe_diffusion.models import Model
from crepe_diffusion.samplers.base import Column, Info
from crepe_diffusion.samplers.setup import finish, packed, prepare, prepare_again


class Independence:
    """Costs `M K + 1` rows per iteration and chain. `accept`: the rule."""

    diagnostics = None  # no levels to exchange
    draw_columns: Mapping[str, Column] = {}
    trace_columns: Mapping[str, Column] = {}

    def __init__(
        self,
        target: cd.Target | Model,
        ladder: cd.Ladder,
        *,
        n_chains: int = 1,
        seed: int = 0,
        process: cd.processes.Process | None = None,
        proposal: cd.Proposal | None = None,
        accept: Accept = metropolis,
        micro_batch: int | None = None,
        nonfinite: str = "raise",
        fit_samples: int = 256,
        start: dict[str, Tensor] | None = None,
    ):
        self.n_chains, self.seed, self.stream = n_chains, seed, cd.Stream(seed)
        self.process, self.accept, self.fit_samples = process, accept, fit_samples
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
        if start is None:
            self.iteration = 0
            self.x, self.log_w = self.descent(self.evaluate, self.stream.at("initial"))
        else:
            self.iteration = int(start["iteration"])
            self.x, self.log_w = start["x"].clone(), start["log_w"].clone()

    # -- the algorithm -----------------------------------------------------------------------------------

    def descent(self, evaluate: Evaluator, stream: cd.Stream) -> tuple[Tensor, Tensor]:
        """New points at level 0, (chains, *event), and their log-weights."""
        weight, ladder = cd.PathWork(), evaluate.ladder
        x = evaluate.noise(stream.at("noise"), self.n_chains)
        seen = evaluate(x, ladder.times[-1:].expand(self.n_chains))
        log_w = weight.first(evaluate, x, seen)
        for m in range(ladder.n_levels - 1, 0, -1):
            x, seen, gained = weight.descend(evaluate, x, seen, m, stream.at(m))
            log_w = log_w + gained
        return x, log_w

    def step(self) -> Info:
        stream = self.stream.at(self.iteration + 1)
        x, log_w = self.descent(self.evaluate, stream.at("walk"))
        accepted = self.accept(log_w - self.log_w, stream.at("accept"))
        self.x = torch.where(accepted.reshape(-1, *[1] * (x.ndim - 1)), x, self.x)
        self.log_w = torch.where(accepted, log_w, self.log_w)
        self.iteration += 1
        return Info(self.iteration, self.evaluate.counts.rows)

    # -- what a run needs besides ------------------------------------------------------------------------

    def output(self) -> Tensor:
        return finish(self.evaluate, self.x, self.stream.at(self.iteration, "finish"))

    def snapshot(self) -> dict[str, Tensor]:
        state = {"x": self.x, "log_w": self.log_w, "iteration": torch.tensor(self.iteration)}
        return packed(self.evaluate, {"": state})

    @property
    def ladder(self) -> cd.Ladder:
        return self.evaluate.ladder

    @property
    def target(self) -> cd.Target:
        return self.evaluate.target

    @target.setter
    def target(self, target: cd.Target | Model) -> None:
        stream = self.stream.at(self.iteration, "target")
        evaluate = prepare_again(
            self.evaluate, target, self.ladder, stream.at("setup"), process=self.process, fit_samples=self.fit_samples
        )
        # The weights were those of the old target, so the chains start again.
        self.x, self.log_w = self.descent(evaluate, stream)
        self.evaluate = evaluate

    def draw_row(self, info: Info) -> dict[str, np.ndarray]:
        return {}

    def trace_rows(self, infos: Sequence[Info]) -> dict[str, np.ndarray]:
        return {}

    def restart_diagnostics(self) -> None:
        """There are none."""


def left_share(n_draws: int, accept: Accept = metropolis) -> Tensor:
    """Share of the left mode in each of 64 chains, for a tilted mixture; exactly 0.712."""
    p = cd.models.GaussianMixture(weights=[0.3, 0.7], means=[[-4.0], [3.0]], stds=[0.5, 0.4])
    target = p.tilt(lambda x: -x[:, 0] / 4)
    chain = Independence(target, cd.ladder.karras(3, 0.02, 20.0, substeps=8), n_chains=64, accept=accept)
    draws = []
    for _ in range(n_draws):
        chain.step()
        draws.append(chain.output()[:, 0] < 0)
    return torch.stack(draws[n_draws // 4 :]).double().mean(0)


def main(n_draws: int = 100) -> None:
    shares = left_share(n_draws)
    print(f"share of the left mode: {shares.mean():.3f} +- {shares.std() / 8:.3f}, exactly 0.712")


if __name__ == "__main__":
    main()
