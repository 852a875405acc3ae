"""A small calibration: groups are runs of their own, records are kept, tables are made of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import crepe_diffusion as cd
from studies.battery import calibration
from studies.battery.calibration import Job, run_all, run_job
from studies.battery.methods import METHODS
from studies.battery.problems import tokens


@pytest.mark.parametrize("method", ["replica exchange", "SMC"])
def test_groups_are_charged_for_their_set_up_and_for_nothing_of_others(method):
    problem = tokens("masked", 4, 3)
    one, two = METHODS[method](problem, 4000, 0, 2)
    assert one.rows == two.rows == pytest.approx(4000, rel=0.1)
    alone = METHODS[method](problem, 4000, 0, 1)[0]
    assert alone.setup == one.setup
    assert alone.rows == pytest.approx(one.rows, rel=0.1)
    # The same budget buys a group as many draws as a run alone, but its own ones.
    assert len(alone.out.x) == pytest.approx(len(one.out.x), rel=0.05)
    f = problem.scalars["neighbours agree"]
    assert one.out.mean(f).value != two.out.mean(f).value


def test_records_are_kept_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    job = Job("masked tokens 4x3 mild w=2 w'=2", "SMC", 2000, 0, 2)
    (found,) = run_all([job], tmp_path, workers=1)
    monkeypatch.setitem(METHODS, "SMC", lambda *args: pytest.fail("it was measured before"))
    assert run_job(job, tmp_path) == found
    assert [r["group"] for r in found] == [0, 1]
    assert calibration.collect(tmp_path, [job.problem]) == found
    assert calibration.collect(tmp_path, ["another"]) == []
    for r in found:
        for m in r["means"].values():
            low, high = cd.Estimate(m["value"], m["error"], m["dof"]).interval()
            assert m["covered"] == (low <= m["truth"] <= high)
            assert 0 < m["variance"] < 0.26
    (cell,) = calibration.cells(found)
    assert (cell.runs, cell.means[1], cell.log_z[1]) == (2, 6, 2)
    assert cell.means[0] == sum(m["covered"] for r in found for m in r["means"].values())
    assert "| SMC | 2,000 | 2 |" in calibration.table([cell])
    exact = [{**r, "means": {"f": {"value": 1.1, "truth": 1.0, "variance": 4.0}}} for r in found]  # 400 draws
    assert "| SMC | 1 | 2 |" in calibration.with_plenty(calibration.cells(exact))
    poor = [{**r, "means": {**r["means"], "g": {"value": 2.0, "truth": 1.0, "variance": 4.0}}} for r in exact]
    assert "SMC" not in calibration.with_plenty(calibration.cells(poor))
    assert "SMC" in calibration.by_problem([cell])
    # Cells of other problems stay, those that are measured again are replaced.
    other = replace(cell, problem="another", ok=1)
    assert calibration.kept(tmp_path, "cells", [cell, other]) == [other, cell]
    assert calibration.kept(tmp_path, "cells", [replace(other, ok=2)]) == [replace(other, ok=2), cell]
    assert calibration.reasons(found).count("| SMC |") == len(
        {calibration._kind(x) for r in found for x in r["reasons"]}
    )


def test_a_name_that_is_not_there_is_refused():
    assert calibration.chosen("held out 3: posterior").hard
    with pytest.raises(cd.InputError, match="no problem 'nowhere'"):
        calibration.chosen("nowhere")


@pytest.mark.parametrize(
    ("method", "rows"), [pytest.param("replica exchange", 8000, marks=pytest.mark.slow), ("SMC", 3000)]
)
def test_a_small_calibration(method, rows, tmp_path: Path):
    """Intervals of runs that are judged OK hold the truth; with half of their width they would not."""
    found = run_job(Job("masked tokens 4x3 mild w=2 w'=2", method, rows, 1, 16), tmp_path)
    ok = [r for r in found if r["verdict"] == "ok"]
    assert len(ok) >= 12

    def coverage(width: float) -> float:
        estimates = [m for r in ok for m in (*r["means"].values(), r["log_z"])]
        hits = [abs(m["value"] - m["truth"]) <= width * interval(m) for m in estimates]
        return sum(hits) / len(hits)

    def interval(m: dict[str, float]) -> float:
        return cd.Estimate(0.0, m["error"], m["dof"]).interval()[1]

    assert coverage(1.0) >= 0.88
    assert coverage(0.5) < 0.88
