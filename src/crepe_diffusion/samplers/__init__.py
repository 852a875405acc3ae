"""Samplers of one shape: replica exchange, sequential Monte Carlo, particle Gibbs, and plain denoising."""

from crepe_diffusion.samplers.base import Column, Continuing, Info
from crepe_diffusion.samplers.choose import Forecast, Sampled, sample
from crepe_diffusion.samplers.information import information_from_data
from crepe_diffusion.samplers.particle_gibbs import ParticleGibbs, Sweep
from crepe_diffusion.samplers.pilot import Pilot, pilot
from crepe_diffusion.samplers.plain import Plain
from crepe_diffusion.samplers.plan import Plan
from crepe_diffusion.samplers.replica_exchange import Exchange, ReplicaExchange
from crepe_diffusion.samplers.resampling import Multinomial, Partial, Resampling, Residual, Stratified, Systematic
from crepe_diffusion.samplers.result import Chains, Independent, Particles, Result, Sweeps
from crepe_diffusion.samplers.smc import SMC, Pass
from crepe_diffusion.samplers.weights import DiscreteGuidance, FeynmanKac, PathWork, Steering, Twisted, Weight

__all__ = [
    "SMC",
    "Chains",
    "Column",
    "Continuing",
    "DiscreteGuidance",
    "Exchange",
    "FeynmanKac",
    "Forecast",
    "Independent",
    "Info",
    "Multinomial",
    "Partial",
    "ParticleGibbs",
    "Particles",
    "Pass",
    "PathWork",
    "Pilot",
    "Plain",
    "Plan",
    "ReplicaExchange",
    "Resampling",
    "Residual",
    "Result",
    "Sampled",
    "Steering",
    "Stratified",
    "Sweep",
    "Sweeps",
    "Systematic",
    "Twisted",
    "Weight",
    "information_from_data",
    "pilot",
    "sample",
]
