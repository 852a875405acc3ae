"""The discretisation error falls with the number of levels, at first order.

The error is the total variation from the exact law over 30 cells, less what Monte Carlo noise alone would show. Over
four seeds the order of the six tasks lay between 0.60 and 1.40; the bounds leave some room, and seeds are fixed. Fast
tests take a power and the task that has everything else (reward, guidance, product); slow ones the other tasks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from crepe_diffusion import ReplicaExchange
from crepe_diffusion.processes import EulerMaruyama, Gaussian, Process, Spectrum
from studies.kernels.problems import SETTINGS, TASKS, Problem, Setting, Task

COARSE, FINE = 8, 32
ORDER = (0.5, 1.6)
# Twice the largest error of the six tasks on the fine ladder would be missed; a variance twice too large is not.
SMALL = 0.08


def errors(problem: Problem, process: Process | None = None, seed: int = 0) -> tuple[float, float]:
    """Of the draws at level 0, on a coarse and on a fine ladder with two steps to a level."""
    out = []
    for steps in (COARSE, FINE):
        n_levels = steps // 2 + 1
        chain = ReplicaExchange(
            problem.target, problem.ladder(n_levels, 2), n_chains=2500 // n_levels, seed=seed, process=process
        )
        x = chain.sample(80, burn_in=20 + 2 * n_levels).chains
        value, floor = problem.total_variation(problem.per_chain(problem.cell_weights, x))
        out.append(math.sqrt(max(value**2 - floor**2, (floor / 4) ** 2)))
    return out[0], out[1]


def converges(problem: Problem, process: Process | None = None) -> bool:
    coarse, fine = errors(problem, process)
    order = math.log(coarse / fine) / math.log(FINE / COARSE)
    return ORDER[0] < order < ORDER[1] and fine < SMALL


@pytest.mark.parametrize(
    "task",
    [TASKS[0], *(pytest.param(t, marks=pytest.mark.slow) for t in TASKS[1:])],
    ids=lambda t: t.__name__,
)
def test_error_falls_at_first_order(task: Task) -> None:
    assert converges(Problem(SETTINGS[0], task, torch.float32))


@dataclass(frozen=True)
class DoubleVariance(Gaussian):
    """Denoising kernels of the models with twice their variance; the proposal is left as it is."""

    def model_variance(self, model: int, s: Tensor, t: Tensor) -> Spectrum:
        variance = super().model_variance(model, s, t)
        return variance.with_values(2 * variance.values)


@pytest.mark.parametrize("task", [TASKS[1], pytest.param(TASKS[2], marks=pytest.mark.slow)], ids=lambda t: t.__name__)
def test_a_wrong_variance_does_not_converge(task: Task) -> None:
    assert not converges(Problem(SETTINGS[0], task, torch.float32), DoubleVariance())


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS[1:4], ids=lambda s: s.name)
@pytest.mark.parametrize("task", TASKS[:4], ids=lambda t: t.__name__)
def test_error_falls_in_other_settings(setting: Setting, task: Task) -> None:
    coarse, fine = errors(Problem(setting, task, torch.float32))
    assert fine < 0.6 * coarse


@pytest.mark.slow
@pytest.mark.parametrize(
    "process", [Gaussian(variance=math.inf), Gaussian(variance=0.0), EulerMaruyama(), EulerMaruyama(reference=3.0)]
)
def test_error_falls_with_every_kernel(process: Process) -> None:
    coarse, fine = errors(Problem(SETTINGS[0], TASKS[0], torch.float32), process)
    assert fine < 0.6 * coarse


@pytest.mark.slow
def test_a_diagonal_variance_suits_stiff_data() -> None:
    """At the same 32 steps, the worst variance outside the modes is off by less than half as much."""
    problem = Problem(SETTINGS[5], TASKS[0], torch.float32)
    worst = {}
    for kind in ("fisher", "fisher-diagonal"):
        process = Gaussian(variance=kind)
        chain = ReplicaExchange(problem.target, problem.ladder(17, 2), n_chains=128, seed=3, process=process)
        z = problem.standardised(chain.sample(200, burn_in=100).x)
        worst[kind] = float((z.var(0)[2:] - 1).abs().max())
    assert worst["fisher-diagonal"] < 0.5 * worst["fisher"]
