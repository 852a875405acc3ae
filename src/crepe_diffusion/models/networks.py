"""Which functions are one network, and the models of a target evaluated with one call per network.

Guidance needs two predictions per state, `D(x, t, c)` and `D(x, t, no c)`. If both come from the same network, they are
computed in one call with twice the rows.
"""

from __future__ import annotations

import dis
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from crepe_diffusion.batches import called
from crepe_diffusion.errors import InputError

if TYPE_CHECKING:
    from crepe_diffusion.models.base import Model

__all__ = ["Networks", "as_tensor", "common_device", "device_of", "identity", "modules", "saved_tensors"]


def identity(value: object) -> Hashable:
    """A key that is equal for two functions if they compute the same thing by construction.

    Equal are: the same object; bound methods of the same object; `functools.partial` of the same function and
    arguments; functions with the same code, closure, defaults and globals (a lambda that was created twice); frozen
    dataclasses of one type with the same fields. Numbers, strings and tuples of them in closures, arguments and fields
    are compared by value, everything else by identity. The keys are valid as long as the functions exist.

    >>> def denoiser(scale):
    ...     return lambda y, t: scale * y
    >>> identity(denoiser(2.0)) == identity(denoiser(2.0)), identity(denoiser(2.0)) == identity(denoiser(3.0))
    (True, False)
    """
    return _identity(value, ())


def _identity(value: object, outer: tuple[int, ...]) -> Hashable:
    if id(value) in outer:  # a function that refers to itself
        return ("self", len(outer) - outer.index(id(value)))
    within = (*outer, id(value))
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        return (type(value), repr(value))
    if type(value) is tuple:
        return ("tuple", *(_identity(v, within) for v in value))
    if is_dataclass(value) and not isinstance(value, type) and value.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return (type(value), *(_identity(getattr(value, f.name), within) for f in fields(value)))
    if isinstance(value, MethodType):
        return ("method", id(value.__self__), _identity(value.__func__, within))
    if type(value) is partial:
        named = sorted(value.keywords.items())
        parts = (value.func, *value.args, *(v for _, v in named))
        return ("partial", tuple(name for name, _ in named), *(_identity(p, within) for p in parts))
    if type(value) is FunctionType and not _rebinds(value):
        named = sorted({**(value.__kwdefaults__ or {}), **value.__dict__}.items())
        parts = (*_contents(value), *(value.__defaults__ or ()), *(v for _, v in named))
        names = tuple(name for name, _ in named)
        return ("function", id(value.__code__), id(value.__globals__), names, *(_identity(p, within) for p in parts))
    return id(value)


def _rebinds(function: FunctionType) -> bool:
    """Whether a function assigns to the variables of its closure: it then has a state of its own."""
    code = function.__code__
    return bool(code.co_freevars) and any(
        i.opname in ("STORE_DEREF", "DELETE_DEREF") and i.argval in code.co_freevars for i in dis.get_instructions(code)
    )


def _contents(function: FunctionType) -> list[object]:
    """The values of a closure, or the cell itself while it has no value."""

    def content(cell: CellType) -> object:
        try:
            return cell.cell_contents
        except ValueError:
            return cell

    return [content(cell) for cell in function.__closure__ or ()]


def _parts(value: Any) -> list[object]:
    """What a function, or an object that wraps one, refers to."""
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        loaded = {i.argval for i in dis.get_instructions(value.__code__) if i.opname == "LOAD_GLOBAL"}
        found = [value.__globals__[name] for name in loaded if name in value.__globals__]
        own = [
            g
            for g in found
            if isinstance(g, nn.Module) or (isinstance(g, FunctionType) and g.__globals__ is value.__globals__)
        ]
        return [*_contents(value), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *own]
    if isinstance(value, (tuple, list)):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (type, ModuleType, Tensor)) or not hasattr(value, "__dict__"):
        return []
    return list(vars(value).values())


def modules(value: object) -> Iterator[tuple[str, nn.Module]]:
    """Every torch module that a model reaches, with its name inside the outermost one."""
    queue, seen = deque([value]), set[int]()
    while queue:
        value = queue.popleft()
        if id(value) in seen or len(seen) > 10_000:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            for name, module in value.named_modules():
                yield f"{type(value).__name__}.{name}" if name else type(value).__name__, module
        queue.extend(_parts(value))


def saved_tensors(module: nn.Module) -> list[Tensor]:
    """The parameters and buffers of this very module that its `state_dict` holds."""
    passing = getattr(module, "_non_persistent_buffers_set", ())
    buffers = [b for name, b in module.named_buffers(recurse=False) if name not in passing]
    return [*module.parameters(recurse=False), *buffers]


def _is_random(module: nn.Module) -> bool:
    """Whether a module computes something else in training mode than in evaluation mode."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        return bool(module.track_running_stats)
    # Attention and recurrent modules keep theirs as a number; asking diffusers' models for an attribute would warn.
    dropout = vars(module).get("dropout", 0.0)
    return isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.RReLU)) or (
        isinstance(dropout, float) and dropout > 0
    )


def check_evaluation_mode(model: object) -> None:
    """Refuse a network in training mode whose predictions then depend on chance or on the rest of the batch."""
    for name, module in modules(model):
        if module.training and _is_random(module):
            raise InputError(
                f"the network is in training mode, where {name} ({type(module).__name__}) makes predictions random or"
                " dependent on the batch: call .eval() on the network first"
            )


def device_of(model: object) -> torch.device:
    """Where the parameters of the networks are that a model reaches; buffers if there are none, else the CPU."""
    parts = [module for _, module in modules(model)]
    found = {p.device for m in parts for p in m.parameters(recurse=False)}
    found = found or {b.device for m in parts for b in m.buffers(recurse=False)}
    if len(found) > 1:
        raise InputError(
            f"the network has parameters on {sorted(map(str, found))}: give the model device=, the one of its states"
        )
    return next(iter(found), torch.device("cpu"))


def common_device(models: Sequence[Model]) -> torch.device:
    """The device of all models of a target."""
    devices = [model.device for model in models]
    if len(set(devices)) > 1:
        raise InputError(f"models of one target must be on one device, got {[str(d) for d in devices]}")
    return devices[0]


def as_tensor(out: object, what: str) -> Tensor:
    """The output of a model, which must be a tensor; the error names what it is instead and what to take of it."""
    if isinstance(out, Tensor):
        return out
    advice = "return a tensor"
    if isinstance(out, dict) and not isinstance(getattr(out, "sample", None), Tensor):
        advice = f"return one of its entries {sorted(map(str, out))}"
    for name in ("sample", "logits", "prediction", "last_hidden_state"):
        if isinstance(getattr(out, name, None), Tensor):
            advice = f"return its attribute .{name}"
            break
    else:
        if isinstance(out, (tuple, list)) and out and isinstance(out[0], Tensor):
            advice = "return its entry [0]"
    raise InputError(f"{what} returned an object of type {type(out).__name__!r} instead of a tensor: {advice}")


class Networks:
    """All models of a target, with one call for those that share a network.

    `rows` is the number of network rows that one state costs, and `n_calls` the number of calls for one batch.
    """

    def __init__(self, models: Sequence[Model], is_discrete: bool):
        self.models, self.is_discrete = tuple(models), is_discrete
        groups: dict[Hashable, list[int]] = {}
        for j, model in enumerate(self.models):
            check_evaluation_mode(model)
            if model.dtype not in (torch.float32, torch.float64):
                raise InputError(
                    f"model {j} has states of {model.dtype}, too coarse for log-ratios: float32 or float64 are right;"
                    " its network may answer in half precision"
                )
            groups.setdefault(model.network, []).append(j)
        self.groups = tuple((members, [self.models[j] for j in members]) for members in groups.values())
        self.rows = sum(models[0].rows_together(models) for _, models in self.groups)
        self.n_calls = len(self.groups)
        several = {model.n_conditions for model in self.models} - {1}
        if len(several) > 1:
            raise InputError(f"models of one target need equally many conditions, or one, got {sorted(several)}")
        self.n_conditions = next(iter(several), 1)
        self.totals: Tensor | None = None
        """What the first predictions of tokens sum to: the evaluator reads it with what it waits for anyway."""

    def predict(self, x: Tensor, t: Tensor, which: Tensor | None = None) -> tuple[Tensor, ...]:
        """One prediction per model, checked for type, shape, dtype and device.

        `which` is the number of the condition that each row has, where there are several.
        """
        out: list[Tensor] = [x] * len(self.models)
        for members, models in self.groups:
            if which is not None and self.n_conditions > 1:
                models = [model.at_rows(which.to(x.device)) for model in models]
            predictions = called(partial(models[0].predict_together, models), f"model {members[0]}", x, t)
            for j, prediction in zip(members, predictions, strict=True):
                out[j] = self._checked(prediction, x, j)
        return tuple(out)

    def _checked(self, prediction: Tensor, x: Tensor, j: int) -> Tensor:
        prediction = as_tensor(prediction, f"model {j}")
        if prediction.device != x.device:
            raise InputError(f"model {j} returned a tensor on {prediction.device} for states on {x.device}")
        if prediction.dtype in (torch.float16, torch.bfloat16):  # a network under autocast
            prediction = prediction.to(torch.float32 if self.is_discrete else x.dtype)
        if not self.is_discrete:
            if prediction.dtype != x.dtype:
                raise InputError(f"model {j} returned {prediction.dtype} for a state of {x.dtype}; both must be equal")
            if prediction.shape != x.shape:
                raise InputError(f"model {j} returned shape {tuple(prediction.shape)} for states {tuple(x.shape)}")
        elif prediction.shape[:-1] != x.shape or not prediction.dtype.is_floating_point:
            raise InputError(
                f"model {j} returned {prediction.dtype} of shape {tuple(prediction.shape)};"
                f" log-probabilities of shape {(*x.shape, 'V')} are needed"
            )
        return prediction
