"""Errors by tours: exact on a small case, and honest on real chains, where autocorrelation alone is not."""

from __future__ import annotations

import math

import pytest
import torch

import crepe_diffusion as cd
from checks import refuted
from crepe_diffusion.diagnostics.estimates import ess, mean_of, tours

# Two modes at +-1.5 on one of 16 axes, tempered by 2: the weight of the second mode is 0.4957.
N_CHAINS, N_GROUPS = 2, 48


@pytest.fixture(scope="module")
def chains() -> cd.samplers.Chains:
    means = torch.zeros(2, 16, dtype=torch.float64)
    means[:, 0] = torch.tensor([-1.5, 1.5])
    p = cd.models.GaussianMixture([0.7, 0.3], means, [0.30, 0.27])
    chain = cd.ReplicaExchange(p**2.0, cd.ladder.karras(33, 0.02, 10.0), n_chains=N_CHAINS * N_GROUPS, seed=4)
    return chain.sample(300, burn_in=130)


def coverage(out: cd.samplers.Chains, by_tours: bool) -> float:
    """The share of 95 % intervals of groups of chains that hold the mean of all of them."""
    second = out.scalar(lambda x: (x[:, 0] > 0).double())
    labels = out.tours if by_tours else None
    hits = []
    for g in range(N_GROUPS):
        part = slice(N_CHAINS * g, N_CHAINS * (g + 1))
        low, high = mean_of(second[:, part], None if labels is None else labels[:, part]).interval()
        hits.append(low <= float(second.mean()) <= high)
    return sum(hits) / len(hits)


def honest(share: float) -> None:
    """Of 48 intervals that cover with probability 0.9, fewer than 37 cover once in 400 cases."""
    assert share >= 37 / 48


def test_intervals_by_tours_cover_and_those_by_autocorrelation_do_not(chains):
    honest(coverage(chains, by_tours=True))
    refuted(honest, coverage(chains, by_tours=False))


def test_the_effective_size_of_a_mode_is_not_more_than_arrivals_allow(chains):
    second = chains.scalar(lambda x: (x[:, 0] > 0).double())
    assert chains.ess(lambda x: (x[:, 0] > 0).double()) == ess(second, chains.tours)
    assert ess(second, chains.tours) < len(chains.tours.unique()) < second.numel()
    assert ess(second) > 2 * ess(second, chains.tours)


def test_the_error_is_that_of_tours_counted_by_hand():
    """Three tours of two, three and one draws with values 0, 1 and 1 around a mean of 2/3."""
    values = torch.tensor([[0.0], [0.0], [1.0], [1.0], [1.0], [1.0]], dtype=torch.float64)
    born = torch.tensor([[1], [1], [4], [4], [4], [6]])
    labels = tours(torch.zeros_like(born), born)
    assert labels[:, 0].tolist() == [0, 0, 1, 1, 1, 2]
    by_hand = math.sqrt(3 / 2 * ((-4 / 3) ** 2 + 1.0**2 + (1 / 3) ** 2)) / 6
    estimate = mean_of(values, labels)
    assert estimate.error == pytest.approx(max(by_hand, mean_of(values).error))
    assert estimate.dof == pytest.approx(36 / 14 - 1)


def test_draws_that_were_never_at_the_noise_end_are_one_tour_per_chain():
    replica, born = torch.tensor([[0, 5], [1, 6], [2, 7]]), torch.tensor([[0, 0], [0, 0], [9, 9]])
    labels = tours(replica, born)
    assert labels[0, 0] == labels[1, 0] != labels[2, 0]
    assert labels[0, 1] == labels[1, 1] != labels[0, 0]


def test_student_intervals_are_wider_for_few_groups():
    wide, narrow = cd.Estimate(0.0, 1.0, dof=3).interval(), cd.Estimate(0.0, 1.0).interval()
    assert wide[1] == pytest.approx(3.182, abs=1e-3)
    assert narrow == pytest.approx((-1.95996, 1.95996), abs=1e-4)
    with pytest.raises(cd.InputError, match="level must be a probability"):
        cd.Estimate(0.0, 1.0).interval(95)


def test_the_spread_of_chains_counts_where_it_says_more_than_tours():
    """Chains of white noise that stand apart, each draw a tour of its own: only their spread shows it."""
    noise = cd.Stream(3).normal((200, 6), dtype=torch.float64)
    apart = noise + torch.tensor([-1.0, -0.6, -0.2, 0.2, 0.6, 1.0])
    tour = torch.arange(1200).reshape(200, 6)
    found = mean_of(apart, tour)
    assert found.error == pytest.approx(float(apart.mean(0).std()) / math.sqrt(6))
    assert found.dof == 5
    assert mean_of(noise, tour).error == pytest.approx(1 / math.sqrt(1200), rel=0.5)
