"""Ladders stand where their formulas say, level 0 at the data end, and annealing is a function of time alone."""

from __future__ import annotations

import pytest
import torch

import crepe_diffusion as cd
from checks import refuted
from crepe_diffusion.random import Stream

N, K, LOW, HIGH = 5, 3, 0.02, 11.0


def times_of(kind: str, n_finish: int = 0) -> list[float]:
    """The formulas, written a second time."""
    n = (N - 1) * K + n_finish
    out = []
    for i in range(n + 1):
        u = i / n
        if kind == "karras":
            out.append((LOW ** (1 / 7) * (1 - u) + HIGH ** (1 / 7) * u) ** 7)
        elif kind == "geometric":
            out.append(LOW * (HIGH / LOW) ** u)
        else:
            out.append(LOW + (HIGH - LOW) * u)
    return out


@pytest.mark.parametrize("kind", ["karras", "geometric", "linear"])
def test_times_follow_the_formula_and_every_kth_is_a_level(kind):
    def check(expected):
        ladder = getattr(cd.ladder, kind)(N, LOW, HIGH, substeps=K)
        assert ladder.times.tolist() == pytest.approx(expected, rel=1e-12)
        assert ladder.levels.tolist() == pytest.approx(expected[::K], rel=1e-12)
        assert ladder.n_levels == N

    check(times_of(kind))
    refuted(check, times_of({"karras": "geometric", "geometric": "linear", "linear": "karras"}[kind]))


@pytest.mark.parametrize("kind", ["karras", "geometric", "linear"])
def test_finishing_times_continue_the_same_grid_below_level_0(kind):
    ladder = getattr(cd.ladder, kind)(N, LOW, HIGH, substeps=K, n_finish=2)
    grid = [*reversed(ladder.finish), *ladder.times.tolist()]
    assert grid == pytest.approx(times_of(kind, n_finish=2), rel=1e-12)
    assert ladder.n_levels == N


def test_progress_is_linear_in_the_index_from_the_noise_end_to_the_data_end():
    ladder = cd.ladder.karras(N, LOW, HIGH, substeps=K)
    n = len(ladder.times) - 1
    expected = 1 - torch.arange(n + 1, dtype=torch.float64) / n
    torch.testing.assert_close(ladder.progress(ladder.times), expected, atol=1e-12, rtol=0)
    between = torch.lerp(ladder.times[:-1], ladder.times[1:], 0.25)
    torch.testing.assert_close(ladder.progress(between), expected[:-1] - 0.25 / n, atol=1e-12, rtol=0)
    outside = torch.tensor([0.0, 1e-9, 2 * HIGH], dtype=torch.float64)
    assert ladder.progress(outside).tolist() == [1.0, 1.0, 0.0]


def test_moving_levels_to_their_own_places_changes_nothing():
    ladder = cd.ladder.geometric(N, LOW, HIGH, substeps=K, n_finish=1)
    own = torch.arange(N, dtype=torch.float64) * K
    assert torch.allclose(ladder.moved(own).times, ladder.times, rtol=1e-14, atol=0)


def test_moved_ladders_keep_ends_finish_and_the_annealing_of_each_time():
    ladder = cd.ladder.geometric(N, LOW, HIGH, substeps=K, n_finish=2)
    cuts = Stream(0).uniform((20, N - 2)).sort(1).values * (N - 1) * K
    probe = torch.logspace(-2, 1.2, 50, dtype=torch.float64)
    for row in cuts:
        positions = torch.cat([torch.zeros(1), row, torch.tensor([float((N - 1) * K)])]).to(torch.float64)
        moved = ladder.moved(positions)
        again = moved.moved(positions.flip(0).neg() + (N - 1) * K)  # and moved once more, elsewhere
        for other in (moved, again):
            assert (other.times[0], other.times[-1]) == (ladder.times[0], ladder.times[-1])
            assert (other.times.diff() > 0).all()
            assert (other.substeps, other.finish, other.n_levels) == (K, ladder.finish, N)
            assert torch.equal(other.progress(probe), ladder.progress(probe))
    fresh = cd.Ladder(moved.times, K)  # one that forgot where it came from
    assert not torch.allclose(fresh.progress(probe), ladder.progress(probe), atol=1e-3)


def test_a_ladder_can_be_moved_to_another_number_of_substeps():
    ladder = cd.ladder.linear(3, 0.0, 1.0, substeps=2)
    moved = ladder.moved(torch.tensor([0.0, 1.0, 4.0], dtype=torch.float64), substeps=4)
    expected = [0, 1 / 16, 2 / 16, 3 / 16, 1 / 4, 7 / 16, 10 / 16, 13 / 16, 1]
    assert moved.times.tolist() == pytest.approx(expected, abs=1e-15)
    assert moved.levels.tolist() == pytest.approx([0, 1 / 4, 1], abs=1e-15)


@pytest.mark.parametrize(("exponent", "start"), [(10, 0.1), (5, 0.01)])
def test_power_annealing_is_the_papers(exponent, start):
    u = torch.linspace(0, 1, 11, dtype=torch.float64)
    gamma = cd.anneal.power(exponent)(u)
    torch.testing.assert_close(gamma, (start + (1 - start) * u) ** exponent, rtol=1e-12, atol=0)
    assert gamma[0] == pytest.approx(1e-10)
    assert gamma[-1] == 1


def test_annealing_reaches_the_reward_with_1_at_the_data_end():
    """Through the evaluator: gamma_t of each level multiplies the reward."""
    model = cd.models.GaussianMixture([1.0], [[0.5]], [1.0])
    ladder = cd.ladder.karras(4, 0.1, 5.0)
    for anneal in (
        cd.anneal.power(5),
        cd.anneal.power(2, floor=0.1),
        cd.anneal.linear(),
        cd.anneal.constant(),
    ):
        target = model.tilt(lambda x: torch.full((len(x),), 3.0), anneal=anneal, scale=0.5, negligible=0.0)
        chain = cd.ReplicaExchange(target, ladder, process=cd.processes.Gaussian(variance=1.0))
        r = chain.state.by_level(chain.state.seen.reward)[0]
        u = torch.tensor([1, 2 / 3, 1 / 3, 0], dtype=torch.float64)
        torch.testing.assert_close(r, 1.5 * anneal(u), rtol=1e-12, atol=0)
