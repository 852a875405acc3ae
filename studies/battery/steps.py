"""What the size of the steps does to log Z, as a pilot predicts it and as it is.

python -m studies.battery.steps      seed 1, a minute of one core
"""

from __future__ import annotations

import torch

import crepe_diffusion as cd
from studies.battery.problems import Problem, tempering
from studies.shared.pages import markdown

SEED, MANY, FEW = 1, 8192, 256


def row(problem: Problem, fit_samples: int) -> tuple[object, ...]:
    """Errors of a pass so large that chance is small; what it predicts; and what one of the usual size predicts."""
    assert problem.log_z is not None
    steps = problem.ladder(problem.steps + 1)
    usual = cd.pilot(problem.target, steps, n=FEW, seed=SEED, fit_samples=fit_samples, progress=False)
    large = cd.pilot(problem.target, steps, n=MANY, seed=SEED, process=usual.process, progress=False)
    cells: list[object] = [problem.name, fit_samples]
    for method in ("down", "up", "bar"):
        z = large.log_z(method)
        cells.append(f"{z.value - problem.log_z:+.3f} ± {z.error:.3f}")
        cells += [
            f"{e.value:+.3f} ± {e.error:.3f}" for e in (large.discretisation[method], usual.discretisation[method])
        ]
    return tuple(cells)


def main() -> None:
    torch.set_num_threads(1)
    problems = [tempering(16, beta=2), tempering(16, beta=2, stiff=True), tempering(16, beta=3)]
    columns = [
        f"{way}{what}" for way in ("down", "up", "both") for what in ("", f", {MANY} predict", f", {FEW} predict")
    ]
    rows = [row(problem, n) for problem in problems for n in (128, 2048)]
    print(markdown(["problem", "samples of the fit", *columns], rows))


if __name__ == "__main__":
    main()
