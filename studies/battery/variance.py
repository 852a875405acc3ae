"""What the form of the variance does to log Z: SMC on equal and on stiff scales.

python -m studies.battery.variance      seed 1, a few seconds
"""

from __future__ import annotations

import torch

import crepe_diffusion as cd
from studies.battery.problems import tempering
from studies.shared.pages import markdown

SEED = 1
FORMS = (("auto", 256), ("fisher", 256), ("fisher-diagonal", 256), ("fisher-diagonal", 512))


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for stiff in (False, True):
        problem = tempering(16, beta=2, stiff=stiff)
        assert problem.log_z is not None
        for form, n in FORMS:
            process = cd.processes.Gaussian(variance=form)
            steps = problem.ladder(problem.steps + 1)
            smc = cd.SMC(
                problem.target, steps, n_particles=256, n_batches=16, seed=SEED, process=process, fit_samples=n
            )
            z = smc.sample(progress=False).log_z
            rows.append((problem.name, form, n, f"{z.value - problem.log_z:+.3f} ± {z.error:.3f}"))
    print(markdown(["problem", "variance", "samples of the fit", "error of log Z"], rows))


if __name__ == "__main__":
    main()
