"""A tilt that gives a hot model the torsions of hot dynamics, learned by telling the two apart.

    c(x)   =  sum_i LIMIT tanh(w_i . f(phi_i, psi_i) / LIMIT) + sum_j LIMIT tanh(v_j . g(omega_j) / LIMIT)
    pi(x)  ~  (p_hot(x) exp(c(x)))^beta

Waves f are cosines and sines of `k phi + l psi`, and g those of `k omega`; each residue i and each peptide bond j has
weights of its own. The number c that tells frames of the dynamics from draws of the model best (logistic regression) is
the logarithm of the ratio of their densities, but for a constant. A power makes the model's error in a basin larger;
the tilt takes it out before. It needs the frames that the model was trained on, and nothing cold.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from crepe_diffusion import InputError
from studies.molecules.convergence import BASINS, basins
from studies.molecules.geometry import backbone
from studies.molecules.peptides import Peptide
from studies.shared.pages import markdown
from studies.shared.training import load_weights, save_tensors

__all__ = ["Torsions", "learned", "load", "table", "torsions"]

LIMIT = 1.5
"""No basin is more than five times as rare as it should be, and where nothing was seen nothing is known."""
ORDER = 3
"""Waves have up to so many periods: basins are wide."""
RIDGE = 1e-3


def torsions(x: Tensor, quadruples: Tensor) -> Tensor:
    """Torsion angles in radians, (rows, quadruples), in (-pi, pi]."""
    a, b, c = x[:, quadruples].diff(dim=2).unbind(2)
    first, second = torch.linalg.cross(a, b), torch.linalg.cross(b, c)
    sine = (a * second).sum(-1) * b.norm(dim=-1)
    return torch.atan2(sine, (first * second).sum(-1))


def waves(*angles: Tensor) -> Tensor:
    """Cosines and sines of all sums of so many angles with up to `ORDER` periods in all, (..., waves).

    >>> waves(torch.zeros(4, 3), torch.zeros(4, 3)).shape, waves(torch.zeros(4, 3)).shape
    (torch.Size([4, 3, 24]), torch.Size([4, 3, 6]))
    """
    numbers = product(range(-ORDER, ORDER + 1), repeat=len(angles))
    half = [n for n in numbers if n > (0,) * len(angles) and sum(map(abs, n)) <= ORDER]
    sums = torch.stack(angles, -1) @ torch.tensor(half).to(angles[0]).T
    return torch.cat([sums.cos(), sums.sin()], -1)


@dataclass(frozen=True)
class Torsions:
    """The number `c(x)` of molecules x (rows, atoms, 3).

    `phi`, `psi` (residues, 4) and `omega` (bonds, 4) are the atoms of torsions, `plane` (residues, waves) and `bond`
    (bonds, waves) the weights of their waves.
    """

    phi: Tensor
    psi: Tensor
    omega: Tensor
    plane: Tensor
    bond: Tensor

    def features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Waves of every residue and of every bond."""
        phi, psi, omega = (torsions(x, atoms) for atoms in (self.phi, self.psi, self.omega))
        return waves(phi, psi), waves(omega)

    def __call__(self, x: Tensor) -> Tensor:
        return _score(self.features(x), self.plane.to(x), self.bond.to(x))

    def tensors(self) -> dict[str, Tensor]:
        """All of it, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def save(self, path: Path, about: dict[str, str]) -> None:
        save_tensors(path, self.tensors(), about)


def _score(features: tuple[Tensor, Tensor], *weights: Tensor) -> Tensor:
    parts = torch.cat([(f * w).sum(-1) for f, w in zip(features, weights, strict=True)], 1)
    return LIMIT * (parts / LIMIT).tanh().sum(1)


def load(path: Path) -> Torsions:
    """What `Torsions.save` wrote."""
    tensors, _ = load_weights(path)
    wanted = {field.name for field in fields(Torsions)}
    if set(tensors) != wanted:
        raise InputError(f"{path} holds {', '.join(sorted(tensors))}; `mend` writes {', '.join(sorted(wanted))}")
    return Torsions(**tensors)


def learned(peptide: Peptide, model: np.ndarray, dynamics: np.ndarray) -> Torsions:
    """From molecules (rows, atoms, 3) of one hand that the untempered model drew, and frames of the hot dynamics.

    Both count as much, however many there are.
    """
    atoms = {name: torch.from_numpy(of.astype(np.int64)) for name, of in backbone(peptide).items()}
    blank = Torsions(**atoms, plane=torch.zeros(0), bond=torch.zeros(0))
    drawn, true = (blank.features(torch.from_numpy(x).double()) for x in (model, dynamics))
    weights = [torch.zeros(f.shape[1:], dtype=torch.float64, requires_grad=True) for f in drawn]
    constant = torch.zeros((), dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([*weights, constant], max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        search.zero_grad()
        wrong = (
            softplus(_score(drawn, *weights) + constant).mean() + softplus(-_score(true, *weights) - constant).mean()
        )
        value = wrong + RIDGE * sum(w.square().sum() for w in weights)
        value.backward()
        return value

    with torch.enable_grad():
        search.step(closure)
    plane, bond = (w.detach().float() for w in weights)
    return Torsions(**atoms, plane=plane, bond=bond)


def table(peptide: Peptide, tilt: Torsions, model: np.ndarray, dynamics: np.ndarray) -> str:
    """Basins of the model as it is, weighted by `exp(c)`, and of the dynamics; and the share of draws that is left."""
    w = tilt(torch.from_numpy(model).double()).exp().numpy()
    inside = basins(model, peptide)
    shares = {
        "model": inside.mean(0),
        "model, weighted": np.average(inside, 0, w),
        "dynamics": basins(dynamics, peptide).mean(0),
    }
    kept = {"model, weighted": f"{w.sum() ** 2 / (w**2).sum() / len(w):.2f}"}
    lines = [[name, *(f"{100 * p:.2f}" for p in share), kept.get(name, "")] for name, share in shares.items()]
    return markdown(["hot sample", *(f"{basin.name} (%)" for basin in BASINS), "effective share"], lines)
