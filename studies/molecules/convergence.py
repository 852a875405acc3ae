"""Has molecular dynamics seen enough? Populations of torsional basins, between halves and between walkers.

    z = (p_first - p_second) / sqrt(var_first + var_second)

The walker is the unit. Its rungs of one temperature share their replicas, which change places at every block: a replica
that leaves one file goes on in another, so files are neither continuous nor independent. Their average, frame by frame,
is a series in time, and variances come from batch means of it over pieces much longer than it remembers. Walkers share
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from studies.molecules.dynamics import BLOCK, INTERVAL
from studies.molecules.geometry import backbone, dihedrals
from studies.molecules.peptides import Peptide

__all__ = ["BASINS", "Basin", "basins", "compare", "examine", "pooled", "transitions", "verdict"]

N_BATCHES = 10
NOTABLE = 0.005  # a share of the frames below which a basin hardly shows in any metric
ENOUGH = 200  # changes of sign: 100 visits leave a basin's population uncertain by about a tenth


@dataclass(frozen=True)
class Basin:
    """A region of the Ramachandran plane (degrees), or of omega."""

    name: str
    text: str


BASINS = (
    Basin("phi > 0", "0 < phi < 125: left-handed helix and C7ax"),
    Basin("beta", "phi <= 0 or phi >= 125, and not alpha"),
    Basin("alpha", "phi <= 0 or phi >= 125, -120 < psi < 50"),
    Basin("cis", "an omega nearer to 0 than to 180"),
)


def examine(walkers: list[list[np.ndarray]], peptide: Peptide) -> dict[str, Any]:
    """The populations of basins in the walkers at one temperature, as JSON takes it.

    A walker is the list of its rungs' trajectories (frames, atoms, 3) there, of which each begins with a block.
    `z_walkers` is the largest |z| of all pairs, and None for a single walker.
    """
    walkers = [[t[: min(map(len, rungs))] for t in rungs] for rungs in walkers]  # `md` may be writing a block
    phi = backbone(peptide)["phi"]
    crossings = sum(transitions(dihedrals(t, phi)[:, k]) for rungs in walkers for t in rungs for k in range(len(phi)))
    inside = [np.stack([basins(t, peptide) for t in rungs]) for rungs in walkers]
    share, variance = pooled(inside)
    error = np.sqrt(variance)
    middle = [w.shape[1] // 2 for w in inside]
    z_halves = compare(
        [w[:, :m] for w, m in zip(inside, middle, strict=True)], [w[:, m:] for w, m in zip(inside, middle, strict=True)]
    )
    z_pairs = [compare([a], [b]) for a, b in combinations(inside, 2)]
    z = np.stack([z_halves, *z_pairs])
    return {
        "n_walkers": len(walkers),
        "n_trajectories": sum(map(len, walkers)),
        "ns": sum(w.shape[0] * w.shape[1] for w in inside) * INTERVAL / 1000,
        "basins": {
            basin.name: {
                "share": float(share[k]),
                "error": float(error[k]),
                "z_halves": float(z_halves[k]),
                "z_walkers": float(np.abs(z[1:, k]).max()) if z_pairs else None,
            }
            for k, basin in enumerate(BASINS)
        },
        "crossings": crossings,
        "verdict": verdict(crossings, z, share, error),
    }


def basins(x: np.ndarray, peptide: Peptide) -> np.ndarray:
    """What share of the residues (or peptide bonds) of each frame is in each basin, (frames, basins).

    phi is cut at 0 and at 125 degrees, where its density is least; zero alone would cut the beta basin, which reaches
    across 180.
    """
    quadruples = backbone(peptide)
    phi, psi, omega = (np.degrees(dihedrals(x, quadruples[name])) for name in ("phi", "psi", "omega"))
    positive = (phi > 0) & (phi < 125)
    helical = ~positive & (psi > -120) & (psi < 50)
    return np.stack([v.mean(1) for v in (positive, ~positive & ~helical, helical, np.abs(omega) < 90)], 1)


def compare(first: list[np.ndarray], second: list[np.ndarray]) -> np.ndarray:
    """z-scores (basins,) between two sets of walkers, or of stretches of them, (rungs, frames, basins) each."""
    (p, var_p), (q, var_q) = pooled(first), pooled(second)
    error = np.sqrt(var_p + var_q)
    return np.divide(p - q, error, out=np.zeros_like(error), where=error > 0)


def pooled(walkers: list[np.ndarray], n_batches: int = N_BATCHES) -> tuple[np.ndarray, np.ndarray]:
    """The mean over all frames of walkers (rungs, frames, basins), and its variance by batch means; (basins,) each.

    Batches are cut in time from the average over a walker's rungs; approximate, and too small by about the ratio of
    memory to batch. Walkers count as independent, rungs do not.
    """
    sizes = np.array([w.shape[0] * w.shape[1] for w in walkers])
    mean, variance = np.zeros(walkers[0].shape[2]), np.zeros(walkers[0].shape[2])
    for weight, walker in zip(sizes / sizes.sum(), walkers, strict=True):
        series = walker.mean(0)
        batches = [b.mean(0) for b in np.array_split(series, n_batches)]
        mean += weight * series.mean(0)
        variance += weight**2 * np.var(batches, axis=0, ddof=1) / n_batches
    return mean, variance


def verdict(crossings: int, z: np.ndarray, share: np.ndarray, error: np.ndarray) -> str:
    """What stands in the way of trusting the populations, or "converged".

    z-scores cannot see a basin that was never entered, or entered once: two halves agree where neither has entered it.
    """
    reasons = (
        [] if crossings >= ENOUGH else [f"phi was seen to change its sign {crossings} times, and should {ENOUGH} times"]
    )
    worst = float(np.abs(z).max())
    if worst > 3:
        reasons.append(f"populations differ by {worst:.1f} standard errors")
    for basin, p, e in zip(BASINS, share, error, strict=False):
        if p > NOTABLE and e > p / 3:
            reasons.append(f"{basin.name} is {p:.3f} +- {e:.3f}, not known to a third of itself")
    return "not converged: " + "; ".join(reasons) if reasons else "converged"


def transitions(phi: np.ndarray) -> int:
    """How often a torsion (frames,), in radians, went from the core of one side to that of the other within a block.

    Cores, not a line: a torsion that trembles on the barrier has not crossed it. A lower bound: from block to block
    replicas take each other's place, so what happens there is not counted, though some of it is a crossing.
    """
    phi = np.degrees(phi)
    side = np.where((phi > 30) & (phi < 100), 1, np.where((phi < -40) | (phi > 150), -1, 0))
    frame = np.flatnonzero(side)
    return int(((np.diff(side[frame]) != 0) & (np.diff(frame // BLOCK) == 0)).sum())
