"""Success against network rows: CREPE in several styles and SMC on the tasks of a maze, one JSON file a job.

A job that has its file is not run again, so a study that was ended goes on where it stopped.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.random import Stream
from crepe_diffusion.run.files import publish
from studies.mazes.evaluate import Verdict, drive, ends, judge
from studies.mazes.model import load
from studies.mazes.stitch import PAPER, Style, plan_target, segments_for

__all__ = ["Job", "ablation", "comparison", "run_all", "run_job"]

CRITERIA = ("start", "goal", "junctions", "walls", "success")


@dataclass(frozen=True)
class Job:
    """One method on one task: `rows` is the budget of network rows for each chain, or for each batch of particles."""

    name: str
    task: int
    rows: int
    weights: str = "giant"
    style: Style = field(default_factory=Style)
    method: str = "crepe"
    explorer: str = "restitch"
    isotropic: bool = False
    adapt: bool = False
    n_segments: int = 0
    n_chains: int = 1
    seed: int = 0

    @property
    def file(self) -> str:
        return f"{Path(self.weights).stem}-{self.name.replace(' ', '-')}-task{self.task}-seed{self.seed}"


def comparison(weights: str, rows: int, n_chains: int) -> list[Job]:
    """Every task by our preset, by the same without restitching, by the paper's preset, and by SMC."""
    jobs = []
    for task in range(1, 6):
        shared = {"task": task, "rows": rows, "weights": weights}
        jobs += [
            Job("CREPE, ours", n_chains=n_chains, **shared),  # type: ignore[arg-type]
            Job("CREPE, no restitching", style=Style(n_candidates=0), explorer="none", **shared),  # type: ignore[arg-type]
            Job("CREPE, paper", style=PAPER, explorer="langevin", n_segments=20, **shared),  # type: ignore[arg-type]
            Job("SMC", style=Style(n_candidates=0), method="smc", **shared),  # type: ignore[arg-type]
        ]
    return jobs


def ablation(weights: str, rows: int, task: int = 1) -> list[Job]:
    """Our preset with one thing changed at a time."""
    style = Style()
    variants: dict[str, dict[str, Any]] = {
        "ours": {},
        "jacobian-free guidance": {"style": replace(style, guidance="jacobian-free")},
        "no guidance": {"style": replace(style, guidance="none")},
        "one variance for all directions": {"isotropic": True},
        "the paper's rewards and annealing": {"style": replace(style, width=0.0)},
        "61 levels": {"style": replace(style, n_levels=61)},
        "241 levels": {"style": replace(style, n_levels=241)},
        "adapted ladder": {"adapt": True},
        "512 candidates": {"style": replace(style, n_candidates=512)},
        "bounce instead of restitching": {"style": replace(style, n_candidates=0), "explorer": "bounce"},
        "Langevin instead of restitching": {"style": replace(style, n_candidates=0), "explorer": "langevin"},
        "no exploration": {"style": replace(style, n_candidates=0), "explorer": "none"},
    }
    return [Job(name, task, rows, weights, n_chains=2, **options) for name, options in variants.items()]


def run_job(job: Job, folder: Path, threads: int = 1) -> Path:
    """Run one job and write what came out of it."""
    torch.set_num_threads(threads)
    path = folder / f"{job.file}.json"
    if path.exists():
        return path
    maze, model = load(job.weights)
    task = maze.tasks[job.task - 1]
    n = job.n_segments or segments_for(maze, task)
    start, goal = ends(maze, task)
    target = plan_target(maze, model, task, n, job.style)

    def verdict(x: Tensor) -> Verdict:
        return judge(maze, maze.unnormalise(x), start, goal)

    began = time.perf_counter()
    found = (_smc if job.method == "smc" else _crepe)(job, target, n, verdict)
    plans = found.pop("plans")
    record = {
        "job": asdict(job),
        "n_segments": n,
        "seconds": time.perf_counter() - began,
        **found,
        "driven": _drive_all(job, maze.unnormalise(plans[-10:].flatten(0, 1)), start, goal),
    }
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / f"{job.file}.npz", plans=maze.unnormalise(plans).numpy().astype(np.float32))
    publish(path, json.dumps(record).encode())
    return path


def _crepe(job: Job, target: cd.Target, n: int, verdict: Any) -> dict[str, Any]:
    explorers = {"restitch": job.style.explorer(), "none": None, "bounce": cd.Bounce(), "langevin": cd.Langevin()}
    chain = cd.ReplicaExchange(
        target,
        job.style.ladder(),
        n_chains=job.n_chains,
        seed=job.seed,
        process=cd.processes.Gaussian() if job.isotropic else None,
        proposal=cd.Proposal(clip=job.style.clip),
        explorer=explorers[job.explorer],
        nonfinite="reject",
    )
    rows, flags, plans = [], [], []
    adaptations = [100, 200] if job.adapt else []
    while chain.evaluate.counts.rows < job.rows * job.n_chains:
        chain.step()
        x = chain.output()
        v = verdict(x)
        rows.append(chain.evaluate.counts.rows / job.n_chains)
        flags.append([getattr(v, c).tolist() for c in CRITERIA])
        if chain.iteration % 10 == 0:
            plans.append(x)
        if chain.iteration in adaptations:
            chain.adapt()
    acceptance = chain.diagnostics.acceptance()
    return {
        "rows": rows,
        "flags": flags,
        "plans": torch.stack(plans or [x]),
        "acceptance": acceptance.tolist(),
        "levels": chain.ladder.levels.tolist(),
        "round_trips": chain.diagnostics.round_trips(),
        "gradient_rows": chain.evaluate.counts.gradient_rows,
        "nonfinite": sum(chain.evaluate.counts.nonfinite.values()),
    }


def _smc(job: Job, target: cd.Target, n: int, verdict: Any) -> dict[str, Any]:
    steps = job.style.ladder()
    n_particles = max(2, job.rows // (n * len(steps.times)))
    particles = cd.SMC(
        target,
        steps,
        n_particles=n_particles,
        n_batches=job.n_chains,
        seed=job.seed,
        micro_batch=8192,
        nonfinite="reject",
    ).sample()
    x = particles.resampled(Stream(job.seed).at("resampled")).reshape(job.n_chains, n_particles, *particles.x.shape[2:])
    v = [verdict(batch) for batch in x]
    return {
        "rows": [particles.evaluations.rows / job.n_chains],
        "flags": [[[float(getattr(b, c).double().mean()) for b in v] for c in CRITERIA]],
        "plans": x[:, : min(10, n_particles)].transpose(0, 1),
        "n_particles": n_particles,
        "ess": particles.ess.tolist(),
    }


def _drive_all(job: Job, plans: Tensor, start: Tensor, goal: Tensor) -> list[bool] | None:
    """Whether the agent reaches the goal on each plan; None where OGBench is not installed."""
    from studies.mazes.data import environment

    try:
        env = environment(load(job.weights)[0].name)
    except cd.InputError:
        return None
    return [drive(env, plan, start, goal)[0] for plan in plans]


def _work(task: tuple[Job, Path]) -> str:
    return str(run_job(*task))


def run_all(jobs: list[Job], folder: Path, n_workers: int = 2) -> Iterator[Path]:
    """Run the jobs that have no result yet, the longest first; yields the file of each as it is done."""
    wanted = sorted(jobs, key=lambda job: -job.rows * job.n_chains)
    if n_workers == 1:
        for job in wanted:
            yield run_job(job, folder)
        return
    with multiprocessing.get_context("spawn").Pool(n_workers) as pool:
        for path in pool.imap_unordered(_work, [(job, folder) for job in wanted]):
            yield Path(path)
