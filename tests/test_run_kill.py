"""Runs that are killed, damaged and watched: nothing is lost, doubled or silently wrong."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import run_worker
from crepe_diffusion.errors import InputError
from crepe_diffusion.run import DamagedError, Run
from crepe_diffusion.run.folder import problems, read_run
from run_worker import SERVER, assert_same_run

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    run_worker.go(folder)
    return folder


def undisturbed(folder: Path) -> float:
    """Let a child begin or finish a run; how long that took."""
    child, began = SERVER.Process(target=run_worker.go, args=(folder,)), time.monotonic()
    child.start()
    child.join()
    assert child.exitcode == 0
    return time.monotonic() - began


def survive(reference: Path, tmp_path: Path, n_kills: int, seed: int) -> None:
    """Kill runs at random moments, each up to eight times, and let them finish."""
    dice, total, n_runs = random.Random(seed), 0, 0
    undisturbed(tmp_path / "first")  # waits for the server to start, too
    typical = undisturbed(tmp_path / "second")
    while total < n_kills:
        folder = tmp_path / f"run{n_runs}"
        # Every other run leaves its samples to the checkpoints, so that many steps are written at once.
        options = {"flush_seconds": 1e6 if n_runs % 2 == 0 else None}
        for _ in range(min(8, n_kills - total)):
            child, began = SERVER.Process(target=run_worker.go, args=(folder,), kwargs=options), time.monotonic()
            child.start()
            child.join(dice.uniform(0.0, 0.6 * typical))
            if child.exitcode is not None:
                # The machine is faster than it was: what it does now is what counts.
                assert child.exitcode == 0
                typical = (typical + time.monotonic() - began) / 2
                break
            child.kill()
            child.join()
            total += 1
        undisturbed(folder)
        assert_same_run(folder, reference)
        shutil.rmtree(folder)
        n_runs += 1
    print(f"{total} kills, {total} resumed, in {n_runs} runs that all equal the undisturbed one")


def test_a_killed_run_resumes_as_if_nothing_had_happened(reference: Path, tmp_path: Path) -> None:
    survive(reference, tmp_path, 5, seed=1)


@pytest.mark.slow
def test_a_hundred_kills(reference: Path, tmp_path: Path) -> None:
    survive(reference, tmp_path, 100, seed=2)


def die_in_writes(reference: Path, tmp_path: Path, moments: list[tuple[int, str]]) -> None:
    for after, stage in moments:
        folder = tmp_path / f"write{after}{stage}"
        child = SERVER.Process(target=run_worker.go_and_die, args=(folder, after, stage))
        child.start()
        child.join()
        assert child.exitcode in (0, -9)
        run_worker.go(folder)
        assert_same_run(folder, reference)
        shutil.rmtree(folder)


def test_a_run_killed_while_it_writes(reference: Path, tmp_path: Path) -> None:
    # A creation takes about 25 writes, an iteration 15, a checkpoint 20 more.
    die_in_writes(
        reference, tmp_path, [(1, "after"), (20, "halfway"), (115, "before"), (200, "after"), (300, "halfway")]
    )


@pytest.mark.slow
def test_a_run_killed_in_every_kind_of_write(reference: Path, tmp_path: Path) -> None:
    stages = ("before", "halfway", "after")
    die_in_writes(reference, tmp_path, [(n, stages[n % 3]) for n in [*range(1, 60), *range(60, 400, 12)]])


# -- damage --------------------------------------------------------------------------------------------------------


def damaged_copies(reference: Path, tmp_path: Path, n: int, seed: int):
    """Copies of a run in which one file was truncated or has one bit flipped."""
    dice = random.Random(seed)
    files = sorted(p.relative_to(reference) for p in reference.rglob("*") if p.is_file() and p.stat().st_size)
    # The smallest files would rarely be chosen by size, the largest rarely by name: half of each.
    for i in range(n):
        weights = None if i % 2 else [(reference / f).stat().st_size for f in files]
        name = dice.choices(files, weights)[0]
        folder = tmp_path / f"copy{i}"
        shutil.copytree(reference, folder)
        content = bytearray((folder / name).read_bytes())
        if i % 5 == 4:
            content = content[: dice.randrange(len(content))]
        else:
            content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        (folder / name).write_bytes(bytes(content))
        yield folder, name
        shutil.rmtree(folder)


@pytest.mark.slow
def test_damage_is_named_or_harmless(reference: Path, tmp_path: Path) -> None:
    longer = tmp_path / "longer"
    shutil.copytree(reference, longer)
    n = run_worker.CONFIG["stop"]["iterations"] + 6
    run_worker.go(longer, n)
    before, after = read_run(reference), read_run(longer)
    told = harmless = 0
    for folder, name in damaged_copies(reference, tmp_path, 50, seed=3):
        where = str(folder / name)
        notes = [str(p) for p in problems(folder)]
        try:
            data = read_run(folder)
        except (DamagedError, InputError) as error:
            notes.append(str(error))
        else:
            notes += data.notes
            assert np.array_equal(data.x, before.x)
            assert np.array_equal(data.target, before.target)
        try:
            with Run.resume(folder, notify=notes.append) as run:
                run.run(iterations=n)
        except (DamagedError, InputError) as error:
            notes.append(str(error))
        else:
            resumed = read_run(folder)
            assert np.array_equal(resumed.x, after.x), where
            assert np.array_equal(resumed.iteration, after.iteration)
            assert torch.equal(resumed.diagnostics.accepts, after.diagnostics.accepts)
        named = any(str(name) in text for text in notes)
        told, harmless = told + named, harmless + (not named)
        # The log is for people, and the lock is empty: nothing is computed from them.
        assert named or name.name in ("log.txt",), where
    print(f"{told} named, {harmless} harmless")


# -- readers -------------------------------------------------------------------------------------------------------


def watch(tmp_path: Path, n_reads: int, n_iterations: int, n_kills: int = 0) -> int:
    """Read a run while it is written (and killed and resumed): always a prefix of what it will be."""
    folder, kept, previous, longest, child = tmp_path / "watched", [], 0, 0, None
    reads = 0
    while reads < n_reads:
        if child is None or child.exitcode is not None:
            if child is not None and child.exitcode == 0:
                break
            assert child is None or child.exitcode == -9
            child = SERVER.Process(target=run_worker.endless, args=(folder, n_iterations), daemon=True)
            child.start()
        if not (folder / "checkpoints" / "00000000").exists() and not previous:
            time.sleep(0.005)
            continue
        data = read_run(folder)
        reads += 1
        n = len(data.x)
        assert (data.iteration == np.arange(1, n + 1)).all()
        assert (data.trace["iteration"] == np.arange(1, len(data.trace["iteration"]) + 1)).all()
        assert np.isfinite(data.x).all()
        assert all(len(values) == n and np.isfinite(values).all() for values in data.scalars.values())
        assert data.diagnostics.n_iterations <= n
        if not n_kills:
            assert n >= previous
        previous, longest = n, max(longest, n)
        kept.append(data.x[-3:].copy())
        if n_kills and reads % (n_reads // (n_kills + 1)) == 0:
            child.kill()
            child.join()
    child.kill()
    child.join()
    run_worker.endless(folder, longest)
    final = read_run(folder).x
    values = {row.tobytes() for row in final}
    assert all(row.tobytes() in values for rows in kept for row in rows)
    return reads


def test_readers_never_see_a_torn_run(tmp_path: Path) -> None:
    assert watch(tmp_path, 300, 60) > 20


@pytest.mark.slow
def test_thousands_of_reads(tmp_path: Path) -> None:
    # The writer never comes to its end: as slow as the machine may be, all reads fall into its time.
    assert watch(tmp_path, 5000, 10**9) == 5000
    assert watch(tmp_path / "killed", 1000, 10**9, n_kills=10) == 1000
    print("6000 reads, 1000 of them across 10 kills")


# -- memory and time -----------------------------------------------------------------------------------------------


def growth(tmp_path: Path, counts: list[int]) -> float:
    results = SERVER.Queue()
    child = SERVER.Process(target=run_worker.measure_memory, args=(tmp_path / "run", counts, results), daemon=True)
    child.start()
    first, *_, last = (results.get(timeout=3600) for _ in counts)
    child.join()
    print(f"{first / 2**20:.1f} MiB after {counts[0]} iterations, {last / 2**20:.1f} MiB after {counts[-1]}")
    return last / first - 1


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads the size of a process from /proc")
def test_memory_is_flat(tmp_path: Path) -> None:
    assert growth(tmp_path, [100, 500]) < 0.01


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads the size of a process from /proc")
def test_memory_is_flat_over_ten_thousand_iterations(tmp_path: Path) -> None:
    assert growth(tmp_path, [1000, 10_000]) < 0.01
