"""Times that can be compared: ratios within one run, and network rows counted exactly.

    share of a part  =  seconds inside the part / seconds of the whole, from the same calls

A ratio of two times of the same run hardly depends on the machine or on its other users; a time alone does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch

__all__ = ["Ratio", "Watch", "fastest", "now", "ratio", "rows_cost", "watching"]


def now() -> float:
    """Seconds: of the processor where one thread works, so that other programs do not count; else of the wall."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


@dataclass
class Watch:
    """Seconds and calls, added up."""

    seconds: float = 0.0
    calls: int = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Add the time of this block.

        >>> watch = Watch()
        >>> with watch.running():
        ...     total = sum(range(1000))
        >>> watch.calls, watch.seconds > 0
        (1, True)
        """
        start = now()
        try:
            yield
        finally:
            self.seconds += now() - start
            self.calls += 1


@contextmanager
def watching(*methods: tuple[Any, str]) -> Iterator[Watch]:
    """Add up the time of every call of these methods, given as (class or object, name), while the block runs.

    >>> import crepe_diffusion as cd
    >>> with watching((cd.Stream, "normal"), (cd.Stream, "uniform")) as random:
    ...     x = cd.Stream(0).normal((3,))
    >>> random.calls
    1
    """
    watch = Watch()
    with ExitStack() as stack:
        for owner, name in methods:
            stack.enter_context(_replaced(owner, name, _timed(getattr(owner, name), watch)))
        yield watch


def _timed(function: Callable[..., Any], watch: Watch) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        with watch.running():
            return function(*args, **options)

    return call


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


class Counts(Protocol):
    """Anything that counts network rows, such as `sampler.evaluate.counts`."""

    rows: int


@contextmanager
def rows_cost(counts: Counts, rows: int, name: str) -> Iterator[None]:
    """Raise if the block does not evaluate exactly this many network rows."""
    before = counts.rows
    yield
    if counts.rows - before != rows:
        raise AssertionError(f"{name}: {counts.rows - before} network rows, expected {rows}")


def fastest(times: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Mean of each column over the faster half of the lines, by their first column.

    What slows the other half down is another program.

    >>> fastest([(1.0, 0.5), (9.0, 8.0), (1.2, 0.7), (7.0, 0.1)])
    (1.1, 0.6)
    """
    fast = sorted(times)[: max(1, len(times) // 2)]
    return tuple(sum(column) / len(fast) for column in zip(*fast, strict=True))


@dataclass(frozen=True)
class Ratio:
    """Median of time of the first / time of the second, with its quartiles."""

    value: float
    low: float
    high: float


def ratio(
    first: Callable[[], Any],
    second: Callable[[], Any],
    n: int = 9,
    clock: Callable[[], float] = time.perf_counter,
) -> Ratio:
    """How much longer `first` takes than `second`; they take turns, so that both meet the same disturbances.

    >>> ticks = iter([0, 6, 6, 8] * 9)
    >>> ratio(lambda: None, lambda: None, clock=lambda: next(ticks))
    Ratio(value=3.0, low=3.0, high=3.0)
    """

    def seconds(function: Callable[[], Any]) -> float:
        start = clock()
        function()
        return clock() - start

    ratios = sorted(seconds(first) / seconds(second) for _ in range(n))
    return Ratio(median(ratios), ratios[n // 4], ratios[-1 - n // 4])
