"""One call that chooses: a pilot, the method that it favours, and as many draws as were asked for.

    e_m = effective draws per 1,000 network rows of method m, predicted from the pilot;  the m with the largest e_m runs

Predictions cost no evaluation. With W_e the share of the weight that descends from particle e at the noise end, and
`q = sum_e W_e^2`, n particles of the pilot are worth `1 / q` independent draws of the law that a batch has. If log Z of
batches is normal with variance v, walks down give `log Z - v/2` on average and walks up `log Z + v/2`; so the gap
between the two is taken for v, where it is more than chance. It is too small where v is large, since walks up begin
where those down have ended:

    SMC                exp(-v) / (n q) per particle, since batches are pooled by Z
    particle Gibbs     (1 - q) / (1 + q) / (n q), less what the kept path ties together; no Z has to be known
    replica exchange   effective arrivals of the planned ladder (plan.py), times exp(-v): they were played by relatives

So SMC is predicted to be best unless the walks disagree, and particle Gibbs then. Replica exchange has to be predicted
to be better by a margin.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from crepe_diffusion.diagnostics import Estimate, Verdict
from crepe_diffusion.diagnostics.data import default_scalars
from crepe_diffusion.errors import InputError, StoppedError
from crepe_diffusion.models import Model
from crepe_diffusion.processes import Process
from crepe_diffusion.progress import Callback, Progress, Track
from crepe_diffusion.proposals import Proposal
from crepe_diffusion.samplers.particle_gibbs import ParticleGibbs
from crepe_diffusion.samplers.pilot import FIT_STEPS, Pilot, pilot
from crepe_diffusion.samplers.replica_exchange import ReplicaExchange
from crepe_diffusion.samplers.result import Chains, Function, Particles, Result, Sweeps
from crepe_diffusion.samplers.setup import as_target, positive
from crepe_diffusion.samplers.smc import SMC
from crepe_diffusion.schedules import Ladder
from crepe_diffusion.schedules import ladder as ladders
from crepe_diffusion.targets import Target

__all__ = ["Forecast", "Sampled", "sample"]

STEPS, TOKEN_LEVELS = 64, 9
"""Steps of the default ladder; levels of it for tokens."""

PILOT_SHARE, FEWEST, MOST = 0.1, 16, 64
"""The walks of a pilot take a tenth of the budget, with so many particles."""

FIT_SHARE, USUAL_FIT = 0.02, 256
"""The variance is measured with this share of the budget, but not with more samples than effective draws are wanted;
below so many samples the pilot's own number is kept.

An error of the variance is a bias that more rows do not remove, and with 128 samples particle Gibbs shows it from some
10^6 rows on (studies/battery)."""

AT_ONCE = 1024
"""Particles that walk together in one pass, where the budget allows."""

MOST_REPEATED = 0.75
"""`q` is taken for this at most: if all particles have one ancestor, they cannot show how many more would have it."""

MARGIN = 3.0
"""Replica exchange is chosen only if it is predicted to be so many times as good as the others.

A lucky particle that holds most of the pilot's weight lowers the forecast of the others, and less that of the exchange,
which was then predicted to be up to 2.2 times as good on the battery and was the most expensive method."""

BY_CHANCE = 1.5
"""Gaps of log Z between walks up and down that pilots of 16 to 64 particles show where batches agree on Z.

On the battery they are within 1.2 but for rare modes (1.8 at most), and 2 to 7 where weights degenerate."""

UNSURE, BATCHES = 0.25, 8
"""Batches are made so large that the relative variance of their Z is at most this, since pooling then costs no more
than a quarter; but there should be so many of them at least, from which the error is found."""


# -- what comes out ------------------------------------------------------------------------------------------


def _two_digits(value: float) -> str:
    """
    >>> _two_digits(334.2), _two_digits(0.6149), _two_digits(12.6)
    ('330', '0.61', '13')
    """
    return f"{float(f'{value:.2g}'):,g}"


def _count(n: int, noun: str) -> str:
    """
    >>> _count(1, "chain"), _count(2, "chain")
    ('1 chain', '2 chains')
    """
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


@dataclass(frozen=True)
class Forecast:
    """A method with its settings, and what the pilot predicts: effective draws per 1,000 network rows."""

    method: str
    settings: str
    effective: float

    def __str__(self) -> str:
        return f"{self.method} ({self.settings}): {_two_digits(self.effective)}"


@dataclass(frozen=True)
class Sampled(Result):
    """Draws of the method that was chosen, with the reasons; print it.

    `draws` is the result of that method (`Particles`, `Chains` or `Sweeps`), and all that a `Result` has comes from it.
    `forecasts` are those of all methods, the chosen one first. `go_on` draws more.
    """

    draws: Result
    pilot: Pilot = field(repr=False)
    forecasts: tuple[Forecast, ...]
    n_effective: float
    wanted: int
    budget: int
    scalars: Mapping[str, Function] = field(repr=False)
    method: Method = field(repr=False)

    @property
    def weights(self) -> torch.Tensor:
        return self.draws.weights

    @property
    def diagnostics(self) -> Any:
        return self.draws.diagnostics  # type: ignore[attr-defined]

    def mean(self, function: Function) -> Estimate:
        return self.draws.mean(function)

    def ess(self, function: Function) -> float:
        return self.draws.ess(function)

    @property
    def log_z(self) -> Estimate:
        return self.draws.log_z

    def verdict(self, scalars: Mapping[str, Function] | None = None) -> Verdict:
        return self.draws.verdict(self.scalars if scalars is None else scalars)

    @property
    def choice(self) -> str:
        """One paragraph: what was chosen, why, what it cost, and what the others were predicted to cost."""
        first, *others = self.forecasts
        rows = self.evaluations.rows
        reached = self.n_effective >= self.wanted
        end = "as many as were asked for" if reached else f"{self.wanted:,} were asked for"
        return (
            f"{first.method} was chosen ({first.settings}). A pilot of {self.pilot.n} particles predicts"
            f" {_two_digits(first.effective)} effective draws per 1,000 network rows for it, "
            + " and ".join(f"{_two_digits(f.effective)} for {f.method} ({f.settings})" for f in others)
            + f". It cost {rows:,} of {self.budget:,} rows, of which {self.pilot.rows:,} are the pilot's, and gave"
            f" {self.n_effective:.0f} effective draws for the scalar that is known worst ({end}):"
            f" {_two_digits(1000 * self.n_effective / rows)} per 1,000 rows, pilot included."
            f" The size of the steps moves log Z by about {self.pilot.discretisation['bar']}."
        )

    def __str__(self) -> str:
        return f"{self.choice}\nverdict: {self.verdict()}"

    def go_on(
        self,
        n_effective: int | None = None,
        budget: int | None = None,
        *,
        progress: bool | None = None,
        callback: Callback | None = None,
    ) -> Sampled:
        """More draws by the same method; the numbers count from the beginning, and are doubled by default."""
        wanted = 2 * self.wanted if n_effective is None else positive("n_effective", n_effective)
        budget = 2 * self.budget if budget is None else positive("budget", budget)
        with Track(budget, "rows", progress, callback) as track:
            track.done = self.evaluations.rows
            return _run(self.method, self.pilot, self.forecasts, wanted, budget, self.scalars, track, self.draws)


# -- the methods ---------------------------------------------------------------------------------------------


class Method(ABC):
    """A method with the settings that suit what a pilot found and the rows that are left."""

    name: str
    settings: str
    effective: float
    """What is predicted, and decides which method runs."""
    rate: float
    """The same if all is well: as many rows are planned."""
    least_rows: float
    """What the smallest step of it costs."""
    margin = 1.0
    """How many times as good as others it must be predicted to be."""

    def __init__(self, pilot: Pilot, options: Mapping[str, Any]):
        self.pilot, self.options = pilot, {**options, "process": pilot.process, "proposal": pilot.proposal}
        self.particle_rows = pilot.walk_rows + pilot.state_rows

    @property
    def forecast(self) -> Forecast:
        return Forecast(self.name, self.settings, self.effective)

    @abstractmethod
    def more(self, rows: float, callback: Callback) -> Result:
        """All draws so far and those of about so many more rows."""


def _repeated(pilot: Pilot) -> float:
    """`q`, the chance that two particles drawn by weight at the data end have one ancestor at the noise end."""
    shares = torch.zeros(pilot.n, dtype=torch.float64).index_add(0, pilot.eve[0], pilot.log_weights[0].exp())
    return min(MOST_REPEATED, float(shares.square().sum()))


def fit_samples(target: Target, n_steps: int, budget: int, most: int) -> int | None:
    """Samples for the variance, where the budget pays for more than the pilot's own number."""
    n = min(most, int(FIT_SHARE * budget / len(target.models) / (min(n_steps, FIT_STEPS) + 1)))
    return n if n > USUAL_FIT else None


def _gap(pilot: Pilot) -> float:
    """By how much walks up and down disagree on log Z."""
    return pilot.log_z("up").value - pilot.log_z("down").value


def degenerates(pilot: Pilot) -> bool:
    """Whether they disagree by more than chance, since the weights are held by few particles."""
    return _gap(pilot) > BY_CHANCE


def _agreeing(pilot: Pilot) -> float:
    """`exp(-v)`: the share of effective draws that is left where log Z of batches varies by v."""
    return math.exp(-_gap(pilot)) if degenerates(pilot) else 1.0


class _Smc(Method):
    name = "SMC"

    def __init__(self, pilot: Pilot, rows: float, wanted: int, options: Mapping[str, Any]):
        super().__init__(pilot, options)
        n, q = pilot.n, _repeated(pilot)
        self.rate = 1000 / (n * q * self.particle_rows)
        self.effective = self.rate * _agreeing(pilot)
        affordable = max(1, int(rows / self.particle_rows))
        unsure = (n * q - 1) / (n - 1)
        size = n * 2 ** max(0, math.ceil(math.log2(max(unsure, 1e-9) / UNSURE)))
        self.n_particles = max(n, min(size, affordable // BATCHES))
        needed = max(1, math.ceil(1.2 * wanted / self.rate * 1000 / self.particle_rows / self.n_particles))
        batches = max(1, affordable // self.n_particles)
        passes = math.ceil(batches / min(batches, max(1, AT_ONCE // self.n_particles), needed))
        self.n_batches = max(1, batches // passes)
        self.least_rows = self.n_particles * self.n_batches * self.particle_rows
        self.settings = f"batches of {self.n_particles} particles, pooled by Z"
        self.sampler: SMC | None = None
        # Its pilot is one more batch, if it is as large as the others.
        self.parts = [pilot.particles] if self.n_particles == n else []

    def more(self, rows: float, callback: Callback) -> Particles:
        if self.sampler is None:
            self.sampler = SMC(
                self.pilot.target,
                self.pilot.ladder,
                n_particles=self.n_particles,
                n_batches=self.n_batches,
                **self.options,
            )
        passes = max(1, int(rows / self.least_rows))
        try:
            self.parts.append(self.sampler.sample(passes, progress=False, callback=callback))
        except StoppedError:
            if not self.parts:
                raise
        out = Particles.joined(self.parts)
        return replace(
            out,
            evaluations=self.pilot.counts + self.sampler.evaluate.counts,
            started_from=self.pilot.summary,
        )


class _ParticleGibbs(Method):
    name = "particle Gibbs"

    def __init__(self, pilot: Pilot, rows: float, options: Mapping[str, Any]):
        super().__init__(pilot, options)
        q = _repeated(pilot)
        self.effective = self.rate = 1000 / (pilot.n * q * self.particle_rows) * (1 - q) / (1 + q)
        self.least_rows = pilot.n * self.particle_rows
        self.settings = f"{pilot.n} particles"
        self.sampler: ParticleGibbs | None = None
        self.parts: list[Sweeps] = []

    def more(self, rows: float, callback: Callback) -> Sweeps:
        if self.sampler is None:
            self.sampler = ParticleGibbs(self.pilot.target, self.pilot.ladder, n_particles=self.pilot.n, **self.options)
        sweeps = max(1, int(rows / self.least_rows))
        self.parts.append(self.sampler.sample(sweeps, progress=False, callback=callback))
        names = ("log_weights", "changed", "replica", "born", "sweep_log_z", "survivors", "level_ess")
        return replace(
            _joined(self.parts, names),
            evaluations=self.pilot.counts + self.sampler.evaluate.counts,
            started_from=self.pilot.summary,
        )


class _ReplicaExchange(Method):
    name = "replica exchange"
    margin = MARGIN

    def __init__(self, pilot: Pilot, rows: float, options: Mapping[str, Any]):
        super().__init__(pilot, options)
        plan = pilot.plan()
        best = plan.best
        self.rate, self.ladder = best.effective, plan.ladder
        self.effective = self.rate * _agreeing(pilot)
        each = pilot.iteration_rows(best.pairs, best.substeps)
        # A chain should have time for some ten trips.
        trip = 2 * best.pairs * (1 + best.delay / best.pairs)
        self.n_chains = max(1, min(8, int(rows / each / (10 * trip))))
        self.least_rows = each * self.n_chains
        pairs, substeps = _count(best.pairs, "pair"), _count(best.substeps, "sub-step")
        self.settings = f"{pairs} of levels with {substeps}, {_count(self.n_chains, 'chain')}"
        self.sampler: ReplicaExchange | None = None
        self.parts: list[Chains] = []

    def more(self, rows: float, callback: Callback) -> Chains:
        if self.sampler is None:
            options = {key: value for key, value in self.options.items() if key not in ("process", "proposal")}
            self.sampler = ReplicaExchange(
                self.pilot.target, self.ladder, pilot=self.pilot, n_chains=self.n_chains, **options
            )
        n = max(1, int(rows / self.least_rows))
        self.parts.append(self.sampler.sample(n, progress=False, callback=callback))
        return _joined(self.parts, ("iteration", "replica", "born"))


def _joined(parts: Sequence[Any], names: Sequence[str]) -> Any:
    """The results of several calls of one sampler as one; these fields have one row per iteration, like `x`."""
    together = {name: torch.cat([getattr(part, name) for part in parts]) for name in ("x", *names)}
    return replace(parts[-1], **together)


# -- the call ------------------------------------------------------------------------------------------------


def sample(
    target: Target | Model,
    ladder: Ladder | None = None,
    *,
    n_effective: int = 100,
    budget: int = 200_000,
    scalars: Mapping[str, Function] | None = None,
    seed: int = 0,
    process: Process | None = None,
    proposal: Proposal | None = None,
    micro_batch: int | None = None,
    nonfinite: str = "raise",
    progress: bool | None = None,
    callback: Callback | None = None,
) -> Sampled:
    """Draw from the target by the method that a pilot favours, until there are enough draws or the budget is spent.

    - `n_effective`: so many independent draws are to be matched by the mean of each of the `scalars`, which are by
      default the first coordinates; `budget`: the most network rows, all of the pilot's included;
    - `ladder`: all its times are used, whatever its levels. Tokens need none, nor do models with a `sigma_range`;
    - the others are those of `ReplicaExchange`; `callback` may stop the call, which then returns what there is.

    The method goes on until the stated error is small enough, so the error is a little too small where it was just
    reached; the verdict does not know about that.

    >>> from crepe_diffusion.models import GaussianMixture
    >>> p = GaussianMixture(weights=[0.3, 0.7], means=[[-4.0], [3.0]], stds=[0.5, 0.4])
    >>> out = sample(p ** 2.0, n_effective=200, seed=1)
    >>> left = out.mean(lambda x: x[:, 0] < 0)                     # exactly 0.128
    >>> abs(left.value - 0.128) < 3 * left.error, out.evaluations.rows < 60_000
    (True, True)
    """
    target = as_target(target)
    wanted, budget = positive("n_effective", n_effective), positive("budget", budget)
    if seed != int(seed) or seed < 0:
        raise InputError(f"seed must be a non-negative integer, got {seed!r}")
    steps = default_ladder(target) if ladder is None else ladder
    if not isinstance(steps, Ladder):
        raise InputError(f"ladder must be a Ladder, such as ladder.karras(65), got {steps!r}")
    chosen = default_scalars(tuple(target.models[0].event_shape)) if scalars is None else dict(scalars)
    if not chosen:
        raise InputError("scalars must hold at least one function of the draws, got none")
    common: dict[str, Any] = {"micro_batch": micro_batch, "nonfinite": nonfinite}
    n_steps = len(steps.times) - 1
    # Down, up, and half as many steps of double size.
    each = 2 * n_steps + n_steps // 2 + 1
    n = max(FEWEST, min(MOST, int(PILOT_SHARE * budget / each)))
    expected = n * each
    fit = fit_samples(target, n_steps, budget, wanted)
    with Track(budget, "rows", progress, callback) as track:

        def advance(now: Progress) -> bool:
            return track.advance(max(1, expected // now.total))

        found = pilot(
            target,
            steps,
            n,
            2 * seed,
            process=process,
            proposal=proposal,
            fit_samples=fit,
            progress=False,
            callback=advance,
            **common,
        )
        track.done = found.rows
        left = budget - found.rows
        if left < n * (found.walk_rows + found.state_rows):
            raise InputError(
                f"a budget of {budget:,} rows is too small: a pilot of {n} particles took {found.rows:,}; give at least"
                f" {2 * found.rows:,}, or a ladder with fewer steps than {n_steps}"
            )
        options = {**common, "seed": 2 * seed + 1}
        methods: list[Method] = [
            _Smc(found, left, wanted, options),
            _ReplicaExchange(found, left, options),
            _ParticleGibbs(found, left, options),
        ]
        methods.sort(key=lambda m: -m.effective / m.margin)
        forecasts = tuple(m.forecast for m in methods)
        return _run(methods[0], found, forecasts, wanted, budget, chosen, track, None)


def _run(
    method: Method,
    pilot: Pilot,
    forecasts: tuple[Forecast, ...],
    wanted: int,
    budget: int,
    scalars: Mapping[str, Function],
    track: Track,
    draws: Result | None,
) -> Sampled:
    """Go on until the worst scalar has enough effective draws, the budget is spent, or the callback stops."""
    stopped = False
    spent = pilot.rows if draws is None else draws.evaluations.rows
    ahead = 1000 * wanted / method.rate
    while True:
        rows = min(ahead, budget - spent)

        def advance(now: Progress, rows: float = rows) -> bool:
            nonlocal stopped
            stopped = track.advance(max(1, int(rows / now.total)))
            return stopped

        draws = method.more(rows, advance)
        track.done = spent = draws.evaluations.rows
        size = _least(draws, scalars)
        if stopped or size >= wanted or spent + method.least_rows > budget:
            break
        # By the rate so far, but at most as much again: early rates are guesses.
        used = spent - pilot.rows
        ahead = min(used, 1.1 * used * (wanted / max(size, 1.0) - 1))
    return Sampled(draws.x, draws.evaluations, draws, pilot, forecasts, size, wanted, budget, scalars, method)


def _least(draws: Result, scalars: Mapping[str, Function]) -> float:
    """Effective draws for the mean of the scalar that is known worst; one that never changes is not counted."""
    sizes = [draws.ess(f) for f in scalars.values() if bool((v := draws.values(f)).ne(v[0]).any())]
    return min(sizes, default=0.0)


def default_ladder(target: Target) -> Ladder:
    """All steps between the noise levels that all models of the target share; for tokens nine levels."""
    models = target.models
    if models[0].process().is_discrete:
        return ladders.linear(TOKEN_LEVELS)
    ranges = [m.sigma_range for m in models if m.sigma_range is not None]
    if len(ranges) < len(models):
        raise InputError(
            "give a ladder, such as cd.ladder.karras(65, sigma_min, sigma_max) with the noise on which the network was"
            " trained: this model has no sigma_range"
        )
    low, high = max(r[0] for r in ranges), min(r[1] for r in ranges)
    return ladders.karras(STEPS + 1, low, high)
