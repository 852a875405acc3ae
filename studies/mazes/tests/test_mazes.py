"""Mazes: geometry by hand, verdicts that can fail for one reason at a time, and plans driven in OGBench itself."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from itertools import pairwise

import numpy as np
import pytest
import torch

import crepe_diffusion as cd
from checks import assert_frequencies, f64, refuted
from studies.mazes import data, model
from studies.mazes.evaluate import drive, ends, judge, looks_like_data, passes
from studies.mazes.maze import Maze
from studies.mazes.stitch import segments_for
from studies.shared.results import Results
from studies.shared.training import Settings, load_weights

# A corridor with a bend, and a cell that no way leads to.
MAZE = Maze("bend", ("#######", "#...#.#", "###.###", "#...###", "#######"), tasks=(((1, 1), (3, 1)), ((1, 1), (1, 5))))


def test_coordinates_cells_and_scales():
    """Columns run along x, rows along y; the middle of (1, 1) is the origin and the longer side fills [-1, 1]."""
    assert MAZE.xy((3, 1)).tolist() == [0.0, 8.0]
    assert MAZE.xy((1, 3)).tolist() == [8.0, 0.0]
    for cell in MAZE.free:
        corners = MAZE.xy(cell) + 1.99 * torch.tensor([[-1.0, -1.0], [1.0, -1.0], [-1.0, 1.0], [1.0, 1.0]])
        row, column = MAZE.cells(corners)
        assert list(zip(row.tolist(), column.tolist(), strict=True)) == [cell] * 4
        assert not MAZE.in_wall(corners).any()
    beyond = torch.tensor([[0.0, -2.01], [-2.01, 0.0], [12.0, 0.0], [0.0, 4.0], [1e3, 0.0], [0.0, -1e3]])
    assert MAZE.in_wall(beyond).all()
    left_top, right_bottom = torch.tensor([-2.0, -2.0]), torch.tensor([18.0, 10.0])  # five cells by three
    assert MAZE.normalise(left_top).tolist() == pytest.approx([-1.0, -0.6])
    assert MAZE.normalise(right_bottom).tolist() == pytest.approx([1.0, 0.6])
    points = 5 * torch.randn(20, 3, 2, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(MAZE.unnormalise(MAZE.normalise(points)), points)


def test_distances_are_counted_along_the_corridors():
    expected = np.full((5, 7), -1)
    expected[[1, 1, 1, 2, 3, 3, 3], [1, 2, 3, 3, 3, 2, 1]] = range(7)
    assert (MAZE.distances((1, 1)) == expected).all()
    assert MAZE.distance((3, 1), (1, 1)) == 6
    assert MAZE.distance((1, 1), (1, 5)) == -1


def test_a_maze_is_kept_as_text_and_walls_are_refused():
    assert Maze.from_fields(json.loads(json.dumps(asdict(MAZE)))) == MAZE
    for cell in ((2, 1), (0, 0), (9, 1), (1, -2)):
        with pytest.raises(cd.InputError, match="is a wall or outside"):
            MAZE.xy(cell)
    for rows in (("###", "#."), ("#x#",)):
        with pytest.raises(cd.InputError, match="rectangle"):
            Maze("broken", rows)


def test_a_maze_without_a_wall_around_it_is_refused():
    with pytest.raises(cd.InputError, match="wall around"):
        Maze("open", ("#####", "#....", "#####"))


def test_there_are_enough_segments_for_the_way_and_at_least_two():
    """Six cells of 4 at 0.2 a step are 120 steps; with a quarter to spare, three segments of 64."""
    assert segments_for(MAZE, MAZE.tasks[0]) == 3
    assert segments_for(MAZE, MAZE.tasks[0], slack=1.0) == 2
    assert segments_for(MAZE, ((1, 1), (1, 2))) == 2
    with pytest.raises(cd.InputError, match=r"no path from \(1, 1\) to \(1, 5\)"):
        segments_for(MAZE, MAZE.tasks[1])


# -- verdicts -------------------------------------------------------------------------------------------------

START, GOAL = ends(MAZE, MAZE.tasks[0])


def along(points, step=0.2):
    """A way along straight lines, at the agent's pace."""
    parts = []
    for a, b in pairwise(points):
        n = round(float((b - a).norm()) / step)
        parts.append(torch.lerp(a, b, torch.arange(n)[:, None] / n))
    return torch.cat([*parts, points[-1:]])


def cells_to(maze, start, goal):
    """The middles of the cells on a shortest way."""
    steps, way = maze.distances(goal), [start]
    while way[-1] != goal:
        i, j = way[-1]
        near = ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1))
        way.append(next(c for c in near if steps[c] == steps[i, j] - 1))
    return torch.stack([maze.xy(cell) for cell in way])


WAY = along(cells_to(MAZE, *MAZE.tasks[0]))
GOOD = torch.stack([WAY[:41], WAY[40:81], WAY[80:]])  # three segments, joined where they meet


def broken(kind):
    """The good plan with one thing wrong: by 0.5, where 0.45 is allowed."""
    plan, aside = GOOD.clone(), torch.tensor([0.3, 0.4])
    if kind == "start":
        plan[0, 0] += aside
    elif kind == "goal":
        plan[-1, -1] += aside
    elif kind == "junctions":
        plan[1, 0] += aside
    elif kind == "walls":
        plan[1, 7] = torch.tensor([0.0, 4.0])
    return plan


@pytest.mark.parametrize("kind", ["nothing", "start", "goal", "junctions", "walls"])
def test_a_plan_fails_for_one_reason_at_a_time(kind):
    verdict = judge(MAZE, torch.stack([broken(kind), GOOD]), START, GOAL)
    for name in ("start", "goal", "junctions", "walls"):
        assert getattr(verdict, name).tolist() == [name != kind, True]
    assert verdict.success.tolist() == [kind == "nothing", True]
    generous = judge(MAZE, broken(kind)[None], START, GOAL, tolerance=0.51)
    assert generous.success.tolist() == [kind != "walls"]


def test_the_last_gap_counts_as_well():
    plan = GOOD.clone()
    plan[2, 0] -= 0.4
    assert judge(MAZE, plan[None], START, GOAL).junctions.tolist() == [False]


def test_a_plan_passes_a_point_that_one_of_its_own_comes_near():
    plans = torch.stack([GOOD, GOOD.flip(0)])
    aside = GOOD[0, 20] + torch.tensor([0.0, 0.42])  # beside the corridor's middle
    assert passes(plans, aside).tolist() == [True, True]
    assert passes(plans, aside, tolerance=0.4).tolist() == [False, False]
    moved = plans.clone()
    moved[0, 0] += 2.0
    assert passes(moved, aside).tolist() == [False, True]


def test_trajectories_look_like_themselves_and_unlike_others():
    """Moved by two cells they are elsewhere, stretched they go further; each shows in its own number."""
    at = torch.tensor([[0.0, 0.0], [8.0, 0.0], [0.0, 8.0]])
    steps = torch.linspace(-1, 1, 21)[:, None] * torch.tensor([1.5, 0.5])
    real = (at[:, None] + steps).repeat(4, 1, 1)
    same, moved, longer, through = (
        looks_like_data(MAZE, x, real)
        for x in (real.flip(0), real + torch.tensor([8.0, 0.0]), real + 0.5 * steps, real + torch.tensor([0.0, 2.0]))
    )
    names = ("TV of cells", "TV of step lengths", "TV of displacement")
    assert [same[name] for name in names] == [0, 0, 0]
    assert [moved[name] for name in names] == pytest.approx([2 / 3, 0, 0])  # one takes the place of another
    assert [longer[name] for name in names] == pytest.approx([0, 1, 1])
    assert (same["out of walls"], same["out of walls, data"]) == (1.0, 1.0)
    assert through["out of walls"] < 1


def test_steps_beyond_the_histogram_count_as_different():
    real = 0.2 * torch.arange(20.0)[None, :, None] * torch.ones(1, 1, 2) - 2
    assert looks_like_data(MAZE, 5 * real, real)["TV of step lengths"] == pytest.approx(1.0)


# -- data ------------------------------------------------------------------------------------------------------


def test_windows_are_unbroken_pieces_of_any_episode_from_any_step():
    """Each point holds its episode and its step; all 3 x 4 windows are equally frequent."""
    episodes = torch.stack(torch.meshgrid(torch.arange(3.0), torch.arange(10.0), indexing="ij"), -1)
    drawn = data.windows(episodes, 6000, torch.Generator().manual_seed(1), length=7)
    assert torch.equal(drawn, drawn[:, :1] + torch.tensor([0.0, 1.0]) * torch.arange(7.0)[:, None])
    which = (drawn[:, 0, 0] * 4 + drawn[:, 0, 1]).long()
    assert_frequencies(which, torch.ones(12))
    refuted(assert_frequencies, which, torch.cat([torch.ones(11), f64([0.5])]))
    again = data.windows(episodes, 6000, torch.Generator().manual_seed(1), length=7)
    assert torch.equal(again, drawn)


def test_missing_episodes_and_a_missing_ogbench_are_errors_that_name_the_remedy(tmp_path, monkeypatch):
    with pytest.raises(cd.InputError, match=r"bend.json is missing; .*data --maze bend"):
        data.load_episodes("bend", Results(tmp_path))
    monkeypatch.setitem(sys.modules, "ogbench.locomaze", None)  # what Python does where a module is absent
    with pytest.raises(cd.InputError, match=r"^ogbench.* is missing: pip install .*studies\[mazes\]'$"):
        data.environment("medium")


@pytest.fixture(scope="module")
def medium():
    pytest.importorskip("ogbench")
    return data.maze_of("medium")


def test_the_maze_is_that_of_ogbench(medium):
    """Its own functions agree about coordinates, walls and the five tasks, each of which has a way."""
    env = data.environment("medium")
    for cell in medium.free:
        assert env.ij_to_xy(cell) == pytest.approx(medium.xy(cell).tolist())
    assert torch.equal(medium.walls, torch.as_tensor(env.maze_map, dtype=torch.bool))
    assert len(medium.tasks) == 5
    assert min(medium.distance(*task) for task in medium.tasks) > 0
    with pytest.raises(cd.InputError, match="medium, large, giant; got 'small'"):
        data.environment("small")


def test_a_plan_along_the_corridors_reaches_the_goal_and_one_through_walls_does_not(medium):
    env = data.environment("medium")
    for task in medium.tasks[:2]:
        start, goal = ends(medium, task)
        good, straight = along(cells_to(medium, *task)), along(torch.stack([start, goal]))
        assert judge(medium, good[None, None], start, goal).success.all()
        assert not judge(medium, straight[None, None], start, goal).walls.any()
        reached, trace = drive(env, good, start, goal)
        assert reached
        assert np.linalg.norm(trace[0] - start.numpy()) < 0.01
        assert len(trace) < 1.2 * len(good)  # at the agent's pace
        assert not medium.in_wall(torch.from_numpy(trace)).any()
        assert not drive(env, straight, start, goal, n_steps=300)[0]
        assert not drive(env, good, start, goal, n_steps=50)[0]  # a way that is not finished


def test_an_episode_follows_the_recipe_and_is_the_same_for_the_same_seed(medium):
    """Out of walls, at most a fifth along each axis in a step, towards a goal four cells away."""
    env = data.environment("medium", terminate_at_goal=False)
    first = {}
    for seed in (3, 8, 21):
        first[seed] = x = data.episode(env, medium, seed)
        z = torch.from_numpy(x)
        assert x.shape == (201, 2)
        assert not medium.in_wall(z).any()
        assert np.abs(np.diff(x, axis=0)).max() < 0.2001
        start, goal = (tuple(int(k) for k in medium.cells(p)) for p in (z[0], torch.as_tensor(env.cur_goal_xy)))
        assert medium.distance(start, goal) == 4
        assert np.linalg.norm(x[-1] - env.cur_goal_xy) < 2.0 < np.linalg.norm(x[0] - env.cur_goal_xy)
    assert all(np.array_equal(data.episode(env, medium, seed), x) for seed, x in first.items())
    assert not np.array_equal(first[3], first[8])


# -- the model --------------------------------------------------------------------------------------------------


def test_a_trained_model_is_loaded_as_it_was_left(tmp_path):
    """Two steps of a tiny network on random ways: weights, maze and what was measured come back from the file."""
    generator = torch.Generator().manual_seed(0)
    ways = torch.randn(2, 40, 201, 2, generator=generator).mul(0.2).cumsum(2)
    Results(tmp_path).save("bend", asdict(MAZE), train=ways[0].numpy(), validation=ways[1].numpy())
    settings = Settings(n_steps=2, batch=32, warm_up=1, rate=0.01)
    lines = list(model.train_model("bend", tmp_path, {"n_layers": 1, "width": 8}, settings))
    assert np.isfinite([line["validation"] for line in lines]).all()
    maze, denoiser = model.load_maze_model(tmp_path / "bend" / "bend.safetensors")
    assert maze == MAZE
    average, _ = load_weights(tmp_path / "bend" / "average.safetensors")
    assert all(torch.equal(average[k], v) for k, v in denoiser.function.state_dict().items())
    assert average["network.last.weight"].abs().max() > 0

    # Measured where it is used: t^2 I_t = 1 - E|x_0 - D|^2 / t^2 along each main direction.
    process, t = denoiser.process(), 0.3
    x = data.windows(MAZE.normalise(ways[0]), 4000, torch.Generator().manual_seed(5))
    y = x + t * torch.randn(x.shape, generator=generator)
    error = ((denoiser.predict(y, torch.full((4000,), t)) - x).flatten(1) @ process.basis.T.float()).square()
    measured, found = process.information.of(0, f64([t])).values[0], (1 - error.mean(0) / t**2).clamp(0, 1).double()
    torch.testing.assert_close(measured, found, atol=0.1, rtol=0)
    refuted(torch.testing.assert_close, measured.flip(0), found, atol=0.1, rtol=0)
    with pytest.raises(cd.InputError, match="no shipped weights for 'nowhere'"):
        model.load_maze_model("nowhere")


def test_main_directions_are_those_of_the_data(tmp_path):
    """They diagonalise the covariance of windows, largest scale first."""
    ways = torch.randn(30, 201, 2, generator=torch.Generator().manual_seed(0)).cumsum(1)
    mean, scales, basis = model.main_directions(ways, n=2000)
    x = data.windows(ways, 2000, torch.Generator().manual_seed(0)).flatten(1).double()
    torch.testing.assert_close(torch.cov(((x - mean) @ basis.T).T), torch.diag(scales**2), atol=1e-8, rtol=0)
    assert (scales.diff() <= 0).all()
    assert scales[0] > 10 * scales[50]
