"""Noising processes and the kernels that walk them."""

from crepe_diffusion.processes.base import Coefficients, Evaluation, Process
from crepe_diffusion.processes.discrete import Euler, Masked, Uniform
from crepe_diffusion.processes.gaussian import EulerMaruyama, FisherTable, Gaussian, GaussianData

__all__ = [
    "Coefficients",
    "Euler",
    "EulerMaruyama",
    "Evaluation",
    "FisherTable",
    "Gaussian",
    "GaussianData",
    "Masked",
    "Process",
    "Uniform",
]
