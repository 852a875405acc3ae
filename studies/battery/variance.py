"""What the form of the variance does: SMC on equal and on stiff scales.

python -m studies.battery.variance      seed 1, a minute

The first table has the error of log Z. The second has, on stiff scales and with eight times the particles, the error of
a mode's weight, and of the variance of the stiffest and of the worst of the 15 coordinates that both modes share.
"""

from __future__ import annotations

import torch

import crepe_diffusion as cd
from studies.battery.problems import SIGMA, Problem, power, tempering
from studies.shared.pages import markdown

SEED = 1
FORMS = (("auto", 256), ("fisher", 256), ("fisher-diagonal", 256), ("fisher-diagonal", 512))
BATCHES = 16


def particles(problem: Problem, form: str, fit_samples: int, n_batches: int) -> cd.samplers.Particles:
    process, steps = cd.processes.Gaussian(variance=form), problem.ladder(problem.steps + 1)
    smc = cd.SMC(
        problem.target,
        steps,
        n_particles=256,
        n_batches=n_batches,
        seed=SEED,
        process=process,
        fit_samples=fit_samples,
    )
    return smc.sample(progress=False)


def of_log_z() -> str:
    rows = []
    for stiff in (False, True):
        problem = tempering(16, beta=2, stiff=stiff)
        assert problem.log_z is not None
        for form, n in FORMS:
            z = particles(problem, form, n, BATCHES).log_z
            rows.append((problem.name, form, n, f"{z.value - problem.log_z:+.3f} ± {z.error:.3f}"))
    return markdown(["problem", "variance", "samples of the fit", "error of log Z"], rows)


def of_stiff_coordinates() -> str:
    problem = tempering(16, beta=2, stiff=True)
    model = problem.target.models[0]
    assert isinstance(model, cd.models.GaussianMixture)
    log_w, _, variances = power(model, 2, SIGMA[0])
    truth = (log_w.softmax(0) @ variances)[1:]  # their means are zero
    rows = []
    for form in ("auto", "fisher"):
        out = particles(problem, form, 256, 8 * BATCHES)
        mode = out.mean(problem.scalars["second mode"])
        found = [out.mean(lambda x, i=i: x[:, i].square()) for i in range(1, 16)]  # type: ignore[misc]
        off = [(100 * (e.value / float(v) - 1), 100 * e.error / float(v)) for e, v in zip(found, truth, strict=True)]
        rows.append(
            (
                form,
                f"{mode.value - problem.truths['second mode']:+.3f} ± {mode.error:.3f}",
                *(f"{a:+.1f} ± {b:.1f} %" for a, b in (off[0], max(off, key=lambda o: abs(o[0])))),
                f"{sum(abs(a) <= 2 * b for a, b in off)} of 15",
            )
        )
    return markdown(["variance", "weight of the mode", "stiffest", "worst", "within two errors"], rows)


def main() -> None:
    torch.set_num_threads(1)
    print(of_log_z(), of_stiff_coordinates(), sep="\n\n")


if __name__ == "__main__":
    main()
