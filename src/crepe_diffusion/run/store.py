"""Samples in Zarr (version 3), readable by other tools while the run goes on.

samples.zarr/zarr.json        the manifest: every array with its length and the seals of its chunks, in one file
samples.zarr/x/c.7.0.0        one chunk: raw numbers and their crc32c
samples.zarr/trace/level/...  one row per iteration

A flush writes chunks first and the manifest last, so a reader of the manifest finds all that it lists. Rows that were
once published are only ever written again with the same values, also after a crash: an old manifest stays true.
The seal of a chunk is the checksum of those of its rows that are listed, so it stays true while the chunk fills; a
chunk from elsewhere, or from earlier, does not have it. Checkpoints hold the seals too.
The format is simple enough to be written by hand, which keeps a flush to a few file writes.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from crepe_diffusion.errors import InputError
from crepe_diffusion.run.files import DamagedError, digest, make_directory, publish, publish_all, read_bounded

__all__ = ["Column", "Store", "Table", "read_store"]

CHUNK_BYTES = 2**20
"""Small enough to be written again while it fills, large enough that a run has few of them."""
LONGEST_BLOCK = 4096
MOST_BYTES = 2**32
"""Of one chunk in memory: a file that wants more was not written by us."""
GROUP = {"zarr_format": 3, "node_type": "group", "attributes": {}}


@dataclass(frozen=True)
class Column:
    """An array that grows along its first axis; `shape` and `names` are those of one row."""

    dtype: str
    shape: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    compressed: bool = False

    @staticmethod
    def of(metadata: Mapping[str, Any]) -> Column:
        """The column that `metadata` describes."""
        shape, names = metadata["chunk_grid"]["configuration"]["chunk_shape"], metadata["dimension_names"]
        compressed = any(codec["name"] == "gzip" for codec in metadata["codecs"])
        return Column(metadata["data_type"], tuple(shape[1:]), tuple(names[1:]), compressed)

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
        self.full_seals: dict[str, list[int]] = {name: [] for name in columns}

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
                self.full_seals[name].append(_seal(buffer))
                buffer[...] = self.columns[name].fill
        self.n_written = self.n_rows

    def seals(self) -> dict[str, list[int]]:
        """One per chunk and column, of all rows so far."""
        partial = self.n_rows % self.block
        last = {name: [_seal(b[:partial])] if partial else [] for name, b in self.buffers.items()}
        return {self.prefix + name: [*self.full_seals[name], *last[name]] for name in self.columns}

    def rewind(self, n: int, seals: Mapping[str, list[int]]) -> None:
        """Go on after the first n rows, which have these seals. What lies behind stays until it is written again."""
        self.n_rows = self.n_written = n
        index, partial = divmod(n, self.block)
        for name, column in self.columns.items():
            buffer, known = self.buffers[name], seals[self.prefix + name]
            self.full_seals[name] = known[:index]
            buffer[...] = column.fill
            if partial:
                buffer[...] = _read_chunk(self._chunk(name, index), column, self.block, partial, known[index])

    def _chunk(self, name: str, index: int) -> Path:
        return self.root / self.prefix / name / _key(index, len(self.columns[name].shape))

    def metadata(self) -> dict[str, Any]:
        return {self.prefix + k: c.metadata(self.axis, self.n_rows, self.block) for k, c in self.columns.items()}


class Store:
    """The sample store of a run that is being written: `draws` at the root, `trace` in a group of its own."""

    def __init__(self, root: Path, draws: Mapping[str, Column], trace: Mapping[str, Column], run: str = ""):
        self.root, self.run = root, run
        self.draws = Table(root, "", "draw", draws)
        self.trace = Table(root, "trace/", "step", trace)
        self.generation = 0
        self.lost: list[str] = []

    def create(self) -> None:
        for table in (self.draws, self.trace):
            for name in table.columns:
                make_directory(self.root / table.prefix / name)
        self.publish()

    def seals(self) -> dict[str, list[int]]:
        return {**self.draws.seals(), **self.trace.seals()}

    def rewind(self, n_draws: int, n_steps: int, seals: Mapping[str, list[int]], generation: int) -> None:
        """Continue behind a checkpoint; a new generation marks that rows may have been written again."""
        self.draws.rewind(n_draws, seals)
        self.trace.rewind(n_steps, seals)
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
            publish_all({self.root / name / "zarr.json": _dump(node) for name, node in nodes.items()})
        manifest: dict[str, Any] = {
            "zarr_format": 3,
            "node_type": "group",
            "attributes": {"run": self.run, "generation": self.generation, "seals": self.seals()},
            "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": nodes},
        }
        if self.lost:
            manifest["attributes"]["lost"] = self.lost
        manifest["attributes"]["checksum"] = _checksum(manifest)
        publish(self.root / "zarr.json", _dump(manifest))


def read_store(
    root: Path, only: set[str] | None = None, since: Sealed | None = None
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Draws and trace as of one manifest, every chunk verified, also against what a checkpoint knows of them.

    A run that is resumed meanwhile begins a new generation; what was read across that moment is read again.
    """
    while True:
        manifest = read_manifest(root)
        try:
            if since is not None:
                for error in disagreements(root, manifest, since):
                    raise error
            arrays = {
                name: chunk_rows(root, manifest, name, [])
                for name in arrays_of(manifest)
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


@dataclass(frozen=True)
class Sealed:
    """What a checkpoint knows of the samples: its own name, whose run it is, lengths, and the seals of all chunks."""

    name: str
    run: str
    n_draws: int
    n_steps: int
    seals: Mapping[str, list[int]]

    def rows(self, array: str) -> int:
        return self.n_steps if array.startswith("trace/") else self.n_draws


def disagreements(root: Path, manifest: dict[str, Any], since: Sealed) -> Iterator[DamagedError]:
    """Where a sample store is not the one that a checkpoint was written for, or an older state of it."""
    path, attributes = root / "zarr.json", manifest["attributes"]
    if attributes["run"] != since.run:
        yield DamagedError(path, "belongs to another run than the checkpoints")
        return
    for name, metadata in arrays_of(manifest).items():
        n, known, found = since.rows(name), since.seals.get(name, []), attributes["seals"][name]
        if metadata["shape"][0] < n:
            yield DamagedError(path, f"older than {since.name}: it lists {metadata['shape'][0]} rows of {name} of {n}")
            return
        for i, (chunk, column, block) in enumerate(_chunks(root / name, metadata)):
            rows = min(block, n - i * block)
            if rows <= 0:
                break
            try:
                if metadata["shape"][0] == n or rows == block:
                    if found[i] != known[i]:
                        raise DamagedError(chunk, f"not the chunk that {since.name} was written for")
                else:
                    _read_chunk(chunk, column, block, rows, known[i])
            except DamagedError as error:
                yield error


def read_manifest(root: Path) -> dict[str, Any]:
    path = root / "zarr.json"
    try:
        manifest = json.loads(read_bounded(path).decode("ascii"))
        whole = manifest["attributes"]["checksum"] == _checksum(manifest)
    except FileNotFoundError:
        raise DamagedError(path, "missing: there are no samples here") from None
    except OSError as error:
        raise DamagedError(path, f"unreadable ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(path, f"not the JSON that was written ({error!r})") from None
    if not whole:
        raise DamagedError(path, "its content does not match its checksum")
    return dict(manifest)


def _checksum(manifest: dict[str, Any]) -> str:
    attributes = {k: v for k, v in manifest["attributes"].items() if k != "checksum"}
    return digest(json.dumps({**manifest, "attributes": attributes}, sort_keys=True).encode())


def verify_store(root: Path, since: Sealed | None = None) -> Iterator[DamagedError]:
    """Everything that is wrong with a sample store, file by file, also against what a checkpoint knows of it."""
    try:
        manifest = read_manifest(root)
    except DamagedError as error:
        yield error
        return
    for name, metadata in manifest["consolidated_metadata"]["metadata"].items():
        path = root / name / "zarr.json"
        try:
            own = json.loads(read_bounded(path).decode("ascii"))
            if own["node_type"] == "array" == metadata["node_type"]:
                # It is written before the manifest, and more rarely.
                own["shape"][0] = metadata["shape"][0]
            if own != metadata:
                yield DamagedError(path, "does not agree with the manifest samples.zarr/zarr.json")
        except DamagedError as error:
            yield error
        except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            yield DamagedError(path, f"not the JSON that was written ({error!r})")
    for name, metadata in arrays_of(manifest).items():
        yield from verify_array(root / name, metadata, manifest["attributes"]["seals"][name])
    if since is not None:
        yield from disagreements(root, manifest, since)


def verify_array(path: Path, metadata: dict[str, Any], seals: list[int]) -> Iterator[DamagedError]:
    """The damaged chunks of one array."""
    for i, (chunk, column, block) in enumerate(_chunks(path, metadata)):
        try:
            _read_chunk(chunk, column, block, min(block, metadata["shape"][0] - i * block), seals[i])
        except DamagedError as error:
            yield error


def bad_chunks(root: Path, manifest: dict[str, Any], name: str, since: Sealed) -> dict[int, str]:
    """The chunks of one array that are not what was written, by their index, and what is wrong with them."""
    metadata, seals = arrays_of(manifest)[name], manifest["attributes"]["seals"][name]
    errors = [*verify_array(root / name, metadata, seals), *disagreements(root, manifest, since)]
    index = {chunk: i for i, (chunk, _, _) in enumerate(_chunks(root / name, metadata))}
    return {index[e.path]: str(e).removeprefix(f"{e.path}: ") for e in reversed(errors) if e.path in index}


def chunk_rows(root: Path, manifest: dict[str, Any], name: str, without: list[int]) -> np.ndarray:
    """All rows of one array but those of some chunks."""
    metadata, seals = arrays_of(manifest)[name], manifest["attributes"]["seals"][name]
    n, *tail = metadata["shape"]
    parts = [np.empty((0, *tail), metadata["data_type"])]
    for i, (chunk, column, block) in enumerate(_chunks(root / name, metadata)):
        rows = min(block, n - i * block)
        if i not in without:
            parts.append(_read_chunk(chunk, column, block, rows, seals[i])[:rows])
    return np.concatenate(parts)


def seals_of(table: Table, rows: Mapping[str, np.ndarray], n: int) -> dict[str, list[int]]:
    """The seals that the first n of these rows have in this table."""
    cuts = [slice(i, min(i + table.block, n)) for i in range(0, n, table.block)]
    return {table.prefix + name: [_seal(values[cut]) for cut in cuts] for name, values in rows.items()}


def arrays_of(manifest: dict[str, Any]) -> dict[str, Any]:
    nodes = manifest["consolidated_metadata"]["metadata"]
    return {name: node for name, node in nodes.items() if node["node_type"] == "array"}


def _chunks(path: Path, metadata: dict[str, Any]) -> Iterator[tuple[Path, Column, int]]:
    block, column = metadata["chunk_grid"]["configuration"]["chunk_shape"][0], Column.of(metadata)
    for index in range(-(-metadata["shape"][0] // block)):
        yield path / _key(index, len(column.shape)), column, block


def _key(index: int, n_tail: int) -> str:
    return ".".join(["c", str(index), *["0"] * n_tail])


def _raw(rows: np.ndarray) -> bytes:
    return np.ascontiguousarray(rows).astype(rows.dtype.newbyteorder("<"), copy=False).tobytes()


def _seal(rows: np.ndarray) -> int:
    return int(google_crc32c.value(_raw(rows)))


def _encode(column: Column, block: np.ndarray) -> bytes:
    content = _raw(block)
    if column.compressed:
        content = gzip.compress(content, 1, mtime=0)
    return content + google_crc32c.value(content).to_bytes(4, "little")


def _read_chunk(path: Path, column: Column, block: int, rows: int, seal: int) -> np.ndarray:
    """A chunk whose first rows have this seal."""
    wanted = column.row_bytes * block
    if wanted > MOST_BYTES:
        raise DamagedError(path, f"a chunk of {wanted:,} bytes is larger than any of ours")
    try:
        content = read_bounded(path, wanted + 2**16)  # gzip may make small chunks a little larger
    except OSError as error:
        raise DamagedError(path, f"chunk missing or unreadable ({error.strerror})") from None
    content, end = content[:-4], content[-4:]
    if len(end) < 4 or google_crc32c.value(content) != int.from_bytes(end, "little"):
        raise DamagedError(path, "chunk does not match its checksum")
    if column.compressed:
        try:
            content = zlib.decompressobj(wbits=31).decompress(content, wanted + 1)
        except zlib.error as error:
            raise DamagedError(path, f"chunk cannot be unpacked ({error})") from None
    if len(content) != wanted:
        raise DamagedError(path, f"chunk holds {len(content)} bytes in place of {wanted}")
    values = np.frombuffer(content, np.dtype(column.dtype).newbyteorder("<")).reshape(block, *column.shape)
    values = values.astype(column.dtype)
    if _seal(values[:rows]) != seal:
        raise DamagedError(path, "chunk of another run or of another time: its rows do not have the seal that they had")
    return values


def _dump(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode()


def zarr_type(dtype: Any) -> str:
    """The name that Zarr gives to a numpy type."""
    name = np.dtype(dtype).name
    if name not in {"int16", "int32", "int64", "float32", "float64"}:
        raise InputError(f"samples of type {name} cannot be stored; use float32, float64 or integers")
    return name
