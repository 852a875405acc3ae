"""A run is a folder: where each thing lies, which process holds it, and how all of it is read.

config.toml   run.json   targets.json   samples.zarr/   checkpoints/   control/   log.txt   outcome.json   report.html
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from crepe_diffusion.diagnostics import Diagnostics
from crepe_diffusion.diagnostics.data import RunData
from crepe_diffusion.diagnostics.starting import StartingPass
from crepe_diffusion.errors import InputError
from crepe_diffusion.evaluate import Counts
from crepe_diffusion.run import checkpoint, identity
from crepe_diffusion.run.config import read_toml
from crepe_diffusion.run.files import DamagedError, digest, read_json
from crepe_diffusion.run.recorder import OWN
from crepe_diffusion.run.store import read_manifest, read_store, verify_store
from crepe_diffusion.run.trust import check_links, check_trust, named_code
from crepe_diffusion.schedules import Ladder

try:
    import fcntl
except ImportError:  # no such locks on Windows: nothing then keeps two processes from one run
    fcntl = None  # type: ignore[assignment]

__all__ = ["Lock", "is_run", "n_burnt", "problems", "read_run", "read_targets", "status"]


def is_run(folder: Path) -> bool:
    return (folder / "config.toml").is_file()


def require_run(folder: Path) -> None:
    if not folder.is_dir():
        raise InputError(f"{folder} does not exist; a run is a folder made by `crepe-diffusion run CONFIG --out DIR`")
    if not is_run(folder):
        raise InputError(f"{folder} holds no run: there is no config.toml in it")
    check_links(folder)


class Lock:
    """Held by the process that runs a run; the system releases it when that process ends in any way."""

    def __init__(self, folder: Path):
        self.path = folder / ".lock"
        self.file: Any = None

    def acquire(self) -> None:
        if fcntl is None:
            return
        self.file = open(self.path, "a+")  # noqa: SIM115 - held until release
        # `status` holds it for a moment; a process that runs holds it for long.
        for _ in range(50):
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.02)
        else:
            self.file.close()
            self.file = None
            raise InputError(f"{self.path.parent} is being run by another process; stop that one first")

    def release(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def is_held(self) -> bool:
        """Whether some process holds it."""
        if self.file is not None:
            return True
        if fcntl is None or not self.path.exists():
            return False
        try:
            with open(self.path) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        return False


def status(folder: Path) -> str:
    """`running`, `finished` (a stop rule was met) or `stopped` (killed, interrupted or failed; `resume` goes on)."""
    if Lock(folder).is_held():
        return "running"
    try:
        return "finished" if read_outcome(folder)["finished"] else "stopped"
    except (OSError, DamagedError):
        return "stopped"


def read_outcome(folder: Path) -> dict[str, Any]:
    """Why the run last stopped; one of another run, or of an earlier session, is a `DamagedError`."""
    path = folder / "outcome.json"
    outcome = read_json(path)
    newest = checkpoint.newest_iteration(folder)
    if outcome.get("run") != checkpoint.run_name(folder):
        raise DamagedError(path, "belongs to another run")
    if outcome.get("iteration") != newest or not isinstance(outcome.get("finished"), bool):
        raise DamagedError(path, f"of iteration {outcome.get('iteration')}, but the last checkpoint is of {newest}")
    return outcome


def check_targets_trusted(folder: Path) -> None:
    """Refuse rewards that somebody else named by their code."""
    try:
        value = read_json(folder / "targets.json")
    except (OSError, DamagedError):
        return  # the checkpoint's own are taken then, and they are checked there
    code = named_code([entry.get("rewards") for entry in value["targets"]])
    check_trust(folder / "targets.json", value.get("trust"), str(value.get("run")), code)


def read_targets(folder: Path, position: checkpoint.Position | None = None) -> list[dict[str, Any]]:
    """The history of targets, each with the iteration from which it is in force.

    It begins as the checkpoint says where one is given: else it is of another run, or of an earlier time.
    """
    path = folder / "targets.json"
    try:
        value = read_json(path)
    except OSError as error:
        raise DamagedError(path, f"missing or unreadable ({error.strerror})") from None
    entries = list(value["targets"])
    if position is not None and value.get("run") != position.run:
        raise DamagedError(path, "belongs to another run than the checkpoints")
    if position is not None and entries[: len(position.history)] != position.history:
        raise DamagedError(path, "does not begin with the targets that the last checkpoint was written under")
    return entries


def n_burnt(iteration: np.ndarray, targets: list[dict[str, Any]], burn_in: int) -> int:
    """How many draws lie before the end of the last target's burn-in."""
    return int((iteration < targets[-1]["from_iteration"] + burn_in).sum())


def read_run(folder: str | Path) -> RunData:
    """Everything that a run has produced so far, verified; also while it goes on, from any process."""
    folder = Path(folder)
    require_run(folder)
    identity.check_schema(folder)
    config = read_toml(folder / "config.toml")
    notes: list[str] = []
    try:
        burn_in = int(config["output"]["burn_in"])
        if digest((folder / "config.toml").read_bytes()) != read_json(folder / "run.json")["config_text"]:
            notes.append(f"{folder / 'config.toml'}: changed since the run wrote it")
    except (KeyError, TypeError, ValueError):
        raise DamagedError(folder / "config.toml", "not the configuration that was written") from None
    except (OSError, DamagedError) as error:
        notes.append(str(error))
    if not (folder / "checkpoints").is_dir():
        raise InputError(f"{folder} has not sampled anything yet")
    while True:
        known = len(notes)
        path, position, tensors = checkpoint.newest(folder, lambda e: notes.append(str(e)), only_reported=True)
        try:
            draws, trace = read_store(folder / "samples.zarr", since=position.samples)
            targets = read_targets(folder, position)
            lost = read_manifest(folder / "samples.zarr")["attributes"].get("lost", [])
            break
        except DamagedError:
            # A running process may have written another checkpoint, and gone on from there.
            if checkpoint.newest_iteration(folder) == int(path.name):
                raise
            del notes[known:]
    _check_order(folder, draws, trace, len(targets))

    def part(name: str) -> dict[str, Any]:
        return {key[len(name) + 1 :]: value for key, value in tensors.items() if key.startswith(name + ".")}

    ladder = Ladder.from_state_dict(part("ladder"))
    return RunData(
        name=folder.resolve().name,
        path=folder,
        config=config,
        status=status(folder),
        x=draws["x"],
        iteration=draws["iteration"],
        target=draws["target"],
        targets=[{"from_iteration": t["from_iteration"], "rewards": t["rewards"]} for t in targets],
        n_burnt=n_burnt(draws["iteration"], targets, burn_in),
        scalars={name[8:]: values for name, values in draws.items() if name.startswith("scalars/")},
        trace=trace,
        levels=ladder.levels.numpy(),
        substeps=ladder.substeps,
        diagnostics=Diagnostics.from_state_dict(part("diagnostics")) if part("diagnostics") else None,
        counts=Counts.from_state_dict(part("counts")),
        columns={name: v for name, v in draws.items() if name not in OWN and not name.startswith("scalars/")},
        notes=[*notes, *map(str, lost)],
        started_from=StartingPass.from_state_dict(part("pilot")) if part("pilot") else None,
    )


def _check_order(folder: Path, draws: dict[str, np.ndarray], trace: dict[str, np.ndarray], n_targets: int) -> None:
    """Draws and trace rows in the order in which they were made: a lost chunk that left no other sign shows here."""
    for name, table in (("iteration", draws), ("trace/iteration", trace)):
        values = table["iteration"]
        if len(values) and (values[0] < 1 or (np.diff(values) <= 0).any()):
            raise DamagedError(folder / "samples.zarr" / name, "iterations do not increase")
    index = draws["target"]
    if len(index) and (index.min() < 0 or index.max() >= n_targets):
        raise DamagedError(folder / "targets.json", f"holds {n_targets} targets, but draws name {index.max() + 1}")


def problems(folder: Path) -> Iterator[DamagedError]:
    """Everything that is wrong with a run, file by file; nothing where all is well. The rules are those of reading."""
    require_run(folder)
    seen: set[Path] = set()
    for error in _problems(folder):
        if error.path not in seen:
            seen.add(error.path)
            yield error


def _problems(folder: Path) -> Iterator[DamagedError]:
    yield from _loose_files(folder)
    yield from checkpoint.verify(folder)
    position = None
    try:
        _, position, _ = checkpoint.newest(folder, lambda error: None)
        read_targets(folder, position)
    except DamagedError as error:
        yield error
    yield from verify_store(folder / "samples.zarr", position.samples if position is not None else None)
    try:
        read_run(folder)
    except DamagedError as error:
        yield error
    except InputError:
        pass  # what is wrong with the configuration, or that nothing was sampled, was told above
    for name in sorted(os.listdir(folder / "checkpoints") if (folder / "checkpoints").is_dir() else []):
        if name.startswith("damaged-"):
            yield DamagedError(folder / "checkpoints" / name, "set aside by an earlier resume; safe to delete")


def _loose_files(folder: Path) -> Iterator[DamagedError]:
    try:
        read_toml(folder / "config.toml")
        text = digest((folder / "config.toml").read_bytes())
    except (InputError, OSError) as error:
        yield DamagedError(folder / "config.toml", str(error))
        text = ""
    readers = {"run.json": read_json, "outcome.json": lambda path: read_outcome(path.parent)}
    for name, read in readers.items():
        path = folder / name
        try:
            value = read(path)
            if name == "run.json" and text and text != value.get("config_text"):
                yield DamagedError(folder / "config.toml", "changed since the run wrote it")
        except FileNotFoundError:
            if name != "outcome.json":
                yield DamagedError(path, "missing")
        except OSError as error:
            yield DamagedError(path, f"unreadable ({error.strerror})")
        except DamagedError as error:
            if name != "outcome.json" or not Lock(folder).is_held():  # a run that goes on takes it away
                yield error
