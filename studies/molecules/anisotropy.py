"""What one variance for all directions does to the basins of a tempered law.

    A_t(x)  = -t^2 Hessian of log p_t          how stiff the law is, direction by direction; a its mean eigenvalue
    K(x)    = sum over steps of (d/t^2)^2 |A_t - a|^2 / 4         Frobenius norm
    p^beta  becomes  p^beta exp(beta (beta - 1) K)                to first order in the size of the steps

A denoising step of the true law has the covariance `d - d^2 A_t / t^2`, and the kernel `d - d^2 a / t^2` everywhere.
The logarithm of their ratio has the mean -KL and the variance 2 KL, where KL is the divergence of the two, a term of K;
its exponential to the power beta has the mean `exp(beta (beta - 1) KL)`. Nothing happens to the model itself
(beta = 1). Raised to a power, a basin that is less isotropic than others comes out too large. K halves with steps of
half the size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from crepe_diffusion.models import Denoiser
from studies.molecules.convergence import basins
from studies.molecules.peptides import Peptide
from studies.molecules.ratio import BETA, NAMES, reweighted
from studies.shared.pages import markdown

__all__ = ["Check", "check", "deviations", "divergences", "stiffness", "table"]

GRID = 41  # noise levels, equally spaced in the logarithm, at which the stiffness is measured
GROUP = 500  # frames in a batch


def stiffness(model: Denoiser, x: Tensor, t: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The trace and the squared norm of `A_t` at `x + t noise`, (rows,), by one random direction for each row.

    `A_t = 1 - dD/dx` inside the subspace of the process; unbiased, with an error of several per cent a row.
    """
    project = model.process().project
    sign = (torch.randint(0, 2, x.shape, generator=generator) * 2 - 1).to(x)
    y, z = x + t * project(torch.randn(x.shape, generator=generator).to(x)), project(sign)
    traces, squares = [], []
    for some, way in zip(y.split(GROUP), z.split(GROUP), strict=True):
        with torch.enable_grad():
            at = some.clone().requires_grad_(True)
            prediction = model.predict(at, torch.full((len(at),), t, dtype=at.dtype))
            (pulled,) = torch.autograd.grad((prediction * way).sum(), at)
        along = way - project(pulled)
        traces.append((along * way).flatten(1).sum(1))
        squares.append(along.square().flatten(1).sum(1))
    return torch.cat(traces), torch.cat(squares)


def deviations(traces: np.ndarray, squares: np.ndarray, mean: np.ndarray, dimension: int) -> np.ndarray:
    """`|A_t - a|^2` of rows at each level, (levels, rows), where `mean` (levels,) holds a."""
    return squares - 2 * mean[:, None] * traces + dimension * mean[:, None] ** 2


def divergences(deviation: np.ndarray, grid: np.ndarray, times: np.ndarray) -> np.ndarray:
    """K of every row, from deviations (levels, rows) on a grid of noise; `times` are those of the steps."""
    share = 1 - (times[:-1] / times[1:]) ** 2
    place = np.interp(np.log(times[1:]), np.log(grid), np.arange(len(grid)))
    weight = np.zeros(len(grid))
    low = np.minimum(place.astype(int), len(grid) - 2)
    np.add.at(weight, low, (1 - (place - low)) * share**2 / 4)
    np.add.at(weight, low + 1, (place - low) * share**2 / 4)
    return weight @ deviation


@dataclass(frozen=True)
class Check:
    """For the basins phi > 0, beta and alpha: K, with errors, and shares of the frames as the steps change them."""

    divergences: list[float]
    errors: list[float]
    shares: list[float]
    implied: list[float]
    implied_errors: list[float]


def check(
    model: Denoiser, peptide: Peptide, frames: np.ndarray, times: np.ndarray, *, per_basin: int, seed: int = 0
) -> Check:
    """What steps between these times do to the basins of cold frames, by the stiffness at as many frames of each."""
    inside = basins(frames, peptide)[:, : len(NAMES)]
    shares, rng = inside.mean(0), np.random.default_rng(seed)
    chosen = [rng.permutation(np.flatnonzero(inside[:, k] == 1))[:per_basin] for k in range(len(NAMES))]
    x, generator = torch.from_numpy(frames[np.concatenate(chosen)]).float(), torch.Generator().manual_seed(seed)
    grid = np.geomspace(times[0], times[-1], GRID)
    found = [stiffness(model, x, float(t), generator) for t in grid]
    traces, squares = (np.stack([part.double().numpy() for part in of]) for of in zip(*found, strict=True))
    n = x[0].numel() - 3  # a molecule does not move as a whole
    ends = np.cumsum([len(rows) for rows in chosen])[:-1]
    parts = np.split(traces, ends, 1)
    mean = sum(s * part.mean(1) for s, part in zip(shares, parts, strict=True) if part.shape[1]) / n
    by_basin = np.split(divergences(deviations(traces, squares, mean, n), grid, times), ends)
    k = np.array([part.mean() if len(part) else np.nan for part in by_basin])
    error = np.array([part.std() / np.sqrt(len(part)) if len(part) else np.nan for part in by_basin])
    power = peptide.beta * (peptide.beta - 1)
    again = [reweighted(shares, k + error * rng.standard_normal(len(k)), power) for _ in range(400)]
    implied = reweighted(shares, k - k[BETA], power)
    return Check(*(v.tolist() for v in (k, error, shares, implied, np.std(again, 0))))


def table(checks: dict[str, Check]) -> str:
    """One line for each, with the names of the settings."""
    head = ["steps", *(f"K of {n}" for n in NAMES), *(f"{n}: dynamics, these steps (%)" for n in NAMES)]
    lines = []
    for name, c in checks.items():
        cells = [name, *(f"{k:.3f} +- {e:.3f}" for k, e in zip(c.divergences, c.errors, strict=True))]
        for share, implied, error in zip(c.shares, c.implied, c.implied_errors, strict=True):
            cells.append(f"{100 * share:.2f}, {100 * implied:.2f} +- {100 * error:.2f}")
        lines.append(cells)
    return markdown(head, lines)
