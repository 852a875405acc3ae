"""A denoising variance that is a full matrix, in one file: measured, kept and restored like the built-in ones.

    A_t = t^2 E[score score^T],    denoising variance  d (1 - d/t^2 A_t)

Exact for Gaussian data of any covariance at any step size; a diagonal variance is not, where the axes are unknown.
Run it: `python examples/full_covariance.py`, or `crepe-diffusion run examples/full_covariance.toml --out runs/full`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.evaluate import Evaluator
from crepe_diffusion.processes import FisherTable, Gaussian, Measured, Process, Spectrum


@dataclass(frozen=True)
class Full(Measured):
    """The whole matrix per model and time: `values` is (models, times, k, k)."""

    @staticmethod
    def of_scores(score: Tensor, t: float, dimension: int) -> Tensor:
        return t**2 * score.T @ score / len(score)

    @staticmethod
    def of_errors(error: Tensor, t: float, dimension: int) -> Tensor:
        return torch.eye(error.shape[1]).to(error) - error.T @ error / (len(error) * t**2)

    def of(self, model: int, t: Tensor) -> Spectrum:
        times, which = t.unique(return_inverse=True)
        values, vectors = torch.linalg.eigh(self.interpolated(model, times))
        return Spectrum(values.clamp(0, 1)[which], vectors, which)


# -- a stiff covariance in axes that the process is not given ---------------------------------------------

RHO = torch.tensor([0.05, 0.3, 1.0], dtype=torch.float64)
AXES = torch.linalg.qr(cd.Stream(3).normal((3, 3)))[0]
TIMES = torch.tensor([0.1, 0.5, 1.0, 5.0], dtype=torch.float64)


def rotated(weights: tuple[float, ...], means: Tensor) -> cd.models.GaussianMixture:
    covariance = AXES @ RHO.square().diag() @ AXES.T
    return cd.models.GaussianMixture(weights, means, covariances=covariance.expand(len(weights), 3, 3))


def processes() -> dict[str, Gaussian]:
    """The exact information of the covariance above, as a matrix and as its diagonal."""
    share = TIMES[:, None] ** 2 / (TIMES[:, None] ** 2 + RHO**2)
    full, mean = ((AXES * share[:, None]) @ AXES.T)[None], torch.zeros(1, 3, dtype=torch.float64)
    return {
        "full": Gaussian(information=Full(TIMES, full, mean)),
        "diagonal": Gaussian(information=FisherTable(TIMES, full.diagonal(dim1=2, dim2=3), mean)),
    }


def worst_error(process: Process, s: float, t: float, n: int = 64) -> float:
    """The largest `|L - (log p_s(x_s) - log p_t(x_t))|` of n steps between s and t, for one Gaussian."""
    model = rotated((1.0,), torch.zeros(1, 3))
    evaluate = Evaluator(model.as_target(), cd.ladder.of([s, t]), process, cd.Proposal())
    ends = [(scale * cd.Stream(i).normal((n, 3)), torch.full((n,), scale).double()) for i, scale in enumerate((s, t))]
    (x_s, s_rows), (x_t, t_rows) = ends
    found, _ = process.log_ratios(
        x_s, x_t, evaluate(x_s, s_rows), evaluate(x_t, t_rows), s_rows, t_rows, evaluate.coefficients
    )
    return float((found[0] - (model.log_prob(x_s, s_rows) - model.log_prob(x_t, t_rows))).abs().max())


def barrier(variance: str | type[Measured], n_draws: int = 40) -> float:
    """Sum of the rejection rates of a tempered mixture of two such Gaussians; the variance is measured first."""
    p = rotated((0.4, 0.6), torch.tensor([[-0.5, 0.0, 0.0], [0.5, 0.0, 0.0]]))
    levels = cd.ladder.karras(6, 0.02, 10.0, substeps=4)
    chain = cd.ReplicaExchange(p**1.5, levels, n_chains=16, seed=0, process=Gaussian(variance=variance))
    return chain.sample(n_draws, burn_in=10).diagnostics.barrier().value


def main(n_draws: int = 40) -> None:
    print(f"{'largest error of L in one step':32}{'full':>10}{'diagonal':>10}")
    for s, t in ((0.1, 0.5), (0.5, 1.0), (0.1, 5.0)):
        print(f"s = {s:g}, t = {t:g}".ljust(32), *(f"{worst_error(p, s, t):9.1g}" for p in processes().values()))
    print(
        f"{'barrier of a tempered mixture':32}{barrier(Full, n_draws):10.2f}{barrier('fisher-diagonal', n_draws):10.2f}"
    )


if __name__ == "__main__":
    main()
