"""A second torch device for machines without one: it computes on the CPU, and behaves like an accelerator otherwise.

    with Pretend() as device:                # a pretend tensor wraps one of the CPU and claims another device
        net.to(DEVICE); ...
        device.waits, device.to_device, device.to_host, device.bytes_to_device, device.bytes_to_host

An operation on tensors of both devices raises, as it does on an accelerator (numbers and indices are allowed). What
would make the CPU wait is counted: reading a value, and every operation whose shape depends on values. With
`float64=False` it refuses numbers of 64 bits, as Apple's device does. It says nothing of speed, or of last bits.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("pretend")
DEVICE = torch.device("pretend:0")

aten = torch.ops.aten
READS = {aten._local_scalar_dense, aten.is_nonzero, aten.equal}
SHAPED_BY_VALUES = {aten.nonzero, aten.masked_select, aten._unique2, aten.unique_consecutive, aten.bincount}
SHAPED_BY_VALUES |= {aten.repeat_interleave, aten.unique_dim}
INDEXED = {aten.index: 1, aten.index_put: 1, aten.index_put_: 1, aten._index_put_impl_: 1}


class Wrapped(Tensor):
    """A tensor that claims to live on the pretend device."""

    inside: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inside: Tensor) -> Wrapped:
        return Tensor._make_wrapper_subclass(
            cls,
            inside.size(),
            strides=inside.stride(),
            storage_offset=inside.storage_offset(),
            dtype=inside.dtype,
            device=DEVICE,
        )

    def __init__(self, inside: Tensor):
        self.inside = inside

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self, *, force=False):
        assert force, "a tensor of an accelerator has no numpy() without force=True"
        return self.detach().cpu().numpy()

    def __deepcopy__(self, memo):
        return self.clone()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} on the pretend device outside of `with Pretend()`")


def _empty(size, *, dtype=None, **_):
    return Wrapped(torch.empty(size, dtype=dtype))


def _empty_strided(size, stride, *, dtype=None, **_):
    return Wrapped(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source, to, non_blocking=False):
    mode = torch.utils._python_dispatch._get_current_dispatch_mode()
    return mode._copied(to, source)


# torch.tensor(..., device=...) goes past the mode below.
LIBRARY = torch.library.Library("aten", "IMPL")
LIBRARY.impl("empty.memory_format", _empty, "PrivateUse1")
LIBRARY.impl("empty_strided", _empty_strided, "PrivateUse1")
LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")


class Pretend(TorchDispatchMode):
    """The device, while it is switched on, and what it has counted."""

    def __init__(self, *, float64: bool = True):
        super().__init__()
        self.float64 = float64
        self.reset()

    def reset(self) -> None:
        self.waits = self.to_device = self.to_host = self.bytes_to_device = self.bytes_to_host = 0
        self.reasons: Counter[str] = Counter()

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # the guard against compilation costs more than an operation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        packet, device = func.overloadpacket, kwargs.get("device")
        if packet is aten.copy_:
            return self._copied(args[0], args[1])
        here: dict[int, Wrapped] = {}
        if device is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        bare = [_inside(v, here) for v in args]
        named = {key: _inside(v, here) for key, v in kwargs.items()}
        wanted = (DEVICE.type if here else "cpu") if device is None else torch.device(device).type
        if packet is not aten._to_copy and here:
            self._count(packet, args, kwargs)
        out = func(*bare, **named)
        if packet is aten._to_copy and here and wanted == "cpu":
            self._wait("copy to the CPU", out)
        elif packet is aten._to_copy and not here and wanted != "cpu":
            self._send(out)
        return self._wrap(out, here) if wanted != "cpu" else out

    def _count(self, packet, args, kwargs) -> None:
        rest = list(args)
        if packet in INDEXED:
            for index in rest.pop(INDEXED[packet]):
                if isinstance(index, Tensor) and not isinstance(index, Wrapped):
                    self._send(index)
                if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                    self._wait("boolean index")
        if any(v.ndim for v in _foreign(rest) + _foreign(kwargs.values())):
            raise RuntimeError(f"{packet}: tensors on {DEVICE} and on the CPU")
        if packet in READS or packet in SHAPED_BY_VALUES:
            self._wait(str(packet).removeprefix("aten."))

    def _copied(self, to: Tensor, source: Tensor) -> Tensor:
        if isinstance(to, Wrapped) and not isinstance(source, Wrapped):
            self._send(source)
        elif isinstance(source, Wrapped) and not isinstance(to, Wrapped):
            self._wait("copy to the CPU", source)
        _inside(to, {}).copy_(_inside(source, {}))
        return to

    def _wait(self, why: str, data: Tensor | None = None) -> None:
        self.waits += 1
        self.reasons[why] += 1
        if data is not None:
            self.to_host += 1
            self.bytes_to_host += data.numel() * data.element_size()

    def _send(self, data: Tensor) -> None:
        self.to_device += 1
        self.bytes_to_device += data.numel() * data.element_size()

    def _wrap(self, out, here: dict[int, Wrapped]):
        """Results as tensors of the device; an operation in place returns the tensor that it was given."""
        if isinstance(out, (tuple, list)):
            return type(out)(self._wrap(v, here) for v in out)
        if not isinstance(out, Tensor):
            return out
        if out.dtype == torch.float64 and not self.float64:
            raise TypeError(f"{DEVICE} has no float64")
        return here[id(out)] if id(out) in here else Wrapped(out)


def _inside(value, here: dict[int, Wrapped]):
    """What is inside of pretend tensors; they are noted in `here`."""
    if isinstance(value, Wrapped):
        here[id(value.inside)] = value
        return value.inside
    if isinstance(value, (tuple, list)):
        return [_inside(v, here) for v in value]
    return value


def _foreign(values) -> list[Tensor]:
    """Tensors of the CPU among these values."""
    found = []
    for v in values:
        if isinstance(v, (tuple, list)):
            found += _foreign(v)
        elif isinstance(v, Tensor) and not isinstance(v, Wrapped):
            found.append(v)
    return found
