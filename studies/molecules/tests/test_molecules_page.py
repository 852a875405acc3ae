"""Tables of the page against numbers computed here, in markers that leave the prose as it is."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from studies.molecules import __main__ as shell
from studies.molecules import model
from studies.molecules.convergence import BASINS
from studies.molecules.metrics import COARSE_TVD, METRICS
from studies.molecules.page import fill_page
from studies.molecules.report import HALVES, PAPER, Measured
from studies.shared.results import Results

PAGE = Path(shell.HERE) / "results.md"
BLOCK = re.compile(r"<!-- table: (.*?) -->\n(.*?)<!-- end -->", re.DOTALL)
SEEDS = np.array(
    [
        [0.11, 0.013, 0.24, 0.005, 0.085, 0.84],
        [0.14, 0.011, 0.29, 0.006, 0.081, -1.2],
        [0.12, 0.018, 0.21, 0.008, 0.099, 2.2],
    ]
)
RUNS = [([0.2, 0.4], 10, 1000), ([0.6, 0.8], 20, 1100), ([0.3, 0.4], 60, 1500)]


def shares(error):
    """Populations with this error, and effective sizes that follow from it."""
    names = [*(basin.name for basin in BASINS), "clashes", "U", "sd of U"]
    return {name: (0.1 + 0.11 * k, error * (k + 1), 1 / error + k) for k, name in enumerate(names)}


def methods():
    """Two methods and the bound; all numbers differ, so that one in the wrong cell is seen."""
    seeds = [dict(zip((*METRICS, COARSE_TVD), [*values, values[0] / 8], strict=True)) for values in SEEDS]
    about = [{"rows": rows, "acceptance": a, "round_trips": n} for a, n, rows in RUNS]
    infinite = [{**seeds[0], "dF": np.inf}, {**seeds[1], "W2": np.nan}]
    return [
        Measured(HALVES, seeds[:1], shares(0.001), 0.0, 0.0, (0.0, 1.0), []),
        Measured("RNE, own", infinite, shares(0.02), 0.125, 0.25, (0.00042, 1.037), [{"rows": 2000}, {"rows": 2001}]),
        Measured("CREPE, own", seeds, shares(0.01), 0.0625, 0.4375, (0.00051, 0.978), about),
    ]


def of_dipeptide(table):
    """The rows of a table of all peptides that are about the dipeptide, after checking that the others stay."""
    others = lambda rows: [row for row in rows if not row[0].startswith("dipeptide")]  # noqa: E731
    (old,) = (rows for rows in tables(PAGE.read_text()).values() if rows and rows[0] == table[0])
    assert others(table) == others(old)
    return [row for row in table if row[0].startswith("dipeptide")]


def tables(text):
    cut = lambda line: [cell.strip() for cell in line[1:-1].split("|")]  # noqa: E731
    return {name: [cut(line) for line in body.splitlines()] for name, body in BLOCK.findall(text)}


@pytest.fixture
def filled(tmp_path):
    """The shipped page, filled with results of the dipeptide: its tables as lists of rows, by name."""

    def fill(found, check=None, speed=None, only=()):
        page, data, runs = (tmp_path / name for name in ("results.md", "data", "runs"))
        page.write_text(PAGE.read_text())
        Results(runs / "dipeptide").save("results", [asdict(m) for m in found])
        (runs / "dipeptide/tica.png").write_bytes(b"tica")
        if check:
            Results(data / "dipeptide").save("check", check)
            Results(data / "dipeptide/walker-0").save("speed", speed)
        fill_page(page, runs, data, tmp_path / "weights", only)
        return tables(page.read_text())

    return fill


def test_numbers_arrive_in_their_cells(filled):
    head, _, *rows = filled(methods())["dipeptide"]
    row = dict(zip(head, rows[2], strict=True))
    error = [np.sqrt(sum((v - c.mean()) ** 2 for v in c) / 2 / 3) for c in SEEDS.T]
    for name, column, e in zip([*METRICS[:5], "dF (kJ/mol)"], SEEDS.T, error, strict=True):
        assert row[name] == f"{sum(column) / 3:.3f} +- {e:.3f}"
    assert [row[k] for k in head[7:]] == ["0.51", "0.978", "0.0625", "0.4375", "1,200"]
    bound = "0.110 0.013 0.240 0.005 0.085 0.840 0.00 1.000 0.0000 0.0000"
    assert rows[0] == [HALVES, *bound.split(), ""]
    broken = dict(zip(head, rows[1], strict=True))
    assert (broken["W2"], broken["dF (kJ/mol)"]) == ("not finite", "a basin empty in 1 of 2")
    paper = PAPER["dipeptide"].items()
    assert [r[:5] for r in rows[3:]] == [[f"paper: {k}", *map("{:.3f}".format, v)] for k, v in paper]


def test_populations_have_errors_and_effective_sizes(filled):
    *_, row = filled(methods())["dipeptide populations"]
    shares = ["10.00 +- 1.00", "21.00 +- 2.00", "32.00 +- 3.00", "43.00 +- 4.00", "54.00 +- 5.00"]
    coarse = SEEDS[:, 0] / 8
    expected = f"{coarse.mean():.3f} +- {coarse.std(ddof=1) / np.sqrt(3):.3f}"
    assert row == ["CREPE, own", *shares, "0.65 +- 0.06", "0.76 +- 0.07", expected, "102"]


def test_acceptance_and_round_trips_are_means_over_seeds(filled):
    assert of_dipeptide(filled(methods())["exchange"]) == [["dipeptide", "CREPE, own", "3", "0.45", "30"]]
    found = methods()
    found[2].about[0]["acceptance"] = [0.2, float("nan")]  # a pair that never met
    assert filled(found)["exchange"][2][3:] == ["too few iterations"] * 2


def test_only_tables_and_figures_with_results_change(filled, tmp_path):
    before = PAGE.read_text()
    new, old = filled(methods()), tables(before)
    assert {name for name in old if new[name] != old[name]} == {"dipeptide", "dipeptide populations", "exchange"}
    assert BLOCK.sub("", (tmp_path / "results.md").read_text()) == BLOCK.sub("", before)
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["dipeptide-tica.png"]


def test_longer_runs_have_a_table_of_their_own(filled, tmp_path):
    Results(tmp_path / "runs/dipeptide-long").save("results", [asdict(m) for m in methods()[2:]])
    new = filled(methods()[:2])
    assert [row[0] for row in new["dipeptide long populations"][2:]] == ["CREPE, own"]
    assert [row[0] for row in new["dipeptide populations"][2:]] == [HALVES, "RNE, own"]


def test_one_table_is_filled_alone(filled, tmp_path):
    new, old = filled(methods(), only=("dipeptide populations",)), tables(PAGE.read_text())
    assert {name for name in old if new[name] != old[name]} == {"dipeptide populations"}
    assert not (tmp_path / "figures").exists()


def test_the_tables_that_need_no_run_are_those_of_the_page(tmp_path):
    """The weights of the page are those that ship; every figure that it shows is there."""
    page = tmp_path / "results.md"
    page.write_text(PAGE.read_text())
    assert shell.main(["page", "--page", str(page), *(f"--{k}={tmp_path / 'none'}" for k in ("runs", "data"))]) == 0
    assert tables(page.read_text())["weights"] == tables(PAGE.read_text())["weights"]
    for text in (PAGE.read_text(), (PAGE.parent / "README.md").read_text()):
        assert all((PAGE.parent / link.split("#")[0]).exists() for link in re.findall(r"\]\(([^)]*)\)", text))


def test_checks_and_speed(filled):
    basin = lambda k: {"share": 0.1 * k, "error": 0.001 * k, "z_halves": 0.3 - k, "z_walkers": None}  # noqa: E731
    basins = {name: basin(k) for k, name in enumerate(("phi > 0", "beta", "alpha", "cis"))}
    check = {"temperature": 800.0, "n_walkers": 1, "n_trajectories": 14, "ns": 1118.6, "basins": basins}
    speed = {"engine": "lanes", "n_rungs": 16, "hours": 2.5, "ns_per_hour": 3141.5}
    new = filled(methods(), [{**check, "crossings": 4321, "verdict": "converged"}], speed)
    shares = ["0.00 +- 0.00", "10.00 +- 0.10", "20.00 +- 0.20", "30.00 +- 0.30"]
    expected = ["dipeptide", "800", "1", "14", "1,118.6", *shares, "2.7", "-", "4,321", "converged"]
    assert of_dipeptide(new["dynamics"]) == [expected]
    assert of_dipeptide(new["speed"]) == [["dipeptide", "walker-0", "lanes", "16", "3,142", "2.5"]]


def test_each_part_of_joined_weights_has_a_line(filled, tmp_path):
    """The metadata come from `train_model` and `join` themselves, so the table reads what they write."""
    frames, losses = np.random.default_rng(0).normal(0, 0.1, (64, 4, 3)).astype(np.float32), []
    for part, n in (("low", 2), ("high", 3)):
        settings = replace(model.SETTINGS, n_steps=n, batch=8 * n, noise_mean=-n)
        network, about = {"kind": "pairs", "n_layers": 2, "width": 4 * n}, {"temperature": "800.0", "n_frames": "64"}
        log = list(model.train_model((frames, frames), tmp_path / part, "x", network, settings, about=about))
        losses.append(f"{log[-1]['validation']:.4f}")
        (tmp_path / part / "log.jsonl").write_text(json.dumps({"seconds": 600 * n}) + "\n")
    (tmp_path / "weights").mkdir()
    parts = (tmp_path / part / "x.safetensors" for part in ("low", "high"))
    model.join(*parts, tmp_path / "weights/dipeptide.safetensors", 0.05)
    assert of_dipeptide(filled(methods())["weights"]) == [
        ["dipeptide, noise below 0.05 nm", "pairs, 2 x 8", "64 at 800 K", "2 x 16", "20", losses[0]],
        ["dipeptide, noise above 0.05 nm", "pairs, 2 x 12", "64 at 800 K", "3 x 24", "30", losses[1]],
    ]
