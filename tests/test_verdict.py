"""Bad runs are called bad, for the right reason; good ones hear nothing. Real chains on models with known truth."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch

import crepe_diffusion as cd
from crepe_diffusion import ladder
from crepe_diffusion.diagnostics.data import RunData
from crepe_diffusion.diagnostics.estimates import Estimate
from crepe_diffusion.diagnostics.evidence import DRIFT_Z, Evidence, ScalarSummary
from crepe_diffusion.diagnostics.verdict import LEVELS, SKEWED, Verdict, judge_particles, percent, verdict
from crepe_diffusion.kernels.swap import metropolis
from crepe_diffusion.models import GaussianMixture, TokenTable
from crepe_diffusion.stitching import Segments

LINE = GaussianMixture(weights=[0.3, 0.5, 0.2], means=[[-4.0], [0.0], [3.0]], stds=[0.5, 0.8, 0.4])
PLANE = GaussianMixture(weights=[0.3, 0.7], means=[[-3.0, 0.0], [2.0, 1.0]], stds=[0.5, 0.6])
WIDE = GaussianMixture(weights=[1.0], means=[[1.0, 0.0]], stds=[2.0])
SPACE = GaussianMixture(weights=[0.4, 0.6], means=[[-1.0] * 8, [1.0] * 8], stds=[0.3, 0.3])
TABLE = torch.tensor(
    [[[8, 1, 2], [1, 3, 1], [2, 1, 6]], [[1, 4, 1], [5, 1, 2], [1, 2, 1]], [[3, 1, 1], [1, 1, 7], [2, 6, 1]]]
)
MASKED, UNIFORM = TokenTable(TABLE, "masked"), TokenTable(TABLE, "uniform")
# Annealing that does not vanish leaves the noise end with a law that it is not drawn from.
TILTED_EVERYWHERE = GaussianMixture(weights=[0.5, 0.5], means=[[-4.0], [4.0]], stds=[0.5, 0.5]).tilt(
    lambda x: torch.where(x[:, 0] > 0, 0.0, -12.0), anneal=cd.anneal.constant()
)


def karras(n: int, low: float = 0.02, **options: int) -> cd.Ladder:
    return ladder.karras(n, low, 20.0, **options)


def run(target, levels, n=160, burn_in=40, chains=8, scalars=None, **options) -> RunData:
    chain = cd.ReplicaExchange(target, levels, n_chains=chains, seed=3, fit_samples=64, **options)
    return RunData.of(chain.sample(n, burn_in=burn_in), chain, scalars)


def never(log_alpha, stream):
    return torch.zeros_like(log_alpha, dtype=torch.bool)


def lazy(log_alpha, stream):
    """Swaps a quarter as often as it may, so that replicas diffuse where the prediction sees them drift."""
    return metropolis(log_alpha, stream.at("alpha")) & stream.at("lazy").bernoulli(
        torch.full_like(log_alpha, math.log(1 / 4))
    )


def refined(before: int, after: int) -> RunData:
    """A run whose reward was added on the way; a real one, put together from its two parts."""
    chain = cd.ReplicaExchange(PLANE, karras(6, substeps=2), n_chains=8, seed=4, fit_samples=64)
    first = RunData.of(chain.sample(before), chain)
    chain.target = PLANE.tilt(lambda x: x[:, 0], name="right")
    second = RunData.of(chain.sample(after), chain)
    both = {k: np.concatenate([getattr(first, k), getattr(second, k)]) for k in ("x", "iteration")}
    return replace(
        second,
        **both,
        target=np.repeat([0, 1], [before, after]),
        targets=[first.targets[0], {"from_iteration": before + 1, "rewards": [{"name": "right"}]}],
        scalars={k: np.concatenate([first.scalars[k], second.scalars[k]]) for k in first.scalars},
        columns={k: np.concatenate([first.columns[k], second.columns[k]]) for k in first.columns},
    )


def gap(n_low: int, n_high: int, low: float, high: float) -> cd.Ladder:
    """A geometric ladder from 0.02 to 20 with nothing between `low` and `high`."""
    below, above = np.geomspace(0.02, low, n_low) if n_low > 1 else np.array([low]), np.geomspace(high, 20, n_high)
    return ladder.of(np.concatenate([below, above]).tolist())


PAPER = cd.Proposal("paper")
BAD: dict[str, tuple[Callable[[], RunData], str, str]] = {
    "too few levels": (lambda: run(SPACE**2.0, karras(8), proposal=PAPER), "do not trust", "too few levels: 8 where"),
    "lowest pair stuck": (lambda: run(SPACE**2.0, gap(1, 24, 1e-3, 2.0)), "do not trust", "levels 0 and 1"),
    "middle pair stuck": (lambda: run(SPACE**2.0, gap(8, 12, 0.1, 2.5)), "do not trust", "is stuck"),
    "no round trip": (lambda: run(LINE**2.0, karras(61), 30, 0), "do not trust", "no fresh replica came"),
    "few round trips": (lambda: run(LINE**2.0, karras(21), 30, 0, 1), "do not trust", "fresh arrivals"),
    "too short": (lambda: run(LINE**2.0, karras(11), 80, 20, 1), "do not trust", "effective of 80 draws"),
    "rather short": (lambda: run(LINE**2.0, karras(9, substeps=2), 100, 20, 2), "look", "effective of 200 draws"),
    "young": (lambda: run(SPACE**2.0, karras(65), 150, 60, 4), "do not trust", "needs about"),
    "hardly begun": (lambda: run(LINE**2.0, karras(11), 10, 0), "do not trust", "only 10 draws"),
    "reward is NaN": (
        lambda: run(LINE.tilt(lambda x: torch.where(x[:, 0] > 1, math.nan, 0.0)), karras(11), nonfinite="reject"),
        "do not trust",
        "NaN or infinite",
    ),
    "reward is -inf": (
        lambda: run(LINE.tilt(lambda x: torch.full((len(x),), -math.inf)), karras(11)),
        "do not trust",
        "minus infinity wherever replicas stand",
    ),
    "chains disagree": (
        lambda: run(LINE**2.0, karras(11), accept=never, explorer=cd.Langevin(scale=0.5)),
        "do not trust",
        "chains disagree",
    ),
    "burn-in not over": (
        lambda: run(LINE.tilt(lambda x: 3 * x[:, 0]), karras(31), 120, 0, 48),
        "look",
        "burn-in is not over",
    ),
    "target changed": (lambda: refined(150, 90), "look", "only 90 of 240 draws"),
    "explorer refused": (
        lambda: run(LINE**2.0, karras(13), explorer=cd.Bounce(accept=never)),
        "look",
        "the explorer accepts 0 %",
    ),
    "noise end does not fit": (lambda: run(TILTED_EVERYWHERE, karras(11)), "look", "paths down but"),
    "nothing varies": (
        lambda: run(LINE**2.0, karras(11), scalars={"one": lambda x: x[:, 0] * 0 + 1}),
        "look",
        "one never",
    ),
    "replicas turn back": (lambda: run(WIDE, karras(5), 200, chains=12, accept=lazy), "look", "turn back"),
}
GOOD: dict[str, Callable[[], RunData]] = {
    "tempered": lambda: run(LINE**2.0, karras(6, substeps=4)),
    "tempered, bounce": lambda: run(LINE**2.0, karras(6, substeps=3), 120, explorer=cd.Bounce()),
    "tempered plane, Langevin": lambda: run(PLANE**1.5, karras(6, substeps=4), explorer=cd.Langevin()),
    "tempered, 8 dimensions": lambda: run(SPACE**1.5, karras(7, substeps=5)),
    "heated": lambda: run(PLANE**0.6, karras(6, substeps=4)),
    "tilted": lambda: run(LINE.tilt(lambda x: -((x[:, 0] - 2) ** 2) / 2), karras(6, substeps=2), explorer=cd.Bounce()),
    "guided": lambda: run(cd.guided(PLANE, WIDE, 1.5), karras(6, substeps=4), 300),
    "product": lambda: run(PLANE * WIDE, karras(6, substeps=4)),
    "segments": lambda: run(
        Segments(LINE, 2).tilt(lambda x: -(x[:, 0, 0] - x[:, 1, 0]).abs() / 3), karras(6, substeps=2), 200
    ),
    "one chain": lambda: run(LINE**2.0, karras(6, substeps=2), 600, 60, 1),
    "masked tokens": lambda: run(MASKED**2.0, ladder.linear(6, substeps=2), 400, explorer=cd.SingleToken()),
    "masked tokens, tilted": lambda: run(
        MASKED.tilt(lambda x: (x == 0).double().sum(1), on="mode"), ladder.linear(6, substeps=2)
    ),
    "uniform tokens": lambda: run(UNIFORM**1.5, ladder.linear(6, substeps=2)),
    "refined long ago": lambda: refined(40, 200),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_runs_are_called_bad_for_the_right_reason(name):
    make, level, reason = BAD[name]
    said = verdict(make())
    assert said.level == level, said
    assert any(reason in r for r in said.reasons), said
    assert said.advice


SLOW = (
    "product",
    "heated",
    "tempered plane, Langevin",
    "one chain",
    "guided",
    "tempered, bounce",
    "tempered, 8 dimensions",
    "uniform tokens",
    "refined long ago",
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in GOOD])
def test_good_runs_hear_nothing(name):
    assert verdict(GOOD[name]()) == Verdict("ok")


def test_the_ladder_is_blamed_before_its_effects():
    said = verdict(BAD["too few levels"][0]())
    assert said.reasons[0].startswith("too few levels: 8 where Lambda ~ ")
    assert said.advice[0].startswith("take about ")
    assert not any(a.startswith("run about") for a in said.advice), "more of the same does not help"


def test_only_draws_that_count_are_judged():
    """The same draws are good or bad depending on which of them burn-in and the history leave to be judged."""
    data = run(LINE**2.0, karras(6, substeps=3), 200)
    spoilt = {k: v.copy() for k, v in data.scalars.items()}
    for v in spoilt.values():
        v[:40] += 20
    assert verdict(replace(data, scalars=spoilt)).level != "ok"
    assert verdict(replace(data, scalars=spoilt, n_burnt=40)).level == "ok"
    changed = [*data.targets, {"from_iteration": int(data.iteration[40]), "rewards": []}]
    assert verdict(replace(data, scalars=spoilt, target=np.arange(200) >= 40, targets=changed)).level == "ok"


def test_counts_of_what_was_not_finite_decide_the_level():
    data = run(LINE, karras(6), 60, 20)
    few, many = data.counts.copy(), data.counts.copy()
    few.nonfinite[3] += 1
    many.nonfinite[3] += many.rows // 50
    assert verdict(replace(data, counts=few)).level == "look"
    assert verdict(replace(data, counts=many)).level == "do not trust"


@pytest.mark.parametrize("phi", [0.0, 0.8])
def test_agreeing_chains_stay_below_the_bars_and_shifted_ones_do_not(phi):
    """AR(1) chains, 60 of them per case; a false alarm has a chance of 1e-5 for R-hat and of 0.3 % for drift."""
    rng = np.random.default_rng(5)
    noise = rng.standard_normal((60, 500, 4))
    x = np.zeros_like(noise)
    for i in range(1, 500):
        x[:, i] = phi * x[:, i - 1] + noise[:, i]
    x = x[:, 100:]
    agreeing = [ScalarSummary("x", v) for v in x]
    assert all(s.rhat < max(1.01, s.rhat_by_chance) for s in agreeing)
    # Binomial(60, 0.003) exceeds 3 once in 10,000 cases, and short chains underrate their errors a little.
    assert sum(abs(s.drift) > DRIFT_Z for s in agreeing) <= 3
    apart = [ScalarSummary("x", v + 3 * v.std() * np.array([1, 0, 0, 0])) for v in x]
    assert all(s.rhat > max(1.01, s.rhat_by_chance) and s.odd_chain()[0] == 0 for s in apart)
    late = [ScalarSummary("x", v + 5 * v.std() * (np.arange(400) < 40)[:, None]) for v in x]
    assert sum(abs(s.drift) > DRIFT_Z for s in late) > 40
    assert all(20 <= s.burn_in_over() <= 200 for s in late if abs(s.drift) > DRIFT_Z), (
        "the transient lasts for 40 draws"
    )


def test_free_energies_are_the_diagnostics_own():
    data = run(LINE**2.0, karras(8), 100)
    assert Evidence(data).log_z["bar"] == data.diagnostics.log_z()
    assert Evidence(data).suggested_levels == data.diagnostics.suggested_levels()


def test_percentages_keep_the_digits_that_matter():
    assert [percent(p) for p in (0, 1e-9, 0.0012, 0.031, 0.14, 1)] == [
        "0 %",
        "under 0.01 %",
        "0.12 %",
        "3.1 %",
        "14 %",
        "100 %",
    ]
    assert LEVELS == ("ok", "look", "do not trust")


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
def test_a_chain_that_has_not_forgotten_its_start_is_not_called_ok(seed):
    """Two modes in 32 dimensions, tempered: with 65 levels the second one is far from its weight of 0.495."""
    means = torch.zeros(2, 32, dtype=torch.float64)
    means[:, 0] = torch.tensor([-1.5, 1.5])
    p = GaussianMixture([0.844, 0.156], means, [0.30, 0.27])
    chain = cd.ReplicaExchange(p**2.0, ladder.karras(65, 0.02, 10.0), n_chains=4, seed=seed)
    out = chain.sample(400, burn_in=260)
    second = out.mean(lambda x: (x[:, 0] > 0).double())
    assert second.value < 0.42, "the case is about chains that are visibly off"
    said = verdict(RunData.of(out, chain, {"second": lambda x: (x[:, 0] > 0).double()}))
    assert said.level != "ok"
    assert any("trips per replica" in reason for reason in said.reasons)
    assert any("levels with" in advice for advice in said.advice), "the advice names the number to change"


def test_a_chosen_scalar_that_never_varies_is_news_and_a_fixed_coordinate_is_not():
    """A mode that no replica has found looks like one that does not exist."""
    chain = cd.ReplicaExchange(PLANE, cd.ladder.karras(6, 0.05, 10.0), n_chains=4, seed=1)
    out = chain.sample(60, burn_in=20)
    varies = {"first": lambda x: x[:, 0]}
    absent = out.verdict({**varies, "far mode": lambda x: (x[:, 0] > 1e6).double()})
    fixed = out.verdict({**varies, "x[0]": lambda x: 0 * x[:, 0]})
    assert any(r.startswith("far mode is 0 in all of 240 draws") for r in absent.reasons)
    assert not any("in all of" in r for r in fixed.reasons)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.5])
def test_unequal_weights_need_as_many_particles_as_their_skewness_asks_for(sigma):
    """Lognormal weights: a share `exp(-sigma^2)` is effective, and Cochran's rule has the square of their skewness."""
    skewness = float(scipy.stats.lognorm.stats(sigma, moments="s"))
    needed = SKEWED * skewness**2

    def judged(n: int) -> Verdict:
        shares = [1 / 100] * 100
        return judge_particles(shares, "batches", Estimate(0.0, 0.1), {"x": 1000.0}, None, (math.exp(-(sigma**2)), n))

    assert judged(math.ceil(needed * 1.001)).level == "ok"
    found = judged(math.floor(needed * 0.999))
    assert found.level == "look"
    assert "narrowest level" in found.reasons[0]


def test_the_narrowest_level_of_each_batch_is_what_counts():
    """Batches may collapse at different levels; the mean over batches at one level would hide it."""
    level_ess = torch.tensor([[64.0, 4.0], [4.0, 64.0], [64.0, 64.0]])
    even = torch.full((2, 64), -math.log(64), dtype=torch.float64)
    zero = torch.zeros(2, dtype=torch.float64)
    out = cd.samplers.Particles(
        torch.randn(128, 1, generator=torch.Generator().manual_seed(0)),
        cd.evaluate.Counts(),
        even,
        zero,
        torch.arange(128),
        level_ess,
        zero.long(),
    )
    assert any("6.2 %" in reason for reason in out.verdict().reasons)
    assert not any("narrowest" in r for r in replace(out, level_ess=level_ess.clamp(min=32)).verdict().reasons)


@pytest.mark.parametrize("kind", ["particles", "sweeps", "chains"])
def test_a_mean_that_large_steps_leave_open_is_not_ok(kind):
    """The stated error contains what the steps do; of half a standard deviation, no verdict may be "ok"."""
    pilot = cd.pilot(PLANE**1.5, karras(17), n=64, seed=1, fit_samples=64)
    if kind == "particles":
        out = cd.SMC(pilot.target, pilot=pilot, n_particles=64, n_batches=40, seed=1).sample(progress=False)
    elif kind == "sweeps":
        out = cd.ParticleGibbs(pilot.target, pilot=pilot, n_particles=32, n_chains=6, seed=1).sample(12, progress=False)
    else:
        out = cd.ReplicaExchange(pilot.target, pilot=pilot, n_chains=8, seed=1).sample(160, progress=False)
    scalars = {"first": lambda x: x[:, 0]}
    start, first = out.started_from, scalars["first"]
    w, x = start.log_weights.exp(), first(start.x).double()
    centred = x - w @ x
    sd = float(out.values(first).double().std() if kind == "chains" else out._variance(out.values(first)) ** 0.5)

    def judged(shift: float) -> Verdict:
        """Steps that would change weights in such a way that the mean moves by so many standard deviations."""
        steps = shift * sd * centred / (w @ centred.square())
        moved = replace(out, started_from=replace(start, steps=steps))
        assert moved.mean(first).error >= 0.999 * shift * sd
        return moved.verdict(scalars)

    assert judged(0.49).level == "ok"
    found = judged(0.51)
    assert found.level == "look"
    assert found.reasons == [
        "the size of the steps may move the mean of first by 0.51 standard deviations, which is part of its error"
    ]
    wanted = "about 30 steps instead of 16" if kind == "chains" else "about 2 times as many steps"
    assert found.advice == [f"take {wanted}, or a pilot of more particles, which knows this better"]


@pytest.mark.parametrize(("kind", "part", "parts"), [("tours", "sweep", "sweeps"), ("batches", "batch", "batches")])
def test_advice_for_particles_names_what_the_sampler_has(kind, part, parts):
    found = judge_particles([0.5, 0.3, 0.2], kind, Estimate(0.0, 0.9), {"x": 10.0})
    assert found.level == "do not trust"
    assert found.advice == [
        f"take about 10 {kind}, or more particles in each {part}",
        f"take about 5 times as many {parts} for 50 effective draws",
        f"take more particles in each {part}, or a better proposal",
    ]
    assert any(f": {parts} differ so much" in reason for reason in found.reasons)
    nearly = judge_particles([0.01] * 100, kind, Estimate(0.0, 0.1), {"x": 44.0})
    assert nearly.advice == [f"take about 2 times as many {parts} for 50 effective draws"], "once is no advice"
