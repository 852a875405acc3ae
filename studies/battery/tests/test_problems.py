"""Every truth of the battery, once more by another way: importance sampling, or a loop over all states."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from checks import assert_mean, refuted
from crepe_diffusion import Stream
from crepe_diffusion.models import GaussianMixture, TokenTable
from studies.battery.problems import Problem, battery, random, tempering

N = 20_000
PROBLEMS = {p.name: p for p in (*battery(), *random(0), *random(1))}
TOKENS = [name for name, p in PROBLEMS.items() if isinstance(p.target.models[0], TokenTable)]
BLACK = [name for name in PROBLEMS if "black box" in name]
GAUSSIAN = [name for name in PROBLEMS if name not in (*TOKENS, *BLACK)]


def draws(problem: Problem, t: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Points, and `log_density` of a mixture that covers the target: equal weights on all components of all factors.

    Their variances are divided by the sum of positive exponents, and a little wider.
    """
    models = [m for m in problem.target.models if isinstance(m, GaussianMixture)]
    total = sum(problem.target.exponents)
    variances = torch.cat([m.eigenvalues for m in models]) + t * t
    means = torch.cat([m.means for m in models])
    cover = GaussianMixture([1.0] * len(means), means, (1.1 * variances / max(1.0, total)).sqrt())
    x = cover.sample(N, Stream(seed))
    return x, cover.log_prob(x)


def check_means(problem: Problem, truths: dict[str, float], variances: dict[str, float]) -> None:
    x, log_q = draws(problem, problem.ends[0])
    log_w = problem.log_density(x) - log_q
    w = (log_w - log_w.max()).exp()
    assert float(w.sum() ** 2 / w.square().sum()) > 200  # or the comparison would be worth nothing
    for name, f in problem.scalars.items():
        assert_mean(w * (f(x) - truths[name]) / w.mean(), 0.0)
        assert_mean(w * ((f(x) - problem.truths[name]).square() - variances[name]) / w.mean(), 0.0)


@pytest.mark.parametrize("name", GAUSSIAN)
def test_means_agree_with_importance_sampling(name):
    problem = PROBLEMS[name]
    check_means(problem, problem.truths, problem.variances)
    refuted(check_means, problem, {k: 1.15 * v + 0.02 for k, v in problem.truths.items()}, problem.variances)
    refuted(check_means, problem, problem.truths, {k: 1.15 * v + 0.02 for k, v in problem.variances.items()})


@pytest.mark.parametrize("name", [name for name in GAUSSIAN if PROBLEMS[name].log_z is not None])
def test_log_z_agrees_with_importance_sampling(name):
    """Tilts have Z_M = 1, for their reward is annealed away; powers have the integral of `p_t^beta` at both ends."""
    problem = PROBLEMS[name]
    x, log_q = draws(problem, problem.ends[0])
    values = problem.log_density(x) - log_q
    top = 0.0
    if not problem.target.rewards:
        (model, beta), t = problem.target.factors[0], problem.ends[1]
        y, log_q = draws(problem, t, seed=1)
        works = beta * model.log_prob(y, t) - log_q
        top = float(works.logsumexp(0)) - math.log(N)
        # Components all but coincide at the noise end, where p^beta is nearly one Gaussian.
        assert_mean((works - top).exp(), 1.0)

    def check(log_z):
        assert_mean((values - top - log_z).exp(), 1.0)

    check(problem.log_z)
    refuted(check, problem.log_z + 0.2)


@pytest.mark.parametrize("name", BLACK)
def test_black_boxes_agree_with_quadrature(name):
    """No importance sampling would find their target; but coordinates are independent, so sums over lines suffice."""
    problem = PROBLEMS[name]
    dim = problem.target.models[0].event_shape[0]
    axes, grid = torch.eye(dim, dtype=torch.float64), torch.linspace(-9, 9, 18_001, dtype=torch.float64)
    lines = torch.stack([problem.log_density(grid[:, None] * axis) for axis in axes])
    origin = problem.log_density(torch.zeros(1, dim, dtype=torch.float64))
    x = Stream(0).normal((5, dim))
    alone = torch.stack([problem.log_density(x[:, i, None] * axis) for i, axis in enumerate(axes)]) - origin
    assert torch.allclose(problem.log_density(x) - origin, alone.sum(0), atol=1e-9)

    share = lines.softmax(1)
    mean = share @ grid
    variance = (share * (grid - mean[:, None]).square()).sum(1)
    observed = mean > 1e-6
    n = int(observed.sum())
    assert observed.tolist() == [True] * n + [False] * (dim - n)
    wanted = {
        "first observed": (mean[0], variance[0]),
        "last observed": (mean[n - 1], variance[n - 1]),
        "mean of the observed": (mean[:n].mean(), variance[:n].sum() / n**2),
        "square of the last": (variance[-1], 2 * variance[-1] ** 2),
    }
    assert problem.truths == pytest.approx({key: float(m) for key, (m, _) in wanted.items()}, rel=1e-6)
    assert problem.variances == pytest.approx({key: float(v) for key, (_, v) in wanted.items()}, rel=1e-6)
    log_z = float(((lines - origin).exp() * (grid[1] - grid[0])).sum(1).log().sum() + origin)
    assert problem.log_z == pytest.approx(log_z, abs=1e-6)


@pytest.mark.parametrize("name", TOKENS)
def test_tables_agree_with_a_loop_over_all_states(name):
    problem = PROBLEMS[name]
    p, q = problem.target.models
    assert isinstance(p, TokenTable)
    (c_p, c_q), total, sums = problem.target.exponents, 0.0, dict.fromkeys(problem.scalars, 0.0)
    squares = dict(sums)
    tables = [m.probabilities.reshape((m.vocab_size,) * m.length) for m in (p, q)]
    for state in itertools.product(range(p.vocab_size), repeat=p.length):
        weight = float(tables[0][state]) ** c_p * float(tables[1][state]) ** c_q
        x = torch.tensor([state])
        total += weight
        for key, f in problem.scalars.items():
            sums[key] += weight * float(f(x))
            squares[key] += weight * (float(f(x)) - problem.truths[key]) ** 2
        assert float(problem.log_density(x)) == pytest.approx(math.log(weight), abs=1e-9)
    assert problem.log_z == pytest.approx(math.log(total), abs=1e-10)
    assert problem.truths == pytest.approx({key: value / total for key, value in sums.items()}, abs=1e-10)
    assert problem.variances == pytest.approx({key: value / total for key, value in squares.items()}, abs=1e-10)


def test_known_numbers():
    """The two that were measured before there was a battery."""
    assert tempering(16).truths["second mode"] == pytest.approx(0.4957, abs=5e-5)
    assert tempering(32).truths["second mode"] == pytest.approx(0.4946, abs=5e-5)
    assert PROBLEMS["rare tilt with gradient, power annealing"].truths["first mode"] == pytest.approx(0.6, abs=2e-3)
    assert PROBLEMS["posterior of a mode of prior weight 0.001"].truths["first mode"] == pytest.approx(0.4, abs=2e-3)


def test_ladders_have_the_problems_ends_and_names_are_unique():
    assert len(PROBLEMS) == len([*battery(), *random(0), *random(1)]) == 57
    for problem in PROBLEMS.values():
        ladder = problem.ladder(5, 3)
        assert (ladder.n_levels, ladder.substeps) == (5, 3)
        assert (float(ladder.times[0]), float(ladder.times[-1])) == pytest.approx(problem.ends)
        problem.proposal.coefficients(problem.target)


def test_held_out_problems_depend_on_their_seed_alone():
    one, same, other = random(5), random(5), random(6)
    assert [p.truths for p in one] == [p.truths for p in same]
    assert all(a.truths != b.truths for a, b in zip(one, other, strict=True))
