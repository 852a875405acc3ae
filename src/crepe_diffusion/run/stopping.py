"""When a run stops: by its rules, counted over all sessions, or by a signal."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import numpy as np
import torch
from torch import Tensor

from crepe_diffusion.diagnostics import ess
from crepe_diffusion.errors import InputError
from crepe_diffusion.run.config import Stop

__all__ = ["EssRule", "Outcome", "effective_sizes", "met", "signals"]

# Below this many draws a scalar may be constant by chance.
MOST_CONSTANT_DRAWS = 1000


@dataclass(frozen=True)
class Outcome:
    """Why a run stopped; `finished` if by one of its stop rules."""

    reason: str
    finished: bool


def met(stop: Stop, iteration: int, seconds: float, rows: int, ess_seen: float) -> Outcome | None:
    """The first rule that is met."""
    if stop.iterations and iteration >= stop.iterations:
        return Outcome(f"iterations = {stop.iterations}", True)
    if stop.seconds and seconds >= stop.seconds:
        return Outcome(f"seconds = {stop.seconds:g}", True)
    if stop.evaluations and rows >= stop.evaluations:
        return Outcome(f"evaluations = {stop.evaluations}", True)
    if stop.ess and ess_seen >= stop.ess:
        return Outcome(f"ess = {stop.ess:g}", True)
    return None


@dataclass
class EssRule:
    """The effective sample size, computed at set numbers of draws so that a resumed run stops at the same one.

    Computing it costs as much as the series is long, so the longer the series, the more rarely it is done.
    """

    next_look: int = 0
    seen: float = 0.0

    def look(
        self, stop: Stop, n_draws: int, judged: Callable[[], tuple[Mapping[str, np.ndarray], Tensor | None]]
    ) -> str | None:
        """Where a look is due, take it and return a line for the log."""
        if not stop.ess or n_draws < self.next_look:
            return None
        self.next_look = max(n_draws + 50, math.ceil(1.1 * n_draws))
        self.seen, text = _least_size(stop, *judged())
        return text


def effective_sizes(scalars: Mapping[str, np.ndarray], tours: Tensor | None) -> dict[str, float]:
    """The effective sample size of each scalar (draws, chains) that is not constant so far."""
    return {
        name: ess(torch.from_numpy(v), tours) if len(v) and np.isfinite(v).all() else 0.0
        for name, v in scalars.items()
        if len(v) < 4 or (v != v[0, 0]).any()
    }


def _least_size(stop: Stop, scalars: Mapping[str, np.ndarray], tours: Tensor | None) -> tuple[float, str]:
    """The size that the rule compares, and a line for the log; an error if the run could never stop."""
    sizes = effective_sizes(scalars, tours)
    constant = ", ".join(name for name in scalars if name not in sizes)
    if not sizes:
        only_rule = not (stop.iterations or stop.seconds or stop.evaluations)
        n = max((len(v) for v in scalars.values()), default=0)
        text = f"the rule ess = {stop.ess:g} cannot be met: constant in all of {n} draws are {constant or 'no scalars'}"
        if only_rule and n >= MOST_CONSTANT_DRAWS:
            raise InputError(f"{text}; record a scalar that varies, or give another rule too")
        return 0.0, text
    least = min(sizes.values())
    return least, f"effective sample size {least:.1f}" + (f", without {constant}: constant so far" if constant else "")


@contextmanager
def signals() -> Iterator[list[str]]:
    """Ctrl-C, SIGTERM and SIGHUP stop a run after its iteration; a second one stops it at once."""
    caught: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def catch(number: int, frame: FrameType | None) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(signal.Signals(number).name)

    known = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    # What is ignored stays ignored: that is what nohup does with SIGHUP.
    wanted = [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, catch) for number in wanted}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
