"""What runs in other processes: children of a server that has imported everything once, so that each costs little."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import torch

from crepe_diffusion.run import checkpoint
from crepe_diffusion.run.folder import problems, read_targets
from crepe_diffusion.run.log import chain_lines
from crepe_diffusion.run.store import read_store

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["crepe_diffusion.run.runner", "crepe_diffusion.run.team", "crepe_diffusion.presets.builtin"]
)

CONFIG: dict[str, Any] = {
    "experiment": "mixture-tilt",
    "ladder": {"n_levels": 4, "substeps": 1},
    "sampler": {"n_chains": 2, "fit_samples": 16},
    # Everything is written all the time: about half of all moments lie within some write.
    "output": {"burn_in": 5, "adapt_at": [7], "flush_seconds": 0.0, "checkpoint_iterations": 4, "thin": 2},
    "stop": {"iterations": 20},
}
MIDDLE = 10


def unsynced() -> None:
    """Against SIGKILL no file needs to be synced, and waiting for the disk is most of what these tests would do."""
    from crepe_diffusion.run import files

    files._sync = lambda path: None


def go(
    folder: Path, n: int = CONFIG["stop"]["iterations"], sync: bool = False, flush_seconds: float | None = None
) -> None:
    """Begin or resume, change the target in the middle, go on to the end; the same at whatever point it is called."""
    from crepe_diffusion.run import Run

    if not sync:
        unsynced()
    config = CONFIG
    if flush_seconds is not None:
        config = {**CONFIG, "output": {**CONFIG["output"], "flush_seconds": flush_seconds}}
    run = Run.resume(folder) if (folder / "config.toml").exists() else Run.start(folder, config)
    if run.sampler.iteration < MIDDLE and len(run.history.entries) == 1:
        run.run(iterations=MIDDLE)
    if len(run.history.entries) == 1:
        run.refine(
            add=[{"name": "wall", "function": {"kind": "near", "centre": 2.0}}], change={"right": {"scale": 2.0}}
        )
    run.run(iterations=n)
    run.close()


def go_and_die(folder: Path, after: int, stage: str) -> None:
    """The same, killed in the middle of the given write of a file: before, halfway, written, or renamed."""
    from crepe_diffusion.run import files

    n_calls, publish, rename = 0, os.replace, os.rename

    def die(wanted: str) -> None:
        if n_calls == after and stage == wanted:
            os.kill(os.getpid(), signal.SIGKILL)

    def replacing(old: Any, new: Any) -> None:
        nonlocal n_calls
        n_calls += 1
        die("before")
        if n_calls == after and stage == "halfway":
            with open(old, "r+b") as file:
                file.truncate(os.path.getsize(old) // 2)
            die("halfway")
        publish(old, new)
        die("after")

    def renaming(old: Any, new: Any) -> None:
        nonlocal n_calls
        n_calls += 1
        die("before")
        die("halfway")
        rename(old, new)
        die("after")

    files.os.replace, checkpoint.os.rename = replacing, renaming
    go(folder)


def endless(folder: Path, n: int) -> None:
    """A writer for readers to watch."""
    from crepe_diffusion.run import Run

    unsynced()
    output = {"flush_seconds": 0.0, "checkpoint_iterations": 4}
    config = {**CONFIG, "ladder": {"n_levels": 3}, "output": output, "stop": {"iterations": n}}
    run = Run.resume(folder) if (folder / "config.toml").exists() else Run.start(folder, config)
    run.run(iterations=n)


def measure_memory(folder: Path, counts: list[int], results: Any) -> None:
    """Resident bytes after so many iterations."""
    import gc

    from crepe_diffusion.run import Run

    config = {
        **CONFIG,
        "ladder": {"n_levels": 3},
        "sampler": {"n_chains": 2, "fit_samples": 16, "explorer": {"kind": "none"}},
        "output": {"flush_seconds": 0.2, "checkpoint_seconds": 0.5, "burn_in": 10},
    }
    unsynced()
    run = Run.start(folder, config)
    for n in counts:
        run.run(iterations=n)
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        results.put(pages * os.sysconf("SC_PAGE_SIZE"))


def assert_same_run(folder: Path, reference: Path, log: bool = True) -> None:
    """Samples, diagnostics, state, history and log agree bit for bit; only clocks may differ."""

    def fail(error: Exception) -> None:
        raise AssertionError(error)

    for part, wanted in zip(read_store(folder / "samples.zarr"), read_store(reference / "samples.zarr"), strict=True):
        assert part.keys() == wanted.keys()
        for name in part.keys() - {"seconds"}:
            assert part[name].dtype == wanted[name].dtype
            assert part[name].tobytes() == wanted[name].tobytes(), name
    (_, position, state), (_, wanted_position, wanted_state) = (checkpoint.newest(f, fail) for f in (folder, reference))
    assert (position.iteration, position.n_draws) == (wanted_position.iteration, wanted_position.n_draws)
    assert state.keys() == wanted_state.keys()
    for name, value in state.items():
        assert torch.equal(value.nan_to_num(7.0), wanted_state[name].nan_to_num(7.0)), name
    keys = ("from_iteration", "rewards", "probe")
    history, wanted_history = ([{k: t[k] for k in keys} for t in read_targets(f)] for f in (folder, reference))
    assert history == wanted_history
    if log:
        assert chain_lines(folder / "log.txt") == chain_lines(reference / "log.txt")
    assert not list(problems(folder))


# -- several processes ---------------------------------------------------------------------------------------------

TEAM_CONFIG: dict[str, Any] = {
    "experiment": "run_worker:network",
    "ladder": {"n_levels": 5, "substeps": 1, "sigma_min": 0.05, "sigma_max": 10.0},
    # 15 rows in blocks of 4: the last one is short, and none of 2, 3 and 4 processes has the same share as the others.
    "sampler": {"n_chains": 3, "fit_samples": 16, "micro_batch": 4, "explorer": {"kind": "bounce"}},
    "output": {"adapt_at": [5], "burn_in": 3, "thin": 2, "checkpoint_iterations": 5},
    "stop": {"iterations": 12},
}


def network() -> Any:
    """A float32 network, whose last bits depend on the shape of its batch."""
    import crepe_diffusion as cd
    from crepe_diffusion.run import Experiment

    size = (17, 64)
    stream = cd.Stream(7)
    first, second = (stream.at(i).normal(s, dtype=torch.float32) / 8 for i, s in enumerate((size, size[::-1])))

    def denoise(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        inner = torch.cat([y / (1 + t[:, None] ** 2).sqrt(), t[:, None].log()], 1) @ first
        return y / (1 + t[:, None] ** 2) + torch.tanh(inner) @ second[:, :16]

    target = cd.models.Denoiser(denoise, (16,), dtype=torch.float32).as_target()
    return Experiment(target, rewards={"first": lambda x, power=1: x[:, 0] ** power, "broken": broken})


def broken(x: torch.Tensor) -> torch.Tensor:
    """Fails in the process that gets the rows above the others, and there only."""
    if float(x.mean()) > 0.0:
        raise KeyError("only here")
    return x[:, 0]


def join(rank: int, size: int, port: int) -> None:
    """What torchrun would set."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)


def team_run(rank: int, size: int, port: int, folder: Path, n: int, config: dict[str, Any], results: Any) -> None:
    """One of several processes that begin a run, or go on with it."""
    from crepe_diffusion.run import Run, distributed

    join(rank, size, port)
    unsynced()
    with distributed():
        begun = (folder / "config.toml").exists()
        try:
            run = Run.resume(folder) if begun else Run.start(folder, config)
            with run:
                outcome = run.run(iterations=n)
            results.put((rank, outcome.reason))
        except Exception as error:
            results.put((rank, f"{type(error).__name__}: {error}"))
            raise SystemExit(1) from None


def group_run(rank: int, size: int, port: int, groups: int, root: Path, n: int, results: Any) -> None:
    """One of several processes in groups, each of which has a folder and a seed of its own."""
    from crepe_diffusion.run import Run, distributed, seed_of

    join(rank, size, port)
    unsynced()
    with distributed(groups=groups) as group:
        assert group is not None
        sampler = {**TEAM_CONFIG["sampler"], "seed": seed_of(0, group.index)}
        with Run.start(root / f"group-{group.index:03d}", {**TEAM_CONFIG, "sampler": sampler}) as run:
            results.put((rank, run.run(iterations=n).reason))


def team_replay(rank: int, size: int, port: int, folder: Path, results: Any) -> None:
    """One of several processes that run the last iterations of a run again."""
    from crepe_diffusion.run import distributed, replay

    join(rank, size, port)
    with distributed():
        results.put((rank, str(replay(folder).differences)))


def half_a_network(rank: int, size: int, port: int, results: Any) -> None:
    """One of two processes that hold a network between them; the second fails while the first waits for its part."""
    from datetime import timedelta

    import torch.distributed as dist

    from crepe_diffusion.run import distributed, model_mesh, team

    join(rank, size, port)
    team.HASTE = timedelta(seconds=1)

    def own() -> tuple[torch.Tensor, ...]:
        if rank == 1:
            raise KeyError("only here")
        mesh = model_mesh()
        assert mesh is not None
        dist.all_reduce(torch.ones(1), group=mesh.get_group())
        return (torch.ones(1),)

    try:
        with distributed(model=2) as group:
            assert group is not None
            group.together(own)
    except Exception as error:
        results.put((rank, f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from None


def free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def team(size: int, folder: Path, n: int, config: dict[str, Any] | None = None, during: Any = None) -> list[str]:
    """Run several processes to their end; what each of them has to say."""
    return together(team_run, size, (folder, n, config or TEAM_CONFIG), during)


def together(function: Any, size: int, arguments: tuple[Any, ...], during: Any = None) -> list[str]:
    """What each of several processes has to say: `function(rank, size, port, *arguments, results)`."""
    results, port = SERVER.Queue(), free_port()
    children = [SERVER.Process(target=function, args=(rank, size, port, *arguments, results)) for rank in range(size)]
    for child in children:
        child.start()
    if during is not None:
        during(children)
    said = sorted(results.get(timeout=120) for _ in children)
    for child in children:
        child.join(60)
        assert child.exitcode is not None
    return [text for _, text in said]


def python_run(folder: Path) -> None:
    """A script that every process runs: the sampler is made here, and so is a reward that comes later."""
    import crepe_diffusion as cd
    from crepe_diffusion.run import Run

    target, ladder = network().target, cd.ladder.karras(5, 0.05, 10.0)
    sampler = cd.ReplicaExchange(target, ladder, n_chains=3, fit_samples=16, micro_batch=4, explorer=cd.Bounce())
    with Run(folder, sampler, burn_in=2) as run:
        run.run(iterations=4)
        run.refine(add=[cd.Reward(lambda x: x[:, 0], name="first")])
        run.run(iterations=8)


def python_team(rank: int, size: int, port: int, folder: Path) -> None:
    from crepe_diffusion.run import distributed

    join(rank, size, port)
    unsynced()
    with distributed():
        python_run(folder)
