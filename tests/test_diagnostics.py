"""What a chain says of itself: counts are exact, estimates agree with closed forms within their own stated errors.

Works are injected that satisfy Crooks' relation, `W_down ~ N(F - s^2/2, s^2)` and `W_up ~ N(F + s^2/2, s^2)`: then
`log Z_m / Z_{m+1} = F` and the acceptance is `E[min(1, exp(W_down - W_up))] = 2 Phi(-s / sqrt(2))`.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.signal import lfilter
from scipy.special import expit
from scipy.stats import norm, t

import crepe_diffusion as cd
from checks import assert_mean, f64, refuted
from crepe_diffusion.diagnostics import Diagnostics
from crepe_diffusion.diagnostics.estimates import mean_of
from crepe_diffusion.diagnostics.exchange import _bar
from crepe_diffusion.processes import FisherTable, Gaussian
from crepe_diffusion.random import Stream

STREAM = Stream(9)


# -- the index process ---------------------------------------------------------------------------------------


def always(log_alpha, stream):
    return torch.ones_like(log_alpha, dtype=torch.bool)


def never(log_alpha, stream):
    return torch.zeros_like(log_alpha, dtype=torch.bool)


def chain_of(n_levels, accept, n_chains=1, first=1):
    """A chain whose acceptance is injected; its first iteration has this number."""
    model = cd.models.GaussianMixture([1.0], [[0.3]], [1.0])
    ladder = cd.ladder.geometric(n_levels, 0.1, 10.0)
    process = Gaussian(variance=1.0)
    chain = cd.ReplicaExchange(model**1.5, ladder, process=process, accept=accept, n_chains=n_chains)
    chain.iteration = first - 1
    return chain


def on_a_circle(n_levels, n_iterations, first):
    """Trips and restarts if every swap is accepted, in closed form.

    A replica then runs around a circle of 2 L places, up through the levels and down again, waiting once at each end.
    """
    top, bottom, period, trips, restarts = n_levels - 1, 2 * n_levels - 1, 2 * n_levels, 0, 0
    for level in range(n_levels):
        place = level if (level - first) % 2 else bottom - level
        to_top, to_bottom = (top - place) % period, (bottom - place) % period
        arrivals = [n for n in range(1, n_iterations + 1) if n % period == to_top]
        since = 0 if level == top else to_top  # when it is first known to come from the noise end
        trips += max(0, len(arrivals) - (level != top))
        restarts += sum(n % period == to_bottom and n > since for n in range(1, n_iterations + 1))
    return trips, restarts


@pytest.mark.parametrize("first", [1, 2], ids=["odd", "even"])
@pytest.mark.parametrize("n_levels", range(2, 21))
def test_round_trips_are_counted_exactly_when_every_swap_is_accepted(n_levels, first):
    n_iterations = 2 * n_levels + n_levels // 2 + 3
    chain = chain_of(n_levels, always, n_chains=2, first=first)
    for _ in range(n_iterations):
        chain.step()
    trips, restarts = on_a_circle(n_levels, n_iterations, first)
    assert trips > 0
    assert (chain.diagnostics.round_trips(), chain.diagnostics.restarts()) == (2 * trips, 2 * restarts)
    assert trips != on_a_circle(n_levels, n_iterations - n_levels - 1, first)[0]


def simulate(n_levels, n_iterations, first, rule):
    """The index process on plain lists: who is where, who has been where, and when each was last at the noise end."""
    at = list(range(n_levels))  # at[level] = replica
    seen_top = [m == n_levels - 1 for m in range(n_levels)]
    seen_bottom = [False] * n_levels
    born, trips, restarts = [0] * n_levels, 0, 0
    for n in range(first, first + n_iterations):
        for m in range(1, n_levels):
            if (m - n) % 2 == 0 and rule(n, m - 1):
                at[m - 1], at[m] = at[m], at[m - 1]
        bottom, top = at[0], at[-1]
        if seen_top[bottom] and not seen_bottom[bottom]:
            restarts += 1
            seen_bottom[bottom] = True
        if seen_top[top] and seen_bottom[top]:
            trips += 1
        seen_top[top], seen_bottom[top], born[top] = True, False, n
    return at, born, trips, restarts


@pytest.mark.parametrize("first", [1, 2], ids=["odd", "even"])
@pytest.mark.parametrize("n_levels", [2, 3, 4, 7])
def test_round_trips_lineage_and_birth_agree_with_a_simulation(n_levels, first):
    def rule(n, pair):
        return (n * 7 + pair * 3) % 5 != 0

    counter = {"n": first - 1}

    def accept(log_alpha, stream):
        counter["n"] += 1
        return torch.tensor([[rule(counter["n"], pair) for pair in range(n_levels - 1)]])

    chain = chain_of(n_levels, accept, first=first)
    for _ in range(60):
        info = chain.step()
    at, born, trips, restarts = simulate(n_levels, 60, first, rule)
    assert trips > 2
    assert (chain.diagnostics.round_trips(), chain.diagnostics.restarts()) == (trips, restarts)
    assert chain.state.replica_at()[0].tolist() == at
    assert chain.diagnostics.trips.born[0].tolist() == born
    assert (int(info.replica[0]), int(info.born[0])) == (at[0], born[at[0]])
    assert trips != simulate(n_levels, 60, first, lambda n, pair: not rule(n, pair))[2]


@pytest.mark.parametrize("burn_in", [5, 9, 16])
def test_replicas_that_are_on_their_way_at_the_end_of_burn_in_are_still_counted(burn_in):
    """Trips, restarts and births after burn-in are those that a chain without one counts from there on."""
    n_levels, n = 4, 13
    whole, cut = (chain_of(n_levels, always, n_chains=2) for _ in range(2))
    whole.sample(burn_in)
    before = whole.diagnostics.trips.n_trips.clone(), whole.diagnostics.trips.n_restarts.clone()
    expected = whole.sample(n)
    found = cut.sample(n, burn_in=burn_in)
    assert torch.equal(found.diagnostics.trips.n_trips, expected.diagnostics.trips.n_trips - before[0])
    assert torch.equal(found.diagnostics.trips.n_restarts, expected.diagnostics.trips.n_restarts - before[1])
    assert torch.equal(found.born, expected.born)
    assert (found.diagnostics.round_trips(), found.diagnostics.restarts()) != (0, 0)
    # Had the phase been lost, all would start from nowhere again.
    assert found.diagnostics.round_trips() > 2 * on_a_circle(n_levels, n, burn_in + 1)[0]


def test_no_swap_no_trip():
    chain = chain_of(4, never)
    chain.sample(30)
    assert (chain.diagnostics.round_trips(), chain.diagnostics.restarts()) == (0, 0)
    assert chain.diagnostics.accepts.sum() == 0
    assert chain.diagnostics.tries.tolist() == [15, 15, 15]


def test_the_predicted_number_of_round_trips_is_the_counted_one():
    """Independent swaps of constant acceptance: the rate 1 / (2 + 2 sum r / (1 - r)) is then exact."""
    a = f64([0.9, 0.5, 0.7, 0.3, 0.8])
    n_chains, n_levels = 24, 6

    level = torch.arange(n_levels).expand(n_chains, -1).clone()
    work = torch.cat([torch.zeros(1), -a.log()]).cumsum(0).neg().expand(n_chains, -1)  # down - up = log a
    diagnostics = Diagnostics(level)
    for n in range(1, 1501):
        if n == 301:  # stationary by now; the index process goes on
            trips, diagnostics = diagnostics.trips, Diagnostics(level)
            diagnostics.trips.phase, diagnostics.trips.born = trips.phase, trips.born
        active = (torch.arange(1, n_levels) - n) % 2 == 0
        accepted = (STREAM.at(n).uniform((n_chains, n_levels - 1)) < a) & active
        step = torch.nn.functional.pad(accepted.long(), (0, 1)) - torch.nn.functional.pad(accepted.long(), (1, 0))
        level = level + step.gather(1, level)
        diagnostics.record(n, level, work, accepted, active)
    assert (level.sort(1).values == torch.arange(n_levels)).all()
    counted = diagnostics.trips.n_trips.sum(1).to(torch.float64)
    predicted = diagnostics.predicted_round_trips() / n_chains
    assert predicted == pytest.approx(1200 / (2 + 2 * float(((1 - a) / a).sum())), rel=1e-6)
    assert_mean(counted, predicted)
    refuted(assert_mean, counted, 1.08 * predicted)
    refuted(assert_mean, counted, 0.92 * predicted)


# -- injected works ------------------------------------------------------------------------------------------

F = f64([0.3, -1.2, 2.0])
SPREAD = f64([0.4, 0.7, 1.0])
LAMBDA = sum(1 - 2 * norm.cdf(-s / math.sqrt(2)) for s in SPREAD.tolist())


def inject(diagnostics, down, up):
    """Record works (cycles, chains, pairs) as a chain would: half of the pairs in each iteration."""
    cycles, n_chains, n_pairs = down.shape
    level = torch.arange(n_pairs + 1).expand(n_chains, -1)
    for n in range(1, 2 * cycles + 1):
        active = (torch.arange(1, n_pairs + 1) - n) % 2 == 0
        work = torch.full((n_chains, n_pairs + 1), math.nan, dtype=torch.float64)
        work[:, 1:][:, active] = down[(n - 1) // 2][:, active]
        work[:, :-1][:, active] = up[(n - 1) // 2][:, active]
        diagnostics.record(n, level, work, active.expand(n_chains, -1), active)
    return diagnostics


def autocorrelated(z, phi):
    """Standard normals (n, ...) made into an autoregression along the first axis, with the same marginals."""
    driven = math.sqrt(1 - phi**2) * z
    driven[0] = z[0]
    return f64(lfilter([1.0], [1.0, -phi], driven.numpy(), axis=0))


def filled(down, up):
    """Diagnostics that have recorded these works; `inject` does the same iteration by iteration."""
    d = Diagnostics(torch.arange(down.shape[2] + 1).expand(down.shape[1], -1))
    d._down, d._up = down.to(torch.float32), up.to(torch.float32)
    return d


def crooks(seed, cycles=120, n_chains=2, memory=0.0, record=filled):
    """Diagnostics of a chain whose works are Gaussian, with autocorrelation `memory` per cycle."""
    down, up = autocorrelated(STREAM.at("crooks", seed).normal((cycles, n_chains, 6)), memory).chunk(2, dim=-1)
    return record(F - SPREAD**2 / 2 + SPREAD * down, F + SPREAD**2 / 2 + SPREAD * up)


def test_filling_the_buffers_is_what_recording_does():
    def recorded(down, up):
        return inject(Diagnostics(torch.arange(4).expand(2, -1)), down, up)

    one, other = (crooks(0, record=record) for record in (filled, recorded))
    for a, b in zip(one.works(), other.works(), strict=True):
        assert torch.equal(a, b)


def check_calibrated(estimates, truth, scale=1.0):
    """Standardised errors of 60 runs: no bias, of unit size, and most within two.

    Errors from few groups have few degrees of freedom, and z is the normal variable of the same probability. Its mean
    square over 60 runs is 1 +- 0.18, and 95 % are below two: the bounds are three standard errors away or more.
    """
    z = f64([norm.ppf(t.cdf((e.value - truth) / (scale * e.error), min(e.dof, 1e9))) for e in estimates])
    assert abs(float(z.mean())) < 4 / math.sqrt(len(z))
    assert 0.4 < float(z.square().mean()) < 2.2
    assert float((z.abs() < 2).to(torch.float64).mean()) > 0.84


@pytest.mark.parametrize("memory", [0.0, 0.6], ids=["independent", "autocorrelated"])
def test_barrier_and_log_z_agree_with_closed_forms_within_their_stated_errors(memory):
    runs = [crooks(seed, 120 if memory == 0 else 300, memory=memory) for seed in range(60)]
    for estimates, truth in (
        ([d.barrier() for d in runs], LAMBDA),
        *(([d.log_z(method) for d in runs], float(F.sum())) for method in ("down", "up", "bar")),
    ):
        check_calibrated(estimates, truth)
        for scale in (0.5, 3.0):
            refuted(check_calibrated, estimates, truth, scale)
        refuted(check_calibrated, estimates, truth + 0.2)
    forward, bar = (sum(d.log_z(m).error for d in runs[:20]) for m in ("down", "bar"))
    assert bar < forward  # what both directions are for


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0, 60.0])
def test_bar_solves_its_equation(spread):
    """E_down[1 / (1 + exp(c - W))] = E_up[1 / (1 + exp(W - c))], also where a tenth of the paths failed."""
    z = STREAM.at("bar").normal((400, 8))
    down, up = 50 + spread * z[:, :4] - spread**2 / 2, 50 + spread * z[:, 4:] + spread**2 / 2
    down[::10] = -math.inf
    c = _bar([down], [up])[0]
    left, right = (1 / (1 + (c - down).exp())).mean(0), (1 / (1 + (up - c).exp())).mean(0)
    torch.testing.assert_close(left, right, atol=1e-9, rtol=0)


def test_the_error_of_log_z_is_the_jackknife_of_its_definition():
    """Every replicate solved on its own, by a root finder that knows nothing of Newton's steps."""
    z = STREAM.at("jackknife").normal((70, 3, 8))
    spread = f64([0.1, 1.0, 3.0, 12.0])
    down, up = (5 + s * spread**2 / 2 + spread * v for s, v in ((-1, z[..., :4]), (1, z[..., 4:])))
    down[::9, 0, 2] = -math.inf
    d = filled(down, up)
    down, up = (w.numpy() for w in d.works())

    def bennett(kept, m):
        w, v = down[kept, m], up[kept, m]
        return brentq(lambda c: expit(w - c).mean() - expit(c - v).mean(), -1e3, 1e3, xtol=1e-13, rtol=1e-14)

    # Three chains make too few groups, so each of them is cut in two.
    left_out = []
    for chain in range(3):
        for half in (slice(0, 35), slice(35, 70)):
            kept = np.ones((70, 3), dtype=bool)
            kept[half, chain] = False
            left_out.append(sum(bennett(kept, m) for m in range(4)))
    estimate = d.log_z("bar")
    assert estimate.value == pytest.approx(sum(bennett(np.ones((70, 3), dtype=bool), m) for m in range(4)), abs=1e-9)
    assert estimate.error == pytest.approx(math.sqrt(5 * np.var(left_out)), rel=1e-8)
    assert estimate.dof == 5


@pytest.mark.parametrize("method", ["down", "up", "bar"])
def test_a_pair_without_a_possible_path_has_no_finite_log_z(method):
    z = STREAM.at("impossible").normal((40, 2, 4))
    down, up = z[..., :2].clone(), z[..., 2:].clone()
    down[..., 0] = -math.inf
    estimate = filled(down, up).log_z(method)
    if method == "up":  # these paths are possible
        assert math.isfinite(estimate.value)
    else:
        assert estimate.value == -math.inf
        assert math.isnan(estimate.error)
    down[3, 0, 0] = 0.5  # one path of 80: a value, and an error only where every block has its own
    estimate = filled(down, up).log_z(method)
    assert math.isfinite(estimate.value)
    assert math.isfinite(estimate.error) == (method == "up")


def test_acceptance_of_each_pair_is_its_closed_form():
    runs = torch.stack([crooks(seed).acceptance() for seed in range(60)])
    truth = f64([2 * norm.cdf(-s / math.sqrt(2)) for s in SPREAD.tolist()])
    assert_mean(runs, truth)
    refuted(assert_mean, runs, truth.roll(1))


def test_a_chain_on_gaussian_data_knows_its_normaliser():
    """p^beta of N(mu, rho^2): Z_t = int N(x; mu, rho^2 + t^2)^beta dx, so log Z_0 / Z_M is known at any step."""
    beta, rho, ladder = 2.2, 0.8, cd.ladder.karras(6, 0.2, 12.0)
    t2 = ladder.times[None, :, None] ** 2
    process = Gaussian(information=FisherTable(ladder.times, t2 / (t2 + rho**2), f64([[1.3]])))
    model = cd.models.GaussianMixture([1.0], [[1.3]], [rho])
    chain = cd.ReplicaExchange(model**beta, ladder, process=process, n_chains=60, seed=3)
    chain.sample(120, burn_in=20)
    v_0, v_top = (rho**2 + float(t) ** 2 for t in (ladder.times[0], ladder.times[-1]))
    truth = (1 - beta) / 2 * math.log(v_0 / v_top)

    def check(value):
        for method in ("down", "up", "bar"):
            estimate = chain.diagnostics.log_z(method)
            assert abs(estimate.value - value) < 4 * estimate.error < 0.4, (method, str(estimate), value)

    check(truth)
    refuted(check, truth * 1.1)
    refuted(check, -truth)


def test_suggested_levels_are_twice_the_barrier_plus_one():
    for seed in range(5):
        d = crooks(seed)
        assert d.suggested_levels() == math.ceil(2 * d.barrier().value) + 1
    perfect = chain_of(3, always)
    perfect.target = perfect.target.models[0]  # control off
    perfect.sample(20)
    assert perfect.diagnostics.barrier().value == pytest.approx(0.0, abs=1e-6)
    assert perfect.diagnostics.suggested_levels() == 2


# -- Wilson intervals ----------------------------------------------------------------------------------------


def coin_flips(seed, a, n=80):
    """One pair that is accepted for sure or not at all."""
    flips = STREAM.at("flips", seed).uniform((n, 1, 1)) < a
    down = torch.where(flips, 0.0, -1e4).to(torch.float64)
    return filled(down, torch.zeros_like(down))


@pytest.mark.parametrize("a", [0.05, 0.6, 0.97])
def test_wilson_intervals_cover(a):
    """95 % intervals: 300 of them cover at least 90 % of the time, or something is wrong (false alarm 2e-4)."""
    runs = [coin_flips(seed, a) for seed in range(300)]

    def check(z):
        low, high = torch.stack([d.acceptance_interval(z)[0] for d in runs]).T
        assert ((low >= -1e-12) & (high <= 1 + 1e-12) & (low < high)).all()
        assert float(((low <= a) & (a <= high)).to(torch.float64).mean()) > 0.9
        assert float((high - low).mean()) < 4 * 1.96 * math.sqrt(a * (1 - a) / 80) + 0.05

    check(1.96)
    refuted(check, 1.0)


def test_wilson_intervals_of_certain_outcomes_are_not_points():
    z2 = 1.96**2
    for n in (3, 80, 81):
        low, high = coin_flips(0, 2.0, n).acceptance_interval()[0].tolist()
        assert (low, high) == pytest.approx((n / (n + z2), 1.0))
        low, high = coin_flips(0, -1.0, n).acceptance_interval()[0].tolist()
        assert (low, high) == pytest.approx((0.0, z2 / (n + z2)))


def test_wilson_intervals_of_several_pairs_are_those_of_each():
    d = crooks(1, memory=0.6)
    a, z2 = d.acceptance_series(), 1.96**2
    for m, (low, high) in enumerate(d.acceptance_interval().tolist()):
        p, n = float(a[..., m].mean()), cd.ess(a[..., m])
        for bound in (low, high):  # Wilson's bounds are where the mean is z standard errors away
            assert (p - bound) ** 2 == pytest.approx(z2 * bound * (1 - bound) / n, rel=1e-9)
        assert low < p < high


# -- memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [64, 50, 7])
def test_thinning_bounds_memory_and_keeps_every_strideth_entry(capacity):
    cycles, n_pairs = 500, 3
    number = torch.arange(cycles, dtype=torch.float64)[:, None, None].expand(cycles, 2, n_pairs)
    d = inject(Diagnostics(torch.arange(n_pairs + 1).expand(2, -1), capacity=capacity), number, -number)
    down, up = d.works()
    assert len(down) <= capacity
    assert len(down) >= capacity // 2
    assert len(d._down) <= 2 * max(64, capacity)
    assert torch.equal(down[:, 0, 0], torch.arange(0, cycles, d.stride, dtype=torch.float64))
    assert torch.equal(down, -up)
    assert d.stride == 2 ** round(math.log2(d.stride))
    assert d.n_iterations == 2 * cycles


def test_thinning_keeps_the_estimates():
    z = STREAM.at("thin").normal((1200, 4, 6))
    down, up = F - SPREAD**2 / 2 + SPREAD * z[..., :3], F + SPREAD**2 / 2 + SPREAD * z[..., 3:]
    level = torch.arange(4).expand(4, -1)
    full, thin = (inject(Diagnostics(level, capacity=c), down, up) for c in (4096, 128))
    for f in (Diagnostics.barrier, Diagnostics.log_z):
        assert abs(f(full).value - f(thin).value) < 5 * f(thin).error
        assert f(full).error < f(thin).error
    assert full.tries.tolist() == thin.tries.tolist() == [1200] * 3


@pytest.mark.parametrize("n", range(1, 6))
def test_a_pair_that_has_not_met_is_not_counted(n):
    """An unfinished cycle is left out, whichever parity began."""
    for first in (1, 2):
        chain = chain_of(4, always, first=first)
        for _ in range(n):
            chain.step()
        assert len(chain.diagnostics.works()[0]) == n // 2
        summary = chain.diagnostics.summary()
        assert summary["iterations"] == n
        assert summary["suggested levels"] >= 2


def test_works_that_are_no_numbers_count_as_rejections():
    d = inject(
        Diagnostics(torch.arange(2)[None]), *(torch.full((20, 1, 1), math.nan, dtype=torch.float64) for _ in "du")
    )
    assert d.acceptance().tolist() == [0.0]
    half = f64([0.0, math.nan] * 20)[:, None, None]
    for down, up in ((half, torch.zeros_like(half)), (torch.zeros_like(half), half), (half, half)):
        d = inject(Diagnostics(torch.arange(2)[None]), down, up)
        assert d.acceptance().tolist() == [0.5]
        assert math.isfinite(d.log_z("bar").value)


# -- effective sample size and R-hat ---------------------------------------------------------------------------


def autoregression(phi, n, n_chains):
    return autocorrelated(STREAM.at("ar", str(phi)).normal((n, n_chains)), phi)


@pytest.mark.parametrize("n_chains", [1, 4])
@pytest.mark.parametrize("phi", [0.0, 0.5, 0.85, -0.3])
def test_ess_of_an_autoregression_is_its_closed_form(phi, n_chains):
    """ESS / n = (1 - phi) / (1 + phi); over 100,000 draws its estimate is good to a few per cent."""
    x = autoregression(phi, 100_000 // n_chains, n_chains)

    def check(other):
        assert cd.ess(x) == pytest.approx(100_000 * (1 - other) / (1 + other), rel=0.1)

    check(phi)
    refuted(check, phi + (0.03 if phi > 0.8 else 0.12))


@pytest.mark.parametrize("n_draws", [4, 5, 6, 7, 9, 30, 31, 1000])
def test_ess_is_that_of_arviz(n_draws):
    """Short and long, few chains and many, with correlations of both signs, a drift, and chains that differ."""
    from arviz_stats.base.array import array_stats

    for n_chains in (1, 2, 5):
        for phi in (-0.9, 0.0, 0.5, 0.99):
            x = autocorrelated(STREAM.at("arviz", n_chains, str(phi)).normal((n_draws, n_chains)), phi)
            drift, apart = torch.linspace(0, 3, n_draws)[:, None], torch.arange(n_chains)
            for values in (x, x + drift, x + apart, (x > 0.5).double(), 1e6 + x):
                if float(values.std()):
                    wanted = array_stats.ess(values.T.numpy(), chain_axis=0, draw_axis=1, method="mean")
                    assert cd.ess(values) == pytest.approx(float(wanted), rel=1e-6)


def test_ess_knows_that_repeated_draws_are_no_new_ones():
    x = autoregression(0.0, 10_000, 2)
    assert cd.ess(x.repeat_interleave(2, dim=0)) == pytest.approx(cd.ess(x), rel=0.15)


def test_a_constant_has_no_effective_samples_and_no_r_hat():
    assert cd.ess(torch.ones(100, 3)) == 0.0
    assert math.isnan(cd.rhat(torch.ones(100, 3)))
    assert mean_of(torch.ones(100, 3)).error == 0.0


def test_a_series_too_short_for_an_error_claims_none():
    assert math.isnan(mean_of(f64([[1.0], [2.0], [4.0]])).error)
    assert math.isnan(mean_of(f64([[1.0]])).value)


@pytest.mark.parametrize("phi", [0.0, 0.8])
def test_the_error_of_a_mean_allows_for_autocorrelation(phi):
    x = autoregression(phi, 1500, 60)
    estimates = [mean_of(x[:, [i]]) for i in range(60)]
    check_calibrated(estimates, 0.0)
    refuted(check_calibrated, estimates, 0.0, 0.5)


def test_r_hat_tells_chains_that_differ():
    x = autoregression(0.3, 2000, 4)
    assert cd.rhat(x) < 1.01
    assert cd.rhat(x + torch.tensor([0.0, 0.0, 0.0, 2.0])) > 1.2
    one = autoregression(0.3, 4000, 1)
    assert cd.rhat(one) < 1.01
    assert cd.rhat(one + torch.linspace(0, 2, 4000)[:, None]) > 1.2


@pytest.mark.parametrize("f", [cd.ess, cd.rhat])
def test_values_that_are_no_numbers_or_not_by_chain_are_refused(f):
    with pytest.raises(cd.InputError, match="1 of 200 values are not finite"):
        f(torch.cat([torch.ones(199), f64([math.nan])]).reshape(100, 2))
    with pytest.raises(cd.InputError, match=r"\(draws, chains\), got shape \(100,\)"):
        f(torch.ones(100))
