"""Checkpoints: all of a chain's state in a directory that appears in one step, and is read against checksums.

checkpoints/00000120/state.json                 where the run stands, and the checksums of the other two
checkpoints/00000120/state.safetensors          the sampler's snapshot
checkpoints/00000120/diagnostics.safetensors    ladder, counts and diagnostics: all that a report needs
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

from crepe_diffusion.diagnostics.starting import StartingPass
from crepe_diffusion.errors import InputError
from crepe_diffusion.run.files import ASIDE, DamagedError, digest, encode_json, publish_all, read_json, sync_directory
from crepe_diffusion.samplers.base import Continuing

__all__ = ["Position", "load", "newest", "reported", "verify", "write"]

SCHEMA = 2
N_KEPT = 2


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


def reported(sampler: Continuing[Any]) -> dict[str, Tensor]:
    """What a report needs of a sampler besides its draws."""
    parts = {"ladder": sampler.ladder.state_dict(), "counts": sampler.evaluate.counts.state_dict()}
    if sampler.diagnostics is not None:
        parts["diagnostics"] = sampler.diagnostics.state_dict()
    started_from: StartingPass | None = getattr(sampler, "started_from", None)
    if started_from is not None:
        parts["pilot"] = started_from.state_dict()
    return {f"{part}.{name}": value for part, state in parts.items() for name, value in state.items()}


def write(folder: Path, position: Position, snapshot: dict[str, Tensor], reported: dict[str, Tensor]) -> None:
    """Publish a checkpoint and forget all but the last two; a crash at any moment leaves the earlier ones."""
    root = folder / "checkpoints"
    final = root / f"{position.iteration:08d}"
    if final.exists():  # the same iteration of the same run: the same state
        return
    aside = root / (ASIDE + final.name)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    # What a report needs is usually part of the snapshot too, and then written once.
    state = {name: value for name, value in snapshot.items() if not _same(value, reported.get(name))}
    contents = {
        aside / "state.safetensors": safetensors.torch.save(state),
        aside / "diagnostics.safetensors": safetensors.torch.save(_kept(reported)),
    }
    checksums = {path.name: digest(content) for path, content in contents.items()}
    summary = {"schema": SCHEMA, **asdict(position), "files": checksums}
    publish_all({**contents, aside / "state.json": encode_json(summary)})
    sync_directory(aside)
    os.rename(aside, final)
    sync_directory(root)
    for old in _all(folder)[N_KEPT:]:
        # It disappears in one step too: a reader finds all of it or nothing.
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
        raise InputError(f"{path} was written in schema {state['schema']}; this version reads {SCHEMA} only")
    tensors: dict[str, Tensor] = {}
    for name, checksum in sorted(state["files"].items()):  # of two of one name, that of the state counts
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
    folder: Path, notify: Callable[[DamagedError], None], *, only_reported: bool = False
) -> tuple[Path, Position, dict[str, Tensor]]:
    """The newest checkpoint that is whole; `notify` is called with the error of every one that is not."""
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
                notify(error)


def set_aside(path: Path) -> None:
    """Keep a damaged checkpoint for inspection, under a name by which it is never loaded."""
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


def _same(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


def _kept(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}


def _all(folder: Path) -> list[Path]:
    root = folder / "checkpoints"
    names = os.listdir(root) if root.is_dir() else []
    return [root / name for name in sorted((n for n in names if re.fullmatch(r"\d{8,}", n)), key=int, reverse=True)]
