"""Twenty-four residues of a mouse antibody, where nobody knows the law: what each method offers instead.

    pi(x)  ~  p_Sapiens(x | the frozen residues)  P_AntiBERTy(human | x)  exp(-0.5 mutations)

Judged by what none of the methods but the tilt has seen: AntiBERTy's species head and both models' pseudo-likelihoods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import crepe_diffusion as cd
from studies.antibodies.antibody import ANTIBODIES, MASK, Antibody, decode
from studies.antibodies.design import N, Network, language_model

__all__ = ["METHODS", "Task", "greedy", "judge", "pseudo_likelihood"]

PRICE = 0.5
"""Nats that a mutation costs."""
N_LEVELS = 5


@dataclass(frozen=True)
class Task:
    """An antibody, its free positions, the model to draw from, and the black box `log P(human)`."""

    antibody: Antibody
    free: Sequence[int]
    network: Network
    log_human: Callable[[Tensor], Tensor]

    @property
    def model(self) -> Any:
        """The language model of the free positions."""
        return language_model(self.network, self.antibody.prompt(self.free))

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


def greedy(task: Task, rounds: int = 1) -> Tensor:
    """As Sapiens itself humanises: the most probable residues at once, nothing masked; here at free positions."""
    x, free = task.antibody.tokens[None], list(task.free)
    for _ in range(rounds):
        with torch.no_grad():
            best = task.network(x)[:, :, :N].argmax(-1)
        x = x.clone()
        x[:, free] = best[:, free]
    return x


def _plain(task: Task, target: cd.Target | cd.models.Model, n: int, seed: int) -> Tensor:
    return cd.Plain(target, cd.ladder.linear(2), seed=seed, micro_batch=64).sample(n, progress=False).x


def _smc(task: Task, n: int, seed: int) -> Tensor:
    out = cd.SMC(task.tilted, cd.ladder.linear(N_LEVELS), n_particles=n, seed=seed, micro_batch=64)
    return out.sample(progress=False).resampled(cd.Stream(seed))


def _gibbs(task: Task, n: int, seed: int) -> Tensor:
    """Two chains of 8 particles; the kept draw of each sweep, after the first."""
    particles, chains = 8, 2
    sampler = cd.ParticleGibbs(
        task.tilted, cd.ladder.linear(N_LEVELS), n_particles=particles, n_chains=chains, seed=seed, micro_batch=64
    )
    draws = []
    for sweep in range(max(2, n // (particles * chains) - 1)):
        sampler.step()
        if sweep:
            draws.append(sampler.output())
    return torch.cat(draws)


def _exchange(task: Task, n: int, seed: int) -> Tensor:
    """Four chains, a quarter of the iterations dropped; an iteration costs about as much as a particle."""
    chains = 4
    chain = cd.ReplicaExchange(task.tilted, cd.ladder.linear(N_LEVELS), n_chains=chains, seed=seed, micro_batch=64)
    total = max(4, n // chains - 1)
    return chain.sample(total - total // 4, burn_in=total // 4, progress=False).x


METHODS: dict[str, Callable[[Task, int, int], Tensor]] = {
    "the mouse antibody": lambda task, n, seed: task.antibody.tokens[None],
    "greedy, as Sapiens does": lambda task, n, seed: greedy(task),
    "greedy, three rounds": lambda task, n, seed: greedy(task, rounds=3),
    "plain Sapiens": lambda task, n, seed: _plain(task, task.model, n, seed),
    "plain guidance by the loops, w = 2": lambda task, n, seed: _plain(
        task,
        cd.guided(task.model, task.model.hiding(task.hidden_loops), 2.0),
        n,
        seed,
    ),
    "tilted, SMC": _smc,
    "tilted, particle Gibbs": _gibbs,
    "tilted, replica exchange": _exchange,
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


def judge(task: Task, x: Tensor, antiberty: Network, n_slow: int = 4) -> dict[str, float | str]:
    """What an engineer would ask; AntiBERTy's pseudo-likelihood is of the first `n_slow` different draws alone."""
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
        "P(human)": float(log_human.exp().mean()),
        "log P(human)": float(log_human.mean()),
        "Sapiens": float(pseudo_likelihood(task.network, few, task.free).mean()),
        "AntiBERTy": float(pseudo_likelihood(antiberty, few, task.free).mean()),
        "mutations": float(task.antibody.n_mutations(x).to(torch.float64).mean()),
        "apart": float(apart.sum() / max(1, n * (n - 1))),
        "best": decode(x[int(log_human.argmax())]),
    }
    if len(reference) == x.shape[1]:
        free = list(task.free)
        found["as trastuzumab"] = float((x[:, free] == reference[free]).to(torch.float64).mean())
    return found
