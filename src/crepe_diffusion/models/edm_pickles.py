"""Weights out of the pickles of EDM and EDM2, without running what is in them.

Such a pickle carries the source of its classes, and loading it in the usual way executes that source. Here every name
in the pickle is looked up in a short list: tensors are read by torch with `weights_only=True`, objects become empty
shells that hold their attributes, and a name outside of the list ends the reading.
"""

from __future__ import annotations

import io
import json
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crepe_diffusion.errors import InputError

__all__ = ["convert_edm"]


class _Shell:
    """Stands for an object of the pickle: it keeps attributes and has no behaviour."""

    state: dict[str, Any]
    class_name: str

    def __new__(cls, *args: Any) -> _Shell:  # objects of old protocols are not initialised
        shell = super().__new__(cls)
        shell.state, shell.class_name = {}, ""
        return shell

    def __init__(self, *args: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.state.update(state)


class _EasyDict(dict[str, Any]):
    """A dictionary that may be pickled with attributes."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.update(state)


def _persistent(meta: Any) -> _Shell:
    """The object that carries source code: its class name and state are kept, and its source is dropped."""
    if not isinstance(meta, dict) or not isinstance(meta.get("state"), dict):
        raise InputError("the pickle holds an object without a state: it is not of the format of EDM or EDM2")
    shell = _Shell()
    shell.class_name = str(meta.get("class_name", ""))
    shell.state = dict(meta["state"])
    return shell


def _storage(data: bytes) -> Any:
    if not isinstance(data, bytes):
        raise InputError(f"the pickle holds a storage made of {type(data).__name__!r}, not of bytes")
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _tensor(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> Tensor:
    if not isinstance(storage, torch.storage.TypedStorage):
        raise InputError(f"the pickle holds a tensor made of {type(storage).__name__!r}, not of a storage of numbers")
    empty = torch.empty(0, dtype=storage.dtype)
    return empty.set_(storage._untyped_storage, offset, tuple(size), tuple(stride)).clone()


def _latin1(text: Any, encoding: Any = "latin1") -> bytes:
    """How old protocols of pickle write bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        raise InputError(f"the pickle encodes text as {encoding!r}: it is not of the format of EDM or EDM2")
    return text.encode("latin1")


def _parameter(data: Tensor, *_: Any) -> Tensor:
    return data


# The functions and classes that are needed for weights. All others are refused, whatever they are.
ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
    ("dnnlib.util", "EasyDict"): _EasyDict,
    ("torch_utils.persistence", "_reconstruct_persistent_obj"): _persistent,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch.storage", "_load_from_bytes"): _storage,
    ("torch", "device"): lambda *args: None,
    ("torch", "Size"): tuple,
    # Numbers and arrays of numpy are no weights of a network: they are read as shells.
    ("numpy", "ndarray"): _Shell,
    ("numpy", "dtype"): _Shell,
    ("_codecs", "encode"): _latin1,
}
for _core in ("numpy.core", "numpy._core"):
    for _name in ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer"):
        _module, _function = f"{_core}.{_name}".rsplit(".", 1)
        ALLOWED[_module, _function] = lambda *args: _Shell()
DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool")


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED:
            return ALLOWED[module, name]
        if module == "torch" and name in DTYPES:
            return getattr(torch, name)
        if module.startswith("torch.nn.modules.") and name.isidentifier():
            return _Shell  # containers and activations: nothing is imported for them
        raise InputError(
            f"the pickle asks for {module}.{name}, which no weights of EDM or EDM2 need: it was not loaded, and"
            " nothing of it was run"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise InputError("the pickle refers to data outside of itself: it is not of the format of EDM or EDM2")


def convert_edm(source: str | Path, to: str | Path, key: str = "ema") -> dict[str, Any]:
    """Write the weights of an EDM or EDM2 pickle as safetensors, without running the code inside of it.

    `key` is the entry of the pickle that holds the network. Returns its class name and the arguments that it was made
    with, which also are in the file's metadata. To use it, make the network from NVlabs' own source and load the file:
    `net.load_state_dict(safetensors.torch.load_file(to))`, then `net.eval()`.
    """
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise InputError("convert_edm needs safetensors: pip install 'crepe-diffusion[run]'") from None
    source = Path(source)
    if not source.is_file():
        raise InputError(f"{source} does not exist")
    with open(source, "rb") as file:
        try:
            content = _Reader(file).load()
        except InputError as error:
            raise InputError(f"{source}: {error}") from None
        except Exception as error:
            raise InputError(f"{source} is no pickle of EDM or EDM2 ({type(error).__name__}: {error})") from error
    if not isinstance(content, dict) or not isinstance(content.get(key), _Shell):
        held = sorted(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise InputError(f"{source} holds no network under {key!r}; it holds {held}")
    net: _Shell = content[key]
    tensors = dict(_tensors(net, ""))
    if not tensors:
        raise InputError(f"{source}: the network under {key!r} has no weights")
    settings = {
        "class_name": net.class_name,
        "init_args": _plain(list(net.state.get("_init_args") or ())),
        "init_kwargs": _plain(dict(net.state.get("_init_kwargs") or {})),
    }
    save_file(tensors, str(to), {name: json.dumps(value) for name, value in settings.items()})
    return settings


def _tensors(module: _Shell, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """The state dict of a network, from the dictionaries in which torch modules keep their parts."""
    state = module.state
    hidden = state.get("_non_persistent_buffers_set") or set()
    for part, skipped in (("_parameters", ()), ("_buffers", hidden)):
        for name, value in (state.get(part) or {}).items():
            if isinstance(value, Tensor) and name not in skipped:
                yield prefix + name, value.contiguous()
    for name, child in (state.get("_modules") or {}).items():
        if isinstance(child, _Shell):
            yield from _tensors(child, f"{prefix}{name}.")


def _plain(value: Any) -> Any:
    """What JSON can hold; anything else is left out as null."""
    if isinstance(value, dict):
        return {str(name): _plain(v) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (str, int, float, bool)) else None
