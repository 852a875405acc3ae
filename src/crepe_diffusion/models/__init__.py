"""Pretrained diffusions: the protocol of the core, wrappers for functions, and models with known truth."""

from crepe_diffusion.models.base import Denoiser, Model, TokenModel
from crepe_diffusion.models.edm import EDM
from crepe_diffusion.models.mixture import GaussianMixture
from crepe_diffusion.models.table import TokenTable

__all__ = ["EDM", "Denoiser", "GaussianMixture", "Model", "TokenModel", "TokenTable"]
