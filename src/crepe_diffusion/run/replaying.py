"""A run checked against itself: from the older checkpoint to the newer, bit for bit.

f(checkpoint n, seed) = checkpoint m         for the same configuration, models and machine
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from crepe_diffusion.errors import InputError
from crepe_diffusion.models import Model
from crepe_diffusion.run import checkpoint, opening
from crepe_diffusion.run.events import chain_events
from crepe_diffusion.run.folder import require_run
from crepe_diffusion.run.history import History
from crepe_diffusion.run.store import read_store
from crepe_diffusion.targets import Reward, Target

__all__ = ["Replay", "replay"]


@dataclass(frozen=True)
class Replay:
    """Iterations that were run again, and where they did not give what the run holds."""

    first: int
    last: int
    differences: list[str]


def replay(
    folder: str | Path,
    *,
    target: Target | Model | None = None,
    rewards: Iterable[Reward] = (),
    trust: bool = False,
    **arguments: Any,
) -> Replay:
    """Run the iterations between the last two checkpoints again; nothing is written.

    Draws and the newer checkpoint must come out as the run holds them, whatever it is that made them: also a run of
    several processes is replayed by one. The arguments are those of `Run.resume`.

    >>> import tempfile
    >>> from crepe_diffusion.run import Run
    >>> folder = tempfile.mkdtemp() + "/run"
    >>> sizes = {"ladder": {"n_levels": 3}, "sampler": {"fit_samples": 16}}
    >>> with Run.start(folder, {"experiment": "mixture-tilt", **sizes}) as run:
    ...     n = [run.run(iterations=n).reason for n in (2, 4)]
    >>> replay(folder)
    Replay(first=3, last=4, differences=[])
    """
    folder = Path(os.path.abspath(folder))
    require_run(folder)
    config, experiment = opening.described(folder, opening.Made(target, list(rewards), None, arguments), trust)
    found = checkpoint.whole(folder)
    if len(found) < 2:
        raise InputError(f"{folder}: a replay needs two whole checkpoints, there {_are(len(found))}")
    (newer, wanted), (older, start) = found
    history = History(folder, newer.run, experiment, newer.history, older.target)
    sampler = opening.sampler_of(config, experiment, history.target(history.now["rewards"]), start)
    draws, _ = read_store(folder / "samples.zarr", since=newer.samples)
    differences: list[str] = []
    while sampler.iteration < newer.iteration:
        while history.take_up(sampler):
            pass
        info = sampler.step()
        if info.iteration % config.output.thin == 0:
            row = {"x": sampler.output().numpy(force=True), "target": np.int32(history.index)}
            differences += _compare_row(draws, info.iteration, {**row, **sampler.draw_row(info)})
        chain_events(sampler, config.output, history.now["from_iteration"])
    while history.index < newer.target and history.take_up(sampler):
        pass
    differences += _compare_states(sampler.snapshot(), wanted, f"checkpoint {newer.iteration}")
    return Replay(older.iteration + 1, newer.iteration, differences)


def _are(n: int) -> str:
    return "is one" if n == 1 else "is none"


def _compare_row(draws: Mapping[str, np.ndarray], n: int, row: Mapping[str, Any]) -> list[str]:
    """Where a draw is not the one that was recorded; a row that was dropped is not compared."""
    at = np.flatnonzero(draws["iteration"] == n)
    if not len(at):
        return []
    stored = {name: draws[name][at[0]] for name in row}
    return [f"iteration {n}: {k}" for k, v in row.items() if _bytes(v, stored[k].dtype) != _bytes(stored[k])]


def _bytes(values: Any, dtype: Any = None) -> bytes:
    return np.ascontiguousarray(values, dtype).tobytes()


def _compare_states(now: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str) -> list[str]:
    names = [name for name in now if name not in wanted or not checkpoint.same(now[name], wanted[name])]
    return [f"{what}: {name}" for name in names]
