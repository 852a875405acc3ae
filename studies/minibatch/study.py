"""Why not many small batches of SMC? Reward tilting of a mixture in one dimension, at equal network evaluations.

    p(x)   = 0.12 N(-6, 0.7^2) + 0.45 N(-1.5, 0.9^2) + 0.38 N(2.5, 0.5^2) + 0.05 N(7, 0.6^2)
    r(x)   = x^2 / 12,    annealed as gamma_t r(E[x_0 | x_t]),    gamma(u) = (0.01 + 0.99 u)^5
    pi(x)  ~ p(x) exp(r(x))

The reward favours two modes at opposite ends that the model finds rarely. SMC runs in batches of 4, 10 or 100
particles that walk by the model's own kernels, with no gradient of the reward in them, so that a log-weight gains
`r_s(x_s) - r_t(x_t)`. Batches are resampled within themselves and put together. CREPE walks by the same kernels.

    python -m studies.minibatch
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.processes import Process
from crepe_diffusion.run import Progress

__all__ = ["Method", "Study", "Truth", "run"]

BATCHES = (4, 10, 100)
N_LEVELS = 65
N_CHAINS = 20  # of one run, in one network batch: with a model this small, a call costs more than its rows
BURN_IN = 256  # iterations, four times the length of the ladder: replicas start untilted
SHORTER = 2  # levels by which CREPE's ladder is shorter, which pays for its burn-in
SHARED_FIT = 1024  # samples for the Fisher variance, measured once and used by all methods
PIECE = 15_000  # particles of all batches at once
N_BOOTSTRAP = 400
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
    """The samples of one method and how far they are from the truth; every error is a bootstrap over blocks."""

    name: str
    x: Tensor
    rows: int
    seconds: float
    modes: list[cd.Estimate]
    tv_modes: cd.Estimate
    tv_bins: cd.Estimate

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
        _, _, tv_bins = _bootstrap(tally(x, w, truth.edges, n_blocks), truth.bins)
        estimates = [cd.Estimate(float(p), float(e)) for p, e in zip(modes, spread, strict=True)]
        return Method(name, x, rows, seconds, estimates, tv_modes, tv_bins)


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
    """All that the table, the figure and the page are made of."""

    seed: int
    truth: Truth
    floor: Method
    smc: list[Method]
    pooled: list[Method]
    crepe: Method
    barrier: cd.Estimate
    round_trips: int
    fit_rows: int
    ess: float


def run(
    n_samples: int = 150_000,
    seed: int = 0,
    progress: Callable[[str, int], None] = lambda name, n: None,
    folder: Path | None = None,
) -> Study:
    """`n_samples` draws by each method; `progress` hears of each method's draws as they come.

    CREPE's run is kept in `folder`, which must be new; without one it goes to a temporary place.
    """
    if n_samples < 1000 or n_samples % 1000:
        raise cd.InputError(f"the number of samples must be a multiple of 1000, got {n_samples!r}")
    truth, p = Truth(), mixture()
    levels, shorter = (cd.ladder.karras(n, sigma_min=0.05, sigma_max=20.0) for n in (N_LEVELS, N_LEVELS - SHORTER))
    table = cd.fit_information(p.as_target(), levels, p.process(), SHARED_FIT, cd.Stream(seed).at("fit"))
    process = p.process().fitted(table)
    target = p.tilt(reward, anneal=cd.anneal.power(5), guidance="none")

    smc, pooled = [], []
    for batch in BATCHES:
        start, parts = time.perf_counter(), []
        for done in range(0, n_samples, PIECE):
            size = min(PIECE, n_samples - done)
            sampler = cd.SMC(
                target,
                levels,
                n_particles=batch,
                n_batches=size // batch,
                seed=1000 * seed + done // PIECE,
                process=process,
            )
            parts.append(sampler.sample())
            progress(f"SMC {batch}", size)
        rows, seconds = sum(part.evaluations.rows for part in parts), time.perf_counter() - start
        n_blocks = n_samples // max(BATCHES)  # whole batches each
        x = torch.cat([part.resampled(cd.Stream(seed).at("resample", i))[:, 0] for i, part in enumerate(parts)])
        smc.append(Method.of(f"SMC {batch}", x, truth, n_blocks, rows=rows, seconds=seconds))
        # The same particles, batches weighted by their estimates of Z: unbiased up to a common factor.
        log_w = torch.cat([(part.log_z[:, None] + part.log_weights).flatten() for part in parts])
        x = torch.cat([part.flat()[:, 0] for part in parts])
        w = (log_w - log_w.max()).exp()
        pooled.append(Method.of(f"SMC {batch}, by Z", x, truth, n_blocks, w))

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as elsewhere:
        data = _crepe(folder or Path(elsewhere) / "crepe", target, shorter, process, n_samples, seed, truth, progress)
    series, diagnostics = torch.from_numpy(data.x[data.burn_in :, :, 0]), data.diagnostics
    rows, seconds = data.counts.rows, time.perf_counter() - start
    crepe = Method.of("CREPE", series.T.flatten(), truth, SEGMENTS * N_CHAINS, rows=rows, seconds=seconds)
    x = truth.draw(n_samples, cd.Stream(seed).at("exact"))
    return Study(
        seed=seed,
        truth=truth,
        floor=Method.of("exact draws", x, truth, n_samples // max(BATCHES)),
        smc=smc,
        pooled=pooled,
        crepe=crepe,
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

    options = {"n_chains": N_CHAINS, "seed": seed, "process": process, "burn_in": BURN_IN, "scalars": scalars}
    with cd.Run(folder, target, levels, **options) as run:  # type: ignore[arg-type]
        run.run(iterations=BURN_IN + n_samples // N_CHAINS, progress=show)
        return run.data()


def _in_mode(truth: Truth, k: int) -> Callable[[Tensor], Tensor]:
    return lambda x: (torch.bucketize(x[:, 0].contiguous(), truth.borders) == k).double()


def cells(study: Study) -> tuple[list[str], list[list[str]]]:
    """The table as text: a header, and a line for each method."""
    header = ["", *(f"{c:g}" for c in study.truth.centres.tolist()), "TV modes", "TV bins"]
    lines = [["truth", *(f"{float(w):.3f}" for w in study.truth.modes), "0", "0"]]
    for m in [study.floor, *study.smc, study.crepe, *study.pooled]:
        lines.append([m.name, *(_short(e) for e in [*m.modes, m.tv_modes, m.tv_bins])])
    return header, lines


def _short(e: cd.Estimate) -> str:
    """0.187(2) for 0.187 +- 0.002."""
    return f"{e.value:.3f}({max(1, round(1e3 * e.error))})"


def figure(study: Study, path: Path) -> None:
    """Model, reward and target above; the four histograms with the target's density below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    blue, orange, sky, green = "#0072B2", "#D55E00", "#56B4E9", "#009E73"  # Okabe and Ito, safe for colour-blind eyes
    truth, thin = study.truth, slice(None, None, 200)
    x, density = truth.grid[thin], truth.density[thin]
    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.titlesize": 11}):
        fig = plt.figure(figsize=(9, 9), layout="constrained")
        axes = fig.subplot_mosaic([["top", "top"], ["a", "b"], ["c", "d"]], height_ratios=[1.05, 1, 1])
        top = axes["top"]
        top.fill_between(x, truth.model[thin], color=blue, alpha=0.25, lw=0)
        top.plot(x, truth.model[thin], color=blue, label="model $p$")
        top.plot(x, density, color="black", lw=1.8, label="target $\\pi \\propto p\\,e^{r}$")
        top.plot([], [], color=orange, ls="--", label="reward $r = x^2/12$ (right axis)")
        other = top.twinx()
        other.plot(x, truth.reward[thin], color=orange, ls="--")
        other.set_ylabel("reward", color=orange)
        other.set_ylim(0, 9)
        top.set(xlim=(-9.5, 10), ylim=(0, 0.42), xticks=range(-8, 9, 4), yticks=[0, 0.1, 0.2, 0.3, 0.4])
        top.set(ylabel="density", title="The reward favours the two modes that the model finds rarely")
        top.legend(loc="upper center", ncols=3, frameon=False, fontsize=9)
        edges, height = truth.edges.tolist(), 1.32 * float(density.max())
        centres = [float((truth.mass * truth.grid)[cut].sum() / truth.mass[cut].sum()) for cut in _cuts(truth)]
        for key, method, colour in zip("abcd", [*study.smc, study.crepe], [sky, sky, sky, green], strict=True):
            ax = axes[key]
            ax.hist(method.x.numpy(), bins=edges, density=True, color=colour, alpha=0.75)
            ax.plot(x, density, color="black", lw=1.5)
            for centre, weight, exact in zip(centres, method.modes, truth.modes.tolist(), strict=True):
                ax.text(centre, 0.985 * height, f"{weight.value:.3f}", ha="center", va="top", color="black")
                ax.text(centre, 0.91 * height, f"({exact:.3f})", ha="center", va="top", color="0.4", fontsize=9)
            ax.set(xlim=(-9.5, 10), ylim=(0, height), xticks=range(-8, 9, 4), yticks=[0, 0.1, 0.2, 0.3])
            ax.set(xlabel="x" if key in "cd" else "", ylabel="density" if key in "ac" else "")
            name = method.name.replace("SMC ", "SMC in batches of ")
            ax.set_title(f"{name}: {method.tv_modes.value:.1%} in the wrong mode")
            ax.spines["right"].set_visible(False)
        caption = "samples each, at equal network evaluations; line: exact target; numbers: weight of a mode (exact)"
        fig.supxlabel(f"{len(study.crepe.x):,} {caption}", fontsize=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        fig.savefig(path, dpi=150)
        plt.close(fig)


def _cuts(truth: Truth) -> list[Tensor]:
    mode = torch.bucketize(truth.grid, truth.borders)
    return [mode == k for k in range(len(truth.modes))]


def table(study: Study) -> Any:
    """The table for a terminal."""
    from rich import box
    from rich.table import Table

    title = f"Weight of each mode, and total variation (TV) from the truth; seed {study.seed}"
    out = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    header, lines = cells(study)
    for i, name in enumerate(header):
        out.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    for i, line in enumerate(lines):
        out.add_row(*line, style="bold" if line[0] == "CREPE" else None, end_section=i in (1, 5))
    return out


def notes(study: Study) -> list[str]:
    """What a reader of the table should know, in sentences whose numbers come from this run."""
    runs = [*study.smc, study.crepe]
    wrong = {m.name: f"{m.tv_modes.value:.1%}" for m in runs}
    rows = [m.rows for m in runs]
    return [
        "0.187(2) stands for 0.187 +- 0.002, by a bootstrap over batches, or over long pieces of the chains. TV is"
        " never negative: compare it with that of as many exact draws.",
        f"Mass in the wrong mode: SMC in batches of 4, {wrong['SMC 4']}; of 10, {wrong['SMC 10']}; of 100,"
        f" {wrong['SMC 100']}; CREPE, {wrong['CREPE']}. More batches do not help SMC: each has the same bias.",
        "Lines `by Z` hold the same particles, but each batch is weighted by its own estimate of Z. That takes nearly"
        " all of the bias away and costs nothing; what remains are weighted samples.",
        f"CREPE's draws are correlated: {len(study.crepe.x):,} are worth {study.ess:,.0f} independent ones for the mode"
        f" weight that mixes worst. Replicas made {study.round_trips:,} round trips; Lambda = {study.barrier}.",
        f"Network evaluations: {'; '.join(f'{m.name}, {m.rows:,} in {m.seconds:.0f} s' for m in runs)}. They agree"
        f" within {max(rows) / min(rows) - 1:.1%}, burn-in included; {study.fit_rows:,} more measured the denoising"
        f" variance for all. CREPE is one run of {N_CHAINS} chains, and spends most of its time on the overhead of"
        " small batches, which a real network would hide.",
    ]


def write_docs(study: Study, folder: Path, command: str) -> None:
    """The page and its figure."""
    header, lines = cells(study)
    rows = ["| " + " | ".join(line) + " |" for line in [header, ["---", *["---:"] * (len(header) - 1)], *lines]]
    figure(study, folder / "figures" / "minibatch.png")
    text = f"""# Many small batches of SMC, or one run of CREPE?

<!-- Written by `{command}`; do not edit. -->

`{command}`, seed {study.seed}, {len(study.crepe.x):,} samples a method. `make demo` runs the same and prints the table.

A mixture `p` with four modes in one dimension is tilted by a reward that favours the two rare modes at its ends:

    p(x)   = 0.12 N(-6, 0.7^2) + 0.45 N(-1.5, 0.9^2) + 0.38 N(2.5, 0.5^2) + 0.05 N(7, 0.6^2)
    r(x)   = x^2 / 12
    pi(x)  ~ p(x) exp(r(x))

All methods walk the same ladder ({N_LEVELS} noise levels, Karras spacing, sigma from 0.05 to 20) by the model's own
denoising kernels, without the gradient of the reward; CREPE's is {SHORTER} levels shorter to pay for its burn-in. A
particle's log-weight grows by `r_s(x_s) - r_t(x_t)`, where `r_t(x) = gamma_t r(E[x_0 | x_t = x])`. A batch is
resampled when its effective size falls below half, and once more at the end; then all batches are put together with
equal weight, as is usual. CREPE accepts swaps by the same differences of rewards.

![Model, reward and target; histograms of the four methods](figures/minibatch.png)

{chr(10).join(rows)}

Columns `-6` to `7` are the weights of the four modes, cut at the valleys of the target; `TV, modes` is the total
variation between them and the truth, `TV, bins` the same for a histogram with bins of width 0.25, where the truth is
a quadrature.

{chr(10).join("- " + note for note in notes(study))}

What to take from it: a batch of SMC is right on average only as its size grows, so the size of a batch and not the
number of batches decides the bias. In one dimension a hundred particles are nearly enough. CREPE has no batch size and
its error falls for as long as it runs; per network evaluation it is not the more precise method on a target as easy
as this one, as the rows `by Z` show.
"""
    (folder / "minibatch.md").write_text(text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.minibatch", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=150_000, help="per method, a multiple of 1000")
    parser.add_argument("--out", type=Path, default=Path("results/minibatch"), help="folder for the figure")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.add_argument("--write-docs", action="store_true", help="also write docs/minibatch.md and its figure")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # batches this small gain nothing from a second thread, which then waits and disturbs

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    from crepe_diffusion.report.report import write_report

    folder = options.out / "crepe"
    shutil.rmtree(folder, ignore_errors=True)  # the demo begins anew each time
    console = Console()
    columns = (TextColumn("{task.description:15}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console, disable=options.quiet) as bars:
        names = [*(f"SMC {b}" for b in BATCHES), "CREPE"]
        tasks = {name: bars.add_task(name, total=options.samples, start=False) for name in names}

        def progress(name: str, n: int) -> None:
            bars.start_task(tasks[name])
            bars.advance(tasks[name], n)

        study = run(options.samples, options.seed, progress, folder)
    console.print(table(study))
    for note in notes(study):
        console.print(f"- {note}", highlight=False)
    figure(study, options.out / "minibatch.png")
    console.print(f"Figure: {options.out / 'minibatch.png'}")
    report = write_report(cd.read_run(folder), folder / "report.html")
    console.print(f"Report of the CREPE run: {report}")
    if options.write_docs:
        write_docs(study, Path("docs"), "python -m studies.minibatch --write-docs")
        console.print("Wrote docs/minibatch.md and docs/figures/minibatch.png")


if __name__ == "__main__":
    main()
