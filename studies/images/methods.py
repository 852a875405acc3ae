"""Samplers at equal rows: every method gets the same number of network rows for one target.

A walk from noise to data takes `N_STEPS` steps with any method; replica exchange cuts them into few levels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

import crepe_diffusion as cd

__all__ = ["GUIDANCE", "REWARD", "Method", "Setting", "after_burn_in", "crepe", "gibbs", "plain", "smc"]


@dataclass(frozen=True)
class Setting:
    """What all methods share: the noise levels, kernels, and how many states may be evaluated in all."""

    sigma_min: float
    sigma_max: float
    n_steps: int
    n_states: int
    process: cd.processes.Process | None = None
    n_finish: int = 0
    """Plain steps below level 0, as many per decade of noise as above it."""

    def ladder(self, substeps: int) -> cd.Ladder:
        steps = cd.ladder.karras(self.n_steps // substeps + 1, self.sigma_min, self.sigma_max, substeps=substeps)
        below = cd.ladder.karras(self.n_finish + 1, self.sigma_min / 5, self.sigma_min).times if self.n_finish else ()
        return cd.ladder.of(steps.times, substeps, [float(t) for t in below][-2::-1])


Method = Callable[[cd.Target, Setting, int], cd.Result]


def plain(target: cd.Target, setting: Setting, seed: int) -> cd.Result:
    """What is usually done: follow the guided score, and trust it."""
    n = setting.n_states // setting.n_steps
    return cd.Plain(target, setting.ladder(1), process=setting.process, seed=seed).sample(n, progress=False)


def smc(weight: cd.Weight, substeps: int = 4, cost: int = 1, n_batches: int = 1) -> Method:
    """Batches are independent runs and count equally, as a user of one of them would see it."""

    def run(target: cd.Target, setting: Setting, seed: int) -> cd.Result:
        n = setting.n_states // (cost * setting.n_steps + 1) // n_batches
        sampler = cd.SMC(
            target,
            setting.ladder(substeps),
            n_particles=n,
            n_batches=n_batches,
            pool="equal",
            weight=weight,
            process=setting.process,
            seed=seed,
        )
        return sampler.sample(progress=False)

    return run


def gibbs(n_particles: int = 64, substeps: int = 4, n_chains: int = 1) -> Method:
    def run(target: cd.Target, setting: Setting, seed: int) -> cd.Result:
        sweep = (n_particles - 1) * (setting.n_steps + 1) + setting.n_steps
        n = max(1, setting.n_states // n_chains // sweep - 1)  # the first pass costs about as much as a sweep
        chain = cd.ParticleGibbs(
            target,
            setting.ladder(substeps),
            n_particles=n_particles,
            n_chains=n_chains,
            process=setting.process,
            seed=seed,
        )
        return chain.sample(n, progress=False)

    return run


def crepe(substeps: int = 16, n_chains: int = 8) -> Method:
    """Replica exchange from plain trajectories; nothing is dropped yet, see `after_burn_in`."""

    def run(target: cd.Target, setting: Setting, seed: int) -> cd.Result:
        steps = setting.ladder(substeps)
        n = max(2, (setting.n_states // n_chains - setting.n_steps - 1) // (steps.n_levels * substeps))
        chain = cd.ReplicaExchange(target, steps, n_chains=n_chains, process=setting.process, seed=seed)
        return chain.sample(n, progress=False)

    return run


def after_burn_in(out: cd.Chains, share: float = 0.25) -> Tensor:
    """The draws without this share of the first iterations, whose rows were paid for all the same."""
    return out.chains[int(share * len(out.chains)) :].flatten(0, 1)


GUIDANCE: dict[str, Method] = {
    "plain CFG": plain,
    "FKC": smc(cd.FeynmanKac()),
    "RNE-SMC": smc(cd.PathWork()),
    "particle Gibbs": gibbs(),
    "CREPE": crepe(),
}
REWARD: dict[str, Method] = {
    "plain guidance": plain,
    "FKC": smc(cd.FeynmanKac(), cost=2),
    "RNE-SMC": smc(cd.PathWork()),
    "twisted": smc(cd.Twisted()),
    "FK-steering": smc(cd.Steering()),
    "particle Gibbs": gibbs(),
    "CREPE": crepe(),
}
