"""A run in its folder: the sampler's loop with everything around it that lasts.

while no stop rule is met
    change the target, where someone asked for it      (targets.json)
    one iteration of the chain
    keep the draw and what happened                    (samples.zarr)
    now and then, make all of it last                  (checkpoints/)
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from crepe_diffusion.diagnostics.data import RunData, default_scalars
from crepe_diffusion.errors import InputError, NonFiniteError
from crepe_diffusion.kernels import Explorer
from crepe_diffusion.models import Model
from crepe_diffusion.processes import Process
from crepe_diffusion.proposals import Proposal
from crepe_diffusion.run import checkpoint, control, identity
from crepe_diffusion.run.config import Config, StopTable, read_toml, reward_table
from crepe_diffusion.run.experiment import Experiment, build
from crepe_diffusion.run.files import ASIDE, DamagedError, clear_leftovers, write_json
from crepe_diffusion.run.folder import Lock, is_run, n_burnt, read_run, read_targets, require_run
from crepe_diffusion.run.log import Log
from crepe_diffusion.run.progress import Clock, Display, Progress
from crepe_diffusion.run.python import python_config, python_experiment, python_reward
from crepe_diffusion.run.rows import Step, draw_row, make_store, step, trace_rows
from crepe_diffusion.run.stopping import Outcome, effective_sizes, least_size, met, signals
from crepe_diffusion.run.store import read_manifest, read_store, verify_store
from crepe_diffusion.samplers import Exchange, ReplicaExchange
from crepe_diffusion.schedules import Ladder
from crepe_diffusion.targets import Reward, Target

__all__ = ["Run"]

CONTROL_SECONDS = 0.2
STEPS_AT_ONCE = 64


class Run:
    """A replica exchange whose samples, state and history live in a folder.

    `target` and `ladder` and the settings behind them are those of `ReplicaExchange`; the others are described in
    `docs/runs.md`. A run made in Python is resumed in Python, with the same target.

    >>> import tempfile
    >>> from crepe_diffusion.models import GaussianMixture
    >>> from crepe_diffusion.schedules import ladder
    >>> p = GaussianMixture(weights=[0.3, 0.7], means=[[-4.0], [3.0]], stds=[0.5, 0.4])
    >>> folder = tempfile.mkdtemp() + "/first"
    >>> run = Run(folder, p ** 2.0, ladder.karras(6, 0.05, 20.0), n_chains=2)
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
        target: Target | Model,
        ladder: Ladder,
        *,
        n_chains: int = 1,
        seed: int = 0,
        process: Process | None = None,
        proposal: Proposal | None = None,
        explorer: Explorer | None = None,
        micro_batch: int | None = None,
        nonfinite: str = "raise",
        fit_samples: int = 256,
        thin: int = 1,
        burn_in: int = 0,
        scalars: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
        trace_every: int = 1,
        checkpoint_seconds: float = 60.0,
        checkpoint_iterations: int = 0,
        flush_seconds: float = 10.0,
    ):
        if isinstance(target, Model):
            target = target.as_target()
        if not isinstance(target, Target) or not isinstance(ladder, Ladder):
            raise InputError(f"a run needs a target and a Ladder, got {target!r} and {ladder!r}")
        experiment = python_experiment(target, target.rewards, scalars, process)
        given = python_config(
            target,
            ladder,
            n_chains=n_chains,
            seed=seed,
            proposal=proposal,
            explorer=explorer,
            micro_batch=micro_batch,
            nonfinite=nonfinite,
            fit_samples=fit_samples,
            output={
                "thin": thin,
                "burn_in": burn_in,
                "trace_every": trace_every,
                "checkpoint_seconds": checkpoint_seconds,
                "checkpoint_iterations": checkpoint_iterations,
                "flush_seconds": flush_seconds,
            },
        )
        self._create(Path(folder), Config.resolve(given, experiment, {}), experiment, ladder)

    @classmethod
    def start(cls, folder: str | Path, config: Mapping[str, Any] | str | Path, *, import_path: str = "") -> Run:
        """A new run from a configuration: a TOML file or the same as a dictionary.

        A file's `module:function`s are looked for in its own folder too, those of a dictionary in `import_path`.
        """
        run = cls.__new__(cls)
        if isinstance(config, (str, Path)):
            given, import_path = read_toml(Path(config)), str(Path(config).resolve().parent)
        else:
            given = dict(config)
        run.import_path = import_path
        _make_importable(import_path)
        if not isinstance(given.get("experiment"), str):
            raise InputError('a configuration names its experiment: experiment = "mixture-tilt"')
        options = given.get("options", {})
        if not isinstance(options, Mapping):
            raise InputError(f"options must be a table, [options], got {options!r}")
        experiment, options = build(given["experiment"], options)
        run._create(Path(folder), Config.resolve(given, experiment, options), experiment, None)
        return run

    @classmethod
    def resume(
        cls,
        folder: str | Path,
        *,
        target: Target | Model | None = None,
        rewards: Iterable[Reward] = (),
        scalars: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
        process: Process | None = None,
        allow_changed: bool = False,
        tell: Callable[[str], None] = lambda text: None,
    ) -> Run:
        """Go on where the run was left, bit for bit, however it ended.

        A run that was made in Python needs its target again, its process and scalars if it had any, and the `rewards`
        that were added later. A changed model or configuration is refused unless `allow_changed`. `tell` hears what a
        person should know, such as a damaged checkpoint; it is in the log too.
        """
        folder = Path(folder)
        require_run(folder)
        given = read_toml(folder / "config.toml")
        run = cls.__new__(cls)
        run.import_path = identity.import_path(folder)
        _make_importable(run.import_path)
        if given.get("experiment") == "python":
            if target is None:
                raise InputError(f"{folder} was made in Python: resume it there, with Run.resume(folder, target=...)")
            if isinstance(target, Model):
                target = target.as_target()
            experiment = python_experiment(target, [*target.rewards, *rewards], scalars, process)
            options: dict[str, Any] = {}
        else:
            if target is not None or process is not None:
                raise InputError(f"{folder} builds its own target, {given.get('experiment')!r}; change config.toml")
            with _named(folder / "config.toml"):
                experiment, options = build(str(given.get("experiment")), given.get("options", {}))
        with _named(folder / "config.toml"):
            config = Config.resolve(given, experiment, options)
        run._resume(folder, config, experiment, allow_changed, tell)
        return run

    import_path = ""
    """The folder of the configuration, where its `module:function`s are looked for."""

    # -- opening and closing -----------------------------------------------------------------------------

    def _create(self, folder: Path, config: Config, experiment: Experiment, ladder: Ladder | None) -> None:
        if is_run(folder):
            raise InputError(f"{folder} already holds a run: resume it, or choose another folder")
        # A run that died before it wrote its configuration may have left these; anything else is not ours.
        foreign = [n for n in _names(folder) if n not in (".lock", "control", "log.txt") and not n.startswith(ASIDE)]
        if foreign:
            raise InputError(f"{folder} is not empty, there is {foreign[0]!r}: choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        self._open(folder, config, experiment)
        try:
            self._begin(ladder)
        except BaseException:
            # Nothing was sampled: leave no half-made run in the way of the next attempt.
            if not _names(folder / "checkpoints"):
                self._wipe()
                for name in ("config.toml", "log.txt"):
                    (folder / name).unlink(missing_ok=True)
            self.close()
            raise

    def _open(self, folder: Path, config: Config, experiment: Experiment) -> None:
        self.folder, self.config, self.experiment = folder, config, experiment
        names = config.output.scalars or list(experiment.scalars)
        functions = experiment.scalars or default_scalars(experiment.target.models[0].event_shape)
        for name in names:
            if name not in functions:
                raise InputError(f"[output] scalars: no {name!r}; there are {', '.join(functions)}")
        self.scalars = {name: functions[name] for name in names or functions}
        self.lock, self.closed = Lock(folder), False
        self.steps: list[Step] = []
        self.lock.acquire()
        (folder / "control").mkdir(exist_ok=True)
        self.log = Log(folder / "log.txt")

    def _begin(self, ladder: Ladder | None) -> None:
        """A new chain, or one that was killed before its first checkpoint; both are the same."""
        identity.write_config(self.folder, self.config)
        identity.write_information(self.folder, self.config, self.experiment, self.import_path)
        target = self._target(self.config.reward)
        self.chain = self._chain(target, ladder or self.config.ladder.make(), None)
        self.history: list[dict[str, Any]] = [
            {
                "from_iteration": 1,
                "rewards": self.config.reward,
                "request": "",
                "probe": identity.probe(self.chain.evaluate),
            }
        ]
        self._write_history()
        self.target_index, self.seconds, self.next_look, self.ess_seen = 0, 0.0, 0, 0.0
        self.store = make_store(self.folder / "samples.zarr", self.chain, self.scalars)
        self.store.create()
        self.log.session(f"started {self.config.experiment}, seed {self.config.sampler.seed}")
        self._checkpoint()

    def _resume(
        self,
        folder: Path,
        config: Config,
        experiment: Experiment,
        allow_changed: bool,
        tell: Callable[[str], None],
    ) -> None:
        self._open(folder, config, experiment)
        try:
            clear_leftovers(folder)

            def say(text: str) -> None:
                self.log.session(text)
                tell(text)

            if not _names(folder / "checkpoints"):
                say("no checkpoint was reached: starting from the beginning")
                self._wipe()
                self._begin(None)
                return
            identity.check_unchanged(folder, config, experiment, allow_changed, say)

            def damaged(error: DamagedError) -> None:
                say(f"damaged: {error}; using the checkpoint before it")
                checkpoint.set_aside(folder / "checkpoints" / error.path.parent.name)

            path, position, tensors = checkpoint.newest(folder, damaged)
            if position.config_hash != config.identity() and not allow_changed:
                raise InputError(f"{path} belongs to another configuration; --allow-changed takes it nevertheless")
            try:
                self.history = read_targets(folder)
            except DamagedError as error:
                say(f"damaged: {error}; taken from {path}, what was changed after it is lost")
                self.history = position.history
                self._write_history()
            self.target_index, self.seconds = position.target, position.seconds
            self.next_look, self.ess_seen = position.next_look, position.ess_seen
            rewards = self.history[self.target_index]["rewards"]
            self.chain = self._chain(self._target(rewards), config.ladder.make(), tensors)
            before = self.history[self.target_index]["probe"]
            identity.check_probe(folder, self._probe(), before, allow_changed, say)
            self.log.rewind(position.iteration)
            self.store = make_store(self.folder / "samples.zarr", self.chain, self.scalars)
            self._continue_store(position)
            self.log.session(f"resumed at iteration {position.iteration}")
        except BaseException:
            self.close()
            raise

    def _wipe(self) -> None:
        """Remove the beginnings of a run that has sampled nothing."""
        for name in ("samples.zarr", "checkpoints"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for name in ("run.json", "targets.json"):
            (self.folder / name).unlink(missing_ok=True)
        self.log.rewind(-1)

    def _continue_store(self, position: checkpoint.Position) -> None:
        root = self.folder / "samples.zarr"
        try:
            generation = int(read_manifest(root)["attributes"]["generation"])
        except DamagedError as error:
            # All it says is in the checkpoint; it is written anew.
            self.log.session(f"damaged: {error}; written anew")
            generation = int(time.time())
        self.store.rewind(position.n_draws, position.n_steps, generation + 1)
        for problem in verify_store(root):
            raise problem

    def close(self) -> None:
        """Let go of the folder; what was not checkpointed is sampled again on resume."""
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
        """Sample until a stop rule is met, or Ctrl-C or SIGTERM asks to finish the iteration and write.

        Rules given here replace those of the configuration, and are kept in it. They count from the beginning of the
        run, over all sessions.
        """
        if self.closed:
            raise InputError(f"{self.folder} was closed; Run.resume opens it again")
        self._replace_stop(iterations, seconds, evaluations, ess, ess_scalar)
        (self.folder / "outcome.json").unlink(missing_ok=True)
        clock = Clock(self.seconds)
        shown = Display(self, progress, clock)
        last_checkpoint = last_flush = last_control = clock.seconds()
        pause = self.config.output.flush_seconds
        with signals() as caught:
            try:
                self._requests()
                while not (outcome := self._stop(caught)):
                    self._scheduled()
                    info = self.chain.step()
                    self.seconds = clock.seconds()
                    self._keep(info)
                    self._events(info.iteration)
                    now = clock.seconds()
                    if self._checkpoint_due(now - last_checkpoint):
                        self._checkpoint()
                        last_checkpoint = last_flush = clock.seconds()
                    elif now - last_flush >= pause:
                        self.flush(arrays=False)
                        last_flush = clock.seconds()
                        # Where the disk is slow, readers wait rather than the chain.
                        pause = _flush_pause(self.config.output.flush_seconds, last_flush - now)
                    if now - last_control >= CONTROL_SECONDS:
                        self._requests()
                        last_control = now
                    shown.show()
            except (NonFiniteError, InputError) as error:
                self.flush()
                self.log.session(f"failed after iteration {self.chain.iteration}: {error}")
                raise
            self.seconds = clock.seconds()
            self._checkpoint()
        shown.show(last=True)
        write_json(
            self.folder / "outcome.json",
            {"iteration": self.chain.iteration, "reason": outcome.reason, "finished": outcome.finished},
        )
        self.log.session(f"stopped at iteration {self.chain.iteration}: {outcome.reason}")
        return outcome

    def _checkpoint_due(self, elapsed: float) -> bool:
        output = self.config.output
        by_count = output.checkpoint_iterations and self.chain.iteration % output.checkpoint_iterations == 0
        return bool(by_count) or elapsed >= output.checkpoint_seconds

    def _keep(self, info: Exchange) -> None:
        output = self.config.output
        if info.iteration % output.thin == 0:
            self.store.draws.append(draw_row(self.chain, info, self.target_index, self.scalars))
        if info.iteration % output.trace_every == 0:
            self.steps.append(step(info, self.seconds))
            if len(self.steps) == STEPS_AT_ONCE:
                self._write_steps()

    def _write_steps(self) -> None:
        if self.steps:
            steps, self.steps = self.steps, []
            self.store.trace.extend(trace_rows(steps))

    def flush(self, *, arrays: bool = True) -> None:
        """Make all that was sampled visible to readers; without `arrays`, to those that read the manifest."""
        self._write_steps()
        self.store.flush(arrays=arrays)

    def _events(self, n: int) -> None:
        """What happens at set iterations: a line in the log, a new ladder, the end of burn-in, a look at the ESS."""
        if n % 10 ** int(math.log10(n)) == 0:
            diagnostics = self.chain.diagnostics
            acceptance = diagnostics.acceptance()
            self.log.chain(
                n,
                f"acceptance {float(acceptance.mean()):.3f} (least {float(acceptance.min()):.3f}),"
                f" {diagnostics.round_trips()} round trips, {self.chain.evaluate.counts.rows} evaluations",
            )
        if n in self.config.ladder.adapt_at:
            ladder = self.chain.adapt()
            self.log.chain(n, f"levels moved to {' '.join(f'{t:.4g}' for t in ladder.levels.tolist())}")
        burn_in = self.config.output.burn_in
        if burn_in and n == self.history[self.target_index]["from_iteration"] - 1 + burn_in:
            self.chain.restart_diagnostics()
            self.log.chain(n, "end of burn-in")
        # Looking costs as much as the series is long, so looks come ever more rarely, at set numbers of draws.
        n_draws = self.store.draws.n_rows
        if self.config.stop.ess and n_draws >= self.next_look:
            self.next_look = max(n_draws + 50, math.ceil(1.1 * n_draws))
            self.flush(arrays=False)
            self.ess_seen, text = least_size(self.config.stop, self._flushed_scalars())
            self.log.chain(n, text)

    def _checkpoint(self) -> None:
        self.flush()
        checkpoint.write(
            self.folder,
            checkpoint.Position(
                iteration=self.chain.iteration,
                n_draws=self.store.draws.n_rows,
                n_steps=self.store.trace.n_rows,
                target=self.target_index,
                seconds=self.seconds,
                config_hash=self.config.identity(),
                next_look=self.next_look,
                ess_seen=self.ess_seen,
                history=self.history,
            ),
            self.chain.snapshot(),
        )

    # -- stopping ----------------------------------------------------------------------------------------

    def _replace_stop(
        self,
        iterations: int | None,
        seconds: float | None,
        evaluations: int | None,
        ess: float | None,
        ess_scalar: str | None,
    ) -> None:
        given = {
            "iterations": iterations,
            "seconds": seconds,
            "evaluations": evaluations,
            "ess": ess,
            "ess_scalar": ess_scalar,
        }
        changed = {name: value for name, value in given.items() if value is not None}
        if changed:
            before = asdict(self.config.stop) if changed.keys() == {"ess_scalar"} else {}
            raw = {**self.config.to_dict(), "stop": {**asdict(StopTable()), **before, **changed}}
            self.config = Config.resolve(raw, self.experiment, self.config.options)
            identity.write_changed(self.folder, self.config)
        if self.config.stop.ess_scalar and self.config.stop.ess_scalar not in self.scalars:
            raise InputError(f"ess_scalar: {self.config.stop.ess_scalar!r} is not one of {', '.join(self.scalars)}")

    def _stop(self, caught: list[str]) -> Outcome | None:
        if caught:
            return Outcome(caught[0], False)
        rows = self.chain.evaluate.counts.rows
        return met(self.config.stop, self.chain.iteration, self.seconds, rows, self.ess_seen)

    def ess(self) -> float:
        """Of the scalar that the stop rule names, else the least of those that vary; as flushed."""
        return min(effective_sizes(self._flushed_scalars()).values(), default=0.0)

    def _flushed_scalars(self) -> dict[str, np.ndarray]:
        """What the stop rule looks at: draws after burn-in, (draws, chains)."""
        wanted = self.config.stop.ess_scalar
        names = [wanted] if wanted else list(self.scalars)
        draws, _ = read_store(self.folder / "samples.zarr", {"iteration", *(f"scalars/{name}" for name in names)})
        first = n_burnt(draws["iteration"], self.history, self.config.output.burn_in)
        return {name: draws[f"scalars/{name}"][first:] for name in names}

    # -- changing one's mind -----------------------------------------------------------------------------

    def refine(
        self,
        *,
        add: Iterable[Reward | Mapping[str, Any]] = (),
        remove: Iterable[str] = (),
        change: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Add, remove or change reward terms from the next iteration on; replicas stay where they are.

        Terms are `Reward`s, or tables as in a configuration; `change` maps names to new values of such keys. A target
        that cannot be evaluated is refused, and the chain goes on with the old one.
        """
        if self.target_index < len(self.history) - 1:
            n = self.history[-1]["from_iteration"]
            raise InputError(
                f"a target was accepted for iteration {n} before the run was killed: let it get there first"
            )
        tables: list[Mapping[str, Any]] = []
        for term in add:
            if isinstance(term, Reward):
                self.experiment = replace(self.experiment, terms={**self.experiment.terms, term.name: term})
                term = python_reward(term)
            tables.append(term)
        self._refine(control.Request("", tables, list(remove), dict(change or {})))

    def _refine(self, request: control.Request) -> None:
        """All or nothing: the history is written once the chain has taken the new target."""
        before = self.history[self.target_index]["rewards"]
        rewards = [reward_table(r, self.experiment) for r in control.refined(before, request)]
        if rewards == before:
            raise InputError("nothing to change: the target would stay as it is")
        counts = self.chain.evaluate.counts
        saved = counts.copy()
        try:
            self.chain.target = self._target(rewards)
        except Exception:
            for name in ("rows", "calls", "gradient_rows", "rewards", "nonfinite"):
                setattr(counts, name, getattr(saved, name))
            raise
        n = self.chain.iteration + 1
        # Appended even if its predecessor was never sampled: checkpoints refer to targets by their place.
        entry = {
            "from_iteration": n,
            "rewards": rewards,
            "request": request.id,
            "probe": identity.probe(self.chain.evaluate),
        }
        self.history = [*self.history, entry]
        self._write_history()
        self.target_index = len(self.history) - 1
        self._new_target()

    def _requests(self) -> None:
        """Take up what `crepe-diffusion refine` has asked for, once all that was accepted before is in force."""
        if self.target_index < len(self.history) - 1:
            return
        known = {entry["request"] for entry in self.history}
        for path, request in control.pending(self.folder):
            if isinstance(request, DamagedError):
                self.log.session(f"refinement refused: {request}")
                control.answer(path, False, str(request))
            elif request.id in known:
                control.answer(path, True, "already in force")
            else:
                try:
                    self._refine(request)
                except (InputError, NonFiniteError) as error:
                    self.log.session(f"refinement refused: {error}")
                    control.answer(path, False, str(error))
                else:
                    control.answer(path, True, f"in force from iteration {self.chain.iteration + 1}")

    def _scheduled(self) -> None:
        """Targets of the history that begin with the next iteration: after a crash they are taken up again."""
        following = self.target_index + 1
        while following < len(self.history) and self.history[following]["from_iteration"] <= self.chain.iteration + 1:
            rewards = self.history[following]["rewards"]
            self.chain.target = self._target(rewards)
            self.target_index = following
            self._new_target()
            following += 1

    def _new_target(self) -> None:
        # Logged under the iteration to come: a checkpoint of the present one may or may not know of it.
        rewards = self.history[self.target_index]["rewards"]
        self.log.chain(self.chain.iteration + 1, f"new target: {_describe(rewards)}")
        self.ess_seen = 0.0

    def _target(self, rewards: Iterable[Mapping[str, Any]]) -> Target:
        return replace(self.experiment.target, rewards=tuple(self.experiment.term(r) for r in rewards))

    def _probe(self) -> identity.Probe:
        return identity.probe(self.chain.evaluate)

    def _write_history(self) -> None:
        write_json(self.folder / "targets.json", {"targets": self.history})

    # -- what it is made of ------------------------------------------------------------------------------

    def _chain(self, target: Target, ladder: Ladder, start: dict[str, Tensor] | None) -> ReplicaExchange:
        s = self.config.sampler
        return ReplicaExchange(
            target,
            ladder,
            n_chains=s.n_chains,
            seed=s.seed,
            process=self.experiment.process,
            proposal=s.make_proposal(),
            explorer=s.make_explorer(),
            micro_batch=s.micro_batch or None,
            nonfinite=s.nonfinite,
            fit_samples=s.fit_samples,
            start=start,
        )

    def data(self) -> RunData:
        """What has been sampled so far."""
        if not self.closed:
            self.flush()
        return read_run(self.folder)


def _flush_pause(wanted: float, cost: float) -> float:
    """Seconds until the next flush: flushes take at most a hundredth of the time, unless asked for at every step."""
    return max(wanted, 99 * cost) if wanted else 0.0


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Complaints about a file begin with its name."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def _make_importable(path: str) -> None:
    if path and path not in sys.path:
        sys.path.insert(0, path)


def _describe(rewards: list[dict[str, Any]]) -> str:
    return ", ".join(f"{r['name']} (scale {r['scale']:g})" for r in rewards) or "no rewards"
