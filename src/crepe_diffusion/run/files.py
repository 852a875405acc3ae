"""Files that are whole or absent: written aside, synced, published by one rename, and read against a checksum."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = [
    "DamagedError",
    "clear_leftovers",
    "digest",
    "publish",
    "publish_all",
    "read_json",
    "sync_directory",
    "write_json",
]

ASIDE = ".partial-"
CHECKSUM = "checksum"


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
        _aside(path).write_bytes(content)
    if sync and len(contents) > 1:
        # Each sync waits for the disk; together they wait about as long as one or two.
        with ThreadPoolExecutor(min(16, len(contents))) as pool:
            list(pool.map(_sync, map(_aside, contents)))
    elif sync:
        for path in contents:
            _sync(_aside(path))
    for path in contents:
        os.replace(_aside(path), path)


def _aside(path: Path) -> Path:
    return path.with_name(ASIDE + path.name)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_directory(path: Path) -> None:
    """Make the renames in this directory survive a power failure, where the system can."""
    with suppress(OSError):  # some systems do not open directories
        _sync(path)


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
    """The value that `write_json` wrote; anything else is a `DamagedError`. FileNotFoundError passes through."""
    return decode_json(path, path.read_bytes())


def decode_json(path: Path, content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content.decode("ascii"))
    except ValueError as error:
        raise DamagedError(path, f"not the JSON that was written ({error})") from None
    if not isinstance(value, dict) or value.get(CHECKSUM) != sealed(value)[CHECKSUM]:
        raise DamagedError(path, "its content does not match its checksum")
    return value
