"""Trajectories on disk: DCD files that grow frame by frame and can be cut back to a known number of frames.

DCD holds float32 coordinates in a frame of fixed size, so a file that was being written when its process died is made
whole again by cutting it at the last frame that the checkpoint counts. mdtraj, VMD and others read it.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from crepe_diffusion import InputError

__all__ = ["append", "n_frames", "truncate"]

HEADER = 276  # bytes: a block of 84, a title of two lines, a block with the number of atoms
COUNTS = (8, 20)  # where the header keeps the number of frames and of the last step
ANGSTROM = 10.0  # per nm; DCD is in angstroms


def append(path: Path, frames: np.ndarray, interval: float) -> None:
    """Add frames (frames, atoms, 3) in nm, `interval` ps apart; the file is begun if there is none."""
    n, n_atoms = frames.shape[:2]
    if not path.exists():
        path.write_bytes(_header(n_atoms, interval))
    record = np.zeros(n, dtype=_frame(n_atoms))
    for axis, name in enumerate("xyz"):
        record[name]["before"] = record[name]["after"] = 4 * n_atoms
        record[name]["values"] = frames[:, :, axis] * ANGSTROM
    with path.open("r+b") as file:
        end = file.seek(0, 2)
        file.write(record.tobytes())
        _count(file, (end - HEADER) // record.itemsize + n)


def truncate(path: Path, n: int, n_atoms: int) -> None:
    """Cut the file back to its first n frames, whatever lies behind them."""
    wanted = HEADER + n * _frame(n_atoms).itemsize
    size = path.stat().st_size if path.exists() else 0
    if size < wanted:
        raise InputError(f"{path} should hold at least {n} frames ({wanted} bytes), and has {size} bytes")
    with path.open("r+b") as file:
        file.truncate(wanted)
        _count(file, n)


def n_frames(path: Path, n_atoms: int) -> int:
    """How many whole frames the file holds."""
    return (path.stat().st_size - HEADER) // _frame(n_atoms).itemsize


def _frame(n_atoms: int) -> np.dtype:
    axis = np.dtype([("before", "<i4"), ("values", "<f4", (n_atoms,)), ("after", "<i4")])
    return np.dtype([(name, axis) for name in "xyz"])


def _count(file, n: int) -> None:  # type: ignore[no-untyped-def]
    for offset in COUNTS:
        file.seek(offset)
        file.write(struct.pack("<i", n))


def _header(n_atoms: int, interval: float) -> bytes:
    akma = interval / 4.888821e-2  # CHARMM's unit of time, in ps
    head = struct.pack("<i4s9if10i", 84, b"CORD", 0, 1, 1, 0, 0, 0, 0, 0, 0, akma, *[0] * 9, 24)
    title = struct.pack("<2i80s80s", 164, 2, b"Langevin dynamics".ljust(80), b"".ljust(80))
    return head + struct.pack("<i", 84) + title + struct.pack("<4i", 164, 4, n_atoms, 4)
