"""Every sampler gets the same pool and the same rows, and random changes are met; tiny, on the medium maze."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import crepe_diffusion as cd
from studies.mazes import changes, credit
from studies.mazes.maze import Maze
from studies.mazes.model import load_maze_model
from studies.mazes.stitch import Style, path_length
from studies.shared.results import Results

MAZE, MODEL = load_maze_model("medium")
SMALL = Style(n_levels=21, n_candidates=256, between=(0.03, 0.12))


@pytest.mark.parametrize("method", credit.METHODS)
def test_a_case_spends_its_rows_once_and_counts_plans(tmp_path: Path, method: str):
    case = credit.Case(method, *MAZE.tasks[4], rows=4_000, weights="medium", style=SMALL)
    results = Results(tmp_path)
    record = credit.run_case(case, results)
    rows = [line["rows"] for line in record["log"]]
    assert all(a < case.rows for a in rows[:-1])
    assert rows[-1] >= case.rows
    assert all(0 <= line["success"] <= line["plans"] for line in record["log"])
    assert credit.run_case(case, results)["log"] == record["log"]
    if method in ("pool + SMC", "pool + particle Gibbs"):
        assert record["log"][-1]["success"] > 0
        assert record["log"][-1]["routes"] > 0


def test_other_pairs_are_no_tasks_and_far_apart():
    pairs = credit.other_pairs(MAZE, 20)
    assert len(set(pairs)) == 20
    assert not set(pairs) & set(MAZE.tasks)
    longest = max(MAZE.distance(a, b) for a in MAZE.free for b in MAZE.free)
    assert min(MAZE.distance(*pair) for pair in pairs) >= longest / 2


def test_a_route_is_the_cells_of_a_plan():
    plan = torch.stack([MAZE.xy((1, 1)), MAZE.xy((1, 2)), MAZE.xy((1, 2))])[None, None]
    assert credit.routes(MAZE, torch.cat([plan, plan.flip(2)])) == [frozenset({9, 10})] * 2


def test_a_way_forgets_dead_ends_and_corners_that_were_cut():
    """(1, 1) to (3, 1) around the bend; there and back again on the way; and one step across a corner."""
    bend = Maze("bend", ("#####", "#...#", "###.#", "#...#", "#####"))
    round_it = [(1, 1), (1, 2), (1, 3), (2, 3), (3, 3), (3, 2), (3, 1)]

    def plan(cells: list[tuple[int, int]]) -> torch.Tensor:
        return torch.stack([bend.xy(cell) for cell in cells])[None]

    assert credit.way(bend, plan(round_it)) == tuple(round_it)
    assert credit.way(bend, plan([*round_it[:5], *round_it[3:1:-1], *round_it[3:]])) == tuple(round_it)
    assert credit.way(bend, plan([*round_it[:2], *round_it[3:]])) == tuple(round_it)
    assert credit.way(bend, plan(round_it[::-1])) == tuple(round_it[::-1])


def test_ways_are_counted_as_far_as_segments_reach():
    """A ring of eight cells: two ways half round it, and two more once round it and half."""
    ring = Maze("ring", ("#####", "#...#", "#.#.#", "#...#", "#####"))
    task = ((1, 1), (3, 3))
    assert [credit.possible_ways(ring, task, n) for n in (1, 2, 4, 5)] == [0, 2, 2, 4]


def test_a_random_change_is_off_the_route_and_is_met(tmp_path: Path):
    case = changes.Change("goal", 1, n_before=1, n_after=1, weights="medium", style=SMALL)
    record = changes.run_change(case, Results(tmp_path))
    assert record["log"][0]["success"] > 0.5
    assert tuple(record["new"]) == tuple(record["task"][1])
    assert record["log"][1]["fulfilled"] > 0.5
    assert "1 of 1" in changes.table([record])
    with pytest.raises(cd.InputError, match="choose another seed"):
        changes._changed(MAZE, case, MAZE.tasks[0], 5, set(range(64)))


@pytest.mark.parametrize("method", ["passes of SMC, 64 particles", "particle Gibbs", "replica exchange, more levels"])
def test_a_case_that_looks_for_routes_counts_ways(tmp_path: Path, method: str):
    case = credit.Case(method, *MAZE.tasks[4], rows=3_000, weights="medium", table="routes", style=SMALL)
    record = credit.run_case(case, Results(tmp_path))
    so_far = 0
    for line in record["log"]:
        so_far += line["success"]
        assert (line["ways"] > 0) == (so_far > 0)
        assert line["ways"] <= min(so_far, record["possible"])


def test_a_blind_bound_chooses_plans_and_does_not_pull_them():
    """Descents from the same pool are shorter where they follow the gradient of the bound; the law is the same."""
    seen = credit.Case("", *MAZE.tasks[0], weights="medium", style=SMALL)
    limit = 0.5 * MAZE.distance(*MAZE.tasks[0]) * MAZE.unit
    targets = [credit.case_target(replace(seen, blind=blind), MAZE, MODEL, 5, limit) for blind in (False, True)]
    assert targets[0].rewards[-1].function == targets[1].rewards[-1].function
    drawn = [next(credit.particles(target, SMALL, 0, restitching=True, weighted=False))[0] for target in targets]
    guided, blind = (float(path_length(MAZE.unnormalise(x)).mean()) for x in drawn)
    assert guided < blind - 1


@pytest.mark.parametrize("method", credit.BLIND)
def test_a_blind_case_spends_its_rows(tmp_path: Path, method: str):
    case = credit.Case(method, *MAZE.tasks[4], 3_000, "medium", longest=1.5, blind=True, table="blind", style=SMALL)
    record = credit.run_case(case, Results(tmp_path))
    assert record["log"][-1]["rows"] >= case.rows
    assert credit.table([record], list(MAZE.tasks)).splitlines()[-1].startswith(f"| {method} ")
