"""What the number of steps does to a tempered molecule, with one variance for all directions and with springs.

    log Z  =  log of the integral of p^beta, but for the constant of the noise end

Steps with a wrong covariance multiply p^beta by more than 1 wherever they go (`docs/decisions.md`), so log Z is too
large by what they do and falls as they become many. What a sampler has of it is how many particles of the noise end
have descendants in the end, counted by their weights.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

import crepe_diffusion as cd
from crepe_diffusion.models import Denoiser
from crepe_diffusion.processes import Gaussian
from studies.molecules.tempering import ENDS, Budget, Cooling, measured_springs
from studies.shared.pages import markdown

__all__ = ["Found", "compare", "table"]


@dataclass(frozen=True)
class Found:
    """Of one covariance and number of steps: log Z and its error, share of particles with descendants, ms for a row."""

    covariance: str
    n_steps: int
    log_z: float
    error: float
    share: float
    milliseconds: float


def compare(
    model: Denoiser, cooling: Cooling, steps: tuple[int, ...], n: int, n_batches: int, seed: int = 0
) -> list[Found]:
    """SMC with so many particles in each of so many batches, one level for each step."""
    process, _ = measured_springs(model, cooling, Budget(), seed)
    kinds = {"one variance": Gaussian(zero_mean=0, variance="fisher"), "springs": process}
    out = []
    for n_steps in steps:
        for name, kind in kinds.items():
            levels = cd.ladder.geometric(n_steps + 1, *ENDS)
            smc = cd.SMC(
                cooling.target(model), levels, n_particles=n, n_batches=n_batches, process=kind, ess_threshold=0.5,
                fit_samples=512, seed=seed,
            )  # fmt: skip
            began = time.process_time()
            found = smc.sample()
            spent = 1e3 * (time.process_time() - began) / found.evaluations.rows
            lines = torch.zeros(n * n_batches, dtype=torch.float64).index_add_(0, found.eve, found.weights)
            share = 1 / float(lines.square().sum()) / len(lines)
            out.append(Found(name, n_steps, found.log_z.value, found.log_z.error, share, spent))
    return out


def table(found: list[Found]) -> str:
    """One line for each."""
    head = ["covariance of a step", "steps", "log Z", "particles with descendants (%)", "ms for a row"]
    lines = []
    for f in found:
        log_z = f"{f.log_z:.1f} +- {f.error:.1f}"
        lines.append([f.covariance, f.n_steps, log_z, f"{100 * f.share:.1f}", f"{f.milliseconds:.3f}"])
    return markdown(head, lines)
