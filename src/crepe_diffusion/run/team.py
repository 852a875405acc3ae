"""Several processes as one sampler: each evaluates its share of every batch, and all of them decide alike.

torchrun --nproc-per-node 4 -m crepe_diffusion run my.toml --out DIR

All processes hold the whole state and the same random numbers. What is expensive, networks and rewards, is evaluated in
blocks of `micro_batch` rows that are shared out (`sharing.py`), and gathered after each call. So a chain has the same
bits for any number of processes. Files, locks and the log belong to process 0; it tells the others what it decided.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from crepe_diffusion.errors import InputError, NonFiniteError
from crepe_diffusion.sharing import joined, team

__all__ = ["Group", "distributed", "group", "leading"]

T = TypeVar("T")
KINDS: dict[str, type[Exception]] = {"InputError": InputError, "NonFiniteError": NonFiniteError}
PATIENCE = timedelta(minutes=30)
"""How long a process waits for the others; a network may take its time, a process that died is noticed at once."""


class Group:
    """The processes that torchrun has started, as a `sharing.Team`."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.busy = self.waiting = 0.0
        """Seconds in which this process evaluated, and in which it waited for the others and their results."""

    def together(self, own: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Every process computes tensors of the same shapes, and gets those of all, joined along the first axis."""
        found: tuple[Tensor, ...] = ()
        error, began = None, time.monotonic()
        try:
            found = own()
        except Exception as raised:
            error = raised
        done = time.monotonic()
        self._raise_alike(error)
        out = _unpacked(self._gathered(_packed(found)), found)
        self.busy, self.waiting = self.busy + done - began, self.waiting + time.monotonic() - done
        return out

    def alike(self, function: Callable[[], T]) -> T:
        """`function()` on every process; what one of them raises, at whatever point, is raised by all."""
        error = None
        try:
            out = function()
        except Exception as raised:
            if getattr(raised, "told", False):  # by all of them already
                raise
            error = raised
        self._raise_alike(error)
        return out

    def _gathered(self, own: Tensor) -> Tensor:
        everyone = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(everyone, own)
        return torch.cat(everyone)

    def _raise_alike(self, error: Exception | None) -> None:
        """One small number per call: what one process raises is raised by all, and none waits for it in vain."""
        failed = torch.tensor([0 if error is None else 1], device=_device())
        dist.all_reduce(failed)
        if not int(failed):
            return
        own = "" if error is None else json.dumps([type(error).__name__, str(error)])
        texts = [text for text in self.texts(own) if text]
        name, text = json.loads(texts[0])
        shared = KINDS.get(name, RuntimeError)(text if name in KINDS else f"{name}: {text}")
        shared.told = True  # type: ignore[attr-defined]
        raise shared from error

    def texts(self, own: str) -> list[str]:
        """What each process has to say."""
        content = torch.frombuffer(bytearray(own.encode()) or bytearray(1), dtype=torch.uint8).to(_device())
        length = self._gathered(torch.tensor([len(own.encode())], device=_device()))
        padded = torch.zeros(max(1, int(length.max())), dtype=torch.uint8, device=_device())
        padded[: len(content)] = content[: len(padded)]
        rows = self._gathered(padded[None]).cpu()
        return [bytes(row[:n].tolist()).decode() for row, n in zip(rows, length.tolist(), strict=True)]

    def flags(self, *own: int) -> list[list[int]]:
        """A few numbers of each process: the one exchange per iteration that decides."""
        return self._gathered(torch.tensor([own], device=_device())).tolist()

    def tell(self, message: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> None:
        """From process 0 to the others."""
        for content in (json.dumps(message).encode(), safetensors.torch.save(tensors or {})):
            dist.broadcast(torch.tensor([len(content)], device=_device()), 0)
            dist.broadcast(torch.frombuffer(bytearray(content), dtype=torch.uint8).to(_device()), 0)

    def hear(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What process 0 tells."""
        contents = []
        for _ in range(2):
            length = torch.zeros(1, dtype=torch.long, device=_device())
            dist.broadcast(length, 0)
            content = torch.zeros(int(length), dtype=torch.uint8, device=_device())
            dist.broadcast(content, 0)
            contents.append(content.cpu().numpy().tobytes())
        message: dict[str, Any] = json.loads(contents[0])
        if "failed" in message:
            raise InputError(f"process 0: {message['failed']}")
        return message, safetensors.torch.load(contents[1])


@contextmanager
def leading(group: Group | None) -> Iterator[None]:
    """What process 0 does while the others wait for it to tell something: they are told if it fails."""
    try:
        yield
    except BaseException as error:
        if group is not None and not getattr(error, "told", False):
            group.tell({"failed": str(error) or type(error).__name__})
        raise


def _device() -> torch.device:
    """Where small messages travel: nccl takes nothing from the CPU."""
    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _packed(tensors: tuple[Tensor, ...]) -> Tensor:
    """All of them as bytes, (rows, bytes per row)."""
    return torch.cat([z.reshape(len(z), z[0].numel()).contiguous().view(torch.uint8) for z in tensors], 1)


def _unpacked(content: Tensor, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    out, at = [], 0
    for z in like:
        width = z[0].numel() * z.element_size()
        part = content[:, at : at + width].contiguous()
        out.append(part.view(z.dtype).reshape(len(content), *z.shape[1:]))
        at += width
    return tuple(out)


@contextmanager
def distributed() -> Iterator[Group | None]:
    """Join the processes that torchrun has started; alone, it does nothing.

    Every process then runs the same script. Samplers share their evaluations in blocks of `micro_batch` rows, which
    must be given, and a `Run` keeps its files in process 0.

    >>> with distributed() as group:
    ...     print(group)
    None
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 and "TORCHELASTIC_RUN_ID" not in os.environ:
        yield None
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # torchrun keeps one store over all restarts, in which addresses of processes that died would be found again.
    store, rank, size = next(rendezvous("env://", timeout=PATIENCE))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt {attempt}", store)  # type: ignore[attr-defined]
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    try:
        group = Group()
        with joined(group):
            yield group
    finally:
        dist.destroy_process_group()


def group() -> Group | None:
    """The processes that were joined, if any."""
    found = team()
    return found if isinstance(found, Group) else None
