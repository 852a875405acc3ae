"""Noising processes and the kernels that walk them."""

from crepe_diffusion.processes.base import Law, Process, View
from crepe_diffusion.processes.discrete import Euler, Masked, Uniform
from crepe_diffusion.processes.gaussian import EulerMaruyama, FisherTable, Gaussian, GaussianData
from crepe_diffusion.processes.oracle import Oracle

__all__ = [
    "Euler",
    "EulerMaruyama",
    "FisherTable",
    "Gaussian",
    "GaussianData",
    "Law",
    "Masked",
    "Oracle",
    "Process",
    "Uniform",
    "View",
]
