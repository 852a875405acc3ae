"""Everything after dynamics in small: shipped frames and weights, every method, all metrics, table and figures."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from studies.molecules import data, model, report
from studies.molecules.metrics import Truth
from studies.molecules.peptides import peptide
from studies.molecules.tempering import ABLATIONS, METHODS, Budget, Cooling, temper

__all__ = ["run"]

# The ladder keeps its 201 steps: with fewer, Euler-Maruyama steps of a tempered score are unstable.
BUDGET = Budget(rows=2 * 24 * 201, n_chains=2, own_chains=2, batch=24, burn_in=0.5, fit_samples=16)
N_SAMPLES = 200
TRIED = tuple(name for name in METHODS if name not in ABLATIONS)  # which differ by settings only


def run(folder: Path, weights: str | Path = "tiny", frames: Path | None = None) -> str:
    """Sample, measure and write into the folder; the table."""
    chosen = peptide("dipeptide")
    frames = frames or Path(str(files("studies.molecules") / "tiny-data"))
    cold, hot = (
        Truth(chosen, t, data.read_trajectories(frames, chosen, t, equilibration=0.0))
        for t in (chosen.cold, chosen.hot)
    )
    list(temper(model.load_model(weights), Cooling(chosen.beta), folder, BUDGET, (0,), TRIED))
    rows = report.rows_of(cold, hot, folder, N_SAMPLES)
    report.write(rows, cold, folder)
    return report.table([row.measured for row in rows], chosen)
