"""How far samples of a molecule are from molecular dynamics.

energy, distance   TV = 1/2 sum_b |p_b - q_b|          on 200 bins that span the truth, and what falls outside them
W2                 min_P sum_ij P_ij |x_i - y_j|^2      its root, after superposition on one reference (POT)
TICA MMD           |E k(a, .) - E k(b, .)|              in the plane of the two slowest torsional motions
TICA MMD^2         its square, summed over five kernels
dF                 -kT log P(phi > 0) / P(phi <= 0)     between the basins of the Ramachandran plane
populations        shares of basins and of clashes,     with errors by families of draws
                   mean and sd of U of the others

A distance of two samples of the same law is not zero. `between_halves` gives it for the truth itself. 200 bins hold so
few of 5,000 samples each that the energy TVD of the truth to itself is as large as that of good samples; `COARSE` bins
have a fifth of that floor. Populations have errors instead of a floor.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import ot
from deeptime.decomposition import TICA
from scipy.spatial.distance import cdist, pdist

from crepe_diffusion import InputError
from studies.molecules.convergence import BASINS, basins
from studies.molecules.dynamics import BLOCK
from studies.molecules.geometry import aligned, backbone, dihedrals, distances
from studies.molecules.peptides import GAS_CONSTANT, Peptide, energies

__all__ = [
    "METRICS",
    "Truth",
    "between_halves",
    "by_families",
    "evaluate",
    "free_energy",
    "mmd",
    "mmd_squares",
    "populations",
    "total_variation",
    "w2",
]

METRICS = ("energy TVD", "distance TVD", "W2", "TICA MMD^2", "TICA MMD", "dF")
COARSE_TVD = "energy TVD, 20 bins"
BINS, COARSE = 200, 20  # as in Akhound-Sadegh et al. (2024), and few enough to tell laws apart
LAG = 8  # frames, the paper's
KERNELS = 5
CLASH = 20
"""Standard deviations above the mean of the dynamics: energies beyond them are of atoms on top of one another."""


def total_variation(truth: np.ndarray, samples: np.ndarray, bins: int = BINS) -> float:
    """Between histograms whose bins span the truth; samples outside them count as wrong, not as absent."""
    counts, edges = np.histogram(truth, bins=bins)
    p, q = counts / np.size(truth), np.histogram(samples, bins=edges)[0] / np.size(samples)
    return float(0.5 * (np.abs(p - q).sum() + 1 - q.sum()))


def w2(x: np.ndarray, y: np.ndarray) -> float:
    """The Wasserstein distance of two sets of aligned molecules, exact for the samples given."""
    cost = cdist(x.reshape(len(x), -1), y.reshape(len(y), -1), "sqeuclidean")
    uniform = [np.full(n, 1 / n) for n in cost.shape]
    return float(np.sqrt(ot.emd2(*uniform, cost, numItermax=10_000_000)))


def mmd_squares(a: np.ndarray, b: np.ndarray, bandwidth: float) -> np.ndarray:
    """`|E k(a, .) - E k(b, .)|^2` for `k = exp(-|a - b|^2 / w h^2)`, w = 4, 2, 1, 1/2, 1/4; biased upwards.

    For two samples of one law, n each, it is `2 (1 - E k) / n` on average: that is the floor.
    """

    def mean_kernels(u: np.ndarray, v: np.ndarray) -> np.ndarray:
        kernel, means = np.exp(-cdist(u, v, "sqeuclidean") / (4 * bandwidth**2)), []
        for _ in range(KERNELS):
            means.append(kernel.mean())
            kernel *= kernel  # half the w
        return np.array(means)

    return mean_kernels(a, a) + mean_kernels(b, b) - 2 * mean_kernels(a, b)


def mmd(squares: np.ndarray) -> float:
    """The maximum mean discrepancy with the one kernel `exp(-|a - b|^2 / 2 h^2)`, from `mmd_squares`."""
    return float(np.sqrt(max(0.0, squares[1])))


def free_energy(x: np.ndarray, peptide: Peptide, temperature: float) -> float:
    """`F(phi > 0) - F(phi <= 0)` in kJ/mol; infinite where one side is empty."""
    p = basins(x, peptide)[:, 0].mean()
    with np.errstate(divide="ignore"):
        return float(-GAS_CONSTANT * temperature * (np.log(p) - np.log1p(-p)))


def torsion_features(x: np.ndarray, peptide: Peptide) -> np.ndarray:
    """Sines and cosines of phi and psi, (rows, 4 residues)."""
    quadruples = backbone(peptide)
    angles = np.concatenate([dihedrals(x, quadruples[name]) for name in ("phi", "psi")], 1)
    return np.concatenate([np.cos(angles), np.sin(angles)], 1)


@dataclass
class Truth:
    """Dynamics at one temperature, and what metrics fit on it: the slow torsional plane, its bandwidth, a reference.

    `trajectories` are (frames, atoms, 3), of which every `BLOCK` frames are continuous in time.
    """

    peptide: Peptide
    temperature: float
    trajectories: list[np.ndarray]
    frames: np.ndarray = field(init=False)
    bandwidth: float = field(init=False)
    clash: float = field(init=False)
    reference: np.ndarray = field(init=False)
    halves: tuple[np.ndarray, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        self.frames = np.concatenate(self.trajectories)
        self.reference = self.frames[0]
        middle = [len(t) // 2 for t in self.trajectories]
        self.halves = (
            np.concatenate([t[:m] for t, m in zip(self.trajectories, middle, strict=True)]),
            np.concatenate([t[m:] for t, m in zip(self.trajectories, middle, strict=True)]),
        )
        features = [torsion_features(t, self.peptide) for t in self.trajectories]
        pieces = [f[i : i + BLOCK] for f in features for i in range(0, len(f) - LAG, BLOCK)]
        pieces = [p for p in pieces if len(p) > LAG]
        if not pieces:
            raise InputError(f"the truth needs more than {LAG} continuous frames, got {len(self.frames)} in all")
        # Pieces are short, so pairs of frames are made here: deeptime would only see the first piece's length.
        now, later = (np.concatenate([p[cut] for p in pieces]) for cut in (slice(None, -LAG), slice(LAG, None)))
        self._tica = TICA(dim=2).fit((now, later)).fetch_model()
        rows = np.random.default_rng(0).choice(len(self.frames), min(2000, len(self.frames)), replace=False)
        self.bandwidth = float(np.median(pdist(self.plane(self.frames[rows]))))
        u = energies(self.peptide, self.frames[rows])
        self.clash = float(u.mean() + CLASH * u.std())

    def plane(self, x: np.ndarray) -> np.ndarray:
        """The two slowest torsional coordinates of molecules, (rows, 2)."""
        return np.asarray(self._tica.transform(torsion_features(x, self.peptide)))


def evaluate(
    truth: Truth, frames: np.ndarray, samples: np.ndarray, n: int, rng: np.random.Generator
) -> dict[str, float]:
    """Every metric between n random frames and n random samples."""
    x, y = (v[rng.choice(len(v), min(n, len(v)), replace=False)] for v in (frames, samples))
    peptide = truth.peptide
    u, v = energies(peptide, x), energies(peptide, y)
    squares = mmd_squares(truth.plane(x), truth.plane(y), truth.bandwidth)
    return {
        "energy TVD": total_variation(u, v),
        COARSE_TVD: total_variation(u, v, COARSE),
        "distance TVD": total_variation(distances(x), distances(y)),
        "W2": w2(aligned(x, truth.reference), aligned(y, truth.reference)),
        "TICA MMD^2": float(squares.sum()),
        "TICA MMD": mmd(squares),
        "dF": free_energy(y, peptide, truth.temperature) - free_energy(x, peptide, truth.temperature),
    }


def by_families(values: np.ndarray, family: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Means of values (draws, n), their standard errors and effective sizes, where draws of a family are relatives.

    Relatives may be correlated in any way: `error^2 = sum_g (sum_{i in g} (f_i - mean))^2 / n^2`, times `G / (G - 1)`
    for G families.

    >>> mean, error, size = by_families(np.array([[0.0], [0.0], [1.0], [1.0]]), np.array([0, 0, 1, 1]))
    >>> mean.tolist(), error.tolist(), size.tolist()
    ([0.5], [0.5], [1.0])
    """
    label = np.unique(family, return_inverse=True)[1]
    mean, n_families = values.mean(0), label.max() + 1
    sums = np.stack([np.bincount(label, column) for column in (values - mean).T], 1)
    if n_families < 2:
        return mean, np.full_like(mean, np.inf), np.zeros_like(mean)
    error = np.sqrt(n_families / (n_families - 1) * (sums**2).sum(0)) / len(values)
    return mean, error, np.divide(values.var(0), error**2, out=np.zeros_like(mean), where=error > 0)


def populations(
    x: np.ndarray, family: np.ndarray, peptide: Peptide, n: int, rng: np.random.Generator, clash: float = np.inf
) -> dict[str, tuple[float, float, float]]:
    """Mean, error and effective size of the share of each basin, of clashes, and of the energy, and its spread.

    Energies are those of n random draws. Where two atoms meet, one draw decides the mean of all: draws with energies
    from `clash` on are counted, and left out of `U`. The error of the standard deviation is that of the mean of
    squares, by the delta method.
    """
    shares = np.stack(by_families(basins(x, peptide), family), 1)
    rows = rng.choice(len(x), min(n, len(x)), replace=False)
    u = energies(peptide, x[rows])
    clashes = ~(u < clash)
    found = {basin.name: tuple(row) for basin, row in zip(BASINS, shares.tolist(), strict=True)}
    found |= {"clashes": tuple(float(v[0]) for v in by_families(clashes[:, None].astype(float), family[rows]))}
    if clashes.all():
        nothing = (float("nan"),) * 3
        return found | {"U": nothing, "sd of U": nothing}
    u, rows = u[~clashes], rows[~clashes]
    (mean, _), error, size = by_families(np.stack([u, (u - u.mean()) ** 2], 1), family[rows])
    found |= {"U": (mean, error[0], size[0]), "sd of U": (u.std(), error[1] / (2 * u.std()), size[1])}
    return {name: (float(a), float(b), float(c)) for name, (a, b, c) in found.items()}


def between_halves(truth: Truth, n: int, rng: np.random.Generator) -> dict[str, float]:
    """The same metrics between the two halves of the truth: no sampler can be expected to do better."""
    return evaluate(truth, *truth.halves, n, rng)
