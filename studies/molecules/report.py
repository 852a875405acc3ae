"""Tempered molecules against dynamics: one table, three figures, and trajectories for a viewer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mdtraj
import numpy as np

from crepe_diffusion.errors import InputError
from crepe_diffusion.run.files import publish
from studies.molecules.geometry import (
    backbone,
    bonds,
    dihedrals,
    distances,
    same_hand,
)
from studies.molecules.metrics import METRICS, Truth, between_halves, evaluate
from studies.molecules.peptides import Peptide, energies
from studies.molecules.tempering import ABLATIONS, METHODS, UNTEMPERED, file_name, load_draws

__all__ = ["HALVES", "PAPER", "Result", "Row", "bond_errors", "results", "rows_of", "score", "table", "write"]

HALVES = "dynamics, two halves"
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
"""Table 1 of the paper: energy TVD, distance TVD, W2, TICA MMD, with the authors' model and data."""


@dataclass
class Result:
    """What is known of one method: the metrics of each seed, and what its runs said of themselves.

    `mixed` is the share of samples with alpha carbons of both hands, `turned` that of samples that had to be mirrored.
    """

    name: str
    metrics: list[dict[str, float]]
    mixed: float
    turned: float
    bonds: tuple[float, float]
    about: list[dict]


@dataclass
class Row(Result):
    """A result with the samples that it was measured on, all of one hand."""

    samples: np.ndarray


def bond_errors(peptide: Peptide, frames: np.ndarray, samples: np.ndarray) -> tuple[float, float]:
    """How far bond lengths are off: the mean shift in nm, and the mean ratio of standard deviations.

    Bonds to hydrogen are held fixed by the dynamics and have no spread to compare; they count in the shift only.
    """
    pairs = bonds(peptide)
    a, b = distances(frames, pairs), distances(samples, pairs)
    free = a.std(0) > 1e-4
    return float(np.abs(b.mean(0) - a.mean(0)).mean()), float((b.std(0)[free] / a.std(0)[free]).mean())


def rows_of(
    cold: Truth, hot: Truth, folder: Path, n: int, progress: Callable[[str], None] = lambda name: None
) -> list[Row]:
    """Every method whose draws lie in the folder, after the bound that dynamics set themselves."""
    files: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        files.setdefault(load_draws(path).about["method"], []).append(path)
    if not files:
        raise InputError(f"no samples in {folder}; run `temper` first")
    rng = np.random.default_rng(0)
    floor = [between_halves(cold, n, rng) for _ in range(3)]
    rows = [Row(HALVES, floor, 0.0, 0.0, bond_errors(cold.peptide, *cold.halves), [], cold.frames)]
    pairs = bonds(cold.peptide)
    for name in [m for m in METHODS if m in files]:
        progress(name)
        truth = hot if name == UNTEMPERED else cold
        draws = [load_draws(path) for path in files[name]]
        hands = [same_hand(d.x.numpy(), pairs, truth.reference) for d in draws]
        samples, mixed, turned = (np.concatenate(parts) for parts in zip(*hands, strict=True))
        measured = [evaluate(truth, truth.frames, x, n, rng) for x, *_ in hands]
        rows.append(
            Row(
                name,
                measured,
                float(mixed.mean()),
                float(turned.mean()),
                bond_errors(truth.peptide, truth.frames, samples),
                [d.about for d in draws],
                samples,
            )
        )
    return rows


def results(folder: Path) -> list[Result]:
    """What `write` left in `results.json`."""
    return [
        Result(r["method"], r["metrics"], r["mixed"], r["turned"], tuple(r["bonds"]), r["about"])
        for r in json.loads((folder / "results.json").read_text())
    ]


def score(result: Result, metric: str) -> tuple[float, float]:
    """The mean over seeds and its standard error, NaN for one seed; the mean is infinite if a value is not finite."""
    values = np.array([m[metric] for m in result.metrics])
    if not np.isfinite(values).all():
        return float("inf"), float("nan")
    error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
    return float(values.mean()), float(error)


def table(rows: Sequence[Result], peptide: Peptide) -> str:
    """Markdown, with the paper's numbers below ours."""
    head = ["method", *METRICS[:4], "dF (kJ/mol)", "bond shift (pm)", "bond spread", "mixed hands", "turned", "rows"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [_cell(row, name) for name in METRICS]
        cells += [f"{1000 * row.bonds[0]:.2f}", f"{row.bonds[1]:.3f}", f"{row.mixed:.4f}", f"{row.turned:.4f}"]
        cells.append(f"{np.mean([a['rows'] for a in row.about]):,.0f}" if row.about else "")
        lines.append("| " + " | ".join([row.name, *cells]) + " |")
    for name, values in PAPER[peptide.name].items():
        lines.append("| " + " | ".join([f"paper: {name}", *(f"{v:.3f}" for v in values), *[""] * 6]) + " |")
    return "\n".join(lines) + "\n"


def _cell(row: Result, metric: str) -> str:
    mean, error = score(row, metric)
    if not np.isfinite(mean):
        empty = sum(not np.isfinite(m[metric]) for m in row.metrics)
        return f"a basin empty in {empty} of {len(row.metrics)}" if metric == "dF" else "not finite"
    return f"{mean:.3f}" + (f" +- {error:.3f}" if np.isfinite(error) else "")


def write(rows: list[Row], cold: Truth, folder: Path) -> None:
    """`table.md`, `results.json`, figures, and `METHOD.xtc` beside `topology.pdb`."""
    folder.mkdir(parents=True, exist_ok=True)
    publish(folder / "table.md", table(rows, cold.peptide).encode())
    facts = [
        {
            "method": r.name,
            "metrics": r.metrics,
            "mixed": r.mixed,
            "turned": r.turned,
            "bonds": r.bonds,
            "about": r.about,
        }
        for r in rows
    ]
    publish(folder / "results.json", json.dumps(facts, indent=1).encode())
    topology = mdtraj.Topology.from_openmm(cold.peptide.topology)
    mdtraj.Trajectory(cold.reference, topology).save_pdb(str(folder / "topology.pdb"))
    for row in rows:
        some = row.samples[np.linspace(0, len(row.samples) - 1, min(1000, len(row.samples))).astype(int)]
        centred = mdtraj.Trajectory(some, topology).superpose(mdtraj.Trajectory(cold.reference, topology))
        centred.save_xtc(str(folder / f"{file_name(row.name)}.xtc"))
    draw(rows, cold, folder)


def draw(rows: list[Row], cold: Truth, folder: Path) -> None:
    """Ramachandran and TICA planes side by side, and the energies of all methods in one panel."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = [r for r in rows if r.name != UNTEMPERED]
    quadruples = backbone(cold.peptide.atoms)
    planes = {
        "ramachandran": lambda x: np.degrees(
            np.stack([dihedrals(x, quadruples[k]).flatten() for k in ("phi", "psi")], 1)
        ),
        "tica": cold.plane,
    }
    for name, plane in planes.items():
        points = [plane(r.samples[:: max(1, len(r.samples) // 50_000)]) for r in shown]
        edges = [np.linspace(-180, 180, 73)] * 2
        if name == "tica":
            edges = [np.linspace(points[0][:, k].min(), points[0][:, k].max(), 73) for k in (0, 1)]
        columns = min(4, len(shown))
        lines = -(-len(shown) // columns)
        figure, axes = plt.subplots(
            lines, columns, figsize=(3 * columns, 2.9 * lines), squeeze=False, sharex=True, sharey=True
        )
        for axis, row, p in zip(axes.flat, shown, points, strict=False):
            density, *_ = np.histogram2d(p[:, 0], p[:, 1], bins=edges, density=True)
            with np.errstate(divide="ignore"):
                free = -np.log(density.T / density.max())
            axis.pcolormesh(*edges, np.where(np.isfinite(free), free, np.nan), cmap="viridis", vmin=0, vmax=8)
            axis.set_title("dynamics" if row.name == HALVES else row.name, fontsize=9)
        for axis in axes.flat[len(shown) :]:
            axis.axis("off")
        figure.supxlabel("phi" if name == "ramachandran" else "first slow coordinate", fontsize=9)
        figure.supylabel("psi" if name == "ramachandran" else "second slow coordinate", fontsize=9)
        figure.tight_layout()
        figure.savefig(folder / f"{name}.png", dpi=130)
        plt.close(figure)
    figure, axis = plt.subplots(figsize=(6, 3.5))
    for row in (r for r in shown if r.name not in ABLATIONS):
        values = energies(cold.peptide, row.samples[:: max(1, len(row.samples) // 5000)])
        if row.name == HALVES:
            low, high = np.percentile(values, [0.1, 99.9])
            bins = np.linspace(low - 0.2 * (high - low), high + 0.4 * (high - low), 80).tolist()
        style: dict[str, Any] = {"color": "black", "lw": 2} if row.name == HALVES else {"lw": 1.2}
        share = np.full(
            len(values), 1 / (len(values) * (bins[1] - bins[0]))
        )  # what lies outside is missing, not hidden
        axis.hist(values, bins=bins, weights=share, histtype="step", label=row.name, **style)
    axis.set_xlabel("U (kJ/mol)")
    axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(folder / "energy.png", dpi=130)
    plt.close(figure)
