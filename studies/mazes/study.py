"""Success against network rows: CREPE in several styles and SMC on the tasks of a maze, one result per job.

A job that has its result is not run again, so a study that was stopped continues where it was.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import crepe_diffusion as cd
from studies.mazes.data import environment
from studies.mazes.evaluate import Verdict, drive, ends, judge
from studies.mazes.maze import Maze
from studies.mazes.model import load_maze_model
from studies.mazes.stitch import PAPER, Style, plan_target, segments_for
from studies.shared.results import Results

__all__ = ["METHODS", "Job", "ablation", "comparison", "measured", "run_all", "run_job"]

CRITERIA = ("start", "goal", "junctions", "walls", "success")
METHODS = ("CREPE, ours", "CREPE, no restitching", "CREPE, paper", "SMC")


def measured(results: Results, name: str, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The result of this name, or None; an error where it was measured with other settings."""
    record: dict[str, Any] | None = results.get(name)
    if record is None:
        return None
    wanted = json.loads(json.dumps(settings))
    if record["settings"] != wanted:
        raise cd.InputError(
            f"{results.path(name)} was measured with the settings {record['settings']}, not with {wanted};"
            " remove it or choose another folder by --out"
        )
    return record


@dataclass(frozen=True)
class Job:
    """One method on one task; `rows` is the budget of network rows per chain, or per batch of particles."""

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
    def result(self) -> str:
        """The name of its result."""
        return f"{Path(self.weights).stem} {self.name} task{self.task} seed{self.seed}"


def comparison(weights: str, rows: int, n_chains: int) -> list[Job]:
    """Every task by our preset, by the same without restitching, by the paper's preset, and by SMC."""
    jobs = []
    for task in range(1, 6):
        shared = {"task": task, "rows": rows, "weights": weights}
        jobs += [
            Job(METHODS[0], n_chains=n_chains, **shared),  # type: ignore[arg-type]
            Job(METHODS[1], explorer="none", **shared),  # type: ignore[arg-type]
            Job(METHODS[2], style=PAPER, explorer="langevin", n_segments=20, **shared),  # type: ignore[arg-type]
            Job(METHODS[3], method="smc", **shared),  # type: ignore[arg-type]
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
        "bounce instead of restitching": {"explorer": "bounce"},
        "Langevin instead of restitching": {"explorer": "langevin"},
        "no exploration": {"explorer": "none"},
    }
    return [Job(name, task, rows, weights, n_chains=2, **options) for name, options in variants.items()]


def run_job(job: Job, results: Results, threads: int = 1) -> dict[str, Any]:
    """Run one job and save what it found, unless that is there already."""
    torch.set_num_threads(threads)
    record = measured(results, job.result, asdict(job))
    if record is not None:
        return record
    maze, model = load_maze_model(job.weights)
    task = maze.tasks[job.task - 1]
    n = job.n_segments or segments_for(maze, task)
    start, goal = ends(maze, task)
    target = plan_target(maze, model, task, n, job.style)

    def verdict(x: Tensor) -> Verdict:
        return judge(maze, maze.unnormalise(x), start, goal)

    began = time.process_time()
    found = (_smc if job.method == "smc" else _crepe)(job, target, n, verdict)
    plans = maze.unnormalise(found.pop("plans"))
    record = {
        "settings": asdict(job),
        "n_segments": n,
        "seconds": time.process_time() - began,
        **found,
        "driven": _drive_all(maze, plans[-10:].flatten(0, 1), start, goal),
    }
    results.save(job.result, record, plans=plans.numpy().astype(np.float32))
    return record


def _crepe(job: Job, target: cd.Target, n: int, verdict: Callable[[Tensor], Verdict]) -> dict[str, Any]:
    explorers = {"restitch": job.style.explorer(), "none": None, "bounce": cd.Bounce(), "langevin": cd.Langevin()}
    chain = cd.ReplicaExchange(
        target,
        job.style.ladder(),
        n_chains=job.n_chains,
        seed=job.seed,
        process=cd.processes.Gaussian(variance="fisher") if job.isotropic else None,
        proposal=cd.Proposal(clip=job.style.clip),
        explorer=explorers[job.explorer],
        nonfinite="reject",
    )
    rows: list[float] = []
    flags, plans = [], []
    adaptations = [100, 200] if job.adapt else []
    while not rows or chain.evaluate.counts.rows < job.rows * job.n_chains:
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


def _smc(job: Job, target: cd.Target, n: int, verdict: Callable[[Tensor], Verdict]) -> dict[str, Any]:
    steps = job.style.ladder()
    n_particles = max(2, job.rows // (n * len(steps.times)))
    particles = cd.SMC(
        target,
        steps,
        n_particles=n_particles,
        n_batches=job.n_chains,
        pool="equal",
        seed=job.seed,
        micro_batch=8192,
        nonfinite="reject",
    ).sample()
    x = particles.resampled(cd.Stream(job.seed).at("resampled")).reshape(
        job.n_chains, n_particles, *particles.x.shape[1:]
    )
    v = [verdict(batch) for batch in x]
    return {
        "rows": [particles.evaluations.rows / job.n_chains],
        "flags": [[[float(getattr(b, c).double().mean()) for b in v] for c in CRITERIA]],
        "plans": x[:, : min(10, n_particles)].transpose(0, 1),
        "n_particles": n_particles,
        "ess": particles.batch_ess.tolist(),
    }


def _drive_all(maze: Maze, plans: Tensor, start: Tensor, goal: Tensor) -> list[bool] | None:
    """Whether the agent reaches the goal on each plan; None where OGBench is not installed."""
    try:
        env = environment(maze.name)
    except cd.InputError:
        return None
    return [drive(env, plan, start, goal)[0] for plan in plans]


def _work(task: tuple[Job, Results]) -> str:
    run_job(*task)
    return task[0].result


def run_all(jobs: list[Job], results: Results, n_workers: int = 2) -> Iterator[str]:
    """Run the jobs that have no result yet, the longest first; yields the name of each result when it is there."""
    tasks = [(job, results) for job in sorted(jobs, key=lambda job: -job.rows * job.n_chains)]
    if n_workers == 1:
        yield from map(_work, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(n_workers) as pool:
        yield from pool.imap_unordered(_work, tasks)
