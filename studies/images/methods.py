"""Samplers at equal rows: every method gets the same number of network rows for one target.

A walk from noise to data takes `n_steps` steps with any method; replica exchange cuts them into few levels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import crepe_diffusion as cd

__all__ = [
    "GUIDANCE",
    "REWARD",
    "Method",
    "Setting",
    "after_burn_in",
    "crepe",
    "families",
    "gibbs",
    "piloted",
    "plain",
    "runs_of",
    "smc",
]


@dataclass(frozen=True)
class Setting:
    """What all methods share: the noise levels, kernels, and how many states may be evaluated in all."""

    sigma_min: float
    sigma_max: float
    n_steps: int
    n_states: int
    process: cd.processes.Process | None = None
    n_finish: int = 0
    """Plain steps below level 0, which every draw takes."""

    def ladder(self, substeps: int) -> cd.Ladder:
        steps = cd.ladder.karras(self.n_steps // substeps + 1, self.sigma_min, self.sigma_max, substeps=substeps)
        below = cd.ladder.karras(self.n_finish + 1, self.sigma_min / 5, self.sigma_min).times if self.n_finish else ()
        return cd.ladder.of(steps.times, substeps, [float(t) for t in below][-2::-1])


Method = Callable[[cd.Target, Setting, int], cd.Result]


def plain(target: cd.Target, setting: Setting, seed: int) -> cd.Result:
    """What is usually done: follow the guided score, and trust it."""
    n = setting.n_states // (setting.n_steps + setting.n_finish)
    return cd.Plain(target, setting.ladder(1), process=setting.process, seed=seed).sample(n, progress=False)


def smc(weight: cd.Weight, substeps: int = 1, cost: int = 1, n_batches: int = 1, pool: str = "z") -> Method:
    """Every `substeps` steps, batches with unequal weights are resampled. `pool="equal"`: each is a run of its own."""

    def run(target: cd.Target, setting: Setting, seed: int) -> cd.Result:
        n = setting.n_states // (cost * setting.n_steps + 1 + setting.n_finish) // n_batches
        sampler = cd.SMC(
            target,
            setting.ladder(substeps),
            n_particles=n,
            n_batches=n_batches,
            pool=pool,
            weight=weight,
            process=setting.process,
            seed=seed,
        )
        return sampler.sample(progress=False)

    return run


def gibbs(n_particles: int = 32, substeps: int = 1, n_chains: int = 1) -> Method:
    def run(target: cd.Target, setting: Setting, seed: int) -> cd.Result:
        sweep = (n_particles - 1) * (setting.n_steps + 1) + setting.n_steps + n_particles * setting.n_finish
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
        iteration = steps.n_levels * substeps + setting.n_finish
        n = max(2, (setting.n_states // n_chains - setting.n_steps - 1) // iteration)
        chain = cd.ReplicaExchange(target, steps, n_chains=n_chains, process=setting.process, seed=seed)
        return chain.sample(n, progress=False)

    return run


def piloted(n_particles: int = 32, n_chains: int = 2) -> Method:
    """Replica exchange as the library recommends it: a pilot plans the levels and starts the replicas, and is paid."""

    def run(target: cd.Target, setting: Setting, seed: int) -> cd.Result:
        found = cd.pilot(
            target, setting.ladder(1), n=n_particles, process=setting.process, seed=seed + 1000, progress=False
        )
        plan = found.plan()
        begin = n_chains * plan.ladder.n_levels  # every replica is evaluated where it starts
        rows = (setting.n_states - begin) * found.state_rows - found.rows
        n = int(rows / n_chains / found.iteration_rows(plan.best.pairs, plan.best.substeps))
        chain = cd.ReplicaExchange(target, plan.ladder, pilot=found, n_chains=n_chains, seed=seed)
        return chain.sample(max(2, n), progress=False)

    return run


def families(out: cd.Result) -> float | None:
    """How many independent families count, `1 / sum_g W_g^2`: descendants of one draw at the noise end are one family.

    Draws cannot be worth more independent ones than that. None where families are not recorded (particle Gibbs).
    """
    if isinstance(out, cd.Chains):
        which = out.tours.flatten().unique(return_inverse=True)[1]
    elif isinstance(out, cd.Particles):
        which = out.eve
    else:
        return None
    shares = torch.zeros(int(which.max()) + 1, dtype=torch.float64).index_add(0, which, out.weights)
    return 1 / float(shares.square().sum())


def runs_of(out: cd.Result, n: int) -> Tensor:
    """The run to which each draw belongs, (rows,): its batch or its chain; n independent draws are one run.

    >>> p = cd.models.GaussianMixture([1.0], [[0.5]], [0.5])
    >>> steps = cd.ladder.karras(3, 0.1, 5.0)
    >>> runs_of(cd.SMC(p**2.0, steps, n_particles=2, n_batches=3).sample(progress=False), 2).tolist()
    [0, 0, 1, 1, 2, 2]
    >>> runs_of(cd.ReplicaExchange(p**2.0, steps, n_chains=3).sample(2, progress=False), 2).tolist()
    [0, 1, 2, 0, 1, 2]
    """
    if isinstance(out, cd.Chains):
        return torch.arange(out.n_chains).repeat(len(out.chains))
    if isinstance(out, cd.Particles):
        return torch.arange(out.n_batches).repeat_interleave(out.log_weights.shape[1])
    if isinstance(out, cd.samplers.Sweeps):
        n_sweeps, n_chains, n_particles = out.log_weights.shape
        return torch.arange(n_chains).repeat_interleave(n_particles).repeat(n_sweeps)
    return torch.arange(len(out.x)) // n


def after_burn_in(out: cd.Chains, share: float = 0.25) -> Tensor:
    """The draws without this share of the first iterations, whose rows were paid for all the same."""
    return out.chains[int(share * len(out.chains)) :].flatten(0, 1)


GUIDANCE: dict[str, Method] = {
    "plain CFG": plain,
    "FKC": smc(cd.FeynmanKac()),
    "RNE-SMC": smc(cd.PathWork()),
    "particle Gibbs": gibbs(),
    "CREPE": piloted(),
}
REWARD: dict[str, Method] = {
    "plain guidance": plain,
    "FKC": smc(cd.FeynmanKac(), cost=2),
    "RNE-SMC": smc(cd.PathWork()),
    "FK-steering": smc(cd.Steering()),
    "particle Gibbs": gibbs(),
    "CREPE": piloted(),
}
