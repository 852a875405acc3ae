"""How far a call has come: a text bar on standard error, and a callback that may stop the call.

    |##########----------|  100/200 iterations, 0:03 of 0:06

`progress=True` shows the bar, `False` does not, and `None` (the default of all samplers) shows it where standard error
is a terminal and the call has lasted for two seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

__all__ = ["Callback", "Progress", "Track"]

LONG = 2.0
"""Seconds after which a call is long enough for a bar that was not asked for."""
WIDTH = 20


@dataclass(frozen=True)
class Progress:
    """`done` of `total` iterations or levels after so many seconds.

    >>> print(Progress(50, 200, "iterations", 3.0))
    |#####---------------|  50/200 iterations, 0:03 of 0:12
    """

    done: int
    total: int
    unit: str
    seconds: float

    def __str__(self) -> str:
        filled = WIDTH * self.done // max(1, self.total)
        bar = "#" * filled + "-" * (WIDTH - filled)
        all_seconds = self.seconds * self.total / max(1, self.done)
        return f"|{bar}|  {self.done}/{self.total} {self.unit}, {_clock(self.seconds)} of {_clock(all_seconds)}"


Callback = Callable[[Progress], object]
"""Called after every iteration or level; if it returns something true, the call stops there."""


class Track:
    """Counts the steps of a call, shows the bar and calls the callback.

    >>> with Track(5, "levels", progress=False, callback=lambda p: p.done == 2) as track:
    ...     [track.advance() for _ in range(3)]
    [False, True, False]
    """

    def __init__(self, total: int, unit: str, progress: bool | None = None, callback: Callback | None = None):
        self.total, self.unit, self.progress, self.callback = total, unit, progress, callback
        self.done, self.began = 0, time.monotonic()
        self.terminal = sys.stderr is not None and sys.stderr.isatty()
        self.due = 0.0 if progress else LONG
        self.shown = False

    def advance(self, n: int = 1) -> bool:
        """Count one step, or n of them; true where the callback stops the call."""
        self.done += n
        now = Progress(self.done, self.total, self.unit, time.monotonic() - self.began)
        wanted = self.progress if self.progress is not None else self.terminal
        if wanted and (now.seconds >= self.due or (self.shown and self.done == self.total)):
            self._show(now)
        return bool(self.callback(now)) if self.callback is not None else False

    def _show(self, now: Progress) -> None:
        # In a terminal the line is written over; elsewhere, as in a log, lines are added and so are few.
        self.due = now.seconds + (0.1 if self.terminal else 10.0)
        print(f"\r{now}" if self.terminal else now, end="" if self.terminal else "\n", file=sys.stderr, flush=True)
        self.shown = True

    def __enter__(self) -> Track:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.shown and self.terminal:
            print(file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
