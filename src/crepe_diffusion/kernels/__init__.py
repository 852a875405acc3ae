"""Markov kernels on the replicas: swap between levels, explore within one."""

from crepe_diffusion.kernels.explore import Bounce, Explorer, Langevin, ParticleStarter, SingleToken, Start, Starter
from crepe_diffusion.kernels.state import State
from crepe_diffusion.kernels.swap import Swaps, metropolis, swap

__all__ = [
    "Bounce",
    "Explorer",
    "Langevin",
    "ParticleStarter",
    "SingleToken",
    "Start",
    "Starter",
    "State",
    "Swaps",
    "metropolis",
    "swap",
]
