"""ACE-ALA_n-NME in implicit water: `U(x)` by AMBER ff96 with the OBC2 model, bonds to hydrogen held fixed.

    dx/dt = v,      m dv = -grad U dt - gamma m v dt + sqrt(2 gamma m k T) dW

The force field is `amber96.xml` + `amber96_obc.xml` everywhere, for dynamics and for energies: the two halves of a
comparison must not come from different solvents, and this variant is the one that OpenMM has a fast kernel for.
"""

from __future__ import annotations

import io
import random
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import openmm
import PeptideBuilder
from openmm import app, unit
from PeptideBuilder import Geometry

from crepe_diffusion import InputError

__all__ = ["GAS_CONSTANT", "PEPTIDES", "Peptide", "energies", "integrator", "peptide"]

GAS_CONSTANT = 8.31446261815324e-3
"""kJ / (mol K): energies are in kJ/mol, lengths in nm, times in ps, as in OpenMM."""

FRICTION, STEP = 1.0, 0.002  # 1/ps and ps, the paper's


@dataclass(frozen=True)
class Peptide:
    """A peptide with its temperatures: trained hot, sampled cold."""

    name: str
    n_residues: int
    hot: float
    cold: float
    temperatures: tuple[float, ...]
    """The rungs of replica exchange, cold to hot; repeated ends spend the work where data are wanted."""
    platform: str = "Reference"
    """The fastest platform for so few atoms on one thread."""

    @property
    def beta(self) -> float:
        return self.hot / self.cold

    @cached_property
    def topology(self) -> app.Topology:
        return self.build(-60.0, -40.0)[0]

    @cached_property
    def system(self) -> openmm.System:
        field = app.ForceField("amber96.xml", "amber96_obc.xml")
        return field.createSystem(self.topology, nonbondedMethod=app.NoCutoff, constraints=app.HBonds)

    @cached_property
    def atoms(self) -> tuple[str, ...]:
        return tuple(f"{a.residue.name}{a.residue.index}:{a.name}" for a in self.topology.atoms())

    def build(self, phi: float, psi: float) -> tuple[app.Topology, np.ndarray]:
        """Topology and coordinates (atoms, 3) with all residues at these torsions, in degrees."""
        chain = PeptideBuilder.initialize_res(Geometry.AlaGeo())
        for _ in range(self.n_residues + 1):
            PeptideBuilder.add_residue(chain, "A", phi, psi)  # by letter: a Geometry would overrule the torsions
        pdb = app.PDBFile(io.StringIO(_capped_pdb(list(chain.get_residues()))))
        modeller = app.Modeller(pdb.topology, pdb.positions)
        before = random.getstate()
        random.seed(0)  # OpenMM places hydrogens with the global generator; a start should be the same every time
        modeller.addHydrogens(app.ForceField("amber96.xml"), platform=openmm.Platform.getPlatformByName("Reference"))
        random.setstate(before)
        return modeller.topology, np.asarray(modeller.positions.value_in_unit(unit.nanometer))


def _capped_pdb(residues: list) -> str:
    """PDB text in which the first alanine has become an acetyl cap and the last a methylamide."""
    lines, serial = [], 0
    for i, residue in enumerate(residues):
        name, keep = "ALA", {a: a for a in ("N", "CA", "C", "O", "CB")}
        if i == 0:
            name, keep = "ACE", {"CA": "CH3", "C": "C", "O": "O"}
        elif i == len(residues) - 1:
            name, keep = "NME", {"N": "N", "CA": "CH3"}
        for atom in residue:
            if atom.get_name() in keep:
                serial += 1
                x, y, z = atom.get_coord()
                new = keep[atom.get_name()]
                lines.append(
                    f"ATOM  {serial:5d}  {new:<3s} {name} A{i + 1:4d}    {x:8.3f}{y:8.3f}{z:8.3f}  1.00  0.00"
                    f"           {new[0]}"
                )
    return "\n".join([*lines, "TER", "END", ""])


def integrator(temperature: float, seed: int) -> openmm.LangevinMiddleIntegrator:
    """Langevin dynamics with the paper's friction and step."""
    made = openmm.LangevinMiddleIntegrator(
        temperature * unit.kelvin, FRICTION / unit.picosecond, STEP * unit.picoseconds
    )
    made.setRandomNumberSeed(seed)
    return made


def energies(peptide: Peptide, x: np.ndarray) -> np.ndarray:
    """`U(x)` in kJ/mol of configurations (rows, atoms, 3) in nm."""
    x = np.asarray(x, dtype=np.float64)
    if x.ndim != 3 or x.shape[1:] != (len(peptide.atoms), 3):
        raise InputError(f"{peptide.name} needs configurations (rows, {len(peptide.atoms)}, 3), got {x.shape}")
    platform = openmm.Platform.getPlatformByName(peptide.platform)
    context = openmm.Context(peptide.system, openmm.VerletIntegrator(STEP * unit.picoseconds), platform)
    out = np.empty(len(x))
    for i, row in enumerate(x):
        context.setPositions(row)
        state = context.getState(getEnergy=True)
        out[i] = state.getPotentialEnergy().value_in_unit(unit.kilojoule_per_mole)
    return out


# Sixteen rungs fill the lanes. Most of them are where data are wanted; the few between only have to let replicas pass,
# and exchanges try all pairs many times over, so it is enough if one swap in ten is accepted.
PEPTIDES = {
    p.name: p
    for p in (
        Peptide("dipeptide", 1, hot=800.0, cold=300.0, temperatures=(300,) * 7 + (490,) * 2 + (800,) * 7),
        Peptide("tetrapeptide", 3, hot=800.0, cold=500.0, temperatures=(500,) * 7 + (630,) * 3 + (800,) * 6),
        Peptide(
            "hexapeptide", 5, hot=800.0, cold=600.0, temperatures=(600,) * 7 + (690,) * 3 + (800,) * 6, platform="CPU"
        ),
    )
}


def peptide(name: str) -> Peptide:
    if name not in PEPTIDES:
        raise InputError(f"peptide must be one of {', '.join(PEPTIDES)}, got {name!r}")
    return PEPTIDES[name]
