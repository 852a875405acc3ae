"""The ratio of CREPE against the known energy, at level 0.

    log p(x) ~ log E_up[exp(L(path)) N(x_T)]        of the hot model, by walks up from a frame x of the dynamics
    D(x)     = log p(x) + U(x) / k T_hot            a constant, if model and ratio are right

Replica exchange only ever compares values of L, so D shows whether what it compares is the energy. Frames of the *cold*
dynamics follow `exp(-U / k T_cold)`, and `exp(beta D)` re-weights them to the law `p^beta` that is sampled: shares of
basins under these weights are those of a perfect sampler of this model. A sampler that has them is right, and what then
differs from the dynamics is the model's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.models import Denoiser
from crepe_diffusion.paths import walk
from crepe_diffusion.processes import Gaussian
from crepe_diffusion.samplers.setup import prepare
from studies.molecules.convergence import BASINS, basins
from studies.molecules.peptides import GAS_CONSTANT, Peptide, energies
from studies.shared.pages import markdown

__all__ = ["Check", "check", "log_densities", "reweighted", "table"]

NAMES = tuple(basin.name for basin in BASINS[:3])  # those of the Ramachandran plane: phi > 0, beta, alpha
BETA = NAMES.index("beta")
GROUP = 500  # frames whose walks share a batch
N_BOOTSTRAP = 200


def log_densities(
    model: Denoiser, x: Tensor, ladder: cd.Ladder, n_walks: int, process: Gaussian, seed: int = 0
) -> tuple[Tensor, int]:
    """`L(path) + log N(x_T)` of walks up from every row, (rows, walks), but for a constant; and network rows.

    The mean of the exponential over walks is `p(x)` of the discretised model.
    """
    evaluate = prepare(
        model, ladder, cd.Stream(seed).at("setup"), process=process, proposal=None, micro_batch=None, nonfinite="raise",
        fit_samples=512,
    )  # fmt: skip
    top, n_steps = float(ladder.times[-1]), len(ladder.times) - 1
    variance = top**2 + float(x.square().sum((1, 2)).mean()) / (x[0].numel() - 3)
    out = torch.empty(len(x), n_walks, dtype=torch.float64)
    for first in range(0, len(x), GROUP):
        rows = x[first : first + GROUP]
        seen = evaluate(rows, ladder.times[:1].expand(len(rows)))
        index, up = torch.zeros(len(rows), dtype=torch.long), torch.ones(len(rows), dtype=torch.long)
        for k in range(n_walks):
            path = walk(evaluate, rows, seen, index, up, n_steps, cd.Stream(seed).at(first, k))
            out[first : first + GROUP, k] = path.models[0] - path.x.square().sum((1, 2)) / (2 * variance)
    return out, evaluate.counts.rows


@dataclass(frozen=True)
class Check:
    """What the frames of one temperature show, for the basins phi > 0, beta and alpha.

    `slope` of `log p` over `-U / k T_hot` (1 if right); `scatter`, the standard deviation of D, and the part of it that
    is the `noise` of walks. `counts`: frames of a basin; `gaps`: the mean of D there less that of beta, with `errors`;
    `shares` in the dynamics, and as a perfect sampler of the model would have them, with errors.
    """

    slope: float
    scatter: float
    noise: float
    counts: list[int]
    gaps: list[float]
    errors: list[float]
    shares: list[float]
    implied: list[float]
    implied_errors: list[float]
    rows: int


def check(
    model: Denoiser,
    peptide: Peptide,
    frames: np.ndarray,
    temperature: float,
    ladder: cd.Ladder,
    process: Gaussian,
    *,
    per_basin: int,
    n_walks: int,
    seed: int = 0,
) -> Check:
    """Compare the model's densities of frames that were drawn at this temperature with their energies.

    As many frames of each basin, so that rare ones are known as well; their shares come from all frames.
    """
    inside = basins(frames, peptide)[:, : len(NAMES)]
    rng = np.random.default_rng(seed)
    chosen = [np.flatnonzero(inside[:, k] == 1) for k in range(len(NAMES))]
    chosen = [rng.permutation(rows)[:per_basin] for rows in chosen]
    x = frames[np.concatenate(chosen)]
    log_p, n_rows = log_densities(model, torch.from_numpy(x).float(), ladder, n_walks, process, seed)
    whole, halves = log_mean_exp(log_p.numpy()), [log_mean_exp(log_p[:, k::2].numpy()) for k in (0, 1)]
    # The logarithm of a mean over few walks is too low, by twice as much for half of them; basins differ in that.
    mean, energy = 2 * whole - (halves[0] + halves[1]) / 2, -energies(peptide, x) / (GAS_CONSTANT * peptide.hot)
    noise = np.std(halves[0] - halves[1]) / 2  # what walks alone add to the scatter
    d = np.split(mean - energy, np.cumsum([len(rows) for rows in chosen])[:-1])
    shares, beta = inside.mean(0), peptide.hot / temperature
    gaps = _gaps(d)
    again = [_gaps([part[rng.integers(len(part), size=len(part))] for part in d]) for _ in range(N_BOOTSTRAP)]
    return Check(
        slope=float(np.polyfit(energy, mean, 1)[0]),
        scatter=float(np.sqrt(np.average([part.var() for part in d if len(part)]))),
        noise=float(noise),
        counts=[len(part) for part in d],
        gaps=gaps.tolist(),
        errors=np.std(again, 0).tolist(),
        shares=shares.tolist(),
        implied=reweighted(shares, gaps, beta).tolist(),
        implied_errors=np.std([reweighted(shares, other, beta) for other in again], 0).tolist(),
        rows=n_rows,
    )


def _gaps(d: list[np.ndarray]) -> np.ndarray:
    """The mean of D in each basin less that in beta; NaN where there is no frame."""
    means = np.array([part.mean() if len(part) else np.nan for part in d])
    return means - means[BETA]


def reweighted(shares: np.ndarray, gaps: np.ndarray, beta: float) -> np.ndarray:
    """Shares of basins under `exp(beta D)`, if D varies as much in each basin and differs by these gaps between them.

    The mean of `exp(beta D)` itself would say more of the tails of D, which are the noise of walks.

    >>> reweighted(np.array([0.2, 0.8]), np.array([np.log(4.0), 0.0]), 1.0).round(3).tolist()
    [0.5, 0.5]
    """
    w = shares * np.exp(beta * np.where(shares > 0, gaps, 0.0))
    return w / w.sum()


def log_mean_exp(values: np.ndarray) -> np.ndarray:
    """Of every row."""
    most = values.max(1, keepdims=True)
    return most[:, 0] + np.log(np.exp(values - most).mean(1))


def table(checks: dict[str, Check]) -> str:
    """One line for each, with the names of the settings."""
    head = [
        "frames and setting",
        "slope",
        "scatter of D",
        "of that, walks",
        *(f"gap of {n}" for n in NAMES if n != "beta"),
    ]
    head += [f"{n}: dynamics, this model (%)" for n in NAMES]
    lines = []
    for name, c in checks.items():
        cells = [name, f"{c.slope:.3f}", f"{c.scatter:.2f}", f"{c.noise:.2f}"]
        cells += [f"{c.gaps[k]:+.2f} +- {c.errors[k]:.2f}" for k in range(len(NAMES)) if k != BETA]
        for share, implied, error in zip(c.shares, c.implied, c.implied_errors, strict=True):
            cells.append(f"{100 * share:.2f}, {100 * implied:.1f} +- {100 * error:.1f}")
        lines.append(cells)
    return markdown(head, lines)
