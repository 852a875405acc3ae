"""Runs that last: a folder with samples, checkpoints, a history of targets and a log."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crepe_diffusion.run.experiment import Experiment
    from crepe_diffusion.run.files import DamagedError, publish
    from crepe_diffusion.run.folder import read_run
    from crepe_diffusion.run.pooling import read_runs
    from crepe_diffusion.run.progress import Progress
    from crepe_diffusion.run.repair import copy_without_damage
    from crepe_diffusion.run.replaying import replay
    from crepe_diffusion.run.runner import Run
    from crepe_diffusion.run.stopping import Outcome
    from crepe_diffusion.run.team import distributed, model_mesh, seed_of

__all__ = [
    "DamagedError",
    "Experiment",
    "Outcome",
    "Progress",
    "Run",
    "copy_without_damage",
    "distributed",
    "model_mesh",
    "publish",
    "read_run",
    "read_runs",
    "replay",
    "seed_of",
]

# Imported on first use: an `Experiment` can be defined without the packages that writing a run needs.
ROOMS = {
    "DamagedError": "files",
    "Experiment": "experiment",
    "Outcome": "stopping",
    "Progress": "progress",
    "Run": "runner",
    "copy_without_damage": "repair",
    "distributed": "team",
    "model_mesh": "team",
    "publish": "files",
    "read_run": "folder",
    "read_runs": "pooling",
    "replay": "replaying",
    "seed_of": "team",
}


def __getattr__(name: str) -> Any:
    if name not in ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{ROOMS[name]}"), name)
