"""Pretrained diffusions: the protocol of the core, wrappers for functions, and models with known truth."""

from crepe_diffusion.models.base import Denoiser, Model, TokenModel
from crepe_diffusion.models.edm import EDM
from crepe_diffusion.models.masked_lm import from_masked_lm
from crepe_diffusion.models.mixture import GaussianMixture
from crepe_diffusion.models.table import TokenTable
from crepe_diffusion.models.tokens import LanguageModel

__all__ = ["EDM", "Denoiser", "GaussianMixture", "LanguageModel", "Model", "TokenModel", "TokenTable", "from_masked_lm"]
