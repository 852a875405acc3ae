"""Runs that people can trust: a folder with samples, checkpoints, a history of targets, a log and a report."""

from crepe_diffusion.run.data import RunData
from crepe_diffusion.run.experiment import Experiment
from crepe_diffusion.run.files import DamagedError
from crepe_diffusion.run.runner import Outcome, Progress, Run

__all__ = ["DamagedError", "Experiment", "Outcome", "Progress", "Run", "RunData"]
