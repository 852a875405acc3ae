"""Storey 1: where the heavy weights of strong guidance come from.

    log W = log pi_s(x_s) - log pi_t(x_t) - L_Q            pi_t = p_t(x|c)^w p_t(x)^(1-w)

is the weight of a step. RNE takes the first two terms from ratios of Gaussian kernels; here densities are known, so a
particle can have its exact weight as well. Both have the same walks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.evaluate import Evaluator
from crepe_diffusion.paths import log_work, walk
from crepe_diffusion.processes import Evaluation
from studies.images import known
from studies.images.methods import Setting, families
from studies.images.mixture import FactorLaw
from studies.images.problems import SIGMA_MAX, SIGMA_MIN, errors
from studies.shared.results import Results

__all__ = ["ExactWork", "compare_tails", "tail_index"]


def tail_index(log_weights: Tensor, share: float = 0.02) -> float:
    """Hill's estimate from the largest weights: above 1/2 the variance is infinite, above 1 the mean is.

    >>> uniform = (torch.arange(10_000) + 0.5) / 10_000
    >>> round(tail_index(-0.7 * uniform.log()), 1)
    0.7
    """
    largest = log_weights.sort(descending=True).values
    n = max(1, int(share * len(largest)))
    return float((largest[:n] - largest[n]).mean())


@dataclass(frozen=True)
class ExactWork(cd.PathWork):
    """The work of the same walk with the densities of a guided law, which no network would have."""

    law: FactorLaw
    label: int
    scale: float

    def log_density(self, x: Tensor, t: float) -> Tensor:
        """`log p_t(x|c)^w p_t(x)^(1-w)`, up to a constant that does not depend on t."""
        return self.law.conditional(self.label).log_prob(x, t) + (self.scale - 1) * self.law.class_log_probability(
            x, self.label, t
        )

    def descend(
        self, evaluate: Evaluator, x: Tensor, seen: Evaluation, m: int, stream: cd.Stream
    ) -> tuple[Tensor, Evaluation, Tensor]:
        n, times = evaluate.ladder.substeps, evaluate.ladder.times
        path = walk(evaluate, x, seen, torch.full((len(x),), m * n), torch.full((len(x),), -1), n, stream)
        s, t = float(times[(m - 1) * n]), float(times[m * n])
        return path.x, path.seen, self.log_density(path.x, s) - self.log_density(x, t) - path.proposal


def crowded(n_above: int = 16, n_within: int = 80, n_below: int = 32) -> cd.Ladder:
    """As many steps as others take, most of them between noise .5 and 4, where weights differ most."""
    ends = [(SIGMA_MIN, 0.5, n_below), (0.5, 4.0, n_within), (4.0, SIGMA_MAX, n_above)]
    parts = [torch.logspace(math.log10(a), math.log10(b), n + 1, dtype=torch.float64)[:-1] for a, b, n in ends]
    return cd.ladder.of(torch.cat([*parts, torch.tensor([SIGMA_MAX], dtype=torch.float64)]))


WAYS: dict[str, tuple[str, cd.Ladder | None, float | None, int]] = {
    "RNE": ("RNE", None, None, 1),
    "RNE, steps crowded between noise .5 and 4": ("RNE", crowded(), None, 1),
    "RNE, walks guided by 2": ("RNE", None, 2.0, 1),
    "RNE, both": ("RNE", crowded(), 2.0, 1),
    "RNE, both, twice the steps and half the walks": ("RNE", crowded(32, 160, 64), 2.0, 2),
    "exact densities": ("exact densities", None, None, 1),
    "exact densities, walks guided by 2": ("exact densities", None, 2.0, 1),
}
"""Weights, steps and guidance of the walks, where they are not those of the case; times the steps of each walk."""


def compare_tails(law: FactorLaw, results: Results, n_seeds: int = 4, n: int = 1024, every: int = 8) -> Iterator[str]:
    """Fours at w = 4: weights of single steps from exact draws, of whole walks, and what is left after resampling."""
    case = known.CASES[0]
    scale = float(case.what)
    names = {key: f"tails {key}" for key in ("steps", "walks", *(f"resampled {way}" for way in WAYS))}
    if all(name in results for name in names.values()):
        return
    problem, exact = case.problem(law), ExactWork(law, case.label, scale)
    steps = Setting(SIGMA_MIN, SIGMA_MAX, case.n_steps, 0).ladder(1)

    def smc(
        weight: cd.Weight, n: int, ladder: cd.Ladder = steps, own: float = scale, seed: int = 0, resampled: bool = True
    ) -> cd.SMC:
        return cd.SMC(
            problem.target,
            ladder,
            n_particles=n,
            weight=weight,
            process=problem.process,
            proposal=cd.Proposal(exponents=(1 - own, own)),  # the unconditional model comes first
            ess_threshold=0.5 if resampled else 0.0,
            seed=seed,
        )

    about = {"case": asdict(case), "n": n}
    if names["steps"] not in results:
        evaluate, found = smc(cd.PathWork(), n).evaluate, []
        for m in range(case.n_steps, 0, -every):
            t, stream = float(steps.times[m]), cd.Stream(m)
            x = exact_draws(exact, n, t, stream)
            seen = evaluate(x, torch.full((len(x),), t).double(), rewards=False)
            index, down = torch.full((len(x),), m), torch.full((len(x),), -1)
            path = walk(evaluate, x, seen, index, down, 1, stream.at("walk"))
            gains = {
                "RNE": log_work(path, evaluate.coefficients),
                "exact": exact.log_density(path.x, float(steps.times[m - 1])) - exact.log_density(x, t) - path.proposal,
            }
            found.append({"t": t} | {k: [float(v.std()), tail_index(v), float(v.max())] for k, v in gains.items()})
        results.save(names["steps"], about | {"found": found})
        yield names["steps"]
    weights = {"RNE": cd.PathWork(), "exact densities": exact}
    if names["walks"] not in results:
        whole = {}
        for key, weight in weights.items():
            log_w = smc(weight, n, resampled=False).sample(progress=False).log_weights.flatten()
            ess = 1 / float(log_w.softmax(0).square().sum())
            whole[key] = {"sd": float(log_w.std()), "tail": tail_index(log_w), "ess": ess}
        results.save(names["walks"], about | {"found": whole})
        yield names["walks"]
    few = case.n_states // case.n_steps
    for way, (kind, ladder, own, per_walk) in WAYS.items():
        name = names[f"resampled {way}"]
        if name not in results:
            left = []
            for seed in range(n_seeds):
                sampler = smc(weights[kind], few // per_walk, ladder or steps, own or scale, seed=seed)
                out = sampler.sample(progress=False)
                of_z = {} if problem.log_z is None else {"log z": out.log_z.value - problem.log_z}
                left.append({"families": families(out), **of_z, **errors(problem, out.x, out.weights)})
            results.save(name, {"case": asdict(case), "way": way, "found": left})
            yield name


def exact_draws(exact: ExactWork, n: int, t: float, stream: cd.Stream) -> Tensor:
    """At most n draws of the guided law at noise t, by rejection below the largest `p_t(c|x)` of 16 n draws."""
    x = exact.law.conditional(exact.label).sample(16 * n, stream.at("draws"), t)
    log_p = (exact.scale - 1) * exact.law.class_log_probability(x, exact.label, t)
    return x[stream.at("keep").bernoulli(log_p - log_p.max())][:n]
