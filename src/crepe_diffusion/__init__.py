"""Control pretrained diffusion models by replica exchange: new laws from old models, without retraining.

>>> import torch, crepe_diffusion as cd
>>> p = cd.models.GaussianMixture(weights=[0.3, 0.5, 0.2], means=[[-4.0], [0.0], [3.0]], stds=[0.5, 0.8, 0.4])
>>> cold = p ** 2.0
>>> chain = cd.ReplicaExchange(cold, cd.ladder.karras(n_levels=11, sigma_min=0.02, sigma_max=20), n_chains=2, seed=0)
>>> out = chain.sample(50, burn_in=10)
>>> out.x.shape
torch.Size([100, 1])
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from crepe_diffusion import models, processes, stitching
from crepe_diffusion.diagnostics import Diagnostics, Estimate, RunData, ess, rhat, verdict
from crepe_diffusion.errors import InputError, NonFiniteError, StoppedError
from crepe_diffusion.kernels import Bounce, Langevin, SingleToken
from crepe_diffusion.proposals import Proposal
from crepe_diffusion.random import Stream
from crepe_diffusion.samplers import (
    SMC,
    Chains,
    Continuing,
    DiscreteGuidance,
    FeynmanKac,
    Multinomial,
    Partial,
    ParticleGibbs,
    Particles,
    PathWork,
    Pilot,
    Plain,
    Plan,
    ReplicaExchange,
    Resampling,
    Residual,
    Result,
    Sampled,
    Steering,
    Stratified,
    Systematic,
    Twisted,
    Weight,
    information_from_data,
    pilot,
    sample,
)
from crepe_diffusion.schedules import Ladder, anneal, ladder
from crepe_diffusion.targets import Reward, Target, guided

if TYPE_CHECKING:
    from crepe_diffusion.report import write_report
    from crepe_diffusion.run import Run, read_run, read_runs

__version__ = "0.1.0"

__all__ = [
    "SMC",
    "Bounce",
    "Chains",
    "Continuing",
    "Diagnostics",
    "DiscreteGuidance",
    "Estimate",
    "FeynmanKac",
    "InputError",
    "Ladder",
    "Langevin",
    "Multinomial",
    "NonFiniteError",
    "Partial",
    "ParticleGibbs",
    "Particles",
    "PathWork",
    "Pilot",
    "Plain",
    "Plan",
    "Proposal",
    "ReplicaExchange",
    "Resampling",
    "Residual",
    "Result",
    "Reward",
    "Run",
    "RunData",
    "Sampled",
    "SingleToken",
    "Steering",
    "StoppedError",
    "Stratified",
    "Stream",
    "Systematic",
    "Target",
    "Twisted",
    "Weight",
    "anneal",
    "ess",
    "guided",
    "information_from_data",
    "ladder",
    "models",
    "pilot",
    "processes",
    "read_run",
    "read_runs",
    "rhat",
    "sample",
    "stitching",
    "verdict",
    "write_report",
]


# Imported on first use, so that samplers do without the packages that runs and reports need.
LAZY = {"Run": "run", "read_run": "run", "read_runs": "run", "write_report": "report"}


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"crepe_diffusion.{LAZY[name]}")
    except ModuleNotFoundError as error:
        extra = {"run": "run", "report": "plots"}[LAZY[name]]
        raise ImportError(f"cd.{name} needs {error.name!r}: pip install 'crepe-diffusion[{extra}]'") from error
    return getattr(module, name)
