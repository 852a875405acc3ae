"""A NaN is news: raised with its level, or counted by level and rejected, and no other decision changes.

A reward of minus infinity is no error but a hard constraint: the chain then samples the truncated law.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from scipy.stats import norm, truncnorm

import crepe_diffusion as cd
from checks import assert_mean, f64, refuted
from crepe_diffusion.kernels import State
from crepe_diffusion.processes import FisherTable, Gaussian
from crepe_diffusion.rewards import terms

LADDER = cd.ladder.karras(6, 0.1, 10.0)
MIXTURE = cd.models.GaussianMixture([0.4, 0.6], [[-1.0], [1.5]], [0.6, 0.4])
PROCESS = Gaussian(variance=0.8)


class Network:
    """The mixture's denoiser, not finite where `bad(y, t)`; remembers the last batch it saw."""

    def __init__(self, bad, value=math.nan):
        self.bad, self.value = bad, value

    def __call__(self, y, t):
        self.y, self.t = y.clone(), t.clone()  # proposals are overwritten once they are decided
        return MIXTURE.predict(y, t).masked_fill(self.bad(y, t)[:, None], self.value)


def nobody(y, t):
    return torch.zeros(len(y), dtype=torch.bool)


def far_right(y, t):
    """A region that proposals at levels 1 and 2 meet now and then."""
    return (y[:, 0] > 1.8) & (t < 1.0) & (t > 0.15)


def chain(network, **options):
    model = cd.models.Denoiser(network, (1,), dtype=torch.float64)
    return cd.ReplicaExchange(model**1.4, LADDER, **{"process": PROCESS, "n_chains": 8, "seed": 2, **options})


# -- raise ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_raise_names_the_level_and_the_chain_goes_on_as_if_nothing_had_happened(value):
    network, run, other = Network(nobody, value), None, chain(Network(nobody))
    run = chain(network)
    for _ in range(3):
        run.step()
        other.step()
    network.bad = lambda y, t: t == LADDER.times[2]
    before = run.state
    with pytest.raises(cd.NonFiniteError, match=rf"8 of 48 rows .* first at level 2 \(t = {LADDER.times[2]:g}\)"):
        run.step()
    assert run.state is before
    assert run.iteration == 3
    assert run.evaluate.counts.nonfinite == {2: 8}
    network.bad = nobody
    for _ in range(3):
        run.step()
        other.step()
    assert torch.equal(run.state.x, other.state.x)
    assert torch.equal(run.state.level, other.state.level)


def test_a_reward_that_is_no_number_is_news_too():
    calls = {"n": 0}

    def reward(x):
        calls["n"] += 1
        return x[:, 0] * (math.nan if calls["n"] > 9 else 1.0)

    run = cd.ReplicaExchange(MIXTURE.tilt(reward), LADDER, process=PROCESS)
    with pytest.raises(cd.NonFiniteError, match="first at level"):
        run.sample(10)


# -- reject --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_reject_rejects_exactly_the_proposals_that_met_one_and_counts_them_by_level(value):
    """From the same states, with the same randomness: a finite model decides the same wherever the other can tell."""
    finite, broken = Network(nobody), Network(far_right, value)
    sound, run = chain(finite), chain(broken, nonfinite="reject")
    met = 0
    for _ in range(40):
        state = run.state = sound.state
        run.evaluate.counts.nonfinite.clear()
        expected, found = sound.step().swaps, run.step().swaps
        bad = far_right(broken.y, broken.t)  # one sub-step: the batch is the proposals
        hit = state.by_level(bad)
        touched = hit[:, 1:] | hit[:, :-1]
        met += int((expected.accepted & touched).sum())
        assert not (found.accepted & touched).any()
        assert torch.equal(found.accepted & ~touched, expected.accepted & ~touched)
        levels = torch.bucketize(broken.t[bad], LADDER.times).tolist()
        assert run.evaluate.counts.nonfinite == {m: levels.count(m) for m in set(levels)}
    assert met > 10  # proposals that a finite model would have accepted


def test_a_point_inside_a_path_that_is_not_finite_spoils_the_whole_path():
    """With sub-steps: a path that met such a point is never accepted, wherever it ended; nothing else changes."""
    ladder, met_by_call = cd.ladder.karras(4, 0.1, 10.0, substeps=3), []

    def between_levels(y, t):
        met_by_call.append((y[:, 0] > 0.5) & ~torch.isin(t, ladder.levels))
        return met_by_call[-1]

    def start(network):
        model = cd.models.Denoiser(network, (1,), dtype=torch.float64)
        return cd.ReplicaExchange(model**1.4, ladder, process=PROCESS, n_chains=8, seed=2, nonfinite="reject")

    sound, run = start(Network(nobody)), start(Network(between_levels))
    met = 0
    for _ in range(40):
        state = run.state = sound.state
        met_by_call.clear()
        expected, found = sound.step().swaps, run.step().swaps
        hit = state.by_level(torch.stack(met_by_call).any(0))
        touched = hit[:, 1:] | hit[:, :-1]
        met += int((expected.accepted & touched).sum())
        assert not (found.accepted & touched).any()
        assert torch.equal(found.accepted & ~touched, expected.accepted & ~touched)
        assert found.log_work[hit].isnan().all()
    assert met > 100  # proposals that a finite model would have accepted


@pytest.mark.parametrize("substeps", [1, 3])
@pytest.mark.parametrize("explorer", [None, cd.Bounce()], ids=["swap", "bounce"])
def test_reject_never_enters_where_predictions_are_not_finite(explorer, substeps):
    """At the levels themselves and, with sub-steps, between them: no replica ever stands on such a point."""
    ladder = cd.ladder.karras(6, 0.1, 10.0, substeps=substeps)
    model = cd.models.Denoiser(Network(far_right), (1,), dtype=torch.float64)
    run = cd.ReplicaExchange(
        model**1.4, ladder, process=PROCESS, n_chains=8, seed=3, explorer=explorer, nonfinite="reject"
    )
    outside = far_right(run.state.x, ladder.levels[run.state.level.flatten()])
    for _ in range(30):
        run.step()
        now = far_right(run.state.x, ladder.levels[run.state.level.flatten()])
        assert int(now.sum()) <= int(outside.sum())
        outside = now
    assert sum(run.evaluate.counts.nonfinite.values()) > 10
    assert run.state.x.isfinite().all()


def test_reject_stays_within_the_law_it_can_see():
    """Rejection is truncation: the chain samples pi restricted to where the model is finite."""

    def left(y, t):
        return y[:, 0] < -0.3

    oracle = replace(PROCESS, log_probs=(MIXTURE.log_prob,))
    model = cd.models.Denoiser(Network(left), (1,), dtype=torch.float64)
    ladder = cd.ladder.karras(5, 0.1, 10.0)
    run = cd.ReplicaExchange(model, ladder, process=oracle, n_chains=500, seed=1, nonfinite="reject")
    x = run.sample(80, burn_in=40).chains[..., 0]
    grid = torch.linspace(-0.3, 6, 4001, dtype=torch.float64)[:, None]
    weight = MIXTURE.log_prob(grid, 0.1).softmax(0)
    assert float(x.min()) > -0.3
    assert_mean(x.mean(0), float(weight @ grid[:, 0]))


def test_reject_counts_in_smc_and_weighs_nothing():
    model = cd.models.Denoiser(Network(far_right), (1,), dtype=torch.float64)
    smc = cd.SMC(
        model**1.4, LADDER, process=PROCESS, n_particles=64, n_batches=3, nonfinite="reject", ess_threshold=0.0
    )
    particles = smc.sample()
    assert set(smc.evaluate.counts.nonfinite) == {1, 2}
    dead = (particles.log_weights == -math.inf).sum()
    assert 0 < int(dead) < 192
    assert particles.batch_log_z.isfinite().all()


def test_the_noise_end_is_not_redrawn_where_predictions_are_not_finite():
    def half(y, t):
        return (y[:, 0] > 0) & (t == LADDER.times[-1])

    run = chain(Network(half), nonfinite="reject", n_chains=50)
    for _ in range(20):
        run.step()
    for _ in range(20):
        run.step()
        top = run.state.x[run.state.row_at(5), 0]
        assert int((top > 0).sum()) == 0


def test_reject_also_serves_a_model_that_has_to_be_fitted():
    model = cd.models.Denoiser(Network(far_right), (1,), dtype=torch.float64)
    run = cd.ReplicaExchange(model**1.4, LADDER, n_chains=4, nonfinite="reject")
    assert run.sample(5).x.isfinite().all()


# -- hard constraints ----------------------------------------------------------------------------------------

GAUSS = cd.models.GaussianMixture([1.0], [[0.2]], [1.0])
CUT = 0.5


def hard(x):
    return torch.where(x[:, 0] > CUT, 0.0, -math.inf).to(torch.float64)


def truncated(on, t_0):
    """The Gaussian at level 0, above the cut of the state or of the prediction."""
    variance = 1 + t_0**2
    cut = CUT if on == "state" else 0.2 + (CUT - 0.2) * variance
    return truncnorm((cut - 0.2) / math.sqrt(variance), math.inf, 0.2, math.sqrt(variance))


def constrained(on, anneal):
    """Draws of a chain whose reward is 0 above the cut and minus infinity below."""
    ladder = cd.ladder.karras(5, 0.1, 3.0)
    t2 = ladder.times[None, :, None] ** 2
    table = FisherTable(ladder.times, t2 / (t2 + 1), f64([[0.2]]))  # so that the noise end is exact as well
    oracle = Gaussian(information=table, log_probs=(GAUSS.log_prob,))
    target = GAUSS.tilt(hard, on=on, anneal=anneal)
    run = cd.ReplicaExchange(target, ladder, process=oracle, n_chains=300, seed=1, explorer=cd.Bounce())
    return run.sample(30, burn_in=60).chains[..., 0]


def check_truncated(x, truth):
    assert float(x.min()) > truth.support()[0]
    assert_mean(x.mean(0), truth.mean())
    assert_mean(x.square().mean(0), truth.moment(2))


@pytest.mark.parametrize("on", ["state", "prediction"])
def test_a_reward_of_minus_infinity_truncates_the_law(on):
    x = constrained(on, cd.anneal.power(5))
    check_truncated(x, truncated(on, 0.1))
    refuted(check_truncated, x, truncated(on, 0.8))


def test_a_constraint_that_is_annealed_away_does_not_bind_at_the_noise_end():
    """gamma = 0 there, and 0 times minus infinity is 0."""
    check_truncated(constrained("state", cd.anneal.linear()), truncated("state", 0.1))


TWO = cd.models.GaussianMixture([0.7, 0.3], [[-3.0, 0.0], [2.0, 4.0]], [0.5, 0.6])
"""Its mean, which all predictions have at the noise end, is forbidden by `right`."""


def right(x):
    return torch.where(x[:, 0] > 1.5, 0.0, -math.inf)


def check_allowed(method):
    """A share of .798 of the right mode is allowed, so log Z is log(.3 * .798); draws are those of its upper part."""
    ladder, target = cd.ladder.karras(17, 0.02, 20.0), TWO.tilt(right)
    if method == "SMC":
        out = cd.SMC(target, ladder, n_particles=128, n_batches=16, seed=1).sample(progress=False)
    else:
        out = cd.ParticleGibbs(target, ladder, n_particles=64, n_chains=8, seed=1).sample(6, progress=False)
    inside = truncnorm((1.5 - 2) / 0.6, math.inf, 2, 0.6)
    for estimate, truth in (
        (out.log_z, math.log(0.3 * norm.sf((1.5 - 2) / 0.6))),
        (out.mean(lambda x: x[:, 0]), inside.mean()),
        (out.mean(lambda x: x[:, 1]), 4.0),
    ):
        assert estimate.error < 0.15
        assert abs(estimate.value - truth) < 3.5 * estimate.error + 0.02  # 0.02 is the noise of level 0


@pytest.mark.parametrize("method", ["SMC", "particle Gibbs"])
def test_paths_through_forbidden_predictions_are_not_lost(method, monkeypatch):
    check_allowed(method)
    monkeypatch.setattr(terms, "FORBIDDEN", -math.inf)
    refuted(check_allowed, method)


def test_what_is_forbidden_counts_the_same_whatever_the_scale(monkeypatch):
    monkeypatch.setattr(terms, "FORBIDDEN", -7.0)
    for scale in (0.1, 1.0, 50.0):
        target = TWO.tilt(right, scale=scale, anneal=cd.anneal.constant(), on="state")
        run = cd.ReplicaExchange(target, LADDER, process=PROCESS, n_chains=30, seed=1)
        x, level = run.state.x, run.state.level.flatten()
        allowed = x[:, 0] > 1.5
        assert torch.equal(run.state.seen.possible, allowed | (level > 0))
        wanted = torch.where(allowed, 0.0, -7.0)[level > 0]
        torch.testing.assert_close(run.state.seen.reward[level > 0], wanted.to(run.state.seen.reward.dtype))


def test_bounces_that_begin_without_weight_are_all_taken(monkeypatch):
    """Nothing is to be balanced there, even if they end without weight as well; at the noise end replicas stay."""
    monkeypatch.setattr(terms, "FORBIDDEN", -math.inf)
    nowhere = (GAUSS**1.5).tilt(lambda x: torch.where(x[:, 0] > 50, 0.0, -math.inf), on="state", negligible=0.0)
    run = cd.ReplicaExchange(nowhere, LADDER, process=PROCESS, n_chains=20, seed=1)
    assert not run.state.seen.possible.any()
    _, accepted = cd.Bounce()(run.state, run.evaluate, cd.Stream(2))
    assert torch.equal(accepted, run.state.level.flatten() < LADDER.n_levels - 1)


def test_pairs_that_begin_without_weight_may_not_lose_more_of_it(monkeypatch):
    """Of the first pair one replica stands where there is weight, and walks out of it; of the others none ever does."""
    monkeypatch.setattr(terms, "FORBIDDEN", -math.inf)
    target = (GAUSS**1.5).tilt(
        lambda x: torch.where((x[:, 0] - 3).abs() < 1e-6, 0.0, -math.inf), on="state", negligible=0.0
    )
    run = cd.ReplicaExchange(target, LADDER, process=PROCESS, n_chains=20, seed=1)
    level = run.state.level.flatten()
    x = run.state.x.where((level > 0)[:, None], 3.0)
    run.state = State(x, run.evaluate(x, LADDER.levels[level]), run.state.level)
    assert torch.equal(run.state.seen.possible, level == 0)
    swaps = run.step().swaps
    assert swaps.active.tolist() == [True, False, True, False, True]
    assert torch.equal(swaps.accepted, torch.tensor([[False, False, True, False, True]]).expand(20, -1))


def test_minus_infinity_is_no_error_and_not_counted():
    run = cd.ReplicaExchange(GAUSS.tilt(hard, on="state"), LADDER, process=PROCESS, n_chains=4)
    run.sample(20)
    assert not run.evaluate.counts.nonfinite


def test_smc_kills_particles_outside_and_says_so_when_none_is_left():
    target = GAUSS.tilt(hard, on="state")
    particles = cd.SMC(target, LADDER, process=PROCESS, n_particles=300, n_batches=4, ess_threshold=0.0).sample()
    assert (particles.x[:, 0][particles.weights > 0] > CUT).all()
    assert (particles.log_weights == -math.inf).any()
    nowhere = GAUSS.tilt(lambda x: torch.full((len(x),), -math.inf), on="state", negligible=0.0)
    with pytest.raises(cd.NonFiniteError, match="all weights of 4 of 4 batches vanished at level 0"):
        cd.SMC(nowhere, LADDER, process=PROCESS, n_particles=32, n_batches=4).sample()


def test_smc_gives_no_weight_to_the_last_step_into_the_forbidden():
    """The constraint binds at level 0 alone: its share of plain samples is log Z, and dead particles stay dead."""

    def only_at_the_end(u):
        return torch.where(u >= 1, 1.0, 0.0).to(u)

    target = GAUSS.tilt(lambda x: torch.where(x[:, 0] > CUT, 0.0, f64(-1e300)), on="state", anneal=only_at_the_end)
    particles = cd.SMC(
        target, cd.ladder.karras(30, 0.1, 20.0), process=Gaussian(variance=1.0), n_particles=50, n_batches=200
    ).sample()
    inside = 1 - 0.5 * (1 + math.erf((CUT - 0.2) / math.sqrt(2 * 1.01)))
    assert_mean(particles.batch_log_z.exp(), inside)
    refuted(assert_mean, particles.batch_log_z.exp(), inside + 0.03)


def test_a_product_that_excludes_every_token_is_news():
    """Two models with nothing in common leave the proposal no token to draw."""
    one, other = (cd.models.TokenTable(p, "masked") for p in (f64([1.0, 0.0]), f64([0.0, 1.0])))
    with pytest.raises(cd.NonFiniteError, match="no category of positive probability"):
        cd.ReplicaExchange(one * other, cd.ladder.linear(4)).sample(3)


def test_what_is_not_finite_is_counted_in_blocks_too():
    """Rows that walk in blocks of eight are counted at the level they came to, like all at once."""
    found = []
    for size in (None, 8):
        run = chain(Network(far_right), nonfinite="reject", micro_batch=size)
        run.sample(6)
        found.append(dict(run.evaluate.counts.nonfinite))
    assert found[0] == found[1]
    assert set(found[0]) == {1, 2}
