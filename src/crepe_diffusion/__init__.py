"""Control pretrained diffusion models by replica exchange: new laws from old models, without retraining.

>>> import torch, crepe_diffusion as cd
>>> p = cd.models.GaussianMixture(weights=[0.3, 0.5, 0.2], means=[[-4.0], [0.0], [3.0]], stds=[0.5, 0.8, 0.4])
>>> cold = p ** 2.0
>>> chain = cd.ReplicaExchange(cold, cd.ladder.karras(n_levels=11, sigma_min=0.02, sigma_max=20), n_chains=2, seed=0)
>>> out = chain.sample(50, burn_in=10)
>>> out.x.shape
torch.Size([50, 2, 1])
"""

from typing import TYPE_CHECKING, Any

from crepe_diffusion import models, processes, stitching
from crepe_diffusion.diagnostics import Diagnostics, Estimate, RunData, ess, rhat, verdict
from crepe_diffusion.errors import InputError, NonFiniteError
from crepe_diffusion.kernels import Bounce, Langevin, SingleToken
from crepe_diffusion.proposals import Proposal
from crepe_diffusion.random import Stream
from crepe_diffusion.samplers import SMC, Plain, ReplicaExchange, equal_rejection, fit_information
from crepe_diffusion.schedules import Ladder, anneal, ladder
from crepe_diffusion.targets import Reward, Target, guided

if TYPE_CHECKING:
    from crepe_diffusion.run import Run, read_run

__version__ = "0.1.0"

__all__ = [
    "SMC",
    "Bounce",
    "Diagnostics",
    "Estimate",
    "InputError",
    "Ladder",
    "Langevin",
    "NonFiniteError",
    "Plain",
    "Proposal",
    "ReplicaExchange",
    "Reward",
    "Run",
    "RunData",
    "SingleToken",
    "Stream",
    "Target",
    "anneal",
    "equal_rejection",
    "ess",
    "fit_information",
    "guided",
    "ladder",
    "models",
    "processes",
    "read_run",
    "rhat",
    "stitching",
    "verdict",
]


def __getattr__(name: str) -> Any:
    """Runs are imported when they are first asked for, so that samplers need nothing of what they need."""
    if name not in ("Run", "read_run"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from crepe_diffusion import run
    except ModuleNotFoundError as error:
        raise ImportError(f"cd.{name} needs {error.name!r}: pip install 'crepe-diffusion[run]'") from error
    return getattr(run, name)
