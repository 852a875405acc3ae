"""The ratio of a path against densities that are known."""

from __future__ import annotations

import math

import numpy as np
import torch

import crepe_diffusion as cd
from crepe_diffusion.models import EDM
from crepe_diffusion.processes import Gaussian
from studies.molecules import model, ratio

SCALE, LOW = 0.2, 0.01


class Nothing(torch.nn.Module):
    def forward(self, y, c_noise):
        return torch.zeros_like(y)


def error_of_log_density(variance: str | float) -> torch.Tensor:
    """How far walks are from `log p` of four Gaussian atoms, but for a constant, (rows, walks)."""
    gaussian = model.denoiser(EDM(Nothing(), SCALE), 4)
    x = SCALE * torch.randn(200, 4, 3, generator=torch.Generator().manual_seed(0))
    x = x - x.mean(1, keepdim=True)
    levels = cd.ladder.geometric(3, LOW, 1.5, substeps=5)
    log_p, rows = ratio.log_densities(gaussian, x, levels, 4, Gaussian(zero_mean=0, variance=variance))
    assert rows == 200 * (1 + 4 * 10)
    exact = -x.double().square().sum((1, 2)) / (2 * (SCALE**2 + LOW**2))
    error = log_p - exact[:, None]
    return error - error.mean()


def test_walks_give_the_density_of_gaussian_atoms():
    """The variance of Gaussian data makes every step exact. Left is the scale at the noise end, known to 2 %."""
    assert float(error_of_log_density(SCALE).abs().max()) < 0.01
    assert float(error_of_log_density(math.inf).std()) > 0.3  # steps as wide as the noise are not


def test_weights_by_the_gap_give_back_the_shares():
    """A hot model that is off by D, raised to beta, has the shares of frames that are weighted by `exp(beta D)`."""
    rng, shares, gaps, beta = np.random.default_rng(0), np.array([0.05, 0.7, 0.25]), np.array([0.4, 0.0, -0.3]), 8 / 3
    basin = rng.choice(3, size=400_000, p=shares)
    w = np.exp(beta * (gaps[basin] + 0.2 * rng.standard_normal(len(basin))))
    weighted = np.bincount(basin, w) / w.sum()
    assert np.abs(ratio.reweighted(shares, gaps, beta) - weighted).max() < 0.005
    assert np.abs(ratio.reweighted(shares, gaps, 1.0) - weighted).max() > 0.05  # a hot model raised to no power


def test_a_basin_without_frames_has_no_share():
    assert ratio.reweighted(np.array([0.0, 1.0]), np.array([np.nan, 0.0]), 1.0).tolist() == [0.0, 1.0]
