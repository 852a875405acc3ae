"""Has molecular dynamics seen enough? Populations of torsional basins, between halves and between walkers.

    z = (p_first - p_second) / sqrt(var_first + var_second)

Variances come from batch means over pieces much longer than a torsion remembers, so frames are not taken for
independent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from crepe_diffusion.experiments.molecules.geometry import backbone, dihedrals

__all__ = ["BASINS", "Basin", "basins", "compare", "transitions", "verdict"]

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


def basins(x: np.ndarray, atoms: tuple[str, ...]) -> np.ndarray:
    """What share of the residues (or peptide bonds) of each frame is in each basin, (frames, basins).

    phi is cut at 0 and at 125 degrees, where its density is least; zero alone would cut the beta basin, which reaches
    across 180.
    """
    quadruples = backbone(atoms)
    phi, psi, omega = (np.degrees(dihedrals(x, quadruples[name])) for name in ("phi", "psi", "omega"))
    positive = (phi > 0) & (phi < 125)
    helical = ~positive & (psi > -120) & (psi < 50)
    return np.stack([v.mean(1) for v in (positive, ~positive & ~helical, helical, np.abs(omega) < 90)], 1)


def compare(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """z-scores (basins,) of two stretches of frames (frames, basins)."""
    gap = first.mean(0) - second.mean(0)
    error = np.sqrt(variance(first) + variance(second))
    return np.divide(gap, error, out=np.zeros_like(gap), where=error > 0)


def variance(frames: np.ndarray, n_batches: int = N_BATCHES) -> np.ndarray:
    """Of the mean of correlated frames (frames, basins), by batch means."""
    batches = np.array_split(frames, n_batches)
    return np.var([b.mean(0) for b in batches], axis=0, ddof=1) / n_batches


def verdict(crossings: int, z: np.ndarray, share: np.ndarray, error: np.ndarray) -> str:
    """What stands in the way of trusting the populations, or "converged".

    z-scores cannot see a basin that was never entered, or entered once: no halves disagree about what neither knows.
    """
    reasons = [] if crossings >= ENOUGH else [f"phi changed its sign {crossings} times, and should {ENOUGH} times"]
    worst = float(np.abs(z).max())
    if worst > 3:
        reasons.append(f"populations differ by {worst:.1f} standard errors")
    for basin, p, e in zip(BASINS, share, error, strict=False):
        if p > NOTABLE and e > p / 3:
            reasons.append(f"{basin.name} is {p:.3f} +- {e:.3f}, not known to a third of itself")
    return "not converged: " + "; ".join(reasons) if reasons else "converged"


def transitions(phi: np.ndarray) -> int:
    """How often a torsion (frames,), in radians, went from one side to the other and stayed beyond its core.

    Cores, not a line: a torsion that trembles on the barrier has not crossed it.
    """
    phi = np.degrees(phi)
    side = np.where((phi > 30) & (phi < 100), 1, np.where((phi < -40) | (phi > 150), -1, 0))
    side = side[side != 0]
    return int((np.diff(side) != 0).sum())
