"""Tables of the page from a small set of results, with every number computed again by hand or in plain Python."""

from __future__ import annotations

import random
import re
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median

import numpy as np
import pytest
import torch

from studies.mazes import __main__ as command
from studies.mazes import changes, credit, preset, tables
from studies.mazes.maze import Maze
from studies.mazes.model import load_maze_model
from studies.mazes.study import METHODS, ablation, comparison
from studies.shared.pages import BLOCK
from studies.shared.results import Results


def cells(table: str) -> list[list[str]]:
    """The rows of a Markdown table below its header."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def percent(values) -> str:
    return f"{100 * mean(values):.0f} %"


def record(name, task, *, n_chains=2, n=7, seed=0, driven=None, n_segments=4, weights="medium"):
    """A result of a study with random verdicts: (iterations, criteria, chains)."""
    rng = random.Random(f"{name} {task} {seed}")
    return {
        "settings": {"name": name, "task": task, "weights": weights, "n_chains": n_chains, "rows": 700},
        "n_segments": n_segments,
        "seconds": 1.4,
        "rows": [100.0 * (i + 1) for i in range(n)],
        "flags": [[[rng.random() < 0.6 for _ in range(n_chains)] for _ in range(5)] for _ in range(n)],
        "driven": driven,
        "acceptance": [0.5, 0.25, float("nan"), 0.75],
        "levels": [0.1, 0.2, 0.3, 0.4, 0.5],
    }


def late_success(r, k=4):
    return [float(x) for flags in r["flags"][3:] for x in flags[k]]  # the last four of seven iterations


def test_success_by_method_and_task():
    a, b = record("CREPE, ours", 1, driven=[True, True, False]), record("CREPE, ours", 3, n_segments=6, driven=[False])
    smc = {**record("SMC", 1, n_chains=1), "flags": [[[0.25]] * 5], "rows": [650.0]}
    rows = cells(tables.success_table([b, smc, a]))
    one, three = mean(late_success(a)), mean(late_success(b))
    average = f"**{50 * (one + three):.0f} %**"
    assert rows == [
        ["CREPE, ours", "4-6", "2", "7e+02", percent([one]), percent([three]), average, "50 %"],
        ["SMC", "4", "1", "6.5e+02", "25 %", "-", "**25 %**", "-"],
    ]


def test_first_successes_and_routes():
    """Two records: chains that first succeed at rows 300, 100, never and 200; their routes are counted elsewhere."""
    no, yes = [False], [True]
    first = record("CREPE, ours", 1) | {"flags": [[[*no, *yes]], [[*no, *no]], [[*yes, *yes]]], "rows": [100, 200, 300]}
    second = record("CREPE, ours", 2) | {"flags": [[[*no, *no]], [[*no, *yes]], [[*no, *no]]], "rows": [100, 200, 300]}
    table = tables.routes_table([first, second], [([1, 3], 3), ([1, 1], 2)])
    assert cells(table) == [["4", f"{median([300, 100, float('inf'), 200]):.2g}", "inf", "3 of 4", "2 to 3"]]


def test_a_route_is_a_set_of_cells():
    """Chain 1 stays in its corridor; chain 2 takes the other one in its last draw."""
    maze = Maze("two ways", ("#####", "#...#", "#.#.#", "#...#", "#####"))
    low = torch.stack([maze.xy(c) for c in ((1, 1), (1, 2), (1, 3), (2, 3))])
    high = torch.stack([maze.xy(c) for c in ((1, 1), (2, 1), (3, 1), (3, 2))])
    jitter = low + 0.7  # within the cells
    draws = torch.stack([torch.stack([low, low]), torch.stack([jitter, low.flip(0)]), torch.stack([low, high])])
    assert tables.count_routes(maze, draws.reshape(3, 2, 2, 2, 2)) == ([1, 2], 2)


def test_changes_begin_with_our_preset():
    ours, other = record("ours", 1), record("61 levels", 1)
    rows = cells(tables.changes_table([other, ours]))
    assert [row[0] for row in rows] == ["ours", "61 levels"]
    for row, r in zip(rows, (ours, other), strict=True):
        assert row[1:4] == [percent(late_success(r, k)) for k in (4, 2, 3)]
        # five levels; 0.5 + 0.75 + 0.25 rejected
        assert row[4:] == ["5", "2", "0.25"]


def change(kind, seed, fulfilled):
    """Two sweeps before a change and one after it, of 1,000 rows each."""
    log = [{"success": 1.0, "fulfilled": f, "rows": 1000 * (i + 1)} for i, f in enumerate((1.0, 1.0, fulfilled))]
    settings = {"kind": kind, "seed": seed, "n_before": 2}
    return {"settings": settings, "before": [[1, 1], [6, 6]], "task": [[1, 1], [6, 1]], "new": [6, 1], "fresh": 900} | {
        "log": log
    }


CHANGE = change("goal", 0, 0.9)
WINDOW = {"success": 0.0, "start": 1.0, "goal": 0.5, "walls": 0.25, "junctions": 0.75, "widest": 1.5, "acceptance": 0.8}
PRESET = {"windows": [{"first": 1, "last": 1200, **WINDOW}]}


def test_changes_are_met_by_most_plans_and_fresh_seeds_stand_apart():
    records = [
        CHANGE,
        change("goal", 3, 0.5),
        change("goal", 22, 0.51),
        change("start", 23, 1.0),
        change("start", 4, 0.6),
    ]
    assert cells(changes.table(records)) == [
        ["goal", "1 of 2", "1 of 1", "1e+03", "9e+02"],
        ["start", "1 of 1", "1 of 1", "1e+03", "9e+02"],
        ["all", "2 of 3", "2 of 2", "1e+03", "9e+02"],
    ]


def test_the_preset_has_a_row_per_window():
    assert cells(preset.preset_table(PRESET)) == [["1 to 1,200", "0 %", "50 %", "75 %", "1.50", "25 %", "0.80"]]


def test_ways_are_summed_over_tasks():
    """Two tasks: two of four ways in 50,000 rows, the second at 40,000, and one of three in 150,000."""

    def case(possible, *log):
        keys = ("rows", "plans", "success", "routes", "ways")
        log = [dict(zip(keys, line, strict=True)) for line in log]
        return {"settings": {"method": "particle Gibbs"}, "possible": possible, "log": log}

    one = case(4, (30_000, 8, 4, 2, 1), (40_000, 8, 8, 5, 2), (50_000, 8, 0, 5, 2))
    two = case(3, (150_000, 4, 2, 1, 1))
    assert cells(credit.routes_table([one, two])) == [["particle Gibbs", "50 %", "3 of 7", "1.50", "3.0", "1 of 2"]]


def test_curves_do_not_look_ahead():
    """The success so far uses what came before, so a change shows when it happens and not earlier."""
    r = {"rows": [10.0, 20.0, 30.0, 40.0], "flags": [[[1.0, 0.0]], [[0.0, 0.0]], [[1.0, 1.0]], [[0.0, 1.0]]]}
    grid = np.asarray([10.0, 25.0, 39.0, 41.0])
    assert tables.success_along(r, grid).tolist() == pytest.approx([0.5, 0.0, 1.0 / 2, 1.5 / 2])


def test_quality_has_one_column_per_maze():
    found = {"out of walls": 1.0, "TV of cells": 0.18765}
    records = [
        {"settings": {"maze": m}, "found": {k: v / d for k, v in found.items()}} for m, d in (("a", 1), ("b", 2))
    ]
    assert cells(tables.quality_table(records)) == [["out of walls", "1", "0.5"], ["TV of cells", "0.188", "0.0938"]]


def test_the_table_of_weights_is_the_one_on_the_page(tmp_path: Path):
    """Network, settings and loss come from the shipped files, the time from the logs of both trainings."""
    for name, minutes in (("giant", 56), ("medium", 12)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.jsonl").write_text(f'{{"seconds": {20 * minutes}}}\n{{"seconds": {40 * minutes}}}\n')
    shown = {match["name"]: match["body"] for match in BLOCK.finditer(command.PAGE.read_text())}
    assert tables.weights_table(tmp_path) + "\n" == shown["weights"]


def test_the_model_is_compared_with_held_out_episodes(tmp_path: Path):
    """Episodes that stand still in one free cell: no step of the model is as short as theirs."""
    maze, _ = load_maze_model("medium")
    still = maze.xy(maze.tasks[0][0]).expand(20, 201, 2).numpy()
    Results(tmp_path / "data").save("medium", asdict(maze), train=still, validation=still)
    options = ["--out", str(tmp_path / "out"), "--data", str(tmp_path / "data"), "--samples", "40", "--quiet"]
    command.main(["quality", *options])
    results = Results(tmp_path / "out")
    found, arrays = results["quality-medium"]["found"], results.arrays("quality-medium")
    assert found["out of walls, data"] == 1.0
    assert [found[f"TV of {key}, data"] for key in ("cells", "step lengths", "displacement")] == [0, 0, 0]
    assert found["TV of step lengths"] > 0.9
    inside = [not maze.in_wall(torch.from_numpy(x)).any() for x in arrays["model"]]
    assert found["out of walls"] == pytest.approx(mean(inside))
    page = tmp_path / "page.md"
    page.write_text(command.PAGE.read_text())
    command.main(["page", "--page", str(page), "--out", str(tmp_path / "out"), "--data", str(tmp_path / "none")])
    assert f"| out of walls | {found['out of walls']:.3g} |\n" in page.read_text()
    assert (tmp_path / "figures" / "medium-data.png").exists()


def test_the_names_of_the_comparison_are_those_of_the_page():
    assert {job.name for job in comparison("medium", 1000, 2)} == set(METHODS)
    assert not {job.name for job in ablation("medium", 1000)} & set(METHODS)


def test_the_command_fills_what_it_has_results_for_and_leaves_the_prose(tmp_path: Path):
    page, results = tmp_path / "page.md", Results(tmp_path / "results")
    shipped = command.PAGE.read_text()
    page.write_text(shipped)
    options = ["--out", str(results.folder), "--data", str(tmp_path / "data"), "--maze", "medium", "--quiet"]
    command.main(["quality", *options])  # without episodes there is nothing to compare with
    command.main(["page", "--page", str(page), *options])
    assert page.read_text() == shipped

    plans = np.zeros((2, 2, 4, 64, 2), dtype=np.float32)
    ours, other = record("CREPE, ours", 1), record("ours", 1)
    results.save("medium CREPE, ours task1 seed0", ours, plans=plans)
    results.save("medium ours task1 seed0", other, plans=plans)
    results.save("giant CREPE, ours task1 seed0", record("CREPE, ours", 1, weights="giant"), plans=plans)
    results.save("change medium goal seed0", CHANGE, plans=plans[0])
    for name in preset.RUNS:
        results.save(name, PRESET)
    command.main(["page", "--page", str(page), *options])
    filled = page.read_text()
    assert BLOCK.sub("", filled) == BLOCK.sub("", shipped)
    found = {match["name"]: match["body"].rstrip("\n") for match in BLOCK.finditer(filled)}
    before = {match["name"]: match["body"].rstrip("\n") for match in BLOCK.finditer(shipped)}
    assert found == before | {
        "success": tables.success_table([ours]),
        "routes": tables.routes_table([ours], [([1, 1], 1)]),
        "changes": tables.changes_table([other]),
        "random changes": changes.table([CHANGE]),
        **dict.fromkeys(preset.RUNS, preset.preset_table(PRESET)),
    }
    drawn = {path.name for path in (tmp_path / "figures").iterdir()}
    assert drawn == {"success.png", "plans.png", "refinement.png"}


def test_every_link_of_the_study_leads_to_a_file():
    for page in (command.PAGE, command.PAGE.with_name("README.md")):
        links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
        assert links
        assert [link for link in links if not (page.parent / link).exists()] == []
