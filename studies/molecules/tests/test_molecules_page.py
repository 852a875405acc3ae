"""The page of the molecules says what the files say, and says the opposite when they do."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from openmm import app
from safetensors.torch import save_file

from studies.molecules import __main__ as shell
from studies.molecules import convergence, model, trajectory
from studies.molecules.dynamics import BLOCK, INTERVAL
from studies.molecules.metrics import METRICS
from studies.molecules.page import write_page
from studies.molecules.peptides import PEPTIDES, peptide
from studies.molecules.report import HALVES, PAPER
from studies.molecules.tempering import UNTEMPERED

# Five numbers a method, all different, so that a number in the wrong cell is seen.
GOOD = {
    HALVES: (0.021, 0.004, 0.101, 0.011, 0.12),
    UNTEMPERED: (0.042, 0.006, 0.202, 0.033, 0.31),
    "RNE, paper": (0.401, 0.031, 0.291, 0.151, 1.41),
    "CREPE, paper": (0.302, 0.022, 0.272, 0.102, 1.32),
    "RNE, own": (0.123, 0.017, 0.253, 0.094, 0.93),
    "CREPE, own": (0.111, 0.013, 0.244, 0.085, 0.84),
}


def fact(method, values, rows=1000, spread=0.0005):
    """Three seeds whose mean is exact and whose standard error is spread / sqrt(3)."""
    metrics = [dict(zip(METRICS, (v + s * spread for v in values), strict=True)) for s in (-1, 0, 1)]
    about = [] if method == HALVES else [{"method": method, "rows": rows}] * 3
    return {
        "method": method, "metrics": metrics, "mixed": 0.0625, "turned": 0.4375, "bonds": [0.00042, 1.037],
        "about": about,
    }  # fmt: skip


def check(temperature, verdict="converged"):
    inside = {
        b.name: {"share": 0.1 * (k + 1), "error": 0.001, "z_halves": -0.3 - k, "z_walkers": 0.2 + k}
        for k, b in enumerate(convergence.BASINS)
    }
    return {
        "temperature": temperature, "n_walkers": 2, "n_trajectories": 14, "ns": 1118.6, "basins": inside,
        "crossings": 4321, "verdict": verdict,
    }  # fmt: skip


CONVERGED = (check(300.0), check(800.0))


@pytest.fixture
def page(tmp_path):
    """Write facts of the dipeptide where the commands would, and read the page they make."""

    def build(facts, checks=CONVERGED, weights=None, speed=None, figures=()):
        runs, frames, shipped = (tmp_path / name for name in ("runs", "data", "weights"))
        for folder in (runs / "dipeptide", frames / "dipeptide" / "walker-0", shipped):
            folder.mkdir(parents=True, exist_ok=True)
        (runs / "dipeptide" / "results.json").write_text(json.dumps(facts))
        (frames / "dipeptide" / "check.json").write_text(json.dumps(checks))
        if speed:
            (frames / "dipeptide" / "walker-0" / "speed.json").write_text(json.dumps(speed))
        if weights:
            save_file({"w": torch.zeros(1)}, shipped / "dipeptide.safetensors", weights)
        for name in figures:
            (runs / "dipeptide" / f"{name}.png").write_bytes(name.encode())
        return write_page(runs, frames, shipped, tmp_path / "docs").read_text()

    return build


def good(**changed):
    return [fact(name, values) for name, values in {**GOOD, **changed}.items()]


def cells(text, first, *, after=""):
    """The table row that begins with these words, as a list of cells."""
    line = next(line for line in text[text.index(after) :].splitlines() if line.startswith(f"| {first} |"))
    return [c.strip() for c in line.strip("|").split("|")]


def sentence(text, title):
    (found,) = [line for line in text.splitlines() if line.startswith(f"- **{title}")]
    return found


def test_numbers_arrive_in_their_cells(page):
    text = page(good())
    head = cells(text, "method")
    for name, values in GOOD.items():
        row = dict(zip(head, cells(text, name), strict=True))
        for metric, value in zip((*METRICS[:4], "dF (kJ/mol)"), values, strict=True):
            assert row[metric] == f"{value:.3f} +- 0.000"
        assert row["bond shift (pm)"] == "0.42"
        assert row["bond spread"] == "1.037"
        assert row["mixed hands"] == "0.0625"
        assert row["turned"] == "0.4375"
        assert row["rows"] == ("" if name == HALVES else "1,000")
    for name, values in PAPER["dipeptide"].items():
        assert cells(text, f"paper: {name}")[1:] == [*(f"{v:.3f}" for v in values), *[""] * (len(head) - 5)]
    assert len(text.splitlines()) < 130


def test_a_value_that_is_not_finite_is_said_to_be_none(page):
    facts = good()
    facts[-1]["metrics"][1]["dF"] = float("inf")
    facts[-2]["metrics"][1]["W2"] = float("nan")
    text = page(facts)
    assert cells(text, "CREPE, own")[5] == "a basin empty in 1 of 3"
    assert cells(text, "RNE, own")[3] == "not finite"
    assert "better on energy TVD, distance TVD, W2 and TICA MMD." in sentence(text, "`CREPE, own` and SMC")


def test_the_best_method_of_each_metric_is_found_in_the_numbers(page):
    assert sentence(page(good()), "Best").endswith(
        "energy TVD `CREPE, own` 0.111; distance TVD `CREPE, own` 0.013; W2 `CREPE, own` 0.244; "
        "TICA MMD `CREPE, own` 0.085."
    )
    other = page(good(**{"RNE, paper": (0.1, 0.031, 0.291, 0.02, 1.4)}))
    assert sentence(other, "Best").endswith(
        "energy TVD `RNE, paper` 0.100; distance TVD `CREPE, own` 0.013; W2 `CREPE, own` 0.244; "
        "TICA MMD `RNE, paper` 0.020."
    )


def test_the_bounds_are_not_taken_for_methods(page):
    """Dynamics and the untempered model have the least values of all, and are never the best method."""
    text = sentence(page(good()), "Best")
    assert HALVES not in text
    assert UNTEMPERED not in text


def test_methods_within_their_errors_are_not_told_apart(page):
    facts = good()
    assert "not told apart" not in sentence(page(facts), "`CREPE, own` and SMC")
    facts[-1] = fact("CREPE, own", GOOD["CREPE, own"], spread=0.03)  # a standard error of 0.017
    assert cells(page(facts), "CREPE, own")[1] == "0.111 +- 0.017"
    said = sentence(page(facts), "`CREPE, own` and SMC")
    assert "not told apart on energy TVD" in said
    assert "better on" not in said
    assert "energy TVD `CREPE, own` 0.111 (not told apart: `RNE, own`)" in sentence(page(facts), "Best")


def test_one_seed_has_no_errors(page):
    facts = good()
    for f in facts:
        f["metrics"] = f["metrics"][1:2]
    text = page(facts)
    assert cells(text, "CREPE, own")[1] == "0.111"
    assert "- One seed each" in text
    assert "better on energy TVD, " in sentence(text, "`CREPE, own` and SMC")


def test_the_paper_is_reached_or_not_by_the_numbers(page):
    reached = sentence(page(good()), "`CREPE, own` and the paper")
    assert "reaches it on 4 of 4 metrics" in reached
    assert "energy TVD (0.111 against 0.224)" in reached
    assert "worse" not in reached
    missed = sentence(page(good(**{"CREPE, own": (0.5, 0.013, 0.3, 0.096, 1)})), "`CREPE, own` and the paper")
    assert "reaches it on 2 of 4 metrics" in missed
    assert "worse on energy TVD (0.500 against 0.224) and W2 (0.300 against 0.264)" in missed
    assert "not told apart on TICA MMD (0.096 against 0.096)" in missed
    assert "reaches it on 0 of 4" in sentence(page(good()), "`CREPE, paper` and the paper")
    # A wide error does not reach anything: it is the mean that has to.
    wide = [*good()[:-1], fact("CREPE, own", (0.23, 0.02, 0.27, 0.1, 1), spread=0.2)]
    said = sentence(page(wide), "`CREPE, own` and the paper")
    assert "reaches it on 0 of 4 metrics: not told apart on energy TVD (0.230 against 0.224)" in said


def test_exchange_and_particles_change_sides_with_their_numbers(page):
    ahead = sentence(page(good()), "`CREPE, own` and SMC")
    assert "Beside `RNE, own` at equal rows (1,000 and 1,000): better on energy TVD" in ahead
    assert "worse" not in ahead
    behind = page(good(**{"RNE, own": GOOD["CREPE, own"], "CREPE, own": GOOD["RNE, own"]}))
    assert sentence(behind, "`CREPE, own` and SMC").endswith("): worse on energy TVD, distance TVD, W2 and TICA MMD.")
    between = page(good(**{"RNE, own": (0.05, 0.018, 0.244, 0.05, 1)}))
    assert sentence(between, "`CREPE, own` and SMC").endswith(
        "): better on distance TVD; worse on energy TVD and TICA MMD; not told apart on W2."
    )


def test_rows_that_differ_are_called_unequal(page):
    facts = [*good()[:-1], fact("CREPE, own", GOOD["CREPE, own"], rows=1200)]
    assert "at unequal rows (1,200 against 1,000)" in sentence(page(facts), "`CREPE, own` and SMC")


def test_floor_and_model_are_quoted(page):
    text = page(good())
    floor = sentence(text, "Floor")
    assert "differ by energy TVD 0.021; distance TVD 0.004; W2 0.101; TICA MMD 0.011" in floor
    assert "is 5.3, 3.2, 2.4 and 7.7 times that" in floor
    model = sentence(text, "Model")
    assert "dynamics at 800 K by energy TVD 0.042; distance TVD 0.006; W2 0.202; TICA MMD 0.033" in model
    assert "2.0, 1.5, 2.0 and 3.0 times the floor" in model
    assert "`CREPE, own` at 300 K: worse on energy TVD (0.111 against 0.042)" in model
    nearer = sentence(page(good(**{UNTEMPERED: (0.9, 0.9, 0.9, 0.9, 1)})), "Model")
    assert "`CREPE, own` at 300 K: better on energy TVD (0.111 against 0.900)" in nearer
    unknown = [f for f in good() if f["method"] != UNTEMPERED]
    assert "was not sampled untempered" in sentence(page(unknown), "Model")


def test_nothing_tempered_is_no_error(page):
    text = page([fact(HALVES, GOOD[HALVES]), fact(UNTEMPERED, GOOD[UNTEMPERED])])
    assert "**Best" not in text
    assert "and SMC" not in text
    assert "TICA MMD 0.011." in sentence(text, "Floor")


def test_the_check_is_shown_and_doubts_are_repeated_beside_results(page):
    text = page(good())
    assert "Beware" not in text
    shares = ["10.00 +- 0.10", "20.00 +- 0.10", "30.00 +- 0.10", "40.00 +- 0.10"]
    expected = ["dipeptide", "800", "2", "14", "1,118.6", *shares, "3.3", "3.2", "4,321", "converged"]
    assert cells(text, "dipeptide | 800", after="## Data") == expected
    head = cells(text, "peptide", after="## Data")
    assert (head[2:4], head[9:12]) == (["walkers", "trajectories"], ["z of halves", "z of walkers", "changes of sign"])
    doubtful = page(good(), checks=[check(300.0, "not converged: phi was seen to change its sign 3 times")])
    assert sentence(doubtful, "Beware") == (
        "- **Beware.** The dynamics at 300 K are not converged and those at 800 K were not checked (see Data)."
    )


def test_a_peptide_without_results_is_said_to_have_none(page, tmp_path):
    text = page(good())
    assert "There are no results for the dipeptide" not in text
    for name in ("tetrapeptide", "hexapeptide"):
        assert text.count(f"There are no results for the {name}.") == 1
    assert "No dynamics of the tetrapeptide and the hexapeptide have been checked." in text
    empty = write_page(tmp_path / "no", tmp_path / "no", tmp_path / "no", tmp_path / "docs").read_text()
    assert empty.count("There are no results for the ") == len(PEPTIDES)
    assert "| method |" not in empty


def test_weights_and_speed_are_read_from_their_files(page):
    text = page(good())
    assert "No weights are shipped for the dipeptide and the tetrapeptide and the hexapeptide." in text
    assert "ns/h" not in text
    about = {
        "network": json.dumps({"kind": "pairs", "n_layers": 4, "width": 384}),
        "settings": json.dumps({"n_steps": 45_000, "batch": 512}),
        "last": json.dumps({"step": 44_000, "validation": 0.31416}),
        "n_frames": "123456", "temperature": "800.0", "minutes": "47",
    }  # fmt: skip
    speed = {"engine": "lanes", "n_rungs": 16, "hours": 2.5, "ns_per_hour": 3141.5}
    text = page(good(), weights=about, speed=speed)
    row = ["dipeptide", "pairs, 4 x 384", "123,456 at 800 K", "44,000 x 512", "47", "0.3142"]
    assert cells(text, "dipeptide", after="## Model") == row
    assert "dipeptide walker-0, lanes: 3,142 ns/h in all 16 rungs over 2.5 h" in text


def test_acceptance_and_round_trips_are_means_over_seeds(page):
    facts = good()
    assert "**Exchange.**" not in page(facts)
    runs = ([0.2, 0.4], 10), ([0.6, 0.8], 20), ([0.3, 0.4], 60)
    facts[-1]["about"] = [{"rows": 1000, "acceptance": a, "round_trips": n} for a, n in runs]
    assert "round trips of a seed's chains: `CREPE, own` (3 levels) 0.45, 30." in page(facts)
    facts[-1]["about"][0]["acceptance"] = [0.2, float("nan")]  # a pair that never met
    assert "`CREPE, own` (3 levels) too few iterations to tell." in page(facts)


def test_results_of_a_model_that_is_not_shipped_are_called_a_start(page, tmp_path):
    assert "**No more than a start.** No weights are shipped for the dipeptide. The same" in page(good())
    about = {
        "network": json.dumps({"kind": "pairs", "n_layers": 4, "width": 256}), "minutes": "3",
        "settings": json.dumps({"n_steps": 2000, "batch": 128}), "temperature": "800.0", "n_frames": "999",
        "last": json.dumps({"step": 2000, "validation": 0.4}),
    }  # fmt: skip
    local = tmp_path / "data" / "dipeptide" / "training-all" / "dipeptide.safetensors"
    local.parent.mkdir()
    save_file({"w": torch.zeros(1)}, local, about)
    text = page(good())
    assert "trained for 2,000 steps of 128 frames, in 3 min of" in text
    row = ["dipeptide (not shipped)", "pairs, 4 x 256", "999 at 800 K", "2,000 x 128", "3", "0.4000"]
    assert cells(text, "dipeptide (not shipped)") == row
    about["before"] = json.dumps({"step": 56_000, "minutes": "30"})
    text = page(good(), weights=about)
    assert "No more than a start" not in text
    assert cells(text, "dipeptide", after="## Model")[3:5] == ["56,000 + 2,000 x 128", "30 + 3"]


def test_each_part_of_joined_weights_has_a_line(page, tmp_path):
    """The metadata come from `train_model` and `join` themselves, so that the page is held to what they write."""
    frames = np.random.default_rng(0).normal(0, 0.1, (64, 4, 3)).astype(np.float32)
    losses: list[str] = []
    for part, n_steps in (("low", 2), ("high", 3)):
        settings = replace(model.SETTINGS, n_steps=n_steps, batch=8 * n_steps, noise_mean=-n_steps)
        about = {"temperature": "800.0", "n_frames": "64"}
        network = {"kind": "pairs", "n_layers": 2, "width": 4 * n_steps}
        log = list(model.train_model((frames, frames), tmp_path / part, "x", network, settings, about=about))
        losses.append(f"{log[-1]['validation']:.4f}")
        seconds = 36_000 if part == "low" else 1_800
        (tmp_path / part / "log.jsonl").write_text(json.dumps({"seconds": seconds}) + "\n")
    (tmp_path / "weights").mkdir()
    model.join(
        *(tmp_path / p / "x.safetensors" for p in ("low", "high")), tmp_path / "weights/dipeptide.safetensors", 0.05
    )
    text = page(good())
    low = cells(text, "dipeptide, noise below 0.05 nm", after="## Model")
    high = cells(text, "dipeptide, noise above 0.05 nm", after="## Model")
    assert low[1:] == ["pairs, 2 x 8", "64 at 800 K", "2 x 16", "600", losses[0]]
    assert high[1:] == ["pairs, 2 x 12", "64 at 800 K", "3 x 24", "30", losses[1]]
    assert losses[0] != losses[1]


def test_figures_are_copied_and_only_those_are_linked(page, tmp_path):
    text = page(good(), figures=("tica", "energy"))
    links = re.findall(r"\]\((figures/[^)]*)\)", text)
    assert links == ["figures/molecules-dipeptide-tica.png", "figures/molecules-dipeptide-energy.png"]
    assert (tmp_path / "docs" / links[1]).read_bytes() == b"energy"


def test_the_same_files_give_the_same_bytes(page, tmp_path):
    first = page(good(), figures=("tica",))
    assert page(good(), figures=("tica",)) == first
    shell.main(["page", *(f"--{name}={tmp_path / name}" for name in ("runs", "data", "docs"))])
    again = (tmp_path / "docs" / "molecules.md").read_text()
    # The command finds the weights of the package, which are described under Model and spare the dipeptide a caveat.
    bare = "\n".join(line for line in first.splitlines() if "No more than a start" not in line)
    assert again[: again.index("## Model")] == bare[: bare.index("## Model")]


def test_check_writes_what_it_prints(tmp_path, capsys):
    chosen, rng = peptide("dipeptide"), np.random.default_rng(0)
    shapes = np.stack([chosen.build(*torsions)[1] for torsions in ((-60.0, -40.0), (-150.0, 150.0), (55.0, 45.0))])
    files = {  # by walker: two rungs each at 300 K, and one of them has been hot
        0: {300.0: [rng.choice(2, 200, p=(p, 1 - p)) for p in (0.3, 0.4)], 800.0: [rng.choice(3, 200)]},
        1: {300.0: [rng.choice(2, 200, p=(p, 1 - p)) for p in (0.6, 0.5)]},
    }
    for walker, temperatures in files.items():
        folder = tmp_path / "dipeptide" / f"walker-{walker}"
        folder.mkdir(parents=True)
        with (folder / "topology.pdb").open("w") as file:
            app.PDBFile.writeFile(chosen.topology, 10 * shapes[0], file)
        for temperature, rungs in temperatures.items():
            for rung, states in enumerate(rungs):
                path = folder / f"{rung}-{temperature:g}K.dcd"
                trajectory.append(path, shapes[states].astype(np.float32), INTERVAL)
    assert shell.main(["check", "--data", str(tmp_path), "--equilibration", "0"]) == 0
    printed = capsys.readouterr().out
    cold, hot = json.loads((tmp_path / "dipeptide" / "check.json").read_text())
    assert (cold["temperature"], cold["n_walkers"], cold["n_trajectories"], cold["ns"]) == (300, 2, 4, 0.8)
    alpha = [(np.stack(files[walker][300.0]) == 0)[..., None] for walker in (0, 1)]
    assert cold["basins"]["alpha"]["share"] == pytest.approx(np.mean(alpha))
    z = abs(convergence.compare(alpha[:1], alpha[1:])[0])
    assert cold["basins"]["alpha"]["z_walkers"] == pytest.approx(z)
    assert z > 3
    assert cold["crossings"] == 0
    assert "phi was seen to change its sign 0 times" in cold["verdict"]
    positive = (files[0][800.0][0] == 2).reshape(-1, BLOCK)
    assert hot["crossings"] == (np.diff(positive, axis=1) != 0).sum() > 50
    assert (hot["n_walkers"], hot["basins"]["alpha"]["z_walkers"]) == (1, None)
    assert "4 trajectories of 2 walkers, 0.8 ns" in printed
    assert printed.count("walkers |z| <= ") == len(convergence.BASINS)
    assert f"walkers |z| <= {z:.1f}" in printed
    for facts in (cold, hot):
        assert facts["verdict"] in printed
        assert f"changes of sign of phi, within blocks: {facts['crossings']}" in printed
        assert f"alpha    {facts['basins']['alpha']['share']:.4f} +- " in printed
