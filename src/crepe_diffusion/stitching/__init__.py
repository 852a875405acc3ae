"""Long plans from short pieces: copies of one model, rewards that tie them together, and a move for whole plans.

plan = Segments(model, n).tilt(Reach(start)).tilt(Junctions()).tilt(Reach(goal, -1, -1))
"""

from crepe_diffusion.stitching.annealing import Matched
from crepe_diffusion.stitching.restitch import Restitch
from crepe_diffusion.stitching.rewards import Junctions, Reach, WayPoint
from crepe_diffusion.stitching.segments import Segments

__all__ = ["Junctions", "Matched", "Reach", "Restitch", "Segments", "WayPoint"]
