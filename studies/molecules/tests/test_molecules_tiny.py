"""The whole pipeline after dynamics, in small, from what is shipped."""

from __future__ import annotations

import json
import math

import mdtraj

from studies.molecules import tiny
from studies.molecules.metrics import COARSE_TVD, METRICS
from studies.molecules.report import HALVES


def test_the_tiny_preset_measures_every_method_by_every_metric(tmp_path):
    table = tiny.run(tmp_path)
    results = {row["method"]: row for row in json.loads((tmp_path / "results.json").read_text())}
    assert list(results) == [HALVES, *tiny.TRIED]
    assert all(name in table for name in tiny.TRIED)
    floor = results[HALVES]["metrics"][0]
    for name in tiny.TRIED:
        row = results[name]["metrics"][0]
        assert set(row) == {*METRICS, COARSE_TVD}
        assert all(math.isfinite(row[m]) for m in METRICS if m != "dF")  # a basin may be empty in so few samples
        # A model that was trained for seconds is worse than dynamics against themselves, by what metrics can see.
        assert row["energy TVD"] > floor["energy TVD"]
        rows = results[name]["about"][0]["rows"]
        assert abs(rows / tiny.BUDGET.rows - 1) < 0.5  # of equal work, but for whole batches and the Fisher fit
    for plot in ("ramachandran", "tica", "energy"):
        assert (tmp_path / f"{plot}.png").stat().st_size > 10_000
    seen = mdtraj.load_xtc(str(tmp_path / "crepe-own.xtc"), top=str(tmp_path / "topology.pdb"))
    assert seen.n_atoms == 22
