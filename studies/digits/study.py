"""Errors of guidance against a known truth, at equal rows.

    error  =  root mean square over numbers of (estimate - truth),     truth from exact draws and their weights

Numbers are `P(digit | x)`, the means of all pixels, the means of products of all neighbouring pixels. The floor is what
as many independent exact draws would show as the rows pay for, at one evaluation per pixel.

A descent costs an evaluation per turn. Corrected methods take `TURNS` turns: pixels of one turn are multiplied as if
they were independent, given those that are known already.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.processes import Masked, Process, Uniform
from studies.digits.laws import Guided, load_trees
from studies.digits.trees import Forest
from studies.shared.exact import Known

__all__ = ["METHODS", "TURNS", "Case", "cases", "floors", "measure", "truth_of"]

N_MODELS = 2
TURNS = 28
"""Seven of 196 pixels a turn: on digit 9 no bias is seen beside the noise of 400,000 rows; with fourteen it is."""


@dataclass(frozen=True)
class Case:
    """A guided law, and how many rows every method may use."""

    side: int = 14
    digit: int = 9
    strength: float = 1.2
    unconditional: str = "own tree"
    kind: str = "masked"
    rows: int = 51_000
    n_truth: int = 100_000

    @property
    def name(self) -> str:
        shape = f"{self.side}x{self.side} {self.kind}"
        return f"{self.unconditional} digit {self.digit} w {self.strength:g} {shape} rows {self.rows}"

    def draws(self, turns: int) -> int:
        """How many draws the rows pay for, at so many evaluations of each model for a draw."""
        return self.rows // (N_MODELS * turns)

    def problem(self, trees: Forest | None = None) -> Guided:
        forest = load_trees(self.side) if trees is None else trees
        return Guided(forest, self.digit, self.strength, self.unconditional, self.kind)


def cases() -> list[Case]:
    """Settings were chosen on digit 9 with a tree of its own; the others are looked at once."""
    first = Case()
    return [
        first,
        replace(first, unconditional="mixture", strength=3.0),
        replace(first, digit=4),
        replace(first, side=7, kind="uniform"),
        replace(first, side=28, unconditional="mixture", strength=3.0, n_truth=20_000),  # own tree: no draws count
        replace(first, rows=8 * first.rows, n_truth=2 * first.n_truth),
    ]


def truth_of(case: Case, problem: Guided) -> Known:
    """From weighted exact draws."""
    return problem.truth(case.n_truth).known(problem.statistics)


def floors(case: Case, known: Known, turns: int | None = None) -> dict[str, float]:
    """Errors of independent exact draws, as many as the rows pay for at so many turns each; None: a turn per pixel."""
    n = case.draws(turns or case.side**2)
    return {name: math.sqrt(variance / n) for name, variance in known.variances.items()}


# -- methods: each uses the rows of the case -------------------------------------------------------------------

Method = Callable[[Case, Guided, int], cd.Result]


def _steps(case: Case) -> int:
    return TURNS if case.kind == "masked" else 16


def _process(case: Case, turns: int | None) -> Process:
    """Pixels change in so many turns with counted masks (`processes.Counted`); all of a step at once if None."""
    at_once = None if turns is None else math.ceil(case.side**2 / turns)
    if case.kind == "uniform":
        return Uniform(2, at_once=at_once)
    masked = Masked(2, at_once=at_once)
    return masked if at_once is None else masked.counted()


@dataclass(frozen=True)
class Plain:
    """Guidance as it is used, one pixel at a time if `turns` is None: follow the guided prediction, correct nothing."""

    turns: int | None = None

    def __call__(self, case: Case, problem: Guided, seed: int) -> cd.Result:
        turns = self.turns or case.side**2
        steps, costs = (1, turns) if case.kind == "masked" else (100, 100)
        ladder, process = cd.ladder.linear(steps + 1), _process(case, turns)
        return cd.Plain(problem.target, ladder, seed=seed, process=process).sample(case.draws(costs), progress=False)


@dataclass(frozen=True)
class Lee:
    """The published SMC of Lee et al.: batches that are pooled equally, all pixels of a step at once."""

    steps: int = 200
    most: int = 128

    def __call__(self, case: Case, problem: Guided, seed: int) -> cd.Result:
        sampler = cd.SMC(
            problem.target,
            cd.ladder.linear(self.steps + 1),
            n_particles=self.most,
            n_batches=max(1, case.draws(self.steps) // self.most),
            pool="equal",
            seed=seed,
            process=_process(case, None),
            weight=cd.DiscreteGuidance(),
            resampling=cd.Partial(0.8),
            ess_threshold=0.2,
        )
        return sampler.sample(progress=False)


@dataclass(frozen=True)
class OnePass:
    """SMC in one pass of as many particles as the rows pay for; one pixel a turn if `turns` is None."""

    turns: int | None = TURNS

    def __call__(self, case: Case, problem: Guided, seed: int) -> cd.Result:
        turns = self.turns or case.side**2
        ladder = cd.ladder.linear((turns if case.kind == "masked" else _steps(case)) + 1)
        options: dict[str, Any] = {"process": _process(case, turns), "seed": seed}
        few = cd.SMC(problem.target, ladder, n_particles=8, **options).sample(progress=False)  # what one costs
        n = 8 * case.rows // few.evaluations.rows
        return cd.SMC(problem.target, ladder, n_particles=n, **options).sample(progress=False)


@dataclass(frozen=True)
class Gibbs:
    """One chain for every 256 draws; the pass of SMC with which it begins, and one sweep, are dropped."""

    n_particles: int = 64

    def __call__(self, case: Case, problem: Guided, seed: int) -> cd.Result:
        sampler = cd.ParticleGibbs(
            problem.target,
            cd.ladder.linear(_steps(case) + 1),
            n_particles=self.n_particles,
            n_chains=max(1, case.draws(case.side**2) // 256),
            seed=seed,
            process=_process(case, TURNS),
        )
        before = sampler.evaluate.counts.rows
        sampler.step()
        used = sampler.evaluate.counts.rows
        return sampler.sample(max(1, int((case.rows - used) / (used - before))), progress=False)


@dataclass(frozen=True)
class Exchange:
    """Chains on the ladder that a pilot plans, from its population; the pilot costs a tenth of the rows.

    There are `n_chains` of them for up to 255 draws, and as many more for every 256 draws beyond. The first tenth of
    the iterations is dropped.
    """

    n_chains: int = 8

    def __call__(self, case: Case, problem: Guided, seed: int) -> cd.Result:
        options: dict[str, Any] = {"process": _process(case, TURNS), "seed": seed}
        per_particle = N_MODELS * (2 * _steps(case) + 1) * (1 if case.kind == "masked" else 4)
        n = max(8, case.rows // 10 // per_particle)
        found = cd.pilot(problem.target, cd.ladder.linear(_steps(case) + 1), n=n, **options)
        several = self.n_chains * max(1, case.draws(case.side**2) // 256)
        chain = cd.ReplicaExchange(problem.target, pilot=found, n_chains=several, **options)
        before = chain.evaluate.counts.rows
        chain.sample(2, progress=False)
        used = chain.evaluate.counts.rows
        n = max(2, int(2 * (case.rows - used) / (used - before)))
        return chain.sample(n - n // 10, burn_in=n // 10, progress=False)


METHODS: dict[str, Method] = {
    "plain guidance": Plain(),
    "plain guidance, 28 turns": Plain(TURNS),
    "SMC of Lee et al.": Lee(),
    "SMC of Lee et al., 28 steps": Lee(TURNS),
    "SMC, one pixel a turn": OnePass(None),
    "SMC": OnePass(),
    "particle Gibbs": Gibbs(),
    "replica exchange": Exchange(),
}


# -- one run ----------------------------------------------------------------------------------------------------


def measure(case: Case, method: str, seed: int, known: Known, problem: Guided) -> dict[str, Any]:
    """Errors, log Z less the truth, and what the method itself states of its error of pixel means, all pixels."""
    out = METHODS[method](case, problem, seed)
    found = {name: out.weights @ values for name, values in problem.statistics(out.x).items()}
    stated = [out.mean(_pixel(i)).error for i in range(case.side**2)]
    return {
        "case": asdict(case),
        "method": method,
        "seed": seed,
        "rows": out.evaluations.rows,
        "errors": {name: float((found[name] - mean).square().mean().sqrt()) for name, mean in known.means.items()},
        "stated": math.sqrt(math.fsum(e**2 for e in stated) / len(stated)),
        "log_z": out.log_z.value - known.log_z,
    }


def _pixel(i: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.flatten(1)[:, i].to(torch.float64)
