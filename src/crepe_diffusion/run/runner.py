"""A run in its folder: the sampler's loop with everything around it that lasts.

while no stop rule is met
    change the target, where a request was left        (history.py, targets.json)
    one iteration of the sampler
    keep the draw and what happened                    (recorder.py, samples.zarr)
    now and then, make all of it last                  (checkpoint.py, checkpoints/)
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from crepe_diffusion.diagnostics.data import RunData
from crepe_diffusion.diagnostics.estimates import tours_of
from crepe_diffusion.errors import InputError, NonFiniteError
from crepe_diffusion.models import Model
from crepe_diffusion.run import checkpoint, control, identity, opening
from crepe_diffusion.run.config import Output, Stop
from crepe_diffusion.run.events import chain_events
from crepe_diffusion.run.files import sync_directories, write_json
from crepe_diffusion.run.folder import n_burnt, read_run
from crepe_diffusion.run.following import follow, number_of, signalled
from crepe_diffusion.run.progress import Clock, Display, Progress
from crepe_diffusion.run.stopping import Outcome, effective_sizes, met, signals
from crepe_diffusion.run.team import group
from crepe_diffusion.samplers.base import Continuing, Info
from crepe_diffusion.targets import Reward, Target

__all__ = ["Run"]

CONTROL_SECONDS = 0.2


def _absolute(folder: str | Path) -> Path:
    """A run stays where it was begun, whatever the process makes its working directory later."""
    return Path(os.path.abspath(folder))


class Run:
    """A sampler whose draws, state and history live in a folder; it goes on from its present state.

    Any sampler that can go on will do (`samplers.base.Continuing`), such as `ReplicaExchange`. The other arguments are
    the keys of `[output]` in `docs/runs.md`; `scalars` are functions of a batch of draws, by name. A run made in Python
    is resumed in Python, with the same target.

    >>> import tempfile
    >>> from crepe_diffusion.models import GaussianMixture
    >>> from crepe_diffusion.samplers import ReplicaExchange
    >>> from crepe_diffusion.schedules import ladder
    >>> p = GaussianMixture(weights=[0.3, 0.7], means=[[-4.0], [3.0]], stds=[0.5, 0.4])
    >>> run = Run(tempfile.mkdtemp() + "/first", ReplicaExchange(p ** 2.0, ladder.karras(6, 0.05, 20.0), n_chains=2))
    >>> run.run(iterations=10).reason
    'iterations = 10'
    >>> run.refine(add=[Reward(lambda x: x[:, 0], name="right")])
    >>> run.run(iterations=20).finished
    True
    >>> run.data().target.tolist() == [0] * 10 + [1] * 10
    True
    """

    def __init__(
        self,
        folder: str | Path,
        sampler: Continuing[Any],
        *,
        scalars: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
        thin: int = Output.thin,
        burn_in: int = Output.burn_in,
        adapt_at: Iterable[int] = Output.adapt_at,
        trace_every: int = Output.trace_every,
        checkpoint_seconds: float = Output.checkpoint_seconds,
        checkpoint_iterations: int = Output.checkpoint_iterations,
        flush_seconds: float = Output.flush_seconds,
    ):
        output = {
            "thin": thin,
            "burn_in": burn_in,
            "adapt_at": list(adapt_at),
            "trace_every": trace_every,
            "checkpoint_seconds": checkpoint_seconds,
            "checkpoint_iterations": checkpoint_iterations,
            "flush_seconds": flush_seconds,
        }
        self._take(opening.from_sampler(_absolute(folder), sampler, scalars, output))

    @classmethod
    def start(cls, folder: str | Path, config: Mapping[str, Any] | str | Path, *, import_path: str = "") -> Run:
        """A new run from a configuration: a TOML file or the same as a dictionary.

        The `module:name`s of a file are also looked for in its own folder, those of a dictionary in `import_path`.
        """
        run = cls.__new__(cls)
        run._take(opening.from_config(_absolute(folder), config, import_path))
        return run

    @classmethod
    def resume(
        cls,
        folder: str | Path,
        *,
        target: Target | Model | None = None,
        rewards: Iterable[Reward] = (),
        scalars: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
        allow_changed: bool = False,
        trust: bool = False,
        notify: Callable[[str], None] = lambda text: None,
        **arguments: Any,
    ) -> Run:
        """Go on where the run was left, bit for bit, however it ended.

        A run that was made in Python needs its target again, its scalars if it had any, the `rewards` that were added
        later, and those `arguments` of its sampler that no file can hold, such as `explorer=Bounce(accept=my_rule)` (an
        error names them). A changed model or configuration is refused unless `allow_changed`, a folder that names code
        and was begun by somebody else unless `trust`. `notify` is called with what a person should read, such as a
        damaged checkpoint; it is in the log too.
        """
        run = cls.__new__(cls)
        made = opening.Made(target, list(rewards), scalars, arguments)
        run._take(opening.resumed(_absolute(folder), made, allow_changed, trust, notify), notify)
        return run

    def _take(self, opened: opening.Opened, notify: Callable[[str], None] = lambda text: None) -> None:
        self.notify = notify
        self.folder, self.config, self.sampler = opened.folder, opened.config, opened.sampler
        self.lock, self.history, self.team = opened.lock, opened.history, group()
        if opened.log is not None and opened.recorder is not None:
            self.log, self.recorder = opened.log, opened.recorder
        self.seconds, self.ess_rule = opened.seconds, opened.ess_rule
        self.closed = self.warned = False
        if opened.is_new:
            try:
                self._checkpoint()
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Release the folder; what was not checkpointed is sampled again on resume."""
        if not self.closed:
            self.closed = True
            self.lock.release()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- the loop ----------------------------------------------------------------------------------------

    def run(
        self,
        *,
        iterations: int | None = None,
        seconds: float | None = None,
        evaluations: int | None = None,
        ess: float | None = None,
        ess_scalar: str | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Outcome:
        """Sample until a stop rule is met, or until Ctrl-C or SIGTERM, which finish the iteration and write.

        Rules given here replace those of the configuration, and are kept in it. They count from the beginning of the
        run, over all sessions.
        """
        if self.closed:
            raise InputError(f"{self.folder} was closed; Run.resume opens it again")
        if self.follows:
            with signals() as caught:
                return follow(self, caught)
        self._replace_stop(
            iterations=iterations, seconds=seconds, evaluations=evaluations, ess=ess, ess_scalar=ess_scalar
        )
        (self.folder / "outcome.json").unlink(missing_ok=True)
        sync_directories([self.folder])
        clock = Clock(self.seconds)
        shown = Display(self, progress, clock)
        with signals() as caught:
            try:
                outcome = self._loop(clock, shown, caught)
            except BaseException as error:
                self._failed(error)
                raise
            self.seconds = clock.seconds()
            self._checkpoint()
        shown.show(last=True)
        n = self.sampler.iteration
        found = {"run": self.history.run, "iteration": n, "reason": outcome.reason, "finished": outcome.finished}
        write_json(self.folder / "outcome.json", found)
        self.log.session(f"stopped at iteration {n}: {outcome.reason}")
        return outcome

    def _failed(self, error: BaseException) -> None:
        """Keep what was sampled, and a line about why it ended; the error itself matters more than either."""
        n, own = self.sampler.iteration, isinstance(error, (InputError, NonFiniteError, KeyboardInterrupt))
        text = f"failed after iteration {n}: " + ("" if own else f"{type(error).__name__}: ") + str(error)
        if isinstance(error, KeyboardInterrupt):
            text = f"stopped at once after iteration {n}"
        with suppress(Exception):
            if isinstance(error, Exception):
                self.recorder.flush()
        with suppress(OSError):
            self.log.session(text)
        if self.team is not None and isinstance(error, Exception) and not getattr(error, "told", False):
            self.team.flags(0, 0, 0, 1, 0)

    def _loop(self, clock: Clock, shown: Display, caught: list[str]) -> Outcome:
        output = self.config.output
        last_checkpoint = last_flush = clock.seconds()
        last_control = -math.inf
        pause, saves = output.flush_seconds, False
        while True:
            due = clock.seconds() - last_control >= CONTROL_SECONDS
            last_control = clock.seconds() if due else last_control
            outcome = self._decide(caught, due, saves)
            if saves:
                last_checkpoint = last_flush = clock.seconds()
            if outcome is not None:
                return outcome
            if self._take_up():
                # A request may take it away again, before anything is sampled that it would fail at.
                last_control, saves = -math.inf, False
                continue
            info = self._step()
            self.seconds = clock.seconds()
            self._keep(info)
            self._events(info.iteration)
            now = clock.seconds()
            by_count = output.checkpoint_iterations and info.iteration % output.checkpoint_iterations == 0
            saves = by_count or now - last_checkpoint >= output.checkpoint_seconds
            if not saves and now - last_flush >= pause:
                self.recorder.flush(arrays=False)
                last_flush = clock.seconds()
                # Where the disk is slow, readers wait rather than the sampler: flushes take a hundredth of the time,
                # unless one was wanted at every iteration.
                pause = max(pause, 99 * (last_flush - now)) if pause else 0.0
            shown.show()

    def _take_up(self) -> bool:
        """Bring into force what was accepted before the run was killed; whether there was any."""
        before = self.history.index
        while self.history.take_up(self.sampler):
            if not self.follows:
                self._target_changed()
        return self.history.index > before

    def _step(self) -> Info:
        step: Callable[[], Info] = self.sampler.step
        return step() if self.team is None else self.team.alike(step)

    # -- several processes -------------------------------------------------------------------------------

    @property
    def follows(self) -> bool:
        """Whether this is one of several processes, and not the one that has the folder."""
        return self.team is not None and not self.team.leads

    def _decide(self, caught: list[str], due: bool, saves: bool) -> Outcome | None:
        """Save and answer requests if that is due, and decide whether to stop; a signal to any process counts for all.

        All processes have a part of what is saved.
        """
        if self.team is None:
            if saves:
                self._checkpoint()
            if due:
                self._answer_requests(lambda rewards: None)
            return self._stop(caught)
        team = self.team
        asked = due and bool(control.pending(self.folder))
        outcome = self._stop(caught)
        outcome = signalled(team.flags(number_of(caught), outcome is not None, asked, 0, saves)) or outcome
        if saves:
            team.alike(self._checkpoint)
        if not self.warned and team.waiting > max(team.busy, 10.0):
            self.warned = True
            self._tell(
                f"{team.size} processes wait for each other longer than they compute ({team.waiting:.0f} s and"
                f" {team.busy:.0f} s): fewer would be as fast"
            )
        if asked:
            self._answer_requests(lambda rewards: team.tell({"rewards": rewards}))
            team.tell({})
        if outcome is not None:
            team.tell({"reason": outcome.reason, "finished": outcome.finished})
        return outcome

    def _keep(self, info: Info) -> None:
        if info.iteration % self.config.output.thin == 0:
            self.recorder.draw(info, self.history.index)
        if info.iteration % self.config.output.trace_every == 0:
            self.recorder.step(info, self.seconds)

    def _events(self, n: int) -> None:
        """What happens at set iterations: a line in the log, a new ladder, the end of burn-in, a look at the ESS."""
        if n % 10 ** int(math.log10(n)) == 0:
            self.log.chain(n, self._summary())
        for text in chain_events(self.sampler, self.config.output, self.history.now["from_iteration"]):
            self.log.chain(n, text)
        seen = self.ess_rule.look(self.config.stop, self.recorder.n_draws, self._judged)
        if seen is not None:
            self.log.chain(n, seen)

    def _summary(self) -> str:
        evaluate = self.sampler.evaluate
        evaluations = "; ".join(filter(None, (f"{evaluate.counts.rows} evaluations", str(evaluate.rewards))))
        diagnostics = self.sampler.diagnostics
        if diagnostics is None:
            return evaluations
        rate = diagnostics.acceptance()
        acceptance = f"acceptance {float(rate.mean()):.3f} (least {float(rate.min()):.3f})"
        return f"{acceptance}, {diagnostics.round_trips()} round trips, {evaluations}"

    def _checkpoint(self) -> None:
        self.recorder.flush()
        position = checkpoint.Position(
            run=self.history.run,
            iteration=self.sampler.iteration,
            n_draws=self.recorder.n_draws,
            n_steps=self.recorder.n_steps,
            target=self.history.index,
            seconds=self.seconds,
            config_hash=self.config.identity(),
            next_look=self.ess_rule.next_look,
            ess_seen=self.ess_rule.seen,
            history=self.history.entries,
            seals=self.recorder.store.seals(),
        )
        checkpoint.write(self.folder, position, self.sampler.snapshot(), checkpoint.reported(self.sampler))

    # -- stopping ----------------------------------------------------------------------------------------

    def _replace_stop(self, **rules: float | str | None) -> None:
        changed = {name: value for name, value in rules.items() if value is not None}
        before = asdict(self.config.stop) if not changed or changed.keys() == {"ess_scalar"} else {}
        stop = Stop.of({**before, **changed})
        if stop.ess_scalar and stop.ess_scalar not in self.recorder.scalars:
            raise InputError(f"ess_scalar: {stop.ess_scalar!r} is not one of {', '.join(self.recorder.scalars)}")
        if changed:
            self.config = replace(self.config, stop=stop)
            identity.write_changed(self.folder, self.config)

    def _stop(self, caught: list[str]) -> Outcome | None:
        if caught:
            return Outcome(caught[0], False)
        rows = self.sampler.evaluate.counts.rows
        return met(self.config.stop, self.sampler.iteration, self.seconds, rows, self.ess_rule.seen)

    def ess(self) -> float:
        """Of the scalar that the stop rule names, else the least of those that vary."""
        return min(effective_sizes(*self._judged()).values(), default=0.0)

    def _judged(self) -> tuple[dict[str, np.ndarray], Tensor | None]:
        """What the stop rule compares: scalars of draws after burn-in, (draws, chains), and their tours."""
        self.recorder.flush(arrays=False)
        wanted = self.config.stop.ess_scalar
        iteration, values, lineage = self.recorder.flushed([wanted] if wanted else list(self.recorder.scalars))
        first = n_burnt(iteration, self.history.entries, self.config.output.burn_in)
        tours = tours_of({name: v[first:] for name, v in lineage.items()})
        return {name: v[first:] for name, v in values.items()}, tours

    # -- changing the target -----------------------------------------------------------------------------

    def refine(
        self,
        *,
        add: Iterable[Reward | Mapping[str, Any]] = (),
        remove: Iterable[str] = (),
        change: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Add, remove or change reward terms from the next iteration on; replicas stay where they are.

        Terms are `Reward`s, or tables as in a configuration; `change` maps names to new values of such keys. A target
        that cannot be evaluated is refused, and the sampler goes on with the old one.
        """
        self._take_up()
        tables: list[Mapping[str, Any]] = []
        experiment = self.history.experiment
        for term in add:
            if isinstance(term, Reward):
                self.history.experiment = self.history.experiment.with_term(term)
                term = {"name": term.name}
            tables.append(term)
        try:
            self.history.refine(self.sampler, control.Request("", tables, list(remove), dict(change or {})))
        except BaseException:
            self.history.experiment = experiment
            raise
        if not self.follows:
            self._target_changed()

    def _answer_requests(self, announce: Callable[[Any], None]) -> None:
        self.history.answer_requests(self.sampler, self._target_changed, self._tell, announce)

    def _tell(self, text: str) -> None:
        self.log.session(text)
        self.notify(text)

    def _target_changed(self) -> None:
        # Logged under the iteration to come: a checkpoint of the present one may or may not hold the change.
        self.log.chain(self.sampler.iteration + 1, f"new target: {self.history}")
        self.ess_rule.seen = 0.0

    def data(self) -> RunData:
        """What has been sampled so far."""
        if self.follows:
            raise InputError("of several processes, number 0 has the folder: use read_run there")
        if not self.closed:
            self.recorder.flush()
        return read_run(self.folder)
