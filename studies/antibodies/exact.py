"""Three free residues, all 8,000 sequences: how far is each sampler from the enumerated law?

    TV  =  1/2 sum_x |share of x among the draws - pi(x)|

The floor is the TV that as many independent draws of `pi` show as the rows pay for, at k rows of each model for a draw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import crepe_diffusion as cd
from studies.antibodies.design import Known, N, enumerated

__all__ = ["METHODS", "Law", "floor", "laws", "measure", "total_variation"]


@dataclass(frozen=True)
class Law:
    """A target over k residues, its probabilities (20^k,), and its log Z."""

    name: str
    target: cd.Target
    probabilities: Tensor
    log_z: float
    k: int

    @property
    def ladder(self) -> cd.Ladder:
        """Where exponents do not sum to 1, levels between the ends would temper the coins of masking as well, and draws
        would differ in weight for that alone; from end to end no coin is thrown."""
        return cd.ladder.linear(self.k + 1 if sum(self.target.exponents) == 1 else 2)


def laws(
    sapiens: Known, antiberty: Known, without_loops: Known, parent: Tensor, log_human: Tensor | None = None
) -> list[Law]:
    """Tempering, composition, guidance and tilts of k residues; `parent` (k,) are those of the mouse antibody.

    `without_loops` is Sapiens with the binding loops hidden. `log_human` (20^k,) is a black box that was asked of all
    sequences; without it the tilt is by the number of mutations alone.
    """
    k = sapiens.k
    complete = torch.cartesian_prod(*[torch.arange(N)] * k).reshape(-1, k)
    p, q, hidden = sapiens.model(), antiberty.model(), without_loops.model()
    penalty = -0.7 * (complete != parent).sum(1).to(torch.float64)
    total = penalty if log_human is None else penalty + log_human.to(torch.float64)
    powers = N ** torch.arange(k - 1, -1, -1)

    def reward(x: Tensor) -> Tensor:
        return total[(x * powers).sum(-1)]

    found = []
    for name, target, factors, tilt in (
        ("Sapiens^2", p**2.0, [(sapiens, 2.0)], None),
        ("Sapiens x AntiBERTy", p * q, [(sapiens, 1.0), (antiberty, 1.0)], None),
        ("guidance by the loops, w = 2", cd.guided(p, hidden, 2.0), [(sapiens, 2.0), (without_loops, -1.0)], None),
        ("Sapiens, tilted", p.tilt(reward, on="mode", anneal=cd.anneal.linear()), [(sapiens, 1.0)], total),
    ):
        probabilities, log_z = enumerated(factors, tilt)
        found.append(Law(name, target, probabilities, log_z, k))
    return found


def total_variation(law: Law, x: Tensor, weights: Tensor) -> float:
    index = (x * N ** torch.arange(law.k - 1, -1, -1)).sum(-1)
    share = torch.zeros(N**law.k, dtype=torch.float64).index_add_(0, index, weights.to(torch.float64))
    return float((share - law.probabilities).abs().sum()) / 2


def floor(law: Law, n: int, seed: int = 0) -> float:
    """The TV of n independent draws."""
    x = torch.multinomial(law.probabilities, n, replacement=True, generator=torch.Generator().manual_seed(seed))
    return float((torch.bincount(x, minlength=N**law.k) / n - law.probabilities).abs().sum()) / 2


Method = Callable[[Law, int, int], cd.Result]


def _plain(law: Law, n: int, seed: int) -> cd.Result:
    return cd.Plain(law.target, cd.ladder.linear(2), seed=seed).sample(n, progress=False)


def _smc(law: Law, n: int, seed: int) -> cd.Result:
    return cd.SMC(law.target, law.ladder, n_particles=n, seed=seed).sample(progress=False)


def _gibbs(law: Law, n: int, seed: int) -> cd.Result:
    particles, sweeps = 32, 10
    chains = max(1, n // (particles * (sweeps + 2)))
    sampler = cd.ParticleGibbs(law.target, law.ladder, n_particles=particles, n_chains=chains, seed=seed)
    return sampler.sample(sweeps, burn_in=1, progress=False)


def _exchange(law: Law, n: int, seed: int) -> cd.Result:
    iterations = 50
    chain = cd.ReplicaExchange(law.target, law.ladder, n_chains=max(1, n // iterations), seed=seed)
    return chain.sample(iterations * 4 // 5, burn_in=iterations // 5, progress=False)


METHODS: dict[str, Method] = {
    "plain guidance": _plain,
    "SMC": _smc,
    "particle Gibbs": _gibbs,
    "replica exchange": _exchange,
}


def measure(law: Law, method: str, n: int, seed: int) -> dict[str, float]:
    """TV, the error of log Z, and the rows that were used."""
    out = METHODS[method](law, n, seed)
    found = {"tv": total_variation(law, out.x, out.weights), "rows": float(out.evaluations.rows)}
    return {**found, "log_z": out.log_z.value - law.log_z}
