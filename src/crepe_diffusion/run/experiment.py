"""What a run samples: models, the rewards that may tilt them, and the scalars worth looking at.

A builder is any function that returns an `Experiment`; its keyword arguments are the options of the experiment. A
configuration names it as `package.module:function`, or by the short name of a built-in one.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from crepe_diffusion.errors import InputError
from crepe_diffusion.processes import Process
from crepe_diffusion.schedules import anneal
from crepe_diffusion.targets import Reward, Target

__all__ = ["Experiment", "build", "find", "nearest"]

BUILTIN = "crepe_diffusion.presets.builtin"
Scalar = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Experiment:
    """Models and exponents, and by name all that may be added to them.

    - `target`: the law before any reward; `process`: kernels other than the model's own;
    - `rewards`: kinds of reward, `function(batch, **parameters) -> (rows,)`; `terms`: finished terms, by name;
    - `anneals`: further ways to anneal a reward, by name;
    - `scalars`: functions of a batch of samples; `defaults`: tables of the configuration that suit this experiment;
    - `fingerprint`: anything that changes when the weights do (predictions at a few points are compared anyway).
    """

    target: Target
    rewards: Mapping[str, Callable[..., Tensor]] = field(default_factory=dict)
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    process: Process | None = None
    fingerprint: str = ""
    terms: Mapping[str, Reward] = field(default_factory=dict)
    anneals: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)

    def term(self, spec: Mapping[str, Any]) -> Reward:
        """The reward term that a resolved `[[reward]]` table describes."""
        name, kind = spec["name"], spec["kind"]
        if kind == "python":
            if name not in self.terms:
                raise InputError(
                    f"reward {name!r} was made in Python: pass it again in rewards=[...];"
                    f" given were {sorted(self.terms) or 'none'}"
                )
            return replace(self.terms[name], scale=spec["scale"])
        function = self._function(kind)
        parameters = filled(function, spec["parameters"], 1, f"reward {name!r}: parameters")
        shapes: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
            "power": lambda: anneal.power(spec["anneal_exponent"], spec["anneal_floor"]),
            "linear": anneal.linear,
            "constant": anneal.constant,
            **{key: partial(self.anneals.__getitem__, key) for key in self.anneals},
        }
        if spec["anneal"] not in shapes:
            raise InputError(f"reward {name!r}: anneal must be one of {', '.join(shapes)}, got {spec['anneal']!r}")
        return Reward(
            partial(function, **parameters) if parameters else function,
            anneal=shapes[spec["anneal"]](),
            guidance=spec["guidance"],
            on=spec["on"],
            scale=spec["scale"],
            name=name,
        )

    def parameters(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """All parameters of a reward table, defaults included."""
        if spec["kind"] == "python":
            return dict(spec["parameters"])
        return filled(self._function(spec["kind"]), spec["parameters"], 1, f"reward {spec['name']!r}: parameters")

    def _function(self, kind: str) -> Callable[..., Tensor]:
        if ":" in kind:
            return attribute(kind, "reward kind")
        if kind not in self.rewards:
            raise InputError(
                f"unknown kind of reward {kind!r}{nearest(kind, self.rewards)}; this experiment has"
                f" {', '.join(map(repr, self.rewards)) or 'none'}, and 'package.module:function' is any of yours"
            )
        return self.rewards[kind]


def find(name: str) -> Callable[..., Experiment]:
    """The builder of this name."""
    if ":" in name:
        return attribute(name, "experiment")
    builtin = importlib.import_module(BUILTIN)
    names = [n.replace("_", "-") for n in builtin.__all__]
    if name not in names:
        raise InputError(
            f"no experiment {name!r}{nearest(name, names)}; built in are {', '.join(names)},"
            " and your own is written as 'package.module:function'"
        )
    builder: Callable[..., Experiment] = getattr(builtin, name.replace("-", "_"))
    return builder


def build(name: str, options: Mapping[str, Any]) -> tuple[Experiment, dict[str, Any]]:
    """The experiment of this name, and its options with every default written out."""
    builder = find(name)
    full = filled(builder, options, 0, f"experiment {name!r}: [options]")
    experiment = builder(**full)
    if not isinstance(experiment, Experiment):
        raise InputError(f"{name!r} must return a crepe_diffusion.run.Experiment, got {experiment!r}")
    if experiment.target.rewards:
        raise InputError(f"{name!r}: leave rewards out of the target; offer them as kinds or terms")
    return experiment, full


def attribute(path: str, what: str) -> Callable[..., Any]:
    """The function that `package.module:function` names."""
    module, _, function = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except ImportError as error:
        raise InputError(f"{what} {path!r}: cannot import {module!r} ({error})") from None
    except AttributeError:
        raise InputError(f"{what} {path!r}: module {module!r} has no {function!r}") from None
    if not callable(found):
        raise InputError(f"{what} {path!r}: {function!r} is not a function")
    return found


def filled(function: Callable[..., Any], given: Mapping[str, Any], n_skipped: int, what: str) -> dict[str, Any]:
    """Arguments for the function's parameters behind the first few: those given, and defaults for the others."""
    parameters = list(inspect.signature(function).parameters.values())[n_skipped:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(given)
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for key in given:
        if key not in names:
            raise InputError(
                f"{what}: unknown key {key!r}{nearest(key, names)}; known are {', '.join(names) or 'none'}"
            )
    out = {p.name: p.default for p in parameters if p.name in names and p.default is not p.empty}
    out |= given
    missing = [name for name in names if name not in out]
    if missing:
        raise InputError(f"{what}: {', '.join(map(repr, missing))} must be given")
    return out


def nearest(key: str, names: Iterable[str]) -> str:
    """`, did you mean ...?` where some name is close."""
    close = difflib.get_close_matches(key, list(names), 1, 0.5)
    return f", did you mean {close[0]!r}?" if close else ""
