"""Every sampler gets the same pool and the same rows, and random changes are met; tiny, on the medium maze."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import crepe_diffusion as cd
from studies.mazes import changes, credit
from studies.mazes.model import load_maze_model
from studies.mazes.stitch import Style
from studies.shared.results import Results

MAZE, _ = load_maze_model("medium")
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


def test_a_random_change_is_off_the_route_and_is_met(tmp_path: Path):
    case = changes.Change("goal", 1, n_before=1, n_after=1, weights="medium", style=SMALL)
    record = changes.run_change(case, Results(tmp_path))
    assert record["log"][0]["success"] > 0.5
    assert tuple(record["new"]) == tuple(record["task"][1])
    assert record["log"][1]["fulfilled"] > 0.5
    assert "1 of 1" in changes.table([record])
    with pytest.raises(cd.InputError, match="choose another seed"):
        changes._changed(MAZE, case, MAZE.tasks[0], 5, set(range(64)))
