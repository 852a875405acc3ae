"""A copy of a run without its damaged chunks: what is lost is named, all else is as it was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from crepe_diffusion.errors import InputError
from crepe_diffusion.run import checkpoint
from crepe_diffusion.run.files import DamagedError, make_directory, read_json, write_json
from crepe_diffusion.run.folder import require_run
from crepe_diffusion.run.log import Log
from crepe_diffusion.run.store import Column, Store, arrays_of, bad_chunks, chunk_rows, read_manifest, seals_of

__all__ = ["copy_without_damage"]


def copy_without_damage(folder: str | Path, new: str | Path) -> list[str]:
    """Copy a run, leaving out the rows of every chunk that is damaged; returns what was lost.

    The damaged run stays as it is. Draws, or rows of the trace, are left out in all of their arrays, so that those
    that remain belong together; `iteration` shows where some are missing, and notes of a report tell it. The copy can
    be resumed: a checkpoint does not depend on the draws before it.
    """
    folder, new = Path(folder), Path(new)
    require_run(folder)
    if new.exists() and (not new.is_dir() or os.listdir(new)):
        raise InputError(f"{new} is not an empty folder: give the name of a new folder for the copy")
    root = folder / "samples.zarr"
    manifest = read_manifest(root)
    found = checkpoint.whole(folder)
    if not found:
        raise DamagedError(folder / "checkpoints", "holds no checkpoint that is whole")
    tables, kept, lost = {}, {}, []
    for prefix, what in (("", "draws"), ("trace/", "rows of the trace")):
        names = [name for name in arrays_of(manifest) if name.startswith("trace/") == bool(prefix)]
        bad = {name: bad_chunks(root, manifest, name, found[0][0].samples) for name in names}
        n = arrays_of(manifest)[names[0]]["shape"][0]
        block = arrays_of(manifest)[names[0]]["chunk_grid"]["configuration"]["chunk_shape"][0]
        gone = sorted(set().union(*(set(chunks) for chunks in bad.values())))
        keep = np.ones(n, dtype=bool)
        for index in gone:
            keep[index * block : (index + 1) * block] = False
        tables[prefix] = {name[len(prefix) :]: chunk_rows(root, manifest, name, gone) for name in names}
        kept[prefix] = keep
        for index in gone:
            files = ", ".join(f"{name}: {bad[name][index]}" for name in names if index in bad[name])
            rows = min(n, (index + 1) * block) - index * block
            lost.append(f"lost: {rows} {what}, {index * block + 1} to {index * block + rows} of {n} ({files})")
    if not lost:
        return []
    _write(folder, new, manifest, tables, kept, lost, found)
    return lost


def _write(
    folder: Path,
    new: Path,
    manifest: dict[str, Any],
    tables: Mapping[str, Mapping[str, np.ndarray]],
    kept: Mapping[str, np.ndarray],
    lost: list[str],
    found: list[tuple[checkpoint.Position, Any]],
) -> None:
    make_directory(new / "control")
    columns = {
        prefix: {name: Column.of(arrays_of(manifest)[prefix + name]) for name in table}
        for prefix, table in tables.items()
    }
    store = Store(new / "samples.zarr", columns[""], columns["trace/"], manifest["attributes"]["run"])
    store.generation = int(manifest["attributes"]["generation"]) + 1
    store.lost = [*manifest["attributes"].get("lost", []), *lost]
    store.create()
    store.draws.extend(tables[""])
    store.trace.extend(tables["trace/"])
    store.flush()
    for position, _ in found:
        path = checkpoint.path_of(folder, position.iteration)
        copy = checkpoint.path_of(new, position.iteration)
        shutil.copytree(path, copy)
        n_draws, n_steps = int(kept[""][: position.n_draws].sum()), int(kept["trace/"][: position.n_steps].sum())
        seals = {
            **seals_of(store.draws, tables[""], n_draws),
            **seals_of(store.trace, tables["trace/"], n_steps),
        }
        state = read_json(path / "state.json")
        write_json(copy / "state.json", {**state, "n_draws": n_draws, "n_steps": n_steps, "seals": seals})
    # The configuration last: it makes a run of the folder.
    for name in ("log.txt", "targets.json", "outcome.json", "run.json", "config.toml"):
        if (folder / name).exists():
            shutil.copy(folder / name, new / name)
    log = Log(new / "log.txt")
    for text in lost:
        log.session(text)
