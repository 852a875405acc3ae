"""Checkpoints: all of a chain's state in a directory that appears at one stroke, and is read against checksums.

checkpoints/00000120/state.json                 where the run stands, and the checksums of the other two
checkpoints/00000120/state.safetensors          replicas with what is known of them
checkpoints/00000120/diagnostics.safetensors    what was recorded: all that a report needs
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from crepe_diffusion.run.files import ASIDE, DamagedError, digest, encode_json, publish_all, read_json, sync_directory

__all__ = ["Position", "load", "newest", "verify", "write"]

SCHEMA = 1
N_KEPT = 2
REPORTED = ("diagnostics.", "counts.", "setup.", "ladder.")


@dataclass(frozen=True)
class Position:
    """Where a run stands: how much of each file belongs to it, and under which target of its history it samples."""

    iteration: int
    n_draws: int
    n_steps: int
    target: int
    seconds: float
    config_hash: str
    next_look: int
    ess_seen: float
    history: list[dict[str, Any]]


def write(folder: Path, position: Position, tensors: dict[str, Tensor]) -> None:
    """Publish a checkpoint and forget all but the last two; a crash at any moment leaves the earlier ones."""
    root = folder / "checkpoints"
    final = root / f"{position.iteration:08d}"
    if final.exists():  # the same iteration of the same run: the same state
        return
    aside = root / (ASIDE + final.name)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    reported = {name: value for name, value in tensors.items() if name.startswith(REPORTED)}
    state = {name: value for name, value in tensors.items() if name not in reported}
    contents = {
        aside / "state.safetensors": safetensors.torch.save(state),
        aside / "diagnostics.safetensors": safetensors.torch.save(reported),
    }
    checksums = {path.name: digest(content) for path, content in contents.items()}
    summary = {"schema": SCHEMA, **asdict(position), "files": checksums}
    publish_all({**contents, aside / "state.json": encode_json(summary)})
    sync_directory(aside)
    os.rename(aside, final)
    sync_directory(root)
    for old in _all(folder)[N_KEPT:]:
        # It disappears at one stroke too: a reader finds all of it or nothing.
        gone = old.with_name(f"{ASIDE}old-{old.name}")
        os.rename(old, gone)
        shutil.rmtree(gone, ignore_errors=True)


def load(path: Path, *, only_reported: bool = False) -> tuple[Position, dict[str, Tensor]]:
    """A checkpoint with every byte verified, or a `DamagedError` that names the file."""
    try:
        state = read_json(path / "state.json")
    except OSError as error:
        raise DamagedError(path / "state.json", f"missing or unreadable ({error.strerror})") from None
    if state["schema"] != SCHEMA:
        raise DamagedError(path / "state.json", f"written in schema {state['schema']}, this version reads {SCHEMA}")
    tensors: dict[str, Tensor] = {}
    for name, checksum in state["files"].items():
        if only_reported and name != "diagnostics.safetensors":
            continue
        try:
            content = (path / name).read_bytes()
        except OSError as error:
            raise DamagedError(path / name, f"missing or unreadable ({error.strerror})") from None
        if digest(content) != checksum:
            raise DamagedError(path / name, "its content does not match its checksum")
        tensors |= safetensors.torch.load(content)
    fields: dict[str, Any] = {name: state[name] for name in Position.__dataclass_fields__}
    return Position(**fields), tensors


def newest(
    folder: Path, tell: Callable[[DamagedError], None], *, only_reported: bool = False
) -> tuple[Path, Position, dict[str, Tensor]]:
    """The newest checkpoint that is whole; `tell` hears of every one that is not."""
    damaged: list[Path] = []
    while True:
        left = [path for path in _all(folder) if path not in damaged]
        if not left:
            raise DamagedError(folder / "checkpoints", "holds no checkpoint that is whole")
        try:
            return left[0], *load(left[0], only_reported=only_reported)
        except DamagedError as error:
            damaged.append(left[0])
            # A running process may have replaced the checkpoint while it was read.
            if left[0].exists():
                tell(error)


def set_aside(path: Path) -> None:
    """Keep a damaged checkpoint for a look, under a name by which it is never loaded."""
    other = path.with_name(f"damaged-{path.name}")
    shutil.rmtree(other, ignore_errors=True)
    os.rename(path, other)


def verify(folder: Path) -> list[DamagedError]:
    """Everything that is wrong with the checkpoints."""
    errors = []
    for path in _all(folder):
        try:
            load(path)
        except DamagedError as error:
            if path.exists():
                errors.append(error)
    return errors if _all(folder) else [DamagedError(folder / "checkpoints", "holds no checkpoint")]


def _all(folder: Path) -> list[Path]:
    root = folder / "checkpoints"
    names = os.listdir(root) if root.is_dir() else []
    return [root / name for name in sorted((n for n in names if re.fullmatch(r"\d{8,}", n)), key=int, reverse=True)]
