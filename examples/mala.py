"""Two explorers of one's own, in one file: MALA, and a Bounce of random length.

    MALA   y = x + h S(x) + sqrt(2 h) xi,    log alpha = log pi_t(y) - log pi_t(x) + log q(x from y) - log q(y from x)

Run it: `python examples/mala.py`, or `crepe-diffusion run examples/mala.toml --out runs/mala`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.batches import rows_like
from crepe_diffusion.evaluate import Evaluator
from crepe_diffusion.kernels import State, metropolis
from crepe_diffusion.paths import log_target_ratio
from crepe_diffusion.processes import Isotropic


@dataclass(frozen=True)
class Mala:
    """Langevin with an acceptance test, `h = scale t^2`; one evaluation per row.

    Exact for Gaussian data at any step; otherwise as exact as `Process.log_density_ratios`.
    """

    scale: float = 0.1
    by_rows: ClassVar[bool] = True  # several processes may move their own rows each

    def check(self, evaluate: Evaluator) -> None:
        if evaluate.process.is_discrete:
            raise cd.InputError("MALA is for Gaussian diffusions; use SingleToken for tokens")

    def __call__(self, state: State, evaluate: Evaluator, stream: cd.Stream) -> tuple[State, Tensor]:
        process, t = evaluate.process, evaluate.ladder.levels[state.level.flatten()]
        h = rows_like(self.scale * t * t, state.x).to(state.x.dtype)
        noise = process.project(stream.at("noise").normal(tuple(state.x.shape), dtype=state.x.dtype))
        y = state.x + h * process.project(state.seen.drift) + (2 * h).sqrt() * noise
        seen = evaluate(y, t)
        back = (state.x - y - h * process.project(seen.drift)) / (2 * h).sqrt()
        log_q = (noise.square() - back.square()).flatten(1).sum(1, dtype=torch.float64) / 2
        log_alpha = log_target_ratio(evaluate, state.x, y, state.seen, seen, t) + log_q
        accepted = metropolis(log_alpha, stream.at("accept"))
        x, seen = state.take(accepted, y, seen)
        return State(x, seen, state.level), accepted


@dataclass(frozen=True)
class RandomBounce(cd.Bounce):
    """A Bounce of 1 to `n_steps` sub-steps; the number is drawn before the move, so the law stays invariant."""

    def __call__(self, state: State, evaluate: Evaluator, stream: cd.Stream) -> tuple[State, Tensor]:
        n = 1 + int(stream.at("length").uniform((1,)) * self.n_steps)
        return cd.Bounce.__call__(replace(self, n_steps=n), state, evaluate, stream.at("bounce"))


def variance_error(explorer: object, n_draws: int = 150) -> float:
    """Relative error of the variance of p**2 for Gaussian data on a ladder of two levels, moved by the explorer."""
    levels = cd.ladder.of([0.5, 0.6, 0.7], substeps=2)
    t2 = levels.times.square().reshape(1, -1, 1)
    exact = cd.processes.Gaussian(information=Isotropic(levels.times, t2 / (t2 + 0.25), torch.zeros(1, 4)))
    p = cd.models.GaussianMixture([1.0], [[0.0] * 4], [0.5], process=exact)
    chain = cd.ReplicaExchange(p**2.0, levels, n_chains=200, seed=1, explorer=explorer)
    return float(chain.sample(n_draws, burn_in=20).x.var() / (0.5 / 2) - 1)


def main(n_draws: int = 150) -> None:
    print("relative error of a variance, standard error about 0.005")
    for explorer in (Mala(0.5), RandomBounce(2), cd.Langevin(5.0)):
        print(f"{explorer!s:24}{variance_error(explorer, n_draws):8.3f}")


if __name__ == "__main__":
    main()
