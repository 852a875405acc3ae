"""The plain log of a run: what the chain did, by iteration, and what happened to the process that ran it.

2026-01-31T12:00:00Z       120  acceptance 0.52 (least 0.31), 14 round trips, 61200 evaluations
2026-01-31T12:00:01Z         -  stopped by SIGTERM

Lines with an iteration depend on the chain alone, so an interrupted run ends with the same ones.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from crepe_diffusion.run.files import named, publish, read_bounded

__all__ = ["Log", "chain_lines"]


class Log:
    """Appends lines; each is one write, so that a crash can only cut the last."""

    def __init__(self, path: Path):
        self.path = path
        path.touch()

    def chain(self, iteration: int, text: str) -> None:
        self._line(f"{iteration:>8}", text)

    def session(self, text: str) -> None:
        self._line(f"{'-':>8}", text)

    def _line(self, when: str, text: str) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        with named(self.path), open(self.path, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{now}  {when}  {' '.join(text.split())}\n")

    def rewind(self, iteration: int) -> None:
        """Forget the chain's lines behind this iteration, which will be written again."""
        content = read_bounded(self.path).decode("utf-8", errors="replace")
        kept = [line for line in content.splitlines(keepends=True) if line.endswith("\n") and _at(line) <= iteration]
        publish(self.path, "".join(kept).encode())


def chain_lines(path: Path) -> list[str]:
    """The chain's lines without their timestamps."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.split(maxsplit=1)[1] for line in lines if _at(line) > -1]


def _at(line: str) -> int:
    words = line.split(maxsplit=2)
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else -1
