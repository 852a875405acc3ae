"""The targets of a run, in the order in which they came into force, and how another one does.

targets.json    { from_iteration, rewards, request, probe } for each of them

A target is written down before the first iteration under it, so a crash does not change when it comes into force.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from crepe_diffusion.errors import InputError, NonFiniteError
from crepe_diffusion.run import control, identity
from crepe_diffusion.run.experiment import Experiment
from crepe_diffusion.run.files import DamagedError, write_json
from crepe_diffusion.run.team import by_all
from crepe_diffusion.run.trust import check_trust, named_code, signature
from crepe_diffusion.samplers.base import Continuing
from crepe_diffusion.targets import Target

__all__ = ["History"]

Entry = dict[str, Any]


class History:
    """The entries of `targets.json`, and the index of the one that is in force."""

    def __init__(
        self, folder: Path, run: str, experiment: Experiment, entries: list[Entry], index: int = 0, writes: bool = True
    ):
        self.folder, self.run, self.experiment, self.writes = folder, run, experiment, writes
        self.entries, self.index = entries, index

    @property
    def now(self) -> Entry:
        return self.entries[self.index]

    @property
    def is_last(self) -> bool:
        """Whether the target in force is the last one that was accepted."""
        return self.index == len(self.entries) - 1

    def target(self, rewards: Iterable[Mapping[str, Any]]) -> Target:
        """The experiment's models under these reward tables."""
        return replace(self.experiment.target, rewards=tuple(self.experiment.reward(r) for r in rewards))

    @property
    def code(self) -> list[str]:
        return named_code([entry["rewards"] for entry in self.entries])

    def write(self) -> None:
        if not self.writes:
            return
        write_json(
            self.folder / "targets.json",
            {"run": self.run, "targets": self.entries, "trust": signature(self.run, self.code)},
        )

    def add(self, n: int, rewards: list[dict[str, Any]], probe: identity.Probe, request: str = "") -> None:
        """The target that is in force from iteration n on.

        Added even if its predecessor was never sampled: checkpoints refer to targets by their place.
        """
        entry = {"from_iteration": n, "rewards": rewards, "request": request, "probe": probe}
        self.entries = [*self.entries, entry]
        self.write()
        self.index = len(self.entries) - 1

    def refine(
        self, sampler: Continuing[Any], request: control.Request, announce: Callable[[Any], None] = lambda rewards: None
    ) -> None:
        """All or nothing: the entry is written once the sampler has taken the new target."""
        rewards, probe = self.take(sampler, request, announce)
        self.add(sampler.iteration + 1, rewards, probe, request.id)

    def take(
        self, sampler: Continuing[Any], request: control.Request, announce: Callable[[Any], None] = lambda rewards: None
    ) -> tuple[list[dict[str, Any]], identity.Probe]:
        """Give the sampler the target of a request; whatever goes wrong refuses it, and the sampler keeps its own.

        `announce` is called with the rewards just before anything is evaluated.
        """
        if not self.is_last:
            n = self.entries[-1]["from_iteration"]
            raise InputError(
                f"a target was accepted for iteration {n} before the run was killed: let it get there first"
            )
        before, counts = self.now["rewards"], sampler.evaluate.counts
        saved = counts.copy()
        try:
            rewards = [self.experiment.reward_table(r) for r in control.refined(before, request)]
            if rewards == before:
                raise InputError("nothing to change: the target would stay as it is")
            target = self.target(rewards)
            announce(rewards)
            probe = by_all(lambda: identity.probe(sampler.evaluate, target))
            sampler.target = target
        except (Exception, SystemExit) as error:
            vars(counts).update(vars(saved))
            if isinstance(error, (InputError, NonFiniteError)):
                raise
            raise InputError(f"the new target cannot be evaluated: {type(error).__name__}: {error}") from error
        return rewards, probe

    def take_up(self, sampler: Continuing[Any]) -> bool:
        """Bring an accepted target into force whose iteration comes next: after a crash it is not yet."""
        if self.is_last or self.entries[self.index + 1]["from_iteration"] > sampler.iteration + 1:
            return False
        sampler.target = self.target(self.entries[self.index + 1]["rewards"])
        self.index += 1
        return True

    def answer_requests(
        self,
        sampler: Continuing[Any],
        changed: Callable[[], None],
        refused: Callable[[str], None],
        announce: Callable[[Any], None],
    ) -> None:
        """Handle what `crepe-diffusion refine` has left, once all that was accepted before is in force."""
        if not self.is_last:
            return
        known = {entry["request"] for entry in self.entries}
        for path, request in control.pending(self.folder):
            if isinstance(request, DamagedError):
                refused(f"refinement refused: {request}")
                control.answer(path, False, str(request))
            elif request.id in known:
                control.answer(path, True, "already in force")
            else:
                try:
                    check_trust(path, request.trust, request.id, request.code)
                    self.refine(sampler, request, announce)
                except (InputError, NonFiniteError) as error:
                    refused(f"refinement refused: {error}")
                    control.answer(path, False, str(error))
                else:
                    changed()
                    control.answer(path, True, f"in force from iteration {sampler.iteration + 1}")

    def __str__(self) -> str:
        """The reward terms in force."""
        return ", ".join(f"{r['name']} (scale {r['scale']:g})" for r in self.now["rewards"]) or "no rewards"
