"""Randomness is a value: a draw is a function of (seed, path, row, element), and of nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import kstest

import crepe_diffusion as cd
from checks import P_VALUE, assert_frequencies, assert_mean, assert_uncorrelated, refuted
from crepe_diffusion.random import Stream, _open_unit

STREAM = Stream(7).at(3, "walk")
DTYPES = [torch.float32, torch.float64]


def draw(kind, shape, first_row=0):
    if kind == "uniform":
        return STREAM.uniform(shape, first_row=first_row)
    return STREAM.normal(shape, first_row=first_row, dtype=kind)


# -- rows own their numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["uniform", *DTYPES], ids=str)
@pytest.mark.parametrize("event", [(), (1,), (4,), (5,), (3, 7)], ids=str)
def test_shards_equal_the_whole(kind, event):
    def check(offset):
        whole = draw(kind, (11, *event))
        shards = [draw(kind, (n, *event), first_row=first + offset) for first, n in ((0, 2), (2, 5), (7, 4))]
        assert torch.equal(whole, torch.cat(shards))

    check(0)
    refuted(check, 1)


@pytest.mark.parametrize("kind", ["uniform", *DTYPES], ids=str)
def test_a_draw_is_a_value_not_a_position(kind):
    first = draw(kind, (6, 3))
    draw(kind, (100, 9))
    assert torch.equal(first, draw(kind, (6, 3)))


def test_numbers_of_other_types_name_the_same_branch():
    plain = Stream(5).at(3, "a").uniform((4,))
    assert torch.equal(plain, Stream(np.int64(5)).at(np.int32(3), "a").uniform((4,)))


# -- branches are independent ----------------------------------------------------------------------------

BRANCHES = {
    "seed": (Stream(0).at(1, "walk"), Stream(1).at(1, "walk")),
    "iteration": (Stream(0).at(1, "walk"), Stream(0).at(2, "walk")),
    "purpose": (Stream(0).at(1, "walk"), Stream(0).at(1, "accept")),
    "depth": (Stream(0).at(1), Stream(0).at(1, 0)),
    "order": (Stream(0).at(1, 2), Stream(0).at(2, 1)),
    "digits joined": (Stream(0).at(1, 1), Stream(0).at(11)),
    "words joined": (Stream(0).at("a", "b"), Stream(0).at("ab")),
    "number and word": (Stream(0).at(1), Stream(0).at("1")),
    "comma in a word": (Stream(0).at("a', 'b"), Stream(0).at("a", "b")),
}


@pytest.mark.parametrize("what", BRANCHES)
def test_branches_are_independent(what):
    one, other = (branch.normal((50_000, 2)) for branch in BRANCHES[what])
    for f in (lambda z: z, torch.square):
        assert_uncorrelated(f(one), f(other))
    refuted(assert_uncorrelated, one, one)


def test_rows_and_elements_are_independent():
    """Neighbouring rows, and the cosine and sine halves of Box-Muller, in the values and in their squares."""
    for dtype in DTYPES:
        z = STREAM.normal((50_000, 6), dtype=dtype)
        for f in (lambda v: v, torch.square):
            assert_uncorrelated(f(z[1:]), f(z[:-1]))
            for shift in (1, 2, 3, 5):
                assert_uncorrelated(f(z), f(z.roll(shift, dims=1)))


# -- the laws --------------------------------------------------------------------------------------------


def check_uniform(u):
    assert u.min() > 0
    assert u.max() < 1
    assert kstest(u.flatten().numpy(), "uniform").pvalue > P_VALUE


def test_uniforms_are_uniform():
    u = STREAM.uniform((20_000, 10))
    check_uniform(u)
    refuted(check_uniform, u**1.02)
    refuted(check_uniform, u.round(decimals=5))


def test_no_word_reaches_either_end_of_the_unit_interval():
    ends = _open_unit(torch.tensor([0, -1]))  # no bit set, and all of them
    assert 0 < ends[0] < 1e-15
    assert 1 - 1e-15 < ends[1] < 1


def check_normal(z):
    z = z.to(torch.float64).flatten()
    assert z.isfinite().all()
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert_mean(z**power, moment)
    assert kstest(z.numpy(), "norm").pvalue > P_VALUE


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_normals_are_normal(dtype):
    z = STREAM.normal((20_000, 11), dtype=dtype)
    assert z.dtype == dtype
    check_normal(z)
    for broken in (z * 1.01, z + 0.02, z.clamp(-2.5, 2.5), z.abs()):
        refuted(check_normal, broken)


def test_bernoulli_accepts_with_the_stated_probability():
    log_p = torch.tensor([-torch.inf, -3.0, -0.4, 0.0, 2.0, torch.inf], dtype=torch.float64)
    drawn = STREAM.bernoulli(log_p.expand(40_000, -1)).to(torch.float64)
    assert_mean(drawn, log_p.clamp(max=0).exp())
    assert drawn[:, 0].sum() == 0
    assert drawn[:, 3:].min() == 1
    refuted(assert_mean, drawn[:, 1:3], log_p[1:3].exp() + 0.02)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_categories_come_at_their_frequencies_and_never_at_zero_probability(dtype):
    p = torch.tensor([0.0, 0.1, 0.0, 0.55, 0.3, 0.05, 0.0, 0.0])
    log_p = p.log().to(dtype) + 3.7  # not normalised
    drawn = STREAM.categorical(log_p.expand(50_000, -1))
    assert_frequencies(drawn, p)
    refuted(assert_frequencies, drawn, p + 0.01 * (p > 0))
    refuted(assert_frequencies, drawn, p.roll(1))


@pytest.mark.parametrize("bad", [-torch.inf, torch.nan], ids=str)
def test_a_draw_from_nothing_is_news(bad):
    log_p = torch.zeros(4, 3)
    log_p[2] = bad
    with pytest.raises(cd.NonFiniteError, match="1 of 4 draws have no category of positive probability"):
        STREAM.categorical(log_p)


def test_the_last_uniform_never_lands_on_a_trailing_category_of_probability_zero(monkeypatch):
    largest = _open_unit(torch.tensor([-1]))  # all bits set
    monkeypatch.setattr(Stream, "uniform", lambda self, shape, **_: largest.expand(shape))
    for n in (2, 3, 10, 1000):
        log_p = torch.cat([torch.zeros(n), torch.full((3,), -torch.inf)]).expand(4, -1)
        assert STREAM.categorical(log_p).tolist() == [n - 1] * 4


# -- samplers --------------------------------------------------------------------------------------------

MIXTURE = cd.models.GaussianMixture([0.3, 0.7], [[-2.0, 0.5], [1.5, -1.0]], [0.5, 0.4])
LEVELS = cd.ladder.karras(6, 0.05, 10.0, substeps=2, n_finish=1)


def tilted():
    return (MIXTURE**1.5).tilt(lambda x: x[:, 0] - x[:, 1] ** 2, guidance="gradient")


def chain_samples(target, **options):
    chain = cd.ReplicaExchange(target, LEVELS, seed=4, explorer=cd.Bounce(), fit_samples=16, **options)
    return chain.sample(4).chains


def smc_samples(target, **options):
    return cd.SMC(target, LEVELS, seed=4, n_particles=5, n_batches=3, fit_samples=32, **options).sample().x


@pytest.mark.parametrize("sampler", [chain_samples, smc_samples])
def test_samples_are_bit_identical_for_any_micro_batch(sampler):
    def check(target):
        whole = sampler(target)
        for size in (1, 7, 1000):
            assert torch.equal(whole, sampler(target, micro_batch=size)), size

    check(tilted())
    mingling = cd.models.Denoiser(
        lambda y, t: y / (1 + t[:, None] ** 2) + 1e-9 * y.mean(), event_shape=(2,), dtype=torch.float64
    )
    refuted(check, mingling**1.5)


def test_a_chain_does_not_depend_on_how_many_run_beside_it():
    alone = chain_samples(tilted(), n_chains=1)
    assert torch.equal(alone[:, 0], chain_samples(tilted(), n_chains=3)[:, 0])


@pytest.mark.parametrize("sampler", [chain_samples, smc_samples])
def test_global_generators_are_neither_read_nor_moved(sampler):
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    first = sampler(tilted())
    assert torch.equal(torch_state, torch.get_rng_state())
    assert (numpy_state == np.random.get_state()[1]).all()  # noqa: NPY002
    torch.manual_seed(2)
    np.random.seed(2)  # noqa: NPY002
    assert torch.equal(first, sampler(tilted()))


@pytest.mark.parametrize("sampler", [cd.ReplicaExchange, cd.SMC, cd.Plain])
@pytest.mark.parametrize("seed", [1.0, 1.5, "0", None, -1, True, [0], torch.tensor(0)], ids=repr)
def test_a_seed_that_is_no_integer_is_refused(sampler, seed):
    with pytest.raises(cd.InputError, match="seed must be a non-negative integer"):
        sampler(MIXTURE, LEVELS, seed=seed)
