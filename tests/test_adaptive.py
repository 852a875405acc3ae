"""The default variance: one per coordinate as far as coordinates differ, and no further."""

from __future__ import annotations

import pytest
import torch

import crepe_diffusion as cd
from checks import refuted
from crepe_diffusion.processes import Adaptive, FisherTable, Gaussian, Isotropic
from crepe_diffusion.processes.information import _shrunk

STREAM = cd.Stream(11)
STIFF = 0.05 * 20 ** (torch.arange(15, dtype=torch.float64) / 14)


def scores(scales: torch.Tensor, t: float, n: int) -> torch.Tensor:
    """Scores of Gaussian data of these scales at noise t."""
    return STREAM.normal((n, len(scales))) / (scales.square() + t * t).sqrt()


def near(kind: type, scales: torch.Tensor, bound: float, n: int = 64, t: float = 0.3) -> None:
    truth = t * t / (scales.square() + t * t)
    assert float((kind.of_scores(scores(scales, t, n), t, len(scales)) - truth).square().mean().sqrt()) < bound


def test_equal_scales_get_one_variance_and_stiff_ones_their_own():
    equal = torch.full((30,), 0.5, dtype=torch.float64)
    near(Adaptive, equal, 0.02)
    refuted(near, FisherTable, equal, 0.02)  # 64 samples know each coordinate to 18 %
    near(Adaptive, STIFF, 0.2)
    refuted(near, Isotropic, STIFF, 0.2)


def test_errors_of_predictions_give_what_is_left_of_the_noise():
    """`1 - E[error^2] / t^2` of each coordinate; without noise in the squares nothing is shrunk."""
    error = torch.tensor([[0.1, -0.3], [-0.1, 0.3], [0.1, 0.3]], dtype=torch.float64)
    assert Adaptive.of_errors(error, 0.5, 2).tolist() == pytest.approx([1 - 0.04, 1 - 0.36])


def test_a_zero_mean_subspace_has_one_variance_for_all():
    assert Gaussian(zero_mean=0).to_measure() is Isotropic
    assert Gaussian().to_measure() is Adaptive


def tempered(variance: str) -> cd.samplers.Particles:
    """Two modes with scales from 0.05 to 1, tempered; the second one is narrower by a tenth."""
    means = torch.zeros(2, 16, dtype=torch.float64)
    means[:, 0] = torch.tensor([-1.5, 1.5])
    scales = torch.cat([torch.tensor([0.3], dtype=torch.float64), STIFF])
    p = cd.models.GaussianMixture([0.7, 0.3], means, torch.stack([scales, 0.9 * scales]))
    ladder = cd.ladder.karras(65, 0.02, 10.0)
    process = Gaussian(variance=variance)
    return cd.SMC(p**2.0, ladder, n_particles=256, n_batches=12, process=process, seed=2).sample()


@pytest.fixture(scope="module")
def adaptive() -> cd.samplers.Particles:
    return tempered("auto")


def log_z_is_right(out: cd.samplers.Particles) -> None:
    """`log int p_0^2 - log int p_M^2` from the products of Gaussians, to 0.15: a tenth of what one variance is off."""
    scales = torch.cat([torch.tensor([0.3], dtype=torch.float64), STIFF])

    def log_integral(t: float) -> torch.Tensor:
        variances = torch.stack([scales, 0.9 * scales]).square() + t * t
        terms = []
        for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
            v = variances[i] + variances[j]
            gap = torch.zeros(16, dtype=torch.float64)
            gap[0] = 0.0 if i == j else 3.0
            log_w = torch.tensor([0.7, 0.3], dtype=torch.float64).log()
            terms.append(log_w[i] + log_w[j] - 0.5 * (gap**2 / v + (2 * torch.pi * v).log()).sum())
        return torch.stack(terms).logsumexp(0)

    assert abs(out.log_z.value - float(log_integral(0.02) - log_integral(10.0))) < 0.15


def test_stiff_data_are_right_by_default(adaptive):
    log_z_is_right(adaptive)
    refuted(log_z_is_right, tempered("fisher"))


def test_stiff_coordinates_have_their_variance_by_default(adaptive):
    """The stiffest coordinate, tempered: `1 / (1/v_a + 1/v_b)` of two factors at noise 0.02, within 2 %."""
    share = float(adaptive.mean(lambda x: (x[:, 0] > 0).double()).value)
    v = [(c * float(STIFF[0])) ** 2 + 0.02**2 for c in (1.0, 0.9)]
    truth = (1 - share) * v[0] / 2 + share * v[1] / 2
    found = adaptive.mean(lambda x: x[:, 1] ** 2)
    assert abs(found.value / truth - 1) < 0.02 + 2 * found.error / truth


def test_what_cannot_be_told_apart_gets_one_number():
    """One sample shows no noise, one coordinate no differences, and equal ones have nothing to shrink."""
    squares = torch.tensor([[1.0, 2.0, 6.0], [1.0, 4.0, 10.0]], dtype=torch.float64)
    assert _shrunk(squares[:1]).tolist() == [3.0] * 3
    assert _shrunk(squares[:, :1]).tolist() == [1.0]
    assert _shrunk(torch.ones(4, 3, dtype=torch.float64)).tolist() == [1.0] * 3
    each, mean = squares.mean(0), squares.mean()
    noise, spread = (squares.var(0) / 2).mean(), each.var()
    torch.testing.assert_close(_shrunk(squares), mean + (1 - noise / spread) * (each - mean))
    two = squares[:, :2]
    torch.testing.assert_close(_shrunk(two), two.mean() + (1 - 0.5 / 2) * (two.mean(0) - two.mean()))
