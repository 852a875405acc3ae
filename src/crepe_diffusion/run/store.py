"""Samples in Zarr (version 3), readable by other tools while the run goes on.

samples.zarr/zarr.json        the manifest: every array with its length, in one file that is replaced in one step
samples.zarr/x/c.7.0.0        one chunk: raw numbers and their crc32c
samples.zarr/trace/level/...  one row per iteration

A flush writes chunks first and the manifest last, so a reader of the manifest finds all that it lists. Rows that were
once published are only ever written again with the same values, also after a crash: an old manifest stays true.
The format is simple enough to be written by hand, which keeps a flush to a few file writes.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from crepe_diffusion.errors import InputError
from crepe_diffusion.run.files import DamagedError, digest, publish, publish_all, sync_directory

__all__ = ["Column", "Store", "Table", "read_store"]

CHUNK_BYTES = 2**20
"""Small enough to be written again while it fills, large enough that a run has few of them."""
LONGEST_BLOCK = 4096
GROUP = {"zarr_format": 3, "node_type": "group", "attributes": {}}


@dataclass(frozen=True)
class Column:
    """An array that grows along its first axis; `shape` and `names` are those of one row."""

    dtype: str
    shape: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    compressed: bool = False

    @property
    def fill(self) -> float | int:
        return float("nan") if np.dtype(self.dtype).kind == "f" else -1

    @property
    def row_bytes(self) -> int:
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=np.int64))

    def metadata(self, axis: str, n: int, block: int) -> dict[str, Any]:
        codecs: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
        if self.compressed:
            codecs.append({"name": "gzip", "configuration": {"level": 1}})
        codecs.append({"name": "crc32c"})
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [n, *self.shape],
            "data_type": self.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [block, *self.shape]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": "NaN" if np.dtype(self.dtype).kind == "f" else -1,
            "codecs": codecs,
            "dimension_names": [axis, *self.names],
            "attributes": {},
        }


class Table:
    """Columns that grow together, kept in memory one block at a time."""

    def __init__(self, root: Path, prefix: str, axis: str, columns: Mapping[str, Column]):
        self.root, self.prefix, self.axis, self.columns = root, prefix, axis, dict(columns)
        widest = max(c.row_bytes for c in columns.values())
        self.block = int(min(LONGEST_BLOCK, max(16, CHUNK_BYTES // max(1, widest))))
        self.n_rows = 0
        self.n_written = 0
        self.buffers = {name: np.full((self.block, *c.shape), c.fill, c.dtype) for name, c in columns.items()}

    def append(self, row: Mapping[str, Any]) -> None:
        for name, buffer in self.buffers.items():
            buffer[self.n_rows % self.block] = row[name]
        self._grown(1)

    def extend(self, rows: Mapping[str, np.ndarray]) -> None:
        """Several rows, given as columns."""
        n, done = len(next(iter(rows.values()))), 0
        while done < n:
            at = self.n_rows % self.block
            count = min(n - done, self.block - at)
            for name, buffer in self.buffers.items():
                buffer[at : at + count] = rows[name][done : done + count]
            done += count
            self._grown(count)

    def _grown(self, n: int) -> None:
        self.n_rows += n
        if self.n_rows % self.block == 0:
            publish_all(self.chunks())
            self.written()

    def chunks(self) -> dict[Path, bytes]:
        """The files of the chunk that is being filled, if it has changed since it was last written."""
        if self.n_written == self.n_rows:
            return {}
        index = (self.n_rows - 1) // self.block
        return {self._chunk(name, index): _encode(self.columns[name], b) for name, b in self.buffers.items()}

    def written(self) -> None:
        """What `chunks` gave is on disk."""
        if self.n_written < self.n_rows and self.n_rows % self.block == 0:
            for name, buffer in self.buffers.items():
                buffer[...] = self.columns[name].fill
        self.n_written = self.n_rows

    def rewind(self, n: int) -> None:
        """Go on after the first n rows. What lies behind them stays on disk until it is written again."""
        self.n_rows = self.n_written = n
        partial = n % self.block
        for name, column in self.columns.items():
            buffer = self.buffers[name]
            buffer[...] = column.fill
            if partial:
                buffer[...] = _decode(self._chunk(name, n // self.block), column, self.block)

    def _chunk(self, name: str, index: int) -> Path:
        return self.root / self.prefix / name / _key(index, len(self.columns[name].shape))

    def metadata(self) -> dict[str, Any]:
        return {self.prefix + k: c.metadata(self.axis, self.n_rows, self.block) for k, c in self.columns.items()}


class Store:
    """The sample store of a run that is being written: `draws` at the root, `trace` in a group of its own."""

    def __init__(self, root: Path, draws: Mapping[str, Column], trace: Mapping[str, Column]):
        self.root = root
        self.draws = Table(root, "", "draw", draws)
        self.trace = Table(root, "trace/", "step", trace)
        self.generation = 0

    def create(self) -> None:
        for table in (self.draws, self.trace):
            for name in table.columns:
                (self.root / table.prefix / name).mkdir(parents=True)
        self.publish()

    def rewind(self, n_draws: int, n_steps: int, generation: int) -> None:
        """Continue behind a checkpoint; a new generation marks that rows may have been written again."""
        self.draws.rewind(n_draws)
        self.trace.rewind(n_steps)
        self.generation = generation
        self.publish()

    def flush(self, *, arrays: bool = True) -> None:
        """Make all rows visible to readers; without `arrays`, to those that read the manifest (most do)."""
        publish_all({**self.draws.chunks(), **self.trace.chunks()})
        self.draws.written()
        self.trace.written()
        self.publish(arrays=arrays)

    def _groups(self) -> list[str]:
        names = [table.prefix + name for table in (self.draws, self.trace) for name in table.columns]
        return sorted({name.rpartition("/")[0] for name in names} - {""})

    def publish(self, *, arrays: bool = True) -> None:
        groups = {name: GROUP for name in self._groups()}
        nodes = {**groups, **self.draws.metadata(), **self.trace.metadata()}
        # Tools that open one array by its path look here; the manifest, written last, is what this package reads.
        if arrays:
            publish_all({self.root / name / "zarr.json": _dump(node) for name, node in nodes.items()}, sync=False)
        manifest: dict[str, Any] = {
            "zarr_format": 3,
            "node_type": "group",
            "attributes": {"generation": self.generation},
            "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": nodes},
        }
        manifest["attributes"]["checksum"] = _checksum(manifest)
        publish(self.root / "zarr.json", _dump(manifest))
        sync_directory(self.root)


def read_store(root: Path, only: set[str] | None = None) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Draws and trace as of one manifest, every chunk verified.

    A run that is resumed meanwhile begins a new generation; what was read across that moment is read again.
    """
    while True:
        manifest = read_manifest(root)
        try:
            arrays = {
                name: _read_array(root / name, metadata)
                for name, metadata in _arrays(manifest).items()
                if only is None or name in only
            }
        except DamagedError:
            if read_manifest(root)["attributes"]["generation"] == manifest["attributes"]["generation"]:
                raise
            continue
        if read_manifest(root)["attributes"]["generation"] == manifest["attributes"]["generation"]:
            break
    draws = {name: values for name, values in arrays.items() if not name.startswith("trace/")}
    return draws, {name[6:]: values for name, values in arrays.items() if name.startswith("trace/")}


def read_manifest(root: Path) -> dict[str, Any]:
    path = root / "zarr.json"
    try:
        manifest = json.loads(path.read_bytes().decode("ascii"))
        whole = manifest["attributes"]["checksum"] == _checksum(manifest)
    except FileNotFoundError:
        raise DamagedError(path, "missing: there are no samples here") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(path, f"not the JSON that was written ({error!r})") from None
    if not whole:
        raise DamagedError(path, "its content does not match its checksum")
    return dict(manifest)


def _checksum(manifest: dict[str, Any]) -> str:
    attributes = {k: v for k, v in manifest["attributes"].items() if k != "checksum"}
    return digest(json.dumps({**manifest, "attributes": attributes}, sort_keys=True).encode())


def verify_store(root: Path) -> Iterator[DamagedError]:
    """Everything that is wrong with a sample store, file by file."""
    try:
        manifest = read_manifest(root)
    except DamagedError as error:
        yield error
        return
    for name, metadata in manifest["consolidated_metadata"]["metadata"].items():
        path = root / name / "zarr.json"
        try:
            own = json.loads(path.read_bytes().decode("ascii"))
            if own["node_type"] == "array" == metadata["node_type"]:
                # It is written before the manifest, and more rarely.
                own["shape"][0] = metadata["shape"][0]
            if own != metadata:
                yield DamagedError(path, "does not agree with the manifest samples.zarr/zarr.json")
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            yield DamagedError(path, f"not the JSON that was written ({error!r})")
    for name, metadata in _arrays(manifest).items():
        for chunk, column, block in _chunks(root / name, metadata):
            try:
                _decode(chunk, column, block)
            except DamagedError as error:
                yield error


def _arrays(manifest: dict[str, Any]) -> dict[str, Any]:
    nodes = manifest["consolidated_metadata"]["metadata"]
    return {name: node for name, node in nodes.items() if node["node_type"] == "array"}


def _chunks(path: Path, metadata: dict[str, Any]) -> Iterator[tuple[Path, Column, int]]:
    block, *tail = metadata["chunk_grid"]["configuration"]["chunk_shape"]
    compressed = any(codec["name"] == "gzip" for codec in metadata["codecs"])
    column = Column(metadata["data_type"], tuple(tail), compressed=compressed)
    for index in range(-(-metadata["shape"][0] // block)):
        yield path / _key(index, len(tail)), column, block


def _read_array(path: Path, metadata: dict[str, Any]) -> np.ndarray:
    n, *tail = metadata["shape"]
    out = np.empty((n, *tail), metadata["data_type"])
    for i, (chunk, column, block) in enumerate(_chunks(path, metadata)):
        rows = out[i * block : (i + 1) * block]
        rows[...] = _decode(chunk, column, block)[: len(rows)]
    return out


def _key(index: int, n_tail: int) -> str:
    return ".".join(["c", str(index), *["0"] * n_tail])


def _encode(column: Column, block: np.ndarray) -> bytes:
    content = np.ascontiguousarray(block).astype(np.dtype(column.dtype).newbyteorder("<"), copy=False).tobytes()
    if column.compressed:
        content = gzip.compress(content, 1, mtime=0)
    return content + google_crc32c.value(content).to_bytes(4, "little")


def _decode(path: Path, column: Column, block: int) -> np.ndarray:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DamagedError(path, f"chunk missing or unreadable ({error.strerror})") from None
    content, seal = content[:-4], content[-4:]
    if len(seal) < 4 or google_crc32c.value(content) != int.from_bytes(seal, "little"):
        raise DamagedError(path, "chunk does not match its checksum")
    if column.compressed:
        content = gzip.decompress(content)
    wanted = column.row_bytes * block
    if len(content) != wanted:
        raise DamagedError(path, f"chunk holds {len(content)} bytes in place of {wanted}")
    values = np.frombuffer(content, np.dtype(column.dtype).newbyteorder("<"))
    return values.reshape(block, *column.shape).astype(column.dtype)


def _dump(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode()


def zarr_type(dtype: Any) -> str:
    """The name that Zarr gives to a numpy type."""
    name = np.dtype(dtype).name
    if name not in {"int16", "int32", "int64", "float32", "float64"}:
        raise InputError(f"samples of type {name} cannot be stored; use float32, float64 or integers")
    return name
