"""What a run samples: models, the rewards that may tilt them, and the scalars worth looking at.

A builder is any function that returns an `Experiment`; its keyword arguments are the options of the experiment. A
configuration names it as `package.module:function`, or by the short name of a built-in one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from crepe_diffusion.errors import InputError
from crepe_diffusion.processes import Process
from crepe_diffusion.run.configured import arguments, found, nearest, note
from crepe_diffusion.schedules import anneal
from crepe_diffusion.targets import Reward, Target

__all__ = ["Experiment", "build", "find"]

BUILTIN = "crepe_diffusion.presets.builtin"
ANNEALS = {name: getattr(anneal, name) for name in ("power", "linear", "constant")}
Scalar = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Experiment:
    """Models and exponents, and by name all that may be added to them.

    - `target`: the law before any reward; `process`: kernels other than the model's own;
    - `rewards`: short names of reward functions, `function(batch, **fields) -> (rows,)`, or of classes whose objects
      are such functions and whose arguments are the fields; `terms`: finished terms, which a `[[reward]]` table uses
      by their name;
    - `anneals`: further ways to anneal a reward, by name;
    - `scalars`: functions of a batch of samples; `defaults`: tables of the configuration that suit this experiment;
    - `decode`: from draws to images or texts, for the report at the end of a run, such as `model.decode`;
    - `fingerprint`: anything that changes when the weights do (predictions at a few points are compared anyway).
    """

    target: Target
    rewards: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    process: Process | None = None
    fingerprint: str = ""
    terms: Mapping[str, Reward] = field(default_factory=dict)
    anneals: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    decode: Callable[[Tensor], Any] | None = None

    @staticmethod
    def of(
        target: Target,
        terms: Iterable[Reward],
        scalars: Mapping[str, Scalar] | None = None,
        process: Process | None = None,
    ) -> Experiment:
        """What a run was given in Python."""
        finished = {term.name: term for term in terms}
        return Experiment(replace(target, rewards=()), scalars=dict(scalars or {}), process=process, terms=finished)

    def with_term(self, term: Reward) -> Experiment:
        """The same with another finished term."""
        return replace(self, terms={**self.terms, term.name: term})

    def reward_table(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """A `[[reward]]` table with every default, checked."""
        return self._resolved(table)[1]

    def reward(self, table: Mapping[str, Any]) -> Reward:
        """The term that a `[[reward]]` table describes."""
        return self._resolved(table)[0]

    def _resolved(self, table: Mapping[str, Any]) -> tuple[Reward, dict[str, Any]]:
        if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
            raise InputError(f"[[reward]]: 'name' must be given, a string; got {table!r}")
        name, what = table["name"], f"[[reward]] {table['name']!r}"
        notes = {key: value for key, value in table.items() if isinstance(value, Mapping) and "python" in value}
        given = {key: value for key, value in table.items() if key not in notes}
        names = {"function": self.rewards, "anneal": {**ANNEALS, **self.anneals}}
        finished = self.terms.get(name)
        if finished is not None and "function" not in given:
            # A finished term is there again whenever the experiment is; a note in the file is enough.
            absent = [key for key in ("function", "anneal") if key not in given]
            values, record = arguments(Reward, given, what, skip=absent, names=names)
            term = replace(finished, **values)
            plain_fields = {key: getattr(term, key) for key in ("scale", "guidance", "on")}
            return term, {**record, **plain_fields, **{key: note(getattr(term, key)) for key in absent}}
        if notes:
            key, value = next(iter(notes.items()))
            raise InputError(
                f"the {key} of reward {name!r} was made in Python, {value['python']}: pass it again in rewards=[...];"
                f" given were {', '.join(sorted(self.terms)) or 'none'}"
            )
        values, record = arguments(Reward, given, what, names=names)
        return Reward(**values), record


def find(name: str) -> Callable[..., Experiment]:
    """The builder of this name."""
    if ":" in name:
        return found(name, "experiment")
    builtin = importlib.import_module(BUILTIN)
    names = {n.replace("_", "-"): getattr(builtin, n) for n in builtin.__all__}
    if name not in names:
        raise InputError(
            f"no experiment {name!r}{nearest(name, names)} built in are {', '.join(names)},"
            " and your own is written as 'package.module:function'"
        )
    builder: Callable[..., Experiment] = names[name]
    return builder


def build(name: str, options: Mapping[str, Any]) -> tuple[Experiment, dict[str, Any]]:
    """The experiment of this name, and its options with every default written out."""
    builder = find(name)
    values, record = arguments(builder, options, f"experiment {name!r}: [options]")
    try:
        experiment = builder(**values)
    except SystemExit:
        raise InputError(f"{name!r} raised SystemExit, which ends a program") from None
    if not isinstance(experiment, Experiment):
        raise InputError(f"{name!r} must return a crepe_diffusion.run.Experiment, got {experiment!r}")
    if experiment.target.rewards:
        raise InputError(f"{name!r}: leave rewards out of the target; offer them as kinds or terms")
    return experiment, record
