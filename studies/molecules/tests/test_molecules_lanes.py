"""Sixteen copies at once: the same energies, forces and constraints as OpenMM, and the right temperatures."""

from __future__ import annotations

from functools import cache

import numpy as np
import openmm
import pytest
from openmm import app

from checks import refuted
from crepe_diffusion import InputError
from studies.molecules.lanes import LANES, Lanes, available
from studies.molecules.peptides import FRICTION, GAS_CONSTANT, PEPTIDES, STEP, Peptide, peptide

pytestmark = pytest.mark.skipif(not available(), reason="no C compiler")


def state(seed):
    return np.random.SeedSequence(seed).generate_state(4 * LANES).reshape(4, LANES)


@cache
def shaken(chosen: Peptide, seed: int = 0):
    """Different torsions, pushed out of their minima and moved for a while, so that no term of the energy is small."""
    rng = np.random.default_rng(seed)
    built = [chosen.build(*place)[1] for place in ((-75.0, 130.0), (-60.0, -40.0), (60.0, 40.0), (-150.0, 150.0))]
    x = np.tile(built, (LANES // 4, 1, 1))
    x = x - x.mean(1, keepdims=True) + 0.002 * rng.standard_normal(x.shape)
    thermal = GAS_CONSTANT * np.linspace(100, 900, LANES)
    x, v, _ = Lanes(chosen.system).step(x, np.zeros_like(x), thermal, 2000, STEP / 4, 20.0, state(seed))
    return x, v, thermal


def openmm_energies(system, x):
    context = openmm.Context(system, openmm.VerletIntegrator(0.001), openmm.Platform.getPlatformByName("Reference"))
    energy, force = np.empty(len(x)), np.empty(x.shape)
    for i, row in enumerate(np.asarray(x, dtype=np.float64)):
        context.setPositions(row)
        got = context.getState(getEnergy=True, getForces=True)
        energy[i], force[i] = got.getPotentialEnergy()._value, got.getForces(asNumpy=True)._value
    return energy, force


def check_as_openmm(lanes, system, x):
    """float32 has seven digits: energies of some 100 kJ/mol agree to 0.01, forces to 1e-5 of the largest."""
    energy, force = lanes.energies(x)
    known, known_force = openmm_energies(system, x)
    assert np.ptp(known) > 20
    assert np.abs(energy - known).max() < 0.01
    assert np.abs(force - known_force).max() < 1e-5 * np.abs(known_force).max()


@pytest.mark.parametrize("name", list(PEPTIDES))
def test_energies_and_forces_are_openmms(name):
    chosen = peptide(name)
    check_as_openmm(Lanes(chosen.system), chosen.system, shaken(chosen)[0])


def test_any_missing_or_changed_term_is_seen():
    chosen = peptide("dipeptide")
    x = shaken(chosen)[0]

    def system(drop=None, factor=1.0):
        field = app.ForceField("amber96.xml", "amber96_obc.xml")
        made = field.createSystem(chosen.topology, nonbondedMethod=app.NoCutoff, constraints=app.HBonds)
        for k in reversed(range(made.getNumForces())):
            force = made.getForce(k)
            if type(force).__name__ == drop:
                made.removeForce(k)
            if isinstance(force, openmm.GBSAOBCForce):
                for i in range(force.getNumParticles()):
                    charge, radius, scale = force.getParticleParameters(i)
                    force.setParticleParameters(i, charge, factor * radius, scale)
        return made

    drops = ("HarmonicBondForce", "HarmonicAngleForce", "PeriodicTorsionForce", "NonbondedForce", "GBSAOBCForce")
    for changed in (*map(system, drops), system(factor=1.001)):
        lanes = Lanes(changed)
        refuted(check_as_openmm, lanes, chosen.system, x)
        check_as_openmm(lanes, changed, x)


def test_forces_it_does_not_know_are_refused():
    system = openmm.System()
    for _ in range(3):
        system.addParticle(1.0)
    system.addForce(openmm.CustomExternalForce("x"))
    with pytest.raises(InputError, match="CustomExternalForce"):
        Lanes(system)
    chosen = peptide("dipeptide")
    with pytest.raises(InputError, match=r"\(16, 22, 3\), got \(4, 22, 3\)"):
        Lanes(chosen.system).energies(np.zeros((4, 22, 3)))


def test_constrained_bonds_keep_their_length():
    chosen = peptide("dipeptide")
    lanes, (x, v, thermal) = Lanes(chosen.system), shaken(chosen)
    x, v, _ = lanes.step(x, v, thermal, 500, STEP, FRICTION, state(1))
    rows = [chosen.system.getConstraintParameters(k) for k in range(chosen.system.getNumConstraints())]
    i, j, length = (np.array(c) for c in zip(*[(a, b, d._value) for a, b, d in rows], strict=True))
    bond = x[:, i] - x[:, j]
    assert len(rows) == 12
    assert np.abs(np.linalg.norm(bond, axis=-1) / length - 1).max() < 2e-6
    free = Lanes(app.ForceField("amber96.xml", "amber96_obc.xml").createSystem(chosen.topology))
    y, *_ = free.step(x, v, thermal, 100, STEP / 8, FRICTION, state(1))
    assert np.abs(np.linalg.norm(y[:, i] - y[:, j], axis=-1) / length - 1).max() > 0.01


def test_every_lane_has_its_own_temperature_and_its_own_noise():
    """k T / 2 for each of 66 coordinates less 12 constraints; 60 ps after 4, seen every 0.5 ps."""
    chosen = peptide("dipeptide")
    lanes, (x, v) = Lanes(chosen.system), (a.copy() for a in shaken(chosen)[:2])
    wanted, numbers, seen = np.repeat([300.0, 800.0], LANES // 2), state(2), []
    mass = np.array([chosen.system.getParticleMass(i)._value for i in range(22)])
    x[1], v[1] = x[0], v[0]
    for k in range(128):
        x, v, _ = lanes.step(x, v, GAS_CONSTANT * wanted, 250, STEP, FRICTION, numbers)
        x -= x.mean(1, keepdims=True)
        if k >= 8:
            seen.append((mass[:, None] * v**2).sum((1, 2)) / (GAS_CONSTANT * 54))
    temperature = np.mean(seen, 0).reshape(2, -1).mean(1)
    # A kinetic energy of 54 freedoms has a relative spread of sqrt(2/54) and is forgotten in about 0.5 ps.
    error = np.array([300, 800]) * np.sqrt(2 / 54 / (120 * 8 / 2))
    assert (np.abs(temperature - [300, 800]) < 4 * error).all()
    assert np.abs(x[0] - x[1]).max() > 0.05


def test_a_harmonic_bond_has_the_spread_of_its_temperature():
    """Three atoms in a row: each bond's variance is k T / k_bond, whatever the masses (r^2 shifts it by a little)."""
    system, bonds = openmm.System(), openmm.HarmonicBondForce()
    for mass in (12.0, 14.0, 1.0):
        system.addParticle(mass)
    bonds.addBond(0, 1, 0.2, 3000.0)
    bonds.addBond(1, 2, 0.2, 6000.0)
    system.addForce(bonds)
    lanes = Lanes(system)
    x = np.tile(np.array([[0.0, 0, 0], [0.2, 0, 0], [0.4, 0, 0]]), (LANES, 1, 1))
    v, numbers, seen = np.zeros_like(x), state(3), []
    for k in range(2000):
        x, v, _ = lanes.step(x, v, np.full(LANES, 2.5), 40, 0.005, 2.0, numbers)
        x -= x.mean(1, keepdims=True)
        if k >= 100:
            seen.append([np.linalg.norm(x[:, i] - x[:, i + 1], axis=-1) for i in (0, 1)])
    r = np.moveaxis(np.array(seen), 1, 0).reshape(2, -1)
    grid = np.linspace(0.02, 0.4, 4000)
    for k, lengths in zip((3000.0, 6000.0), r, strict=True):
        weight = grid**2 * np.exp(-0.5 * k * (grid - 0.2) ** 2 / 2.5)
        mean = (grid * weight).sum() / weight.sum()
        variance = ((grid - mean) ** 2 * weight).sum() / weight.sum()
        # 30,400 values, a new one at least every 0.4 ps: variances are known to 1 or 2 %.
        assert abs(lengths.var() / variance - 1) < 0.06
        assert abs(lengths.mean() - mean) < 0.001
