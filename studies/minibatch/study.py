"""Many small batches of SMC, or one run of CREPE? Reward tilting in one dimension, at equal network evaluations.

    p(x)   = 0.12 N(-6, 0.7^2) + 0.45 N(-1.5, 0.9^2) + 0.38 N(2.5, 0.5^2) + 0.05 N(7, 0.6^2)
    r(x)   = x^2 / 12,    annealed as gamma_t r(E[x_0 | x_t]),    gamma(u) = (0.01 + 0.99 u)^5
    pi(x)  ~ p(x) exp(r(x))

The reward favours two modes at opposite ends that the model finds rarely. SMC runs in batches of 4, 10 or 100
particles that walk by the model's own kernels, with no gradient of the reward in them, so that a log-weight gains
`r_s(x_s) - r_t(x_t)`. Batches are resampled within themselves and put together. CREPE and particle Gibbs walk by the
same kernels. In the end `cd.sample` chooses by itself.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.processes import Process
from crepe_diffusion.run import Progress
from crepe_diffusion.samplers.information import fit_information

__all__ = ["Method", "Study", "Truth", "run", "tally"]

BATCHES = (4, 10, 100)
N_LEVELS = 65
N_CHAINS = 20  # of one run, in one network batch: with a model this small, a call costs more than its rows
BURN_IN = 256  # iterations, four times the length of the ladder: replicas start untilted
SHORTER = 2  # levels by which CREPE's ladder is shorter, which pays for its burn-in
SHARED_FIT = 1024  # samples for the Fisher variance, measured once and used by all methods
PIECE = 15_000  # particles of all batches at once
N_BOOTSTRAP = 400
GIBBS = (100, 10)  # particles and chains of particle Gibbs
ENOUGH = 1000  # effective draws at which `cd.sample` stops
SEGMENTS = 10  # pieces of each chain for the bootstrap, much longer than its autocorrelation


def mixture() -> cd.models.GaussianMixture:
    """The model p."""
    means = [[-6.0], [-1.5], [2.5], [7.0]]
    return cd.models.GaussianMixture(weights=[0.12, 0.45, 0.38, 0.05], means=means, stds=[0.7, 0.9, 0.5, 0.6])


def reward(x: Tensor) -> Tensor:
    """r(x) = x^2 / 12."""
    return x[:, 0].square() / 12


class Truth:
    """The tilted law by quadrature: its density, and its mass in each mode and in each bin.

    >>> [round(float(w), 3) for w in Truth().modes]
    [0.386, 0.07, 0.079, 0.466]
    """

    def __init__(self) -> None:
        p = mixture()
        self.grid = torch.linspace(-12, 12, 240_001, dtype=torch.float64)
        self.model = p.log_prob(self.grid[:, None]).exp()
        self.reward = reward(self.grid[:, None])
        tilted = self.model * self.reward.exp()
        self.density = tilted / torch.trapezoid(tilted, self.grid)
        self.mass = tilted / tilted.sum()
        self.centres = p.means[:, 0]
        # Modes are told apart at the valleys of the target.
        valleys = [
            self.grid[torch.where((self.grid > a) & (self.grid < b), self.density, torch.inf).argmin()]
            for a, b in pairwise(self.centres)
        ]
        self.borders = torch.stack(valleys)
        self.edges = torch.linspace(-9.5, 10.0, 79, dtype=torch.float64)
        self.modes = tally(self.grid, self.mass, self.borders)[0]
        self.bins = tally(self.grid, self.mass, self.edges)[0]

    def draw(self, n: int, stream: cd.Stream) -> Tensor:
        """Independent draws by inverting the cumulative mass."""
        return self.grid[torch.searchsorted(self.mass.cumsum(0), stream.uniform((n,))).clamp(max=len(self.grid) - 1)]


def tally(x: Tensor, weights: Tensor, edges: Tensor, n_blocks: int = 1) -> Tensor:
    """Weight in each interval between edges, with the two open ones, for equal consecutive blocks: (blocks, n + 1)."""
    n = len(edges) + 1
    block = torch.arange(len(x)) * n_blocks // len(x)
    out = torch.zeros(n_blocks * n, dtype=torch.float64)
    return out.index_add(0, block * n + torch.bucketize(x, edges), weights).reshape(n_blocks, n)


@dataclass(frozen=True)
class Method:
    """The samples of one method and how far they are from the truth; every error is a bootstrap over blocks.

    `bins` are the shares of the histogram, with those below and above all edges.
    """

    name: str
    x: Tensor
    rows: int
    seconds: float
    modes: list[cd.Estimate]
    tv_modes: cd.Estimate
    tv_bins: cd.Estimate
    bins: list[float]

    @staticmethod
    def of(
        name: str,
        x: Tensor,
        truth: Truth,
        n_blocks: int,
        weights: Tensor | None = None,
        rows: int = 0,
        seconds: float = 0,
    ) -> Method:
        """From samples in which equal consecutive blocks are independent, or nearly so."""
        w = torch.ones(len(x), dtype=torch.float64) if weights is None else weights
        modes, spread, tv_modes = _bootstrap(tally(x, w, truth.borders, n_blocks), truth.modes)
        bins, _, tv_bins = _bootstrap(tally(x, w, truth.edges, n_blocks), truth.bins)
        estimates = [cd.Estimate(float(p), float(e)) for p, e in zip(modes, spread, strict=True)]
        return Method(name, x, rows, seconds, estimates, tv_modes, tv_bins, bins.tolist())


def _bootstrap(blocks: Tensor, exact: Tensor) -> tuple[Tensor, Tensor, cd.Estimate]:
    """Shares, their standard errors, and the total variation from the exact shares."""
    n = len(blocks)
    chosen = (cd.Stream(0).at("bootstrap").uniform((N_BOOTSTRAP, n)) * n).long()
    copies = torch.zeros(N_BOOTSTRAP, n, dtype=torch.float64).scatter_add(1, chosen, torch.ones_like(chosen).double())
    shares, again = blocks.sum(0) / blocks.sum(), copies @ blocks
    again = again / again.sum(1, keepdim=True)
    tv = (again - exact).abs().sum(1) / 2
    return shares, again.std(0), cd.Estimate(float((shares - exact).abs().sum() / 2), float(tv.std()))


@dataclass(frozen=True)
class Study:
    """The draws of all methods, and what CREPE's run reports of itself."""

    seed: int
    truth: Truth
    floor: Method
    smc: list[Method]
    pooled: list[Method]
    crepe: Method
    gibbs: Method
    chosen: Method
    choice: str
    barrier: cd.Estimate
    round_trips: int
    fit_rows: int
    ess: float

    def record(self) -> dict[str, Any]:
        """All numbers of the tables and the figure, for a JSON file: everything but the draws."""
        methods = [asdict(m) for m in [self.floor, *self.smc, self.crepe, self.gibbs, self.chosen, *self.pooled]]
        return {
            "seed": self.seed,
            "n_samples": len(self.crepe.x),
            "methods": [{key: value for key, value in m.items() if key != "x"} for m in methods],
            "fit_rows": self.fit_rows,
            "ess": self.ess,
            "round_trips": self.round_trips,
            "barrier": asdict(self.barrier),
            "choice": self.choice,
        }


def run(
    n_samples: int = 150_000,
    seed: int = 0,
    progress: Callable[[str, int], None] = lambda name, n: None,
    folder: Path | None = None,
) -> Study:
    """`n_samples` draws by each method; `progress(method, n)` is called after every n new draws.

    CREPE's run is kept in `folder`, which must be new; without one it goes to a temporary place.
    """
    if n_samples < 1000 or n_samples % 1000:
        raise cd.InputError(f"the number of samples must be a multiple of 1000, got {n_samples!r}")
    truth, p = Truth(), mixture()
    levels, shorter = (cd.ladder.karras(n, sigma_min=0.05, sigma_max=20.0) for n in (N_LEVELS, N_LEVELS - SHORTER))
    table = fit_information(p.as_target(), levels, p.process(), SHARED_FIT, cd.Stream(seed).at("fit"))
    process = p.process().fitted(table)
    target = p.tilt(reward, anneal=cd.anneal.power(5), guidance="none", negligible=0.0)

    smc, pooled = [], []
    for batch in BATCHES:
        start, parts = time.process_time(), []
        for done in range(0, n_samples, PIECE):
            size = min(PIECE, n_samples - done)
            sampler = cd.SMC(
                target,
                levels,
                n_particles=batch,
                n_batches=size // batch,
                pool="equal",
                seed=1000 * seed + done // PIECE,
                process=process,
            )
            parts.append(sampler.sample())
            progress(f"SMC {batch}", size)
        rows, seconds = sum(part.evaluations.rows for part in parts), time.process_time() - start
        n_blocks = n_samples // max(BATCHES)  # whole batches each
        x = torch.cat([part.resampled(cd.Stream(seed).at("resample", i))[:, 0] for i, part in enumerate(parts)])
        smc.append(Method.of(f"SMC {batch}", x, truth, n_blocks, rows=rows, seconds=seconds))
        # The same particles, batches weighted by their estimates of Z: unbiased up to a common factor.
        log_w = torch.cat([(part.batch_log_z[:, None] + part.log_weights).flatten() for part in parts])
        x = torch.cat([part.x[:, 0] for part in parts])
        w = (log_w - log_w.max()).exp()
        pooled.append(Method.of(f"SMC {batch}, by Z", x, truth, n_blocks, w))

    start = time.process_time()
    with tempfile.TemporaryDirectory() as elsewhere:
        data = _crepe(folder or Path(elsewhere) / "crepe", target, shorter, process, n_samples, seed, truth, progress)
    series, diagnostics = torch.from_numpy(data.x[data.n_burnt :, :, 0]), data.diagnostics
    assert diagnostics is not None
    rows, seconds = data.counts.rows, time.process_time() - start
    crepe = Method.of("CREPE", series.T.flatten(), truth, SEGMENTS * N_CHAINS, rows=rows, seconds=seconds)
    gibbs = _gibbs(target, levels, process, n_samples, seed, truth, progress)
    chosen, choice = _chosen(target, levels, n_samples, seed, truth)
    x = truth.draw(n_samples, cd.Stream(seed).at("exact"))
    return Study(
        seed=seed,
        truth=truth,
        floor=Method.of("exact draws", x, truth, n_samples // max(BATCHES)),
        smc=smc,
        pooled=pooled,
        crepe=crepe,
        gibbs=gibbs,
        chosen=chosen,
        choice=choice,
        barrier=diagnostics.barrier(),
        round_trips=diagnostics.round_trips(),
        fit_rows=SHARED_FIT * len(levels.times),
        ess=min(cd.ess((torch.bucketize(series, truth.borders) == k).double()) for k in range(len(truth.modes))),
    )


def _crepe(
    folder: Path,
    target: cd.Target,
    levels: cd.Ladder,
    process: Process,
    n_samples: int,
    seed: int,
    truth: Truth,
    progress: Callable[[str, int], None],
) -> cd.RunData:
    """One run of CREPE in a folder of its own."""
    scalars = {f"mode at {c:g}": _in_mode(truth, k) for k, c in enumerate(truth.centres.tolist())}
    seen = 0

    def show(now: Progress) -> None:
        nonlocal seen
        draws = max(0, now.iteration - BURN_IN) * N_CHAINS
        progress("CREPE", draws - seen)
        seen = draws

    sampler = cd.ReplicaExchange(target, levels, n_chains=N_CHAINS, seed=seed, process=process)
    with cd.Run(folder, sampler, burn_in=BURN_IN, scalars=scalars) as run:
        run.run(iterations=BURN_IN + n_samples // N_CHAINS, progress=show)
        return run.data()


def _gibbs(
    target: cd.Target,
    levels: cd.Ladder,
    process: Process,
    n_samples: int,
    seed: int,
    truth: Truth,
    progress: Callable[[str, int], None],
) -> Method:
    """Particle Gibbs with as many particles in all sweeps as the others have draws; the first pass is not used."""
    start, (n, chains) = time.process_time(), GIBBS
    sampler = cd.ParticleGibbs(target, levels, n_particles=n, n_chains=chains, seed=seed, process=process)
    sweeps = n_samples // (n * chains) - 1
    out = sampler.sample(sweeps, progress=False, callback=lambda now: progress("particle Gibbs", n * chains))
    # Chains first, so that consecutive blocks are pieces of one chain.
    x, w = (v.reshape(sweeps, chains, n).transpose(0, 1).flatten() for v in (out.x[:, 0], out.weights))
    rows, seconds = out.evaluations.rows, time.process_time() - start
    return Method.of("particle Gibbs", x, truth, SEGMENTS * chains, w, rows=rows, seconds=seconds)


def _chosen(target: cd.Target, levels: cd.Ladder, n_samples: int, seed: int, truth: Truth) -> tuple[Method, str]:
    """`cd.sample` with the rows of the others as its budget; it stops when it has enough, and pays for its pilot."""
    start = time.process_time()
    scalars = {f"mode at {c:g}": _in_mode(truth, k) for k, c in enumerate(truth.centres.tolist())}
    budget = n_samples * N_LEVELS
    out = cd.sample(target, levels, n_effective=ENOUGH, budget=budget, scalars=scalars, seed=seed, progress=False)
    rows, seconds = out.evaluations.rows, time.process_time() - start
    draws = out.draws
    # Blocks of particles are batches. Draws of a chain are correlated: their errors are those of the result itself.
    n_blocks = draws.n_batches if isinstance(draws, cd.Particles) else 1
    method = Method.of("cd.sample", out.x[:, 0], truth, n_blocks, out.weights, rows=rows, seconds=seconds)
    if not isinstance(draws, cd.Particles):
        method = replace(method, modes=[out.mean(f) for f in scalars.values()])
    return method, str(out)


def _in_mode(truth: Truth, k: int) -> Callable[[Tensor], Tensor]:
    return lambda x: (torch.bucketize(x[:, 0].contiguous(), truth.borders) == k).double()
