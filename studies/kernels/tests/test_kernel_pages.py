"""Every table of the pages follows from results.json, to the last letter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from studies.kernels import measure as measuring
from studies.kernels.__main__ import HERE, main
from studies.kernels.problems import SETTINGS, TASKS
from studies.shared.pages import BLOCK

PAGES = ("README.md", "tables.md")


def filled(folder: Path) -> list[str]:
    main(["--from-json", "--out", str(folder)])
    return [(folder / page).read_text() for page in PAGES]


def test_the_shipped_results_make_the_shipped_tables(tmp_path: Path) -> None:
    shipped = [(HERE / page).read_text() for page in PAGES]
    shutil.copy(HERE / "results.json", tmp_path)
    for page, text in zip(PAGES, shipped, strict=True):  # no table is left of before
        (tmp_path / page).write_text(BLOCK.sub(r"<!-- table: \g<name> -->\n<!-- end -->", text))
    assert filled(tmp_path) == shipped
    results = json.loads((tmp_path / "results.json").read_text())
    results["kernels"][0]["tv"] *= 1.1
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert all(a != b for a, b in zip(filled(tmp_path), shipped, strict=True))


def test_a_quick_run_resolves_no_order(tmp_path: Path) -> None:
    """Two numbers of steps are too few for a slope, and the tables can be written all the same."""
    results = json.loads((HERE / "results.json").read_text())
    results["effort"]["steps"] = results["effort"]["steps"][:2]
    for series in results["orders"]:
        series["points"], series["order"], series["n_used"] = series["points"][:2], None, 0
    (tmp_path / "results.json").write_text(json.dumps(results))
    readme, pages = filled(tmp_path)
    assert "| series of errors that resolve an order | 0 of 48 |\n| their order | not resolved |" in readme
    assert pages.count("| not resolved | 0 |") == 48


def test_one_sampler_and_one_kernel_are_measured_again_and_the_others_are_kept(monkeypatch):
    monkeypatch.setattr(measuring, "SETTINGS", SETTINGS[:1])
    monkeypatch.setattr(measuring, "TASKS", TASKS[:1])
    name = measuring.Problem(SETTINGS[0], TASKS[0]).name
    samplers = ["CREPE", measuring.SMALL_BATCHES, "guidance alone"]
    old = {"problem": name, "proposal": "balanced", "tv": 9.0}
    before = {
        "seed": 0,
        "versus": [{"problem": name, "sampler": s, "mode_error": (9.0, 9.0)} for s in samplers],
        "kernels": [old | {"kernel": "Fisher"}, old | {"kernel": "DDPM"}],
    }
    after = measuring.measure_again(before, [measuring.SMALL_BATCHES, "DDPM"], measuring.QUICK)
    assert after["kernels"][0] == before["kernels"][0]
    assert [(r["kernel"], r["proposal"], r["tv"] < 1) for r in after["kernels"][1:]] == [
        ("DDPM", "balanced", True),
        ("DDPM", "paper", True),
    ]
    assert [r["sampler"] for r in after["versus"]] == samplers
    assert after["versus"][0] == before["versus"][0]
    assert after["versus"][2] == before["versus"][2]
    assert 0 < after["versus"][1]["mode_error"][0] < 0.2
    assert after["versus"][1]["rows"] <= measuring.QUICK.versus_rows * 2
