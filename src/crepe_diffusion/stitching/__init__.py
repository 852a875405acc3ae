"""Long plans from short segments: copies of one model, rewards that couple them, and a move for whole plans.

plan = Segments(model, n).tilt(Reach(start)).tilt(Junctions()).tilt(Reach(goal, -1, -1))
"""

from crepe_diffusion.stitching.annealing import Matched
from crepe_diffusion.stitching.restitch import Restitch
from crepe_diffusion.stitching.rewards import (
    AnySegmentReward,
    Junctions,
    LinkReward,
    Reach,
    SegmentReward,
    WayPoint,
)
from crepe_diffusion.stitching.segments import Segments

__all__ = [
    "AnySegmentReward",
    "Junctions",
    "LinkReward",
    "Matched",
    "Reach",
    "Restitch",
    "SegmentReward",
    "Segments",
    "WayPoint",
]
