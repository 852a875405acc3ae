"""A configuration is code: which code a folder names, and whether this user began the run in it.

trust = HMAC(key of this user, what was begun and the code that it names)

A folder from elsewhere may name any function, `os:system` included, and resuming it would call that. So what a run
writes about the code it uses carries a signature with a key that lies in this user's own directory.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from crepe_diffusion.errors import InputError

__all__ = ["NAME", "check_links", "check_trust", "named_code", "signature"]

NAME = re.compile(r"[^\W\d][\w.-]*:[^\W\d]\w*")
"""What is imported: nothing else is, so that no code is overlooked."""
OWN = re.compile(r"crepe_diffusion\.(kernels|processes|proposals|samplers|schedules|stitching)\b.*")
"""What is in these rooms computes, and does nothing else."""


def named_code(value: Any) -> list[str]:
    """Every `package.module:name` in nested tables and lists, which a run would import."""

    def names(value: Any) -> Iterator[str]:
        if isinstance(value, str) and NAME.fullmatch(value):
            yield value
        elif isinstance(value, Mapping):
            for inner in value.values():
                yield from names(inner)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                yield from names(inner)

    return sorted({name for name in names(value) if not OWN.fullmatch(name)})


def signature(*parts: Any) -> str:
    """Of these values, by this user; "" where there is no place for a key."""
    key = _key()
    return hmac.new(key, json.dumps(parts).encode(), hashlib.sha256).hexdigest() if key else ""


def check_trust(what: object, given: object, *parts: Any) -> None:
    """Refuse code that somebody else named: `given` must be the signature of these values, the last is the code."""
    code = parts[-1]
    if code and (not given or not hmac.compare_digest(str(given), signature(*parts))):
        raise InputError(
            f"{what} names code that would be run here, {', '.join(map(repr, code))}, and was not written by you on"
            " this machine: look at it, then pass --trust (in Python, trust=True)"
        )


def _key() -> bytes:
    """Made on first use, readable by this user only."""
    root = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state")
    path = root / "crepe-diffusion" / "key"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(secrets.token_bytes(32))
        except FileExistsError:
            pass
        content = path.read_bytes()
        return content if len(content) == 32 else b""
    except (OSError, RuntimeError):  # no home, or one that cannot be written
        return b""


def check_links(folder: Path) -> None:
    """Refuse a folder in which a link leads out of it: what is read or replaced there would be somebody else's.

    Pipes and devices are refused too: whoever opens one may wait for ever.
    """
    root = folder.resolve()
    for place, directories, names in os.walk(folder):
        for name in [*directories, *names]:
            path = Path(place, name)
            with suppress(FileNotFoundError):  # a running process may have taken it away
                mode = path.lstat().st_mode
                if stat.S_ISLNK(mode) and not _resolved(path).is_relative_to(root):
                    raise InputError(f"{path} is a link that leads out of {folder}; put the file itself there")
                if not (stat.S_ISLNK(mode) or stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                    raise InputError(f"{path} is neither a file nor a folder")


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except RuntimeError:
        raise InputError(f"{path} is a link that leads back to itself") from None
