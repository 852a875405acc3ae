"""Noising processes and the kernels that walk them."""

from crepe_diffusion.processes.base import Coefficients, Evaluation, Process
from crepe_diffusion.processes.discrete import Discrete, TokenMoves
from crepe_diffusion.processes.euler import Euler
from crepe_diffusion.processes.gaussian import EulerMaruyama, Gaussian, GaussianProcess
from crepe_diffusion.processes.information import (
    Adaptive,
    FisherTable,
    GaussianData,
    Information,
    Isotropic,
    Measured,
    Spectrum,
)
from crepe_diffusion.processes.masked import Counted, Masked
from crepe_diffusion.processes.uniform import Uniform

__all__ = [
    "Adaptive",
    "Coefficients",
    "Counted",
    "Discrete",
    "Euler",
    "EulerMaruyama",
    "Evaluation",
    "FisherTable",
    "Gaussian",
    "GaussianData",
    "GaussianProcess",
    "Information",
    "Isotropic",
    "Masked",
    "Measured",
    "Process",
    "Spectrum",
    "TokenMoves",
    "Uniform",
]
