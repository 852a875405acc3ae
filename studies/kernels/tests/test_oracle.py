"""With exact log-densities in place of L_j the chain reaches the truth to Monte Carlo error, whatever the step.

Chains are independent, so their means have a standard error that autocorrelation cannot spoil: Hotelling's test over
chains compares the mean of several statistics with the truth. Each test fails by chance with probability 1e-4, all of
them together with less than 1 %; seeds are fixed. Fast tests take each setting and each task once; slow ones the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from scipy.stats import f as f_law
from torch import Tensor

from crepe_diffusion import Bounce, Proposal, ReplicaExchange
from crepe_diffusion.kernels import Explorer
from crepe_diffusion.processes import Gaussian
from studies.kernels.problems import SETTINGS, TASKS, Problem, Setting, problems

FALSE_ALARM = 1e-4
PROBLEMS = [
    problem if n // len(TASKS) == n % len(TASKS) else pytest.param(problem, marks=pytest.mark.slow)
    for n, problem in enumerate(problems())
]

LogProb = Callable[[Tensor, Tensor], Tensor]


def statistics(problem: Problem, z: Tensor) -> Tensor:
    """Mode indicators, coordinates, and the distance from the nearest mode along each axis, of points of the core.

    Distances saturate: a statistic that rare outliers dominate has no standard error to speak of.
    """
    mode = torch.stack([(z - c).square().sum(1) for c in problem.centres]).argmin(0)
    within = (z - problem.centres[mode]).square()
    scale = problem.core_target.models[0].eigenvalues.amin(0)
    return torch.cat([(mode[:, None] == torch.arange(2)).double(), z, within / (within + scale)], 1)


def p_value(problem: Problem, x: Tensor) -> float:
    """Of Hotelling's test that draws (draws, chains, dim) have the statistics of the truth."""
    points, mass = problem.grid
    truth = mass @ statistics(problem, points)
    means = torch.stack([statistics(problem, problem.core(x[:, i])).mean(0) for i in range(x.shape[1])])
    if problem.setting.rest:
        mean, std = problem.rest_law
        rest = (x @ problem.frame.T)[..., problem.setting.n_core :]
        square = (((rest - mean) / std) ** 2).mean((0, 2))
        means, truth = torch.cat([means, square[:, None]], 1), torch.cat([truth, torch.ones(1)])
    n, k = means.shape
    gap = means.mean(0) - truth
    t2 = n * gap @ torch.linalg.solve(means.T.cov(), gap)
    return float(f_law.sf(float(t2) * (n - k) / (k * (n - 1)), k, n - k))


def run(
    problem: Problem,
    broken: Callable[[LogProb], LogProb] = lambda log_prob: log_prob,
    explorer: Explorer | None = None,
    proposal: Proposal | None = None,
) -> Tensor:
    oracle = Gaussian(log_probs=tuple(broken(m.log_prob) for m in problem.target.models))
    chain = ReplicaExchange(
        problem.target, problem.ladder(7, 2), n_chains=48, seed=1, process=oracle, explorer=explorer, proposal=proposal
    )
    return chain.sample(40, burn_in=60).chains


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name.replace(" ", "-"))
def test_exact_ratios_reach_the_truth(problem: Problem) -> None:
    assert p_value(problem, run(problem)) > FALSE_ALARM


@pytest.mark.parametrize(
    "setting", [SETTINGS[0], pytest.param(SETTINGS[4], marks=pytest.mark.slow)], ids=lambda s: s.name
)
def test_exploration_leaves_the_truth_alone(setting: Setting) -> None:
    problem = Problem(setting, TASKS[0])
    assert p_value(problem, run(problem, explorer=Bounce())) > FALSE_ALARM


def test_any_proposal_reaches_the_truth() -> None:
    problem = Problem(SETTINGS[0], TASKS[0])
    assert p_value(problem, run(problem, proposal=Proposal("paper"))) > FALSE_ALARM


def flatter(log_prob: LogProb) -> LogProb:
    """A missing exponent: p in place of p ** 2."""
    return lambda x, t: 0.5 * log_prob(x, t)


def later(log_prob: LogProb) -> LogProb:
    """The density of another time."""
    return lambda x, t: log_prob(x, t + 0.5)


@pytest.mark.parametrize(
    ("setting", "broken"),
    [
        (SETTINGS[0], flatter),
        (SETTINGS[2], later),
        *(
            pytest.param(SETTINGS[i], broken, marks=pytest.mark.slow)
            for i, broken in [(0, later), (2, flatter), (4, flatter), (4, later)]
        ),
    ],
    ids=lambda v: v.name if isinstance(v, Setting) else v.__name__,
)
def test_a_wrong_density_is_noticed(setting: Setting, broken: Callable[[LogProb], LogProb]) -> None:
    problem = Problem(setting, TASKS[0])
    assert p_value(problem, run(problem, broken)) < FALSE_ALARM


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_truth_by_quadrature_agrees_with_an_exact_mixture(setting: Setting) -> None:
    """p ** 2 is itself a mixture, whose first two moments are those of the grid."""
    problem = Problem(setting, TASKS[0])
    p = problem.core_target.models[0]
    variance = p.eigenvalues + setting.sigma_min**2
    log_w, draws = [], []
    for a in range(len(p.weights)):
        for b in range(len(p.weights)):
            precision = 1 / variance[a] + 1 / variance[b]
            mean = (p.means[a] / variance[a] + p.means[b] / variance[b]) / precision
            spread = variance[a] + variance[b]
            overlap = -0.5 * ((p.means[a] - p.means[b]) ** 2 / spread + (2 * math.pi * spread).log()).sum()
            log_w.append(p.weights[a].log() + p.weights[b].log() + overlap)
            draws.append((mean, precision.rsqrt()))
    w = torch.softmax(torch.stack(log_w), 0)
    points, mass = problem.grid
    assert torch.allclose(mass @ points, sum(wi * m for wi, (m, _) in zip(w, draws, strict=True)), atol=1e-9)
    second = sum(wi * (m**2 + s**2) for wi, (m, s) in zip(w, draws, strict=True))
    assert torch.allclose(mass @ points**2, second, atol=1e-9)
