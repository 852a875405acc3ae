"""Runs that people can trust: a folder with samples, checkpoints, a history of targets, a log and a report."""

from crepe_diffusion.run.experiment import Experiment
from crepe_diffusion.run.files import DamagedError, publish
from crepe_diffusion.run.folder import read_run
from crepe_diffusion.run.progress import Progress
from crepe_diffusion.run.runner import Run
from crepe_diffusion.run.stopping import Outcome

__all__ = ["DamagedError", "Experiment", "Outcome", "Progress", "Run", "publish", "read_run"]
