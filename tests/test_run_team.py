"""Several processes as one: the same bits for any number of them, the same decisions, one folder."""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import run_worker
from crepe_diffusion.run import Run, checkpoint, control, files, replay
from crepe_diffusion.run.folder import problems, read_run
from crepe_diffusion.sharing import by_blocks, joined
from run_worker import TEAM_CONFIG, assert_same_run, team


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_sync", lambda path: None)


class Recording:
    """A team of which one process is played after the other."""

    def __init__(self, size: int):
        self.rank, self.size = 0, size
        self.parts: list[tuple[Tensor, ...]] = []

    def together(self, own: Any) -> tuple[Tensor, ...]:
        self.parts.append(own())
        return tuple(torch.cat(z) for z in zip(*self.parts, strict=True))


@pytest.mark.parametrize("n", [1, 4, 5, 8, 15])
def test_blocks_have_the_same_shapes_whoever_evaluates_them(n: int) -> None:
    x = torch.arange(float(n))
    for size in (1, 2, 3, 4):
        team, shapes = Recording(size), []

        def square(rows: Any, shapes: list[int] = shapes) -> tuple[Tensor, ...]:
            shapes.append(len(x[rows]))
            return x[rows] ** 2, x[rows] > 2

        for team.rank in range(size):
            before = len(shapes)
            with joined(team):
                found = by_blocks(square, n, 4)
            # Nobody evaluates more blocks than the fair share, rounded up.
            assert len(shapes) - before <= math.ceil(math.ceil(n / 4) / size)
        assert torch.equal(found[0], x**2)
        assert torch.equal(found[1], x > 2)
        assert set(shapes) == {min(n, 4)}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process, with a request in its middle."""
    folder = tmp_path_factory.mktemp("single") / "run"
    files_sync = files._sync
    run_worker.unsynced()
    with Run.start(folder, TEAM_CONFIG) as run:
        run.run(iterations=7)
        run.refine(add=[TERM])
        run.run(iterations=12)
    files._sync = files_sync
    return folder


TERM = {"name": "first", "function": {"kind": "first"}, "guidance": "gradient"}


def in_parts(folder: Path, sizes: tuple[int, int]) -> None:
    """Seven iterations by so many processes, a request, and the rest by so many others."""
    assert team(sizes[0], folder, 7) == ["iterations = 7"] * sizes[0]
    control.leave(folder, control.Request("", [TERM], [], {}))
    assert team(sizes[1], folder, 12) == ["iterations = 12"] * sizes[1]


def test_two_processes_have_the_bits_of_one(single: Path, tmp_path: Path) -> None:
    in_parts(tmp_path / "run", (2, 2))
    assert_same_run(tmp_path / "run", single)
    assert replay(tmp_path / "run").differences == []  # by one process


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 3), (3, 1), (4, 2), (2, 4), (4, 3)])
def test_any_number_of_processes_has_the_same_bits(sizes: tuple[int, int], single: Path, tmp_path: Path) -> None:
    in_parts(tmp_path / "run", sizes)
    assert_same_run(tmp_path / "run", single)


@pytest.mark.slow
def test_a_target_that_was_accepted_before_a_kill_is_taken_up_by_all(single: Path, tmp_path: Path) -> None:
    with Run.start(tmp_path / "run", TEAM_CONFIG) as run:
        run.run(iterations=7)
        run.refine(add=[TERM])  # in force from iteration 8, and no checkpoint holds it
    assert team(2, tmp_path / "run", 12) == ["iterations = 12"] * 2
    assert_same_run(tmp_path / "run", single)


@pytest.mark.slow
def test_a_run_of_one_process_is_replayed_by_three(single: Path) -> None:
    assert run_worker.together(run_worker.team_replay, 3, (single,)) == ["[]"] * 3


def test_other_blocks_have_other_bits(single: Path, tmp_path: Path) -> None:
    """The test can fail: this network's last bits do depend on the shape of its batch."""
    other = {**TEAM_CONFIG, "sampler": {**TEAM_CONFIG["sampler"], "micro_batch": 3}}
    with Run.start(tmp_path / "run", other) as run:
        run.run(iterations=6)
    x, wanted = read_run(tmp_path / "run").x, read_run(single).x[:3]
    assert (x != wanted).any()


SAMPLERS: dict[str, dict[str, Any]] = {
    "smc": {"kind": "smc", "n_particles": 10, "n_batches": 2, "fit_samples": 16, "micro_batch": 4},
    "particle-gibbs": {"kind": "particle-gibbs", "n_particles": 6, "n_chains": 2, "fit_samples": 16, "micro_batch": 4},
    "plain": {"kind": "plain", "n_chains": 9, "fit_samples": 16, "micro_batch": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
def test_other_samplers_share_too(name: str, tmp_path: Path) -> None:
    config = {**TEAM_CONFIG, "sampler": SAMPLERS[name], "output": {"burn_in": 0}}
    with Run.start(tmp_path / "one", config) as run:
        run.run(iterations=3)
    team(2, tmp_path / "two", 3, config)
    assert_same_run(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
def test_what_one_process_raises_all_raise(tmp_path: Path) -> None:
    """A request that fails in one process only is refused, and the run goes on."""
    team(2, tmp_path / "run", 4)
    path = control.leave(tmp_path / "run", control.Request("", [{"name": "b", "function": {"kind": "broken"}}], [], {}))
    assert team(2, tmp_path / "run", 6) == ["iterations = 6"] * 2
    assert "KeyError: 'only here'" in path.with_suffix(".answer.json").read_text()
    assert not list(problems(tmp_path / "run"))
    config = {**TEAM_CONFIG, "reward": [{"name": "b", "function": {"kind": "broken"}}]}
    said = team(2, tmp_path / "broken", 6, config)
    assert len(said) == 2
    assert all("only here" in text for text in said)


@pytest.mark.slow
def test_nobody_waits_for_long_inside_of_a_network(tmp_path: Path) -> None:
    """One of two processes that hold a network fails while the other waits for it in the network."""
    began = time.monotonic()
    said = run_worker.together(run_worker.half_a_network, 2, ())
    assert time.monotonic() - began < 100  # the patience of torch is half an hour
    assert said[1] == "KeyError: 'only here'"
    assert "closed" in said[0] or "reset" in said[0], said[0]


@pytest.mark.slow
def test_a_start_that_fails_in_process_0_fails_in_all(tmp_path: Path) -> None:
    without = {**TEAM_CONFIG, "sampler": {"n_chains": 3, "fit_samples": 16}}
    said = team(2, tmp_path / "run", 4, without)
    assert all("2 processes share the rows of a batch in blocks: give their size" in text for text in said)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/mine").touch()
    assert all("is not empty, there is 'mine'" in text for text in team(2, tmp_path / "taken", 4))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_process_stops_all(rank: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def kill(children: list[Any]) -> None:
        while not (folder / "checkpoints/00000000").exists():
            time.sleep(0.05)
        time.sleep(0.3)
        os.kill(children[rank].pid, signal.SIGTERM)

    assert team(2, folder, 10**6, during=kill) == ["SIGTERM"] * 2
    assert not list(problems(folder))
    n = checkpoint.newest_iteration(folder)
    with Run.resume(folder) as run:
        run.run(iterations=n + 1)


@pytest.mark.slow
def test_a_script_that_every_process_runs(tmp_path: Path) -> None:
    run_worker.python_run(tmp_path / "one")
    port = run_worker.free_port()
    arguments = [(rank, 2, port, tmp_path / "two") for rank in range(2)]
    children = [run_worker.SERVER.Process(target=run_worker.python_team, args=a) for a in arguments]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0, 0]
    assert_same_run(tmp_path / "two", tmp_path / "one")


# -- torchrun ------------------------------------------------------------------------------------------------------

CONFIG = """
experiment = "run_worker:network"
ladder = { n_levels = 5, sigma_min = 0.05, sigma_max = 10.0 }
sampler = { n_chains = 3, fit_samples = 16, micro_batch = 4 }
output = { checkpoint_iterations = 5, flush_seconds = 0.0 }
"""


@pytest.mark.slow
def test_a_killed_process_is_brought_back_by_torchrun(tmp_path: Path) -> None:
    """20 times one of two processes is killed at a random moment; the run ends with the bits of an undisturbed one."""
    dice, n, kills = random.Random(1), 300, 0
    (tmp_path / "team.toml").write_text(CONFIG)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        "OMP_NUM_THREADS": "1",
    }
    with Run.start(tmp_path / "whole", tmp_path / "team.toml") as run:
        run.run(iterations=n)
    while kills < 20:
        folder = tmp_path / f"run{kills}"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", "5", "-m", "crepe_diffusion", "run", str(tmp_path / "team.toml")]
        command += ["--out", str(folder), "--iterations", str(n), "--no-report", "--quiet"]
        agent = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(4):
            end = time.monotonic() + 120
            before = checkpoint.newest_iteration(folder)
            while checkpoint.newest_iteration(folder) == before and agent.poll() is None and time.monotonic() < end:
                time.sleep(0.05)
            time.sleep(dice.uniform(0.0, 0.5))
            children = subprocess.run(["pgrep", "-P", str(agent.pid)], capture_output=True, text=True).stdout.split()
            if agent.poll() is not None or not children:
                break
            os.kill(int(dice.choice(children)), signal.SIGKILL)
            kills += 1
        assert agent.wait(300) == 0, agent.stderr.read()[-2000:]
        assert_same_run(folder, tmp_path / "whole")
    print(f"{kills} killed processes, all brought back")


@contextmanager
def machines(kind: str) -> Iterator[list[tuple[str, list[str], str]]]:
    """Two machines: the address, how a command is run there, and the name of the network device."""
    if kind == "addresses":
        yield [("127.0.0.1", [], "lo"), ("127.0.0.2", [], "lo")]
        return
    names = [f"crepe-{os.getpid()}-{side}" for side in "ab"]
    devices, address = [f"cd{os.getpid()}{side}" for side in "ab"], "10.77.0.{}".format
    commands = [f"netns add {name}" for name in names]
    commands += [f"link add {devices[0]} netns {names[0]} type veth peer name {devices[1]} netns {names[1]}"]
    for i, (name, device) in enumerate(zip(names, devices, strict=True)):
        commands += [f"-n {name} addr add {address(i + 1)}/24 dev {device}"]
        commands += [f"-n {name} link set {link} up" for link in (device, "lo")]
    try:
        for command in commands:
            if shutil.which("ip") is None or subprocess.run(["ip", *command.split()], capture_output=True).returncode:
                pytest.skip("network namespaces need root and iproute2")
        rooms = [["ip", "netns", "exec", name] for name in names]
        yield [(address(i + 1), rooms[i], devices[i]) for i in range(2)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["addresses", "namespaces"])
def test_two_machines(kind: str, tmp_path: Path) -> None:
    """Two agents of torchrun that know each other by address only: two addresses, or two network namespaces."""
    (tmp_path / "team.toml").write_text(CONFIG)
    with Run.start(tmp_path / "whole", tmp_path / "team.toml") as run:
        run.run(iterations=10)
    agents = []
    with machines(kind) as places:
        endpoint = f"{places[0][0]}:{run_worker.free_port()}"
        for address, prefix, device in places:
            command = [*prefix, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
            command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--local-addr", address]
            # The host's name does not lead to the address of a namespace, so that torchrun must be told.
            command += ["--rdzv-conf", f"is_host={int(address == places[0][0])}"]
            command += ["-m", "crepe_diffusion", "run", str(tmp_path / "team.toml"), "--out", str(tmp_path / "two")]
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": device,
            }
            agents.append(subprocess.Popen([*command, "--iterations", "10", "--no-report", "--quiet"], env=environment))
        assert [agent.wait(300) for agent in agents] == [0, 0]
    assert_same_run(tmp_path / "two", tmp_path / "whole")
