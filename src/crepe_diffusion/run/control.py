"""Requests to a run, left in its folder: handled between two iterations if it is running, else on resume.

control/<id>.json           a request, published whole
control/<id>.answer.json    what became of it
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from crepe_diffusion.errors import InputError
from crepe_diffusion.run.configured import merged, nearest
from crepe_diffusion.run.files import (
    ASIDE,
    DamagedError,
    decode_json,
    make_directory,
    read_bounded,
    read_json,
    write_json,
)
from crepe_diffusion.run.trust import named_code, signature

__all__ = ["Request", "answer", "await_answer", "leave", "pending", "refined"]

MOST_BYTES = 2**20
"""Of one request: anything larger is not a few reward terms."""


@dataclass(frozen=True)
class Request:
    """Reward terms to add, names to remove, and new values of keys by name."""

    id: str
    add: Sequence[Mapping[str, Any]]
    remove: Sequence[str]
    change: Mapping[str, Mapping[str, Any]]
    trust: str = ""

    @property
    def code(self) -> list[str]:
        return named_code([list(self.add), self.change])


def refined(rewards: Sequence[Mapping[str, Any]], request: Request) -> list[dict[str, Any]]:
    """The reward tables after the request; names that do not fit are errors."""
    table = {r["name"]: dict(r) for r in rewards}
    for name in [*request.remove, *request.change]:
        if name not in table:
            raise InputError(f"no reward term {name!r}{nearest(name, table)} there are {', '.join(table) or 'none'}")
    for name in request.remove:
        table.pop(name, None)  # it may be named twice
    for name, values in request.change.items():
        if name in request.remove:
            raise InputError(f"reward {name!r} cannot be both removed and changed")
        table[name] = merged(table[name], values)
    for term in request.add:
        if term.get("name") in table:
            raise InputError(f"there is a reward {term['name']!r} already; change it, or choose another name")
        table[str(term.get("name"))] = dict(term)
    return list(table.values())


def leave(folder: Path, request: Request) -> Path:
    """Leave a request; the path is where `await_answer` looks."""
    # Requests are handled in the order of their names.
    name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}"
    request = replace(request, id=name, trust=signature(name, request.code))
    make_directory(folder / "control")
    path = folder / "control" / f"{request.id}.json"
    write_json(path, asdict(request))
    return path


def pending(folder: Path) -> list[tuple[Path, Request | DamagedError]]:
    """Requests without an answer, oldest first."""
    out: list[tuple[Path, Request | DamagedError]] = []
    for name in sorted(os.listdir(folder / "control")):
        path = folder / "control" / name
        if not name.endswith(".json") or name.endswith(".answer.json") or name.startswith(ASIDE):
            continue
        try:
            value = decode_json(path, read_bounded(path, MOST_BYTES))
            out.append((path, Request(**{f: value[f] for f in Request.__dataclass_fields__})))
        except DamagedError as error:
            out.append((path, error))
        except (KeyError, TypeError):
            out.append((path, DamagedError(path, "not a request")))
        except OSError:
            continue
    return out


def answer(path: Path, accepted: bool, text: str) -> None:
    """Write what became of a request, and take it away."""
    write_json(path.with_suffix(".answer.json"), {"accepted": accepted, "text": text})
    path.unlink(missing_ok=True)


def await_answer(path: Path, seconds: float) -> tuple[bool, str] | None:
    """What became of a request, if that is known in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            value = read_json(path.with_suffix(".answer.json"))
            return bool(value["accepted"]), str(value["text"])
        except (OSError, DamagedError):
            time.sleep(0.05)
    return None
