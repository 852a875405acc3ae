"""Sequential Monte Carlo: `E[Z_hat] = Z_0 / Z_M` and `E[Z_hat f_hat] = Z_0 / Z_M E_pi[f]`, whatever is resampled.

On Gaussian data with their exact information, `L_j` is exact at any step, so these hold on the coarsest ladders.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import binom, ks_2samp
from torch.distributions import Normal

import crepe_diffusion as cd
from checks import P_VALUE, assert_mean, f64, refuted
from crepe_diffusion.processes import FisherTable, Gaussian
from crepe_diffusion.random import Stream
from crepe_diffusion.samplers.smc import Descent

STREAM = Stream(3)
RULES = [cd.Multinomial(), cd.Systematic(), cd.Stratified(), cd.Residual(), cd.Partial()]
COARSE = cd.ladder.karras(5, 0.3, 12.0, rho=3, substeps=2)
FINE = cd.ladder.karras(101, 0.3, 12.0, rho=3)
ONE_STEP = cd.ladder.of([0.4, 2.0])
MIXTURE = cd.models.GaussianMixture([0.3, 0.7], [[-2.0, 0.5], [1.5, -1.0]], [0.5, 0.4])

# Two Gaussians in one dimension, guided: p^(-0.3) q^(1.4), tilted by exp(b x).
MU, RHO, C, B = (0.6, -0.8), (1.5, 0.9), (-0.3, 1.4), 0.7


def gaussians():
    return [cd.models.GaussianMixture([1.0], [[m]], [r]) for m, r in zip(MU, RHO, strict=True)]


def product():
    p, q = gaussians()
    return p ** C[0] * q ** C[1]


def exact_process(ladder, mu=MU, rho=RHO):
    t2 = ladder.times[None, :, None] ** 2
    values = t2 / (t2 + f64(rho)[:, None, None] ** 2)
    return Gaussian(information=FisherTable(ladder.times, values, f64(mu)[:, None]))


def law_at(t, c=C, mu=MU, rho=RHO, slope=0.0):
    """log normaliser, mean and variance of exp(slope x) prod_j N(x; mu_j, rho_j^2 + t^2)^{c_j}."""
    v = [r * r + t * t for r in rho]
    precision = sum(cj / vj for cj, vj in zip(c, v, strict=True))
    shift = slope + sum(cj * mj / vj for cj, mj, vj in zip(c, mu, v, strict=True))
    constant = sum(cj * (mj * mj / vj + math.log(2 * math.pi * vj)) for cj, mj, vj in zip(c, mu, v, strict=True))
    log_z = 0.5 * (math.log(2 * math.pi / precision) + shift**2 / precision - constant)
    return log_z, shift / precision, 1 / precision


def check_unbiased(particles, log_z, mean, z=5.0):
    """Both sides of `E[Z_hat f_hat] = Z E[f]` for f = 1 and f = x."""
    z_hat = (particles.batch_log_z - log_z).exp()
    assert_mean(z_hat, 1.0, z)
    weighted = (particles.log_weights.exp() * particles.by_batch(particles.x[:, 0])).sum(1)
    assert_mean(z_hat * (weighted - mean), 0.0, z)


# -- unbiased at any step ------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", ["balanced", "paper", (0.1, 0.7)], ids=str)
@pytest.mark.parametrize("resampling", RULES, ids=str)
def test_log_z_and_means_are_unbiased_for_every_resampling_and_proposal(resampling, k):
    """Tilted on the state, and not annealed away: the noise end is then not the noise law, and weights say so."""
    target = product().tilt(lambda x: B * x[:, 0], on="state", anneal=cd.anneal.power(2, floor=0.1))
    smc = cd.SMC(
        target,
        COARSE,
        n_particles=6,
        n_batches=3000,
        resampling=resampling,
        ess_threshold=0.8,
        process=exact_process(COARSE),
        proposal=cd.Proposal(k),
        seed=1,
    )
    particles = smc.sample()
    t_0, t_top = float(COARSE.times[0]), float(COARSE.times[-1])
    log_z, mean, _ = law_at(t_0, slope=B)
    log_z = log_z - law_at(t_top)[0]
    assert 0.05 < float(particles.n_resamplings.double().mean()) < 3.9
    check_unbiased(particles, log_z, mean)
    refuted(check_unbiased, particles, log_z + 0.1, mean)
    refuted(check_unbiased, particles, log_z, mean + 0.1)
    forgotten = law_at(t_top, slope=0.1 * B)[0] - law_at(t_top)[0]  # the reward at the noise end
    refuted(check_unbiased, particles, log_z - forgotten, mean)


@pytest.mark.parametrize("weight", [cd.PathWork(), cd.Twisted(), cd.Steering()], ids=str)
def test_tilting_on_the_prediction_gives_the_expected_exponential_reward(weight):
    """log E_p[exp(b D(x))] with D linear for Gaussian data, on four steps."""
    p, ladder = gaussians()[1], COARSE
    target = p.tilt(lambda x: B * x[:, 0], guidance="gradient", anneal=cd.anneal.linear())
    process = exact_process(ladder, MU[1:], RHO[1:])
    particles = cd.SMC(target, ladder, n_particles=6, n_batches=3000, weight=weight, process=process).sample()
    t_0, share = 0.3, RHO[1] ** 2 / (RHO[1] ** 2 + 0.3**2)
    log_z = B * MU[1] + 0.5 * B**2 * share * RHO[1] ** 2
    mean = law_at(t_0, (1.0,), MU[1:], RHO[1:], slope=B * share)[1]
    check_unbiased(particles, log_z, mean)
    refuted(check_unbiased, particles, log_z + 0.05, mean)


@pytest.mark.parametrize("weight", [cd.FeynmanKac(), cd.FeynmanKac(cooled=True)], ids=str)
def test_feynman_kac_correctors_are_unbiased_for_small_steps_only(weight):
    target = product().tilt(lambda x: B * x[:, 0], on="state", guidance="gradient")

    def check(ladder):
        process = exact_process(ladder)
        particles = cd.SMC(target, ladder, n_particles=8, n_batches=1500, weight=weight, process=process).sample()
        log_z, mean, _ = law_at(0.3, slope=B)
        check_unbiased(particles, log_z - law_at(12.0)[0], mean)

    check(FINE)
    refuted(check, COARSE)


TOKENS = [f64([0.2, 0.7, 0.1]), f64([0.55, 0.05, 0.4])]


@pytest.mark.parametrize("c", [(-0.8, 1.8), (0.7, 0.9)], ids=str)
@pytest.mark.parametrize("kind", ["masked", "uniform"])
def test_discrete_guidance_is_unbiased_for_one_position(kind, c):
    """Z_0 = sum_v prod_j p_j(v)^{c_j}; at t = 1 all models agree."""
    p, q = (cd.models.TokenTable(table, kind) for table in TOKENS)
    target = p ** c[0] * q ** c[1]
    options = {"n_particles": 5, "n_batches": 4000, "proposal": cd.Proposal(exponents=(0.1, 0.8)), "seed": 2}
    particles = cd.SMC(target, cd.ladder.linear(6, 0.0, 1.0), weight=cd.DiscreteGuidance(), **options).sample()
    mass = TOKENS[0] ** c[0] * TOKENS[1] ** c[1]
    z_top = 1.0 if kind == "masked" else 3 ** (1 - sum(c))

    def check(unnormalised):
        z_hat = particles.batch_log_z.exp() * z_top
        tokens = particles.by_batch(particles.x[:, 0])
        assert_mean(z_hat, unnormalised.sum())
        for v in range(3):
            assert_mean(z_hat * (particles.log_weights.exp() * (tokens == v)).sum(1), unnormalised[v])

    check(mass)
    refuted(check, mass.roll(1))
    refuted(check, mass * 1.05)
    same = cd.SMC(target, cd.ladder.linear(6, 0.0, 1.0), weight=cd.PathWork(), **options).sample()
    assert torch.equal(particles.batch_log_z, same.batch_log_z)


# -- resampling ----------------------------------------------------------------------------------------------

W = f64([0.31, 0.02, 0.0, 0.27, 0.125, 0.155, 0.12, 0.0])
N = len(W)


def offspring(rule, b=20_000):
    index, log_w = rule(W.log().expand(b, N), STREAM.at(repr(rule)))
    assert (log_w == -math.log(N)).all()
    return (index[..., None] == torch.arange(N)).sum(1).to(torch.float64)


@pytest.mark.parametrize("rule", RULES[:4], ids=str)
def test_offspring_is_unbiased(rule):
    counts = offspring(rule)
    assert (counts.sum(1) == N).all()
    assert (counts[:, W == 0] == 0).all()
    assert_mean(counts, N * W)
    refuted(assert_mean, counts, N * (W + W.roll(1)) / 2)


def test_each_scheme_keeps_its_promise():
    assert ((offspring(cd.Systematic()) - N * W).abs() < 1).all()
    assert ((offspring(cd.Stratified()) - N * W).abs() < 2).all()
    assert (offspring(cd.Residual()) >= (N * W).floor()).all()
    assert_mean((offspring(cd.Multinomial()) - N * W) ** 2, N * W * (1 - W))


@pytest.mark.parametrize("share", [0.5, 0.8, 1.0])
def test_partial_resampling_keeps_weighted_means_and_most_weights(share):
    b, log_w = 20_000, W.log()
    index, weights = cd.Partial(share)(log_w.expand(b, N), STREAM.at("partial"))
    torch.testing.assert_close(weights.logsumexp(1), torch.zeros(b, dtype=torch.float64), atol=1e-12, rtol=0)
    carried = torch.zeros(b, N, dtype=torch.float64).scatter_add(1, index, weights.exp())
    assert_mean(carried, W)
    refuted(assert_mean, carried, torch.full((N,), 1 / N, dtype=torch.float64))
    untouched = (index == torch.arange(N)) & (weights == log_w)
    assert int(untouched.sum(1).min()) >= N - round(share * N)


# -- limits --------------------------------------------------------------------------------------------------


def run(target=MIXTURE**1.8, ladder=COARSE, **options):
    return cd.SMC(target, ladder, **{"process": Gaussian(variance=0.8), "seed": 4, **options}).sample()


def tilted():
    return (MIXTURE**1.8).tilt(lambda x: x[:, 0] - x[:, 1] ** 2, anneal=cd.anneal.power(2, floor=0.1))


def test_without_resampling_weights_are_those_of_independent_paths():
    """Six particles in one batch, or one in each of six: the same rows, so the same paths."""
    together = run(tilted(), n_particles=6, ess_threshold=0.0)
    alone = run(tilted(), n_particles=1, n_batches=6, ess_threshold=0.0)
    assert int(together.n_resamplings.sum()) == 0
    assert torch.equal(together.x, alone.x)
    torch.testing.assert_close(together.log_weights[0], alone.batch_log_z.log_softmax(0), atol=1e-10, rtol=0)
    assert together.log_z.value == pytest.approx(alone.log_z.value, abs=1e-10)
    torch.testing.assert_close(together.batch_ess[0], 1 / together.log_weights[0].exp().square().sum())


@pytest.mark.parametrize("target", [MIXTURE, MIXTURE**1.8], ids=["equal weights", "unequal weights"])
def test_a_threshold_of_one_always_resamples(target):
    for n in (1, 3, 7, 10):
        assert (run(target, n_particles=n, n_batches=5, ess_threshold=1.0).n_resamplings == COARSE.n_levels - 2).all()


def test_control_off_weighs_nothing():
    particles = run(MIXTURE, n_particles=5, n_batches=3)
    assert particles.batch_log_z.abs().max() <= 1e-10
    assert (particles.log_weights + math.log(5)).abs().max() <= 1e-10
    assert run(MIXTURE**1.01, n_particles=5, n_batches=3).batch_log_z.abs().min() > 1e-4


def test_one_particle_is_plain_sampling_by_the_proposal():
    def check(target):
        one = run(target, n_particles=1, n_batches=2000).x
        plain = cd.Plain(MIXTURE**1.8, COARSE, process=Gaussian(variance=0.8), seed=5).sample(2000).x
        for i in range(2):
            assert ks_2samp(one[:, i].numpy(), plain[:, i].numpy()).pvalue > P_VALUE

    check(MIXTURE**1.8)
    refuted(check, MIXTURE**0.9)


@pytest.mark.parametrize("resampling", RULES, ids=str)
def test_batches_are_independent_of_one_another(resampling):
    """Rows run over batches first, so the first three of eight are the three."""
    few, many = (run(n_particles=6, n_batches=b, resampling=resampling, ess_threshold=0.9) for b in (3, 8))
    assert int(few.n_resamplings.sum()) > 0
    assert torch.equal(few.x, many.x[:18])
    for name in ("log_weights", "batch_log_z", "n_resamplings"):
        assert torch.equal(getattr(few, name), getattr(many, name)[:3]), name
    assert torch.equal(few.level_ess, many.level_ess[:, :3])


@pytest.mark.parametrize("pool", ["z", "equal"])
def test_resampled_draws_follow_the_weights(pool):
    particles = run(n_particles=6, n_batches=4, ess_threshold=0.0, pool=pool)
    assert float(particles.weights.sum()) == pytest.approx(1.0)
    shares = particles.by_batch(particles.weights).sum(1)
    wanted = particles.batch_log_z.softmax(0) if pool == "z" else torch.full((4,), 0.25, dtype=torch.float64)
    torch.testing.assert_close(shares, wanted, atol=1e-12, rtol=0)
    draws = torch.stack([particles.resampled(STREAM.at("draw", i))[:, 0].mean() for i in range(2000)])
    assert_mean(draws, (particles.weights * particles.x[:, 0]).sum())


# -- stated errors -------------------------------------------------------------------------------------------

GROUPS = 40
DIM = 32
# Tempering by 2 in 32 dimensions: a mode of weight .156 becomes one of .495.
TWO = cd.models.GaussianMixture([0.844, 0.156], [[-1.5] + [0.0] * (DIM - 1), [1.5] + [0.0] * (DIM - 1)], [0.30, 0.27])


def second(x):
    return (x[:, 0] > 0).to(torch.float64)


def steps(n_levels, substeps=1):
    return cd.ladder.karras(n_levels, 0.02, 10.0, substeps=substeps)


def squared(t):
    """log of the integral of p_t^2, and the share of its second mode; the modes do not overlap where t is small."""
    total, at = 0.0, {}
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        v_i, v_j = (float(TWO.eigenvalues[k, 0]) + t * t for k in (i, j))
        gap = float((TWO.means[i] - TWO.means[j]).square().sum())
        at[i, j] = float(TWO.weights[i] * TWO.weights[j]) * math.exp(-gap / (2 * (v_i + v_j)))
        at[i, j] *= (2 * math.pi * (v_i + v_j)) ** (-DIM / 2)
        total += at[i, j]
    return math.log(total), at[1, 1] / (at[0, 0] + at[1, 1])


TRUTH, LOG_Z = squared(0.02)[1], squared(0.02)[0] - squared(10.0)[0]


def groups(particles, size):
    """Results of `size` batches each."""
    n = size * particles.log_weights.shape[1]
    for i in range(particles.n_batches // size):
        rows, batches = slice(i * n, (i + 1) * n), slice(i * size, (i + 1) * size)
        yield replace(
            particles,
            x=particles.x[rows],
            eve=particles.eve[rows],
            log_weights=particles.log_weights[batches],
            batch_log_z=particles.batch_log_z[batches],
        )


def check_intervals(estimates, truth):
    """Intervals of 95 % cover as often as they should: fewer hits have a chance of 1e-3."""
    covered = [e.interval()[0] <= truth <= e.interval()[1] for e in estimates]
    assert sum(covered) >= int(binom.ppf(1e-3, len(covered), 0.95)), f"{sum(covered)} of {len(covered)}"


def test_intervals_of_small_batches_cover_the_truth_where_they_are_pooled_by_z():
    out = cd.SMC(TWO**2.0, steps(65), n_particles=16, n_batches=32 * GROUPS, seed=11).sample()
    results = list(groups(out, 32))
    check_intervals([r.mean(second) for r in results], TRUTH)
    check_intervals([r.log_z for r in results], LOG_Z)
    refuted(check_intervals, [replace(r, pool="equal").mean(second) for r in results], TRUTH)
    refuted(check_intervals, [r.log_z for r in results], LOG_Z + 0.3)
    # Coverage is not bought by wide intervals.
    assert sum(r.mean(second).error for r in results) / GROUPS < 0.07
    squares = f64([(r.mean(second).value - TRUTH) ** 2 for r in results])
    assert float(squares.mean()) < 8 * TRUTH * (1 - TRUTH) / 512  # about 5 times that of independent draws


def test_intervals_of_one_batch_cover_the_truth_however_often_it_is_resampled():
    """Resampled at every level, few Eves are left; an error from the weights alone leaves out what they share."""
    out = cd.SMC(
        TWO**2.0, steps(9, 8), n_particles=256, n_batches=GROUPS, ess_threshold=1.0,
        resampling=cd.Multinomial(), seed=12,
    ).sample()  # fmt: skip
    results = list(groups(out, 1))
    assert float(out.diagnostics["eves"].double().mean()) < 60
    check_intervals([r.mean(second) for r in results], TRUTH)
    check_intervals([r.log_z for r in results], LOG_Z)
    alone = [replace(r, eve=torch.arange(len(r.x))) for r in results]
    refuted(check_intervals, [r.mean(second) for r in alone], TRUTH)
    refuted(check_intervals, [r.log_z for r in alone], LOG_Z)


def test_joined_results_hold_all_batches_and_what_the_last_one_says():
    """Its counts are those of the sampler at the end, and its pooling is what was asked for last."""
    smc = cd.SMC(MIXTURE**2.0, ONE_STEP, n_particles=3, n_batches=2, process=Gaussian(variance=0.8))
    parts = [smc.sample(), replace(smc.sample(), pool="equal"), smc.sample(2)]
    out = cd.Particles.joined(parts)
    assert (out.evaluations.rows, out.pool) == (smc.evaluate.counts.rows, "z")
    assert cd.Particles.joined(parts[:2]).pool == "equal"
    assert cd.Particles.joined(parts[:1]) is parts[0]
    sizes = [6, 6, 12]
    assert [len(part.x) for part in parts] == sizes
    for part, x, eve, first in zip(parts, out.x.split(sizes), out.eve.split(sizes), (0, 6, 12), strict=True):
        assert torch.equal(x, part.x)
        assert torch.equal(eve, part.eve + first)
    assert torch.equal(out.batch_log_z, torch.cat([part.batch_log_z for part in parts]))
    alone = out.of_batches([2, 3])
    assert torch.equal(alone.x, parts[1].x)
    assert torch.equal(alone.log_weights, parts[1].log_weights)
    with pytest.raises(cd.InputError, match="nothing to join"):
        cd.Particles.joined([])


def test_ancestors_are_followed_from_the_data_end_to_the_eves():
    parents = [torch.tensor([[0, 1, 2]]), torch.tensor([[1, 0, 2]]), torch.tensor([[0, 2, 1]])]
    found = Descent.ancestors(SimpleNamespace(log_weights=torch.zeros(1, 3), parents=parents))
    assert [level.tolist() for level in found] == [[[0, 1, 2]], [[1, 0, 2]], [[2, 0, 1]]]


def test_one_eve_or_one_batch_that_dominates_leaves_no_confidence():
    out = run(n_particles=6, n_batches=3)
    one = next(groups(out, 1))
    assert math.isinf(replace(one, eve=torch.zeros_like(one.eve)).mean(lambda x: x[:, 0]).error)
    lost = replace(out, batch_log_z=f64([0.0, -90.0, -90.0]))
    assert math.isinf(lost.mean(lambda x: x[:, 0]).error)
    assert math.isinf(lost.log_z.error)
    low, high = replace(out, batch_log_z=f64([0.0, -9.0, -9.0])).log_z.interval()
    assert high - low > 50


# -- going on ------------------------------------------------------------------------------------------------


def going_on(**options):
    options = {"n_particles": 3, "n_batches": 4, "seed": 4, "process": Gaussian(variance=0.8), **options}
    return cd.SMC(tilted(), COARSE, **options)


def test_passes_are_pooled_like_batches():
    smc, twin = going_on(), going_on()
    one, two = smc.sample(), smc.sample(2)
    whole = twin.sample(3)
    assert torch.equal(cd.Particles.joined([one, two]).weights, whole.weights)
    assert torch.equal(torch.cat([one.x, two.x]), whole.x)
    assert not torch.equal(one.x, two.x[: len(one.x)])
    assert whole.n_batches == 12
    assert len(whole.eve.unique()) > len(one.eve.unique())
    torch.testing.assert_close(whole.by_batch(whole.weights).sum(1), whole.batch_log_z.softmax(0), atol=1e-12, rtol=0)
    assert whole.evaluations.rows == 3 * 12 * 9


def test_stopped_between_passes_the_completed_ones_are_the_result():
    whole = going_on().sample(3)
    smc = going_on()
    cut = smc.sample(3, callback=lambda p: p.done == 10)  # four levels per pass
    assert cut.n_batches == 8
    assert torch.equal(cut.x, whole.x[:24])
    assert torch.equal(smc.sample().x, whole.x[24:])  # the pass that was cut is made again
    with pytest.raises(cd.StoppedError, match="level 1"):
        going_on().sample(3, callback=lambda p: p.done == 3)


def test_a_snapshot_goes_on_bit_for_bit():
    smc = going_on()
    [smc.step() for _ in range(3)]
    again = going_on(start=smc.snapshot())
    assert torch.equal(again.output(), smc.output())
    for _ in range(3):
        one, two = smc.step(), again.step()
        assert torch.equal(smc.output(), again.output())
        assert torch.equal(one.log_z, two.log_z)
        assert one.rows == two.rows
    with pytest.raises(cd.InputError, match="there are no draws before the first step"):
        going_on().output()


def kept_draws(smc, n, burn_in):
    draws = []
    for i in range(n + burn_in):
        smc.step()
        if i >= burn_in:
            draws.append(smc.output()[:, 0])
    return torch.stack(draws).mean(0)


def test_draws_that_are_kept_have_equal_weights(monkeypatch):
    """Batches of two particles: the mean of their draws is far off, unless Z decides which of them stay."""
    mean = law_at(0.3, slope=B)[1]

    def check():
        target = product().tilt(lambda x: B * x[:, 0], on="state", anneal=cd.anneal.power(2, floor=0.1))
        smc = cd.SMC(target, COARSE, n_particles=2, n_batches=500, process=exact_process(COARSE), seed=3)
        assert_mean(kept_draws(smc, 30, 15), mean)

    check()
    monkeypatch.setattr(Stream, "bernoulli", lambda self, log_p: torch.ones_like(log_p, dtype=torch.bool))
    refuted(check)


def test_the_target_may_change_while_it_runs():
    smc = going_on(n_batches=300)
    before = kept_draws(smc, 5, 3)
    smc.target = MIXTURE**1.8
    with pytest.raises(cd.InputError, match="before the first step"):
        smc.output()
    info = smc.step()
    assert info.accepted.all()
    assert (info.born == 9).all()
    after = kept_draws(smc, 5, 3)
    fresh = kept_draws(cd.SMC(MIXTURE**1.8, COARSE, n_particles=3, n_batches=300, process=Gaussian(variance=0.8)), 5, 3)
    error = math.hypot(float(after.std()), float(fresh.std())) / 300**0.5
    assert abs(float(after.mean() - fresh.mean())) < 5 * error
    assert abs(float(after.mean() - before.mean())) > 5 * error


# -- each method's own formula -------------------------------------------------------------------------------


def test_cooled_noise_is_feynman_kac_itself_where_exponents_sum_to_one():
    p, q = MIXTURE, cd.models.GaussianMixture([1.0], [[0.3, 0.1]], [1.0])
    one, other = (run(cd.guided(p, q, 1.7), weight=cd.FeynmanKac(c), n_particles=8) for c in (False, True))
    assert torch.equal(one.x, other.x)
    assert torch.equal(one.batch_log_z, other.batch_log_z)
    hot, cooled = (run(p**1.7, weight=cd.FeynmanKac(c), n_particles=8) for c in (False, True))
    assert not torch.allclose(hot.x, cooled.x)


def test_fk_steering_weighs_by_the_reward_alone():
    """The differences telescope: a path's weight is exp(r_0) of where it ends."""

    def check(weight):
        target = MIXTURE.tilt(lambda x: x[:, 0] - x[:, 1] ** 2, guidance="gradient")
        smc = cd.SMC(target, COARSE, n_particles=1, n_batches=20, weight=weight, process=Gaussian(variance=0.8))
        particles = smc.sample()
        reward = smc.evaluate(particles.x, COARSE.times[:1].expand(20)).reward
        torch.testing.assert_close(particles.batch_log_z, reward, atol=1e-9, rtol=0)

    check(cd.Steering())
    refuted(check, cd.Twisted())


def one_step(target, weight, n_batches=30):
    """A single step from the noise end: where it began, where it ended, its log-weight, and the evaluator."""
    process = Gaussian(variance=0.8)
    smc = cd.SMC(target, ONE_STEP, n_particles=1, n_batches=n_batches, weight=weight, process=process)
    start = smc.evaluate.noise(smc.stream.at("noise"), n_batches)
    particles = smc.sample()
    return start, particles.x, particles.batch_log_z, smc.evaluate


def test_twisted_weights_are_those_of_the_twisted_diffusion_sampler():
    """p(x_s | x_t) exp(r_s(x_s)) / (q(x_s | x_t) exp(r_t(x_t))), with r_t(x_t) in the first weight."""
    target = MIXTURE.tilt(lambda x: x[:, 0] - x[:, 1] ** 2, anneal=cd.anneal.power(2, floor=0.2))
    x_t, x_s, log_w, _ = one_step(target, cd.Twisted())
    s, t = ONE_STEP.times.tolist()
    s_, t_ = (ONE_STEP.times[i].expand(30) for i in (0, 1))
    x = x_t.clone().requires_grad_()
    seen = MIXTURE.predict(x, t_)
    gradient = torch.autograd.grad(0.2 * (seen[:, 0] - seen[:, 1] ** 2).sum(), x)[0]
    d = t**2 - s**2
    scale = math.sqrt(d - d**2 / (t**2 + 0.8**2))
    mean = x_t + d * (MIXTURE.predict(x_t, t_) - x_t) / t**2
    seen = MIXTURE.predict(x_s, s_)

    def check(pull):
        log_p = Normal(mean, scale).log_prob(x_s).sum(1)
        log_q = Normal(mean + d * pull, scale).log_prob(x_s).sum(1)
        torch.testing.assert_close(log_w, seen[:, 0] - seen[:, 1] ** 2 + log_p - log_q, atol=1e-9, rtol=0)

    check(gradient)
    refuted(check, 0.9 * gradient)


def test_cooled_particles_follow_score_and_reward_with_less_noise():
    """`x + d (S + grad r / 2 - (1 - 1/C)(S + grad r) / 2) + N(0, d / C)` from the noise end, 20,000 draws."""
    c, n = 2.5, 20_000
    target = (MIXTURE**c).tilt(
        lambda x: 0.4 * x[:, 0] - x[:, 1] ** 2, on="state", guidance="gradient", anneal=cd.anneal.power(2, floor=0.2)
    )
    x, end, _, _ = one_step(target, cd.FeynmanKac(cooled=True), n_batches=n)
    s, t = ONE_STEP.times.tolist()
    d = t**2 - s**2
    score = c * (MIXTURE.predict(x, ONE_STEP.times[1].expand(n)) - x) / t**2
    gradient = 0.2 * torch.stack([torch.full((n,), 0.4, dtype=torch.float64), -2 * x[:, 1]], dim=1)

    def check(pulled):
        z = (end - x - d * (score + gradient / 2 - (1 - 1 / c) / 2 * (score + pulled * gradient))) / math.sqrt(d / c)
        assert_mean(torch.cat([z, z * gradient, z * z - 1], dim=1), 0.0)

    check(1.0)
    refuted(check, 0.0)


def test_feynman_kac_weights_are_the_formula_of_the_correctors():
    """(d/2)(|S|^2 - sum_j c_j |s_j|^2 + S . grad r) + r_s(x_t) - r_t(x_t), at the noisy end."""
    q, c = cd.models.GaussianMixture([1.0], [[0.3, 0.1]], [1.0]), (1.6, -0.5)
    target = (MIXTURE ** c[0] * q ** c[1]).tilt(
        lambda x: 0.4 * x[:, 0] - x[:, 1] ** 2, on="state", guidance="gradient", anneal=cd.anneal.power(2, floor=0.2)
    )
    x, _, log_w, _ = one_step(target, cd.FeynmanKac())
    s, t = ONE_STEP.times.tolist()
    scores = [(m.predict(x, ONE_STEP.times[1].expand(30)) - x) / t**2 for m in (MIXTURE, q)]
    total = c[0] * scores[0] + c[1] * scores[1]
    gradient = 0.2 * torch.stack([torch.full((30,), 0.4, dtype=torch.float64), -2 * x[:, 1]], dim=1)
    squares = (total**2).sum(1) - sum(cj * (sj**2).sum(1) for cj, sj in zip(c, scores, strict=True))
    d, r = t**2 - s**2, 0.4 * x[:, 0] - x[:, 1] ** 2
    # r_t = 0.2 r is the first weight, and then the weight grows by r_s - r_t at fixed x.
    expected = d / 2 * (squares + (total * gradient).sum(1)) + r
    torch.testing.assert_close(log_w, expected, atol=1e-9, rtol=0)
    refuted(torch.testing.assert_close, log_w, expected + d / 2 * (total * gradient).sum(1), atol=1e-9, rtol=0)
