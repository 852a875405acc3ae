"""The loop of a process that is not number 0: the same steps and events, no files, and what process 0 decides.

flags of all processes, once per iteration:    signal    stop    request    failed    checkpoint
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from crepe_diffusion.errors import InputError
from crepe_diffusion.run import identity
from crepe_diffusion.run.events import chain_events
from crepe_diffusion.run.stopping import Outcome
from crepe_diffusion.run.team import by_all

if TYPE_CHECKING:
    from crepe_diffusion.run.runner import Run

__all__ = ["follow", "number_of", "signalled"]


def number_of(caught: list[str]) -> int:
    """The signal that this process has caught, 0 if none."""
    return int(getattr(signal, caught[0])) if caught else 0


def signalled(flags: list[list[int]]) -> Outcome | None:
    """The first signal that some process has caught."""
    caught = [number for number, *_ in flags if number]
    return Outcome(signal.Signals(caught[0]).name, False) if caught else None


def follow(run: Run, caught: list[str]) -> Outcome:
    """Sample until process 0 decides to stop."""
    assert run.team is not None
    while True:
        flags = run.team.flags(number_of(caught), 0, 0, 0, 0)
        _, stops, asked, failed, saves = flags[0]
        if failed:
            raise InputError("process 0 failed; its log tells why")
        if saves:
            run.team.alike(run.sampler.snapshot)
        while asked and (message := run.team.hear()[0]):
            _take(run, message["rewards"])
        if stops or signalled(flags):
            message, _ = run.team.hear()
            run.sampler.snapshot()  # for the last checkpoint
            return Outcome(message["reason"], message["finished"])
        if run._take_up():
            continue
        info = run.team.alike(run.sampler.step)
        if info.iteration % run.config.output.thin == 0:
            run.sampler.output()
        chain_events(run.sampler, run.config.output, run.history.now["from_iteration"])


def _take(run: Run, rewards: list[dict[str, Any]]) -> None:
    """The target of a request, unless it cannot be evaluated: process 0 then raises the same, and answers."""
    counts = run.sampler.evaluate.counts
    saved = counts.copy()
    try:
        by_all(lambda: identity.probe(run.sampler.evaluate, run.history.target(rewards)))
        run.sampler.target = run.history.target(rewards)
    except Exception:
        vars(counts).update(vars(saved))
    else:
        run.history.add(run.sampler.iteration + 1, rewards, {})
