"""Frames of molecular dynamics as arrays."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path

import mdtraj
import numpy as np

from crepe_diffusion import InputError
from studies.molecules import trajectory
from studies.molecules.dynamics import BLOCK, INTERVAL, rungs, walkers
from studies.molecules.geometry import bonds, methyls, relabelled
from studies.molecules.peptides import Peptide

__all__ = ["read_trajectories", "read_walkers", "split", "subset"]


def read_trajectories(
    data: Path,
    peptide: Peptide,
    temperature: float,
    equilibration: float = 500.0,
    most: float | None = None,
    walker: int | None = None,
) -> list[np.ndarray]:
    """Each trajectory at this temperature as (frames, atoms, 3) in nm, a whole number of blocks.

    Frames are centred, and the hydrogens of methyl groups named in one sense. `most` is the length in ps after which a
    trajectory is cut, so that two runs may read the same frames while dynamics go on; `walker` chooses one of them.
    """
    out = _frames(rungs(data, peptide, temperature, walker), peptide, equilibration, most)
    if not out:
        raise _too_short(peptide, temperature, equilibration)
    return out


def read_walkers(
    data: Path, peptide: Peptide, temperature: float, equilibration: float = 500.0
) -> list[list[np.ndarray]]:
    """What `read_trajectories` reads, walker by walker; those that are not beyond equilibration are left out."""
    paths = [rungs(data, peptide, temperature, walker) for walker in walkers(data, peptide, temperature)]
    out = [frames for frames in (_frames(p, peptide, equilibration) for p in paths) if frames]
    if not out:
        raise _too_short(peptide, temperature, equilibration)
    return out


def _frames(paths: list[Path], peptide: Peptide, equilibration: float, most: float | None = None) -> list[np.ndarray]:
    skip = round(equilibration / INTERVAL / BLOCK) * BLOCK
    out, groups = [], methyls(bonds(peptide))
    for path in paths:
        with _silent():
            frames = mdtraj.load_dcd(str(path), top=str(path.with_name("topology.pdb"))).xyz
        end = len(frames) if most is None else round(most / INTERVAL)
        frames = frames[skip : end // BLOCK * BLOCK]
        if len(frames):
            out.append(relabelled(frames - frames.mean(1, keepdims=True), groups))
    return out


def _too_short(peptide: Peptide, temperature: float, equilibration: float) -> InputError:
    return InputError(
        f"the trajectories of the {peptide.name} at {temperature:g} K are shorter than the {equilibration:g} ps "
        "that are left out at their start; run `md` for longer"
    )


def split(trajectories: list[np.ndarray], share: float = 0.05) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation frames: the last `share` of each trajectory is held out, being its least correlated."""
    cuts = [round(len(t) * (1 - share)) for t in trajectories]
    train = np.concatenate([t[:cut] for t, cut in zip(trajectories, cuts, strict=True)])
    return train, np.concatenate([t[cut:] for t, cut in zip(trajectories, cuts, strict=True)])


def subset(data: Path, peptide: Peptide, folder: Path, n_blocks: int, equilibration: float = 500.0) -> list[Path]:
    """Blocks from all over the hot and the cold trajectories, as `read_trajectories` takes them; the files written."""
    here = folder / peptide.name / "walker-0"
    here.mkdir(parents=True, exist_ok=True)
    first = rungs(data, peptide, peptide.cold)[0].with_name("topology.pdb")
    written = [here / "topology.pdb"]
    written[0].write_bytes(first.read_bytes())
    for rung, temperature in enumerate((peptide.cold, peptide.hot)):
        frames = np.concatenate(read_trajectories(data, peptide, temperature, equilibration))
        blocks = frames.reshape(-1, BLOCK, *frames.shape[1:])
        if len(blocks) < n_blocks:
            raise InputError(f"{n_blocks} blocks are wanted at {temperature:g} K, and there are {len(blocks)}")
        chosen = blocks[np.linspace(0, len(blocks) - 1, n_blocks).astype(int)]
        path = here / f"{rung}-{temperature:g}K.dcd"
        path.unlink(missing_ok=True)
        trajectory.append(path, chosen.reshape(-1, *frames.shape[1:]), INTERVAL)
        written.append(path)
    return written


@contextmanager
def _silent():  # type: ignore[no-untyped-def]
    """mdtraj's DCD reader prints a greeting to the process's standard output, below Python."""
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
