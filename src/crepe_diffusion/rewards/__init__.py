"""Rewards: terms of a target, annealed along the ladder, and adapters for networks that judge images."""

from crepe_diffusion.rewards.images import Aesthetic, Classifier, ClipScore, EachImage, ImageReward
from crepe_diffusion.rewards.terms import GUIDANCE, Reward, RewardSum

__all__ = [
    "GUIDANCE",
    "Aesthetic",
    "Classifier",
    "ClipScore",
    "EachImage",
    "ImageReward",
    "Reward",
    "RewardSum",
]
