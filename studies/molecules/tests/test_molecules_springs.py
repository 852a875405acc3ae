"""Springs against normal laws with the same covariance, written as matrices, and a stiff law that they make exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributions import MultivariateNormal

import crepe_diffusion as cd
from checks import refuted
from crepe_diffusion import InputError
from crepe_diffusion.models import Denoiser
from crepe_diffusion.processes import Coefficients, Evaluation, Gaussian
from crepe_diffusion.random import Stream
from studies.molecules import steps
from studies.molecules.springs import Network, Springs, strengths
from studies.molecules.tempering import ENDS, Cooling

N = 5
BONDS = torch.tensor([[0, 1], [1, 2], [2, 3], [1, 4]])
MU = torch.tensor([[0, 0, 0], [1.5, 0, 0], [2, 1.4, 0], [3.4, 1.5, 0.4], [2, -1, 1.1]], dtype=torch.float64)
TIMES = torch.tensor([1e-4, 10.0], dtype=torch.float64)
LAW = torch.tensor([3.0, 0.7, -0.4, 0.2], dtype=torch.float64).exp()  # k_0 and the strengths of the three kinds
STIFF = 400.0


def network(strength: torch.Tensor = LAW) -> Network:
    made = Network.of(BONDS.numpy(), MU.float().expand(4, N, 3))
    stiffness = torch.full_like(made.stiffness, STIFF)
    return replace(made, stiffness=stiffness, times=TIMES, strengths=strength.log().expand(2, -1))


def stiffness_of_law() -> torch.Tensor:
    """The precision of the law of which `network` is true at all times, but for the pull of the noise: by hand."""
    out = LAW[0] * torch.eye(3 * N, dtype=torch.float64)
    kinds = {
        (0, 1): 1,
        (1, 2): 1,
        (2, 3): 1,
        (1, 4): 1,
        (0, 2): 2,
        (1, 3): 2,
        (0, 4): 2,
        (2, 4): 2,
        (0, 3): 3,
        (3, 4): 3,
    }
    for (i, j), kind in kinds.items():
        way = torch.zeros(N, 3, dtype=torch.float64)
        u = (MU[i] - MU[j]) / (MU[i] - MU[j]).norm()
        way[i], way[j] = u, -u
        out += LAW[kind] * STIFF * way.flatten()[:, None] * way.flatten()
    return out


def subspace() -> torch.Tensor:
    """Orthonormal directions (3 n - 3, 3 n) in which atoms do not move together."""
    whole = torch.eye(N, dtype=torch.float64)[0] - 1 / N
    turn = torch.linalg.qr(
        torch.cat([torch.ones(N, 1, dtype=torch.float64), torch.eye(N, dtype=torch.float64)[:, 1:]], 1)
    )[0]
    assert abs(float(turn[:, 1:].sum())) < 1e-9 < float(whole.norm())
    return torch.kron(turn[:, 1:].T.contiguous(), torch.eye(3, dtype=torch.float64))


COEFFICIENTS = Coefficients(target=(2.0,), proposal=(2.0,), k_up=0.25, k_down=1.0)


def points(n: int) -> tuple[torch.Tensor, torch.Tensor, Evaluation, Evaluation, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)

    def centred() -> torch.Tensor:
        z = torch.randn(n, N, 3, generator=g, dtype=torch.float64)
        return z - z.mean(1, keepdim=True)

    x_s, x_t = MU - MU.mean(0) + 0.3 * centred(), MU - MU.mean(0) + 0.3 * centred()
    at_s, at_t = (Evaluation((x + 0.1 * centred(),), centred(), torch.zeros(n)) for x in (x_s, x_t))
    s, t = torch.rand(n, generator=g, dtype=torch.float64) * 0.2 + 0.05, torch.full((n,), 0.3, dtype=torch.float64)
    return x_s, x_t, at_s, at_t, s, t


def check_ratios(process: Springs, true: Network) -> None:
    """Normal densities in the subspace, with the covariance written as a matrix and inverted."""
    x_s, x_t, at_s, at_t, s, t = points(6)
    models, proposal = process.kernel_ratios(x_s, x_t, at_s, at_t, s, t, COEFFICIENTS)
    basis = subspace()
    for r in range(len(s)):
        d = t[r] ** 2 - s[r] ** 2
        p = true.precision(at_t.predictions[0][r : r + 1], t[r : r + 1], true.at(t[r : r + 1]))[0]
        inside = basis @ torch.linalg.inv(p) @ basis.T
        eye = torch.eye(len(basis), dtype=torch.float64)
        down = d * s[r] ** 2 / t[r] ** 2 * eye + (d / t[r] ** 2) ** 2 * inside
        score = (at_t.predictions[0][r] - x_t[r]) / t[r] ** 2

        def density(at: torch.Tensor, mean: torch.Tensor, covariance: torch.Tensor) -> torch.Tensor:
            return MultivariateNormal(basis @ mean.flatten(), covariance).log_prob(basis @ at.flatten())

        noising = density(x_t[r], x_s[r], d * eye)
        rise = density(x_t[r], x_s[r] + 0.25 * d * at_s.drift[r], d * eye)
        assert models[0, r] == pytest.approx(float(density(x_s[r], x_t[r] + d * score, down) - noising), abs=1e-7)
        fall = density(x_s[r], x_t[r] + d * at_t.drift[r], down)
        assert proposal[r] == pytest.approx(float(fall - rise), abs=1e-7)


def test_ratios_are_those_of_normal_laws_in_the_subspace():
    """Springs of other strengths, and coordinates that count the place of the whole, are refuted."""
    process = Springs(zero_mean=0, variance=1.0, network=network())
    check_ratios(process, network())
    refuted(check_ratios, process, network(LAW * torch.tensor([1, 1, 1.1, 1])))
    refuted(check_ratios, Counting(zero_mean=0, variance=1.0, network=network()), network())


class Counting(Springs):
    """Takes the place of the whole for three directions more."""

    def dimension(self, event: torch.Size) -> int:
        return super().dimension(event) + 3


def test_steps_have_the_covariance_of_the_ratios():
    """20,000 steps down from one point, whitened by the matrix; and steps up have that of the noise."""
    _, x_t, _, at_t, s, t = points(6)
    n, basis, process = 20_000, subspace(), Springs(zero_mean=0, variance=1.0, network=network())
    seen = at_t.rows(torch.zeros(n, dtype=torch.long))
    x, times = x_t[:1].expand(n, -1, -1), (s[:1].expand(n), t[:1].expand(n))
    for up in (False, True):
        out = process.step(x, seen, *times, torch.full((n,), up), Stream(3).at("step"), COEFFICIENTS)
        d = t[0] ** 2 - s[0] ** 2
        inside = basis @ torch.linalg.inv(network().precision(at_t.predictions[0][:1], t[:1], LAW[None])[0]) @ basis.T
        wide = d * torch.eye(len(basis), dtype=torch.float64)
        covariance = wide if up else wide * s[0] ** 2 / t[0] ** 2 + (d / t[0] ** 2) ** 2 * inside
        z = (out - x - (0.25 if up else 1.0) * d * at_t.drift[:1]).flatten(1) @ basis.T
        white = torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), z.T, upper=False)
        found = white @ white.T / n
        assert white.mean(1).abs().max() < 5 / n**0.5
        assert (found - torch.eye(len(basis), dtype=torch.float64)).abs().max() < 5 * (2 / n) ** 0.5


def test_strengths_are_found_from_errors():
    """Of 1,000 errors with known springs; a kind of pair that is three times as stiff is found to be so."""
    true = network()
    prediction, t = MU.expand(1000, N, 3), 0.3
    p = true.precision(MU[None], torch.tensor([t], dtype=torch.float64), LAW[None])[0]
    z = torch.randn(1000, 3 * N, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    error = torch.linalg.solve_triangular(torch.linalg.cholesky(p).mT, z, upper=True).reshape(-1, N, 3)
    error = error - error.mean(1, keepdim=True)
    found = strengths(true, prediction, error, t)
    assert (found[1:] - LAW[1:].log()).abs().max() < 0.12  # a strength of ten pairs or fewer from 1,000 errors: 0.04
    assert abs(float(found[0] - LAW[0].log())) < 0.12  # with the mean counted, which has no error, it is .85 too large


def law() -> Denoiser:
    """A normal law around `MU` that is stiff along bonds; its directions do not turn, as those of a molecule would."""
    precision, mu = stiffness_of_law(), (MU - MU.mean(0)).flatten()
    basis = subspace()
    covariance = basis.T @ torch.linalg.inv(basis @ precision @ basis.T) @ basis

    def predict(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        noise = (t * t).double()[:, None, None] * torch.eye(3 * N, dtype=torch.float64)
        gain = torch.linalg.solve(covariance + noise, covariance)
        out = mu + ((y.flatten(1).double() - mu)[:, None] @ gain)[:, 0]
        return out.reshape(y.shape).to(y.dtype)

    return Denoiser(predict, (N, 3), process=Gaussian(zero_mean=0, variance="fisher"))


def test_springs_make_a_stiff_law_nearly_exact():
    """log Z of p^beta in eleven steps, beside that of the noise end: springs are right, one variance is far off."""
    beta, ends = 2.0, (0.01, 3.0)
    basis = subspace()
    covariance = torch.linalg.inv(basis @ stiffness_of_law() @ basis.T)
    noised = (covariance + t * t * torch.eye(len(basis), dtype=torch.float64) for t in ends)
    low, high = (float(torch.logdet(c)) for c in noised)
    exact = (1 - beta) / 2 * (low - high)
    levels = cd.ladder.geometric(12, *ends)

    def run(process: Gaussian) -> tuple[float, float]:
        out = cd.SMC(law() ** beta, levels, n_particles=400, process=process, ess_threshold=0.0, seed=1).sample()
        return float(out.log_z.value) - exact, float(out.batch_ess[0]) / 400

    error, share = run(Springs(zero_mean=0, variance="fisher", network=network()))
    assert abs(error) < 0.3  # two errors, and what eleven steps with a measured noise end leave
    assert share > 0.35
    error, share = run(Gaussian(zero_mean=0, variance="fisher"))
    assert error > 3
    assert share < 0.05


def test_the_table_of_steps_finds_the_same():
    """Springs that are measured on the law's own draws; what the table says of them and of one variance."""
    low, high = ENDS
    basis = subspace()
    covariance = torch.linalg.inv(basis @ stiffness_of_law() @ basis.T)
    noised = [torch.logdet(covariance + t * t * torch.eye(len(basis), dtype=torch.float64)) for t in (low, high)]
    exact = -0.5 * float(noised[0] - noised[1])
    cooling = Cooling(2.0, bonds=tuple(map(tuple, BONDS.tolist())))
    one, springs = steps.compare(law(), cooling, (16,), 200, 2)
    assert abs(springs.log_z - exact) < 1.0 < 3.0 < one.log_z - exact
    assert springs.share > 0.3 > 3 * one.share
    text = steps.table([one, springs])
    assert [line.split(" | ")[0] for line in text.splitlines()[2:]] == ["| one variance", "| springs"]
    assert f"{springs.log_z:.1f} +- {springs.error:.1f}" in text.splitlines()[3]


def test_springs_refuse_what_they_cannot_do():
    process = Springs(zero_mean=0, variance=1.0, network=network())
    x_s, x_t, at_s, at_t, s, t = points(2)
    two = Coefficients(target=(1.0, 1.0), proposal=(1.0, 1.0), k_up=0.25, k_down=1.0)
    with pytest.raises(InputError, match="one model"):
        process.kernel_ratios(x_s, x_t, at_s, at_t, s, t, two)
    with pytest.raises(InputError, match="balanced"):
        process.kernel_ratios(x_s, x_t, at_s, at_t, s, t, replace(COEFFICIENTS, k_up=0.0))
    with pytest.raises(InputError, match="need a network"):
        Springs(zero_mean=0, variance=1.0).kernel_ratios(x_s, x_t, at_s, at_t, s, t, COEFFICIENTS)
