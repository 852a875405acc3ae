"""Target strengths times proposal strengths on the twin: the error of every method against the truth, at equal rows.

    error  =  estimate - truth of P(label | x) and of the nats per word;   root mean square over words of their shares

Four groups of every method run in one batch: a group is a run of its own, and the spread of groups is the error of what
is reported. The floor is what as many exact draws would show as the rows pay for, at one row of each model per word.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.processes import Masked
from studies.sentences.markov import Bank, Guided
from studies.shared.exact import Known

__all__ = ["METHODS", "PAPER", "Cell", "Group", "cells", "floors", "known", "masked", "measure", "paper"]

N_GROUPS = 4
ROWS = 6_500
"""Rows of each model in a group: 500 particles, in batches of 50 as in the paper."""
N_TRUTH = 100_000


@dataclass(frozen=True)
class Cell:
    """A target, walked by a proposal of another strength."""

    unconditional: str
    target: float
    proposal: float

    @property
    def name(self) -> str:
        return f"{self.unconditional} target {self.target:g} proposal {self.proposal:g}"

    def problem(self, bank: Bank) -> Guided:
        return Guided(bank, self.target, self.unconditional)


def cells() -> list[Cell]:
    """Strong targets where models agree, and moderate ones where they do not, since the truth of strong ones is noise
    there: of draws of `p(x | c)`, 5 % count at w = 1.4 and 0.04 % at 1.8."""
    own = [Cell("own", target, proposal) for target, proposal in ((1.4, 1.0), (1.4, 1.4), (1.2, 1.0))]
    return own + [Cell("mixture", target, proposal) for target, proposal in ((1.8, 1.0), (1.8, 1.8), (1.4, 1.0))]


PAPER = [Cell("own", 1.4, 1.0), Cell("own", 1.4, 1.4)]
"""Where the paper saw a drop of accuracy, and where it did not."""


def known(problem: Guided, n: int = N_TRUTH) -> Known:
    """The truth of a guided law, from weighted exact draws."""
    return problem.truth(n).known(problem.statistics)


def floors(truth: Known, rows: int, length: int) -> dict[str, float]:
    """Root mean square errors of as many exact draws as these rows of each model pay for."""
    return {name: math.sqrt(v / (rows / length)) for name, v in truth.variances.items()}


# -- methods: x and weights of each group, the log Z of each, and the rows of each model per group -------------------


@dataclass(frozen=True)
class Group:
    x: Tensor
    weights: Tensor
    log_z: float
    verdict: str | None = None
    rows: float = math.nan


class Problem(Protocol):
    """What the methods need: the twin's and the network's guided laws both have it."""

    @property
    def length(self) -> int: ...
    @property
    def models(self) -> tuple[cd.models.Model, cd.models.Model]: ...
    @property
    def target(self) -> cd.Target: ...


Method = Callable[[Problem, cd.Proposal, int, int, int], tuple[list[Group], float]]
"""Of a problem, a proposal, rows of each model per group, a seed and a number of groups."""


def masked(problem: Problem) -> Masked:
    process = problem.models[0].process()
    assert isinstance(process, Masked)
    return process


def _plain(problem: Problem, proposal: cd.Proposal, rows: int, seed: int, n_groups: int) -> tuple[list[Group], float]:
    n = rows // problem.length
    out = cd.Plain(problem.target, cd.ladder.linear(2), proposal=proposal, seed=seed).sample(
        n_groups * n, progress=False
    )
    groups = [Group(x, torch.full((n,), 1 / n, dtype=torch.float64), math.nan) for x in out.x.split(n)]
    return groups, out.evaluations.rows / 2 / n_groups


def _smc(problem: Problem, proposal: cd.Proposal, rows: int, seed: int, n_groups: int) -> tuple[list[Group], float]:
    particles, length = 50, problem.length
    batches = max(1, rows // (length + 1) // particles)
    sampler = cd.SMC(
        problem.target,
        cd.ladder.linear(length + 1),
        n_particles=particles,
        n_batches=n_groups * batches,
        process=masked(problem).counted(),
        proposal=proposal,
        seed=seed,
    )
    out = sampler.sample(progress=False)
    groups = []
    for g in range(n_groups):
        part = out.of_batches(range(g * batches, (g + 1) * batches))
        groups.append(Group(part.x, part.weights, part.log_z.value, part.verdict().level))
    return groups, out.evaluations.rows / 2 / n_groups


def _gibbs(problem: Problem, proposal: cd.Proposal, rows: int, seed: int, n_groups: int) -> tuple[list[Group], float]:
    """A chain per group, of 50 particles or so few that it makes six passes; the first pass is dropped."""
    particles = min(50, rows // (problem.length + 1) // 6)
    sampler = cd.ParticleGibbs(
        problem.target,
        cd.ladder.linear(problem.length + 1),
        n_particles=particles,
        n_chains=n_groups,
        process=masked(problem).counted(),
        proposal=proposal,
        seed=seed,
    )
    out = sampler.sample(max(2, rows // ((problem.length + 1) * particles) - 1), progress=False)
    groups = []
    for g in range(n_groups):
        part = out.of_chains([g])
        groups.append(Group(part.x, part.weights, part.log_z.value, part.verdict().level))
    return groups, out.evaluations.rows / 2 / n_groups


def _exchange(
    problem: Problem, proposal: cd.Proposal, rows: int, seed: int, n_groups: int
) -> tuple[list[Group], float]:
    """Two chains per group from a pilot of its own, which costs a quarter of the rows, on the ladder of its plan."""
    length, process, groups, used = problem.length, masked(problem).counted(), [], 0
    for g in range(n_groups):
        start = cd.pilot(
            problem.target,
            cd.ladder.linear(length + 1),
            n=max(16, rows // 4 // (2 * length + 1)),
            process=process,
            proposal=proposal,
            seed=n_groups * seed + g,
        )
        chain = cd.ReplicaExchange(
            problem.target, pilot=start, n_chains=2, process=process, proposal=proposal, seed=n_groups * seed + g
        )
        before, few = chain.evaluate.counts.rows, 4
        chain.sample(few, progress=False)
        each = (chain.evaluate.counts.rows - before) / few
        out = chain.sample(max(2, int((2 * rows - chain.evaluate.counts.rows) / each)), progress=False)
        groups.append(Group(out.x, out.weights, out.log_z.value, out.verdict().level))
        used += out.evaluations.rows
    return groups, used / 2 / n_groups


METHODS: dict[str, Method] = {
    "plain": _plain,
    "SMC": _smc,
    "particle Gibbs": _gibbs,
    "replica exchange": _exchange,
}


def _errors(problem: Guided, truth: Known, groups: list[Group]) -> dict[str, Any]:
    """Of every group: signed errors of accuracy and nats, root mean square over words, log Z less the truth."""
    found: dict[str, list[float]] = {"accuracy": [], "nats": [], "words": [], "log_z": []}
    for group in groups:
        values = problem.statistics(group.x)
        off = {name: group.weights.to(torch.float64) @ values[name] - mean for name, mean in truth.means.items()}
        found["accuracy"].append(float(off["accuracy"]))
        found["nats"].append(float(off["nats"]))
        found["words"].append(float(off["words"].square().mean().sqrt()))
        found["log_z"].append(group.log_z - truth.log_z)
    return found


def measure(
    bank: Bank, cell: Cell, method: str, truth: Known, rows: int = ROWS, seed: int = 0, length: int | None = None
) -> dict[str, Any]:
    """One cell of the sweep: errors of four groups, the rows of each, and the verdict on each."""
    problem = cell.problem(bank) if length is None else Guided(bank, cell.target, cell.unconditional, length=length)
    groups, used = METHODS[method](problem, problem.proposal(cell.proposal), rows, seed, N_GROUPS)
    return {**_errors(problem, truth, groups), "rows": used, "verdicts": [group.verdict for group in groups]}


# -- the paper's setting -------------------------------------------------------------------------------------------


def paper(
    bank: Bank, cell: Cell, n_chains: int = 3, n_levels: int = 101, n: int = 1_000, burn_in: int = 150, seed: int = 0
) -> dict[str, Any]:
    """One chain per run, 100 steps between levels, all words of a step at once, 150 + 1,000 iterations; several runs.

    Running means of accuracy and nats of every run, how often swaps are accepted, trips, and verdicts.
    """
    problem = cell.problem(bank)
    process = Masked(bank.n_words, at_once=None)
    chain = cd.ReplicaExchange(
        problem.target,
        cd.ladder.linear(n_levels),
        n_chains=n_chains,
        process=process,
        proposal=problem.proposal(cell.proposal),
        seed=seed,
    )
    out = chain.sample(n, burn_in=burn_in, progress=False)
    values = problem.statistics(out.x)
    draws = {name: values[name].reshape(n, n_chains) for name in ("accuracy", "nats")}
    steps = torch.arange(1, n + 1, dtype=torch.float64)[:, None]
    parts = [out.of_chains([c]) for c in range(n_chains)]
    return {
        "running": {name: (d.cumsum(0) / steps)[9::10].tolist() for name, d in draws.items()},
        "accuracy": draws["accuracy"].mean(0).tolist(),
        "nats": draws["nats"].mean(0).tolist(),
        "acceptance": float(chain.diagnostics.acceptance().mean()),
        "least acceptance": float(chain.diagnostics.acceptance().min()),
        "tours": [len(torch.unique(out.born[:, c] * n_levels + out.replica[:, c])) for c in range(n_chains)],
        "verdicts": [part.verdict().level for part in parts],
        "says": str(parts[0].verdict()),
        "rows": out.evaluations.rows / 2 / n_chains,
    }
