"""Tempered molecules against dynamics: one table, three figures, and trajectories for a viewer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mdtraj
import numpy as np

from crepe_diffusion import InputError
from crepe_diffusion.run import publish
from studies.molecules.convergence import BASINS
from studies.molecules.geometry import backbone, bonds, dihedrals, distances, same_hand
from studies.molecules.metrics import COARSE_TVD, METRICS, Truth, between_halves, evaluate, populations
from studies.molecules.peptides import Peptide, energies
from studies.molecules.tempering import ABLATIONS, METHODS, UNTEMPERED, file_name, kept_draws
from studies.shared.pages import markdown
from studies.shared.results import Results

__all__ = [
    "HALVES",
    "PAPER",
    "Measured",
    "Row",
    "bond_errors",
    "measured",
    "population_table",
    "rows_of",
    "score",
    "table",
    "write",
]

HALVES = "dynamics, two halves"
N_LONG = 2000
"""Frames, one per ps, that count as one family of the dynamics: it forgets its basin within some 100 of them."""
PAPER = {
    "dipeptide": {
        "FKC, annealed score": (0.345, 0.023, 0.293, 0.116),
        "FKC, annealed noise": (0.894, 0.036, 0.282, 0.108),
        "RNE": (0.391, 0.024, 0.282, 0.168),
        "CREPE": (0.224, 0.019, 0.264, 0.096),
    },
    "tetrapeptide": {
        "FKC, annealed score": (0.122, 0.014, 0.923, 0.183),
        "FKC, annealed noise": (0.436, 0.015, 0.892, 0.138),
        "RNE": (0.154, 0.013, 0.893, 0.155),
        "CREPE": (0.122, 0.013, 0.856, 0.035),
    },
    "hexapeptide": {
        "FKC, annealed score": (0.091, 0.018, 1.585, 0.088),
        "FKC, annealed noise": (0.206, 0.020, 1.652, 0.068),
        "RNE": (0.087, 0.010, 1.618, 0.042),
        "CREPE": (0.398, 0.009, 1.299, 0.009),
    },
}
"""Table 1 of the paper: energy TVD, distance TVD, W2, TICA MMD, with the authors' model and data.

The last is hardly a root: two samples of 5,000 frames of the hexapeptide are 0.006 to 0.019 apart by it, and the
paper has 0.009 for draws of a chain. So it stands beside the square, with the five kernels of common implementations.
"""


@dataclass(frozen=True)
class Measured:
    """What was measured of one method: the metrics of each seed, and the records of its runs.

    `mixed` is the share of samples with alpha carbons of both hands, `turned` that of samples that had to be mirrored;
    `bonds` are the two numbers of `bond_errors`, `populations` those of all seeds together.
    """

    method: str
    metrics: list[dict[str, float]]
    populations: dict[str, tuple[float, float, float]]
    mixed: float
    turned: float
    bonds: tuple[float, float]
    about: list[dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """A method with its samples, all of one hand, and what was measured on them."""

    measured: Measured
    samples: np.ndarray

    @property
    def name(self) -> str:
        return self.measured.method


def bond_errors(peptide: Peptide, frames: np.ndarray, samples: np.ndarray) -> tuple[float, float]:
    """How far bond lengths are off: the mean shift in nm, and the mean ratio of standard deviations.

    Bonds to hydrogen are held fixed by the dynamics and have no spread to compare; they count in the shift only. Sums
    over 200,000 frames in float32 would give them one.
    """
    pairs = bonds(peptide)
    a, b = (distances(x, pairs).astype(np.float64) for x in (frames, samples))
    free = a.std(0) > 1e-4
    return float(np.abs(b.mean(0) - a.mean(0)).mean()), float((b.std(0)[free] / a.std(0)[free]).mean())


def rows_of(
    cold: Truth, hot: Truth, folder: Path, n: int, progress: Callable[[str], None] = lambda name: None
) -> list[Row]:
    """Every method whose draws lie in the folder, after the bound that dynamics set themselves."""
    kept = kept_draws(folder)
    names: dict[str, list[str]] = {}
    for name in kept.names():
        names.setdefault(kept[name]["method"], []).append(name)
    if not names:
        raise InputError(f"no samples in {kept.folder}; run `temper` first")
    rng = np.random.default_rng(0)
    floor = [between_halves(cold, n, rng) for _ in range(3)]
    blocks = np.arange(len(cold.frames)) // N_LONG
    known = populations(cold.frames, blocks, cold.peptide, 10 * n, rng, cold.clash)
    bound = Measured(HALVES, floor, known, 0.0, 0.0, bond_errors(cold.peptide, *cold.halves), [])
    rows, pairs = [Row(bound, cold.frames)], bonds(cold.peptide)
    for method in [m for m in METHODS if m in names]:
        progress(method)
        truth = hot if method == UNTEMPERED else cold
        hands = [same_hand(kept.arrays(name)["x"], pairs, truth.reference) for name in names[method]]
        samples, mixed, turned = (np.concatenate(parts) for parts in zip(*hands, strict=True))
        metrics = [evaluate(truth, truth.frames, x, n, rng) for x, *_ in hands]
        lengths = bond_errors(truth.peptide, truth.frames, samples)
        about = [kept[name] for name in names[method]]
        family = np.concatenate([kept.arrays(name)["family"] + i * 2**32 for i, name in enumerate(names[method])])
        shares = populations(samples, family, truth.peptide, 3 * n, rng, truth.clash)
        measured = Measured(method, metrics, shares, float(mixed.mean()), float(turned.mean()), lengths, about)
        rows.append(Row(measured, samples))
    return rows


def measured(folder: Path) -> list[Measured]:
    """What `write` kept in this folder; an empty list if there is nothing."""
    return [
        Measured(
            **{
                **record,
                "bonds": tuple(record["bonds"]),
                "populations": {name: tuple(values) for name, values in record["populations"].items()},
            }
        )
        for record in Results(folder).get("results") or []
    ]


def score(method: Measured, metric: str) -> tuple[float, float]:
    """The mean over seeds and its standard error, NaN for one seed; the mean is infinite if a value is not finite."""
    values = np.array([m[metric] for m in method.metrics])
    if not np.isfinite(values).all():
        return float("inf"), float("nan")
    error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
    return float(values.mean()), float(error)


def table(methods: Sequence[Measured], peptide: Peptide) -> str:
    """Markdown, with the paper's numbers below ours."""
    head = ["method", *METRICS[:5], "dF (kJ/mol)", "bond shift (pm)", "bond spread", "mixed hands", "turned", "rows"]
    lines = []
    for m in methods:
        cells = [m.method, *(_cell(m, metric) for metric in METRICS)]
        cells += [f"{1000 * m.bonds[0]:.2f}", f"{m.bonds[1]:.3f}", f"{m.mixed:.4f}", f"{m.turned:.4f}"]
        lines.append([*cells, f"{np.mean([a['rows'] for a in m.about]):,.0f}" if m.about else ""])
    for name, values in PAPER[peptide.name].items():
        lines.append([f"paper: {name}", *(f"{v:.3f}" for v in values), *[""] * 7])
    return markdown(head, lines) + "\n"


def population_table(methods: Sequence[Measured]) -> str:
    """Shares of basins and energies, each with its error, and how many independent draws the alpha basin has."""
    names = [*(basin.name for basin in BASINS), "clashes"]
    head = ["method", *(f"{name} (%)" for name in names), "U (kJ/mol)", "sd of U", COARSE_TVD, "effective draws, alpha"]
    lines = []
    for m in methods:
        cells = [f"{100 * a:.2f} +- {100 * e:.2f}" for a, e, _ in (m.populations[name] for name in names)]
        cells += [f"{a:.2f} +- {e:.2f}" for a, e, _ in (m.populations[name] for name in ("U", "sd of U"))]
        lines.append([m.method, *cells, _cell(m, COARSE_TVD), f"{m.populations['alpha'][2]:,.0f}"])
    return markdown(head, lines) + "\n"


def _cell(method: Measured, metric: str) -> str:
    mean, error = score(method, metric)
    if not np.isfinite(mean):
        empty = sum(not np.isfinite(m[metric]) for m in method.metrics)
        return f"a basin empty in {empty} of {len(method.metrics)}" if metric == "dF" else "not finite"
    return f"{mean:.3f}" + (f" +- {error:.3f}" if np.isfinite(error) else "")


def write(rows: list[Row], cold: Truth, folder: Path) -> None:
    """`table.md`, `results.json`, figures, and `METHOD.xtc` beside `topology.pdb`."""
    methods = [row.measured for row in rows]
    Results(folder).save("results", [asdict(m) for m in methods])
    publish(folder / "table.md", (table(methods, cold.peptide) + "\n" + population_table(methods)).encode())
    topology = mdtraj.Topology.from_openmm(cold.peptide.topology)
    mdtraj.Trajectory(cold.reference, topology).save_pdb(str(folder / "topology.pdb"))
    for row in rows:
        some = row.samples[np.linspace(0, len(row.samples) - 1, min(1000, len(row.samples))).astype(int)]
        centred = mdtraj.Trajectory(some, topology).superpose(mdtraj.Trajectory(cold.reference, topology))
        centred.save_xtc(str(folder / f"{file_name(row.name)}.xtc"))
    draw(rows, cold, folder)


def draw(rows: list[Row], cold: Truth, folder: Path) -> None:
    """Free energies in the Ramachandran and TICA planes side by side, and all histograms of the energy in one panel."""
    shown = [row for row in rows if row.name != UNTEMPERED]
    some = [row.samples[:: max(1, len(row.samples) // 50_000)] for row in shown]
    titles = ["dynamics" if row.name == HALVES else row.name for row in shown]
    quadruples = backbone(cold.peptide)
    torsions = [np.degrees(np.stack([dihedrals(x, quadruples[k]).flatten() for k in ("phi", "psi")], 1)) for x in some]
    draw_planes(folder / "ramachandran.png", titles, torsions, [(-180, 180)] * 2, ("phi", "psi"))
    slow = [cold.plane(x) for x in some]
    ends = [(slow[0][:, k].min(), slow[0][:, k].max()) for k in (0, 1)]
    draw_planes(folder / "tica.png", titles, slow, ends, ("first slow coordinate", "second slow coordinate"))
    kept = {"dynamics" if row.name == HALVES else row.name: row for row in shown if row.name not in ABLATIONS}
    values = {name: energies(cold.peptide, r.samples[:: max(1, len(r.samples) // 5000)]) for name, r in kept.items()}
    draw_energies(folder / "energy.png", values)


def draw_planes(
    path: Path, titles: list[str], points: list[np.ndarray], ends: Sequence[tuple[float, float]], axes: tuple[str, str]
) -> None:
    """`-log` of the density relative to its maximum, panel by panel."""
    plt, edges = _pyplot(), [np.linspace(*end, 73) for end in ends]
    columns = min(4, len(titles))
    lines = -(-len(titles) // columns)
    width, height = 3 * columns + 1.6, 2.7 * lines + 0.6
    figure, grid = plt.subplots(lines, columns, figsize=(width, height), squeeze=False, sharex=True, sharey=True)
    for panel, title, p in zip(grid.flat, titles, points, strict=False):
        density, *_ = np.histogram2d(p[:, 0], p[:, 1], bins=edges, density=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            free = -np.log(density.T / density.max())
        mesh = panel.pcolormesh(*edges, np.where(np.isfinite(free), free, np.nan), cmap="viridis", vmin=0, vmax=8)
        panel.set_title(title, fontsize=9)
    for panel in grid.flat[len(titles) :]:
        panel.axis("off")
    for column in range(columns):  # the lowest panel of a column has the ticks of the shared axis
        grid[(len(titles) - 1 - column) // columns, column].tick_params(labelbottom=True)
    figure.subplots_adjust(0.8 / width, 0.6 / height, 1 - 0.2 / width, 1 - 0.3 / height, 0.08, 0.2)
    figure.colorbar(
        mesh, ax=grid, pad=0.2 / width, fraction=0.8 / width, label="free energy (kT), least is 0 in each panel"
    )
    figure.supxlabel(axes[0], fontsize=9)
    figure.supylabel(axes[1], fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_energies(path: Path, values: dict[str, np.ndarray]) -> None:
    """Histograms over the range of the dynamics and somewhat more; the legend counts what lies outside of it."""
    plt = _pyplot()
    figure, panel = plt.subplots(figsize=(7, 3.8))
    low, high = np.percentile(values["dynamics"], [0.1, 99.9])
    bins = np.linspace(low - 0.2 * (high - low), high + 0.4 * (high - low), 80)
    for name, u in values.items():
        style: dict[str, Any] = {"color": "black", "lw": 2} if name == "dynamics" else {"lw": 1.2}
        outside = np.mean((u < bins[0]) | (u > bins[-1]))
        share = np.full(len(u), 1 / (len(u) * (bins[1] - bins[0])))
        label = f"{name} ({100 * outside:.0f} % outside)" if outside >= 0.005 else name
        panel.hist(u, bins=bins.tolist(), weights=share, histtype="step", label=label, **style)
    panel.set_xlabel("U (kJ/mol)")
    panel.set_ylabel("density (mol/kJ)")
    panel.legend(fontsize=7)
    figure.subplots_adjust(0.12, 0.14, 0.98, 0.97)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
