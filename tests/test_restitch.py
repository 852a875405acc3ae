"""Restitching leaves pi_t invariant with however few candidates, and its plans are drawn by their weights.

Gaussian segments tied by squared gaps: pi_t is a Gaussian with known moments, and replicas start from it exactly.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

import crepe_diffusion as cd
from checks import assert_frequencies, assert_mean, f64, refuted
from crepe_diffusion.kernels import State
from crepe_diffusion.processes import Gaussian
from crepe_diffusion.random import Stream
from crepe_diffusion.stitching import Junctions, LinkReward, Reach, Restitch, SegmentReward, WayPoint, restitch

STREAM = Stream(31)
RHO, T, TOP = 1.0, 0.5, 30.0  # at this top its N(0, T^2) differs from p_T by 1e-6 of a variance further down
LADDER = cd.ladder.of([0.1, T, TOP])  # linear annealing: gamma = 1/2 at level 1
GAMMA, SHARE, VARIANCE = 0.5, RHO**2 / (RHO**2 + T**2), RHO**2 + T**2
N = 8000
SQUARED = {"weight": 3.0, "l1": 0.0}
FEW = Restitch(n_candidates=4, chance=1.0, between=(0.3, 0.7), n_steps=2, n_plans=4)


def segments(n=3, process=None):
    """Each two points on a line, of scale RHO; plain denoising with this process is exact at any number of steps."""

    def denoise(y, s):
        return y * (RHO**2 / (RHO**2 + s**2))[:, None, None]

    process = process or Gaussian(variance=RHO)
    return cd.stitching.Segments(cd.models.Denoiser(denoise, (2, 1), dtype=torch.float64, process=process), n)


def target(*functions, anneal=None, model=None):
    out = (model or segments()).as_target()
    for function in functions:
        out = out.tilt(function, anneal=anneal or cd.anneal.linear())
    return out


def evaluator(of, ladder=LADDER):
    return cd.ReplicaExchange(of, ladder).evaluate


def moments(junctions=3.0, start=2.0, goal=1.0, gamma=GAMMA):
    """Mean and covariance of pi_t with these weights: squared gaps of predictions, first point at 1, last at -0.5."""
    g = torch.zeros(4, 6, dtype=torch.float64)
    g[0, [1, 2]] = g[1, [3, 4]] = f64([1, -1])
    g[2, 0] = g[3, 5] = 1
    weights, wanted = f64([junctions, junctions, start, goal]), f64([0, 0, 1.0, -0.5])
    pull = 2 * gamma * SHARE * weights[:, None] * g
    covariance = torch.linalg.inv(torch.eye(6, dtype=torch.float64) / VARIANCE + SHARE * g.T @ pull)
    return covariance @ pull.T @ wanted, covariance


TIED = target(Junctions(**SQUARED), Reach((1.0,), weight=2.0, l1=0.0), Reach((-0.5,), -1, -1, weight=1.0, l1=0.0))


def gaussian(n=N):
    """Exact draws of pi_t of TIED."""
    mean, covariance = moments()
    return (mean + STREAM.at("x").normal((n, 6)) @ torch.linalg.cholesky(covariance).T).reshape(n, 3, 2, 1)


def thinned(of, n=N):
    """Exact draws of pi_t for rewards that are never positive, by rejection from p_t."""
    evaluate, kept, i = evaluator(of), [], 0
    while sum(len(x) for x in kept) < n:
        x = VARIANCE**0.5 * STREAM.at("thinned", i).normal((20_000, *of.models[0].event_shape))
        r, i = evaluate(x, f64(T).expand(len(x))).reward, i + 1
        kept.append(x[STREAM.at("keep", i).bernoulli(r)])
    return torch.cat(kept)[:n]


def state_of(evaluate, x):
    """Chains with these points at level 1; replicas stand at all levels in different orders."""
    n = len(x)
    level = torch.tensor([[0, 1, 2], [2, 0, 1], [1, 2, 0]]).repeat(-(-n // 3), 1)[:n]
    everything = STREAM.at("others").normal((n, 3, *x.shape[1:]))
    everything[torch.arange(n), level.argsort(1)[:, 1]] = x
    everything = everything.flatten(0, 1)
    return State(everything, evaluate(everything, evaluate.ladder.levels[level.flatten()]), level)


def moved_from(of, explorer, x, times=2, judge=None):
    """The points at level 1 after some moves, and the share of plans that changed; `judge` is whom the move asks."""
    state = state_of(evaluator(of), x)
    for i in range(times):
        state, _ = explorer(state, evaluator(judge or of), STREAM.at("move", i))
    after = state.x[state.row_at(1)]
    return after, float((after != x).flatten(1).any(1).double().mean())


def features(x):
    """All first and second moments of a plan."""
    z = x.flatten(1)
    return torch.cat([z, (z[:, :, None] * z[:, None]).flatten(1)], 1)


def keeps(of, explorer, before, **options):
    """E f(x') = E f(x) if x ~ pi_t and the move leaves pi_t alone: no moment changes, though many plans do."""
    after, share = moved_from(of, explorer, before, **options)
    assert share > 0.2
    assert_mean(features(after) - features(before), 0.0)


# -- squared gaps, where pi_t is a Gaussian -------------------------------------------------------------------


@pytest.mark.parametrize(
    "explorer",
    [FEW, replace(FEW, n_candidates=1, n_plans=9), replace(FEW, n_plans=1), replace(FEW, n_candidates=12, n_steps=1)],
    ids=["few", "one candidate", "one plan", "more"],
)
def test_a_gaussian_law_of_plans_is_kept(explorer):
    after, share = moved_from(TIED, explorer, gaussian())
    assert share > 0.2

    def check(**weights):
        mean, covariance = moments(**weights)
        z = after.flatten(1) - mean
        assert_mean(z, 0.0)
        assert_mean(z[:, :, None] * z[:, None], covariance)

    check()
    refuted(check, junctions=5.0)
    refuted(check, start=1.0)


@contextmanager
def repeats_allowed():
    """Plans that use a trajectory twice pass for good ones."""
    original = restitch._forward_backward

    def all_good(*arguments):
        plans, good, log_total = original(*arguments)
        return plans, torch.ones_like(good), log_total

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restitch, "_forward_backward", all_good)
        yield


class Twice(Restitch):
    """Lets a plan use a trajectory twice."""

    def _choose(self, *arguments):
        with repeats_allowed():
            return super()._choose(*arguments)


class Wide(Restitch):
    """Candidates of another law than p_t."""

    def _candidates(self, *arguments):
        x, known, *rest = super()._candidates(*arguments)
        return 1.15 * x, 1.15 * known, *rest


class Forgetful(Restitch):
    """Draws from the fresh trajectories alone: right only for infinitely many of them."""

    def __call__(self, state, evaluate, stream):
        new, moved = super().__call__(state, evaluate, stream)
        x, rows = new.x.clone(), state.row_at(1)
        x[rows] = self.begin(evaluate, len(rows), stream)[0]
        return State(x, evaluate(x, evaluate.ladder.levels[state.level.flatten()]), state.level), moved


class Stale(Restitch):
    """Takes what is known of the present plan from the replica at another level."""

    def __call__(self, state, evaluate, stream):
        prediction = state.seen.predictions[0].roll(1, 0)
        return super().__call__(replace(state, seen=replace(state.seen, predictions=(prediction,))), evaluate, stream)


@pytest.mark.parametrize("broken", [Twice, Wide, Forgetful, Stale])
def test_a_broken_move_does_not_keep_it(broken):
    keeps(TIED, FEW, gaussian())
    refuted(keeps, TIED, broken(4, 1.0, (0.3, 0.7), 2, 4), gaussian())


@pytest.mark.parametrize(
    "judge",
    [
        target(*(r.function for r in TIED.rewards), anneal=cd.anneal.constant()),
        TIED.without("reward2"),
        target(Junctions(weight=3.0, l1=4.0), *(r.function for r in TIED.rewards[1:])),
    ],
    ids=["without annealing", "without the start", "other gaps"],
)
def test_a_move_that_weighs_plans_differently_does_not_keep_it(judge):
    refuted(keeps, TIED, FEW, gaussian(), judge=judge)


# -- rewards that make pi_t something else ----------------------------------------------------------------------

SHARP = target(Junctions(weight=0.7, l1=3.0), Reach((1.0,), weight=0.7, l1=3.0, step=1))
MATCHED = cd.stitching.Matched(0.6, LADDER.times, f64([0.0, 0.9, 5.0]))
PASSING = target(Junctions(**SQUARED)).tilt(WayPoint((1.5,), weight=1.0, l1=0.5), anneal=cd.anneal.linear(), scale=2.0)


@pytest.mark.parametrize("of", [SHARP, target(Junctions(**SQUARED), anneal=MATCHED)], ids=["sharp", "matched"])
def test_other_rewards_and_annealings_are_kept(of):
    keeps(of, FEW, thinned(of))
    constant = target(*(r.function for r in of.rewards), anneal=cd.anneal.constant())
    refuted(keeps, of, FEW, thinned(of), judge=constant)


SPREAD = target(Junctions(**SQUARED), lambda x: -0.4 * (x.mean((1, 2, 3)) - 1).square() - 0.4 * x[:, 0, 0, 0].square())
BOTH = PASSING.tilt(SPREAD.rewards[1].function, anneal=cd.anneal.linear())


@pytest.mark.parametrize(
    ("of", "n_plans"), [(PASSING, 1), (SPREAD, 3), (BOTH, 6)], ids=["way-point", "black box", "both"]
)
def test_rewards_of_the_whole_plan_are_judged_by_vote(of, n_plans):
    explorer, before = replace(FEW, n_plans=n_plans), thinned(of)
    keeps(of, explorer, before)
    for term in of.rewards[1:]:
        refuted(keeps, of, explorer, before, judge=of.without(term.name))
    weaker = replace(of, rewards=(of.rewards[0], *(replace(r, scale=0.25 * r.scale) for r in of.rewards[1:])))
    refuted(keeps, of, explorer, before, judge=weaker)


@pytest.mark.parametrize("ignores_it", [True, False], ids=["plans not sought out", "sought out too much"])
def test_the_vote_makes_up_for_plans_that_were_sought_out(monkeypatch, ignores_it):
    """Plans with a segment that passes by are drawn more often; the vote has to know by how much."""
    original = restitch._forward_backward

    def forward_backward(single, link, n_plans, stream, pivot):
        return original(single, link, n_plans, stream, None if ignores_it else 4 * pivot)

    monkeypatch.setattr(restitch, "_forward_backward", forward_backward)
    refuted(keeps, PASSING, FEW, thinned(PASSING))


def test_the_present_plan_stands_for_election_too():
    """Without it, plans of few candidates would be voted for whatever they are."""

    class New(Restitch):
        def _choose(self, *arguments):
            *known, present, stream = arguments
            other = super()._choose(*known, present + 3, stream)
            return torch.where((other == present).all(1)[:, None], present + 3, other)

    refuted(keeps, PASSING, New(4, 1.0, (0.3, 0.7), 2, 1), thinned(PASSING))


# -- plans by their weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sought", [False, True], ids=["plain", "with one that counts"])
def test_plans_are_drawn_by_their_weights(sought):
    """All 4^3 plans enumerated, for chains of different weights, in one call."""
    single, link = 2 * STREAM.at("single").normal((3, 3, 4)), 2 * STREAM.at("link").normal((3, 4, 4))
    single[1] += f64([700.0, -900.0, 300.0])[:, None]  # what all plans share does not matter, however large
    link[2, 0] = link[2, :, 1] = -2000.0
    pivot = 2 * STREAM.at("pivot").normal((3, 4)) if sought else None
    plans, good, log_total = restitch._forward_backward(single, link, 20_000, STREAM.at("plans"), pivot)
    every = torch.tensor(list(itertools.product(range(4), repeat=3)))
    assert torch.equal(good, torch.tensor([[len(set(p)) == 3 for p in row] for row in plans.tolist()]))

    def check(link, pivot):
        for c in range(3):
            r = sum(single[c, j, every[:, j]] for j in range(3))
            r = r + sum(link[c, every[:, j], every[:, j + 1]] for j in range(2))
            r = r if pivot is None else r + pivot[c, every].logsumexp(1)
            assert_frequencies(plans[c] @ torch.tensor([16, 4, 1]), torch.softmax(r, 0))
            assert abs(float(log_total[c] - r.logsumexp(0))) < 1e-9

    check(link, pivot)
    refuted(check, link.mT, pivot)
    refuted(check, 0.9 * link, pivot)
    refuted(check, link, None if sought else link[:, 0])


def test_where_no_plan_is_possible_the_present_one_stays():
    link = torch.full((2, 5, 5), -1e5, dtype=torch.float64)
    link[1] = 0.0
    _, good, _ = restitch._forward_backward(torch.zeros(2, 3, 5, dtype=torch.float64), link, 50, STREAM)
    assert good.any(1).tolist() == [False, True]
    impossible = target(Junctions(weight=1e9))
    before = VARIANCE**0.5 * STREAM.at("apart").normal((10, 3, 2, 1))
    after, share = moved_from(impossible, FEW, before, times=1)
    assert share == 0
    assert torch.equal(after, before)


# -- what else a move does -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [TIED, PASSING], ids=["gaps", "vote"])
def test_only_the_replicas_of_that_level_move_and_all_is_known_of_them(of):
    evaluate = evaluator(of)
    state = state_of(evaluate, VARIANCE**0.5 * STREAM.at("few").normal((300, 3, 2, 1)))
    new, renewed = FEW(state, evaluate, STREAM)
    changed = new.by_level((new.x != state.x).flatten(1).any(1))
    assert 100 < changed[:, 1].sum() == changed.sum()
    # A plan is renewed if none of its segments is one of the old plan's.
    unlike = (new.x[:, :, None] != state.x[:, None]).flatten(3).any(3)
    assert torch.equal(renewed, unlike.flatten(1).all(1))
    assert 0 < renewed.sum() < 0.5 * changed.sum()
    fresh = evaluate(new.x, evaluate.ladder.levels[new.level.flatten()])
    for known, anew in zip((new.seen.drift, new.seen.reward), (fresh.drift, fresh.reward), strict=True):
        torch.testing.assert_close(known, anew, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(new.seen.predictions, fresh.predictions, atol=1e-12, rtol=0)


def test_a_move_costs_what_it_says():
    """Candidates at the noise end and after each step, and one look at the new plan of three segments."""
    evaluate = evaluator(TIED)
    state = state_of(evaluate, gaussian(7))
    before = evaluate.counts.rows
    replace(FEW, n_candidates=5, n_steps=3)(state, evaluate, STREAM)
    assert evaluate.counts.rows - before == 7 * (5 * (3 + 1) + 3)


def test_levels_are_chosen_evenly_and_moves_by_their_chance():
    """Two of four levels lie between the times; the last time the model was asked for is that of the move."""
    seen = []
    model = cd.models.Denoiser(
        lambda y, s: (seen.append(float(s[0])), y / (1 + s**2)[:, None, None])[1],
        (2, 1),
        dtype=torch.float64,
        process=Gaussian(variance=1.0),
    )
    of = target(Junctions(), model=cd.stitching.Segments(model, 2))
    chain = cd.ReplicaExchange(of, cd.ladder.of([0.1, 0.3, 0.7, 9.0]))
    explorer, drawn = replace(FEW, chance=0.5, n_candidates=1, n_steps=1, n_plans=1), []
    for i in range(400):
        seen.clear()
        explorer(chain.state, chain.evaluate, STREAM.at("chance", i))
        drawn.append({0.3: 1, 0.7: 2}[seen[-1]] if seen else 0)
    assert_frequencies(torch.tensor(drawn), f64([0.5, 0.25, 0.25]))
    refuted(assert_frequencies, torch.tensor(drawn), f64([0.3, 0.35, 0.35]))


def test_plans_to_begin_with_come_from_the_highest_level_and_nearly_from_pi():
    """With 150 candidates a chain the law is pi_t but for a few per cent; with 4 it is far from it."""
    evaluate = evaluator(TIED, cd.ladder.of([0.35, T, TOP]))
    mean, covariance = moments()

    def check(n_candidates):
        x, level = replace(FEW, n_candidates=n_candidates, n_plans=64).begin(evaluate, 400, STREAM.at("begin"))
        assert level == 1
        z = x.flatten(1) - mean
        assert_mean(z, 0.0)
        assert_mean(z[:, :, None] * z[:, None], covariance)

    check(150)
    refuted(check, 4)


def test_a_chain_that_restitches_begins_from_such_plans():
    chain = cd.ReplicaExchange(TIED, LADDER, n_chains=5, explorer=FEW, seed=4)
    x, level = FEW.begin(chain.evaluate, 5, chain.stream.at("initial", "begin"))
    assert torch.equal(chain.state.x[chain.state.row_at(level)], x)
    other = cd.ReplicaExchange(TIED, LADDER, n_chains=5, explorer=cd.Bounce(), seed=4)
    assert not torch.equal(other.state.x[other.state.row_at(level)], x)


def test_a_candidate_of_which_nothing_finite_is_said_is_not_chosen():
    """`nonfinite="reject"`: the model fails for every second trajectory, and none of them becomes part of a plan."""

    def denoise(y, s):
        good = y * (RHO**2 / (RHO**2 + s**2))[:, None, None]
        return torch.where((y[:, :1, :1] > 0) & (s < 1)[:, None, None], torch.nan, good)

    process = Gaussian(variance=RHO)
    model = cd.stitching.Segments(cd.models.Denoiser(denoise, (2, 1), dtype=torch.float64, process=process), 2)
    evaluate = cd.ReplicaExchange(target(Junctions(**SQUARED), model=model), LADDER, nonfinite="reject").evaluate
    state = state_of(evaluate, -(STREAM.at("below").normal((50, 2, 2, 1)).abs()))
    new, _ = FEW(state, evaluate, STREAM)
    assert (new.x != state.x).flatten(1).any(1).sum() > 10
    assert new.seen.possible[new.row_at(1)].all()


def test_fewer_candidates_than_segments_are_enough_to_begin_with():
    chain = cd.ReplicaExchange(TIED, LADDER, n_chains=5, explorer=replace(FEW, n_candidates=1))
    assert chain.state.x.isfinite().all()


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_candidates": 0}, "n_candidates must be a positive integer, got 0"),
        ({"n_steps": 0}, "n_steps must be a positive integer, got 0"),
        ({"n_plans": -1}, "n_plans must be a positive integer, got -1"),
        ({"chance": 0.0}, "got 0.0"),
        ({"chance": 1.5}, "got 1.5"),
        ({"between": (0.2, 0.1)}, r"\(0.2, 0.1\)"),
        ({"between": (0.0, 0.1)}, r"\(0.0, 0.1\)"),
    ],
)
def test_bad_numbers_are_refused(options, message):
    with pytest.raises(cd.InputError, match=message):
        Restitch(**options)


JUNCTIONS = Junctions()


@pytest.mark.parametrize(
    ("of", "explorer", "message"),
    [
        (segments().model.tilt(lambda x: x[:, 0, 0]), FEW, "one model of several segments"),
        (target(JUNCTIONS) ** 2.0, FEW, "exponent 1"),
        (target(JUNCTIONS) * segments(), FEW, "one model of several segments"),
        (target(JUNCTIONS, model=segments(process=Gaussian())), FEW, r"Gaussian\(information=...\)"),
        (target(Reach((0.0,))), FEW, "such as stitching.Junctions"),
        (segments().tilt(JUNCTIONS, on="state"), FEW, 'on="prediction"'),
        (target(JUNCTIONS), replace(FEW, between=(0.6, 2.0)), "between 0.6 and 2"),
        # nothing but the noise end, where candidates begin
        (target(JUNCTIONS), replace(FEW, between=(2.0, 99.0)), "no level of the ladder lies between 2 and 99"),
    ],
)
def test_targets_that_cannot_be_restitched_are_refused(of, explorer, message):
    with pytest.raises(cd.InputError, match=message):
        cd.ReplicaExchange(of, LADDER, explorer=explorer)


# -- a stranger's rewards --------------------------------------------------------------------------------------


class Halfway:
    """Another way to couple neighbours: two in a row meet around 0.3 and point the same way."""

    def __init__(self, weight=2.0):
        self.weight = weight

    def _term(self, left, right):
        middle = (left[..., 1, 0] + right[..., 0, 0]) / 2
        turn = (left[..., 1, 0] - left[..., 0, 0]) - (right[..., 1, 0] - right[..., 0, 0])
        return -self.weight * ((middle - 0.3) ** 2 + 0.2 * turn**2)

    def __call__(self, x):
        return sum(self._term(x[:, j], x[:, j + 1]) for j in range(x.shape[1] - 1))

    def link(self, left, right):
        return self._term(left[..., :, None, :, :], right[..., None, :, :, :])


class Short:
    """A reward of the middle segment: it is short."""

    segment = 1

    def __call__(self, x):
        return self.single(x[:, 1])

    def single(self, segment):
        return -0.7 * (segment[..., 1, 0] - segment[..., 0, 0]).square()


def test_a_strangers_coupling_is_used_exactly():
    """Rewards that are written here and nowhere else: their law is kept, and not that of other weights."""
    of = target(Halfway(), Short())
    assert isinstance(of.rewards[0].function, LinkReward)
    assert isinstance(of.rewards[1].function, SegmentReward)
    before = thinned(of)
    keeps(of, FEW, before)
    refuted(keeps, of, FEW, before, judge=target(Halfway(1.0), Short()))
    refuted(keeps, of, FEW, before, judge=target(Halfway()))
    chain = cd.ReplicaExchange(of, LADDER, n_chains=5, explorer=FEW)
    chain.step()


def test_parts_that_do_not_sum_to_their_reward_are_refused():
    class Mirrored(Halfway):
        def link(self, left, right):
            return super().link(left, right).mT

    class Elsewhere(Short):
        segment = 2

    for parts, method in ((target(Mirrored()), "link"), (target(Halfway(), Elsewhere()), "single")):
        with pytest.raises(cd.InputError, match=rf"its method {method} gives .* both must agree"):
            cd.ReplicaExchange(parts, LADDER, explorer=FEW)
