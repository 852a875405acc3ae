"""Files that are valid but not the right ones: older, exchanged, of another run, or what a power cut left."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import power
import run_worker
from crepe_diffusion.errors import InputError
from crepe_diffusion.run import DamagedError, Run, checkpoint, files
from crepe_diffusion.run.folder import problems, read_run
from run_worker import assert_same_run

N = run_worker.CONFIG["stop"]["iterations"]


@pytest.fixture(autouse=True, scope="module")
def _small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_sync", lambda path: None)
        patch.setattr("crepe_diffusion.run.store.LONGEST_BLOCK", 4)
        yield


@dataclass(frozen=True)
class Runs:
    """A run, two earlier states of it, another run of the same form, and what the first one becomes."""

    now: Path
    others: dict[str, Path]
    later: Path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    root = tmp_path_factory.mktemp("rollback")
    with Run.start(root / "run", run_worker.CONFIG) as run:
        run.run(iterations=5)
        shutil.copytree(root / "run", root / "first")
        run.run(iterations=run_worker.MIDDLE)
        run.refine(change={"right": {"scale": 2.0}})
        run.run(iterations=13)
        shutil.copytree(root / "run", root / "second")
        run.run(iterations=N)
    other = {**run_worker.CONFIG, "sampler": {**run_worker.CONFIG["sampler"], "seed": 5}}
    with Run.start(root / "other", other) as run:
        run.run(iterations=run_worker.MIDDLE)
        run.refine(change={"right": {"scale": 3.0}})
        run.run(iterations=N)
    shutil.copytree(root / "run", root / "later")
    with Run.resume(root / "later") as run:
        run.run(iterations=N + 3)
    return Runs(root / "run", {name: root / name for name in ("first", "second", "other")}, root / "later")


def exchanges(runs: Runs) -> list[tuple[str, Path, Path]]:
    """Every file of the run with everything that could stand in its place: (from, its path, its replacement)."""
    out = []
    for path in sorted(p.relative_to(runs.now) for p in runs.now.rglob("*") if p.is_file()):
        if path.name in ("log.txt", ".lock"):
            continue
        for name, other in runs.others.items():
            if (other / path).exists() and (other / path).read_bytes() != (runs.now / path).read_bytes():
                out.append((name, path, other / path))
        if path.name.startswith("c."):
            beside = [p for p in sorted((runs.now / path).parent.glob("c.*")) if p.name != path.name]
            out += [("beside", path, p) for p in beside if p.read_bytes() != (runs.now / path).read_bytes()]
    return out


def named_or_harmless(runs: Runs, folder: Path, path: Path) -> bool:
    """Whether the exchanged file is named; if not, all results must be those of the true run."""
    before, after, notes = read_run(runs.now), read_run(runs.later), [str(p) for p in problems(folder)]
    whole = not notes
    try:
        data = read_run(folder)
    except (DamagedError, InputError) as error:
        notes.append(str(error))
        refused = True
    else:
        refused = False
        notes += data.notes
        assert data.status == before.status or notes, path
        assert np.array_equal(data.x, before.x), path
        assert np.array_equal(data.target, before.target), path
        assert data.targets == before.targets or notes, path
    assert not (whole and refused), f"check passed what read refused: {path}"
    try:
        with Run.resume(folder, notify=notes.append) as run:
            run.run(iterations=N + 3)
    except (DamagedError, InputError) as error:
        notes.append(str(error))
    else:
        resumed = read_run(folder)
        assert np.array_equal(resumed.x, after.x), path
        assert resumed.targets == after.targets, path
        assert torch.equal(resumed.diagnostics.accepts, after.diagnostics.accepts), path
    return any(str(path) in text or str(path.parent) in text for text in notes)


def try_exchanges(runs: Runs, tmp_path: Path, chosen: list[tuple[str, Path, Path]]) -> None:
    told = 0
    for i, (_, path, replacement) in enumerate(chosen):
        folder = tmp_path / f"copy{i}"
        shutil.copytree(runs.now, folder)
        shutil.copy(replacement, folder / path)
        told += named_or_harmless(runs, folder, path)
        shutil.rmtree(folder)
    print(f"{len(chosen)} files exchanged: {told} named, {len(chosen) - told} harmless")


CHOSEN = ("samples.zarr/zarr.json", "samples.zarr/x/c.1.0.0")


def test_a_file_of_another_time_or_run_is_named_or_harmless(runs: Runs, tmp_path: Path) -> None:
    kinds: dict[tuple[str, str], tuple[str, Path, Path]] = {}
    for name, path, replacement in exchanges(runs):
        if str(path) in CHOSEN:
            kinds.setdefault(("beside" if name == "beside" else "", str(path)), (name, path, replacement))
    assert len(kinds) == 3
    try_exchanges(runs, tmp_path, list(kinds.values()))


@pytest.mark.slow
def test_every_file_of_another_time_or_run_is_named_or_harmless(runs: Runs, tmp_path: Path) -> None:
    try_exchanges(runs, tmp_path, exchanges(runs))


def test_samples_and_checkpoints_of_another_run(runs: Runs, tmp_path: Path) -> None:
    """A whole store, or a whole checkpoint, is as wrong as one file of it."""
    for name in ("samples.zarr", f"checkpoints/{N:08d}"):
        folder = tmp_path / name.partition("/")[0]
        shutil.copytree(runs.now, folder)
        shutil.rmtree(folder / name)
        shutil.copytree(runs.others["other"] / name, folder / name)
        assert any("belongs to another run" in str(p) for p in problems(folder))
    with pytest.raises(DamagedError, match="another run"):
        read_run(tmp_path / "samples.zarr")
    # The checkpoint before is whole, so the run goes on from there as it would have.
    with Run.resume(tmp_path / "checkpoints") as run:
        assert run.sampler.iteration < N
        run.run(iterations=N + 3)
    assert np.array_equal(read_run(tmp_path / "checkpoints").x, read_run(runs.later).x)


def test_a_run_file_of_another_run_does_not_cost_the_checkpoints(runs: Runs, tmp_path: Path) -> None:
    shutil.copytree(runs.now, tmp_path / "run")
    for name in ("run.json", "config.toml"):
        shutil.copy(runs.others["other"] / name, tmp_path / "run" / name)
    with pytest.raises(DamagedError, match=r"run\.json: belongs to another run than the checkpoints"):
        Run.resume(tmp_path / "run")
    assert len(checkpoint._all(tmp_path / "run")) == 2
    for name in ("run.json", "config.toml"):
        shutil.copy(runs.now / name, tmp_path / "run" / name)
    assert not list(problems(tmp_path / "run"))


# -- power cuts ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list]:
    root = tmp_path_factory.mktemp("power")
    with power.recorded(root) as operations:
        run_worker.go(root / "run", sync=True)
    return root, operations


def cut(operations: tuple[Path, list], tmp_path: Path, n: int, seed: int) -> None:
    root, everything = operations
    dice, begun = random.Random(seed), 0
    told: list[str] = []
    for i in range(n):
        # Half of the cuts come within the first writes, where the folder is made.
        last = len(everything) if i % 2 else min(120, len(everything))
        disk = power.Disk(root, everything[: dice.randrange(1, last + 1)])
        disk.leave(tmp_path / f"cut{i}", dice)
        folder = tmp_path / f"cut{i}/run"
        if (folder / "config.toml").exists():
            begun += 1
            if (folder / "checkpoints").is_dir() and checkpoint._all(folder):
                told += [p.path.name for p in problems(folder)]
        run_worker.go(folder)
        assert_same_run(folder, root / "run", log=False)
        shutil.rmtree(tmp_path / f"cut{i}")
    # Stop rules are in two files, of which one may be lost; `check` and `resume` tell that they differ.
    assert set(told) <= {"config.toml"}
    print(f"{n} power cuts, {begun} after the run had begun: all equal the undisturbed run; told before: {told}")


def test_what_is_written_lasts(operations: tuple[Path, list], tmp_path: Path) -> None:
    """When a run has stopped, a power cut that takes all that was not synced takes nothing."""
    root, everything = operations
    power.Disk(root, everything).leave(tmp_path / "cut", random.Random(0), kept=0.0)
    assert_same_run(tmp_path / "cut/run", root / "run", log=False)


@pytest.mark.slow
def test_a_power_cut_loses_nothing(operations: tuple[Path, list], tmp_path: Path) -> None:
    cut(operations, tmp_path, 20, seed=4)


@pytest.mark.slow
def test_many_power_cuts(operations: tuple[Path, list], tmp_path: Path) -> None:
    cut(operations, tmp_path, 300, seed=5)


@pytest.mark.slow
def test_without_syncs_of_directories_a_power_cut_shows(operations: tuple[Path, list], tmp_path: Path) -> None:
    """The disk of this test does lose what was not synced."""
    root, everything = operations
    careless = [o for o in everything if not (o[0] == "sync" and o[1].suffix == "" and not o[1].name.startswith("c."))]
    dice, lost = random.Random(0), 0
    for i in range(20):
        disk = power.Disk(root, careless)
        disk.leave(tmp_path / f"cut{i}", dice)
        folder = tmp_path / f"cut{i}/run"
        lost += not (folder / "config.toml").exists() or bool(list(problems(folder)))
    assert lost > 5
