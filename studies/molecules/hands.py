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

__all__ = ["NOISES", "N_READ", "READ_AT", "legible", "read_out", "table"]

NOISES = (0.03, 0.05, 0.08, 0.12, 0.16, 0.2)  # nm
READ_AT = 0.16
"""The noise (nm) for which `read_out` is the best: at any other it is within half a percent of the best."""


N_READ = 20_000
"""Frames that are enough to fit `read_out`."""


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


def read_out(frames: np.ndarray, peptide: Peptide, sigma: float = READ_AT, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Wide centres and the weights of their volumes that read the hand of frames best under this noise.

    The weighted sum is positive for the hand of the frames, which has to be the same in all.
    """
    x, generator = torch.from_numpy(frames).float(), torch.Generator().manual_seed(seed)
    wide = torch.from_numpy(wide_centres(bonds(peptide)))
    v = volumes(x + sigma * torch.randn(x.shape, generator=generator), wide)
    return wide, _weights(v, torch.ones(len(v)))


def _weights(v: Tensor, hand: Tensor) -> Tensor:
    """By least squares."""
    size = v.square().mean(0).sqrt()
    v = (v / size).double()
    ridge = 1e-3 * len(v) * torch.eye(v.shape[1]).to(v)  # wide volumes are nearly dependent
    return torch.linalg.solve(v.T @ v + ridge, v.T @ hand.to(v)).float() / size


def _right(v: Tensor, hand: Tensor) -> float:
    half = len(v) // 2
    return float(((v[half:] @ _weights(v[:half], hand[:half])) * hand[half:] > 0).double().mean())


def table(found: dict[float, list[float]]) -> str:
    """In percent; 50 is no better than a guess."""
    head = ["noise (nm)", "neighbours of one (%)", "of all (%)", "wide volumes of one (%)", "of all (%)"]
    return markdown(head, [[f"{sigma:g}", *(f"{100 * r:.1f}" for r in right)] for sigma, right in found.items()])
