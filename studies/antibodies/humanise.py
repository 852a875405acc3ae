"""Some twenty residues of a mouse antibody, where nobody knows the law: what each method offers.

    tilted        pi(x)  ~  p_Sapiens(x)  P_AntiBERTy(human | x)  exp(-mutations / 2)
    both models   pi(x)  ~  E_order[ p_Sapiens(x; order)^(1/2)  p_AntiBERTy(x; order)^(1/2) ]

Judged by AntiBERTy's species head, which the tilt has seen and the others have not, and by pseudo-likelihoods of both
models. Every method may use as much as `n` plain draws cost; those that ask AntiBERTy for every residue, half of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.processes import Process
from studies.antibodies.antibody import ANTIBODIES, MASK, Antibody, decode
from studies.antibodies.design import N, Network, language_model

__all__ = ["METHODS", "Offer", "Remembered", "Task", "greedy", "judge", "pseudo_likelihood"]

PRICE = 0.5
"""Nats that a mutation costs."""
N_LEVELS = 5


class Remembered:
    """A black box of sequences that is asked only once for each of them.

    >>> box = Remembered(lambda x: x.sum(1).double())
    >>> box(torch.tensor([[1, 2], [1, 2], [3, 4]])).tolist(), box.n_asked
    ([3.0, 3.0, 7.0], 2)
    """

    def __init__(self, function: Callable[[Tensor], Tensor]):
        self.function = function
        self.answers: dict[bytes, Tensor] = {}

    @property
    def n_asked(self) -> int:
        return len(self.answers)

    def __call__(self, x: Tensor) -> Tensor:
        keys = [row.numpy().tobytes() for row in x]
        new = {key: i for i, key in enumerate(keys) if key not in self.answers}
        if new:
            self.answers |= dict(zip(new, self.function(x[list(new.values())]), strict=True))
        return torch.stack([self.answers[key] for key in keys])


@dataclass(frozen=True)
class Task:
    """An antibody, its free positions, the model to draw from, another one, and the black box `log P(human)`."""

    antibody: Antibody
    free: Sequence[int]
    network: Network
    other: Network
    log_human: Callable[[Tensor], Tensor]

    @property
    def model(self) -> Any:
        """The language model of the free positions."""
        return language_model(self.network, self.antibody.prompt(self.free))

    @property
    def counted(self) -> Process:
        """Its process with as many masks in all states of a level."""
        process: Process = self.model.process().counted()
        return process

    @property
    def hidden_loops(self) -> Tensor:
        """The loops, (length,)."""
        inside = torch.ones(len(self.antibody.sequence), dtype=torch.bool)
        inside[self.antibody.framework] = False
        inside[list(self.free)] = False
        return inside

    @property
    def tilted(self) -> cd.Target:
        parent = self.antibody.tokens

        def few(x: Tensor) -> Tensor:
            return -PRICE * (x != parent).sum(1).to(torch.float64)

        options: dict[str, Any] = {"on": "mode", "anneal": cd.anneal.linear()}
        tilted: cd.Target = self.model.tilt(self.log_human, name="human", **options)
        return tilted.tilt(few, name="mutations", **options)

    @property
    def both(self) -> cd.Target:
        """The geometric mean of both models."""
        other = language_model(self.other, self.antibody.prompt(self.free))
        both: cd.Target = self.model**0.5 * other**0.5
        return both


@dataclass(frozen=True)
class Offer:
    """Sequences of equal weight, and what they cost: network rows, and rows of the black box."""

    x: Tensor
    rows: int = 0
    rewards: int = 0

    @classmethod
    def of(cls, out: cd.Result, seed: int) -> Offer:
        n = len(out.x)
        u = (torch.arange(n) + cd.Stream(seed).at("resample").uniform((1,))) / n
        index = torch.searchsorted(out.weights.cumsum(0).to(torch.float64), u).clamp(max=n - 1)
        return cls(out.x[index], out.evaluations.rows, out.evaluations.rewards)


Method = Callable[[Task, int, int], Offer]


def greedy(task: Task, rounds: int = 1) -> Tensor:
    """As Sapiens itself humanises: the most probable residues at once, nothing masked; here at free positions."""
    x, free = task.antibody.tokens[None], list(task.free)
    for _ in range(rounds):
        with torch.no_grad():
            best = task.network(x)[:, :, :N].argmax(-1)
        x = x.clone()
        x[:, free] = best[:, free]
    return x


Target = Callable[[Task], cd.Target]


def _plain(target: Target) -> Method:
    def run(task: Task, n: int, seed: int) -> Offer:
        sampler = cd.Plain(target(task), cd.ladder.linear(2), seed=seed, micro_batch=64)
        return Offer.of(sampler.sample(n, progress=False), seed)

    return run


def _smc(target: Target, n_levels: int = N_LEVELS) -> Method:
    def run(task: Task, n: int, seed: int) -> Offer:
        sampler = cd.SMC(
            target(task),
            cd.ladder.linear(n_levels),
            n_particles=n,
            seed=seed,
            micro_batch=64,
            process=task.counted,
        )
        return Offer.of(sampler.sample(progress=False), seed)

    return run


def _gibbs(target: Target) -> Method:
    """One chain of 16 particles; the pass of SMC with which it begins is dropped."""

    def run(task: Task, n: int, seed: int) -> Offer:
        particles = min(16, n // 2)
        sampler = cd.ParticleGibbs(
            target(task),
            cd.ladder.linear(N_LEVELS),
            n_particles=particles,
            seed=seed,
            micro_batch=64,
            process=task.counted,
        )
        return Offer.of(sampler.sample(max(1, n // particles - 1), progress=False), seed)

    return run


def _exchange(target: Target) -> Method:
    """Four chains, started from a pilot that costs half; an iteration of a chain costs about as much as a particle."""

    def run(task: Task, n: int, seed: int) -> Offer:
        chains, law, ladder = 4, target(task), cd.ladder.linear(N_LEVELS)
        start = cd.pilot(law, ladder, n=max(4, n // 4), process=task.counted, seed=seed, micro_batch=64)
        chain = cd.ReplicaExchange(
            law, ladder, pilot=start, n_chains=chains, seed=seed, micro_batch=64, process=task.counted
        )
        return Offer.of(chain.sample(max(2, n // 2 // chains), progress=False), seed)

    return run


def _guided(task: Task) -> cd.Target:
    return cd.guided(task.model, task.model.hiding(task.hidden_loops), 2.0)


def _half(method: Method) -> Method:
    """For targets whose rows are dear."""
    return lambda task, n, seed: method(task, n // 2, seed)


METHODS: dict[str, Method] = {
    "the mouse antibody": lambda task, n, seed: Offer(task.antibody.tokens[None]),
    "greedy, as Sapiens does": lambda task, n, seed: Offer(greedy(task), 1),
    "greedy, three rounds": lambda task, n, seed: Offer(greedy(task, rounds=3), 3),
    "plain Sapiens": _plain(lambda task: task.model.as_target()),
    "plain guidance by the loops, w = 2": _plain(_guided),
    "tilted, weighting alone": _smc(lambda task: task.tilted, 2),
    "tilted, SMC": _smc(lambda task: task.tilted),
    "tilted, particle Gibbs": _gibbs(lambda task: task.tilted),
    "tilted, replica exchange": _exchange(lambda task: task.tilted),
    "both models, plain": _half(_plain(lambda task: task.both)),
    "both models, SMC": _half(_smc(lambda task: task.both)),
    "both models, particle Gibbs": _half(_gibbs(lambda task: task.both)),
    "both models, replica exchange": _half(_exchange(lambda task: task.both)),
}


def pseudo_likelihood(network: Network, x: Tensor, free: Sequence[int]) -> Tensor:
    """Mean over free positions of `log p(residue | all others)`, (rows,): k rows of the network each."""
    k, out = len(free), []
    index = torch.arange(k)
    for row in x:
        masked = row.repeat(k, 1)
        masked[index, list(free)] = MASK
        with torch.no_grad():
            log_p = network(masked)[index, list(free), :N].log_softmax(-1)
        out.append(log_p[index, row[list(free)]].mean())
    return torch.stack(out)


def judge(task: Task, offer: Offer, n_slow: int = 4) -> dict[str, float | str]:
    """What an engineer would ask; pseudo-likelihoods are of `n_slow` of the draws alone."""
    x = offer.x
    unique = torch.unique(x, dim=0)
    few = x[torch.linspace(0, len(x) - 1, min(n_slow, len(x))).long()]
    human = task.log_human(unique)
    place = (x[:, None] == unique[None]).all(-1).int().argmax(1)
    log_human = human[place].to(torch.float64)
    apart = (x[:, None] != x[None]).sum(-1).to(torch.float64)
    reference = ANTIBODIES["trastuzumab"].tokens
    n = len(x)
    found: dict[str, float | str] = {
        "draws": n,
        "different": len(unique),
        "rows": offer.rows,
        "rewards": offer.rewards,
        "P(human)": float(log_human.exp().mean()),
        "log P(human)": float(log_human.mean()),
        "Sapiens": float(pseudo_likelihood(task.network, few, task.free).mean()),
        "AntiBERTy": float(pseudo_likelihood(task.other, few, task.free).mean()),
        "mutations": float(task.antibody.n_mutations(x).to(torch.float64).mean()),
        "apart": float(apart.sum() / max(1, n * (n - 1))),
        "best": decode(x[int(log_human.argmax())]),
    }
    if len(reference) == x.shape[1]:
        free = list(task.free)
        found["as trastuzumab"] = float((x[:, free] == reference[free]).to(torch.float64).mean())
    return found
