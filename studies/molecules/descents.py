"""At which noise a model errs: frames of hot dynamics are noised to a level, and the model takes them down again.

    x_s = D + (s/t)^2 (x_t - D) + s sqrt(1 - (s/t)^2) noise,      D = E[x_0 | x_t] by the model,    t > s

From little noise a model can hardly go wrong, and from much noise it has to make the whole molecule. Energies grow from
the first level where it errs, and basins lose or gain from there on.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from crepe_diffusion.models import Denoiser
from studies.molecules.convergence import basins
from studies.molecules.geometry import bonds, same_hand
from studies.molecules.peptides import Peptide, energies
from studies.molecules.tempering import ENDS
from studies.shared.pages import markdown

__all__ = ["TOPS", "descend", "examine", "table"]

TOPS = (0.01, 0.03, 0.06, 0.1, 0.2, 0.4)  # nm
N_STEPS = 80


def descend(model: Denoiser, x: Tensor, top: float, generator: torch.Generator, n_steps: int = N_STEPS) -> Tensor:
    """What the model makes of x (rows, atoms, 3) with noise of this level, in steps of equal ratios."""
    times = torch.tensor(np.geomspace(top, ENDS[0], n_steps), dtype=x.dtype)
    y = x + top * torch.randn(x.shape, generator=generator)
    for t, s in zip(times, torch.cat([times[1:], times.new_zeros(1)]), strict=True):
        d = model.predict(y, t.expand(len(y)))
        y = d + (s / t) ** 2 * (y - d) + s * (1 - (s / t) ** 2).sqrt() * torch.randn(x.shape, generator=generator)
    return y


def examine(model: Denoiser, frames: np.ndarray, peptide: Peptide, seed: int = 0) -> list[list[float]]:
    """Row by row, first the frames': noise, energies (kJ/mol), shares of phi > 0 and of mixed hands.

    Energies are quartiles of all, and the medians of molecules without and with residues that have phi > 0.
    """
    generator, x = torch.Generator().manual_seed(seed), torch.from_numpy(frames).float()
    out = []
    for top in (0.0, *TOPS):
        y = (descend(model, x, top, generator) if top else x).numpy()
        y, mixed, _ = same_hand(y, bonds(peptide), frames[0])
        energy, right = energies(peptide, y), basins(y, peptide)[:, 0]
        some = [float(np.median(energy[rows])) if rows.any() else np.nan for rows in (right == 0, right > 0)]
        out.append(
            [top, *np.percentile(energy, [25, 50, 75]).tolist(), *some, float(right.mean()), float(mixed.mean())]
        )
    return out


def table(found: list[list[float]]) -> str:
    """Energies as median and quartiles."""
    head = ["noised to (nm)", "U: median (quartiles), kJ/mol", "with phi < 0 only", "with some phi > 0"]
    head += ["phi > 0 (%)", "mixed hands (%)"]
    lines = []
    for top, low, middle, high, left, some, right, mixed in found:
        noise, energy = f"{top:g}" if top else "not at all", f"{middle:.0f} ({low:.0f}, {high:.0f})"
        lines.append([noise, energy, f"{left:.0f}", f"{some:.0f}", f"{100 * right:.2f}", f"{100 * mixed:.1f}"])
    return markdown(head, lines)
