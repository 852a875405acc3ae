"""Rewards of stitched plans by hand, and an annealing that is exact for Gaussian data.

r = -weight * sum over gaps z of (l2 |z|^2 + l1 sum_i |z_i|)
"""

from __future__ import annotations

import math

import pytest
import torch

import crepe_diffusion as cd
from checks import assert_mean, f64, refuted
from crepe_diffusion.processes import Gaussian
from crepe_diffusion.random import Stream
from crepe_diffusion.stitching import Junctions, Reach, WayPoint
from crepe_diffusion.targets import Reward

STREAM = Stream(41)
EXACT = {"smooth": 1e-12}  # the absolute value itself, to rounding

# Two plans of two segments of two points in the plane.
PLANS = f64(
    [
        [[[0.0, 0.0], [1.0, 0.0]], [[1.5, -1.0], [2.0, 2.0]]],  # gap (-0.5, 1)
        [[[0.3, -0.4], [0.0, 0.0]], [[0.0, 0.1], [2.0, 1.0]]],  # gap (0, -0.1)
    ]
)


def test_values_by_hand():
    start, goal = Reach((0.0, 0.0), **EXACT), Reach((2.0, 1.0), -1, -1, weight=2.0, l1=3.0, l2=0.5, **EXACT)
    torch.testing.assert_close(start(PLANS), f64([0.0, -100 * (0.25 + 10 * 0.7)]))
    torch.testing.assert_close(goal(PLANS), f64([-2 * (0.5 + 3), 0.0]))
    torch.testing.assert_close(Junctions(**EXACT)(PLANS), f64([-100 * (1.25 + 15), -100 * (0.01 + 1)]))
    way = WayPoint((1.0, 1.0), weight=2.0, l1=1.0, focus=0.5, **EXACT)
    gaps = f64([2 + 2, 1 + 1, 0.25 + 4 + 2.5, 1 + 1 + 2])
    expected = -2 * (gaps * (-gaps / 2).exp()).sum() / (-gaps / 2).exp().sum()
    torch.testing.assert_close(way(PLANS)[0], expected)


def test_a_sharp_way_point_sees_the_nearest_point_alone():
    near = WayPoint((2.0, 1.0), focus=1e3, l1=0.0, weight=1.0)
    torch.testing.assert_close(near(PLANS), f64([-1.0, 0.0]))


def test_every_gap_of_a_plan_counts_once():
    """Of three junctions each is judged as it would be alone."""
    plans, rule = STREAM.at("plans").normal((5, 4, 6, 3)), Junctions(weight=0.3)

    def check(x):
        torch.testing.assert_close(rule(plans), sum(rule(x[:, j : j + 2]) for j in range(3)))

    check(plans)
    refuted(check, plans.flip(2))


def test_links_and_singles_are_the_same_rewards():
    """A plan put together from a pool: what its parts say sums to what the whole says."""
    pool, chosen = STREAM.at("pool").normal((2, 7, 4, 2)), torch.tensor([[3, 0, 6], [5, 2, 1]])
    plans = torch.stack([p[c] for p, c in zip(pool, chosen, strict=True)])
    rows, rule = torch.arange(2), Junctions()

    def linked(left, right):
        link = rule.link(left, right)
        return link[rows, chosen[:, 0], chosen[:, 1]] + link[rows, chosen[:, 1], chosen[:, 2]]

    torch.testing.assert_close(linked(pool, pool), rule(plans))
    refuted(torch.testing.assert_close, linked(pool.flip(2), pool.flip(2)), rule(plans))
    for reach in (Reach((0.1, 0.2)), Reach((0.1, 0.2), -1, -1), Reach((0.1, 0.2), segment=1, step=2)):
        torch.testing.assert_close(reach.single(pool)[rows, chosen[:, reach.segment]], reach(plans))
        refuted(torch.testing.assert_close, reach.single(pool.flip(2))[rows, chosen[:, reach.segment]], reach(plans))


def test_a_segment_that_passes_by_is_worth_what_a_plan_of_it_alone_is():
    pool, way = STREAM.at("pool").normal((2, 7, 4, 2)), WayPoint((0.3, -0.2))
    alone = torch.stack([way(p[:, None]) for p in pool])
    torch.testing.assert_close(way.some(pool), alone)
    refuted(torch.testing.assert_close, WayPoint((-0.2, 0.3)).some(pool), alone)


@pytest.mark.parametrize("rule", [Reach((0.0, 0.0)), Junctions(), WayPoint((0.0, 0.0))], ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients_are_finite_where_a_distance_vanishes_and_right_elsewhere(rule, dtype):
    x = torch.zeros(2, 3, 4, 2, dtype=dtype)
    x[1] = STREAM.at("gradient").normal((3, 4, 2), dtype=dtype)
    x.requires_grad_()
    g = torch.autograd.grad(rule(x).sum(), x)[0]
    assert torch.equal(g[0], torch.zeros_like(g[0]))  # the best there is
    with torch.no_grad():
        difference = torch.zeros_like(x[1]).double()
        for i in range(x[1].numel()):
            step = torch.zeros(24, dtype=torch.float64)
            step[i] = 1e-6
            up, down = (x[1:].double() + sign * step.reshape(1, 3, 4, 2) for sign in (1, -1))
            difference.view(-1)[i] = (rule(up) - rule(down)) / 2e-6
    torch.testing.assert_close(g[1].double(), difference, rtol=1e-4, atol=2e-2)
    assert g[1].abs().max() > 100


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Junctions(weight=-1.0), "must not be negative.*weight=-1.0"),
        (lambda: Reach((0.0,), l1=-1.0), "must not be negative.*l1=-1.0"),
        (lambda: WayPoint((0.0,), l1=0.0, l2=0.0), "nor both"),
        (lambda: Junctions(smooth=0.0), "smooth must be a positive length, got 0.0"),
        (lambda: Junctions()(torch.zeros(2, 3, 4)), r"\(2, 3, 4\)"),
        (lambda: Reach((0.0,))(torch.zeros(2, 3)), r"\(2, 3\)"),
        (lambda: WayPoint((0.0,))(torch.zeros(3, 4, 5, 2, 1)), r"\(3, 4, 5, 2, 1\)"),
    ],
)
def test_bad_rewards_and_plans_are_refused(make, message):
    with pytest.raises(cd.InputError, match=message):
        make()


# -- matched annealing ------------------------------------------------------------------------------------------

RHO, WIDTH, POINT = 0.8, 0.3, 0.7
TIMES = f64([0.05, 0.2, 0.6, 1.5, 6.0])


def posterior(t):
    """Var[x_0 | x_t] of Gaussian data."""
    return RHO**2 * t**2 / (RHO**2 + t**2)


def log_expected_weight(t, x, first):
    """log E[exp r(D(x_first)) | x_t = x] by quadrature over x_first, which is x_0 itself for first = 0."""
    d = t**2 - first**2
    mean, variance = x - d * x / (t**2 + RHO**2), d - d**2 / (t**2 + RHO**2)
    z = torch.linspace(-12, 12, 20_001, dtype=torch.float64)
    y = mean[:, None] + variance**0.5 * z
    seen = y * RHO**2 / (RHO**2 + first**2)
    weight = (-((seen - POINT) ** 2) / (2 * WIDTH**2) - z**2 / 2).exp().sum(1) * (z[1] - z[0])
    return weight.log() - 0.5 * math.log(2 * math.pi)


@pytest.mark.parametrize("first", [0.0, 0.05], ids=["of clean samples", "of the first level"])
def test_matched_annealing_of_a_squared_error_is_exact_for_gaussian_data(first):
    """r_t is what the final weight is expected to be, up to a number that does not depend on the state."""
    x = f64([-2.0, -0.5, 0.1, 0.9, 2.2])

    def check(gamma):
        for t in TIMES[1:]:
            r = -((x * RHO**2 / (RHO**2 + t**2) - POINT) ** 2) / (2 * WIDTH**2)
            rest = gamma(t[None]) * r - log_expected_weight(t, x, first)
            torch.testing.assert_close(rest, rest[:1].expand(5), atol=1e-9, rtol=0)

    times = torch.cat([f64([first or 1e-9]), TIMES[1:]])
    check(cd.stitching.Matched(WIDTH, times, posterior(times)))
    refuted(check, cd.stitching.Matched(WIDTH, times, 1.01 * posterior(times)))
    refuted(check, cd.stitching.Matched(1.01 * WIDTH, times, posterior(times)))
    refuted(check, cd.anneal.constant())


def test_a_matched_target_hangs_together():
    """Plain denoising of exact draws, weighed by exp(r_s - r_t): what was expected at t comes true at s."""
    model = cd.models.GaussianMixture([1.0], [[0.0]], [RHO], process=Gaussian(variance=RHO))
    s, t, x_t = 0.05, 1.5, 0.9
    mean, variance = x_t - (d := t**2 - s**2) * x_t / (t**2 + RHO**2), d - d**2 / (t**2 + RHO**2)
    x_s = mean + variance**0.5 * STREAM.at("down").normal((40_000, 1))

    def check(width):
        gamma = cd.stitching.Matched(width, TIMES, posterior(TIMES))
        target = model.tilt(lambda x: -((x[:, 0] - POINT) ** 2) / (2 * WIDTH**2), anneal=gamma)
        evaluate = cd.ReplicaExchange(target, cd.ladder.of(TIMES)).evaluate
        r_t = evaluate(f64([[x_t]]), f64([t])).reward
        r_s = evaluate(x_s, f64(s).expand(len(x_s))).reward
        more = posterior(f64(t)) - posterior(f64(s))
        assert_mean((r_s - r_t).exp(), (WIDTH**2 / (WIDTH**2 + more)) ** 0.5)

    check(WIDTH)
    refuted(check, 1.1 * WIDTH)


def test_matched_annealing_is_read_linearly_in_log_t_and_stays_within_its_ends():
    gamma = cd.stitching.Matched(0.5, f64([0.1, 1.0, 10.0]), f64([0.25, 0.75, 4.0]))
    v = f64([0.0, 0.0, 0.25, 0.5, 0.5 + 0.75 * 3.25, 3.75])
    at = f64([0.01, 0.1, 10**-0.5, 1.0, 10**0.75, 99.0])
    torch.testing.assert_close(gamma(at), 0.25 / (0.25 + v))
    falling = cd.stitching.Matched(0.5, f64([0.1, 1.0]), f64([0.3, 0.1]))
    assert falling(f64([1.0])).item() == 1  # never more than the reward itself


def test_weights_are_functions_of_time_or_of_progress():
    ladder = cd.ladder.of([0.1, 0.2, 5.0])
    matched = Reward(lambda x: x, anneal=cd.stitching.Matched(0.5, f64([0.1, 5.0]), f64([0.0, 1.0])), scale=3.0)
    power = Reward(lambda x: x, anneal=cd.anneal.power(2, floor=0.0), scale=3.0)
    expected = {"matched": 3 * 0.25 / f64([0.25, 0.25 + math.log(2) / math.log(50), 1.25]), "power": f64([3, 0.75, 0])}
    torch.testing.assert_close(matched.weight(ladder.levels, ladder), expected["matched"])
    torch.testing.assert_close(power.weight(ladder.levels, ladder), expected["power"])
    finer = cd.ladder.of([0.1, 0.15, 0.2, 5.0])  # another ladder: progress changes, time does not
    torch.testing.assert_close(matched.weight(ladder.levels, finer), expected["matched"])
    refuted(torch.testing.assert_close, power.weight(ladder.levels, finer), expected["power"])


@pytest.mark.parametrize(
    ("width", "times", "variances"),
    [
        (0.0, [0.1, 1.0], [0.0, 1.0]),
        (0.1, [1.0, 0.1], [0.0, 1.0]),
        (0.1, [0.1, 1.0], [-1.0, 1.0]),
        (0.1, [0.1, 1.0], [1.0]),
        (0.1, [0.0, 1.0], [0.0, 1.0]),
        (0.1, [1.0], [1.0]),
    ],
)
def test_annealing_that_matches_nothing_is_refused(width, times, variances):
    with pytest.raises(cd.InputError, match=r"width|increasing times"):
        cd.stitching.Matched(width, f64(times), f64(variances))
