"""Metrics on samples whose distance is known, each beside a twin that is wrong."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from crepe_diffusion import InputError
from studies.molecules import metrics, report
from studies.molecules.data import read_trajectories
from studies.molecules.geometry import aligned
from studies.molecules.peptides import GAS_CONSTANT, peptide
from studies.molecules.tempering import kept_draws


def test_total_variation_of_two_normals():
    """TV(N(0, 1), N(1, 1)) = 2 Phi(1/2) - 1 = 0.3829; 100,000 draws in 200 bins add 0.01 at most."""
    rng = np.random.default_rng(0)
    a, b, same = rng.standard_normal(100_000), 1 + rng.standard_normal(100_000), rng.standard_normal(100_000)
    assert abs(metrics.total_variation(a, b) - 0.3829) < 0.01
    assert metrics.total_variation(a, same) < 0.03


def test_samples_outside_the_bins_count_as_wrong():
    """Left out, as a histogram would, they would make a sampler better that fails more often."""
    truth = np.random.default_rng(0).uniform(size=10_000)
    half = np.concatenate([truth, truth + 5])
    assert abs(metrics.total_variation(truth, half) - 0.5) < 1e-12
    counts, edges = np.histogram(truth, bins=200)
    inside = np.histogram(half, bins=edges)[0]
    assert np.abs(counts / counts.sum() - inside / inside.sum()).sum() < 1e-12  # the usual formula sees nothing


def test_w2_of_a_shift_is_its_length():
    """The best plan between x and x + a moves every point by a; by any fixed wrong pairing it costs more."""
    rng = np.random.default_rng(0)
    x, shift = rng.standard_normal((60, 4, 3)), 0.3 * rng.standard_normal((4, 3))
    y = (x + shift)[rng.permutation(60)]
    assert abs(metrics.w2(x, y) - np.linalg.norm(shift)) < 1e-9
    assert np.sqrt(((x - y) ** 2).sum((1, 2)).mean()) > 2 * np.linalg.norm(shift)


def test_w2_needs_superposition():
    """The same molecules turned at random are far apart until they are superposed."""
    rng = np.random.default_rng(0)
    shape = rng.standard_normal((8, 3))
    x = shape + 0.05 * rng.standard_normal((40, 8, 3))
    turns = np.linalg.qr(rng.standard_normal((40, 3, 3)))[0]
    turned = x @ (turns * np.linalg.det(turns)[:, None, None])
    assert metrics.w2(x, turned) > 1.0
    assert metrics.w2(aligned(x, shape), aligned(turned, shape)) < 1e-6


def test_mmd_of_two_normals():
    """In the plane, E k for N(0, s^2) and N(m, s^2) is c / (c + 4 s^2) exp(-m^2 / (c + 4 s^2)), k = exp(-d^2 / c)."""
    rng = np.random.default_rng(0)
    s, h, m, n = 0.7, 1.3, 0.8, 4000
    a, b = s * rng.standard_normal((n, 2)), s * rng.standard_normal((n, 2)) + [m, 0]
    c = h**2 * np.array([4, 2, 1, 0.5, 0.25])
    mean = c / (c + 4 * s**2)
    known = 2 * mean * (1 - np.exp(-(m**2) / (c + 4 * s**2)))
    floor = 2 * (1 - mean) / n
    squares = metrics.mmd_squares(a, b, h)
    assert np.abs(squares / (known + floor) - 1).max() < 0.08
    assert np.abs(metrics.mmd_squares(a, b, 1.3 * h) / (known + floor) - 1).max() > 0.15  # another bandwidth
    assert abs(metrics.mmd(squares) - np.sqrt(known[1] + floor[1])) < 0.02
    assert np.abs(metrics.mmd_squares(a, a.copy(), h)).max() < 1e-12
    same = metrics.mmd_squares(a, s * rng.standard_normal((n, 2)), h)
    assert (same < 6 * floor).all()
    assert same.sum() > 0.2 * floor.sum()


def torsions(n, phi, rng):
    """Dipeptides at random psi whose phi is one of the given angles, as frames in order."""
    chosen = peptide("dipeptide")
    built = {p: [chosen.build(p, q)[1] for q in (-40.0, 60.0, 140.0)] for p in set(phi)}
    return np.array([built[p][rng.integers(3)] for p in phi[:n]])


@pytest.fixture(scope="module")
def truth():
    """phi jumps seldom, psi at every frame: the slow direction is phi."""
    rng = np.random.default_rng(0)
    phi = np.repeat(rng.choice([-80.0, -80.0, -80.0, 60.0], 150), 20)
    return metrics.Truth(peptide("dipeptide"), 300.0, [torsions(3000, phi, rng)])


def test_free_energy_of_known_populations(truth):
    p = metrics.basins(truth.frames, truth.peptide)[:, 0].mean()
    known = -GAS_CONSTANT * 300 * np.log(p / (1 - p))
    assert abs(metrics.free_energy(truth.frames, truth.peptide, 300.0) - known) < 1e-9
    assert 1.5 < known < 4.5  # about 1 to 3: kT log 3 = 2.74
    lonely = truth.frames[metrics.basins(truth.frames, truth.peptide)[:, 0] == 0]
    assert metrics.free_energy(lonely, truth.peptide, 300.0) == np.inf


def test_the_slow_plane_finds_the_slow_torsion(truth):
    """Along its first axis the two phi are apart and the three psi together, though psi varies more."""
    first = truth.plane(truth.frames)[:, 0]
    positive = metrics.basins(truth.frames, truth.peptide)[:, 0] > 0.5
    between = abs(first[positive].mean() - first[~positive].mean())
    within = max(first[positive].std(), first[~positive].std())
    assert between > 10 * within
    shuffled = metrics.Truth(truth.peptide, 300.0, [truth.frames[np.random.default_rng(1).permutation(3000)]])
    first = shuffled.plane(truth.frames)[:, 0]
    between = abs(first[positive].mean() - first[~positive].mean())
    assert between < 10 * max(first[positive].std(), first[~positive].std())  # without time there is nothing slow


def test_pieces_shorter_than_the_lag_are_refused(truth):
    with pytest.raises(InputError, match="more than 8 continuous frames"):
        metrics.Truth(truth.peptide, 300.0, [truth.frames[:6]])


def test_halves_of_the_truth_are_near_and_a_missing_basin_is_far(truth):
    rng = np.random.default_rng(0)
    floor = metrics.between_halves(truth, 300, rng)
    collapsed = truth.frames[metrics.basins(truth.frames, truth.peptide)[:, 0] < 0.5]
    far = metrics.evaluate(truth, truth.frames, collapsed, 300, rng)
    for name in ("distance TVD", "W2", "TICA MMD"):
        assert far[name] > 1.3 * floor[name], name
    assert abs(floor["dF"]) < 1.5
    assert far["dF"] == np.inf
    stretched = metrics.evaluate(truth, truth.frames, 1.02 * truth.frames, 300, rng)
    assert stretched["energy TVD"] > floor["energy TVD"] + 0.3


def test_mirror_images_are_counted_and_cost_nothing_else(truth, tmp_path, monkeypatch):
    """Of two seeds, 50 of 200 and 0 of 100 samples are mirrored: a sixth is turned, and measured as the others are."""
    x = truth.frames[::10].astype(np.float32)
    mirrored = x.copy()
    mirrored[:50, :, 2] *= -1
    rows = {}
    for name, samples in (("plain", x), ("mirrored", mirrored)):
        for seed, piece in enumerate((samples[:200], samples[200:])):
            about = {"method": "CREPE, own", "seed": seed, "rows": 1}
            kept_draws(tmp_path / name).save(f"crepe-own {seed}", about, x=piece, family=np.arange(len(piece)))
        rows[name] = report.rows_of(truth, truth, tmp_path / name, 50)
    found = {name: [row.measured for row in pair] for name, pair in rows.items()}
    assert [(m.mixed, m.turned) for m in found["plain"]] == [(0, 0), (0, 0)]
    assert [(m.mixed, m.turned) for m in found["mirrored"]] == [(0, 0), (0, pytest.approx(1 / 6))]
    for a, b in zip(found["plain"][1].metrics, found["mirrored"][1].metrics, strict=True):
        assert a == pytest.approx(b, abs=1e-4)
    monkeypatch.setattr(report, "draw", lambda *given: None)
    report.write(rows["mirrored"], truth, tmp_path / "out")
    assert report.measured(tmp_path / "out") == found["mirrored"]
    text, m = (tmp_path / "out" / "table.md").read_text(), found["mirrored"]
    assert text == report.table(m, truth.peptide) + "\n" + report.population_table(m)


def test_errors_by_families_cover_and_those_by_draws_do_not():
    """Draws that repeat their family's value 20 times: 95 % intervals cover in 91 to 99 % of 400 trials."""
    rng = np.random.default_rng(0)
    family, covered, naive = np.repeat(np.arange(30), 20), 0, 0
    for _ in range(400):
        values = (rng.uniform(size=30) < 0.3).astype(float)[family][:, None]
        mean, error, size = metrics.by_families(values, family)
        covered += abs(mean[0] - 0.3) < 2.05 * error[0]
        naive += abs(mean[0] - 0.3) < 2.05 * values.std() / np.sqrt(len(values))
        assert size[0] < 31
    assert 364 <= covered <= 396
    assert naive < 300


def test_populations_are_those_of_the_frames():
    """Shares, energies and their errors of shipped frames, against numbers that are computed another way."""
    chosen, rng = peptide("dipeptide"), np.random.default_rng(0)
    x = np.concatenate([chosen.build(-60.0, -40.0)[1][None]] * 3 + [chosen.build(-120.0, 140.0)[1][None]])
    found = metrics.populations(x, np.arange(4), chosen, 10, rng)
    assert (found["alpha"][0], found["beta"][0], found["phi > 0"][0]) == (0.75, 0.25, 0.0)
    assert abs(found["alpha"][1] - np.sqrt(0.75 * 0.25 / 3)) < 1e-12
    u = metrics.energies(chosen, x[[0, 3]])
    assert abs(found["U"][0] - (3 * u[0] + u[1]) / 4) < 1e-6 * abs(u).max()
    assert abs(found["sd of U"][0] - abs(u[0] - u[1]) * np.sqrt(3) / 4) < 1e-6 * abs(u).max()


def test_atoms_on_top_of_one_another_are_counted_and_left_out_of_the_energy(truth):
    x = truth.frames[:40].copy()
    known = metrics.populations(x, np.arange(40), truth.peptide, 40, np.random.default_rng(0), truth.clash)
    assert known["clashes"][:2] == (0.0, 0.0)
    x = np.concatenate([x, x[:10]])
    x[40:, 5] = x[40:, 15] + 1e-3
    rng = np.random.default_rng(0)
    found = metrics.populations(x, np.arange(50), truth.peptide, 50, rng, truth.clash)
    assert found["clashes"][0] == 0.2
    assert abs(found["clashes"][1] - np.sqrt(0.2 * 0.8 / 49)) < 1e-12
    assert abs(found["U"][0] - known["U"][0]) < 1e-9 * abs(known["U"][0])
    assert metrics.populations(x, np.arange(50), truth.peptide, 50, rng)["U"][0] > known["U"][0] + 1000
    assert np.isnan(metrics.populations(x[40:], np.arange(10), truth.peptide, 10, rng, truth.clash)["U"][0])


def test_bonds_of_many_frames_are_those_of_few():
    """Fixed bonds have no spread, however many frames there are: sums in float32 gave them one from 100,000 on."""
    chosen = peptide("dipeptide")
    tiny = Path(str(files("studies.molecules") / "tiny-data"))
    few = np.concatenate(read_trajectories(tiny, chosen, chosen.cold, equilibration=0.0))
    shift, spread = report.bond_errors(chosen, np.tile(few, (400, 1, 1)), few)
    assert shift < 1e-7
    assert abs(spread - 1) < 1e-6
