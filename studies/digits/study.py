"""Errors of guidance against a known truth, at equal rows.

    error  =  root mean square over numbers of (estimate - truth),     truth from exact draws and their weights

Numbers are `P(digit | x)`, the means of all pixels, the means of products of all neighbouring pixels. The floor is what
as many independent exact draws would show as the rows pay for, at one evaluation per pixel.

A descent costs an evaluation per turn. Corrected methods reveal `at_once` pixels in a turn: these are multiplied as if
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

__all__ = ["METHODS", "Case", "cases", "floors", "measure", "methods", "truth_of", "turned"]

N_MODELS = 2


@dataclass(frozen=True)
class Case:
    """A guided law, and how many rows every method may use.

    Seven pixels a turn: on digit 9 at 14 x 14 no bias is seen beside the noise of 400,000 rows; with fourteen it is.
    """

    side: int = 14
    digit: int = 9
    strength: float = 1.2
    unconditional: str = "own tree"
    kind: str = "masked"
    rows: int = 51_000
    n_truth: int = 100_000
    at_once: int = 7
    walk: float | None = None
    """The strength of guidance with which corrected methods walk. None: that of the target.

    With a strength of their own they correct at the data end only, without resampling and levels on the way. For a
    mixture the levels between, `p_t(x | c)^3 p_t(x)^-2`, ask for states that already show their digit, which neither
    end does: walks of `p(x | c)` that were filtered by them are few, and all weights are near 1 without.
    """

    @property
    def name(self) -> str:
        shape = f"{self.side}x{self.side} {self.kind}"
        return f"{self.unconditional} digit {self.digit} w {self.strength:g} {shape} rows {self.rows}"

    @property
    def turns(self) -> int:
        """Of a descent of the corrected methods."""
        return math.ceil(self.side**2 / self.at_once)

    def draws(self, turns: int) -> int:
        """How many draws the rows pay for, at so many evaluations of each model for a draw."""
        return self.rows // (N_MODELS * turns)

    @property
    def resampling(self) -> float:
        """Below this share of effective particles."""
        return 0.5 if self.walk is None else 0.0

    @property
    def proposal(self) -> cd.Proposal:
        return cd.Proposal() if self.walk is None else cd.Proposal(exponents=(1 - self.walk, self.walk))

    def problem(self, trees: Forest | None = None) -> Guided:
        forest = load_trees(self.side) if trees is None else trees
        return Guided(forest, self.digit, self.strength, self.unconditional, self.kind)


def cases() -> list[Case]:
    """Settings were chosen on digit 9 with a tree of its own; the others are looked at once."""
    first = Case()
    mixture = replace(first, unconditional="mixture", strength=3.0, rows=8 * first.rows, at_once=1, walk=1.0)
    return [
        first,
        mixture,
        replace(first, digit=4),
        replace(first, side=7, kind="uniform", at_once=2),
        replace(mixture, side=28, rows=4 * first.rows, n_truth=20_000),  # own tree: no draws count
        replace(first, rows=8 * first.rows, n_truth=2 * first.n_truth),
        replace(first, kind="uniform", rows=2 * first.rows),
    ]


def truth_of(case: Case, problem: Guided) -> Known:
    """From weighted exact draws."""
    return problem.truth(case.n_truth).known(problem.statistics)


def floors(case: Case, known: Known, turns: int | None = None) -> dict[str, float]:
    """Errors of independent exact draws, as many as the rows pay for at so many turns each; None: a turn per pixel."""
    n = case.draws(turns or case.side**2)
    return {name: math.sqrt(variance / n) for name, variance in known.variances.items()}


def turned(case: Case, problem: Guided, n: int, seed: int = 0) -> tuple[float, float]:
    """`log Z` of the law in turns, which corrected methods sample, and its standard error.

    In turns, both models are products of predictions for the pixels of each turn. `n` draws of `p(x | c)`, in random
    orders, are weighted by the guided law of these products; with one pixel a turn it is the law itself.
    """
    generator = torch.Generator().manual_seed(seed)
    x = problem.trees.sample(n, problem.digit, generator)
    turn = torch.rand(x.shape, generator=generator).argsort(1).argsort(1) // case.at_once
    conditional, unconditional = problem.models
    log_w = -conditional.log_prob(x)
    for k in range(case.turns):
        seen = torch.where(turn < k, x, 2).reshape(n, case.side, case.side)
        for log_p, c in zip(
            conditional.predict_together([conditional, unconditional], seen, torch.ones(n)),
            (case.strength, 1 - case.strength),
            strict=True,
        ):
            of_x = log_p.flatten(1, 2).gather(2, x[..., None])[..., 0]
            log_w += c * torch.where(turn == k, of_x, 0.0).sum(1)
    w = (log_w - log_w.max()).exp()
    return float(log_w.max() + w.mean().log()), float(w.std() / w.mean()) / math.sqrt(n)


# -- methods: each uses the rows of the case -------------------------------------------------------------------

Method = Callable[[Case, Guided, int], cd.Result]


def _steps(case: Case) -> int:
    return case.turns if case.kind == "masked" else 16


def _process(case: Case, at_once: int | None) -> Process:
    """So many pixels change in a turn, with counted masks (`processes.Counted`); all of a step at once if None."""
    if case.kind == "uniform":
        return Uniform(2, at_once=at_once)
    masked = Masked(2, at_once=at_once)
    return masked if at_once is None else masked.counted()


@dataclass(frozen=True)
class Plain:
    """Guidance as it is used: follow the guided prediction, correct nothing; a pixel a turn, or the others' turns."""

    in_turns: bool = False

    def __call__(self, case: Case, problem: Guided, seed: int) -> cd.Result:
        steps, costs = (1, case.turns if self.in_turns else case.side**2) if case.kind == "masked" else (100, 100)
        ladder, process = cd.ladder.linear(steps + 1), _process(case, case.at_once if self.in_turns else 1)
        return cd.Plain(problem.target, ladder, seed=seed, process=process).sample(case.draws(costs), progress=False)


@dataclass(frozen=True)
class Lee:
    """The published SMC of Lee et al.: batches that are pooled equally, all pixels of a step at once.

    With `steps` None it takes as many as the others have turns; `walks`: with their strength of guidance.
    """

    steps: int | None = 200
    most: int = 128
    walks: bool = False

    def __call__(self, case: Case, problem: Guided, seed: int) -> cd.Result:
        steps = self.steps or case.turns
        sampler = cd.SMC(
            problem.target,
            cd.ladder.linear(steps + 1),
            n_particles=self.most,
            n_batches=max(1, round(case.draws(steps) / self.most)),
            pool="equal",
            seed=seed,
            process=_process(case, None),
            proposal=case.proposal if self.walks else None,
            weight=cd.DiscreteGuidance(),
            resampling=cd.Partial(0.8),
            ess_threshold=case.resampling if self.walks else 0.2,
        )
        return sampler.sample(progress=False)


def one_pass(case: Case, problem: Guided, seed: int) -> cd.Result:
    """SMC in one pass of as many particles as the rows pay for."""
    ladder = cd.ladder.linear(_steps(case) + 1)
    options: dict[str, Any] = {"process": _process(case, case.at_once), "proposal": case.proposal, "seed": seed}
    options["ess_threshold"] = case.resampling
    few = cd.SMC(problem.target, ladder, n_particles=8, **options).sample(progress=False)  # what one costs
    n = 8 * case.rows // few.evaluations.rows
    return cd.SMC(problem.target, ladder, n_particles=n, **options).sample(progress=False)


@dataclass(frozen=True)
class Gibbs:
    """One chain for every 256 draws; the pass of SMC with which it begins, and one sweep, are dropped.

    There are fewer particles, 16 at least, where the rows would pay for less than eight sweeps.
    """

    n_particles: int = 64

    def __call__(self, case: Case, problem: Guided, seed: int) -> cd.Result:
        sampler = cd.ParticleGibbs(
            problem.target,
            cd.ladder.linear(_steps(case) + 1),
            n_particles=min(self.n_particles, max(16, case.draws(case.turns) // 8)),
            n_chains=max(1, case.draws(case.side**2) // 256),
            seed=seed,
            process=_process(case, case.at_once),
            proposal=case.proposal,
            ess_threshold=case.resampling,
        )
        before = sampler.evaluate.counts.rows
        sampler.step()
        used = sampler.evaluate.counts.rows
        return sampler.sample(max(1, int((case.rows - used) / (used - before))), progress=False)


@dataclass(frozen=True)
class Exchange:
    """Chains on the ladder that a pilot plans, from its population; the pilot costs a tenth of the rows. Or two levels.

    There are `n_chains` of them for up to 255 draws, and as many more for every 256 draws beyond. The first tenth of
    the iterations is dropped.
    """

    n_chains: int = 8

    def __call__(self, case: Case, problem: Guided, seed: int) -> cd.Result:
        options: dict[str, Any] = {"process": _process(case, case.at_once), "proposal": case.proposal, "seed": seed}
        several = self.n_chains * max(1, case.draws(case.side**2) // 256)
        chain = self._chain(case, problem, several, options)
        before = chain.evaluate.counts.rows
        chain.sample(2, progress=False)
        used = chain.evaluate.counts.rows
        n = max(2, int(2 * (case.rows - used) / (used - before)))
        return chain.sample(n - n // 10, burn_in=n // 10, progress=False)

    @staticmethod
    def _chain(case: Case, problem: Guided, n_chains: int, options: dict[str, Any]) -> cd.ReplicaExchange:
        if case.walk is not None:
            ends = cd.ladder.linear(2, substeps=_steps(case))
            return cd.ReplicaExchange(problem.target, ends, n_chains=n_chains, **options)
        per_particle = N_MODELS * (2 * _steps(case) + 1) * (1 if case.kind == "masked" else 4)
        n = max(8, case.rows // 10 // per_particle)
        found = cd.pilot(problem.target, cd.ladder.linear(_steps(case) + 1), n=n, **options)
        return cd.ReplicaExchange(problem.target, pilot=found, n_chains=n_chains, **options)


METHODS: dict[str, Method] = {
    "plain guidance": Plain(),
    "plain guidance, 7 a turn": Plain(in_turns=True),
    "SMC of Lee et al.": Lee(),
    "SMC of Lee et al., 7 a step": Lee(None),
    "SMC of Lee et al., walks as ours": Lee(walks=True),
    "SMC": one_pass,
    "particle Gibbs": Gibbs(),
    "replica exchange": Exchange(),
}


def methods(case: Case) -> list[str]:
    """Those that make sense: the uniform process has steps of its own, and tricks of ours are given to others too."""
    several = case.kind == "masked" and case.at_once > 1
    makes_sense = {"7 a": several, "as ours": case.walk is not None}
    return [name for name in METHODS if all(so for part, so in makes_sense.items() if part in name)]


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
