"""Ways to get more out of the same rows, tried on a few problems.

    recycled   draws at level 0 are replaced by their mean over the coin:  alpha f(arrival) + (1 - alpha) f(present)
    matched    before each swap, replicas of one level are dealt anew to all chains: who meets whom is random
    joined     now and then the replica at one level is kept by a sweep of conditional SMC over the levels above it
    drift      the proposal of SMC follows another drift: k_down times a number, or S + a_t + b_t x, fitted by a pilot
    second     SMC with ratios from both ends of a step, or with a drift from the middle of it, and half as many steps

All but the last leave the law as it is. `python -m studies.battery.trials exchange | joined | drift | second` writes a
table of docs/decisions.md each; four, two, one and four minutes of one core.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path as File
from typing import Any

import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.batches import rows_like
from crepe_diffusion.evaluate import Evaluator
from crepe_diffusion.kernels import State, swap
from crepe_diffusion.paths import Path, walk
from crepe_diffusion.processes import Coefficients, Evaluation, Gaussian, Process
from crepe_diffusion.processes.gaussian import score_of
from crepe_diffusion.schedules import Ladder
from studies.battery.calibration import chosen
from studies.battery.methods import smc_of
from studies.battery.problems import Problem
from studies.battery.records import Group, record
from studies.shared.pages import fill, markdown

PAGE = File(__file__).parents[2] / "docs" / "decisions.md"
PROBLEMS = (
    "tempering isotropic d=32 beta=2",
    "rare tilt with gradient, linear annealing",
    "masked tokens 4x3 steep w=2 w'=2",
)
BUDGET, CHAINS, GROUPS, SEEDS = 200_000, 8, 16, 2


class Recorded(cd.ReplicaExchange):
    """An exchange that keeps, of every iteration, level 0 before it, what arrived there, and with which probability."""

    def step(self) -> cd.samplers.Exchange:
        first, second = (self.state.row_at(level) for level in (0, 1))
        before = self.state.x[first]
        with _last_walk() as seen:
            info = super().step()
        arrival = seen[0].x[second]
        met = bool(info.swaps.active[0])
        work = info.swaps.log_work
        alpha = (work[:, 1] - work[:, 0]).clamp(max=0).exp().nan_to_num() if met else torch.zeros(self.n_chains)
        self.coins.append((before if met else self.state.x[self.state.row_at(0)], arrival, alpha))
        return info

    coins: list[tuple[Tensor, Tensor, Tensor]]


class Matched(cd.ReplicaExchange):
    """An exchange among `CHAINS` chains at once: those at one level change places at random before each swap."""

    def step(self) -> cd.samplers.Exchange:
        self.state = dealt(self.state, self.stream.at(self.iteration, "deal"))
        return super().step()


def dealt(state: State, stream: cd.Stream) -> State:
    """The replicas of every level in a random order of the chains of their group."""
    chains, levels = state.level.shape
    rows = torch.stack([state.row_at(m) for m in range(levels)], 1).reshape(-1, CHAINS, levels)
    order = stream.uniform(tuple(rows.shape)).argsort(1)
    rows = rows.gather(1, order).flatten()
    return State(state.x[rows], state.seen.rows(rows), torch.arange(levels).expand(chains, -1).clone())


@contextmanager
def _last_walk() -> Iterator[list[Path]]:
    """A copy of the path of the next swap, before rejected rows are put back."""
    module, seen = swap.__globals__, []

    def kept(*args: Any, **options: Any) -> Path:
        path = walk(*args, **options)
        seen.append(Path(path.x.clone(), path.seen, path.reward_s, path.reward_t, path.models, path.proposal))
        return path

    module["walk"] = kept
    try:
        yield seen
    finally:
        module["walk"] = walk


def costs(problem: Problem, seed: int) -> dict[str, Tensor]:
    """The cost of each group of chains, (groups,), plain, recycled and matched."""
    steps = problem.ladder(problem.steps + 1)
    found = cd.pilot(problem.target, steps, n=64, seed=seed, proposal=problem.proposal, progress=False)
    options: dict[str, Any] = {"pilot": found, "n_chains": CHAINS * GROUPS, "seed": seed}
    plain, matched = Recorded(problem.target, **options), Matched(problem.target, **options)
    best = found.plan().best
    n = int((BUDGET - found.rows) / CHAINS / found.iteration_rows(best.pairs, best.substeps))
    plain.coins = []
    draws = {"plain": plain.sample(n, progress=False).x, "matched": matched.sample(n, progress=False).x}
    before, arrival, alpha = (torch.stack(part) for part in zip(*plain.coins, strict=True))
    errors = {name: torch.zeros(GROUPS, dtype=torch.float64) for name in ("plain", "recycled", "matched")}
    for name, f in problem.scalars.items():
        values = {key: _by_chain(f, x, n) for key, x in draws.items()}
        new, old = (_by_chain(f, x.flatten(0, 1), n) for x in (arrival, before))
        values["recycled"] = alpha * new + (1 - alpha) * old
        for key, v in values.items():
            mean = v.reshape(n, GROUPS, CHAINS).mean((0, 2))
            errors[key] += (mean - problem.truths[name]).square() / problem.variances[name] / len(problem.scalars)
    return {key: e * BUDGET / problem.walk_rows for key, e in errors.items()}


def _by_chain(f: Any, x: Tensor, n: int) -> Tensor:
    values: Tensor = f(x).to(torch.float64)
    return values.reshape(n, -1)


# -- conditional SMC above a level ------------------------------------------------------------------------------

PARTICLES = 16
SMALLER, FEWER = 60_000, 16
"""Rows and groups of the two trials below, which have one set-up."""


class Joined(cd.ReplicaExchange):
    """An exchange in which every `PARTICLES`-th iteration ends with conditional SMC over all levels from `lowest` up.

    The replica at `lowest` is the kept path of a sweep of particle Gibbs, which leaves the law of that level
    invariant; over the whole ladder it joins both samplers. Half of the rows or less belong to the sweeps.
    """

    def above(self, lowest: int, seed: int) -> Joined:
        k, times = self.ladder.substeps, self.ladder.times
        part = Ladder(times[lowest * k :], substeps=k)
        options: dict[str, Any] = {"process": self.evaluate.process, "proposal": self.evaluate.proposal}
        self.sweeps = cd.ParticleGibbs(
            self.target, part, n_particles=PARTICLES, n_chains=self.n_chains, seed=seed, **options
        )
        # Rewards are annealed as on the whole ladder, and rows are counted together.
        self.sweeps.evaluate = copy.copy(self.evaluate)
        self.sweeps.evaluate.ladder = part
        self.lowest = lowest
        return self

    def step(self) -> cd.samplers.Exchange:
        info = super().step()
        if self.iteration % PARTICLES == 0:
            self.state = swept(self.state, self.sweeps, self.lowest)
        return info

    sweeps: cd.ParticleGibbs
    lowest: int


def swept(state: State, sweeps: cd.ParticleGibbs, level: int) -> State:
    """The replicas at this level after one sweep that kept them; all others stay."""
    rows = state.row_at(level)
    sweeps.x, sweeps.seen = state.x[rows], state.seen.rows(rows)
    sweeps.step()
    there = torch.zeros(len(state.x), dtype=torch.bool)
    there[rows] = True
    place = torch.zeros(len(state.x), dtype=torch.long)
    place[rows] = torch.arange(len(rows))
    x, seen = state.take(there, sweeps.x[place], sweeps.seen.rows(place))
    return State(x, seen, state.level)


def joined(problem: Problem, seed: int) -> dict[str, Tensor]:
    """The cost of each group: the exchange alone, with sweeps over all levels, and over the upper half of them."""
    steps = problem.ladder(problem.steps + 1)
    found = cd.pilot(problem.target, steps, n=64, seed=seed, proposal=problem.proposal, progress=False)
    options: dict[str, Any] = {"pilot": found, "n_chains": CHAINS * FEWER, "seed": seed}
    half = found.plan().best.pairs // 2
    chains = {
        "exchange": cd.ReplicaExchange(problem.target, **options),
        "all levels": Joined(problem.target, **options).above(0, seed),
        "upper half": Joined(problem.target, **options).above(half, seed),
    }
    most = found.rows + FEWER * (SMALLER - found.rows)
    made = {}
    for key, chain in chains.items():

        def spent(now: Any, chain: cd.ReplicaExchange = chain) -> bool:
            return chain.evaluate.counts.rows >= most

        out = chain.sample(SMALLER, progress=False, callback=spent)
        n = len(out.iteration)
        error = torch.zeros(FEWER, dtype=torch.float64)
        for name, f in problem.scalars.items():
            mean = _by_chain(f, out.x, n).reshape(n, FEWER, CHAINS).mean((0, 2))
            error += (mean - problem.truths[name]).square() / problem.variances[name] / len(problem.scalars)
        made[key] = error * SMALLER / problem.walk_rows
    return made


# -- another drift ------------------------------------------------------------------------------------------------

SHRUNK, FEWEST = 4.0, 8.0
"""A fitted number of z standard errors is multiplied by `1 - SHRUNK / z^2`; with fewer particles than this it is 0."""


@dataclass(frozen=True)
class Steered(Gaussian):
    """A process whose proposal follows `S + a_t + b_t x`, one pair of numbers for each time and coordinate."""

    times: Tensor = field(default_factory=lambda: torch.zeros(0), kw_only=True, repr=False)
    a: Tensor = field(default_factory=lambda: torch.zeros(0), kw_only=True, repr=False)
    b: Tensor = field(default_factory=lambda: torch.zeros(0), kw_only=True, repr=False)

    def drift(
        self, x: Tensor, t: Tensor, predictions: tuple[Tensor, ...], guidance: Tensor | None, coefficients: Coefficients
    ) -> Tensor:
        own = super().drift(x, t, predictions, guidance, coefficients)
        i = (self.times - t[:, None].to(self.times)).abs().argmin(1)
        return own + (self.a[i] + self.b[i] * x.flatten(1)).reshape(x.shape).to(own.dtype)

    @classmethod
    def of(cls, process: Process, pilot: cd.Pilot) -> Steered:
        """The least-squares fit to the score of pi_t minus S on the pilot's populations.

        By partial integration `E|S + u - grad log pi_t|^2` is `E[|u|^2 + 2 u S + 2 div u]` and a constant, so that no
        density is needed, and the pilot has evaluated S already. Numbers that are not known well are shrunk.
        """
        evaluate = Evaluator(pilot.target, pilot.ladder, pilot.process, pilot.proposal)
        parts = [cls._at(evaluate, pilot, k) for k in range(pilot.n_steps)]
        a, b = (torch.stack([*(p[i] for p in parts), torch.zeros_like(parts[0][i])]) for i in (0, 1))
        known = {f.name: getattr(process, f.name) for f in fields(Gaussian)}
        return cls(**known, times=pilot.ladder.times, a=a, b=b)

    @staticmethod
    def _at(evaluate: Evaluator, pilot: cd.Pilot, k: int) -> tuple[Tensor, Tensor]:
        t, w = pilot.ladder.times[k], pilot.log_weights[k].exp()
        x = pilot.x[k].flatten(1).to(torch.float64)
        s = evaluate(pilot.x[k], t.expand(pilot.n)).drift.flatten(1).to(torch.float64)
        same = torch.unique(x, dim=0, return_inverse=True)[1]
        n = 1 / torch.zeros_like(w).index_add(0, same, w).square().sum()
        if float(n) < FEWEST:
            return torch.zeros_like(x[0]), torch.zeros_like(x[0])
        mean = w @ x
        variance = w @ (x - mean).square()
        slope = s * (x - mean) + 1
        a, b = -(w @ s), -(w @ slope) / variance
        error_a = (w @ (s + a).square()) / n
        error_b = (w @ (slope + b * variance).square()) / n / variance.square()
        a = a * (1 - SHRUNK * error_a / a.square()).clamp(min=0)
        b = (b * (1 - SHRUNK * error_b / b.square()).clamp(min=0)).clamp(-0.5 / t.square(), 0.5 / t.square())
        return a - b * mean, b


def drift(problem: Problem, seed: int) -> dict[str, Tensor]:
    """The cost of SMC in each group: as it is, with k_down times a number, and with the fitted drift.

    The numbers are for nothing, so that no way of learning them could do better; the fit pays for a second pilot.
    """
    steps = problem.ladder(problem.steps + 1)
    base = problem.proposal or cd.Proposal()
    k = base.coefficients(problem.target)

    def made(proposal: cd.Proposal, process: Process | None = None) -> cd.Pilot:
        return cd.pilot(problem.target, steps, n=64, seed=seed, proposal=proposal, process=process, progress=False)

    def cost(pilot: cd.Pilot) -> Tensor:
        return torch.tensor([_cost(problem, g) for g in smc_of(problem, SMALLER, seed, FEWER, pilot)])

    plain = made(base)
    found = {"as it is": cost(plain)}
    for factor in (0.9, 1.1):
        found[f"k_down x {factor:g}"] = cost(made(replace(base, k=(k.k_up, factor * k.k_down))))
    second = made(base, Steered.of(plain.process, plain))
    found["fitted drift"] = cost(replace(second, counts=second.counts + plain.counts))
    return found


# -- second order -------------------------------------------------------------------------------------------------


WIDER = 2.0
"""The variance of a place is at most so many times that of all places, and at least as small a part of it."""


@dataclass(frozen=True)
class BothEnds(Gaussian):
    """A process whose ratios of models look at both ends of a step, which are known anyway.

    The true kernel has `grad log B = score(x_s) + (x_t - x_s) / d`. With r the way from its mean to x_s and q minus
    this gradient, a Gaussian kernel `N(r; 0, V)` has `q = r / V`. So `V = V_t (r V_t^-1 r) / (r q)` has the width of
    the place, where `Gaussian` has one for all, and `log B = -(r q + log det V) / 2`. This is no density any more.
    """

    def step_ratios(
        self,
        x: Tensor,
        x_new: Tensor,
        seen: Evaluation,
        seen_new: Evaluation,
        s: Tensor,
        t: Tensor,
        up: Tensor,
        coefficients: Coefficients,
    ) -> tuple[Tensor, Tensor]:
        models, proposal = super().step_ratios(x, x_new, seen, seen_new, s, t, up, coefficients)
        rises, at, n = rows_like(up, x), self.schedule(s, t, coefficients), self.dimension(x.shape[1:])
        x_s, x_t = torch.where(rises, x, x_new), torch.where(rises, x_new, x)
        d, gap = at.noising, (x_t - x_s).flatten(1)
        for j, (old, new) in enumerate(zip(seen.predictions, seen_new.predictions, strict=True)):
            low, high = torch.where(rises, old, new), torch.where(rises, new, old)
            force = score_of(low, x_s, s).flatten(1) + gap / d
            r = gap + score_of(high, x_t, t).flatten(1) * d
            usual, here = (r * r / at.models[j].values).sum(1), (r * force).sum(1)
            share = (here / usual).clamp(1 / WIDER, WIDER)
            models[j] += (0.5 * (usual * (1 - share) + n * share.log())).where(s < t, 0.0)
        return models, proposal


@dataclass(frozen=True)
class Midpoint(Gaussian):
    """A process whose proposal follows the drift where half a step down would lead: one more evaluation per point."""

    times: Tensor = field(default_factory=lambda: torch.zeros(0), kw_only=True, repr=False)
    models: tuple[Any, ...] = field(default=(), kw_only=True, repr=False)

    def drift(
        self, x: Tensor, t: Tensor, predictions: tuple[Tensor, ...], guidance: Tensor | None, coefficients: Coefficients
    ) -> Tensor:
        own = super().drift(x, t, predictions, guidance, coefficients)
        i = (self.times - t[:, None].to(self.times)).abs().argmin(1)
        half = (t.square() - self.times[(i - 1).clamp(min=0)].to(t).square()) / 2
        y, middle = x + (coefficients.k_down * half)[:, None].to(x.dtype) * own, (t.square() - half).sqrt()
        there = tuple(model.predict(y, middle) for model in self.models)
        return super().drift(y, middle, there, None, coefficients)


def second(problem: Problem, seed: int) -> dict[str, Tensor]:
    """The cost of SMC in each group: as it is and with ratios of second order, with all steps and with half of them.

    A drift from the middle of a step costs twice the rows of a step; the fit of its variance is given for nothing.
    """

    def cost(steps: int, kind: type[Gaussian]) -> Tensor:
        own = replace(problem, steps=steps)
        options: dict[str, Any] = {"n": 64, "seed": seed, "proposal": problem.proposal, "progress": False}
        ladder, rows = own.ladder(steps + 1), 1
        first = Gaussian() if kind is Midpoint else kind()
        pilot = cd.pilot(problem.target, ladder, process=first, **options)
        if kind is Midpoint:
            known = {f.name: getattr(pilot.process, f.name) for f in fields(Gaussian)}
            process, rows = Midpoint(**known, times=ladder.times, models=problem.target.models), 2
            pilot = cd.pilot(problem.target, ladder, process=process, **options)
        groups = smc_of(own, BUDGET // rows, seed, FEWER, pilot)
        return torch.tensor([rows * _cost(problem, g) for g in groups])

    found = {}
    for steps in (problem.steps, problem.steps // 2):
        found[f"{steps} steps"] = cost(steps, Gaussian)
        found[f"{steps}, both ends"] = cost(steps, BothEnds)
    return {**found, f"{problem.steps // 2}, middle": cost(problem.steps // 2, Midpoint)}


def _cost(problem: Problem, group: Group) -> float:
    means = record(problem, group)["means"].values()
    error = sum((m["value"] - m["truth"]) ** 2 / m["variance"] for m in means) / len(means)
    return float(error * group.rows / problem.walk_rows)


# -- tables ----------------------------------------------------------------------------------------------------


def exchange_table() -> str:
    rows = []
    for name in PROBLEMS:
        parts = [costs(chosen(name), seed) for seed in range(SEEDS)]
        all_of = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        change = all_of["recycled"] - all_of["plain"]
        cells = [_stated(all_of[key]) for key in ("plain", "recycled", "matched")]
        rows.append([name, *cells, _stated(change)])
    note = f"{SEEDS * GROUPS} replicates of {CHAINS} chains, {BUDGET:,} rows each with the pilot."
    return markdown(["problem", "plain", "recycled", "matched", "recycled less plain"], rows) + f"\n\n{note}"


JOINED = ("tempering isotropic d=32 beta=2", "black box of 8 coordinates", "masked tokens 4x3 steep w=2 w'=2")
DRIFT = (
    "tempering isotropic d=32 beta=2",
    "tempering isotropic d=16 beta=3",
    "black box of 8 coordinates",
    "mini-batch mixture",
    "2d guidance",
)


SECOND = (
    "tempering isotropic d=16 beta=3",
    "tempering isotropic d=32 beta=2",
    "tempering stiff d=16 beta=2",
    "20d tempering",
    "20d-stiff composition",
    "2d guidance",
)


def plain_table(trial: Any, names: Sequence[str], rows: int = SMALLER) -> str:
    made = {name: trial(chosen(name), seed=0) for name in names}
    header = list(next(iter(made.values())))
    note = f"{FEWER} replicates of {rows:,} rows each with the pilot."
    return markdown(["problem", *header], [[n, *map(_stated, of.values())] for n, of in made.items()]) + f"\n\n{note}"


def _stated(values: Tensor) -> str:
    return f"{float(values.mean()):.2f} ± {float(values.std()) / math.sqrt(len(values)):.2f}"


TRIALS = {
    "exchange": ("trials", exchange_table),
    "joined": ("trials joined", lambda: plain_table(joined, JOINED)),
    "drift": ("trials drift", lambda: plain_table(drift, DRIFT)),
    "second": ("trials second", lambda: plain_table(second, SECOND, BUDGET)),
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("trial", choices=list(TRIALS))
    parser.add_argument("--print", action="store_true", help="print the table instead of writing it into the page")
    given = parser.parse_args()
    torch.set_num_threads(1)
    place, made_table = TRIALS[given.trial]
    if given.print:
        print(made_table())
    else:
        fill(PAGE, {place: made_table()})
