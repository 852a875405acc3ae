"""The tilt by torsions: against ratios that are known, mdtraj's angles, and a tempered law."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import crepe_diffusion as cd
from checks import refuted
from crepe_diffusion import InputError
from studies.molecules import data, mending
from studies.molecules.geometry import backbone, dihedrals
from studies.molecules.peptides import peptide
from studies.molecules.tempering import Cooling

PEPTIDE = peptide("dipeptide")


@pytest.fixture(scope="module")
def frames():
    from importlib.resources import files

    hot = data.read_trajectories(files("studies.molecules") / "tiny-data", PEPTIDE, PEPTIDE.hot, 0.0)
    return np.concatenate(hot)


def test_angles_are_those_of_mdtraj(frames):
    """To rounding, sign included; a mirrored molecule has the opposite angles."""
    for name, atoms in backbone(PEPTIDE).items():
        found = mending.torsions(torch.from_numpy(frames).double(), torch.from_numpy(atoms.astype(np.int64))).numpy()
        assert np.abs(np.angle(np.exp(1j * (found - dihedrals(frames, atoms))))).max() < 1e-5, name
        mirrored = torch.from_numpy(frames * np.array([1, 1, -1])).double()
        back = mending.torsions(mirrored, torch.from_numpy(atoms.astype(np.int64))).numpy()
        assert np.abs(np.angle(np.exp(1j * (found + back)))).max() < 1e-5


def biased(frames: np.ndarray, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draws of the frames with weights that fall by e where phi > 0 or psi is near 0, and their log-weights for c."""
    phi, psi = (dihedrals(frames, backbone(PEPTIDE)[name])[:, 0] for name in ("phi", "psi"))
    log_ratio = 0.7 * np.sin(phi) - 0.5 * np.cos(psi)  # what c should be, but for a constant
    w = np.exp(-log_ratio)
    return np.random.default_rng(seed).choice(len(frames), n, p=w / w.sum()), log_ratio


def check_ratio(tilt: mending.Torsions, frames: np.ndarray, log_ratio: np.ndarray) -> None:
    """c follows the known ratio: slope 1, and little else."""
    c = tilt(torch.from_numpy(frames).double()).numpy()
    slope, _ = np.polyfit(log_ratio, c, 1)
    assert slope == pytest.approx(1, abs=0.15)
    assert np.std(c - log_ratio) < 0.25 < 0.6 * np.std(log_ratio)


def test_what_is_learned_is_the_ratio_of_densities(frames):
    """From 6,000 biased draws; the wrong way round, and a tilt that learned nothing, are refuted."""
    rows, log_ratio = biased(frames, 6000)
    tilt = mending.learned(PEPTIDE, frames[rows], frames)
    check_ratio(tilt, frames, log_ratio)
    refuted(check_ratio, mending.learned(PEPTIDE, frames, frames[rows]), frames, log_ratio)
    refuted(check_ratio, mending.learned(PEPTIDE, frames, frames), frames, log_ratio)
    text = mending.table(PEPTIDE, tilt, frames[rows], frames)
    shares = [[float(cell) for cell in line.split("|")[2:5]] for line in text.splitlines()[2:]]
    (model, weighted, truth) = np.array(shares)
    assert np.abs(weighted - truth).max() < 0.4 * np.abs(model - truth).max()


def test_nothing_is_tilted_by_more_than_the_limit():
    atoms = torch.arange(4)[None]
    tilt = mending.Torsions(atoms, atoms, atoms, torch.full((1, 24), 50.0), torch.full((1, 6), -50.0))
    x = torch.randn(1000, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert tilt(x).abs().max() <= 2 * mending.LIMIT


def test_a_power_raises_the_tilt_too(frames):
    """At level 0 the log of the target changes by beta c; the tilt to one hand stays as it is."""
    rows, _ = biased(frames, 2000)
    tilt = mending.learned(PEPTIDE, frames[rows], frames)
    model = cd.models.Denoiser(lambda y, t: y, (22, 3), sigma_range=(0.001, 1.0))
    x = torch.from_numpy(frames[:5]).double()
    plain = Cooling(2.5, alphas=((8, 6, 10, 14),))
    both = replace(plain, torsions=tilt).target(model)
    rewards = {r.name: r.scale * r.function(x) for r in both.rewards}
    assert torch.allclose(rewards["torsions"], 2.5 * tilt(x))
    (alone,) = plain.target(model).rewards
    assert torch.allclose(rewards["one hand"], alone.scale * alone.function(x))


def test_it_is_kept_and_read(frames, tmp_path):
    rows, _ = biased(frames, 500)
    tilt, path = mending.learned(PEPTIDE, frames[rows], frames), tmp_path / "torsions.safetensors"
    tilt.save(path, {"peptide": "dipeptide"})
    x = torch.from_numpy(frames[:50])
    assert (mending.load(path)(x) == tilt(x)).all()
    with pytest.raises(InputError, match="mend"):
        mending.load(_other(tmp_path))


def _other(folder):
    from studies.shared.training import save_tensors

    save_tensors(folder / "other.safetensors", {"a": torch.zeros(1)}, {})
    return folder / "other.safetensors"
