"""Groups of processes that know nothing of each other, and networks that several processes hold between them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import crepe_diffusion as cd
from checks import refuted
from crepe_diffusion.cli import main
from crepe_diffusion.diagnostics import Diagnostics, verdict
from crepe_diffusion.run import Run, checkpoint, distributed, files, seed_of
from crepe_diffusion.run.config import read_toml
from run_worker import TEAM_CONFIG, assert_same_run, group_run, together

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_sync", lambda path: None)


def alone(folder: Path, seed: int, n: int = 12) -> Path:
    config = {**TEAM_CONFIG, "sampler": {**TEAM_CONFIG["sampler"], "seed": seed}}
    with Run.start(folder, config) as run:
        run.run(iterations=n)
    return folder


# -- groups --------------------------------------------------------------------------------------------------------


def test_two_groups_of_two_processes_have_the_bits_of_two_runs(tmp_path: Path) -> None:
    assert together(group_run, 4, (2, tmp_path / "run", 12)) == ["iterations = 12"] * 4
    for index in range(2):
        alone(tmp_path / f"alone{index}", seed_of(0, index))
        assert_same_run(tmp_path / f"run/group-00{index}", tmp_path / f"alone{index}")
    pooled = cd.read_runs([tmp_path / "run"])
    assert pooled.x.shape == (5, 6, 16)  # of 12 iterations every second one, after a burn-in of 3
    assert (pooled.x[:, :3] != pooled.x[:, 3:]).all()


@pytest.mark.slow
def test_no_group_waits_for_another(tmp_path: Path) -> None:
    """A signal to one process stops its group, and the other one goes on until it gets its own."""

    def stop(children: list[Any]) -> None:
        while min(checkpoint.newest_iteration(tmp_path / f"run/group-00{i}") for i in range(2)) < 0:
            time.sleep(0.05)
        os.kill(children[1].pid, signal.SIGTERM)
        for child in children[:2]:
            child.join(60)
        assert [child.exitcode for child in children] == [0, 0, None, None]
        os.kill(children[2].pid, signal.SIGTERM)

    assert together(group_run, 4, (2, tmp_path / "run", 10**6), during=stop) == ["SIGTERM"] * 4


@pytest.mark.parametrize(("size", "groups", "model"), [(4, 3, 1), (4, 2, 4), (1, 2, 1), (1, 1, 2), (2, 0, 1)])
def test_processes_that_cannot_be_cut_are_refused(size: int, groups: int, model: int, monkeypatch: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(size))
    with pytest.raises(cd.InputError, match=f"cannot be cut into {groups} groups of networks on {model} processes"):
        distributed(groups, model).__enter__()


def test_seeds_of_groups_differ_from_each_other_and_from_those_that_people_choose() -> None:
    seeds = [seed_of(seed, index) for seed in range(50) for index in range(50)]
    assert len(set(seeds)) == len(seeds)
    assert min(seeds) > 10**9
    assert max(seeds) < 2**63  # what TOML can hold


# -- pooling -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs of two chains, of which the second is longer."""
    root = tmp_path_factory.mktemp("pool")
    return [mixture(root / f"run{seed}", seed, n) for seed, n in ((1, 25), (2, 45))]


def mixture(folder: Path, seed: int, n: int, **output: Any) -> Path:
    sampler = {"n_chains": 2, "fit_samples": 16, "seed": seed, "explorer": {"kind": "bounce"}}
    output = {"burn_in": 9, "checkpoint_seconds": 1e6, "flush_seconds": 1e6, **output}
    config = {"experiment": "mixture-tilt", "ladder": {"n_levels": 4}, "sampler": sampler, "output": output}
    with Run.start(folder, config) as run:
        run.run(iterations=n)
    return folder


def test_pooled_chains_stand_side_by_side(runs: list[Path]) -> None:
    first, second = (cd.read_run(folder) for folder in runs)
    pooled = cd.read_runs(runs)
    assert np.array_equal(pooled.x, np.concatenate([first.x[9:], second.x[9:25]], 1))
    assert np.array_equal(pooled.columns["born"][:, 2:], second.columns["born"][9:25])
    assert (pooled.n_burnt, pooled.counts.rows) == (0, first.counts.rows + second.counts.rows)
    assert pooled.config["sampler"]["seed"] == [1, 2]
    assert str(verdict(pooled))
    assert cd.read_runs(runs[:1]).x.tobytes() == first.x.tobytes()


def test_pooled_exchange_counts_all_chains(runs: list[Path]) -> None:
    parts = [cd.read_run(folder).diagnostics for folder in runs]
    pooled = cd.read_runs(runs).diagnostics
    assert pooled is not None
    assert pooled.n_chains == 4
    assert pooled.round_trips() == sum(d.round_trips() for d in parts)
    # Iterations of all chains together are what they were: 2 x 16 + 2 x 36.
    assert pooled.n_iterations * pooled.n_chains == sum(d.n_iterations * d.n_chains for d in parts)
    series = [d.acceptance_series() for d in parts]
    n = min(map(len, series))
    torch.testing.assert_close(pooled.acceptance_series(), torch.cat([s[:n] for s in series], 1))


def test_runs_that_kept_other_meetings_are_pooled_by_those_that_both_kept() -> None:
    """A long run keeps every second meeting; of a short one the same are taken."""
    work = cd.Stream(3).normal((60, 2, 4))

    def recorded(n: int, capacity: int) -> Diagnostics:
        level = torch.arange(4).expand(2, -1)
        d = Diagnostics(level, capacity)
        for i in range(n):
            active = (torch.arange(1, 4) - i - 1) % 2 == 0
            d.record(i + 1, level, work[i], torch.zeros(2, 3, dtype=torch.bool), active)
        return d

    def same(pooled: Diagnostics) -> None:
        down = pooled.works()[0]
        assert torch.equal(down[:, :2], down[:, 2:])

    short, long = recorded(30, 4096), recorded(60, 16)
    assert (short.stride, long.stride) == (1, 2)
    same(Diagnostics.joined([short, long]))
    broken = recorded(30, 4096)
    broken.stride = 2  # as if it had been thinned already
    refuted(same, Diagnostics.joined([broken, long]))


def test_what_cannot_be_pooled_is_named(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(cd.InputError, match=r"run1 has the seed of .*run1, 1: the same draws would count twice"):
        cd.read_runs([runs[0], runs[0]])
    with pytest.raises(cd.InputError, match=r"differs from .*run1 in experiment"):
        cd.read_runs([runs[0], alone(tmp_path / "other", 3, n=4)])
    with pytest.raises(cd.InputError, match="no run was given"):
        cd.read_runs([])


def test_levels_that_were_moved_apart_are_not_compared(tmp_path: Path) -> None:
    pooled = cd.read_runs([mixture(tmp_path / str(seed), seed, 14, adapt_at=[12]) for seed in (1, 2)])
    assert pooled.diagnostics is None
    assert any("moved in each run by itself" in note for note in pooled.notes)


def test_the_commands_take_groups_as_one(runs: list[Path], tmp_path: Path, capsys: Any) -> None:
    for i, folder in enumerate(runs):
        (tmp_path / f"all/group-00{i}").parent.mkdir(exist_ok=True)
        (tmp_path / f"all/group-00{i}").symlink_to(folder)
    assert main(["report", str(tmp_path / "all")]) == 0
    assert "16 draws of 4 chains" in (tmp_path / "all/report.html").read_text()
    assert main(["check", str(tmp_path / "all")]) == 0
    assert main(["report", *map(str, runs)]) == 2
    assert "give the page, --out FILE" in capsys.readouterr().err
    assert main(["run", "mixture-tilt", "--out", str(tmp_path / "x"), "--groups", "2"]) == 2
    assert "1 process cannot be cut into 2 groups" in capsys.readouterr().err


# -- torchrun ------------------------------------------------------------------------------------------------------


def torchrun(n: int, *words: str | Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    path = os.pathsep.join([str(Path(__file__).parent), str(EXAMPLES), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-m", "crepe_diffusion", *map(str, words)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_groups_by_the_command_line_go_on(tmp_path: Path) -> None:
    """Two groups of two begin, and two groups of one go on."""
    (tmp_path / "a.toml").write_text(
        """
        experiment = "run_worker:network"
        ladder = { n_levels = 5, sigma_min = 0.05, sigma_max = 10.0 }
        sampler = { n_chains = 3, fit_samples = 16, micro_batch = 4, seed = 7 }
        """
    )
    common = ("--groups", 2, "--no-report", "--quiet")
    torchrun(4, "run", tmp_path / "a.toml", "--out", tmp_path / "run", "--iterations", 5, *common)
    torchrun(2, "resume", tmp_path / "run", "--iterations", 9, *common)
    for index in range(2):
        config = read_toml(tmp_path / "a.toml")
        config["sampler"]["seed"] = seed_of(7, index)
        with Run.start(tmp_path / f"whole{index}", config) as run:
            run.run(iterations=9)
        assert_same_run(tmp_path / f"run/group-00{index}", tmp_path / f"whole{index}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of the network that is not split."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with Run.start(folder, EXAMPLES / "split_network.toml") as run:
        run.run(iterations=10)
    return folder


def close(folder: Path, whole: Path, more: float = 0.0) -> None:
    """float32, ten iterations; draws are of size 4."""
    found, wanted = cd.read_run(folder), cd.read_run(whole)
    assert np.abs(found.x + more - wanted.x).max() < 1e-4
    assert found.counts.rows == wanted.counts.rows


SPLIT = ("--model-processes", 2, "--quiet")


@pytest.mark.slow
def test_a_network_that_two_processes_hold_between_them(whole: Path, tmp_path: Path) -> None:
    """The same run as with the whole network, to rounding, also across a resume."""
    own = ("--no-report", *SPLIT)
    torchrun(2, "run", EXAMPLES / "split_network.toml", "--out", tmp_path / "run", "--iterations", 6, *own)
    torchrun(2, "resume", tmp_path / "run", "--iterations", 10, *own)
    torchrun(2, "check", tmp_path / "run", "--replay", *SPLIT)
    close(tmp_path / "run", whole)
    refuted(close, tmp_path / "run", whole, 1e-3)
    # Half of the network each, so the weights are not those of the whole one.
    with pytest.raises(cd.InputError, match="weights of a network are not those"):
        Run.resume(tmp_path / "run")


@pytest.mark.slow
def test_two_such_pairs_share_the_rows(whole: Path, tmp_path: Path) -> None:
    own = ("--no-report", *SPLIT)
    torchrun(4, "run", EXAMPLES / "split_network.toml", "--out", tmp_path / "run", "--iterations", 10, *own)
    close(tmp_path / "run", whole)
