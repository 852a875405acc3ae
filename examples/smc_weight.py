"""A weight and a resampling rule for SMC in a file of one's own.

Cautious   gamma_m = p_m exp(share r_m) above level 0 and p_0 exp(r_0) at it
Killing    particle i stays with probability w_i / max w, and is replaced by a draw from the weights otherwise

Run it: `python examples/smc_weight.py`, or `crepe-diffusion run examples/smc_weight.toml --out runs/smc`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.evaluate import Evaluator
from crepe_diffusion.processes import Evaluation
from crepe_diffusion.samplers.resampling import ancestors


@dataclass(frozen=True)
class Cautious(cd.Weight):
    """Only a share of the reward counts on the way; all of it counts at level 0, so the target stays the same.

    Fewer particles die early where rewards of noisy predictions mislead.
    """

    share: float = 0.5

    def factor(self, level: int) -> float:
        return self.share if level else 1.0

    def first(self, evaluate: Evaluator, x: Tensor, seen: Evaluation) -> Tensor:
        return self.factor(evaluate.ladder.n_levels - 1) * seen.reward

    def descend(
        self, evaluate: Evaluator, x: Tensor, seen: Evaluation, m: int, stream: cd.Stream
    ) -> tuple[Tensor, Evaluation, Tensor]:
        x, below, gained = super().descend(evaluate, x, seen, m, stream)
        left_out = (1 - self.factor(m)) * seen.reward, (1 - self.factor(m - 1)) * below.reward
        return x, below, gained + left_out[0] - left_out[1]


@dataclass(frozen=True)
class Killing:
    """Copies of i: `w_i / max w + (n - 1 / max w) w_i = n w_i` in the mean."""

    def __call__(self, log_weights: Tensor, stream: cd.Stream) -> tuple[Tensor, Tensor]:
        b, n = log_weights.shape
        weights = log_weights.exp()
        stays = stream.at("stay").uniform((b, n)) * weights.amax(1, keepdim=True) < weights
        drawn = ancestors(weights, stream.at("replace").uniform((b, n)))
        equal = torch.full_like(log_weights, 1 / n).log()
        return torch.where(stays, torch.arange(n), drawn), equal


def main(n_batches: int = 16) -> None:
    p = cd.models.GaussianMixture(weights=[0.3, 0.7], means=[[-4.0], [3.0]], stds=[0.5, 0.4])
    target = p.tilt(lambda x: -x[:, 0])
    smc = cd.SMC(
        target,
        cd.ladder.karras(17, 0.05, 20.0),
        n_particles=64,
        n_batches=n_batches,
        weight=Cautious(share=0.3),
        resampling=Killing(),
    )
    out = smc.sample()
    print("share of the left mode", out.mean(lambda x: x[:, 0] < 0), "log Z", out.log_z)


if __name__ == "__main__":
    main()
