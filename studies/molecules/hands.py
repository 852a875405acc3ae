"""From what the hand of a molecule can be read under noise: volumes of neighbours, or of atoms farther away.

    y = (x or its mirror image) + sigma noise,      hand ~ sign(sum_c w_c V_c(y))

The weights w are the best linear read-out (least squares) on half of the frames; what is right is counted on the
others.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from studies.molecules.geometry import alphas, bonds, wide_centres
from studies.molecules.network import volumes
from studies.molecules.peptides import Peptide
from studies.shared.pages import markdown

__all__ = ["NOISES", "legible", "table"]

NOISES = (0.03, 0.05, 0.08, 0.12, 0.2)  # nm


def legible(frames: np.ndarray, peptide: Peptide, seed: int = 0) -> dict[float, list[float]]:
    """At each noise, the share of frames whose hand is read rightly, from four sets of volumes (see `table`)."""
    x, generator = torch.from_numpy(frames).float(), torch.Generator().manual_seed(seed)
    near, wide = (torch.from_numpy(centres(bonds(peptide))) for centres in (alphas, wide_centres))
    first = near[0, 0]
    sets = (near[:1], near, wide[wide[:, 0] == first], wide)
    out = {}
    for sigma in NOISES:
        hand = torch.where(torch.rand(len(x), generator=generator) < 0.5, -1.0, 1.0)
        mirror = torch.stack([torch.ones_like(hand), torch.ones_like(hand), hand], 1)[:, None]
        y = x * mirror + sigma * torch.randn(x.shape, generator=generator)
        out[sigma] = [_right(volumes(y, centres), hand) for centres in sets]
    return out


def _right(v: Tensor, hand: Tensor) -> float:
    v, half = v / v.std(0), len(v) // 2
    learn = v[:half]
    ridge = 1e-3 * half * torch.eye(v.shape[1])  # wide volumes are nearly dependent
    w = torch.linalg.solve(learn.T @ learn + ridge, learn.T @ hand[:half])
    return float(((v[half:] @ w) * hand[half:] > 0).double().mean())


def table(found: dict[float, list[float]]) -> str:
    """In percent; 50 is no better than a guess."""
    head = ["noise (nm)", "neighbours of one (%)", "of all (%)", "wide volumes of one (%)", "of all (%)"]
    return markdown(head, [[f"{sigma:g}", *(f"{100 * r:.1f}" for r in right)] for sigma, right in found.items()])
