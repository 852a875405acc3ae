"""The pilot against what is known: log Z, the acceptance of a run, the law from which replicas start, and its cost."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import crepe_diffusion as cd
from checks import assert_mean, refuted
from crepe_diffusion.diagnostics import Estimate, RunData
from crepe_diffusion.diagnostics.estimates import tours
from crepe_diffusion.diagnostics.evidence import Evidence
from crepe_diffusion.diagnostics.starting import METHODS, StartingPass, heaviest
from crepe_diffusion.errors import InputError, StoppedError
from crepe_diffusion.samplers.discretisation import Coupled, Doubling
from crepe_diffusion.samplers.pilot import RESAMPLE_BELOW, _token_features
from crepe_diffusion.samplers.setup import part

DIM, STEPS = 4, 32
MEANS = torch.zeros(2, DIM, dtype=torch.float64)
MEANS[:, 0] = torch.tensor([-1.5, 1.5])
MODEL = cd.models.GaussianMixture([0.7, 0.3], MEANS, [0.30, 0.20])
TARGET = MODEL**2.0
LADDER = cd.ladder.karras(STEPS + 1, 0.02, 10.0)
# Exact densities leave only Monte Carlo error.
EXACT = cd.processes.Gaussian(variance=0.3, log_probs=(MODEL.log_prob,))


def integral(t: float) -> tuple[float, float]:
    """log of the integral of p_t^2, and the share of the second mode in it, by hand: a square has three terms."""
    log_terms, positive = [], []
    for i in range(2):
        for j in range(2):
            v_i, v_j = (float(MODEL.eigenvalues[k, 0]) + t * t for k in (i, j))
            gap = (MEANS[i] - MEANS[j]).square().sum().item()
            log_n = -0.5 * DIM * math.log(2 * math.pi * (v_i + v_j)) - 0.5 * gap / (v_i + v_j)
            log_terms.append(math.log(MODEL.weights[i] * MODEL.weights[j]) + log_n)
            v = v_i * v_j / (v_i + v_j)
            mean = v * float(MEANS[i, 0] / v_i + MEANS[j, 0] / v_j)
            positive.append(0.5 * (1 + math.erf(mean / math.sqrt(2 * v))))
    total = torch.tensor(log_terms, dtype=torch.float64)
    return float(total.logsumexp(0)), float(total.softmax(0) @ torch.tensor(positive, dtype=torch.float64))


LOG_Z = integral(0.02)[0] - integral(10.0)[0]
SECOND = integral(0.02)[1]


def second(x: torch.Tensor) -> torch.Tensor:
    return (x[:, 0] > 0).double()


@pytest.fixture(scope="module")
def small() -> list[cd.Pilot]:
    return [cd.pilot(TARGET, LADDER, n=32, seed=seed, process=EXACT) for seed in range(24)]


@pytest.fixture(scope="module")
def large() -> list[cd.Pilot]:
    return [cd.pilot(TARGET, LADDER, n=512, seed=seed, process=EXACT) for seed in range(6)]


def test_z_is_unbiased_and_its_errors_are_honest(small):
    """The mean of `exp(log Z)` over small pilots, and the spread of log Z in units of its stated errors."""
    assert_mean(torch.tensor([math.exp(p.log_z("down").value - LOG_Z) for p in small]), 1.0, z=4)
    # The mean of the works, instead of the log of the mean of their exponentials.
    broken = [float(p.down.sum(0).mean()) for p in small]
    refuted(assert_mean, torch.tensor(broken).sub(LOG_Z).exp(), 1.0, z=4)
    for method in ("down", "up", "bar"):
        z = [(p.log_z(method).value - LOG_Z) / p.log_z(method).error for p in small]
        assert sum(abs(v) < 3 for v in z) >= 21, method


def test_all_three_estimates_of_log_z_agree_with_the_truth(large):
    for method in ("down", "up", "bar"):
        assert_mean(torch.tensor([p.log_z(method).value for p in large]), LOG_Z + torch.zeros(()), z=5)
    assert max(p.log_z().error for p in large) < 0.15
    with pytest.raises(InputError, match="'down', 'up', 'bar'"):
        large[0].log_z("forward")


def test_means_at_the_data_end_cover_the_truth(small):
    estimates = [p.mean(second) for p in small]
    assert sum(abs(e.value - SECOND) < 3 * e.error for e in estimates) >= 21
    assert_mean(torch.tensor([e.value for e in estimates]), SECOND, z=4)


@pytest.mark.parametrize("process", [EXACT, cd.processes.Gaussian(variance=0.3)], ids=["exact", "not exact"])
def test_weights_grow_by_the_works_until_particles_are_resampled(process):
    """At inner times at which less than half of them count; then all weigh the same.

    Pairs of steps that are compared with a double one are not torn: then it is at every second time.
    """
    p = cd.pilot(MODEL**8.0, LADDER.times[::2], n=16, seed=1, process=process)
    down, up = (p.log_weights[1:] + p.down).log_softmax(1), (p.up_log_weights[:-1] - p.up).log_softmax(1)
    inner = (torch.arange(len(down)) > 0) & ((torch.arange(len(down)) % 2 == 0) | (process is EXACT))
    for grown, found, inside in ((down, p.log_weights[:-1], inner), (up, p.up_log_weights[1:], inner.flip(0))):
        resampled = inside & (1 / grown.exp().square().sum(1) <= RESAMPLE_BELOW * p.n)
        assert 0 < resampled.sum() < inside.sum()
        expected = grown.where(~resampled[:, None], torch.full((), -math.log(p.n), dtype=torch.float64))
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
        if grown is down:
            assert p.particles.n_resamplings.tolist() == [int(resampled.sum())]
            torch.testing.assert_close(p.ess[:-1], 1 / grown.exp().square().sum(1))


def test_the_error_of_bennett_is_the_norm_of_its_derivatives():
    """By how much log Z moves with the weight of each Eve, by finite differences: a larger error is wrong too."""
    p, eps = cd.pilot(TARGET, LADDER.times[::4], n=8, seed=1, process=EXACT), 1e-4

    def moved(eve: int, by: float) -> float:
        down, up = p.log_weights + by * (p.eve == eve), p.up_log_weights + by * (p.up_eve == eve)
        return replace(p, log_weights=down.log_softmax(1), up_log_weights=up.log_softmax(1)).log_z("bar").value

    slopes = torch.tensor([(moved(eve, eps) - moved(eve, -eps)) / (2 * eps) for eve in range(8)], dtype=torch.float64)
    assert p.log_z("bar").error == pytest.approx(float(slopes.norm()), rel=1e-5)
    assert float(slopes.norm()) > 0.05


def test_a_pilot_of_a_model_alone_is_read_again():
    p = cd.pilot(MODEL, LADDER.times[::8], n=4, process=EXACT)
    again = cd.Pilot.from_state_dict(p.state_dict(), MODEL, process=EXACT)
    again.check(MODEL)
    assert (again.log_z(), again.walk_rows, again.in_turn) == (p.log_z(), p.walk_rows, p.in_turn)


def predicted_as_measured(pilots: list[cd.Pilot], measured: torch.Tensor, substeps: int) -> None:
    """To four standard errors: the spread of pilots, and 0.4 % of a run for 256 chains x 20 meetings."""
    predicted = torch.stack([p.acceptance(range(0, STEPS + 1, substeps)) for p in pilots])
    error = (predicted.var(0) / len(pilots) + 0.004**2).sqrt()
    assert bool(((predicted.mean(0) - measured).abs() < 4 * error).all())


@pytest.mark.parametrize("substeps", [1, 4])
def test_acceptance_of_any_cut_is_predicted(large, substeps):
    """Measured on many short chains that start from the right law; with the weights ignored the prediction is off."""
    ladder = cd.ladder.karras(STEPS // substeps + 1, 0.02, 10.0, substeps=substeps)
    chain = cd.ReplicaExchange(TARGET, ladder, n_chains=256, seed=3, pilot=large[0])
    for _ in range(40):
        chain.step()
    measured = chain.diagnostics.acceptance()
    predicted_as_measured(large, measured, substeps)
    flat = torch.full_like(large[0].log_weights, -math.log(large[0].n))
    ignored = [replace(p, log_weights=flat, up_log_weights=flat) for p in large]
    refuted(predicted_as_measured, ignored, measured, substeps)


def test_replicas_start_from_the_law_of_their_level(large):
    """At iteration 1 the data end has the target's law; replicas that start from one trajectory do not."""

    def right(chain: cd.ReplicaExchange, error: float) -> None:
        chain.step()
        share = float(second(chain.output()).mean())
        assert abs(share - SECOND) < 4 * math.hypot(error, math.sqrt(SECOND * (1 - SECOND) / chain.n_chains))

    pilot, ladder = large[1], cd.ladder.karras(5, 0.02, 10.0, substeps=8)
    right(cd.ReplicaExchange(TARGET, ladder, n_chains=512, pilot=pilot), pilot.mean(second).error)
    refuted(right, cd.ReplicaExchange(TARGET, ladder, n_chains=512, process=EXACT), pilot.mean(second).error)


def test_replicas_are_tours_of_their_own_until_they_reach_the_noise_end(large):
    pilot = large[0]
    chain = cd.ReplicaExchange(TARGET, cd.ladder.karras(5, 0.02, 10.0, substeps=8), n_chains=3, pilot=pilot)
    born = chain.diagnostics.trips.born
    x, eve = pilot.replicas(chain.ladder.levels, 3, cd.Stream(0).at("pilot"))
    assert (born[:, :-1] == -1 - eve[:, :-1]).all()
    assert (born[:, -1] == 0).all()
    assert (chain.state.x == x.flatten(0, 1)).all()
    assert len(born[:, :-1].unique()) > 8, "different particles for different replicas"
    replica, births = torch.tensor([[0, 1], [1, 1], [2, 0]]), torch.tensor([[-5, -5], [-6, 0], [0, 3]])
    # One particle in two chains is one tour; births at 0 are one per chain, later ones one per replica.
    label = tours(replica, births)
    assert label[0, 0] == label[0, 1]
    assert len(label.unique()) == 5


def test_rows_are_counted_exactly():
    p = cd.pilot(TARGET, LADDER, n=8, process=EXACT)
    assert p.rows == 8 * (2 * STEPS + 1)
    fitted = cd.pilot(TARGET, LADDER, n=8)
    # Two rows try the models, 256 samples make the information of each of 17 times; pairs of steps are compared.
    assert fitted.rows == 2 + 256 * 17 + 8 * (2 * STEPS + STEPS // 2 + 1)
    assert fitted.walk_rows == STEPS
    # Noising as trained has double steps of the same law, so that nothing more need be evaluated.
    assert cd.pilot(TARGET, LADDER, n=8, proposal=cd.Proposal(k="paper")).rows == 2 + 256 * 17 + 8 * (2 * STEPS + 1)
    chain = cd.ReplicaExchange(TARGET, cd.ladder.karras(5, 0.02, 10.0, substeps=8), n_chains=3, pilot=fitted)
    assert chain.evaluate.counts.rows == chain.setup_evaluations.rows == fitted.rows + 3 * 5


def test_a_pilot_survives_its_state_dict(small):
    fitted = cd.pilot(TARGET, LADDER, n=16, seed=5)
    again = cd.Pilot.from_state_dict(fitted.state_dict(), TARGET)
    assert str(again) == str(fitted)
    chains = [cd.ReplicaExchange(TARGET, pilot=p, n_chains=2) for p in (fitted, again)]
    draws = [chain.sample(5).x for chain in chains]
    assert (draws[0] == draws[1]).all()


def test_a_chain_keeps_its_pilot_in_its_snapshot(small):
    chain = cd.ReplicaExchange(TARGET, pilot=small[0], n_chains=2, seed=2)
    chain.sample(3)
    snapshot = chain.snapshot()
    assert "x" in part(snapshot, "pilot")
    resumed = cd.ReplicaExchange(TARGET, chain.ladder, n_chains=2, seed=2, process=EXACT, start=snapshot)
    assert resumed.started_from is not None
    assert chain.started_from is not None
    assert resumed.started_from.mean(second) == chain.started_from.mean(second) == small[0].mean(second)
    assert resumed.started_from.log_z == chain.started_from.log_z
    assert (chain.sample(3).x == resumed.sample(3).x).all()


def test_the_plan_cuts_the_same_steps(large):
    plan = large[0].plan()
    assert plan.best.effective == max(c.effective for c in plan.cuts)
    assert (plan.ladder.n_levels, plan.ladder.substeps) == (plan.best.pairs + 1, plan.best.substeps)
    assert {(c.pairs, c.substeps) for c in plan.cuts} >= {(1, 32), (2, 16), (4, 8), (8, 4), (16, 2), (32, 1)}
    assert all(a.rejection < b.rejection for a, b in zip(plan.cuts, plan.cuts[2:], strict=False))
    if plan.best.pairs * plan.best.substeps == STEPS:
        assert (plan.ladder.times == LADDER.times).all()


def check_the_size_of_steps(process: cd.processes.Gaussian, doubling: type[Doubling] = Doubling) -> None:
    """What is predicted from 32 steps is what 16 of them change, for paths down, paths up and both.

    A first order is right to a factor of two; here it is known to a tenth of itself.
    """
    fine = cd.pilot(TARGET, LADDER, n=4096, seed=1, process=process)
    coarse = cd.pilot(TARGET, LADDER.times[::2], n=4096, seed=2, process=process)
    for method in METHODS:
        found, (a, b) = fine.discretisation[method], (coarse.log_z(method), fine.log_z(method))
        error = math.hypot(a.error, b.error, found.error)
        assert abs(a.value - b.value - found.value) < 3 * error + 0.5 * abs(a.value - b.value), (method, found)
    assert fine.discretisation["down"].value > 5 * fine.discretisation["down"].error


def test_the_size_of_steps_has_the_errors_of_its_directions():
    """By Eve (3, 0) down and (1, 4) up, so (4, 4) / 2 for both; what is exactly zero is known."""
    changes = {-1: torch.tensor([3.0, 0.0]), 1: torch.tensor([1.0, 4.0])}
    found = Doubling.estimates(SimpleNamespace(_value={-1: 1.0, 1: 0.0}, _change=changes), dof=7.0)
    known = {"down": (1.0, 3.0, 7.0), "up": (0.0, 17**0.5, math.inf), "bar": (0.5, 8**0.5, 7.0)}
    assert {way: (e.value, e.error, e.dof) for way, e in found.items()} == {
        w: pytest.approx(k) for w, k in known.items()
    }


def test_the_size_of_steps_is_seen_in_each_direction(monkeypatch):
    """A variance that fits the data badly makes log Z too large by paths down and too small by paths up."""
    process = cd.processes.Gaussian(variance=0.6)
    check_the_size_of_steps(process)
    ratios = Doubling._ratios
    monkeypatch.setattr(Doubling, "_ratios", lambda *args: (ratios(*args)[0], torch.zeros(1)))
    refuted(check_the_size_of_steps, process)  # as if paths had been made by double steps


@pytest.mark.parametrize("process", [cd.processes.Gaussian(variance=0.6), cd.processes.EulerMaruyama()])
def test_a_double_step_has_the_noise_of_both(process, monkeypatch):
    """For Gaussian data all is known: the noise of each step up, the densities, and so the error of every ratio."""
    model = cd.models.GaussianMixture([1.0], [[1.0, -0.5]], [0.3])
    evaluate = cd.SMC(model**3.0, cd.ladder.karras(9, 0.02, 10.0), process=process).evaluate
    (s, m, t), c = (evaluate.times[i] for i in (3, 4, 5)), 3.0
    k, stream = evaluate.coefficients.k_up, cd.Stream(1)
    assert k > 0

    def up(x: torch.Tensor, to: float, since: float, z: torch.Tensor) -> torch.Tensor:
        score = (evaluate(x, since.expand(len(x))).predictions[0] - x) / since**2
        d = process.noising_variance(since[None], to[None])
        return x + k * d * c * score + d.sqrt() * z

    def error(low: torch.Tensor, high: torch.Tensor, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Of the ratio, after the densities themselves."""
        (a, b), (s, t) = (low, high), (v.expand(len(low)) for v in (s, t))
        ratio = process.log_ratios(a, b, evaluate(a, s), evaluate(b, t), s, t, evaluate.coefficients)[0]
        return c * (ratio[0] - model.log_prob(a, s) + model.log_prob(b, t))

    x_s, z, y = (stream.at(name).normal((50, 2)) for name in ("x", "z", "y"))
    x_m, v, w = up(x_s, m, s, z), *(process.noising_variance(a[None], b[None])[0, 0] for a, b in ((s, m), (m, t)))
    x_t = up(x_m, t, m, y)
    ends = [(x, evaluate(x, time.expand(50))) for x, time in ((x_t, t), (x_m, m), (x_s, s))]
    double = up(x_s, t, s, (v.sqrt() * z + w.sqrt() * y) / (v + w).sqrt())
    expected = (error(x_s, double, s, t) - error(x_s, x_m, s, m) - error(x_m, x_t, m, t)).expm1()

    def as_expected() -> None:
        torch.testing.assert_close(Coupled(evaluate).gain(tuple(ends), 5), expected, rtol=1e-6, atol=1e-9)

    as_expected()
    assert expected.abs().min() > 1e-4
    monkeypatch.setattr(Coupled, "_double_step", lambda self, points, *times: points[0][0])
    refuted(as_expected)  # as if two steps up had the law of a double one


@pytest.mark.slow
def test_the_size_of_steps_is_seen_in_means(monkeypatch):
    """A variance that fits the data badly gives the second mode too much, and the pass predicts by how much."""

    def seen() -> None:
        steps = cd.ladder.karras(97, 0.02, 10.0)
        found = cd.pilot(TARGET, steps, n=8192, seed=1, process=cd.processes.Gaussian(variance=0.6))
        mean, shift = found.mean(second), found.summary.shift(second)
        assert mean.value - SECOND > 4 * mean.error
        assert abs(mean.value - SECOND - shift.value) < 3 * math.hypot(mean.error, shift.error)

    seen()
    monkeypatch.setattr(Coupled, "_double_step", lambda self, points, *times: points[0][0])
    refuted(seen)


def test_log_z_of_smc_contains_what_particles_may_have_missed():
    """A token of probability 1/500 has a tenth of the weight; of 640 particles one meets it, or none, or two."""
    rare, share = 1 / 500, 0.1
    p = cd.models.TokenTable(torch.tensor([1 - rare, rare], dtype=torch.float64))
    reward = math.log(share / (1 - share) * (1 - rare) / rare)
    log_z = math.log((1 - rare) / (1 - share))
    target = p.tilt(lambda x: reward * x[:, 0, 1], guidance="none")
    found = cd.pilot(target, cd.ladder.linear(n_levels=2), n=4000)
    # 1,400 particles meet it 2.8 times, so all of it may be missed; 10,000 meet it 20 times.
    assert found.summary.unseen(1400) == pytest.approx(share, abs=0.02)
    assert found.summary.unseen(10_000) == pytest.approx(share * 3 / 20, abs=0.003)
    assert StartingPass.from_state_dict(found.summary.state_dict()).unseen(1400) == found.summary.unseen(1400)
    out = cd.SMC(target, pilot=found, n_particles=16, n_batches=40 * 40, seed=1).sample()
    groups = [out.of_batches(range(40 * i, 40 * i + 40)) for i in range(40)]

    def covers(runs: list[cd.samplers.Particles]) -> None:
        intervals = [run.log_z.interval() for run in runs]
        assert sum(low <= log_z <= high for low, high in intervals) >= 36

    covers(groups)
    refuted(covers, [replace(run, started_from=None) for run in groups])


def test_the_heaviest_paths_of_a_lognormal_weight_hold_what_the_normal_law_says():
    """Works `a x - a^2 / 2` with x ~ N(a, 1) in the target and N(0, 1) on the way down: tails of two normal laws."""
    a, size = 2.0, 4000
    x = torch.special.ndtri((torch.arange(size, dtype=torch.float64) + 0.5) / size) + a
    works = torch.stack([0.1 * x, a * x - a * a / 2, 0.2 * x])  # the other steps are mild
    equal = torch.full((3, size), -math.log(size), dtype=torch.float64)
    share, weight = heaviest(equal, works)
    known = torch.special.ndtr(a + torch.special.ndtri(share))
    here = (share > 1e-4) & (share < 0.1)
    assert float((weight - known)[here].abs().max()) < 0.01
    assert float((share - known)[here].abs().max()) > 0.1


def test_errors_contain_the_size_of_the_steps():
    found = cd.pilot(TARGET, LADDER, n=32, process=cd.processes.Gaussian(variance=0.6))
    size, shift = found.discretisation, found.summary.shift(second).value
    assert shift != 0
    chains = cd.ReplicaExchange(TARGET, pilot=found, n_chains=4).sample(20)
    alone = replace(chains, started_from=None)
    assert chains.log_z.error == pytest.approx(math.hypot(chains.diagnostics.log_z().error, size["bar"].value))
    assert alone.log_z == chains.diagnostics.log_z()
    assert chains.mean(second).error == pytest.approx(math.hypot(alone.mean(second).error, shift))
    assert chains.mean(second).value == alone.mean(second).value
    (shown,) = Evidence(RunData.of(chains, scalars={"second": second})).scalars
    assert shown.stated == chains.mean(second)
    smc = cd.SMC(TARGET, pilot=found, n_particles=8, n_batches=16)
    out, again = smc.sample(), cd.SMC(TARGET, LADDER, n_particles=8, n_batches=16, start=smc.snapshot())
    alone = replace(out, started_from=None)
    parts = (alone.log_z.error, size["down"].value, found.summary.unseen(8 * 16))
    assert out.log_z.error == pytest.approx(math.hypot(*parts))
    assert out.log_z.value == alone.log_z.value
    assert out.mean(second).error == pytest.approx(math.hypot(alone.mean(second).error, shift))
    assert out.ess(second) == alone.ess(second), "more draws do not help against large steps"
    assert again.started_from.discretisation == size
    assert again.started_from.shift(second) == found.summary.shift(second)
    # Other steps, or other weights, have an error that this pilot has not measured.
    assert cd.SMC(TARGET, cd.ladder.karras(9, 0.02, 10.0), pilot=found).started_from is None
    assert cd.SMC(TARGET, pilot=found, weight=cd.FeynmanKac()).started_from is None
    large = replace(found.summary, discretisation=dict.fromkeys(METHODS, Estimate(1.0, 0.1)))
    assert any("size of the steps" in r for r in replace(out, started_from=large).verdict().reasons)
    with pytest.raises(InputError, match="or a pilot"):
        cd.SMC(TARGET)


def test_what_does_not_fit_is_refused(small):
    with pytest.raises(InputError, match="make one for this target"):
        cd.ReplicaExchange(MODEL**3.0, pilot=small[0])
    with pytest.raises(InputError, match="or a pilot"):
        cd.ReplicaExchange(TARGET)
    with pytest.raises(InputError, match="between 0 and 32"):
        small[0].acceptance([0, 33])
    with pytest.raises(InputError, match="n must be"):
        cd.pilot(TARGET, LADDER, n=1)
    with pytest.raises(StoppedError):
        cd.pilot(TARGET, LADDER, n=4, process=EXACT, callback=lambda p: (p.done, p.unit) == (3, "steps"))


def judged(start: StartingPass) -> cd.diagnostics.Verdict:
    """The verdict on chains that are said to have started from this pass."""
    chain = cd.ReplicaExchange(TARGET, cd.ladder.karras(5, 0.02, 10.0, substeps=8), n_chains=8, seed=1, process=EXACT)
    data = RunData.of(replace(chain.sample(60, burn_in=10), started_from=start), chain, {"second": second})
    return cd.verdict(data)


@pytest.mark.slow
def test_the_verdict_compares_chain_and_pilot(large):
    start = large[0].summary
    fair = replace(start, discretisation=dict.fromkeys(METHODS, Estimate(0.0, 0.01)))
    assert not any("starting pass" in reason or "size of the steps" in reason for reason in judged(fair).reasons)
    # One mode is missing in the pass: the mean is off, and its error small.
    missing = replace(fair, log_weights=(fair.log_weights - 1e3 * second(fair.x)).log_softmax(0))
    found = judged(missing)
    assert found.level == "do not trust"
    assert any("disagree about second" in reason for reason in found.reasons)
    off = {m: Estimate(z.value + 4.5 * math.hypot(z.error, 0.1), z.error) for m, z in fair.log_z.items()}
    assert any("disagree about log Z" in reason for reason in judged(replace(fair, log_z=off)).reasons)
    coarse = judged(replace(start, discretisation=dict.fromkeys(METHODS, Estimate(-3.0, 0.1))))
    assert any("moves log Z by about -3" in reason for reason in coarse.reasons)
    assert any("steps instead of 32" in advice for advice in coarse.advice)


def test_a_run_keeps_what_it_started_from(tmp_path):
    chain = cd.ReplicaExchange(TARGET, pilot=cd.pilot(TARGET, LADDER, n=16), n_chains=2, seed=2)
    with cd.Run(tmp_path / "run", chain) as run:
        run.run(iterations=6)
    data = cd.read_run(tmp_path / "run")
    assert data.started_from is not None
    assert data.started_from.log_z == chain.started_from.log_z
    chain.target = TARGET.tilt(lambda x: x[:, 0])
    assert chain.started_from is None, "the pilot was made for another target"


def test_tokens_are_walked_too():
    """A masked table: a mean against the sum over all states; tokens change in turn, so that steps cost nothing."""
    table = torch.tensor([[8, 1, 2], [1, 3, 1], [2, 1, 6]]).double()
    model = cd.models.TokenTable(table, "masked")
    power = (table / table.sum()) ** 2.0
    pilots = [cd.pilot(model**2.0, cd.ladder.linear(9), n=64, seed=seed) for seed in range(8)]
    values = torch.tensor([p.mean(lambda x: (x[:, 0] == 0).double()).value for p in pilots])
    assert_mean(values, float(power[0].sum() / power.sum()), z=5)
    assert all(set(p.discretisation.values()) == {Estimate(0.0, 0.0)} and p.in_turn for p in pilots)
    cuts = pilots[0].plan().cuts
    assert len({pilots[0].iteration_rows(c.pairs, c.substeps) for c in cuts}) == 1


def test_plans_do_not_depend_on_how_particles_are_numbered(small):
    """Those on their way up are found from those on their way down by what is predicted of them, not by their place."""
    p = replace(small[0], **{name: getattr(small[0], name)[..., :16] for name in ("down", "log_weights")})
    # Features of their own: relatives have equal ones at the data end, and then their places decide.
    features = cd.Stream(0).normal((2, STEPS + 1, 16, 3))
    p = replace(p, x=p.x[:, :16], features=features, up=p.up[:, :16], up_log_weights=p.log_weights)
    order = cd.Stream(1).uniform((16,)).argsort()
    features = torch.stack([p.features[0], p.features[1][:, order]])
    other = replace(p, features=features, up=p.up[:, order], up_log_weights=p.up_log_weights[:, order])
    assert [c.effective for c in other.plan().cuts] == [c.effective for c in p.plan().cuts]
    assert replace(other, features=p.features).plan().cuts != p.plan().cuts, "the works belong to their particles"


def test_rows_of_an_iteration_are_those_of_a_chain(small):
    p = small[0]
    chain = cd.ReplicaExchange(TARGET, cd.ladder.karras(5, 0.02, 10.0, substeps=8), n_chains=3, pilot=p)
    before = chain.evaluate.counts.rows
    chain.step()
    assert chain.evaluate.counts.rows - before == 3 * p.iteration_rows(4, 8)


def test_features_of_tokens_tell_which_token_is_where():
    """The same tokens at other places are as far away as other tokens."""
    x = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 1], [0, 1, 1, 1]])
    features = _token_features(x, cd.Stream(0))
    apart = torch.cdist(features, features)
    assert float(apart[0, 1]) > float(apart[0, 2]) > 0, "four positions differ, and one"
