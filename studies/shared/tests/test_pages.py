"""A command may change the tables of a page, and not a letter more."""

from __future__ import annotations

import numpy as np
import pytest

import crepe_diffusion as cd
from studies.shared.pages import fill, markdown, merged
from studies.shared.results import Results

PAGE = "Prose.\n<!-- table: a -->\nold\n<!-- end -->\nMore prose.\n<!-- table: b -->\nkept\n<!-- end -->\n"


def test_only_the_named_table_changes(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    fill(page, {"a": markdown(["x"], [[1], [2]])})
    assert page.read_text() == PAGE.replace("old", "| x |\n|---|\n| 1 |\n| 2 |")
    fill(page, {"a": "old"})
    assert page.read_text() == PAGE


def test_a_table_without_a_place_is_refused_and_nothing_is_written(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    with pytest.raises(cd.InputError, match="no place for a table 'c'; it has a, b"):
        fill(page, {"a": "new", "c": "new"})
    assert page.read_text() == PAGE


def test_results_come_back_as_they_were_saved(tmp_path):
    results = Results(tmp_path / "new" / "folder")
    assert results.get("one") is None
    results.save("one", {"value": [1, 2.5, "x"]}, x=np.arange(3.0))
    assert results["one"] == {"value": [1, 2.5, "x"]}
    assert results.arrays("one")["x"].tolist() == [0.0, 1.0, 2.0]
    assert results.names("o*") == ["one"]


def test_rows_of_what_was_not_measured_stay_in_their_order(tmp_path):
    page = tmp_path / "page.md"
    old = markdown(["law", "error"], [["c", 3], ["b, low", 2], ["b, high", 2]])
    page.write_text(f"<!-- table: errors -->\n{old}\n<!-- end -->\n")
    new = markdown(["law", "error"], [["c", 0.5], ["a", 1]])
    expected = markdown(["law", "error"], [["a", 1], ["b, low", 2], ["b, high", 2], ["c", 0.5]])
    assert merged(page, "errors", new, ["a", "b", "c"]) == expected
    other = markdown(["law", "error", "rows"], [["a", 1, 10]])
    assert merged(page, "errors", other, ["a", "b", "c"]) == other
    assert merged(page, "elsewhere", new, ["c", "a"]) == new
