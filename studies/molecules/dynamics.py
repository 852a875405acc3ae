"""Molecular dynamics at several temperatures at once, with replica exchange between them.

    accept a swap of replicas i and j with probability min(1, exp((1/kT_i - 1/kT_j) (U_i - U_j)))

Replicas that pass through the hot rungs cross barriers there, and hot frames are wanted anyway. Whether the cold rungs
gain enough by it is found by `check`: a single temperature is plain dynamics. A block is `BLOCK` frames of plain
dynamics of every replica; between blocks replicas exchange rungs. Files are sorted by rung, so each holds one
temperature, and any `BLOCK` successive frames from a multiple of `BLOCK` on are one continuous piece (what a
time-lagged analysis needs).

Two engines do the same: `OneByOne` is OpenMM, `SideBySide` runs sixteen replicas in the lanes of a vector (see
`lanes`), which is many times as fast for so few atoms; `md` writes down how fast it was.

Everything random in block b is seeded by (seed, walker, b), and a block begins from the arrays in the checkpoint, so a
run that was killed goes on as if it had not been: no frame is lost, doubled or changed.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import openmm
from openmm import app, unit

from crepe_diffusion import InputError
from crepe_diffusion.run import DamagedError, publish
from studies.molecules import trajectory
from studies.molecules.lanes import LANES, Lanes
from studies.molecules.peptides import FRICTION, GAS_CONSTANT, STEP, Peptide, integrator

__all__ = ["BLOCK", "ENGINES", "INTERVAL", "OneByOne", "SideBySide", "State", "Walker", "exchange", "rungs", "walkers"]

INTERVAL = 1.0  # ps between frames
BLOCK = 20  # frames between exchanges
STARTS = ((-60.0, -40.0), (-150.0, 150.0), (-75.0, 75.0), (55.0, 45.0))  # torsions: alpha-R, beta, C7eq, alpha-L


@dataclass
class State:
    """All that the next block depends on: replicas `(replicas, atoms, 3)`, the rung of each, and how many blocks."""

    positions: np.ndarray
    velocities: np.ndarray
    rung: np.ndarray
    n_blocks: int = 0
    n_attempted: int = 0
    n_accepted: int = 0

    def encode(self) -> bytes:
        buffer = io.BytesIO()
        np.savez(buffer, **vars(self))
        return buffer.getvalue()

    @classmethod
    def decode(cls, path: Path) -> State:
        try:
            with np.load(path, allow_pickle=False) as arrays:
                numbers = [int(arrays[name]) for name in ("n_blocks", "n_attempted", "n_accepted")]
                return cls(arrays["positions"], arrays["velocities"], arrays["rung"], *numbers)
        except (ValueError, OSError, KeyError) as error:
            raise DamagedError(path, f"not a checkpoint of molecular dynamics ({error})") from None


def exchange(energy: np.ndarray, rung: np.ndarray, betas: np.ndarray, rng: np.random.Generator) -> tuple[int, int]:
    """Swap rungs (in place) of random pairs of replicas, many times over; how many were attempted and accepted.

    Leaves the product of the rungs' laws invariant. So many attempts nearly draw a new permutation, which is the
    most that exchanges can do between two blocks; only swaps between neighbouring temperatures are counted.
    """
    place, n = np.unique(betas, return_inverse=True)[1], len(rung)
    attempted = accepted = 0
    rounds = n**3 if n > 1 else 0
    first = rng.integers(n, size=rounds)
    second = (first + rng.integers(1, max(2, n), size=rounds)) % n
    for i, j, log_u in zip(first, second, np.log(rng.random(rounds)), strict=True):
        takes = log_u < (betas[rung[i]] - betas[rung[j]]) * (energy[i] - energy[j])
        neighbours = abs(place[rung[i]] - place[rung[j]]) == 1
        attempted, accepted = attempted + neighbours, accepted + (neighbours and takes)
        if takes:
            rung[i], rung[j] = rung[j], rung[i]
    return int(attempted), int(accepted)


class Engine(Protocol):
    """Moves replicas on and looks at them."""

    def block(self, state: State, temperatures: np.ndarray, entropy: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Frames (replicas, BLOCK, atoms, 3) of dynamics and the last energies; the state is moved on in place."""
        ...


class OneByOne:
    """OpenMM, one replica after the other."""

    def __init__(self, peptide: Peptide):
        platform = openmm.Platform.getPlatformByName(peptide.platform)
        threads = {"Threads": "1"} if peptide.platform == "CPU" else {}
        self._context = openmm.Context(peptide.system, integrator(1.0, 0), platform, threads)

    def block(self, state: State, temperatures: np.ndarray, entropy: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        frames = np.empty((len(temperatures), BLOCK, *state.positions.shape[1:]), dtype=np.float32)
        energy = np.empty(len(temperatures))
        for i, temperature in enumerate(temperatures):
            self._prepare(state, i, temperature, _seed(*entropy, i))
            for k in range(BLOCK):
                self._context.getIntegrator().step(round(INTERVAL / STEP))
                state.positions[i], state.velocities[i], energy[i] = self._read()
                frames[i, k] = state.positions[i] - state.positions[i].mean(0)
        return frames, energy

    def relaxed(self, x: np.ndarray, temperature: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions of a structure after minimisation, and thermal velocities."""
        self._context.setPositions(x)
        openmm.LocalEnergyMinimizer.minimize(self._context, maxIterations=200)
        self._context.setVelocitiesToTemperature(temperature, seed)
        return self._read()[:2]

    def _prepare(self, state: State, i: int, temperature: float, seed: int) -> None:
        step = self._context.getIntegrator()
        step.setTemperature(temperature * unit.kelvin)
        step.setRandomNumberSeed(seed)
        self._context.reinitialize()  # a seed counts from here on only
        self._context.setPositions(state.positions[i])
        self._context.setVelocities(state.velocities[i])

    def _read(self) -> tuple[np.ndarray, np.ndarray, float]:
        got = self._context.getState(getPositions=True, getVelocities=True, getEnergy=True)
        return (
            got.getPositions(asNumpy=True).value_in_unit(unit.nanometer),
            got.getVelocities(asNumpy=True).value_in_unit(unit.nanometer / unit.picosecond),
            got.getPotentialEnergy().value_in_unit(unit.kilojoule_per_mole),
        )


class SideBySide:
    """All replicas at once; lanes that are left over repeat the first ones and are not looked at."""

    def __init__(self, peptide: Peptide):
        self._lanes = Lanes(peptide.system)

    def block(self, state: State, temperatures: np.ndarray, entropy: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        n = len(temperatures)
        frames = np.empty((n, BLOCK, *state.positions.shape[1:]), dtype=np.float32)
        energy = np.empty(n)
        for first in range(0, n, LANES):
            inside = np.arange(first, min(first + LANES, n))
            rows = np.resize(inside, LANES)
            numbers = np.random.SeedSequence([*entropy, first]).generate_state(4 * LANES).reshape(4, LANES)
            x, v, thermal = state.positions[rows], state.velocities[rows], GAS_CONSTANT * temperatures[rows]
            for k in range(BLOCK):
                x, v, u = self._lanes.step(x, v, thermal, round(INTERVAL / STEP), STEP, FRICTION, numbers)
                x -= x.mean(1, keepdims=True)  # molecules drift, and float32 is most precise near the origin
                frames[inside, k] = x[: len(inside)]
            state.positions[inside], state.velocities[inside] = x[: len(inside)], v[: len(inside)]
            energy[inside] = u[: len(inside)]
        return frames, energy


ENGINES: dict[str, Callable[[Peptide], Engine]] = {"lanes": SideBySide, "openmm": OneByOne}


class Walker:
    """One process's replicas, kept in a folder: a trajectory for each rung and a checkpoint."""

    def __init__(
        self, folder: Path, peptide: Peptide, temperatures: tuple[float, ...], index: int, seed: int = 0,
        engine: str = "lanes",
    ):  # fmt: skip
        if not temperatures or min(temperatures) <= 0:
            raise InputError(f"temperatures must be positive, in kelvin, got {temperatures}")
        if engine not in ENGINES:
            raise InputError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
        self.folder, self.peptide, self.index, self.seed = folder, peptide, index, seed
        self.temperatures = tuple(sorted(temperatures))
        self.files = [folder / f"{rung}-{t:g}K.dcd" for rung, t in enumerate(self.temperatures)]
        self.checkpoint = folder / "checkpoint.npz"
        self._engine = ENGINES[engine](peptide)

    def open(self) -> State:
        """The state to go on from: the checkpoint's, with the trajectories cut to it, or a fresh start."""
        found = sorted(path.name for path in self.folder.glob("*.dcd"))
        if self.checkpoint.exists():
            if found != sorted(path.name for path in self.files):
                raise InputError(f"{self.folder} holds the rungs {', '.join(found)}, not {self.temperatures}")
            state = State.decode(self.checkpoint)
            for path in self.files:
                trajectory.truncate(path, state.n_blocks * BLOCK, len(self.peptide.atoms))
            return state
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.files:  # written by a process that died before its first checkpoint
            path.unlink(missing_ok=True)
        state = self._start()
        with (self.folder / "topology.pdb").open("w") as file:
            app.PDBFile.writeFile(self.peptide.topology, state.positions[0] * unit.nanometer, file)
        return state

    def _start(self) -> State:
        """Minimised structures, a different torsion for each replica and walker, with thermal velocities."""
        shape = (len(self.temperatures), len(self.peptide.atoms), 3)
        positions, velocities, openmm_engine = np.empty(shape), np.empty(shape), OneByOne(self.peptide)
        for i, temperature in enumerate(self.temperatures):
            _, x = self.peptide.build(*STARTS[(i + self.index) % len(STARTS)])
            seed = _seed(self.seed, self.index, 0, i)
            positions[i], velocities[i] = openmm_engine.relaxed(x, temperature, seed)
        return State(positions, velocities, np.arange(len(positions)))

    def run(self, state: State) -> Iterator[State]:
        """Block after block without end; what is yielded is on disk already."""
        temperatures = np.asarray(self.temperatures)
        betas = 1 / (GAS_CONSTANT * temperatures)
        while True:
            entropy = (self.seed, self.index, state.n_blocks + 1)
            frames, energy = self._engine.block(state, temperatures[state.rung], entropy)
            if not np.isfinite(energy).all():
                raise FloatingPointError(f"the dynamics blew up in block {state.n_blocks} of {self.folder}")
            before = state.rung.copy()
            self._exchange(state, energy, betas)
            state.n_blocks += 1
            for rung, values in zip(before, frames, strict=True):
                trajectory.append(self.files[rung], values, INTERVAL)
            publish(self.checkpoint, state.encode(), sync=False)
            yield state

    def _exchange(self, state: State, energy: np.ndarray, betas: np.ndarray) -> None:
        before = state.rung.copy()
        rng = np.random.default_rng([self.seed, self.index, state.n_blocks, 1])
        attempted, accepted = exchange(energy, state.rung, betas, rng)
        # Velocities belong to a temperature; scaling them keeps the acceptance a matter of potential energies alone.
        state.velocities *= np.sqrt(betas[before] / betas[state.rung])[:, None, None]
        state.n_attempted, state.n_accepted = state.n_attempted + attempted, state.n_accepted + accepted


def _seed(*entropy: int) -> int:
    """A positive seed for OpenMM, which reads 0 as "choose one"."""
    return 1 + int(np.random.SeedSequence(entropy).generate_state(1)[0] % (2**31 - 2))


def rungs(data: Path, peptide: Peptide, temperature: float, walker: int | None = None) -> list[Path]:
    """Every trajectory at this temperature, walker by walker, or those of one walker."""
    which = "*" if walker is None else walker
    found = sorted((data / peptide.name).glob(f"walker-{which}/*-{temperature:g}K.dcd"))
    if not found:
        raise InputError(f"no trajectories of the {peptide.name} at {temperature:g} K under {data}; run `md` first")
    return found


def walkers(data: Path, peptide: Peptide, temperature: float) -> list[int]:
    """Which walkers have trajectories at this temperature."""
    return sorted({int(path.parent.name.removeprefix("walker-")) for path in rungs(data, peptide, temperature)})
