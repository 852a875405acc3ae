"""Configurations: TOML in, every default written out, and an error for every key that means nothing.

schema defaults  <  defaults of the experiment  <  the file  <  the command line
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

import tomli_w

from crepe_diffusion.errors import InputError
from crepe_diffusion.kernels import Bounce, Explorer, Langevin, SingleToken
from crepe_diffusion.proposals import Proposal
from crepe_diffusion.run.experiment import Experiment, nearest
from crepe_diffusion.run.files import digest
from crepe_diffusion.schedules import Ladder, ladder
from crepe_diffusion.stitching import Restitch

__all__ = ["Config", "read_toml", "reward_table"]


@dataclass(frozen=True)
class LadderTable:
    """`kind` is karras, geometric, linear or times; `adapt_at` lists iterations at which levels are moved."""

    kind: str = "karras"
    n_levels: int = 21
    sigma_min: float = 0.01
    sigma_max: float = 20.0
    rho: float = 7.0
    t_min: float = 0.0
    t_max: float = 1.0
    substeps: int = 1
    n_finish: int = 0
    times: list[float] = field(default_factory=list)
    finish: list[float] = field(default_factory=list)
    adapt_at: list[int] = field(default_factory=list)

    def make(self) -> Ladder:
        match self.kind:
            case "karras":
                return ladder.karras(
                    self.n_levels, self.sigma_min, self.sigma_max, self.rho, self.substeps, self.n_finish
                )
            case "geometric":
                return ladder.geometric(self.n_levels, self.sigma_min, self.sigma_max, self.substeps, self.n_finish)
            case "linear":
                return ladder.linear(self.n_levels, self.t_min, self.t_max, self.substeps, self.n_finish)
            case "times":
                return ladder.of(self.times, self.substeps, self.finish)
        raise InputError(f"[ladder] kind must be karras, geometric, linear or times, got {self.kind!r}")


@dataclass(frozen=True)
class SamplerTable:
    """Settings of `ReplicaExchange`; 0 means no limit for `micro_batch` and `clip`, "" means the target's own."""

    n_chains: int = 4
    seed: int = 0
    explorer: str = "bounce"
    explorer_steps: int = 1
    explorer_scale: float = 1.0
    restitch_candidates: int = 2048
    restitch_chance: float = 0.05
    restitch_between: list[float] = field(default_factory=lambda: [0.07, 0.16])
    proposal: str | list[float] = "balanced"
    proposal_exponents: list[float] = field(default_factory=list)
    guidance: str = ""
    clip: float = 0.0
    micro_batch: int = 0
    nonfinite: str = "raise"
    fit_samples: int = 256

    def make_explorer(self) -> Explorer | None:
        match self.explorer:
            case "none":
                return None
            case "bounce":
                return Bounce(self.explorer_steps)
            case "langevin":
                return Langevin(self.explorer_scale)
            case "metropolis":
                return SingleToken(self.explorer_steps)
            case "restitch":
                if len(self.restitch_between) != 2:
                    raise InputError(f"[sampler] restitch_between must be two times, got {self.restitch_between!r}")
                low, high = self.restitch_between
                return Restitch(self.restitch_candidates, self.restitch_chance, (low, high))
        raise InputError(
            f"[sampler] explorer must be bounce, langevin, metropolis, restitch or none, got {self.explorer!r}"
        )

    def make_proposal(self) -> Proposal:
        k = self.proposal if isinstance(self.proposal, str) else tuple(self.proposal)
        return Proposal(
            k,  # type: ignore[arg-type]
            tuple(self.proposal_exponents) or None,
            self.guidance or None,
            self.clip or None,
        )


@dataclass(frozen=True)
class OutputTable:
    """What is kept, and how often it is brought to disk; `burn_in` counts iterations, after every change of target.

    `scalars` chooses among those of the experiment ([] takes all). A checkpoint is due after so many seconds, and
    after so many iterations (0: never by count).
    """

    thin: int = 1
    burn_in: int = 0
    scalars: list[str] = field(default_factory=list)
    trace_every: int = 1
    checkpoint_seconds: float = 60.0
    checkpoint_iterations: int = 0
    flush_seconds: float = 10.0


@dataclass(frozen=True)
class StopTable:
    """When a run is finished: whichever comes first, counted over all its sessions; 0 means never.

    `evaluations` counts network rows; `ess` is the effective sample size that `ess_scalar` ("": every scalar) reaches.
    """

    iterations: int = 0
    seconds: float = 0.0
    evaluations: int = 0
    ess: float = 0.0
    ess_scalar: str = ""


@dataclass(frozen=True)
class RewardTable:
    """One reward term: `kind` and `parameters` say which function, the others are those of `Reward`."""

    name: str
    kind: str
    scale: float = 1.0
    guidance: str = "none"
    on: str = "prediction"
    anneal: str = "power"
    anneal_exponent: float = 5.0
    anneal_floor: float = 1e-10
    parameters: dict[str, Any] = field(default_factory=dict)


CADENCE = ("checkpoint_seconds", "checkpoint_iterations", "flush_seconds")
TABLES = {"ladder": LadderTable, "sampler": SamplerTable, "output": OutputTable, "stop": StopTable}


@dataclass(frozen=True)
class Config:
    """A resolved configuration. What may change between sessions (`[stop]`, cadences) is not part of its `identity`."""

    experiment: str
    options: dict[str, Any]
    ladder: LadderTable
    sampler: SamplerTable
    output: OutputTable
    stop: StopTable
    reward: list[dict[str, Any]]

    @staticmethod
    def resolve(given: Mapping[str, Any], experiment: Experiment, options: dict[str, Any]) -> Config:
        """All tables with all defaults, checked; the options are those that the experiment was built with."""
        known = ["experiment", "options", "reward", *TABLES]
        for key in given:
            if key not in known:
                raise InputError(f"unknown key {key!r}{nearest(key, known)}; known are {', '.join(known)}")
        tables = {
            name: table(cls, {**experiment.defaults.get(name, {}), **_as_table(given, name)}, f"[{name}]")
            for name, cls in TABLES.items()
        }
        rewards = given.get("reward", experiment.defaults.get("reward", []))
        if not isinstance(rewards, list):
            raise InputError("rewards are given as [[reward]] tables, with two pairs of brackets")
        config = Config(
            experiment=given["experiment"],
            options=options,
            reward=[reward_table(r, experiment) for r in rewards],
            **tables,
        )
        config._check(experiment)
        return config

    def _check(self, experiment: Experiment) -> None:
        for name, value, least in (
            ("[output] thin", self.output.thin, 1),
            ("[output] trace_every", self.output.trace_every, 1),
            ("[output] burn_in", self.output.burn_in, 0),
            ("[output] checkpoint_iterations", self.output.checkpoint_iterations, 0),
            ("[output] checkpoint_seconds", self.output.checkpoint_seconds, 0),
            ("[output] flush_seconds", self.output.flush_seconds, 0),
            *((f"[stop] {f.name}", getattr(self.stop, f.name), 0) for f in fields(StopTable) if f.name != "ess_scalar"),
        ):
            if value < least:
                raise InputError(f"{name} must be at least {least}, got {value!r}")
        scalars = self.output.scalars or list(experiment.scalars)
        for scalar in self.output.scalars:
            if experiment.scalars and scalar not in experiment.scalars:
                near = nearest(scalar, experiment.scalars)
                raise InputError(f"[output] scalars: no {scalar!r}{near}; there are {', '.join(experiment.scalars)}")
        wanted = self.stop.ess_scalar
        if wanted and scalars and wanted not in scalars:
            raise InputError(f"[stop] ess_scalar: {wanted!r} is not recorded; recorded are {', '.join(scalars)}")

    def to_dict(self) -> dict[str, Any]:
        return {
            "experiment": self.experiment,
            "options": self.options,
            "ladder": asdict(self.ladder),
            "sampler": asdict(self.sampler),
            "output": asdict(self.output),
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


def table(cls: type, given: Mapping[str, Any], what: str) -> Any:
    """A table of the schema, its keys and types checked."""
    hints = get_type_hints(cls)
    for key in given:
        if key not in hints:
            raise InputError(f"{what}: unknown key {key!r}{nearest(key, hints)}; known are {', '.join(hints)}")
    missing = [
        f.name
        for f in fields(cls)
        if f.name not in given and f.default is f.default_factory  # both MISSING
    ]
    if missing:
        raise InputError(f"{what}: {', '.join(map(repr, missing))} must be given")
    return cls(**{key: _typed(value, hints[key], f"{what} {key}") for key, value in given.items()})


def reward_table(given: Mapping[str, Any], experiment: Experiment) -> dict[str, Any]:
    """A `[[reward]]` table with every default, its kind and parameters checked."""
    if not isinstance(given, Mapping):
        raise InputError(f"a reward is a table with name and kind, got {given!r}")
    what = f"[[reward]] {given['name']!r}:" if "name" in given else "[[reward]]"
    value = asdict(table(RewardTable, given, what))
    value["parameters"] = experiment.parameters(value)
    experiment.term(value)
    return value


def _as_table(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = given.get(name, {})
    if not isinstance(value, Mapping):
        raise InputError(f"{name} must be a table, [{name}], got {value!r}")
    return value


def _typed(value: Any, hint: Any, what: str) -> Any:
    """The value, with whole numbers taken for floats; anything else of a wrong type is an error."""
    words = {
        int: "a whole number",
        float: "a number",
        str: "a string",
        list[int]: "a list of whole numbers",
        list[float]: "a list of numbers",
        list[str]: "a list of strings",
        dict[str, Any]: "a table",
    }
    if hint == str | list[float]:
        return _typed(value, str if isinstance(value, str) else list[float], what)
    plain = not isinstance(value, bool)
    if hint is float and isinstance(value, (int, float)) and plain:
        return float(value)
    if hint in (int, str) and isinstance(value, hint) and plain:
        return value
    if hint == dict[str, Any] and isinstance(value, Mapping):
        return dict(value)
    if hint in (list[int], list[float], list[str]) and isinstance(value, (list, tuple)):
        return [_typed(v, hint.__args__[0], what) for v in value]
    raise InputError(f"{what} must be {words[hint]}, got {value!r}")


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file, with its name in every complaint."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder; a configuration is a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not TOML: {error}") from None
