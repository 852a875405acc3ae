"""Pretrained diffusions: the protocol of the core, wrappers for functions, adapters for checkpoints, known truths."""

from crepe_diffusion.models.base import Denoiser, Model, TokenModel
from crepe_diffusion.models.conditions import Each
from crepe_diffusion.models.diffusers import from_diffusers
from crepe_diffusion.models.edm import EDM
from crepe_diffusion.models.edm_checkpoints import edm2_decoder, from_edm
from crepe_diffusion.models.edm_pickles import convert_edm
from crepe_diffusion.models.flow import from_velocity
from crepe_diffusion.models.masked_lm import from_masked_lm
from crepe_diffusion.models.mdlm import from_mdlm
from crepe_diffusion.models.mixture import GaussianMixture
from crepe_diffusion.models.pretrained import Pretrained
from crepe_diffusion.models.sedd import from_sedd
from crepe_diffusion.models.table import TokenTable
from crepe_diffusion.models.tokens import LanguageModel

__all__ = [
    "EDM",
    "Denoiser",
    "Each",
    "GaussianMixture",
    "LanguageModel",
    "Model",
    "Pretrained",
    "TokenModel",
    "TokenTable",
    "convert_edm",
    "edm2_decoder",
    "from_diffusers",
    "from_edm",
    "from_masked_lm",
    "from_mdlm",
    "from_sedd",
    "from_velocity",
]
