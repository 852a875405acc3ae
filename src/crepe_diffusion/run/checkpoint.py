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
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from crepe_diffusion.diagnostics.starting import StartingPass
from crepe_diffusion.errors import InputError
from crepe_diffusion.run.files import (
    ASIDE,
    DamagedError,
    digest,
    encode_json,
    make_directory,
    move,
    publish_all,
    read_bounded,
    read_json,
    remove,
)
from crepe_diffusion.run.store import Sealed
from crepe_diffusion.samplers.base import Continuing

__all__ = ["Position", "load", "newest", "reported", "run_name", "verify", "write"]

SCHEMA = 3
N_KEPT = 2


@dataclass(frozen=True)
class Position:
    """Where a run stands: how much of each file belongs to it, and under which target of its history it samples.

    `run` is the run's own name, random and in all of its files; `seals` are those of the chunks of samples so far.
    """

    run: str
    iteration: int
    n_draws: int
    n_steps: int
    target: int
    seconds: float
    config_hash: str
    next_look: int
    ess_seen: float
    history: list[dict[str, Any]]
    seals: dict[str, list[int]]

    @property
    def samples(self) -> Sealed:
        return Sealed(f"checkpoints/{_name(self.iteration)}", self.run, self.n_draws, self.n_steps, self.seals)


def _name(iteration: int) -> str:
    return f"{iteration:08d}"


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
    final = root / _name(position.iteration)
    if final.exists():  # the same iteration of the same run: the same state
        return
    aside = root / (ASIDE + final.name)
    shutil.rmtree(aside, ignore_errors=True)
    make_directory(aside)
    # What a report needs is usually part of the snapshot too, and then written once.
    state = {name: value for name, value in snapshot.items() if not same(value, reported.get(name))}
    contents = {
        aside / "state.safetensors": safetensors.torch.save(state),
        aside / "diagnostics.safetensors": safetensors.torch.save(_kept(reported)),
    }
    checksums = {path.name: digest(content) for path, content in contents.items()}
    sizes = {path.name: len(content) for path, content in contents.items()}
    summary = {"schema": SCHEMA, **asdict(position), "files": checksums, "sizes": sizes}
    publish_all({**contents, aside / "state.json": encode_json(summary)})
    move(aside, final)
    for old in _all(folder)[N_KEPT:]:
        remove(old)


FILES = ("diagnostics.safetensors", "state.safetensors")  # of two tensors of one name, that of the state counts


def run_name(folder: Path) -> str | None:
    """The name that the run gave itself, if its `run.json` can be read."""
    try:
        return str(read_json(folder / "run.json").get("run", ""))
    except (OSError, DamagedError):
        return None


def load(path: Path, *, only_reported: bool = False, run: str | None = None) -> tuple[Position, dict[str, Tensor]]:
    """A checkpoint with every byte verified, of this run if it is given, or a `DamagedError` that names the file."""
    where = path / "state.json"
    try:
        state = read_json(where)
        if state["schema"] != SCHEMA:
            raise InputError(f"{path} was written in schema {state['schema']}; this version reads {SCHEMA} only")
        checksums = [(name, state["files"][name]) for name in FILES]
        position = Position(**{name: state[name] for name in Position.__dataclass_fields__})
    except OSError as error:
        raise DamagedError(where, f"missing or unreadable ({error.strerror})") from None
    except (KeyError, TypeError) as error:
        raise DamagedError(where, f"not a checkpoint of ours ({error!r})") from None
    if _name(position.iteration) != path.name:
        raise DamagedError(where, f"a checkpoint of iteration {position.iteration}, not of this one")
    if run is not None and position.run != run:
        raise DamagedError(where, "belongs to another run")
    tensors: dict[str, Tensor] = {}
    for name, checksum in checksums:
        if only_reported and name != "diagnostics.safetensors":
            continue
        try:
            # Checkpoints of earlier versions hold no sizes.
            content = read_bounded(path / name, state.get("sizes", {}).get(name) or os.path.getsize(path / name))
        except OSError as error:
            raise DamagedError(path / name, f"missing or unreadable ({error.strerror})") from None
        if digest(content) != checksum:
            raise DamagedError(path / name, "its content does not match its checksum")
        tensors |= safetensors.torch.load(content)
    return position, tensors


def newest(
    folder: Path, notify: Callable[[DamagedError], None], *, only_reported: bool = False
) -> tuple[Path, Position, dict[str, Tensor]]:
    """The newest checkpoint that is whole; `notify` is called with the error of every one that is not."""
    damaged: list[Path] = []
    run = _agreed_name(folder)
    while True:
        left = [path for path in _all(folder) if path not in damaged]
        if not left:
            raise DamagedError(folder / "checkpoints", "holds no checkpoint that is whole")
        try:
            return left[0], *load(left[0], only_reported=only_reported, run=run)
        except DamagedError as error:
            damaged.append(left[0])
            # A running process may have replaced the checkpoint while it was read.
            if left[0].exists():
                notify(error)


def _agreed_name(folder: Path) -> str | None:
    """The run's name; where it is that of none of the checkpoints, it is `run.json` that came from elsewhere."""
    run, others = run_name(folder), set()
    for path in _all(folder):
        with suppress(OSError, DamagedError):
            others.add(read_json(path / "state.json").get("run"))
    if run is not None and others and run not in others:
        raise DamagedError(folder / "run.json", "belongs to another run than the checkpoints")
    return run


def whole(folder: Path) -> list[tuple[Position, dict[str, Tensor]]]:
    """All checkpoints that are whole, newest first."""
    run, out = _agreed_name(folder), []
    for path in _all(folder):
        with suppress(DamagedError):
            out.append(load(path, run=run))
    return out


def path_of(folder: Path, iteration: int) -> Path:
    return folder / "checkpoints" / _name(iteration)


def set_aside(path: Path) -> None:
    """Keep a damaged checkpoint for inspection, under a name by which it is never loaded."""
    other = path.with_name(f"damaged-{path.name}")
    remove(other)
    move(path, other)


def verify(folder: Path) -> list[DamagedError]:
    """Everything that is wrong with the checkpoints."""
    errors = []
    try:
        run = _agreed_name(folder)
    except DamagedError as error:
        errors.append(error)
        run = None
    for path in _all(folder):
        try:
            load(path, run=run)
        except DamagedError as error:
            if path.exists():
                errors.append(error)
    return errors if _all(folder) else [DamagedError(folder / "checkpoints", "holds no checkpoint")]


def same(a: Tensor, b: Tensor | None) -> bool:
    """Bit for bit."""
    return b is not None and a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


def _kept(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}


def newest_iteration(folder: Path) -> int:
    """Of the newest checkpoint, whole or not; -1 if there is none."""
    return max((int(path.name) for path in _all(folder)), default=-1)


def _all(folder: Path) -> list[Path]:
    root = folder / "checkpoints"
    names = os.listdir(root) if root.is_dir() else []
    return [root / name for name in sorted((n for n in names if re.fullmatch(r"\d{8,}", n)), key=int, reverse=True)]
