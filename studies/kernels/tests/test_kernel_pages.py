"""Every table of the pages follows from results.json, to the last letter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from studies.kernels.__main__ import HERE, main
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
