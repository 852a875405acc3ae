"""Draws moved on by a few picoseconds of dynamics with the known energy.

    x ~ a sampler,      then Langevin dynamics at T, which leave exp(-U / kT) as it is

A model makes small errors that energies show at once: atoms that are too close, angles that are too wide. The energy of
a molecule is known, and dynamics mend what is fast within picoseconds. Shares of basins move too, faster where it is
hot: how far energies and basins have gone is kept beside the draws, so that one can see what was the sampler's doing
and what that of the dynamics. Every method is given the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from crepe_diffusion import InputError
from studies.molecules.convergence import BASINS, basins
from studies.molecules.dynamics import BLOCK, INTERVAL, OneByOne, SideBySide, State
from studies.molecules.peptides import Peptide, energies
from studies.molecules.tempering import UNTEMPERED, kept_draws
from studies.shared.pages import markdown

__all__ = ["SHOWN", "relax", "relaxed", "table"]

SHOWN = (1, 2, 5, 10, 20)  # ps
ALPHA = [basin.name for basin in BASINS].index("alpha")


def relaxed(peptide: Peptide, x: np.ndarray, temperature: float, seed: int = 0) -> np.ndarray:
    """Where each of x (draws, atoms, 3) is after every picosecond, (draws, BLOCK, atoms, 3).

    First a few steps downhill, for dynamics do not bear atoms on top of one another.
    """
    builder, n = OneByOne(peptide), len(x)
    numbers = np.random.SeedSequence(seed).generate_state(n) % (2**31 - 2) + 1
    starts = [builder.relaxed(row, temperature, int(k)) for row, k in zip(x, numbers, strict=True)]
    positions, velocities = (np.stack(part) for part in zip(*starts, strict=True))
    state = State(positions, velocities, np.arange(n))
    return SideBySide(peptide).block(state, np.full(n, temperature), (seed, n))[0]


def relax(peptide: Peptide, folder: Path, out: Path, ps: int, n: int) -> Iterator[str]:
    """Relax n draws of every method and seed in `folder`, and keep them in `out`; yields the name of each."""
    if not 1 <= ps <= BLOCK * INTERVAL:
        raise InputError(f"ps must be a whole number from 1 to {BLOCK * INTERVAL:g}, got {ps}")
    before, after = kept_draws(folder), kept_draws(out)
    if not before.names():
        raise InputError(f"no samples in {before.folder}; run `temper` first")
    for name in before.names():
        if name not in after:
            record, arrays = before[name], before.arrays(name)
            rows = np.linspace(0, len(arrays["x"]) - 1, min(n, len(arrays["x"]))).astype(int)
            x, temperature = arrays["x"][rows], peptide.hot if record["method"] == UNTEMPERED else peptide.cold
            frames = relaxed(peptide, x, temperature, seed=int(record["seed"]))
            shown = [x, *(frames[:, round(t / INTERVAL) - 1] for t in SHOWN)]
            record |= {
                "relaxed": ps,
                "median U": [float(np.median(energies(peptide, some))) for some in shown],
                "alpha": [float(basins(some, peptide)[:, ALPHA].mean()) for some in shown],
            }
            last = frames[:, round(ps / INTERVAL) - 1].astype(np.float32)
            after.save(name, record, x=last - last.mean(1, keepdims=True), family=arrays["family"][rows])
        yield name


def table(records: list[dict[str, Any]]) -> str:
    """One line for each method: energies and the share of alpha along the dynamics, means over seeds."""
    times = ["before", *(f"{t} ps" for t in SHOWN)]
    head = ["method", *(f"U, {t}" for t in times), *(f"alpha, {t} (%)" for t in times)]
    lines = []
    for method in dict.fromkeys(r["method"] for r in records):
        mine = [r for r in records if r["method"] == method]
        energy, alpha = (np.mean([r[key] for r in mine], 0) for key in ("median U", "alpha"))
        lines.append([method, *(f"{u:,.0f}" for u in energy), *(f"{100 * a:.1f}" for a in alpha)])
    return markdown(head, lines)
