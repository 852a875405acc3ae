"""Dynamics of many copies of one small molecule at once, for what OpenMM would run one after the other.

A molecule of 22 atoms is too small to fill a processor: OpenMM's fastest platform for it uses one number of a vector
of sixteen. `lanes.c` puts one copy in each place of the vector (of eight or four, where the processor has no wider).
The system with all its parameters is OpenMM's, and so are the formulas of the integrator (Langevin-middle, constrained
bonds). Tests hold energies and forces against it.

It is compiled when it is first used, with the C compiler of the machine (`cc`, or what CC names).
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from functools import cache
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import openmm
from openmm import unit

from crepe_diffusion import InputError

__all__ = ["LANES", "Lanes", "available"]

LANES = 16
"""Copies that move together: sixteen float32 fill the widest registers there are, narrower ones one after the other."""

COULOMB = 138.935456  # kJ nm / (mol e^2), OpenMM's
OFFSET = 0.009  # nm, of the radii in the Born integral
PROBE = 0.14  # nm, the radius of water in the surface term
HIGHEST = 6  # of the periodicities of torsions

Array = np.ndarray


@cache
def available() -> bool:
    """Whether there is a compiler to build the engine with."""
    try:
        _library()
    except InputError:
        return False
    return True


@cache
def _library() -> ctypes.CDLL:
    source = Path(str(files("studies.molecules") / "lanes.c"))
    compiler = os.environ.get("CC", "cc")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "lanes.so"
        flags = ["-O3", "-march=native", "-ffast-math", "-fno-math-errno", "-shared", "-fPIC", "-Wno-psabi"]
        command = [compiler, *flags, "-o", str(out), str(source), "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise InputError(f"no C compiler {compiler!r}; install one, set CC, or use OpenMM's own engine") from None
        except subprocess.CalledProcessError as error:
            raise InputError(f"{' '.join(command)} failed:\n{error.stderr}") from None
        return ctypes.CDLL(str(out))


class _Molecule(ctypes.Structure):
    _fields_ = (
        [(n, ctypes.c_int32) for n in ("n_atoms", "n_bonds", "n_angles", "n_torsions", "n_constraints")]
        + [(n, ctypes.c_void_p) for n in ("bond", "angle", "torsion", "constraint")]
        + [(f"{n}_table", ctypes.c_void_p) for n in ("bond", "angle", "torsion", "constraint", "pair", "born")]
        + [("mass", ctypes.c_void_p)]
    )  # fmt: skip


class Lanes:
    """Sixteen copies of the molecule of an OpenMM system without cut-off, with or without OBC2 solvent."""

    def __init__(self, system: openmm.System):
        self.n_atoms = system.getNumParticles()
        tables = _tables(system)
        indices = ("bond", "angle", "torsion", "constraint")
        kinds = {name: np.int32 if name in indices else np.float32 for name in tables}
        self._kept = {name: np.ascontiguousarray(value, kinds[name]) for name, value in tables.items()}
        counts = {f"n_{name}s": len(self._kept[name]) for name in indices}
        pointers = {name: value.ctypes.data for name, value in self._kept.items()}
        self._molecule = _Molecule(n_atoms=self.n_atoms, **counts, **pointers)

    def energies(self, x: Array) -> tuple[Array, Array]:
        """`U` (LANES,) in kJ/mol and forces (LANES, atoms, 3) of configurations (LANES, atoms, 3) in nm."""
        positions, energy = self._packed(x), np.empty(LANES, np.float32)
        forces = np.empty_like(positions)
        for part, u in enumerate(energy.reshape(len(positions), -1)):
            _library().energy_and_forces(ctypes.byref(self._molecule), _at(positions[part]), _at(forces[part]), _at(u))
        return energy, _unpacked(forces)

    def step(
        self, x: Array, v: Array, temperatures: Array, n_steps: int, dt: float, friction: float, state: Array
    ) -> tuple[Array, Array, Array]:
        """Positions and velocities (LANES, atoms, 3) after n steps, and their energies.

        `temperatures` (LANES,) are in units of energy, k T. `state` (4, LANES), uint32 and nowhere all zero, is the
        state of the random numbers; it is moved on in place.
        """
        positions, velocities, energy = self._packed(x), self._packed(v), np.empty(LANES, np.float32)
        thermal = np.sqrt(np.asarray(temperatures, np.float64)).astype(np.float32)
        if thermal.shape != (LANES,) or state.shape != (4, LANES) or state.dtype != np.uint32:
            raise InputError(
                f"{LANES} temperatures and a uint32 state (4, {LANES}) are needed, got {thermal.shape}, {state.shape}"
            )
        for part in range(len(positions)):
            lanes = slice(part * positions.shape[-1], (part + 1) * positions.shape[-1])
            numbers = np.ascontiguousarray(state[:, lanes])
            _library().langevin(
                ctypes.byref(self._molecule), _at(positions[part]), _at(velocities[part]), _at(energy[lanes]),
                _at(numbers), _at(thermal[lanes]), ctypes.c_int(n_steps), ctypes.c_float(dt), ctypes.c_float(friction),
            )  # fmt: skip
            state[:, lanes] = numbers
        return _unpacked(positions), _unpacked(velocities), energy

    def _packed(self, x: Array) -> Array:
        """As `lanes.c` reads them, (parts, atoms, 3, copies in a register)."""
        if np.shape(x) != (LANES, self.n_atoms, 3):
            raise InputError(f"configurations must be ({LANES}, {self.n_atoms}, 3), got {np.shape(x)}")
        width = ctypes.c_int32.in_dll(_library(), "width").value
        return np.ascontiguousarray(np.moveaxis(np.reshape(x, (-1, width, *np.shape(x)[1:])), 1, 3), np.float32)


def _unpacked(x: Array) -> Array:
    return np.ascontiguousarray(np.moveaxis(x, 3, 1)).reshape(LANES, -1, 3)


def _at(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _tables(system: openmm.System) -> dict[str, Any]:
    """Every number of the force field, in the order in which `lanes.c` reads them."""
    n = system.getNumParticles()
    out: dict[str, Any] = {
        "mass": [system.getParticleMass(i).value_in_unit(unit.dalton) for i in range(n)],
        "bond": np.empty((0, 2)), "bond_table": [], "angle": np.empty((0, 3)), "angle_table": [],
        "torsion": np.empty((0, 4)), "torsion_table": [],
    }  # fmt: skip
    constraints = [system.getConstraintParameters(k) for k in range(system.getNumConstraints())]
    out["constraint"] = [c[:2] for c in constraints]
    out["constraint_table"] = [c[2].value_in_unit(unit.nanometer) for c in constraints]
    pairs = {pair: np.zeros(4) for pair in combinations(range(n), 2)}
    born = np.tile([0.1, 0.0, 0.1, 0.0, 0.0], (n, 1))  # an atom that screens nothing and is not screened
    for force in system.getForces():
        if isinstance(force, openmm.HarmonicBondForce):
            rows = [_plain(force.getBondParameters(k)) for k in range(force.getNumBonds())]
            out["bond"], out["bond_table"] = [r[:2] for r in rows], [r[2:] for r in rows]
        elif isinstance(force, openmm.HarmonicAngleForce):
            rows = [_plain(force.getAngleParameters(k)) for k in range(force.getNumAngles())]
            out["angle"], out["angle_table"] = [r[:3] for r in rows], [r[3:] for r in rows]
        elif isinstance(force, openmm.PeriodicTorsionForce):
            waves = _waves([_plain(force.getTorsionParameters(k)) for k in range(force.getNumTorsions())])
            out["torsion"], out["torsion_table"] = list(waves), list(waves.values())
        elif isinstance(force, openmm.NonbondedForce):
            _pairwise(force, pairs)
        elif isinstance(force, openmm.GBSAOBCForce):
            _solvent(force, pairs, born)
        elif not isinstance(force, openmm.CMMotionRemover):
            raise InputError(f"the lanes do not have the force {type(force).__name__}; use OpenMM's own engine")
    return out | {"pair_table": list(pairs.values()), "born_table": born}


def _plain(values: Any) -> list[float]:
    """Parameters without their units (all of OpenMM's own system)."""
    return [v.value_in_unit_system(unit.md_unit_system) if unit.is_quantity(v) else v for v in values]


def _waves(rows: list[list[float]]) -> dict[tuple[int, ...], Array]:
    """`sum_n c_n cos(n phi)` for each quadruple of atoms: `k (1 + cos(n phi - phase))` for phases 0 and pi."""
    out: dict[tuple[int, ...], Array] = {}
    for *atoms, n, phase, k in rows:
        sign = np.cos(phase)
        if abs(abs(sign) - 1) > 1e-6 or not 1 <= n <= HIGHEST:
            raise InputError(f"torsions need phase 0 or pi and periods 1 to {HIGHEST}, got {phase:g} and {n}")
        wave = out.setdefault(tuple(int(a) for a in atoms), np.zeros(HIGHEST + 1))
        wave[0] += k
        wave[int(n)] += sign * k
    return out


def _pairwise(force: openmm.NonbondedForce, pairs: dict[tuple[int, int], Array]) -> None:
    if force.getNonbondedMethod() != openmm.NonbondedForce.NoCutoff:
        raise InputError("the lanes have no cut-off; use OpenMM's own engine")
    atoms = [_plain(force.getParticleParameters(i)) for i in range(force.getNumParticles())]
    for (i, j), row in pairs.items():
        (qi, si, ei), (qj, sj, ej) = atoms[i], atoms[j]
        row[:3] = _coefficients(qi * qj, 0.5 * (si + sj), np.sqrt(ei * ej))
    for k in range(force.getNumExceptions()):
        first, second, *values = _plain(force.getExceptionParameters(k))
        pairs[int(min(first, second)), int(max(first, second))][:3] = _coefficients(*values)


def _coefficients(charges: float, sigma: float, epsilon: float) -> tuple[float, float, float]:
    return COULOMB * charges, 4 * epsilon * sigma**12, 4 * epsilon * sigma**6


def _solvent(force: openmm.GBSAOBCForce, pairs: dict[tuple[int, int], Array], born: Array) -> None:
    screening = -COULOMB * (1 / force.getSoluteDielectric() - 1 / force.getSolventDielectric())
    surface = _plain([force.getSurfaceAreaEnergy()])[0]
    charges = []
    for i in range(force.getNumParticles()):
        charge, radius, scale = _plain(force.getParticleParameters(i))
        small = radius - OFFSET
        area = 4 * np.pi * surface * (radius + PROBE) ** 2
        born[i] = small, scale * small, radius, 0.5 * screening * charge**2, area
        charges.append(charge)
    for (i, j), row in pairs.items():
        row[3] = screening * charges[i] * charges[j]
