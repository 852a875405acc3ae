"""Two to four free residues, all of 400 to 160,000 sequences: how far is each sampler from the enumerated law?

    TV  =  1/2 sum_x |share of x among the draws - pi(x)|

The floor is the TV that as many independent draws of `pi` show as the rows pay for, at k rows of each model for a draw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.processes import Masked
from studies.antibodies.design import Known, N, enumerated

__all__ = [
    "CASES",
    "LONG",
    "LONG_LAW",
    "METHODS",
    "Case",
    "Law",
    "composed",
    "few_mutations",
    "floor",
    "guided",
    "human",
    "measure",
    "tempered",
    "total_variation",
]


@dataclass(frozen=True)
class Case:
    """Free residues of an antibody; all sequences of those in `asked` are shown to the black box.

    Without `asked` there is only Sapiens, which answers twenty times as many rows per second as AntiBERTy.
    """

    antibody: str
    free: tuple[int, ...]
    asked: tuple[int, ...] = ()


CASES = {
    "4D5": Case("4D5", (99, 100, 101), asked=(99, 100)),
    "OKT3": Case("OKT3", (100, 101, 102), asked=(100, 101)),
    "4D5 four": Case("4D5", (98, 99, 100, 101)),
}
"""Neighbours at the tip of the third loop, where residues depend on one another and on the order."""
LONG_LAW, LONG = "Sapiens^2", ("SMC", "particle Gibbs", "replica exchange")
"""What is measured with eight times the rows."""


@dataclass(frozen=True)
class Law:
    """A target over k residues, its probabilities (20^k,), and its log Z."""

    name: str
    target: cd.Target
    probabilities: Tensor
    log_z: float
    k: int

    @property
    def masked(self) -> Masked:
        """The process of the models, with coins."""
        process = self.target.models[0].process()
        assert isinstance(process, Masked)
        return process


def _tilted(name: str, known: Known, total: Tensor) -> Law:
    """The law of a network times `exp` of a reward that is known of all sequences, (20^k,)."""
    powers = N ** torch.arange(known.k - 1, -1, -1)

    def reward(x: Tensor) -> Tensor:
        return total[(x * powers).sum(-1)]

    target = known.model().tilt(reward, on="mode", anneal=cd.anneal.linear())
    return Law(name, target, *enumerated([(known, 1.0)], total), known.k)


def _penalty(parent: Tensor) -> Tensor:
    """0.7 nats for every residue that differs from `parent` (k,), of all sequences."""
    complete = torch.cartesian_prod(*[torch.arange(N)] * len(parent)).reshape(-1, len(parent))
    return -0.7 * (complete != parent).sum(1).to(torch.float64)


def tempered(sapiens: Known) -> Law:
    """The square of Sapiens."""
    return Law("Sapiens^2", sapiens.model() ** 2.0, *enumerated([(sapiens, 2.0)]), sapiens.k)


def few_mutations(sapiens: Known, parent: Tensor) -> Law:
    """Sapiens tilted to few mutations of `parent` (k,), the mouse's residues."""
    return _tilted("few mutations", sapiens, _penalty(parent))


def guided(sapiens: Known, without_loops: Known) -> Law:
    """Sapiens guided by the binding loops, which are hidden from the second network."""
    target = cd.guided(sapiens.model(), without_loops.model(), 2.0)
    factors = [(sapiens, 2.0), (without_loops, -1.0)]
    return Law("guidance by the loops, w = 2", target, *enumerated(factors), sapiens.k)


def composed(sapiens: Known, antiberty: Known) -> Law:
    """The product of both models."""
    factors = [(sapiens, 1.0), (antiberty, 1.0)]
    return Law("Sapiens x AntiBERTy", sapiens.model() * antiberty.model(), *enumerated(factors), sapiens.k)


def human(sapiens: Known, parent: Tensor, log_human: Tensor) -> Law:
    """Sapiens times P(human), a black box that was asked of all sequences (20^k,), and few mutations."""
    return _tilted("human, few mutations", sapiens, _penalty(parent) + log_human.to(torch.float64))


def total_variation(law: Law, x: Tensor, weights: Tensor) -> float:
    index = (x * N ** torch.arange(law.k - 1, -1, -1)).sum(-1)
    share = torch.zeros(N**law.k, dtype=torch.float64).index_add_(0, index, weights.to(torch.float64))
    return float((share - law.probabilities).abs().sum()) / 2


def floor(law: Law, rows: int, seed: int = 0) -> float:
    """The TV of independent draws, as many as these rows of each model pay for."""
    n = rows // law.k
    x = torch.multinomial(law.probabilities, n, replacement=True, generator=torch.Generator().manual_seed(seed))
    return float((torch.bincount(x, minlength=N**law.k) / n - law.probabilities).abs().sum()) / 2


# -- methods: each uses at most so many rows of each model ------------------------------------------------------

Method = Callable[[Law, int, int], cd.Result]


def _plain(law: Law, rows: int, seed: int) -> cd.Result:
    return cd.Plain(law.target, cd.ladder.linear(2), seed=seed).sample(rows // law.k, progress=False)


def _smc(process: Callable[[Masked], Masked]) -> Method:
    def run(law: Law, rows: int, seed: int) -> cd.Result:
        ladder, chosen = cd.ladder.linear(law.k + 1), process(law.masked)
        sampler = cd.SMC(law.target, ladder, n_particles=rows // (law.k + 1), seed=seed, process=chosen)
        return sampler.sample(progress=False)

    return run


def _gibbs(law: Law, rows: int, seed: int) -> cd.Result:
    """Eight chains of 64 particles; the passes of SMC with which they begin, and one sweep, are dropped."""
    particles, chains = 64, 8
    sampler = cd.ParticleGibbs(
        law.target,
        cd.ladder.linear(law.k + 1),
        n_particles=particles,
        n_chains=chains,
        seed=seed,
        process=law.masked.counted(),
    )
    return sampler.sample(max(1, rows // (chains * particles * (law.k + 1)) - 2), burn_in=1, progress=False)


def _exchange(law: Law, rows: int, seed: int) -> cd.Result:
    """Started from a pilot that costs a tenth of the rows, on its ladder; 60 chains, or fewer for few rows."""
    k, process = law.k, law.masked.counted()
    n_particles = max(16, rows // 10 // (2 * k + 1))
    start = cd.pilot(law.target, cd.ladder.linear(k + 1), n=n_particles, process=process, seed=seed)
    chains = max(2, min(60, rows // 500))
    chain = cd.ReplicaExchange(law.target, pilot=start, n_chains=chains, seed=seed, process=process)
    n_models, before = len(law.target.models), chain.evaluate.counts.rows
    chain.sample(2, progress=False)
    each = (chain.evaluate.counts.rows - before) / 2
    return chain.sample(max(1, int((rows * n_models - chain.evaluate.counts.rows) / each)), progress=False)


METHODS: dict[str, Method] = {
    "plain": _plain,
    "SMC, all at once": _smc(lambda p: replace(p, at_once=None)),
    "SMC, coins": _smc(lambda p: p),
    "SMC": _smc(lambda p: p.counted()),
    "particle Gibbs": _gibbs,
    "replica exchange": _exchange,
}


def measure(law: Law, method: str, rows: int, seed: int) -> dict[str, float]:
    """TV, the error of log Z, and the rows of each model that were used."""
    out = METHODS[method](law, rows, seed)
    used = out.evaluations.rows / len(law.target.models)
    return {"tv": total_variation(law, out.x, out.weights), "rows": used, "log_z": out.log_z.value - law.log_z}
