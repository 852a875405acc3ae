"""`cd.sample`: the law, the budget, the count of rows, what is chosen and when it stops."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest
import torch

import crepe_diffusion as cd
from checks import Z, refuted
from crepe_diffusion.samplers import choose

MODEL = cd.models.GaussianMixture([0.7, 0.3], [[-1.5, 0.0], [1.5, 0.0]], [0.30, 0.20])
LADDER = cd.ladder.karras(9, 0.02, 10.0)
EXACT = cd.processes.Gaussian(variance=0.3, log_probs=(MODEL.log_prob,))


def second(x: torch.Tensor) -> torch.Tensor:
    return (x[:, 0] > 0).double()


def share(t: float = 0.02) -> float:
    """Of the second mode in p_t^2, whose two squares hardly overlap."""
    v = MODEL.eigenvalues[:, 0] + t * t
    masses = MODEL.weights.square() / (4 * math.pi * v)  # of a squared Gaussian in two dimensions
    return float(masses[1] / masses.sum())


def assert_known(estimate: cd.Estimate, truth: float) -> None:
    assert 0 < estimate.error < 0.08
    assert abs(estimate.value - truth) < Z * estimate.error


@pytest.fixture(scope="module")
def found() -> cd.Pilot:
    return cd.pilot(MODEL**2.0, LADDER, n=32, seed=8, process=EXACT)


OPTIONS = {"seed": 9, "micro_batch": None, "nonfinite": "raise"}
METHODS = {
    "SMC": lambda found: choose._Smc(found, 8_000, 100, OPTIONS),
    "replica exchange": lambda found: choose._ReplicaExchange(found, 8_000, OPTIONS),
    "particle Gibbs": lambda found: choose._ParticleGibbs(found, 8_000, OPTIONS),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_that_may_be_chosen_goes_on_and_draws_from_the_target(found, name):
    method = METHODS[name](found)
    first = method.more(2_000, lambda now: False)
    out = method.more(6_000, lambda now: False)
    assert torch.equal(out.x[: len(first.x)], first.x)
    assert float(out.weights.sum()) == pytest.approx(1)
    assert out.verdict({"second": second}).level in ("ok", "look", "do not trust")
    rows = out.evaluations.rows
    # Replicas at both ends may rest for less than a network row, and passes are whole.
    assert 0.7 * 8_000 < rows - found.rows < 1.1 * 8_000
    assert_known(out.mean(second), share())
    refuted(assert_known, out.mean(second), share() + 0.5)


SIZES = {
    # q, rows, wanted: particles of a batch, batches of a pass; a walk takes 9 rows of 8,000, which 888 particles have
    "no relatives": (1 / 32, 8_000, 100, 32, 3),  # 27 batches, of which 4 are needed at a time
    "variance of Z of .24": ((1 + 31 * 0.24) / 32, 8_000, 100, 32, 27),
    "variance of Z of .26": ((1 + 31 * 0.26) / 32, 8_000, 100, 64, 13),
    "variance of Z of .51": ((1 + 31 * 0.51) / 32, 8_000, 100, 111, 8),  # no more than an eighth of the budget
    "large budget": ((1 + 31 * 0.51) / 32, 80_000, 10_000, 128, 7),  # 69 batches, 8 of which walk at once
    "small budget": (0.5, 200, 100, 32, 1),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_and_forecasts_follow_from_what_the_pilot_found(found, name, monkeypatch):
    q, rows, wanted, n_particles, n_batches = SIZES[name]
    monkeypatch.setattr(choose, "_repeated", lambda pilot: q)
    monkeypatch.setattr(choose, "_agreeing", lambda pilot: 0.3)
    smc, gibbs = choose._Smc(found, rows, wanted, OPTIONS), choose._ParticleGibbs(found, rows, OPTIONS)
    assert (smc.n_particles, smc.n_batches, smc.least_rows) == (n_particles, n_batches, n_particles * n_batches * 9)
    assert len(smc.parts) == (n_particles == 32), "the pilot is a batch of its size"
    draws = 1000 / 9 / (32 * q)
    assert (smc.rate, smc.effective) == pytest.approx((draws, draws * 0.3))
    assert (gibbs.rate, gibbs.least_rows) == (pytest.approx(draws * (1 - q) / (1 + q)), 32 * 9)
    exchange, best = choose._ReplicaExchange(found, rows, OPTIONS), found.plan().best
    assert exchange.effective == pytest.approx(best.effective * 0.3)
    iterations = rows / found.iteration_rows(best.pairs, best.substeps)
    chains = iterations / (20 * (best.pairs + best.delay))  # ten trips each
    assert exchange.n_chains == min(max(int(chains), 1), 8)


def test_rows_of_the_networks_are_counted_with_those_of_the_pilot():
    seen = []

    def denoise(y, sigma):
        seen.append(len(y))
        return MODEL.predict(y.double(), sigma.double()).to(y.dtype)

    model = cd.models.Denoiser(denoise, (2,), sigma_range=(0.02, 10.0))
    out = cd.sample(model**2.0, n_effective=20, budget=20_000)
    assert out.evaluations.rows == sum(seen) <= 20_000
    assert out.evaluations.calls == len(seen)
    assert out.pilot.ladder.times[[0, -1]].tolist() == pytest.approx([0.02, 10.0])


def test_it_stops_when_there_are_enough_draws_and_not_above_the_budget():
    budget = 6_000
    options = {"budget": budget, "process": EXACT, "scalars": {"second": second}}
    out = cd.sample(MODEL**2.0, LADDER, n_effective=100_000, **options)
    assert out.pilot.n == 28, "a tenth of the budget: 8 steps down, 8 up, 4 of double size and the start"
    assert 0.7 * budget < out.evaluations.rows <= budget
    assert out.n_effective == out.ess(second) < 100_000
    assert "100,000 were asked for" in out.choice
    early = cd.sample(MODEL**2.0, LADDER, n_effective=20, **options)
    assert early.evaluations.rows < out.evaluations.rows
    assert early.ess(second) >= 20
    more = early.go_on(100_000, budget)
    assert early.evaluations.rows < more.evaluations.rows <= budget
    assert torch.equal(more.x[: len(early.x)], early.x)
    twice = early.go_on()
    assert (twice.wanted, twice.budget) == (2 * early.wanted, 2 * early.budget)
    pairs = next(f.settings for f in early.forecasts if f.method == "replica exchange")
    assert re.fullmatch(r"(1 pair|\d+ pairs) of levels with (1 sub-step|\d+ sub-steps), (1 chain|\d+ chains)", pairs)


def test_a_seed_names_the_draws():
    options = {"n_effective": 10, "budget": 5_000, "process": EXACT}
    one, again, other = (cd.sample(MODEL**2.0, LADDER, seed=seed, **options) for seed in (3, 3, 4))
    assert torch.equal(one.x, again.x)
    assert not torch.equal(one.x, other.x)
    # Particles of the pilot and of the sampler are pooled, so they must not be the same ones.
    n = one.pilot.n
    assert len(torch.unique(one.x, dim=0)) > n
    assert not torch.isin(one.pilot.x[-1], one.method.sampler.evaluate.noise(cd.Stream(7).at("noise"), n)).any()


def test_the_method_with_the_best_forecast_runs(monkeypatch):
    options = {"n_effective": 10, "budget": 8_000, "process": EXACT}
    out = cd.sample(MODEL**2.0, LADDER, **options)
    assert [f.effective for f in out.forecasts] == sorted((f.effective for f in out.forecasts), reverse=True)
    assert isinstance(out.draws, cd.Particles)
    assert all(f"{f.effective:.2g} " in out.choice and f.method in out.choice for f in out.forecasts)
    monkeypatch.setattr(choose, "_repeated", lambda pilot: 0.75)  # one lucky particle, while all walks agree
    assert isinstance(cd.sample(MODEL**2.0, LADDER, **options).draws, cd.Particles)
    monkeypatch.setattr(choose, "_agreeing", lambda pilot: math.exp(-3))  # and where they do not
    out = cd.sample(MODEL**2.0, LADDER, **options)
    assert isinstance(out.draws, cd.samplers.Sweeps)
    assert out.choice.startswith("particle Gibbs was chosen")
    monkeypatch.setattr(choose, "_repeated", lambda pilot: 0.999)
    monkeypatch.setattr(choose, "_agreeing", lambda pilot: 1.0)  # and the played exchange is believed
    monkeypatch.setattr(choose._ReplicaExchange, "margin", 1e9)
    assert not isinstance(cd.sample(MODEL**2.0, LADDER, **options).draws, cd.Chains)
    monkeypatch.setattr(choose._ReplicaExchange, "margin", 1.0)
    out = cd.sample(MODEL**2.0, LADDER, **options)
    assert isinstance(out.draws, cd.Chains)
    assert out.choice.startswith("replica exchange was chosen")
    assert str(out).endswith(str(out.verdict()))


def test_where_weights_degenerate_it_is_particle_gibbs_that_runs():
    """A reward without gradient in eight dimensions: particles all have one ancestor, and log Z is off by several."""

    def reward(x: torch.Tensor) -> torch.Tensor:
        return -2 * (x[:, :n_observed] - 2).square().sum(1)

    model, ladder = cd.models.GaussianMixture([1.0], [[0.0] * 8], [1.0]), cd.ladder.karras(17, 0.02, 10.0)
    n_observed, options = 8, {"budget": 6_000, "n_effective": 1, "progress": False}
    chosen = [cd.sample(model.tilt(reward), ladder, seed=seed, **options).forecasts[0].method for seed in range(3)]
    assert chosen == ["particle Gibbs"] * 3
    n_observed = 0
    assert cd.sample(model.tilt(reward), ladder, **options).forecasts[0].method == "SMC"


def test_walks_that_disagree_are_believed_beyond_chance():
    def check(up: float, down: float, share: float) -> None:
        walks = SimpleNamespace(log_z=lambda way: cd.Estimate({"up": up, "down": down}[way], 0.1))
        assert choose._agreeing(walks) == pytest.approx(share)

    check(4.0, 1.0, math.exp(-3.0))
    check(2.0, 1.0, 1.0)  # as much as chance gives
    check(1.0, 4.0, 1.0)  # nor is it a sign of degenerate weights if walks down find more
    check(math.nan, 1.0, 1.0)
    refuted(check, 1.0, 4.0, math.exp(-3.0))


def test_a_callback_stops_it_with_what_there_is():
    options = {"n_effective": 10_000, "budget": 40_000, "process": EXACT}
    out = cd.sample(MODEL**2.0, LADDER, callback=lambda now: now.done > 20_000, **options)
    assert 18_000 < out.evaluations.rows < 32_000
    with pytest.raises(cd.StoppedError, match="pilot"):
        cd.sample(MODEL**2.0, LADDER, callback=lambda now: True, **options)


def test_the_variance_is_measured_with_a_share_of_large_budgets(monkeypatch):
    asked, other = [], cd.models.GaussianMixture([1.0], [[0.0, 0.0]], [1.0])

    def noted(*arguments, fit_samples, **options):
        asked.append(fit_samples)
        raise cd.StoppedError("enough")

    monkeypatch.setattr(choose, "pilot", noted)
    for target, n_effective, budget in (
        (MODEL**2.0, 100_000, 200_000),  # two per cent are 444 samples on nine times
        (MODEL * other, 100_000, 200_000),  # of two models, half as many
        (MODEL * other, 100_000, 2_000_000),
        (MODEL**2.0, 300, 2_000_000),  # not more than are wanted
        (MODEL**2.0, 100, 2_000_000),
    ):
        with pytest.raises(cd.StoppedError):
            cd.sample(target, LADDER, n_effective=n_effective, budget=budget)
    assert asked == [444, None, 2222, 300, None]


def test_tokens_need_no_ladder():
    table = cd.models.TokenTable(torch.tensor([[0.4, 0.1], [0.2, 0.3]]))
    out = cd.sample(table**2.0, n_effective=400)
    assert_known(out.mean(lambda x: (x == 0).all(1).double()), 0.16 / 0.30)


def test_bad_input_is_refused():
    network = cd.models.Denoiser(lambda y, sigma: y, (2,))
    with pytest.raises(cd.InputError, match=r"give a ladder, such as .* no sigma_range"):
        cd.sample(network)
    with pytest.raises(cd.InputError, match="sigma_range must be two noise levels"):
        cd.models.Denoiser(lambda y, sigma: y, (2,), sigma_range=(1.0, 0.1))
    for bad in ({"n_effective": 0}, {"budget": -5}, {"seed": -1}, {"seed": 0.5}, {"scalars": {}}):
        with pytest.raises(cd.InputError, match=next(iter(bad))):
            cd.sample(MODEL**2.0, LADDER, **bad)
    with pytest.raises(cd.InputError, match="ladder must be a Ladder"):
        cd.sample(MODEL**2.0, [0.1, 1.0])
    with pytest.raises(cd.InputError, match="a budget of 100 rows is too small"):
        cd.sample(MODEL**2.0, LADDER, budget=100, process=EXACT)
    # 16 particles: 17 rows of each in the pilot, nine in a pass, which is the least that can be drawn.
    with pytest.raises(cd.InputError, match="a pilot of 16 particles took 272; give at least 544"):
        cd.sample(MODEL**2.0, LADDER, budget=272 + 143, process=EXACT)
    assert cd.sample(MODEL**2.0, LADDER, budget=272 + 144, process=EXACT).evaluations.rows == 272 + 144
