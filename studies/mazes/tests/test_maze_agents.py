"""Two agents in one plan: its rewards by hand, and a case that is solved; tiny, on the medium maze."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import crepe_diffusion as cd
from crepe_diffusion.stitching import Junctions
from studies.mazes import agents
from studies.mazes.model import load_maze_model
from studies.mazes.stitch import Style
from studies.shared.results import Results

MAZE, MODEL = load_maze_model("medium")
SMALL = Style(n_levels=21, n_candidates=512, between=(0.03, 0.12))


def change_places() -> torch.Tensor:
    """Along y = 0 from x = 0 to 2, and back along y = 3: two segments of three points each, (1, 4, 3, 2)."""
    x = torch.tensor([[0.0, 0.5, 1.0], [1.0, 1.5, 2.0]])
    there = torch.stack([x, torch.zeros(2, 3)], -1)
    back = torch.stack([x.flip(0, 1), torch.full((2, 3), 3.0)], -1)
    return torch.cat([there, back])[None]


def test_the_distance_is_between_the_same_times():
    plan = change_places()
    across = torch.tensor([2.0, 1.0, 0.0, 0.0, 1.0, 2.0])
    assert torch.allclose(agents.distance(plan), (across**2 + 9).sqrt()[None])
    expected = -0.5 * sum(max(0.0, (3.1 - d) / 0.1) ** 2 for d in agents.distance(plan)[0].tolist())
    assert agents.Apart(3.1, 0.1)(plan).item() == pytest.approx(expected, rel=1e-4)
    assert agents.Apart(2.9, 0.1)(plan).item() == 0


def test_the_second_agent_may_begin_elsewhere_and_nothing_else_may():
    """The jump between agents is free, as Junctions would not have it; any other gap costs what Junctions says."""
    plan = change_places()
    joined = agents.JoinedTwice(weight=2.0, l1=0.0, goal=(2.0, 0.0), start=(2.0, 3.0))
    assert joined(plan).item() == 0
    assert Junctions(weight=2.0, l1=0.0)(plan).item() == -18
    torn = plan.clone()
    torn[:, 3] += torch.tensor([0.0, 0.5])  # the second half of the second agent
    assert joined(torn).item() == pytest.approx(-0.5)
    pairs = joined.link(torn, torn)
    assert pairs.diagonal(offset=1, dim1=1, dim2=2).sum().item() == pytest.approx(joined(torn).item())


def test_two_agents_change_places(tmp_path: Path):
    """In the medium maze with a small pool both arrive; only those that are told to keep their distance."""
    results, found = Results(tmp_path), {}
    for told in agents.TOLD:
        case = agents.Pair("pool + guided descent", *MAZE.tasks[1], told, rows=1, weights="medium", style=SMALL)
        (found[told],) = agents.run_pair(case, results)["log"]
        assert agents.run_pair(case, results)["log"] == [found[told]]
    assert all(line["plans"] == 16 and line["arrived"] >= 12 for line in found.values())
    assert found["pool and descent"]["success"] >= 2
    assert found["nothing"]["apart"] == 0
    with pytest.raises(cd.InputError, match="was measured with the settings"):
        agents.run_pair(replace(case, slack=2.0), results)


def test_what_is_told_is_checked():
    with pytest.raises(cd.InputError, match="told must be one of"):
        agents.pair_target(MAZE, MODEL, MAZE.tasks[0], 3, SMALL, told="everything")


def test_the_table_counts_pairs_of_plans():
    def record(method: str, told: str, start: tuple[int, int], successes: list[int]) -> dict:
        log = [
            {"rows": 100.0 * (k + 1), "plans": 4, "arrived": 4, "apart": n, "success": n}
            for k, n in enumerate(successes)
        ]
        return {
            "settings": {
                "method": method,
                "told": told,
                "style": {"n_plans": 64},
                "start": list(start),
                "goal": [3, 3],
            },
            "log": log,
        }

    a, b = agents.POOLED[:2]
    records = [
        record(b, agents.TOLD[0], (1, 1), [0, 1]),
        record(a, "nothing", (1, 1), [2]),
        record(b, agents.TOLD[0], (2, 1), [0, 0]),
    ]
    rows = [
        [c.strip() for c in line.strip("|").split("|")]
        for line in agents.table(records, [((1, 1), (3, 3))]).splitlines()[2:]
    ]
    assert rows == [
        [f"{b}, 64 plans", "100 %", "6 %", "6 %", "1 of 1", "0 of 1", "2e+02"],
        [f"{a}, 64 plans, told: nothing", "100 %", "50 %", "50 %", "1 of 1", "-", "1e+02"],
    ]
