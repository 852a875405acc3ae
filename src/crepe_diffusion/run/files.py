"""Files that are whole or absent: written aside, synced, published by one rename, and read against a checksum.

write aside   sync the file   rename   sync the directory        each lasts before the next begins
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = [
    "DamagedError",
    "clear_leftovers",
    "digest",
    "make_directory",
    "move",
    "named",
    "publish",
    "publish_all",
    "read_bounded",
    "read_json",
    "remove",
    "sync_directories",
    "write_json",
]

ASIDE = ".partial-"
CHECKSUM = "checksum"
MOST_JSON = 2**26
"""No file of ours comes near to this; a larger one was not written by us, and is not read into memory."""


class DamagedError(RuntimeError):
    """A file of a run is not what was written; the message begins with its path."""

    def __init__(self, path: Path, what: str):
        super().__init__(f"{path}: {what}")
        self.path = path


def publish(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Replace a file in one step: a reader, or a crash, sees the old content or the new and nothing between.

    `sync` makes it survive a power failure too; without it only the process may die.
    """
    publish_all({path: content}, sync=sync)


def publish_all(contents: Mapping[Path, bytes], *, sync: bool = True) -> None:
    """Each file in one step, in order, none before all are written."""
    for path, content in contents.items():
        with named(path):
            _aside(path).write_bytes(content)
    if sync:
        _sync_all([_aside(path) for path in contents])
    for path in contents:
        with named(path):
            os.replace(_aside(path), path)
    if sync:
        sync_directories({path.parent for path in contents})


def make_directory(path: Path) -> None:
    """The directory and those above it, so that they survive a power failure."""
    missing = [p for p in (path, *path.parents) if not p.is_dir()]
    path.mkdir(parents=True, exist_ok=True)
    sync_directories({p.parent for p in missing})


def move(old: Path, new: Path) -> None:
    """Rename within a directory, so that it survives a power failure."""
    with named(new):
        os.rename(old, new)
    sync_directories({new.parent})


def remove(path: Path) -> None:
    """Remove a directory with all that is in it; a reader finds all of it or nothing, a crash leaves it or not."""
    gone = path.with_name(ASIDE + "gone-" + path.name)
    shutil.rmtree(gone, ignore_errors=True)
    if path.exists():
        move(path, gone)
        shutil.rmtree(gone, ignore_errors=True)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Errors of the system begin with the file that they are about: on a full disk they come without."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def _aside(path: Path) -> Path:
    return path.with_name(ASIDE + path.name)


def _sync_all(paths: Sequence[Path]) -> None:
    if len(paths) > 1:
        # Each sync waits for the disk; together they wait about as long as one or two.
        with ThreadPoolExecutor(min(16, len(paths))) as pool:
            list(pool.map(_sync, paths))
    else:
        for path in paths:
            _sync(path)


def _sync(path: Path) -> None:
    with named(path):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sync_directories(paths: Iterable[Path]) -> None:
    """Make the renames in these directories survive a power failure, where the system can."""
    with suppress(OSError):  # some systems neither open nor sync directories
        _sync_all(sorted(paths))


def clear_leftovers(root: Path) -> None:
    """Remove what an interrupted `publish` left behind."""
    for path in root.rglob(ASIDE + "*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def sealed(value: dict[str, Any]) -> dict[str, Any]:
    """The value with a checksum of everything else in it."""
    body = {k: v for k, v in value.items() if k != CHECKSUM}
    return {**body, CHECKSUM: digest(json.dumps(body, sort_keys=True).encode())}


def encode_json(value: dict[str, Any]) -> bytes:
    return (json.dumps(sealed(value), indent=1) + "\n").encode()


def write_json(path: Path, value: dict[str, Any]) -> None:
    publish(path, encode_json(value))


def read_json(path: Path) -> dict[str, Any]:
    """The value that `write_json` wrote; anything else is a `DamagedError`. Errors of the system pass through."""
    return decode_json(path, read_bounded(path))


def read_bounded(path: Path, most: int = MOST_JSON) -> bytes:
    """All of a file, unless it is larger than it can be, or a pipe, at which one would wait for ever."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise DamagedError(path, "not a file")
        content = file.read(most + 1)
    if len(content) > most:
        raise DamagedError(path, f"larger than the {most:,} bytes that it can have")
    return content


def decode_json(path: Path, content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise DamagedError(path, f"not the JSON that was written ({error})") from None
    if not isinstance(value, dict) or value.get(CHECKSUM) != sealed(value)[CHECKSUM]:
        raise DamagedError(path, "its content does not match its checksum")
    return value
