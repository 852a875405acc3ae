"""Several runs of one configuration as one result: each has chains of its own, and none has waited for another.

x[draw, chain] = the judged draws of run 1, of run 2, ...        side by side, as many of each as the shortest has
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np

from crepe_diffusion.diagnostics import Diagnostics
from crepe_diffusion.diagnostics.data import RunData
from crepe_diffusion.diagnostics.evidence import Evidence
from crepe_diffusion.errors import InputError
from crepe_diffusion.run.folder import is_run, read_run

__all__ = ["group_folder", "parts", "read_runs"]

GROUP = "group-"


def group_folder(folder: Path, index: int) -> Path:
    """Where a group of processes has its run."""
    return folder / f"{GROUP}{index:03d}"


def parts(folder: Path) -> list[Path]:
    """The runs of a folder: itself, or those of the groups in it."""
    groups = [] if is_run(folder) else sorted(path for path in folder.glob(f"{GROUP}*") if is_run(path))
    return groups or [folder]


def read_runs(folders: Iterable[str | Path]) -> RunData:
    """Runs that differ in nothing but their seeds and their lengths, as one.

    A folder of groups counts as all of them. Pooled are the draws that are judged, those of the present target after
    burn-in. The verdict then compares all chains with each other, whichever run they belong to.

    >>> import tempfile
    >>> from crepe_diffusion.run import Run
    >>> root = Path(tempfile.mkdtemp())
    >>> for seed in (1, 2):
    ...     sizes = {"ladder": {"n_levels": 3}, "sampler": {"fit_samples": 16, "n_chains": 2, "seed": seed}}
    ...     with Run.start(root / str(seed), {"experiment": "mixture-tilt", "output": {"burn_in": 2}, **sizes}) as run:
    ...         n = run.run(iterations=2 + 3 * seed)
    >>> read_runs([root / "1", root / "2"]).x.shape
    (3, 4, 1)
    """
    places = [part for folder in folders for part in parts(Path(folder))]
    if not places:
        raise InputError("no run was given")
    runs = [read_run(place) for place in places]
    if len(runs) == 1:
        return runs[0]
    _check_alike(places, runs)
    return _pooled(runs)


def _check_alike(places: Sequence[Path], runs: Sequence[RunData]) -> None:
    """Whether these are draws of one law, and none is there twice."""
    seeds: dict[Any, Path] = {}
    for place, run in zip(places, runs, strict=True):
        seed = run.config.get("sampler", {}).get("seed")
        if seed in seeds:
            raise InputError(f"{place} has the seed of {seeds[seed]}, {seed}: the same draws would count twice")
        seeds[seed] = place
        for name, value, wanted in _differences(run.config, runs[0].config):
            raise InputError(f"{place} differs from {places[0]} in {name}: {value!r}, not {wanted!r}")
        if run.targets[-1]["rewards"] != runs[0].targets[-1]["rewards"]:
            raise InputError(f"{place} has another target than {places[0]}: refine them alike")


def _differences(config: dict[str, Any], wanted: dict[str, Any]) -> Iterable[tuple[str, Any, Any]]:
    """What decides the law of the draws, and differs."""
    for table in ("experiment", "options", "ladder", "sampler", "reward", "output"):
        here, there = config.get(table), wanted.get(table)
        if not isinstance(here, dict) or not isinstance(there, dict):
            if here != there:
                yield table, here, there
            continue
        for key in sorted({*here, *there} - {"seed", "micro_batch", "n_chains"}):
            decides = table != "output" or key in ("thin", "adapt_at", "scalars")
            if decides and here.get(key) != there.get(key):
                yield f"[{table}] {key}", here.get(key), there.get(key)


def _pooled(runs: Sequence[RunData]) -> RunData:
    judged = [Evidence(run).judged for run in runs]
    n, first = min(int(j.sum()) for j in judged), runs[0]

    def side_by_side(arrays: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([a[j][:n] for a, j in zip(arrays, judged, strict=True)], 1)

    same_levels = all(np.array_equal(run.levels, first.levels) for run in runs)
    known = [run.diagnostics for run in runs if run.diagnostics is not None]
    notes = [f"{run.name}: {text}" for run in runs for text in run.notes]
    names = ", ".join(run.name for run in runs)
    notes.append(f"{len(runs)} runs with seeds of their own, {n:,} judged draws of each: {names}")
    if known and not same_levels:
        notes.append("Levels were moved in each run by itself (adapt_at): exchange and log Z are in their own reports")
    states = {run.status for run in runs}
    seeds = [run.config.get("sampler", {}).get("seed") for run in runs]
    return replace(
        first,
        name=first.path.resolve().parent.name if first.path is not None else first.name,
        path=None,
        config={**first.config, "sampler": {**first.config.get("sampler", {}), "seed": seeds}},
        status="running" if "running" in states else "stopped" if "stopped" in states else "finished",
        x=side_by_side([run.x for run in runs]),
        iteration=first.iteration[judged[0]][:n],
        target=np.zeros(n, dtype=first.target.dtype),
        targets=first.targets[-1:],
        n_burnt=0,
        scalars={name: side_by_side([run.scalars[name] for run in runs]) for name in first.scalars},
        trace={},
        diagnostics=Diagnostics.joined(known) if len(known) == len(runs) and same_levels else None,
        counts=reduce(add, [run.counts for run in runs]),
        columns={name: side_by_side([run.columns[name] for run in runs]) for name in first.columns},
        notes=notes,
    )
