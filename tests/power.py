"""A disk that loses power: what may be left of a run if any subset of what was not synced is lost.

write, rename, mkdir, unlink   last for certain once the file, or the directory that names it, has been synced
"""

from __future__ import annotations

import os
import random
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from crepe_diffusion.run import files


@dataclass
class File:
    synced: bytes = b""
    content: bytes | None = None


@dataclass
class Directory:
    durable: dict[str, Any] = field(default_factory=dict)
    now: dict[str, Any] = field(default_factory=dict)
    pending: list[tuple[str, str, Any]] = field(default_factory=list)

    def change(self, name: str, node: Any, was: str = "") -> None:
        """From now on the name stands for this node, which had another name before; None removes it."""
        self.pending.append((name, was, node))
        _apply(self.now, (name, was, node))


def _apply(entries: dict[str, Any], change: tuple[str, str, Any]) -> None:
    name, was, node = change
    if was and entries.get(was) is node:
        del entries[was]
    if node is None:
        entries.pop(name, None)
    else:
        entries[name] = node


class Disk:
    """Plays the operations of a run again, up to some moment, and shows what a power cut may leave."""

    def __init__(self, root: Path, operations: list[tuple[Any, ...]]):
        self.root, self.top = root, Directory()
        for name, *arguments in operations:
            getattr(self, name)(*arguments)

    def _at(self, path: Path) -> Any:
        node: Any = self.top
        for name in path.relative_to(self.root).parts:
            node = node.now[name]
        return node

    def write(self, path: Path, content: bytes) -> None:
        folder = self._at(path.parent)
        if path.name not in folder.now:
            folder.change(path.name, File())
        folder.now[path.name].content = content

    def sync(self, path: Path) -> None:
        node = self._at(path)
        if isinstance(node, File):
            node.synced, node.content = node.content if node.content is not None else node.synced, None
        else:
            node.durable, node.pending = dict(node.now), []

    def rename(self, old: Path, new: Path) -> None:
        assert old.parent == new.parent
        self._at(old.parent).change(new.name, self._at(old), old.name)

    def mkdir(self, path: Path) -> None:
        self._at(path.parent).change(path.name, Directory())

    def unlink(self, path: Path) -> None:
        self._at(path.parent).change(path.name, None)

    def rmtree(self, path: Path) -> None:
        node = self._at(path)
        for name, inner in list(node.now.items()):
            (self.rmtree if isinstance(inner, Directory) else self.unlink)(path / name)
        self.unlink(path)

    def leave(self, target: Path, dice: random.Random, kept: float | None = None) -> None:
        """One of the states that a power cut may leave; `kept` is the share of what was not synced and lasts."""
        self._leave(self.top, target, dice, dice.choice([0.0, 0.3, 0.7, 1.0]) if kept is None else kept)

    def _leave(self, node: Any, target: Path, dice: random.Random, kept: float) -> None:
        if isinstance(node, File):
            written = node.synced if node.content is None else node.content
            half = written[: len(written) // 2]
            target.write_bytes(dice.choice([node.synced, written, half]) if node.content is not None else written)
            return
        target.mkdir()
        entries = dict(node.durable)
        for change in node.pending:
            if dice.random() < kept:
                _apply(entries, change)
        for name, inner in entries.items():
            self._leave(inner, target / name, dice, kept)


@contextmanager
def recorded(root: Path):
    """The operations on files below this folder, as they happen; nothing is synced in truth."""
    operations: list[tuple[Any, ...]] = []
    write, rename, mkdir, unlink, rmtree = Path.write_bytes, os.rename, os.mkdir, os.unlink, shutil.rmtree

    def note(name: str, path: Any, *more: Any) -> None:
        if Path(path).is_relative_to(root):
            operations.append((name, Path(path), *more))

    def writing(path: Path, content: bytes) -> int:
        note("write", path, content)
        return write(path, content)

    def renaming(old: Any, new: Any) -> None:
        note("rename", old, Path(new))
        rename(old, new)

    def making(path: Any, *more: Any, **named: Any) -> None:
        mkdir(path, *more, **named)
        note("mkdir", path)

    def unlinking(path: Any, *more: Any, **named: Any) -> None:
        unlink(path, *more, **named)
        note("unlink", path)

    def removing(path: Any, **named: Any) -> None:
        if Path(path).exists():
            note("rmtree", path)
            with mock.patch.object(os, "unlink", unlink):
                rmtree(path, **named)

    with (
        mock.patch.object(Path, "write_bytes", writing),
        mock.patch.object(os, "rename", renaming),
        mock.patch.object(os, "replace", renaming),
        mock.patch.object(os, "mkdir", making),
        mock.patch.object(os, "unlink", unlinking),
        mock.patch.object(shutil, "rmtree", removing),
        mock.patch.object(files, "_sync", lambda path: note("sync", path)),
    ):
        yield operations
