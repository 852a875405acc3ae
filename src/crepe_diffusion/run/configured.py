"""Objects from tables and tables from objects: the one place where a configuration becomes Python, and back.

    { kind = "bounce", n_steps = 2 }                      one of ours, by the short form of its class's name
    { kind = "my_moves:Mala", step = 0.3 }                a class of yours, with its fields
    { kind = "my_rewards:near", centre = 2.0 }            a function with some of its arguments, where one is wanted
    "my_rewards:near"                                     a function or a class as it is, where one is wanted
    { kind = "none" }                                     None, where a default is something else
    { python = "Bounce(n_steps=1)" }                      made in Python and not writable: has to be passed again

Fields, their types and their defaults are those of the class or function itself; nothing is listed a second time.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crepe_diffusion.errors import InputError
from crepe_diffusion.run.trust import NAME

__all__ = [
    "NotWritableError",
    "Setting",
    "arguments",
    "configure",
    "found",
    "kind_of",
    "merged",
    "nearest",
    "note",
    "plain",
    "recorded",
    "written",
]

PUBLIC = ("samplers", "kernels", "proposals", "processes", "stitching", "schedules")
"""Rooms whose public classes have a short name."""
LARGEST_TENSOR = 10_000
"""More numbers than this do not belong in a file that people read."""

Names = Mapping[str, Any]


class NotWritableError(ValueError):
    """A value that no TOML file can hold, such as a lambda."""


class Setting(NamedTuple):
    """A value, and what a file would hold for it."""

    value: Any
    plain: Any


# -- tables to objects -------------------------------------------------------------------------------------------


def configure(table: Mapping[str, Any], what: str, names: Names | None = None, hint: Any = Any) -> Setting:
    """The object that a table with `kind` names; `names` come before the short names of this package.

    >>> configure({"kind": "bounce", "n_steps": 2}, "[sampler] explorer").value
    Bounce(n_steps=2)
    >>> configure({"kind": "bounce", "n_step": 2}, "explorer")
    Traceback (most recent call last):
        ...
    crepe_diffusion.errors.InputError: explorer: unknown key 'n_step', did you mean 'n_steps'? known are n_steps, accept
    """
    fields = {key: value for key, value in table.items() if key != "kind"}
    if "kind" not in table:
        factory = _only_class(hint, what)
        kind = kind_of(factory)
    else:
        kind = table["kind"]
        if kind == "none" and not fields:
            return Setting(None, {"kind": "none"})
        factory = found(kind, what, names)
    if not inspect.isclass(factory) and not inspect.isfunction(factory) and not inspect.isbuiltin(factory):
        arguments(lambda: None, fields, what)  # a finished object has no fields
        return Setting(factory, {"kind": kind})
    wanted = _callable_hint(hint)
    if inspect.isclass(factory) or wanted is None:
        values, record = arguments(factory, fields, what)
        try:
            return Setting(factory(**values), {"kind": kind, **record})
        except InputError as error:
            raise InputError(f"{what}: {error}") from None
        except SystemExit:
            raise InputError(f"{what}: {kind!r} raised SystemExit, which ends a program") from None
    values, record = arguments(factory, fields, what, skip=wanted)
    return Setting(_bound(factory, values), {"kind": kind, **record})


def arguments(
    factory: Callable[..., Any],
    given: Mapping[str, Any],
    what: str,
    *,
    skip: int | Iterable[str] = 0,
    names: Mapping[str, Names] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments for a class or function, checked by name and type, and the same as a file would hold them.

    Defaults are left to the factory and written out in the record. `skip` leaves out the first few parameters, or those
    of these names; `names` are further short names for the objects of a parameter.
    """
    parameters = _parameters(factory, skip)
    if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(factory).parameters.values()):
        for key in given:
            if key not in parameters:
                known = ", ".join(parameters) or "none"
                raise InputError(f"{what}: unknown key {key!r}{nearest(key, parameters)} known are {known}")
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in given]
    if missing:
        raise InputError(f"{what}: {', '.join(map(repr, missing))} must be given")
    hints = _hints(factory)
    values: dict[str, Any] = {}
    record: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if name not in given:
            default = _default(factory, parameter)
            if default is not None:
                record[name] = _canonical(default, hints.get(name, Any))
    for name, value in given.items():
        setting = _setting(value, hints.get(name, Any), f"{what} {name}", (names or {}).get(name))
        values[name], record[name] = setting
    return values, {name: record[name] for name in sorted(record, key=_order(parameters))}


def found(kind: object, what: str, names: Names | None = None) -> Any:
    """What `package.module:name` or a short name stands for."""
    if not isinstance(kind, str):
        raise InputError(f"{what}: kind must be a name, got {kind!r}")
    if ":" in kind:
        return _imported(kind, what)
    known = {**_public(), **(names or {})}
    if kind not in known:
        own = ", ".join(names or known)
        raise InputError(
            f"{what}: unknown kind {kind!r}{nearest(kind, known)} known are {own}, and 'package.module:name' is any of"
            " yours"
        )
    return known[kind]


def merged(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults with what is given in their place; a table of another kind, or one from Python, replaces its own."""
    out = dict(defaults)
    for key, value in given.items():
        before = out.get(key)
        if isinstance(before, str) and ":" in before and isinstance(value, Mapping):
            before = {"kind": before}
        both = isinstance(before, Mapping) and isinstance(value, Mapping) and "python" not in value
        same = both and value.get("kind", before.get("kind")) == before.get("kind")  # type: ignore[union-attr]
        out[key] = merged(before, value) if same else value  # type: ignore[arg-type]
    return out


def nearest(key: str, names: Iterable[str]) -> str:
    """`, did you mean ...?` where some name is close, else a semicolon."""
    close = difflib.get_close_matches(str(key), list(names), 1, 0.5)
    return f", did you mean {close[0]!r}?" if close else ";"


# -- objects to tables -------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """What a file would hold for a value; `NotWritableError` where it cannot.

    >>> from crepe_diffusion.kernels import Bounce
    >>> plain(Bounce(2))
    {'kind': 'bounce', 'n_steps': 2, 'accept': 'crepe_diffusion.kernels.swap:metropolis'}
    """
    if value is None:
        return {"kind": "none"}
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (PurePath, torch.device)):
        return str(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, Tensor):
        if value.numel() > LARGEST_TENSOR or value.dtype not in (torch.float64, torch.int64):
            raise NotWritableError(f"a tensor of {value.numel()} {value.dtype}")
        return value.tolist()
    if isinstance(value, partial) and not value.args:
        return {"kind": _name_of(value.func), **{k: plain(v) for k, v in value.keywords.items()}}
    if inspect.isfunction(value) or inspect.isbuiltin(value) or inspect.isclass(value):
        return _name_of(value)
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return {"kind": kind_of(type(value)), **{k: plain(v) for k, v in fields.items() if v is not None}}
    raise NotWritableError(repr(value))


def recorded(value: Any) -> Any:
    """`plain`, or a note that the value was made in Python."""
    try:
        return plain(value)
    except NotWritableError:
        return note(value)


def written(value: Any, factory: Callable[..., Any], name: str) -> Any:
    """What a file would hold for an argument of this name, where reading it gives the same argument again."""
    table = plain(value)
    try:
        again = _setting(table, _hints(factory).get(name, Any), name, None).plain
    except (InputError, TypeError) as error:
        raise NotWritableError(str(error)) from error
    if again != table:
        raise NotWritableError(f"{table!r} would be read as {again!r}")
    return again


def _canonical(default: Any, hint: Any) -> Any:
    """A default as it would be recorded once it had been read from a file: 5 is 5.0 where a float is wanted."""
    table = recorded(default)
    try:
        return _setting(table, hint, "", None).plain
    except (InputError, TypeError):
        return table


def note(value: Any) -> dict[str, str]:
    """What a file holds for a value that was made in Python; addresses differ from one process to the next."""
    return {"python": re.sub(r" at 0x[0-9a-fA-F]+", "", " ".join(repr(value).split()))[:200]}


# -- types -------------------------------------------------------------------------------------------------------


def _setting(value: Any, hint: Any, what: str, names: Names | None) -> Setting:
    """A value of a file as its parameter wants it."""
    if isinstance(value, Mapping) and "python" in value:
        raise InputError(f"{what} was made in Python, {value['python']}: pass it again")
    members = _members(hint)
    if isinstance(value, Mapping) and ("kind" in value or not _takes_mapping(members)):
        setting = configure(value, what, names, hint)
        _check_fits(setting.value, hint, what)
        return setting
    takes_class = any(typing.get_origin(m) is type for m in members)
    takes_function = _callable_hint(hint) is not None and str not in members
    if isinstance(value, str) and ":" in value and (takes_class or takes_function):
        return Setting(_imported(value, what), value)
    if not isinstance(value, (bool, int, float, str, list, tuple, Mapping)):  # an object, passed in Python
        _check_fits(value, hint, what)
        return Setting(value, recorded(value))
    for member in members:
        try:
            converted = _converted(value, member)
        except (TypeError, ValueError, RuntimeError):  # torch's word for an unknown device
            continue
        return Setting(converted, plain(converted))
    raise InputError(f"{what} must be {' or '.join(dict.fromkeys(map(_words, members)))}, got {value!r}")


def _check_fits(value: Any, hint: Any, what: str) -> None:
    """Refuse an object that cannot be what is wanted."""
    members = _members(hint)
    optional = hint is Any or type(None) in typing.get_args(hint)
    if not (optional if value is None else any(_fits(value, m) for m in members)):
        raise InputError(f"{what} must be {' or '.join(dict.fromkeys(map(_words, members)))}, got {value!r}")


def _fits(value: Any, hint: Any) -> bool:
    """Whether an object can be what this type wants, as far as it shows."""
    if hint is Any or isinstance(hint, (str, typing.TypeVar)):
        return True
    n = _callable_hint(hint)
    if n is not None:
        return callable(value) and _takes(value, n)
    if getattr(hint, "_is_protocol", False):
        return all(hasattr(value, name) for name in vars(hint) if _public_name(name))
    kind = typing.get_origin(hint) or hint
    return not inspect.isclass(kind) or isinstance(value, kind)


def _takes(function: Callable[..., Any], n: int) -> bool:
    try:
        inspect.signature(function).bind(*range(n))
    except TypeError:
        return False
    except ValueError:  # built in, and without a signature
        pass
    return True


def _converted(value: Any, hint: Any) -> Any:
    """A plain value as this type; TypeError or ValueError where it is of another."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or isinstance(hint, (str, typing.TypeVar)):
        return value
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if hint in (int, str) and isinstance(value, hint) and not isinstance(value, bool):
        return value
    if hint is bool and isinstance(value, bool):
        return value
    if isinstance(value, str) and inspect.isclass(hint) and issubclass(hint, PurePath):
        return hint(value)
    if isinstance(value, str) and hint is torch.dtype and isinstance(getattr(torch, value, None), torch.dtype):
        return getattr(torch, value)
    if isinstance(value, str) and hint is torch.device:
        return torch.device(value)
    if hint is Tensor and isinstance(value, (list, tuple)):
        return torch.tensor(value, dtype=torch.float64)
    if hint in (list, tuple, Sequence) and isinstance(value, (list, tuple)):
        return list(value) if hint is list else tuple(value)
    if origin is typing.Literal and value in inner:
        return value
    if origin is not None and isinstance(value, (list, tuple)):
        if origin is tuple and inner[-1:] != (...,):
            return tuple(_converted(v, h) for v, h in zip(value, inner, strict=True))
        if origin in (list, tuple, Sequence):
            values = [_converted(v, inner[0]) for v in value]
            return values if origin is list else tuple(values)
    if isinstance(value, Mapping) and _takes_mapping([hint]):
        return dict(value)
    raise TypeError


def _words(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    known = {
        int: "a whole number",
        float: "a number",
        str: "a string",
        bool: "true or false",
        Tensor: "a list of numbers",
        torch.dtype: "a type of torch such as 'float32'",
        torch.device: "a device such as 'cpu'",
    }
    if inspect.isclass(hint) and issubclass(hint, PurePath):
        return "a path"
    if hint in known:
        return known[hint]
    if origin is typing.Literal:
        return "one of " + ", ".join(map(repr, inner))
    if origin in (list, Sequence) or (origin is tuple and inner[-1:] == (...,)):
        return f"a list of {_words(inner[0]).removeprefix('a ')}s"
    if origin is tuple:
        return f"a list of {len(inner)}: {', '.join(map(_words, inner))}"
    if _takes_mapping([hint]):
        return "a table"
    if _callable_hint(hint) is not None:
        return "a function, 'package.module:function', or a table with kind"
    return "a table with kind"


def _members(hint: Any) -> list[Any]:
    """The types of a union, None left out."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [m for m in typing.get_args(hint) if m is not type(None)]
    return [hint]


def _takes_mapping(members: Iterable[Any]) -> bool:
    return any(m is dict or typing.get_origin(m) in (dict, Mapping) for m in members)


def _callable_hint(hint: Any) -> int | None:
    """How many arguments the function gets that is wanted here; None if something else is."""
    for member in _members(hint):
        if typing.get_origin(member) is Callable:
            inputs = typing.get_args(member)[0]
            return len(inputs) if isinstance(inputs, list) else 1
        if getattr(member, "_is_protocol", False) and [n for n in vars(member) if _public_name(n)] == ["__call__"]:
            return len(inspect.signature(member.__call__).parameters) - 1
    return None


def _public_name(name: str) -> bool:
    return name == "__call__" or not name.startswith("_")


def _only_class(hint: Any, what: str) -> type:
    """The class of a table without `kind`: the only one that can be meant."""
    classes = [m for m in _members(hint) if dataclasses.is_dataclass(m) and not inspect.isabstract(m)]
    if len(classes) != 1:
        raise InputError(f"{what}: kind must be given, a short name or 'package.module:name'")
    return classes[0]  # type: ignore[return-value]


# -- names -------------------------------------------------------------------------------------------------------


def _public() -> dict[str, Any]:
    """Short names of this package's public classes: `ReplicaExchange` is `replica-exchange`."""
    rooms = [importlib.import_module(f"crepe_diffusion.{room}") for room in PUBLIC]
    classes = [getattr(room, name) for room in rooms for name in room.__all__]
    return {_short(c): c for c in classes if inspect.isclass(c) and c.__name__[:1].isupper()}


def _short(cls: type) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", cls.__name__).lower()


def kind_of(cls: type) -> str:
    """The name by which a file names a class."""
    short = _short(cls)
    return short if _public().get(short) is cls else _name_of(cls)


def _name_of(value: Any) -> str:
    """`package.module:name`, if that is where it can be imported from."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module in (None, "__main__") or getattr(sys.modules.get(module or ""), name, None) is not value:
        raise NotWritableError(repr(value))
    return f"{module}:{name}"


def _imported(path: str, what: str) -> Any:
    module, _, name = path.partition(":")
    if not NAME.fullmatch(path):
        raise InputError(f"{what}: {path!r} is not of the form 'package.module:name'")
    try:
        value = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise InputError(f"{what} {path!r}: cannot import {module!r} ({error})") from None
    except SystemExit:
        raise InputError(
            f"{what} {path!r}: {module!r} ends the program when it is imported; put what does so under"
            " if __name__ == '__main__':"
        ) from None
    except AttributeError:
        raise InputError(f"{what} {path!r}: module {module!r} has no {name!r}") from None
    if not callable(value):
        raise InputError(f"{what} {path!r}: {name!r} is neither a class nor a function")
    return value


# -- signatures --------------------------------------------------------------------------------------------------


def _parameters(factory: Callable[..., Any], skip: int | Iterable[str]) -> dict[str, inspect.Parameter]:
    parameters = list(inspect.signature(factory).parameters.values())
    if isinstance(skip, int):
        parameters = parameters[skip:]
    else:
        left_out = set(skip)
        parameters = [p for p in parameters if p.name not in left_out]
    return {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _hints(factory: Callable[..., Any]) -> dict[str, Any]:
    # The fields of a dataclass are annotated in the modules of its bases, whose names its `__init__` does not have.
    annotated = factory.__init__ if inspect.isclass(factory) and not dataclasses.is_dataclass(factory) else factory
    try:
        return typing.get_type_hints(annotated)
    except (NameError, TypeError):  # names that only a type checker sees: nothing is checked then
        return {}


def _default(factory: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    if dataclasses.is_dataclass(factory):
        for field in dataclasses.fields(factory):
            if field.name == parameter.name and field.default_factory is not dataclasses.MISSING:
                return field.default_factory()
    return None if parameter.default is parameter.empty else parameter.default


def _order(parameters: Mapping[str, Any]) -> Callable[[str], int]:
    names = list(parameters)
    return lambda name: names.index(name) if name in parameters else len(names)


def _bound(function: Callable[..., Any], values: Mapping[str, Any]) -> Callable[..., Any]:
    """A function with some of its arguments, and with its own attributes such as `of_time`."""
    if not values:
        return function
    bound = partial(function, **values)
    bound.__dict__.update(function.__dict__)
    return bound
