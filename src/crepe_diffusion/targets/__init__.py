"""Targets, rewards and proposals, and how they are evaluated at a point."""

from crepe_diffusion.targets.algebra import Reward, Target, guided
from crepe_diffusion.targets.evaluate import Counts, Evaluator, Proposal

__all__ = ["Counts", "Evaluator", "Proposal", "Reward", "Target", "guided"]
