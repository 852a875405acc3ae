"""Several processes as one sampler: each has its share of every batch, and all of them decide alike.

torchrun --nproc-per-node 4 -m crepe_diffusion run my.toml --out DIR

Rows are cut into blocks of `micro_batch`, and each process has some of them (`sharing.py`). Replicas stay with their
process, which tells the others what is needed to decide: a few numbers per row. Samplers whose rows mix hold all rows
in all processes, and gather what was evaluated. So a chain has the same bits for any number of processes. Files, locks
and the log belong to process 0; it tells the others what it decided.

    groups  x  rows  x  model        processes: runs of their own, shares of a batch, parts of one network
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from crepe_diffusion.errors import InputError, NonFiniteError
from crepe_diffusion.sharing import joined, team

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Group", "by_all", "distributed", "group", "leading", "model_mesh", "seed_of"]

T = TypeVar("T")
KINDS: dict[str, type[Exception]] = {"InputError": InputError, "NonFiniteError": NonFiniteError}
PATIENCE = timedelta(minutes=30)
"""How long a process waits for the others; a network may take its time, a process that died is noticed at once."""
HASTE = timedelta(minutes=1)
"""How long a process that failed waits to tell the others, if one of them may wait for it inside of their network."""


class Group:
    """The processes that torchrun has started, or one of several groups of them, as a `sharing.Team`.

    `rank` and `size` count shares of a batch: `model` processes that hold one network between them evaluate the same
    share. `mesh` has the axes `rows` and `model` then. The first process `leads`: it has the folder.
    """

    def __init__(self, model: int = 1, index: int = 0):
        self.index, self.leads = index, dist.get_rank() == 0
        self.rank, self.size = dist.get_rank() // model, dist.get_world_size() // model
        self.mesh: DeviceMesh | None = None
        if model > 1:
            from torch.distributed.device_mesh import init_device_mesh

            self.mesh = init_device_mesh(_device().type, (self.size, model), mesh_dim_names=("rows", "model"))
        # Who failed is told apart from what a network sends: some may wait in there for one that has failed.
        self._apart = None if self.mesh is None else dist.new_group()
        self._rows = None if self.mesh is None else self.mesh.get_group("rows")
        self.busy = self.waiting = 0.0
        """Seconds in which this process evaluated, and in which it waited for the others and their results."""
        self.gathers = self.bytes = 0
        """How often results were gathered, and how much every process has then got from all."""

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
        everything = _gathered(_packed(found).to(_device()), self._rows)
        out = _unpacked(everything.to(found[0].device), found)
        self.gathers, self.bytes = self.gathers + 1, self.bytes + everything.numel()
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

    def _raise_alike(self, error: Exception | None) -> None:
        """One small number per call: what one process raises is raised by all, and none waits for it in vain."""
        failed = torch.tensor([0 if error is None else 1], device=_device())
        if error is None or self.mesh is None:
            dist.all_reduce(failed, group=self._apart)
        else:
            self._in_haste(failed, error)
        if not int(failed):
            return
        own = "" if error is None else json.dumps([type(error).__name__, str(error)])
        texts = [text for text in self.texts(own) if text]
        name, text = json.loads(texts[0])
        shared = KINDS.get(name, RuntimeError)(text if name in KINDS else f"{name}: {text}")
        shared.told = True  # type: ignore[attr-defined]
        raise shared from error

    def _in_haste(self, failed: Tensor, error: Exception) -> None:
        """Raise the error here if the others do not come: they notice that this process ends, wherever they wait."""
        done = False
        with suppress(RuntimeError):
            work = dist.all_reduce(failed, group=self._apart, async_op=True)
            done = work is not None and bool(work.wait(HASTE))
        if not done:
            error.told = True  # type: ignore[attr-defined]
            raise error

    def texts(self, own: str) -> list[str]:
        """What each process has to say."""
        content = torch.frombuffer(bytearray(own.encode()) or bytearray(1), dtype=torch.uint8).to(_device())
        length = _gathered(torch.tensor([len(own.encode())], device=_device()))
        padded = torch.zeros(max(1, int(length.max())), dtype=torch.uint8, device=_device())
        padded[: len(content)] = content[: len(padded)]
        rows = _gathered(padded[None]).cpu()
        return [bytes(row[:n].tolist()).decode() for row, n in zip(rows, length.tolist(), strict=True)]

    def flags(self, *own: int) -> list[list[int]]:
        """A few numbers of each process: the one exchange per iteration that decides."""
        return _gathered(torch.tensor([own], device=_device())).tolist()

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


def _gathered(own: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group)
    return torch.cat(everyone)


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
def distributed(groups: int = 1, model: int = 1) -> Iterator[Group | None]:
    """Join the processes that torchrun has started; alone, it does nothing.

    Every process then runs the same script. Samplers share their evaluations in blocks of `micro_batch` rows, which
    must be given, and a `Run` keeps its files in process 0.

    - `groups`: so many groups that know nothing of each other: each has a folder and a seed of its own (`group.index`,
      `seed_of`), and none waits for another. Read all of them with `read_runs`;
    - `model`: so many neighbouring processes hold one network between them, split over `model_mesh()`.

    >>> with distributed() as group:
    ...     print(group)
    None
    """
    n = int(os.environ.get("WORLD_SIZE", "1"))
    if min(groups, model) < 1 or n % (groups * model):
        raise InputError(
            f"{n} process{'es' if n > 1 else ''} cannot be cut into {groups} groups of networks on {model} processes:"
            " torchrun must start a multiple of groups x model"
        )
    if n < 2 and "TORCHELASTIC_RUN_ID" not in os.environ:
        yield None
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # torchrun keeps one store over all restarts, in which addresses of processes that died would be found again.
    store, rank, _ = next(rendezvous("env://", timeout=PATIENCE))
    attempt, (index, rank) = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), divmod(rank, n // groups)
    store = dist.PrefixStore(f"attempt {attempt} group {index}", store)  # type: ignore[attr-defined]
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    # For torch each group is the whole world, so that nothing joins it with the others.
    dist.init_process_group(backend, store=store, rank=rank, world_size=n // groups, timeout=PATIENCE)
    try:
        group = Group(model, index)
        with joined(group):
            yield group
    finally:
        dist.destroy_process_group()


def group() -> Group | None:
    """The processes that were joined, if any."""
    found = team()
    return found if isinstance(found, Group) else None


def model_mesh() -> DeviceMesh | None:
    """The processes that hold one network between them, for `parallelize_module` or `fully_shard`; None alone."""
    found = group()
    return None if found is None or found.mesh is None else found.mesh["model"]


def by_all(function: Callable[[], T]) -> T:
    """`function()`, which all processes call here: what one of them raises, all raise."""
    found = group()
    return function() if found is None else found.alike(function)


def seed_of(seed: int, index: int) -> int:
    """The seed of a group: 63 bits that no other pair of a seed and a group has, but by a chance of 2^-63.

    >>> seed_of(0, 0), seed_of(0, 1)
    (5903642253403033523, 4414527679803055650)
    """
    return int.from_bytes(hashlib.blake2b(f"{int(seed)} {int(index)}".encode(), digest_size=8).digest()) >> 1
