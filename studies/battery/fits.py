"""What it does to means and to log Z from how many samples the variance was measured.

    python -m studies.battery.fits [--samples 4096]

SMC (1,000,000 rows) and particle Gibbs (1,500,000) in 32 dimensions, eight replicates of one set-up, seed 0: two and a
half minutes of one core. A pilot takes 128 samples there.
"""

from __future__ import annotations

import argparse
import math

import torch

import crepe_diffusion as cd
from studies.battery.methods import smc_of
from studies.battery.problems import tempering
from studies.shared.pages import markdown

GROUPS, PARTICLES = 8, 64


def fitted(samples: int, smc_rows: int = 1_000_000, gibbs_rows: int = 1_500_000) -> str:
    """Errors of the weight of a mode, in standard deviations, and of log Z: means over the replicates."""
    problem = tempering(32)
    name, f = next(iter(problem.scalars.items()))
    steps, log_z, sd = problem.ladder(problem.steps + 1), problem.log_z, problem.variances[name] ** 0.5
    assert log_z is not None
    found = cd.pilot(problem.target, steps, n=PARTICLES, seed=0, fit_samples=samples, progress=False)
    outs: dict[str, list[cd.samplers.Result]] = {"SMC": [g.out for g in smc_of(problem, smc_rows, 0, GROUPS, found)]}
    chain = cd.ParticleGibbs(
        problem.target, steps, n_particles=PARTICLES, n_chains=GROUPS, seed=0, process=found.process
    )
    sweeps = chain.sample(gibbs_rows // problem.walk_rows // PARTICLES - 1, progress=False)
    outs["particle Gibbs"] = [sweeps.of_chains(range(i, i + 1)) for i in range(GROUPS)]
    rows = []
    for method, each in outs.items():
        means = torch.tensor([(o.mean(f).value - problem.truths[name]) / sd for o in each])
        log_zs = torch.tensor([o.log_z.value - log_z for o in each])
        cells = [f"{float(v.mean()):+.4f} ± {float(v.std()) / math.sqrt(GROUPS):.4f}" for v in (means, log_zs)]
        rows.append([method, f"{samples:,}", *cells])
    return markdown(["method", "samples", f"error of {name} / sd", "error of log Z"], rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--samples", type=int, default=4096)
    torch.set_num_threads(1)
    print(fitted(parser.parse_args().samples))
