"""Samplers: replica exchange, sequential Monte Carlo, and plain guidance."""

from crepe_diffusion.samplers.replica_exchange import Info, ReplicaExchange, Samples, equal_rejection
from crepe_diffusion.samplers.setup import fit_information
from crepe_diffusion.samplers.smc import SMC, Particles, Plain

__all__ = [
    "SMC",
    "Info",
    "Particles",
    "Plain",
    "ReplicaExchange",
    "Samples",
    "equal_rejection",
    "fit_information",
]
