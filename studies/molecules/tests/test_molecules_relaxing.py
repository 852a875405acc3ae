"""A few picoseconds of dynamics mend energies, at the temperature that was asked for, and keep what they did."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from crepe_diffusion import InputError
from studies.molecules import data, relaxing
from studies.molecules.peptides import energies, peptide
from studies.molecules.tempering import kept_draws

PEPTIDE = peptide("dipeptide")
FRAMES = Path(str(files("studies.molecules") / "tiny-data"))


def noised(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Cold frames, and the same with each atom moved by a hundredth of a nanometre."""
    cold = np.concatenate(data.read_trajectories(FRAMES, PEPTIDE, PEPTIDE.cold, equilibration=0.0))
    some = cold[np.linspace(0, len(cold) - 1, n).astype(int)]
    return cold, some + 0.01 * np.random.default_rng(0).standard_normal(some.shape).astype(np.float32)


def test_energies_become_those_of_the_temperature():
    cold, x = noised(32)
    truth = energies(PEPTIDE, cold)
    assert np.median(energies(PEPTIDE, x)) > truth.mean() + 30 * truth.std()
    frames = relaxing.relaxed(PEPTIDE, x, PEPTIDE.cold)
    late = energies(PEPTIDE, frames[:, 9])
    error = np.hypot(late.std(), truth.std()) / np.sqrt(len(late))
    assert abs(late.mean() - truth.mean()) < 3 * error < 10
    hot = energies(PEPTIDE, relaxing.relaxed(PEPTIDE, x[:16], PEPTIDE.hot)[:, 9])
    assert hot.mean() - truth.mean() > 10 * error  # another temperature has other energies


def test_draws_are_kept_with_their_families_and_what_was_done(tmp_path: Path):
    _, x = noised(24)
    record = {"method": "CREPE, own", "seed": 3, "rows": 100}
    kept_draws(tmp_path / "a").save("crepe-own 3", record, x=x, family=np.arange(24) // 4)
    assert list(relaxing.relax(PEPTIDE, tmp_path / "a", tmp_path / "b", ps=5, n=8)) == ["crepe-own-3"]
    kept = kept_draws(tmp_path / "b")
    found, arrays = kept["crepe-own-3"], kept.arrays("crepe-own-3")
    rows = np.linspace(0, 23, 8).astype(int)
    assert found | record == found
    assert found["relaxed"] == 5
    assert arrays["family"].tolist() == (rows // 4).tolist()
    again = relaxing.relaxed(PEPTIDE, x[rows], PEPTIDE.cold, seed=3)[:, 4]
    assert np.abs(arrays["x"] - (again - again.mean(1, keepdims=True))).max() < 1e-5
    assert found["median U"][0] == pytest.approx(np.median(energies(PEPTIDE, x[rows])))
    assert found["median U"][3] == pytest.approx(np.median(energies(PEPTIDE, again)), abs=0.1)
    line = relaxing.table([found]).splitlines()[-1]
    assert f"| {found['median U'][3]:,.0f} |" in line
    with pytest.raises(InputError, match="whole number from 1 to 20, got 21"):
        list(relaxing.relax(PEPTIDE, tmp_path / "a", tmp_path / "c", ps=21, n=8))
    with pytest.raises(InputError, match="run `temper` first"):
        list(relaxing.relax(PEPTIDE, tmp_path / "c", tmp_path / "d", ps=5, n=8))
