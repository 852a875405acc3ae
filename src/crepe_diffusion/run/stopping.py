"""When a run stops: by its rules, counted over all sessions, or because someone asks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import numpy as np
import torch

from crepe_diffusion.diagnostics import ess
from crepe_diffusion.errors import InputError
from crepe_diffusion.run.config import StopTable

__all__ = ["Outcome", "effective_sizes", "least_size", "met", "signals"]

# Below this many draws a scalar may be constant by chance.
MOST_CONSTANT_DRAWS = 1000


@dataclass(frozen=True)
class Outcome:
    """Why a run stopped; `finished` if by one of its stop rules."""

    reason: str
    finished: bool


def met(stop: StopTable, iteration: int, seconds: float, rows: int, ess_seen: float) -> Outcome | None:
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


def effective_sizes(scalars: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The effective sample size of each scalar (draws, chains) that is not constant; a constant one tells nothing."""
    return {
        name: ess(torch.from_numpy(v)) if len(v) and np.isfinite(v).all() else 0.0
        for name, v in scalars.items()
        if len(v) < 4 or (v != v[0, 0]).any()
    }


def least_size(stop: StopTable, scalars: Mapping[str, np.ndarray]) -> tuple[float, str]:
    """The size that the rule looks at, and a line for the log; an error if the run could never stop."""
    sizes = effective_sizes(scalars)
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
    """Ctrl-C and SIGTERM ask to stop after the iteration; a second one stops at once."""
    caught: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def catch(number: int, frame: FrameType | None) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(signal.Signals(number).name)

    before = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
