"""What pilots show of degenerate weights: how much has one ancestor, and how far walks up and down disagree on log Z.

    python -m studies.battery.gaps [--particles 64] [PROBLEM ...]

Of eight pilots of each problem, `q` (see `samplers/choose.py`) and log Z by walks up less log Z by walks down. By
default the battery's black box, four other hard problems, and the black boxes and tokens of four held-out seeds; a
minute and a half of one core for each number of particles.
"""

from __future__ import annotations

import argparse

import torch

import crepe_diffusion as cd
from studies.battery.calibration import chosen
from studies.battery.problems import random
from studies.shared.pages import markdown

DEFAULT = (
    "black box of 8 coordinates",
    "mini-batch mixture",
    "posterior of a mode of prior weight 0.001",
    "rare tilt with gradient, linear annealing",
    "tempering isotropic d=32 beta=2",
    *(p.name for s in (301, 302, 303, 304) for p in random(s) if "black" in p.name or "tokens" in p.name),
)
PILOTS = 8


def gaps(name: str, n: int) -> list[tuple[float, float]]:
    """q and the gap of each pilot; a small fit is enough for that."""
    problem, found = chosen(name), []
    for seed in range(PILOTS):
        steps = problem.ladder(problem.steps + 1)
        p = cd.pilot(problem.target, steps, n, 2 * seed, proposal=problem.proposal, fit_samples=16, progress=False)
        shares = torch.zeros(n, dtype=torch.float64).index_add(0, p.eve[0], p.log_weights[0].exp())
        found.append((float(shares.square().sum()), p.log_z("up").value - p.log_z("down").value))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("problems", nargs="*", default=list(DEFAULT))
    parser.add_argument("--particles", type=int, default=64)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [[name, *(f"{q:.2f}: {gap:.1f}" for q, gap in gaps(name, given.particles))] for name in given.problems]
    print(markdown(["problem", *(f"pilot {i}" for i in range(PILOTS))], rows))
