"""Where the time of replica exchange goes: the network, random numbers, and everything else.

    share outside the network  =  1 - time inside the network / time of an iteration
    share of the store         =  1 - time inside the sampler / time of a run in a folder

Both times of a share come from the same iterations. The networks have random weights: they cost what trained ones
cost. A backward pass counts as time inside the network; a reward and its own gradient do not. Every iteration must cost
exactly `(M + 1) K` network evaluations per chain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import crepe_diffusion as cd
from crepe_diffusion.processes import FisherTable
from crepe_diffusion.report import write_report
from studies.bench.timing import Watch, fastest, now, rows_cost, watching

__all__ = ["Case", "Network", "StoreCost", "Timing", "cases", "iteration_table", "measure", "store_cost", "store_table"]

Cells = tuple[list[str], list[list[str]]]

DATA_SCALE = 0.5  # EDM's sigma_data


class Network(nn.Module):
    """A perceptron in EDM's preconditioning, whose watch adds up the seconds of its evaluations and gradients."""

    def __init__(self, event_shape: tuple[int, ...], width: int, depth: int, n_features: int = 32):
        super().__init__()
        n = math.prod(event_shape)
        self.frequencies = torch.linspace(0.0, 5.0, n_features).exp()
        sizes = [n + 2 * n_features, *[width] * depth]
        hidden = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.SiLU())]
        self.layers = nn.Sequential(*hidden, nn.Linear(width, n))
        self.watch, self._started, self.inside = Watch(), 0.0, False
        self.requires_grad_(False)

    def forward(self, y: Tensor, sigma: Tensor) -> Tensor:
        self.inside = True
        with self.watch.running():
            out = self._denoised(y, sigma)
        self.inside = False
        return out

    def _denoised(self, y: Tensor, sigma: Tensor) -> Tensor:
        s = sigma[:, None]
        norm = (s * s + DATA_SCALE**2).sqrt()
        angles = s.log() / 4 * self.frequencies
        inputs = torch.cat([y.flatten(1) / norm, angles.cos(), angles.sin()], dim=1)
        skip, out = DATA_SCALE**2 / norm**2, s * DATA_SCALE / norm
        denoised = (skip * y.flatten(1) + out * self.layers(inputs)).reshape(y.shape)
        if denoised.requires_grad:
            denoised.register_hook(self._enter)
            y.register_hook(self._leave)
        return denoised

    def _enter(self, gradient: Tensor) -> None:
        self._started, self.inside = now(), True

    def _leave(self, gradient: Tensor) -> None:
        self.watch.seconds += now() - self._started
        self.inside = False


class Operations(TorchDispatchMode):
    """Counts tensor operations outside of a network: what a small problem costs, on whatever machine."""

    def __init__(self, network: Network):
        super().__init__()
        self.network, self.outside = network, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        self.outside += not self.network.inside
        return function(*args, **(options or {}))


@dataclass(frozen=True)
class Case:
    """One setting to time."""

    name: str
    event_shape: tuple[int, ...]
    width: int
    depth: int
    n_segments: int
    n_levels: int
    substeps: int
    n_chains: int
    n_iterations: int
    guidance: str | None = None


@dataclass(frozen=True)
class Timing:
    """Seconds and network evaluations of one iteration; tensor operations outside of the network, mean of two."""

    case: Case
    seconds: float
    network: float
    random: float
    rows: int
    operations: int

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds

    @property
    def outside(self) -> float:
        return 1 - self.network / self.seconds


def cases(quick: bool = False) -> list[Case]:
    """Stitched trajectories with a wide network (the paper's maze), and a small network with few rows."""
    maze = {"event_shape": (64, 2), "width": 512, "depth": 5, "n_segments": 20, "substeps": 1, "n_chains": 1}
    small = {"event_shape": (16,), "width": 64, "depth": 2, "n_segments": 1, "substeps": 4, "n_chains": 4}
    n, levels = (2, (31, 6)) if quick else (8, (601, 51))
    return [
        Case("5x512, no reward", n_levels=levels[0], n_iterations=n, **maze),  # type: ignore[arg-type]
        Case("5x512, gradient", n_levels=levels[0], n_iterations=n, guidance="gradient", **maze),  # type: ignore[arg-type]
        Case("5x512, jacobian-free", n_levels=levels[0], n_iterations=n, guidance="jacobian-free", **maze),  # type: ignore[arg-type]
        Case("2x64, no reward", n_levels=levels[1], n_iterations=20 * n, **small),  # type: ignore[arg-type]
    ]


def joined(x: Tensor) -> Tensor:
    """Segments should begin where the one before ends, the first at -1 and the last at 1."""
    ends = x[:, :, :: x.shape[2] - 1]  # taken once: every slice of x would cost a full-size gradient
    gaps = (ends[:, 1:, 0] - ends[:, :-1, 1]).square().flatten(1).sum(1)
    return -10 * (gaps + (ends[:, 0, 0] + 1).square().sum(1) + (ends[:, -1, 1] - 1).square().sum(1))


def build(case: Case, micro_batch: int | None = None) -> tuple[cd.ReplicaExchange, Network]:
    """A chain for the case, and the network inside it."""
    torch.manual_seed(0)  # for the weights alone; the chain has its own stream
    network = Network(case.event_shape, case.width, case.depth)
    model: cd.models.Model = cd.models.Denoiser(network, case.event_shape)
    if case.n_segments > 1:
        model = cd.stitching.Segments(model, case.n_segments)
    target = model.as_target()
    if case.guidance is not None:
        target = target.tilt(joined, guidance=case.guidance)
    levels = cd.ladder.karras(case.n_levels, sigma_min=2e-3, sigma_max=80.0, substeps=case.substeps)
    # A table such as a fit would leave, without the time of the fit.
    information = levels.times**2 / (levels.times**2 + DATA_SCALE**2)
    mean = torch.zeros(1, math.prod(model.event_shape), dtype=torch.float64)
    table = FisherTable(levels.times, information[None, :, None], mean)
    process = cd.processes.Gaussian(variance="fisher").fitted(table)
    chain = cd.ReplicaExchange(target, levels, n_chains=case.n_chains, process=process, micro_batch=micro_batch)
    return chain, network


def measure(case: Case, n_warm_up: int = 2, progress: Callable[[], None] = lambda: None) -> Timing:
    """Time iterations after a warm-up, and check that each costs `(M + 1) K` rows per chain and segment."""
    chain, network = build(case)
    rows = case.n_levels * case.substeps * case.n_chains * case.n_segments
    times = []
    for _ in range(n_warm_up + case.n_iterations):
        network.watch, whole = Watch(), Watch()
        with (
            rows_cost(chain.evaluate.counts, rows, case.name),
            watching((cd.Stream, "normal"), (cd.Stream, "uniform")) as random,
            whole.running(),
        ):
            chain.step()
        times.append((whole.seconds, network.watch.seconds, random.seconds))
        progress()
    seconds, inside, drawing = fastest(times[n_warm_up:])
    with Operations(network) as counted:
        chain.step(), chain.step()  # one of each parity
    return Timing(case, seconds, inside, drawing, rows, counted.outside // 2)


@dataclass(frozen=True)
class StoreCost:
    """Seconds of a run in a folder, of the sampler within it, and of its report, which is written once."""

    seconds: float
    sampling: float
    report: float
    n_iterations: int
    n_flushes: int

    @property
    def share(self) -> float:
        """Everything but the sampler's own work: draws, trace, flushes, checkpoints, stop rules, requests."""
        return 1 - self.sampling / self.seconds

    def __str__(self) -> str:
        return (
            f"store {self.share:.2%} of {self.seconds:.0f} s, {self.n_iterations} iterations of"
            f" {1e3 * self.sampling / self.n_iterations:.1f} ms, {self.n_flushes} flushes; report {self.report:.1f} s"
        )


def store_cost(folder: Path, seconds: float = 60.0) -> StoreCost:
    """What a run costs besides its sampling, with the default cadences and a network about as small as they get."""
    torch.manual_seed(0)
    target = cd.models.Denoiser(Network((16,), width=256, depth=2), (16,)) ** 1.5
    ladder = cd.ladder.karras(21, 0.02, 20.0, substeps=2)
    whole, report = Watch(), Watch()
    chain = cd.ReplicaExchange(target, ladder, n_chains=4, explorer=cd.Bounce())
    with cd.Run(folder, chain) as run:
        flush = (run.recorder.store, "flush")
        with watching((chain, "step"), (chain, "output")) as sampling, watching(flush) as flushes, whole.running():
            run.run(seconds=seconds)
    with report.running():
        write_report(cd.read_run(folder), folder)
    return StoreCost(whole.seconds, sampling.seconds, report.seconds, chain.iteration, flushes.calls)


def iteration_table(timings: Sequence[Timing]) -> Cells:
    """Header and lines, as text: one line per case."""
    lines = []
    for t in timings:
        random = t.random / t.seconds
        shares = [f"{share:.1%}" for share in (t.outside, random, t.outside - random)]
        times = [f"{t.rows:,}", f"{t.rows_per_second:,.0f}", f"{1e3 * t.seconds:.1f}"]
        lines.append([t.case.name, *times, *shares, f"{t.operations:,}"])
    return ["network, guidance", "rows", "rows/s", "ms", "outside", "random", "rest", "operations outside"], lines


def store_table(cost: StoreCost) -> Cells:
    """The same for a run in its folder."""
    ms = 1e3 * cost.sampling / cost.n_iterations
    line = [f"{cost.seconds:.0f} s", f"{cost.n_iterations:,}", f"{ms:.1f}", f"{cost.n_flushes}"]
    line += [f"{cost.share:.2%}", f"{cost.report:.1f} s"]
    return ["run", "iterations", "ms", "flushes", "store", "report"], [line]
