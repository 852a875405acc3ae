"""Is it the model? What its error over the torsions at the hot temperature does to basins at the cold one.

    r(phi, psi)  = P_model / P_dynamics           of untempered samples of the model and of hot dynamics
    P(phi, psi)  ~ P_dynamics r^beta              cold, if the model's error depends on the torsions alone

For then `p_model = p_dynamics r`, and raised to `beta` that is `exp(-U / k T_cold) r^beta`. A perfect sampler of the
tempered model has the basins of this law: one that has them is right, and what differs from the dynamics is the
model's. Tempered draws weighted by `r^-beta` should then have the basins of the dynamics. That is a check and no
method, for it needs hot dynamics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from studies.molecules.convergence import BASINS, basins
from studies.molecules.geometry import backbone, dihedrals
from studies.molecules.peptides import Peptide
from studies.shared.pages import markdown

__all__ = ["Sample", "Shares", "check", "predicted", "ratios", "sample", "table"]

NAMES = tuple(basin.name for basin in BASINS[:3])  # those of the Ramachandran plane: phi > 0, beta, alpha
WIDTHS = (30, 20, 15)  # degrees: the answer should not depend on them
N_BOOTSTRAP = 200


@dataclass(frozen=True)
class Sample:
    """Torsions (rows, 2) in degrees, the basin of each row, and its family of relatives."""

    angles: np.ndarray
    basin: np.ndarray
    family: np.ndarray

    def counts(self, width: int, weight: np.ndarray | None = None) -> np.ndarray:
        """Rows in each basin and square of this width, (basins, squares), each row counted with its weight."""
        n = (360 // width) ** 2
        flat = np.bincount(self.basin * n + self.cells(width), weight, minlength=len(NAMES) * n)
        return flat.reshape(len(NAMES), n).astype(float)

    def cells(self, width: int) -> np.ndarray:
        """The number of the square that each row lies in."""
        n = 360 // width
        i, j = (np.floor((self.angles + 180) / width).astype(int) % n).T
        return i * n + j

    def again(self, rng: np.random.Generator) -> np.ndarray:
        """How often each row is in the sample if families are drawn with replacement."""
        n = self.family.max() + 1
        return np.bincount(rng.integers(n, size=n), minlength=n)[self.family]


def sample(x: np.ndarray, family: np.ndarray, peptide: Peptide) -> Sample:
    """Of molecules (rows, atoms, 3) with one residue."""
    quadruples = backbone(peptide)
    angles = np.stack([np.degrees(dihedrals(x, quadruples[name])[:, 0]) for name in ("phi", "psi")], 1)
    return Sample(angles, basins(x, peptide)[:, : len(NAMES)].argmax(1), np.unique(family, return_inverse=True)[1])


def ratios(model: np.ndarray, hot: np.ndarray) -> np.ndarray:
    """`r` in each square, from counts (squares,); 1 where one of them is empty, for hardly anything cold is there.

    >>> ratios(np.array([60, 30, 10, 0]), np.array([25, 25, 0, 50])).round(2).tolist()
    [2.4, 1.2, 1.0, 1.0]
    """
    known = (model > 0) & (hot > 0)
    return np.divide(model / model.sum(), hot / hot.sum(), out=np.ones(len(hot)), where=known)


def predicted(model: np.ndarray, hot: np.ndarray, cold: np.ndarray, power: float) -> np.ndarray:
    """Shares of basins under `P_cold r^power`, from counts (squares,), those of the cold sample (basins, squares).

    >>> cold = np.array([[80.0, 0.0], [0.0, 20.0]])
    >>> predicted(np.array([60, 30]), np.array([50, 50]), cold, 2.0).round(3).tolist()
    [0.941, 0.059]
    """
    w = (cold * ratios(model, hot) ** power).sum(1)
    return w / w.sum()


@dataclass(frozen=True)
class Shares:
    """Of phi > 0, beta and alpha, with errors: by a bootstrap over families of all samples that come in."""

    name: str
    values: list[float]
    errors: list[float]


def check(
    model: Sample, hot: Sample, cold: Sample, tempered: Mapping[str, Sample], beta: float, seed: int = 0
) -> list[Shares]:
    """What the model's error predicts at each width of the squares, what methods have, and what is left of it.

    Noise of a count n makes `r^beta` too large by `beta (beta - 1) / 2n` on average: twice the value less the mean of
    its bootstrap is without that.
    """
    rng, out = np.random.default_rng(seed), []

    def shares(name: str, value: np.ndarray, again: list[np.ndarray]) -> None:
        out.append(Shares(name, (2 * value - np.mean(again, 0)).tolist(), np.std(again, 0).tolist()))

    def by_weights(of: Sample, power: float, width: int) -> tuple[np.ndarray, list[np.ndarray]]:
        parts = (model, hot, of)
        value = _predict([part.counts(width) for part in parts], power)
        again = [_predict([p.counts(width, p.again(rng)) for p in parts], power) for _ in range(N_BOOTSTRAP)]
        return value, again

    for name, of in (("dynamics, hot", hot), ("model, hot", model), ("dynamics, cold", cold)):
        shares(name, *by_weights(of, 0.0, WIDTHS[0]))
    for width in WIDTHS:
        shares(f"predicted by r, squares of {width} degrees", *by_weights(cold, beta, width))
    for name, of in tempered.items():
        shares(name, *by_weights(of, 0.0, WIDTHS[0]))
        shares(f"{name}, weighted by r^-beta", *by_weights(of, -beta, WIDTHS[1]))
    return out


def _predict(counts: list[np.ndarray], power: float) -> np.ndarray:
    model, hot, cold = counts
    return predicted(model.sum(0), hot.sum(0), cold, power)


def table(found: list[Shares]) -> str:
    """One line for each, in percent."""
    lines = []
    for s in found:
        lines.append([s.name, *(f"{100 * v:.2f} +- {100 * e:.2f}" for v, e in zip(s.values, s.errors, strict=True))])
    return markdown(["sample", *(f"{name} (%)" for name in NAMES)], lines)
