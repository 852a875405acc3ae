"""The rewards of a plan: the paper's constants, and an annealing that is matched to the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import crepe_diffusion as cd
from checks import f64, refuted
from studies.mazes.maze import Maze
from studies.mazes.stitch import PAPER, terms, way_point_term

STREAM = cd.Stream(41)
EXACT = {"smooth": 1e-12}  # the absolute value itself, to rounding
RHO = 0.8


def posterior(t):
    """Var[x_0 | x_t] of Gaussian data."""
    return RHO**2 * t**2 / (RHO**2 + t**2)


def test_the_papers_rewards_have_the_papers_constants():
    """Its appendix on mazes: 100 J for both ends and the way-point, 100 for junctions, 1 and 10, temperature 10."""
    maze = Maze("corridor", ("#######", "#.....#", "#######"))
    model, n = cd.models.Denoiser(lambda y, t: y, (4, 2)), 3
    x = 0.3 * STREAM.at("x").normal((20, n, 4, 2))
    O, P, I = (maze.normalise(maze.xy((1, j))).double() for j in (1, 5, 2))

    def gap(z):
        return 1 * z.square().sum(-1) + 10 * z.abs().sum(-1)

    passed = gap(x - I).flatten(1)
    alpha = (-10 * passed).exp() / (-10 * passed).exp().sum(1, keepdim=True)
    expected = {
        "start": -100 * n * gap(x[:, 0, 0] - O),
        "goal": -100 * n * gap(x[:, -1, -1] - P),
        "junctions": -100 * sum(gap(x[:, j, -1] - x[:, j + 1, 0]) for j in range(n - 1)),
        "way-point": -100 * n * (alpha * passed).sum(1),
    }
    found = terms(maze, model, ((1, 1), (1, 5)), n, PAPER)
    found.append(way_point_term(maze, model, n, PAPER, maze.xy((1, 2))))
    assert {r.name for r in found} == set(expected)
    for term in found:
        sharp = replace(term.function, **EXACT)
        torch.testing.assert_close(sharp(x), expected[term.name])
        refuted(torch.testing.assert_close, replace(sharp, weight=100.0 * (n + 1))(x), expected[term.name])
        assert term.weight(f64([0.001, 20.0]), PAPER.ladder()).tolist() == pytest.approx([1.0, 1e-10])
        # The absolute value is rounded off by at most `smooth`, in the model's coordinates.
        assert 0 < term.function.smooth * maze.scale < 0.1
    assert PAPER.ladder().n_levels == 601


def test_the_annealing_of_a_plan_is_matched_to_the_uncertainty_of_its_model():
    """Gaussian data of one scale: the variance of each end is V_t, of a junction twice that, all times the caution."""
    maze, n = Maze("corridor", ("#######", "#.....#", "#######")), 3
    style = type(PAPER)(width=0.5, caution=2.0, n_levels=9, sigma_min=0.01)
    times = style.ladder().times
    table = cd.processes.FisherTable(times, (times**2 / (times**2 + RHO**2)).reshape(1, -1, 1), torch.zeros(1, 8))
    model = cd.models.Denoiser(lambda y, t: y, (4, 2), process=cd.processes.Gaussian(information=table))
    width = 0.5 / maze.scale
    found = {r.name: r for r in terms(maze, model, ((1, 1), (1, 5)), n, style)}
    for name, share in (("start", 1), ("goal", 1), ("junctions", 2)):
        more = 2.0 * share * (posterior(times) - posterior(times[0]))
        torch.testing.assert_close(found[name].weight(times, style.ladder()), width**2 / (width**2 + more))
    plan = torch.zeros(1, n, 4, 2, dtype=torch.float64)
    plan[0, 0, 0] = maze.normalise(maze.xy((1, 1))).double() + f64([0.3 / maze.scale, 0.4 / maze.scale])
    assert found["start"].function(plan).item() == pytest.approx(-0.5 * 0.5**2 / 0.5**2, rel=1e-5)
