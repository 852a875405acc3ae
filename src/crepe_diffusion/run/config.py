"""Configurations: TOML in, every default written out, and an error for every key that means nothing.

defaults of the classes  <  defaults of the experiment  <  the file  <  the command line
"""

from __future__ import annotations

import inspect
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import tomli_w

from crepe_diffusion.errors import InputError
from crepe_diffusion.run.configured import (
    NotWritableError,
    arguments,
    configure,
    found,
    kind_of,
    merged,
    nearest,
    recorded,
    written,
)
from crepe_diffusion.run.experiment import Experiment
from crepe_diffusion.run.files import MOST_JSON, digest
from crepe_diffusion.samplers.base import Continuing
from crepe_diffusion.schedules import Ladder, ladder

__all__ = ["Config", "Output", "Stop", "read_toml", "sampler_table"]

LADDERS = {name: getattr(ladder, name) for name in ("karras", "geometric", "linear")}
MADE_BY_A_RUN = ("target", "ladder", "pilot", "start")
"""Arguments of a sampler that have tables of their own, or come from a checkpoint."""


@dataclass(frozen=True)
class Output:
    """What is kept, and how often it is brought to disk; `burn_in` counts iterations, after every change of target.

    `scalars` chooses among those of the experiment (empty: all). `adapt_at` lists iterations at which levels are moved
    so that all pairs reject equally. A checkpoint is due after so many seconds, and after so many iterations (0: never
    by count).
    """

    thin: int = 1
    burn_in: int = 0
    scalars: tuple[str, ...] = ()
    adapt_at: tuple[int, ...] = ()
    trace_every: int = 1
    checkpoint_seconds: float = 60.0
    checkpoint_iterations: int = 0
    flush_seconds: float = 10.0

    def __post_init__(self) -> None:
        least = {"thin": 1, "trace_every": 1}
        for name in ("thin", "trace_every", "burn_in", *CADENCE):
            if not getattr(self, name) >= least.get(name, 0):  # NaN is refused too
                raise InputError(f"[output] {name} must be at least {least.get(name, 0)}, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class Stop:
    """When a run is finished: whichever comes first, counted over all its sessions; 0 means never.

    `evaluations` counts network rows; `ess` is the effective sample size that `ess_scalar` ("": every scalar) reaches.
    """

    iterations: int = 0
    seconds: float = 0.0
    evaluations: int = 0
    ess: float = 0.0
    ess_scalar: str = ""

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self) if f.name != "ess_scalar"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"[stop] {name} must be finite and at least 0, got {getattr(self, name)!r}")

    @staticmethod
    def of(table: Mapping[str, Any]) -> Stop:
        return Stop(**arguments(Stop, table, "[stop]")[0])


CADENCE = ("checkpoint_seconds", "checkpoint_iterations", "flush_seconds")
TABLES = ("options", "ladder", "sampler", "output", "stop")
KINDS = {"ladder": {"kind": "karras"}, "sampler": {"kind": "replica-exchange"}}
"""What a table without `kind` describes."""


@dataclass(frozen=True)
class Config:
    """A resolved configuration: tables as a file holds them, and the objects that they describe.

    What may change between sessions (`[stop]`, cadences) is not part of its `identity`.
    """

    experiment: str
    options: dict[str, Any]
    ladder: dict[str, Any]
    sampler: dict[str, Any]
    output: Output
    stop: Stop
    reward: list[dict[str, Any]]
    levels: Ladder
    sampler_class: Any
    sampler_arguments: dict[str, Any]

    @staticmethod
    def resolve(
        given: Mapping[str, Any],
        experiment: Experiment,
        options: dict[str, Any],
        objects: Mapping[str, Any] | None = None,
    ) -> Config:
        """All tables with all defaults, checked.

        `options` are those that the experiment was built with; `objects` are arguments of the sampler that were made in
        Python.
        """
        known = ["experiment", "reward", *TABLES]
        for key in given:
            if key not in known:
                raise InputError(f"unknown key {key!r}{nearest(key, known)} known are {', '.join(known)}")
        for name in TABLES:
            if not isinstance(given.get(name, {}), Mapping):
                raise InputError(f"{name} must be a table, [{name}], got {given[name]!r}")
        # The kind is written out first: defaults for one kind are not arguments of another.
        defaults = {name: {**KINDS.get(name, {}), **experiment.defaults.get(name, {})} for name in TABLES}
        tables = merged(defaults, {name: given.get(name, {}) for name in TABLES})
        levels = configure(tables["ladder"], "[ladder]", LADDERS)
        if not isinstance(levels.value, Ladder):
            raise InputError(f"[ladder]: {tables['ladder']['kind']!r} must make a Ladder, got {levels.value!r}")
        sampler_class, values, record = _sampler(tables["sampler"], objects or {})
        rewards = given.get("reward", experiment.defaults.get("reward", []))
        if not isinstance(rewards, list):
            raise InputError("rewards are given as [[reward]] tables, with two pairs of brackets")
        output = Output(**arguments(Output, tables["output"], "[output]")[0])
        config = Config(
            experiment=given["experiment"],
            options=options,
            ladder=levels.plain,
            sampler=record,
            output=output,
            stop=Stop.of(tables["stop"]),
            reward=[experiment.reward_table(r) for r in rewards],
            levels=levels.value,
            sampler_class=sampler_class,
            sampler_arguments=values,
        )
        config._check_scalars(experiment)
        return config

    def _check_scalars(self, experiment: Experiment) -> None:
        scalars = list(self.output.scalars or experiment.scalars)
        for scalar in self.output.scalars:
            if experiment.scalars and scalar not in experiment.scalars:
                near = nearest(scalar, experiment.scalars)
                raise InputError(f"[output] scalars: no {scalar!r}{near} there are {', '.join(experiment.scalars)}")
        wanted = self.stop.ess_scalar
        if wanted and scalars and wanted not in scalars:
            raise InputError(f"[stop] ess_scalar: {wanted!r} is not recorded; recorded are {', '.join(scalars)}")

    def to_dict(self) -> dict[str, Any]:
        """As a file holds it."""
        return {
            "experiment": self.experiment,
            "options": self.options,
            "ladder": self.ladder,
            "sampler": self.sampler,
            "output": {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self.output).items()},
            "stop": asdict(self.stop),
            "reward": self.reward,
        }

    def to_toml(self) -> str:
        return tomli_w.dumps(self.to_dict())

    def identity(self) -> str:
        """A hash of all that the samples depend on."""
        value = self.to_dict()
        del value["stop"]
        value["output"] = {k: v for k, v in value["output"].items() if k not in CADENCE}
        return digest(json.dumps(value, sort_keys=True).encode())


def _sampler(table: Mapping[str, Any], objects: Mapping[str, Any]) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The class of a `[sampler]` table, its arguments, and the table with every default."""
    kind = table["kind"]
    cls = found(kind, "[sampler]")
    for name in MADE_BY_A_RUN:
        if name in table:
            raise InputError(f"[sampler]: {name!r} is not a key of this table")
    known = [name for name in inspect.signature(cls).parameters if name not in MADE_BY_A_RUN]
    for name in objects:
        if name not in known:
            raise InputError(f"[sampler]: unknown key {name!r}{nearest(name, known)} known are {', '.join(known)}")
    fields = {name: value for name, value in table.items() if name not in ("kind", *objects)}
    for name, value in fields.items():
        if isinstance(value, Mapping) and "python" in value:
            raise InputError(
                f"[sampler] {name} was made in Python, {value['python']}: pass it again,"
                f" Run.resume(folder, target=..., {name}=...)"
            )
    values, record = arguments(cls, fields, "[sampler]", skip=(*MADE_BY_A_RUN, *objects))
    record_of = {name: recorded(value) for name, value in objects.items() if value is not None}
    return cls, {**values, **objects}, {"kind": kind, **record, **record_of}


def sampler_table(sampler: Continuing[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The `[sampler]` table of a sampler, and those of its arguments that no file can hold.

    A sampler keeps the arguments of its class in attributes of the same names, its own or those of its evaluator.
    """
    cls = type(sampler)
    try:
        table: dict[str, Any] = {"kind": kind_of(cls)}
    except NotWritableError:
        raise InputError(
            f"config.toml names the class of the sampler: define {cls.__qualname__} in a module that can be imported"
        ) from None
    unwritable: dict[str, Any] = {}
    for name in inspect.signature(cls).parameters:
        if name in MADE_BY_A_RUN:
            continue
        places = [place for place in (sampler, sampler.evaluate) if hasattr(place, name)]
        if not places:
            raise InputError(f"a sampler keeps its arguments: {cls.__name__} has no attribute {name!r}")
        value = getattr(places[0], name)
        if value is None:
            continue
        try:
            table[name] = written(value, cls, name)
        except NotWritableError:
            unwritable[name] = value
    return table, unwritable


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file, with its name in every error."""
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_JSON + 1)
        if len(content) > MOST_JSON:
            raise InputError(f"{path} is larger than the {MOST_JSON:,} bytes that a configuration can have")
        return tomllib.loads(content.decode("utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder; a configuration is a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not TOML: {error}") from None
