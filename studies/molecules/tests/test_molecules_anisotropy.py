"""What one variance for all directions does to a tempered law, against laws for which it can be summed exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import crepe_diffusion as cd
from crepe_diffusion.models import Denoiser
from crepe_diffusion.processes import Gaussian
from studies.molecules import anisotropy

SCALES = torch.tensor([0.02, 0.05, 0.1, 0.3, 0.3, 0.4])


def gaussian_law() -> Denoiser:
    def predict(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        share = SCALES.reshape(2, 3) ** 2
        return y * share / (share + (t * t)[:, None, None])

    return Denoiser(predict, (2, 3), process=Gaussian(variance="fisher"))


def excess(times: np.ndarray, beta: float) -> float:
    """`log E[exp(beta (log B - log true))]` of all steps; true ones are normal and independent of each other."""
    s, t = times[:-1, None], times[1:, None]
    d, stiff = t**2 - s**2, t**2 / (t**2 + SCALES.double().numpy() ** 2)
    true, kernel = (d * (1 - d / t**2 * a) for a in (stiff, stiff.mean(1, keepdims=True)))
    return float(0.5 * (beta * np.log(true / kernel) - np.log1p(beta * (true / kernel - 1))).sum())


def first_order(times: np.ndarray, grid: np.ndarray) -> float:
    model, generator = gaussian_law(), torch.Generator().manual_seed(0)
    found = [anisotropy.stiffness(model, torch.zeros(1, 2, 3), float(t), generator) for t in grid]
    traces, squares = (np.stack([part.double().numpy() for part in of]) for of in zip(*found, strict=True))
    deviation = anisotropy.deviations(traces, squares, traces[:, 0] / len(SCALES), len(SCALES))
    return float(anisotropy.divergences(deviation, grid, times)[0])


@pytest.mark.parametrize("beta", [1.5, 8 / 3])
def test_a_tempered_law_is_multiplied_by_the_divergence_of_its_steps(beta: float):
    """Exact for small steps: four times as many leave a quarter of the relative error."""
    errors = []
    for n in (400, 1600):
        times = np.geomspace(0.005, 3.0, n + 1)
        k = first_order(times, np.geomspace(0.005, 3.0, 81))
        errors.append(beta * (beta - 1) * k / excess(times, beta) - 1)
    assert abs(errors[0]) < 0.05
    assert abs(errors[1]) < 0.35 * abs(errors[0])
    assert excess(np.geomspace(0.005, 3.0, 401), 1.0) == pytest.approx(0, abs=1e-12)  # the model itself is left alone


def test_stiffness_is_that_of_the_subspace():
    """Atoms without a common motion: of 3 n directions 3 (n - 1) are left, on average over random ones."""
    model = Denoiser(lambda y, t: 0.25 * y, (4, 3), process=Gaussian(zero_mean=0, variance="fisher"))
    traces, squares = anisotropy.stiffness(model, torch.zeros(4000, 4, 3), 0.1, torch.Generator().manual_seed(0))
    for value, expected in ((traces, 0.75 * 9), (squares, 0.75**2 * 9)):
        error = float(value.std() / len(value) ** 0.5)
        assert abs(float(value.mean()) - expected) < 4 * error < 0.3


def test_one_variance_makes_the_stiffer_mode_too_large():
    """Two modes of equal volume, one isotropic and one not: weights of samples err as predicted."""
    stiff, soft, beta = [0.1] * 4 + [0.4] * 4, [0.2] * 8, 2.5
    means = [[0.0] * 7 + [m] for m in (-2.0, 2.0)]
    law = cd.models.GaussianMixture(weights=[0.5, 0.5], means=means, stds=[stiff, soft])
    levels = cd.ladder.geometric(n_levels=129, sigma_min=0.02, sigma_max=5.0)
    share = []
    for seed in range(4):
        process = Gaussian(variance="fisher")
        out = cd.SMC(law**beta, levels, n_particles=1000, process=process, seed=seed).sample()
        share.append(float(out.mean(lambda x: x[:, 7] < 0).value))
    found = np.log(np.array(share) / (1 - np.array(share)))  # both modes have half of the tempered law
    times, grid, generator = levels.times.numpy(), np.geomspace(0.02, 5.0, 41), torch.Generator().manual_seed(1)
    parts = []
    for mean, std in zip(means, (stiff, soft), strict=True):
        x = torch.tensor(mean) + torch.tensor(std) * torch.randn(500, 8, generator=generator)
        of = [anisotropy.stiffness(law, x, float(t), generator) for t in grid]
        parts.append([np.stack([part.double().numpy() for part in values]) for values in zip(*of, strict=True)])
    a = sum(traces.mean(1) for traces, _ in parts) / 2 / 8
    k = [anisotropy.divergences(anisotropy.deviations(*part, a, 8), grid, times).mean() for part in parts]
    predicted, error = beta * (beta - 1) * (k[0] - k[1]), float(found.std() / 3**0.5)
    # With beta^2 for beta (beta - 1) it would be 0.12 away.
    assert found.mean() > 4 * error
    assert abs(found.mean() - predicted) < 2.5 * error + 0.1 * predicted < 0.1
