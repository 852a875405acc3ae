"""Frames of molecular dynamics as arrays."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path

import mdtraj
import numpy as np

from crepe_diffusion.errors import InputError
from crepe_diffusion.experiments.molecules.dynamics import BLOCK, INTERVAL, rungs
from crepe_diffusion.experiments.molecules.geometry import bonds, methyls, relabelled
from crepe_diffusion.experiments.molecules.peptides import Peptide

__all__ = ["load", "split"]


def load(
    data: Path, peptide: Peptide, temperature: float, equilibration: float = 500.0, most: float | None = None
) -> list[np.ndarray]:
    """Each trajectory at this temperature as (frames, atoms, 3) in nm, a whole number of blocks.

    Frames are centred, and the hydrogens of methyl groups named in one sense. `most` is the length in ps after which a
    trajectory is cut, so that two runs may read the same frames while dynamics go on.
    """
    skip = round(equilibration / INTERVAL / BLOCK) * BLOCK
    out, groups = [], methyls(bonds(peptide))
    for path in rungs(data, peptide, temperature):
        with _silent():
            frames = mdtraj.load_dcd(str(path), top=str(path.with_name("topology.pdb"))).xyz
        end = len(frames) if most is None else round(most / INTERVAL)
        frames = frames[skip : end // BLOCK * BLOCK]
        if len(frames):
            out.append(relabelled(frames - frames.mean(1, keepdims=True), groups))
    if not out:
        raise InputError(
            f"the trajectories of the {peptide.name} at {temperature:g} K are shorter than the {equilibration:g} ps "
            "that are left out at their start; run `md` for longer"
        )
    return out


def split(trajectories: list[np.ndarray], share: float = 0.05) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation frames: the last `share` of each trajectory is held out, being its least correlated."""
    cuts = [round(len(t) * (1 - share)) for t in trajectories]
    train = np.concatenate([t[:cut] for t, cut in zip(trajectories, cuts, strict=True)])
    return train, np.concatenate([t[cut:] for t, cut in zip(trajectories, cuts, strict=True)])


@contextmanager
def _silent():  # type: ignore[no-untyped-def]
    """mdtraj's DCD reader greets on the process's standard output, below Python."""
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
