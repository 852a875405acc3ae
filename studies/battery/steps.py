"""What the size of the steps does to log Z and to the weight of a mode, as a pilot predicts it and as it is.

python -m studies.battery.steps      seed 1, two minutes of one core
"""

from __future__ import annotations

import torch

import crepe_diffusion as cd
from crepe_diffusion.diagnostics.starting import by_eve
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


def mean_row(problem: Problem, n_steps: int) -> tuple[object, ...]:
    """The first scalar's error in a large pass; what this one and two of the usual size predict; and what is left."""
    steps, (name, f) = problem.ladder(n_steps + 1), next(iter(problem.scalars.items()))
    usual = [
        cd.pilot(problem.target, steps, n=FEW, seed=SEED + i, fit_samples=4 * FEW, progress=False) for i in range(2)
    ]
    large = cd.pilot(problem.target, steps, n=MANY, seed=SEED, process=usual[0].process, progress=False)
    mean, start = large.mean(f), large.summary
    # The second-order estimate: as if each particle had the weight w (2 - exp(..)) instead of w.
    w, values = start.log_weights.exp(), f(start.x).to(torch.float64)
    left = values @ (w * (1 - start.steps + w @ start.steps)) - problem.truths[name]
    own = w * (values - mean.value) * (1 - start.steps + w @ start.steps)
    error = by_eve(own - w * own.sum(), start.eve).norm()
    shifts = [start.shift(f), *(u.summary.shift(f) for u in usual)]
    return (
        problem.name,
        n_steps,
        f"{mean.value - problem.truths[name]:+.4f} ± {mean.error:.4f}",
        *(f"{e.value:+.4f} ± {e.error:.4f}" for e in shifts),
        f"{left:+.4f} ± {error:.4f}",
    )


def main() -> None:
    torch.set_num_threads(1)
    problems = [tempering(16, beta=2), tempering(16, beta=2, stiff=True), tempering(16, beta=3)]
    columns = [
        f"{way}{what}" for way in ("down", "up", "both") for what in ("", f", {MANY} predict", f", {FEW} predict")
    ]
    rows = [row(problem, n) for problem in problems for n in (128, 2048)]
    print(markdown(["problem", "samples of the fit", *columns], rows))
    print()
    columns = ["error", f"{MANY} predict", *(f"{FEW} predict, seed {SEED + i}" for i in range(2)), "error, corrected"]
    means = [mean_row(problem, n) for problem in problems for n in (64, 128)]
    print(markdown(["problem", "steps", *columns], means))


if __name__ == "__main__":
    main()
