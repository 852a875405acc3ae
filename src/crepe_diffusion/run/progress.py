"""How far a run has come, to be shown."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crepe_diffusion.run.runner import Run

__all__ = ["Clock", "Display", "Progress"]

PROGRESS_SECONDS = 0.2


@dataclass(frozen=True)
class Progress:
    """Where a run stands; NaN where that is not known yet."""

    iteration: int
    seconds: float
    rate: float
    acceptance: float
    ess: float
    evaluations: int
    seconds_left: float
    share: float
    target: int


class Clock:
    """Seconds of running, over all sessions."""

    def __init__(self, before: float):
        self.before, self.began = before, time.monotonic()

    def seconds(self) -> float:
        return self.before + time.monotonic() - self.began


class Display:
    """Calls `progress` now and then, and spends at most a hundredth of the time on the effective sample size."""

    def __init__(self, run: Run, progress: Callable[[Progress], None] | None, clock: Clock):
        self.run, self.progress, self.clock = run, progress, clock
        self.first, self.began = run.sampler.iteration, clock.seconds()
        self.due, self.ess_due, self.ess = 0.0, clock.seconds() + 1.0, math.nan

    def show(self, last: bool = False) -> None:
        if self.progress is None:
            return
        now = self.clock.seconds()
        if now < self.due and not last:
            return
        self.due = now + PROGRESS_SECONDS
        if now >= self.ess_due or last:
            self.ess = self.run.ess()
            cost = self.clock.seconds() - now
            self.ess_due = now + max(2.0, 100 * cost)
        self.progress(self._progress(now))

    def _progress(self, now: float) -> Progress:
        run, stop = self.run, self.run.config.stop
        n, rows = run.sampler.iteration, run.sampler.evaluate.counts.rows
        elapsed = now - self.began
        rate = (n - self.first) / elapsed if elapsed > 0 else math.nan
        shares = [0.0]
        if stop.iterations:
            shares.append(n / stop.iterations)
        if stop.seconds:
            shares.append(now / stop.seconds)
        if stop.evaluations:
            shares.append(rows / stop.evaluations)
        if stop.ess and self.ess > 0:
            shares.append(self.ess / stop.ess)
        share = min(1.0, max(shares))
        d = run.sampler.diagnostics
        tries = 0 if d is None else int(d.tries.sum()) * d.n_chains
        acceptance = float(d.accepts.sum() / tries) if d is not None and tries else math.nan
        left = now * (1 - share) / share if share else math.nan
        return Progress(n, now, rate, acceptance, self.ess, rows, left, share, run.history.index)
