"""Whether to trust a run, in words: the worst finding is the verdict, and each finding comes with what to do.

verdict = max over rules of  ok < look < do not trust

"Do not trust" is for results that are probably wrong, "look" for a run that is wasteful, young or doubtful. A rule
yields a finding where chance cannot explain the numbers: for a good run there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from crepe_diffusion.diagnostics.data import RunData, default_scalars
from crepe_diffusion.diagnostics.estimates import Estimate, apart
from crepe_diffusion.diagnostics.evidence import DRIFT_Z, MIN_DRAWS, Evidence

__all__ = ["LEVELS", "Verdict", "judge", "judge_particles", "percent", "verdict"]

LEVELS = ("ok", "look", "do not trust")

# With 2 Lambda + 1 levels a pair accepts half of its swaps, and rows per round trip, M (2 + 2 sum r / (1 - r)), are at
# their least, 8 Lambda^2; at a quarter they are a third more, and below that they rise like 1 / acceptance.
TOO_FEW_LEVELS_ACCEPTANCE = 0.25
# One pair at 5 % costs as many iterations as 19 pairs at 50 %: it alone then decides how long the run must be.
STUCK_ACCEPTANCE = 0.05
# The weight of a mode from n fresh arrivals has a standard error of up to 0.5 / sqrt(n): 0.11 for 20.
FEW_RESTARTS = 20
# The prediction assumes that replicas forget between swaps. They forget less, so three quarters are common; a third
# is not. A replica that was not followed from its start lacks about one trip, so two each are due before judging.
TRIPS_SHARE, TRIPS_EACH = 1 / 3, 2
# Standard error of a mean in standard deviations, 1 / sqrt(ESS): 0.14 for 50, 0.22 for 20. How small it must be is for
# the user to say; but with fewer effective draws, intervals have been too short on the battery.
FEW_ESS, TINY_ESS = 50, 20
# Clusters of particles that share the weight. Student's intervals widen by a tenth for 12 and by a third for 5; from
# fewer, an error is hardly known itself.
FEW_CLUSTERS, TINY_CLUSTERS = 12, 5
# Weights of which a share rho is effective have, if they are lognormal, the squared skewness (1/rho + 2)^2 (1/rho - 1).
# Cochran asks for 25 times as many draws before a normal interval of 95 % is to be believed. A fifth of that separates
# steep tokens, whose intervals are too short, from all other problems of the battery.
SKEWED = 5
# Batches whose Z differ by more have probably not seen the largest one.
LOG_Z_ERROR = 0.5
# Vehtari et al. (2021) ask for 1.01; at 1.05 chains differ by about a third of a standard deviation.
RHAT_LOOK, RHAT_BAD = 1.01, 1.05
# After a change of target the first round trips still carry the old one.
RECENT_DRAWS = 100
# A rejected row cuts the target off where the model or the reward fails; 1 % of them can move a mean by 0.1 sd.
NONFINITE_BAD = 0.01
# What a chain forgets, it forgets by trips through the ladder: the weight of a mode relaxes within one or two of them.
FEW_TRIPS = 5
# Draws of replicas that were never at the noise end are as good as the start they come from.
FROM_THE_START = 0.1
# Explorers may rest at the ends of the ladder (a masked state has few legal moves there), but not on half of it.
EXPLORER_ACCEPTANCE = 0.02
# Chain and starting pass: a dozen scalars at 3 standard errors give 3 % of false alarms, at 5 none.
APART_LOOK, APART_BAD = 3.0, 5.0
# Paths up and down that disagree by a factor of e in Z; well resolved ladders stay within half of that.
LOG_Z_GAP, LOG_Z_SIGMAS = 1.0, 4.0
# Stated errors contain the size of the steps. Beyond half a unit of log Z the first order says little, and the weights
# of modes, whose normalisers differ in the same way, are no longer safe; a mean that is known to half a standard
# deviation is known to no more than what four draws tell.
STEPS_TOO_LARGE = 0.5


Pairs = Mapping[str, tuple[Estimate, Estimate]]
"""Two estimates of each of several numbers."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, by how much, and what to do."""

    level: str
    reason: str
    advice: str


@dataclass(frozen=True)
class Verdict:
    """`level` is "ok", "look" or "do not trust"; the gravest reason comes first, and so does its advice."""

    level: str
    reasons: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([self.level, *(f"  why: {r}" for r in self.reasons), *(f"  do: {a}" for a in self.advice)])


def verdict(data: RunData) -> Verdict:
    """The judgement of all diagnostics together: what a careful colleague would conclude."""
    return judge(Evidence(data))


def judge(evidence: Evidence) -> Verdict:
    """The same from evidence that is used elsewhere too."""
    rules = RULES if evidence.exchanges else [rule for rule in RULES if rule not in OF_EXCHANGE]
    return _gravest(f for rule in rules for f in rule(evidence))


def judge_particles(
    shares: Sequence[float],
    kind: str,
    log_z: Estimate,
    sizes: Mapping[str, float],
    steps: Estimate | None = None,
    narrowest: tuple[float, int] | None = None,
    shifts: Mapping[str, float] | None = None,
    beside: tuple[Pairs, int] | None = None,
) -> Verdict:
    """The verdict on weighted particles, from the share of the weight that each independent cluster of them has.

    `kind` is what the clusters are, `sizes` the effective number of draws of each scalar, `steps` what the size of the
    steps does to log Z where that is known, and `log_z` is without it. `narrowest` is the effective share of a batch's
    particles at the level where it is least, and the number of all particles. `shifts` is what the size of the steps
    does to the mean of each scalar, in its standard deviations. `beside` has, of a chain, what it and its starting
    pass estimate, and the number of particles of that pass.
    """
    findings = [*_of_particles(np.asarray(shares), kind, log_z, sizes)]
    findings += [] if narrowest is None else _collapse(*narrowest)
    findings += [] if beside is None else _disagreeing(*beside)
    return _gravest([*findings, *(() if steps is None else _steps(steps)), *_shifted(shifts or {})])


def _collapse(share: float, n: int) -> Iterator[Finding]:
    """Where weights are very unequal, the heaviest particles are rare: what has not been drawn shows in no error."""
    needed = SKEWED * (1 / share + 2) ** 2 * (1 / share - 1)
    if n < needed:
        yield Finding(
            "look",
            f"at its narrowest level a batch is left with {percent(share)} of its particles: among {n:,} of them, the"
            " heaviest may not have been drawn yet, and then no error shows it",
            f"take {_about(needed)} particles in all, or more levels, or a better proposal",
        )


def _of_particles(shares: np.ndarray, kind: str, log_z: Estimate, sizes: Mapping[str, float]) -> Iterator[Finding]:
    count = 1 / float((shares**2).sum())
    part, parts = ("sweep", "sweeps") if kind == "tours" else ("batch", "batches")
    if count < FEW_CLUSTERS:
        yield Finding(
            "do not trust" if count < TINY_CLUSTERS else "look",
            f"{count:.1f} of {len(shares)} {kind} count: the heaviest has {percent(float(shares.max()))} of the weight",
            f"take {_about(len(shares) * FEW_CLUSTERS / count)} {kind}, or more particles in each {part}",
        )
    if log_z.error > LOG_Z_ERROR:
        yield Finding(
            "look",
            f"log Z is {log_z}: {parts} differ so much that the best of them may not have been seen yet",
            f"take more particles in each {part}, or a better proposal",
        )
    few = {name: n for name, n in sizes.items() if n < FEW_ESS}
    if few:
        name, n = min(few.items(), key=lambda item: item[1])
        yield Finding(
            "do not trust" if n < TINY_ESS else "look",
            f"too few particles for {name}: {n:.0f} effective draws, so its mean is known to"
            f" {1 / math.sqrt(max(n, 1)):.2f} standard deviations",
            f"take {_about(max(2, FEW_ESS / max(n, 1)))} times as many {parts} for {FEW_ESS} effective draws",
        )


def _gravest(findings: Iterable[Finding]) -> Verdict:
    """All findings, the gravest first."""
    found = sorted(findings, key=lambda f: -LEVELS.index(f.level))
    level = found[0].level if found else "ok"
    return Verdict(level, [f.reason for f in found], list(dict.fromkeys(f.advice for f in found)))


def _length(e: Evidence) -> Iterator[Finding]:
    n, targets = e.n_draws, e.data.targets
    changed = len(targets) > 1
    since = f"under the target in force since iteration {targets[-1]['from_iteration']}" if changed else "after burn-in"
    if n < MIN_DRAWS:
        reason = f"only {n} draws per chain {since}: too short to be judged, which takes {MIN_DRAWS}"
        yield Finding("do not trust", reason, "run longer")
    elif changed and n < RECENT_DRAWS:
        reason = f"the target changed recently: only {n} of {len(e.data.x)} draws per chain are {since}"
        yield Finding("look", reason, f"run on until there are {RECENT_DRAWS} of them")


def _nonfinite(e: Evidence) -> Iterator[Finding]:
    counts = e.data.counts
    n = sum(counts.nonfinite.values())
    if n:
        level, most = max(counts.nonfinite.items(), key=lambda item: item[1])
        share = n / max(1, counts.rows)
        yield Finding(
            "do not trust" if share > NONFINITE_BAD else "look",
            f"{n:,} of {counts.rows:,} network rows ({percent(share)}) had a NaN or infinite prediction or reward, most"
            f" of them ({most:,}) near level {level} (t = {e.time(level)})",
            "evaluate the model and each reward alone at that noise and mend it: rejected rows cut the target off",
        )
    if e.exchanges and e.diagnostics.n_iterations >= 8 and not e.works_known:
        m, share = int(e.finite_works.argmin()), float(e.finite_works.min())
        yield Finding(
            "do not trust",
            f"{percent(1 - share)} of the meetings of levels {m} and {m + 1} had no finite log-work: the reward is"
            " minus infinity wherever replicas stand",
            "give the reward a finite floor, and let its annealing vanish at the noise end",
        )
    for s in e.scalars:
        if s.n_nonfinite:
            reason = f"{s.name} is not finite in {s.n_nonfinite:,} of {s.values.size:,} draws, so it has no mean"
            yield Finding("look", reason, f"look at the draws where {s.name} is not finite")


def _ladder(e: Evidence) -> Iterator[Finding]:
    if not e.works_known:
        return
    rates, n, t = e.acceptance, e.diagnostics.n_levels, e.data.levels
    level = "look" if e.diagnostics.restarts() >= FEW_RESTARTS else "do not trust"
    if rates.mean() < TOO_FEW_LEVELS_ACCEPTANCE and e.suggested_levels > n:
        yield Finding(
            level,
            f"too few levels: {n} where Lambda ~ {e.barrier.value:.3g} needs about {e.suggested_levels}; pairs"
            f" accept {percent(rates.mean())} on average",
            f"take about {e.suggested_levels} levels or more (Lambda grows once pairs begin to accept)",
        )
        return
    for m in map(int, np.flatnonzero(e.interval[:, 1] < STUCK_ACCEPTANCE)):
        others = np.delete(rates, m)
        if not len(others) or np.median(others) < TOO_FEW_LEVELS_ACCEPTANCE:
            continue
        lowest = f"end the ladder at t = {t[1]:.3g} and finish by plain denoising (`n_finish`), or " if m == 0 else ""
        yield Finding(
            level,
            f"the pair of levels {m} and {m + 1} (t = {t[m]:.3g} and {t[m + 1]:.3g}) is stuck: it accepts"
            f" {percent(rates[m])}, at most {percent(e.interval[m, 1])}, where the others' median is"
            f" {percent(np.median(others))}",
            f"{lowest}put more levels between t = {t[m]:.3g} and {t[m + 1]:.3g}: `adapt()` moves them there",
        )


def _young(e: Evidence) -> Iterator[Finding]:
    """Replicas have not made enough trips through the ladder to forget where they began.

    Those that started from a pass of particles need not forget it: its particles have the law of their level, errors
    count relatives among them as one, and chain and pass are compared.
    """
    if e.data.started_from is not None:
        return
    d = e.diagnostics
    trips = d.round_trips() / (d.n_levels * d.n_chains)
    if not e.works_known or d.n_iterations < MIN_DRAWS or trips >= FEW_TRIPS:
        return
    n, few = d.n_levels, 2 * e.suggested_levels - 1
    if n > few:
        substeps = math.ceil((n - 1) * e.data.substeps / (few - 1))
        advice = f"take {few} levels with {substeps} sub-steps each: as many steps of the network, and shorter trips"
    elif trips:
        advice = f"run {_about(d.n_iterations * FEW_TRIPS / trips)} iterations for {FEW_TRIPS} trips per replica"
    else:
        advice = "run longer"
    yield Finding(
        "look",
        f"young: {trips:.2g} trips per replica through {n} levels in {d.n_iterations:,} iterations, where Lambda ~"
        f" {e.barrier.value:.3g} needs about {e.suggested_levels} levels; what the chain began with is forgotten"
        f" after about {FEW_TRIPS}",
        _longer(e, advice),
    )


def _start(e: Evidence) -> Iterator[Finding]:
    """Draws that still descend from the replicas that the chains began with."""
    if e.n_draws < MIN_DRAWS or e.tours is None:
        return
    from_start = e.data.columns["born"][e.judged] == 0
    share = float(from_start.mean())
    if share > FROM_THE_START:
        whole = "each chain" if e.data.n_chains > 1 else "the chain"
        first = int(from_start.any(1).nonzero()[0].max()) + 1
        yield Finding(
            "look",
            f"{percent(share)} of the draws descend from the first replicas, and {whole} began from one trajectory",
            f"drop {first} more draws as burn-in" if first < e.n_draws // 2 else _longer(e, "run longer"),
        )


def _trips(e: Evidence) -> Iterator[Finding]:
    d = e.diagnostics
    restarts, trips, predicted = d.restarts(), d.round_trips(), e.predicted_round_trips
    chains = f"{d.n_chains} chain{'s' if d.n_chains > 1 else ''}"
    if d.n_iterations >= 8 and restarts == 0:
        yield Finding(
            "do not trust",
            f"no fresh replica came to the data end in {d.n_iterations:,} iterations of {chains}: all"
            " draws descend from the initial ones",
            _longer(e, "run longer"),
        )
    elif restarts < FEW_RESTARTS:
        wanted = FEW_RESTARTS * d.n_iterations / predicted if predicted > 1 else math.nan
        yield Finding(
            "look",
            f"only {restarts} fresh arrivals at the data end in {d.n_iterations:,} iterations of {chains}: the weight"
            f" of a mode is known to +- {0.5 / math.sqrt(max(1, restarts)):.2f} at best",
            f"run {_about(wanted)} iterations for {FEW_RESTARTS} arrivals" if math.isfinite(wanted) else "run longer",
        )
    due = predicted >= TRIPS_EACH * d.n_levels * d.n_chains
    if due and trips + 2 * math.sqrt(trips + 1) < TRIPS_SHARE * predicted:
        yield Finding(
            "look",
            f"{trips} round trips where this acceptance predicts {predicted:.0f}: replicas turn back on their way",
            "explore more at each level (`Bounce`, or more of its steps), or anneal the reward more slowly",
        )


def _mixing(e: Evidence) -> Iterator[Finding]:
    """One finding of a kind: the worst scalar stands for the others."""
    several, judged = e.data.x.shape[1] > 1, [s for s in e.scalars if s.can_be_judged]

    def more(n: int) -> str:
        return f" (and {n - 1} other scalar{'s' if n > 2 else ''})" if n > 1 else ""

    drifting = [s for s in judged if abs(s.drift) > DRIFT_Z]
    # R-hat also compares halves, so a drift would be blamed on the chains.
    differing = [s for s in judged if s not in drifting and s.rhat > max(RHAT_LOOK, s.rhat_by_chance)]
    if differing:
        s = max(differing, key=lambda s: s.rhat)
        chain, own, others = s.odd_chain()
        # Slow chains overrate their own effective size, and so underrate what chance explains, by up to two.
        sure = s.rhat**2 - 1 > 2 * (s.rhat_by_chance**2 - 1)
        yield Finding(
            "do not trust" if s.rhat > RHAT_BAD and sure else "look",
            f"{'chains disagree' if several else 'the chain disagrees with itself'} about {s.name}"
            f"{more(len(differing))}: R-hat {min(s.rhat, 99.0):.3g} where chance explains"
            f" {max(RHAT_LOOK, s.rhat_by_chance):.3g}"
            + (f"; the mean of chain {chain} is {own:.3g}, of the others {others:.3g}" if several else ""),
            _longer(e, "run longer; if chains stay apart, look at acceptance and round trips"),
        )
    few = [s for s in judged if s.ess < FEW_ESS]
    if few:
        s = min(few, key=lambda s: s.ess)
        yield Finding(
            "do not trust" if s.ess < TINY_ESS else "look",
            f"too short for {s.name}{more(len(few))}: {s.ess:.0f} effective of {s.values.size:,} draws, so its mean is"
            f" known to {1 / math.sqrt(max(s.ess, 1)):.2f} standard deviations",
            _longer(e, f"run {_about(e.n_draws * FEW_ESS / max(s.ess, 1))} draws per chain for {FEW_ESS} effective"),
        )
    if drifting:
        s = max(drifting, key=lambda s: abs(s.drift))
        cut = max(s.burn_in_over() for s in drifting)
        yield Finding(
            "look",
            f"burn-in is not over for {s.name}{more(len(drifting))}: the means of its halves differ by"
            f" {abs(s.drift):.1f} standard errors",
            f"drop {cut} more draws as burn-in" if cut < e.n_draws else "run longer: burn-in is not over yet",
        )


def _longer(e: Evidence, advice: str) -> str:
    """More of the same does not help a chain whose replicas cannot travel."""
    stuck = e.exchanges and e.diagnostics.restarts() < FEW_RESTARTS and e.acceptance.min(initial=1.0) < STUCK_ACCEPTANCE
    return "do not run longer before replicas can travel" if stuck else advice


def _constant(e: Evidence) -> Iterator[Finding]:
    if e.n_draws < MIN_DRAWS:
        return
    x = e.data.x[e.judged]
    if (x == x[0]).all():
        reason = f"all {e.n_draws} draws of each chain are equal: the data end never moved"
        yield Finding("do not trust", reason, "look at the acceptance of the lowest pair, and explore at each level")
    elif all(s.is_constant for s in e.scalars):
        names = ", ".join(s.name for s in e.scalars)
        reason = f"{names} never changed in {e.n_draws} draws per chain, so nothing shows whether the chain mixes"
        yield Finding("look", reason, "choose a scalar that varies")
    else:
        # Coordinates that nobody chose may be fixed, such as those of a prompt.
        chosen = [s for s in e.scalars if s.is_constant and s.name not in default_scalars(e.data.x.shape[2:])]
        for s in chosen:
            yield Finding(
                "look",
                f"{s.name} is {float(s.values.flat[0]):.3g} in all of {s.values.size:,} draws: either it is certain, or"
                " no replica has found where it differs",
                f"if {s.name} should vary, compare with SMC of many particles, and start from a larger pilot",
            )


def _explorer(e: Evidence) -> Iterator[Finding]:
    rates = e.explored[:-1]  # the noise end is drawn again anyway
    if len(rates) and np.median(rates) < EXPLORER_ACCEPTANCE:
        yield Finding(
            "look",
            f"the explorer accepts {percent(np.median(rates))} of its moves or less at half of the levels",
            "take shorter steps (`Bounce(n_steps=1)`, more levels or sub-steps), or none, and save the cost",
        )


def _tokens(e: Evidence) -> Iterator[Finding]:
    if e.diagnostics.approximate:
        yield Finding(
            "look",
            "several tokens change at once, as if they were independent: on steep targets draws are biased, with any"
            " number of levels",
            "give the process at_once=1, which is exact at one evaluation per token; or compare with a smaller at_once",
        )


def _free_energy(e: Evidence) -> Iterator[Finding]:
    if e.diagnostics.n_iterations < 2 * MIN_DRAWS or not e.works_known:
        return
    down, up = e.log_z["down"], e.log_z["up"]
    gap, error = abs(down.value - up.value), math.hypot(down.error, up.error)
    if gap > LOG_Z_GAP and not gap <= LOG_Z_SIGMAS * error:
        yield Finding(
            "look",
            f"log Z is {down} by paths down but {up} by paths up: steps too large for the kernels, or little overlap",
            f"take more levels or sub-steps than {len(e.data.levels)} times {e.data.substeps}; do not quote log Z",
        )


def _starting_pass(e: Evidence) -> Iterator[Finding]:
    """Chain and starting pass estimate the same numbers, each with its own error."""
    start = e.data.started_from
    if start is None or e.n_draws < MIN_DRAWS or not e.works_known:
        return
    pairs = {s.name: (s.mean, e.data.starting_means[s.name]) for s in e.scalars if s.name in e.data.starting_means}
    yield from _disagreeing({**pairs, "log Z": (e.log_z["bar"], start.log_z["bar"])}, len(start.x))
    yield from _steps(start.discretisation["bar"], start.n_steps)
    yield from _shifted({s.name: s.shift for s in e.scalars}, start.n_steps)


def _disagreeing(pairs: Pairs, n: int) -> Iterator[Finding]:
    """The pair of estimates, of the chain and of its starting pass of n particles, that are farthest apart."""
    z, name = max(((apart(*pair), name) for name, pair in pairs.items()), default=(0.0, ""))
    if z > APART_LOOK:
        own, other = pairs[name]
        yield Finding(
            "do not trust" if z > APART_BAD else "look",
            f"chain and starting pass disagree about {name}: {own} and {other}, {z:.1f} standard errors apart",
            f"make a pilot of {_about(4 * n)} particles, and run longer: one of the two misses something",
        )


def _steps(size: Estimate, n_steps: int | None = None) -> Iterator[Finding]:
    if abs(size.value) > max(STEPS_TOO_LARGE, 2 * size.error):
        yield Finding(
            "look",
            f"the size of the steps moves log Z by about {size}, and may move the weights of modes as much",
            _more_steps(size.value, n_steps),
        )


def _shifted(shifts: Mapping[str, float], n_steps: int | None = None) -> Iterator[Finding]:
    """A mean whose stated error is mostly the size of the steps, and large: more draws do not make it smaller."""
    name = max(shifts, key=lambda name: shifts[name], default=None)
    if name is not None and shifts[name] > STEPS_TOO_LARGE:
        yield Finding(
            "look",
            f"the size of the steps may move the mean of {name} by {shifts[name]:.2g} standard deviations,"
            " which is part of its error",
            f"{_more_steps(shifts[name], n_steps)}, or a pilot of more particles, which knows this better",
        )


def _more_steps(size: float, n_steps: int | None) -> str:
    """So many that an effect of first order becomes half of what is too large."""
    times = 2 * abs(size) / STEPS_TOO_LARGE
    if n_steps is None:
        return f"take {_about(times)} times as many steps"
    return f"take {_about(n_steps * times)} steps instead of {n_steps}"


RULES: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    _length,
    _nonfinite,
    _ladder,
    _young,
    _start,
    _trips,
    _mixing,
    _constant,
    _explorer,
    _tokens,
    _free_energy,
    _starting_pass,
)

OF_EXCHANGE = (_ladder, _young, _start, _trips, _explorer, _tokens, _free_energy, _starting_pass)
"""Rules for samplers that exchange replicas between levels."""


def percent(share: float) -> str:
    """With as many digits as it is worth."""
    if 0 < share < 1e-4:
        return "under 0.01 %"
    return f"{100 * share:.0f} %" if share >= 0.095 or share == 0 else f"{100 * share:.2g} %"


def _about(n: float) -> str:
    """With one digit, which is all that an extrapolation can give."""
    return f"about {float(f'{n:.1g}'):,.0f}"
