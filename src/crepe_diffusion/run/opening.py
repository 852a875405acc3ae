"""How a run begins: from a sampler, from a configuration, or from the folder of an earlier session."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from crepe_diffusion.diagnostics.data import default_scalars
from crepe_diffusion.errors import InputError, NonFiniteError
from crepe_diffusion.models import Model
from crepe_diffusion.run import checkpoint, control, identity
from crepe_diffusion.run.config import Config, read_toml, sampler_table
from crepe_diffusion.run.configured import plain
from crepe_diffusion.run.experiment import Experiment, build
from crepe_diffusion.run.files import ASIDE, DamagedError, clear_leftovers, make_directory, remove
from crepe_diffusion.run.folder import Lock, check_targets_trusted, is_run, read_targets, require_run
from crepe_diffusion.run.history import History
from crepe_diffusion.run.log import Log
from crepe_diffusion.run.recorder import Recorder, Scalars
from crepe_diffusion.run.stopping import EssRule
from crepe_diffusion.run.store import disagreements, read_manifest, verify_store
from crepe_diffusion.run.team import Group, by_all, group, leading
from crepe_diffusion.run.trust import check_trust
from crepe_diffusion.samplers.base import Continuing
from crepe_diffusion.targets import Reward, Target

__all__ = ["Made", "Opened", "described", "from_config", "from_sampler", "rehearse", "resumed", "sampler_of"]


@dataclass
class Opened:
    """A run that is ready to go on, and holds the lock of its folder.

    Of several processes, only number 0 has a lock, a log and a recorder.
    """

    folder: Path
    config: Config
    lock: Lock
    log: Log | None
    sampler: Continuing[Any]
    history: History
    recorder: Recorder | None
    seconds: float = 0.0
    ess_rule: EssRule = field(default_factory=EssRule)
    is_new: bool = True


@dataclass(frozen=True)
class Made:
    """What was made in Python, for a run that began there."""

    target: Target | Model | None = None
    rewards: list[Reward] = field(default_factory=list)
    scalars: Scalars | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


# -- beginning ---------------------------------------------------------------------------------------------------


def from_sampler(folder: Path, sampler: Continuing[Any], scalars: Scalars | None, output: Mapping[str, Any]) -> Opened:
    """A new run with this very sampler."""
    if not isinstance(sampler, Continuing):
        raise InputError(
            f"a run needs a sampler that can go on, such as ReplicaExchange(target, ladder), got {sampler!r}"
        )
    team = group()
    experiment = Experiment.of(sampler.target, sampler.target.rewards, scalars)
    table, unwritable = sampler_table(sampler)
    given = {
        "experiment": "python",
        "ladder": plain(sampler.ladder),
        "sampler": table,
        "output": output,
        "reward": [{"name": term.name} for term in sampler.target.rewards],
    }
    config = Config.resolve(given, experiment, {}, unwritable)
    if team is not None and not team.leads:
        team.hear()
        return _ready(team, folder, config, experiment, sampler)

    def given_by_all(history: History) -> Continuing[Any]:
        if team is not None:
            team.tell({})
        return sampler

    with leading(team):
        return _told(team, _new(folder, config, experiment, given_by_all))


def from_config(folder: Path, config: Mapping[str, Any] | str | Path, import_path: str) -> Opened:
    """A new run of what a TOML file, or a dictionary of the same form, describes."""
    team = group()
    if team is not None and not team.leads:
        return _follow(team, folder, Made())
    with leading(team):
        return _told(team, _from_config(folder, config, import_path))


def _from_config(folder: Path, config: Mapping[str, Any] | str | Path, import_path: str) -> Opened:
    if isinstance(config, (str, Path)):
        given, import_path = read_toml(Path(config)), str(Path(config).resolve().parent)
    else:
        given, import_path = dict(config), os.path.abspath(import_path) if import_path else ""
    _make_importable(import_path)
    if not isinstance(given.get("experiment"), str):
        raise InputError('a configuration names its experiment: experiment = "mixture-tilt"')
    options = given.get("options", {})
    if not isinstance(options, Mapping):
        raise InputError(f"options must be a table, [options], got {options!r}")
    experiment, options = _built(given, Made(), import_path)
    resolved = Config.resolve(given, experiment, options)
    return _new(folder, resolved, experiment, _first_sampler(resolved, experiment), import_path)


def _new(
    folder: Path,
    config: Config,
    experiment: Experiment,
    make: Callable[[History], Continuing[Any]],
    import_path: str = "",
) -> Opened:
    _check_free(folder)
    make_directory(folder)
    lock, log = _held(folder)
    try:
        _check_free(folder)  # another process may have begun here just before
    except BaseException:
        lock.release()
        raise
    try:
        return _begin(folder, config, experiment, make, import_path, lock, log)
    except BaseException:
        # Nothing was sampled: leave no half-made run in the way of the next attempt.
        if not _names(folder / "checkpoints"):
            _wipe(folder, log)
            for name in ("config.toml", "log.txt"):
                (folder / name).unlink(missing_ok=True)
        lock.release()
        raise


def _check_free(folder: Path) -> None:
    if is_run(folder):
        raise InputError(f"{folder} already holds a run: resume it, or choose another folder")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is not a folder: choose another name")
    # A run that died before it wrote its configuration may have left these; anything else is not ours.
    foreign = [
        n for n in _names(folder) if n not in (".lock", "control", "log.txt", "run.json") and not n.startswith(ASIDE)
    ]
    if foreign:
        raise InputError(f"{folder} is not empty, there is {foreign[0]!r}: choose another folder")


def _begin(
    folder: Path,
    config: Config,
    experiment: Experiment,
    make: Callable[[History], Continuing[Any]],
    import_path: str,
    lock: Lock,
    log: Log,
) -> Opened:
    """A new run, or one that was killed before its first checkpoint; both are the same."""
    scalars, run = _scalars(config, experiment), uuid.uuid4().hex
    # The configuration last: it makes a run of the folder.
    identity.write_information(folder, run, config, experiment, import_path)
    identity.write_config(folder, config)
    history = History(folder, run, experiment, [])
    sampler = make(history)
    probe = by_all(lambda: identity.probe(sampler.evaluate))
    _check_adapts(config, sampler)
    history.add(sampler.iteration + 1, config.reward, probe)
    recorder = Recorder(folder / "samples.zarr", sampler, scalars, run)
    recorder.store.create()
    log.session(f"started {config.experiment}, seed {config.sampler.get('seed', '-')}")
    return Opened(folder, config, lock, log, sampler, history, recorder)


def _first_sampler(config: Config, experiment: Experiment) -> Callable[[History], Continuing[Any]]:
    return lambda history: _made_by_all(config, experiment, history, config.reward, None)


def sampler_of(
    config: Config, experiment: Experiment, target: Target, start: dict[str, Tensor] | None
) -> Continuing[Any]:
    process = {} if experiment.process is None else {"process": experiment.process}
    sampler = config.sampler_class(target, config.levels, **{**process, **config.sampler_arguments}, start=start)
    if not isinstance(sampler, Continuing):
        raise InputError(f"[sampler]: {config.sampler['kind']!r} cannot go on; see crepe_diffusion.samplers.Continuing")
    return sampler


def _check_adapts(config: Config, sampler: Continuing[Any]) -> None:
    if config.output.adapt_at and not hasattr(sampler, "adapt"):
        raise InputError(f"[output] adapt_at: {type(sampler).__name__} has no levels that it could move")


def _scalars(config: Config, experiment: Experiment) -> Scalars:
    functions = experiment.scalars or default_scalars(experiment.target.models[0].event_shape)
    for name in config.output.scalars:
        if name not in functions:
            raise InputError(f"[output] scalars: no {name!r}; there are {', '.join(functions)}")
    return {name: functions[name] for name in config.output.scalars or functions}


# -- going on ----------------------------------------------------------------------------------------------------


def resumed(folder: Path, made: Made, allow_changed: bool, trust: bool, notify: Callable[[str], None]) -> Opened:
    """The run of this folder as its last checkpoint left it."""
    team = group()
    if team is not None and not team.leads:
        return _follow(team, folder, made)
    with leading(team):
        return _told(team, _resumed(folder, made, allow_changed, trust, notify))


def _resumed(folder: Path, made: Made, allow_changed: bool, trust: bool, notify: Callable[[str], None]) -> Opened:
    require_run(folder)
    identity.check_schema(folder)
    import_path = _trusted(folder, trust)
    with _named(folder / "config.toml"):
        given = read_toml(folder / "config.toml")
        experiment, options = _built(given, made, import_path)
        config = Config.resolve(given, experiment, options, made.arguments)
    lock, log = _held(folder)

    def note(text: str) -> None:
        log.session(text)
        notify(text)

    try:
        clear_leftovers(folder)
        if not _names(folder / "checkpoints"):
            note("no checkpoint was reached: starting from the beginning")
            _wipe(folder, log)
            return _begin(folder, config, experiment, _first_sampler(config, experiment), import_path, lock, log)
        return _from_checkpoint(folder, config, experiment, allow_changed, trust, note, lock, log)
    except BaseException:
        lock.release()
        raise


def _described(given: Mapping[str, Any], made: Made) -> tuple[Experiment, dict[str, Any]]:
    """The experiment that a configuration names, with all of its options, or what was made in Python."""
    if given.get("experiment") == "python":
        if made.target is None:
            raise InputError("this run was made in Python: resume it there, with Run.resume(folder, target=...)")
        target = made.target.as_target() if isinstance(made.target, Model) else made.target
        return Experiment.of(target, [*target.rewards, *made.rewards], made.scalars), {}
    if made.target is not None:
        raise InputError(f"the experiment {given.get('experiment')!r} builds its own target; change this file instead")
    return build(str(given.get("experiment")), given.get("options", {}))


def _from_checkpoint(
    folder: Path,
    config: Config,
    experiment: Experiment,
    allow_changed: bool,
    trust: bool,
    notify: Callable[[str], None],
    lock: Lock,
    log: Log,
) -> Opened:
    def damaged(error: DamagedError) -> None:
        notify(f"damaged: {error}; using the checkpoint before it")
        checkpoint.set_aside(folder / "checkpoints" / error.path.parent.name)

    path, position, tensors = checkpoint.newest(folder, damaged)
    identity.check_unchanged(folder, position.run, config, experiment, allow_changed, notify)
    if position.config_hash != config.identity() and not allow_changed:
        raise InputError(f"{path} belongs to another configuration; --allow-changed takes it anyway")
    try:
        entries = read_targets(folder, position)
        history = History(folder, position.run, experiment, entries, position.target)
    except DamagedError as error:
        notify(f"damaged: {error}; taken from {path}, what was changed after it is lost")
        history = History(folder, position.run, experiment, position.history, position.target)
        if not trust:
            check_trust(path, "", history.code)
        history.write()
    if trust and history.code:
        history.write()  # signed by this user from now on
    sampler = _made_by_all(config, experiment, history, history.now["rewards"], tensors)
    now = by_all(lambda: identity.probe(sampler.evaluate))
    _check_adapts(config, sampler)
    identity.check_probe(folder, now, history.now["probe"], allow_changed, notify)
    log.rewind(position.iteration)
    recorder = Recorder(folder / "samples.zarr", sampler, _scalars(config, experiment), position.run)
    _continue_store(recorder, position, notify)
    log.session(f"resumed at iteration {position.iteration}")
    ess_rule = EssRule(position.next_look, position.ess_seen)
    return Opened(folder, config, lock, log, sampler, history, recorder, position.seconds, ess_rule, is_new=False)


def described(folder: Path, made: Made, trust: bool) -> tuple[Config, Experiment]:
    """What the configuration of a folder describes, if its code may be run."""
    _trusted(folder, trust)
    with _named(folder / "config.toml"):
        given = read_toml(folder / "config.toml")
        experiment, options = _described(given, made)
        return Config.resolve(given, experiment, options, made.arguments), experiment


def rehearse(folder: Path, request: control.Request, trust: bool) -> None:
    """Evaluate a request as the next session will, and raise what it would raise; nothing is written."""
    config, experiment = described(folder, Made(), trust)
    _, position, tensors = checkpoint.newest(folder, lambda error: None)
    entries = read_targets(folder, position)
    history = History(folder, position.run, experiment, entries, len(entries) - 1)
    sampler = sampler_of(config, experiment, history.target(history.now["rewards"]), tensors)
    for _, earlier in control.pending(folder):
        if isinstance(earlier, control.Request):
            with suppress(InputError, NonFiniteError):  # it will be refused then, too
                rewards, _ = history.take(sampler, earlier)
                history.entries = [{**history.now, "rewards": rewards}]
                history.index = 0
    history.take(sampler, request)


def _continue_store(recorder: Recorder, position: checkpoint.Position, notify: Callable[[str], None]) -> None:
    """Go back to what the checkpoint knows of the samples, and verify all of it."""
    root, generation = recorder.root, int(time.time())
    try:
        manifest = read_manifest(root)
        for problem in disagreements(root, manifest, position.samples):
            if problem.path == root / "zarr.json":
                raise problem
        generation = int(manifest["attributes"]["generation"])
        recorder.store.lost = list(manifest["attributes"].get("lost", []))
    except DamagedError as error:
        # All that it holds is in the checkpoint too.
        notify(f"damaged: {error}; written again")
    recorder.store.rewind(position.n_draws, position.n_steps, position.seals, generation + 1)
    for problem in verify_store(recorder.root):
        raise problem


# -- several processes -------------------------------------------------------------------------------------------


def _built(given: Mapping[str, Any], made: Made, import_path: str) -> tuple[Experiment, dict[str, Any]]:
    """The experiment, built by all processes at once: their networks may be parts of one."""
    team = group()
    if team is not None:
        named = {name: given[name] for name in ("experiment", "options") if name in given}
        team.tell({"given": named, "import_path": import_path})
    return by_all(lambda: _described(given, made))


def _made_by_all(
    config: Config,
    experiment: Experiment,
    history: History,
    rewards: list[dict[str, Any]],
    start: dict[str, Tensor] | None,
) -> Continuing[Any]:
    """The sampler; where there are several processes, process 0 tells the others what it is made of."""
    target, team = history.target(rewards), group()
    if team is None:
        return sampler_of(config, experiment, target, start)
    if team.size > 1 and config.sampler_arguments.get("micro_batch") is None:
        raise InputError(
            f"{team.size} processes share the rows of a batch in blocks: give their size, such as"
            " --set sampler.micro_batch=16"
        )
    message = {"config": config.to_dict(), "rewards": rewards, "goes_on": start is not None}
    team.tell(message, start)
    return team.alike(lambda: sampler_of(config, experiment, target, start))


def _told(team: Group | None, opened: Opened) -> Opened:
    """The others go on once process 0 is ready."""
    if team is not None:
        team.tell({"entries": opened.history.entries, "index": opened.history.index, "run": opened.history.run})
    return opened


def _follow(team: Group, folder: Path, made: Made) -> Opened:
    """A process other than 0: what that one tells, and no files."""
    begun, _ = team.hear()
    _make_importable(begun["import_path"])
    experiment, options = team.alike(lambda: _described(begun["given"], made))
    message, start = team.hear()

    def make() -> tuple[Config, Experiment, Continuing[Any]]:
        config = Config.resolve(message["config"], experiment, options, made.arguments)
        target = replace(experiment.target, rewards=tuple(experiment.reward(r) for r in message["rewards"]))
        return config, experiment, sampler_of(config, experiment, target, start if message["goes_on"] else None)

    return _ready(team, folder, *team.alike(make))


def _ready(team: Group, folder: Path, config: Config, experiment: Experiment, sampler: Continuing[Any]) -> Opened:
    team.alike(lambda: identity.probe(sampler.evaluate))
    message, _ = team.hear()
    history = History(folder, message["run"], experiment, message["entries"], message["index"], writes=False)
    return Opened(folder, config, Lock(folder), None, sampler, history, None, is_new=False)


# -- the folder --------------------------------------------------------------------------------------------------


def _held(folder: Path) -> tuple[Lock, Log]:
    lock = Lock(folder)
    lock.acquire()
    make_directory(folder / "control")
    return lock, Log(folder / "log.txt")


def _wipe(folder: Path, log: Log) -> None:
    """Remove the beginnings of a run that has sampled nothing."""
    for name in ("samples.zarr", "checkpoints"):
        remove(folder / name)
    for name in ("run.json", "targets.json"):
        (folder / name).unlink(missing_ok=True)
    log.rewind(-1)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors about a file begin with its name."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def _trusted(folder: Path, trust: bool) -> str:
    """Where the run's modules are looked for, once it is clear whose they are."""
    path = identity.import_path(folder, trust)
    if not trust:
        check_targets_trusted(folder)
    _make_importable(path)
    return path


def _make_importable(path: str) -> None:
    """Behind all others: a file beside a configuration takes no installed module's place."""
    if path and path not in sys.path:
        sys.path.append(path)
