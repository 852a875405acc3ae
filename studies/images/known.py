"""Storey 1: every method against the truth, at equal rows.

A result is one problem with one seed: the errors of all methods, and of as many independent draws of the truth.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import crepe_diffusion as cd
from studies.images import problems
from studies.images.methods import GUIDANCE, REWARD, Method, Setting, after_burn_in, families, gibbs, smc
from studies.images.mixture import FactorLaw, fit_law
from studies.images.problems import SIGMA_MAX, SIGMA_MIN, Problem
from studies.shared.results import Results

__all__ = ["CASES", "WALKS", "Case", "compare_settings", "compare_walks", "measure", "run_all"]


@dataclass(frozen=True)
class Case:
    """`kind` is guided, tilted or posterior; `what` is the scale, the reward or the operator."""

    images: str
    label: int
    kind: str
    what: str
    size: int = 14
    n_steps: int = 128
    n_states: int = 32_768

    @property
    def name(self) -> str:
        return f"known {self.images} {self.label} {self.size} {self.kind} {self.what}"

    def problem(self, law: FactorLaw) -> Problem:
        # Variances are smooth in log t: they are measured at every fourth step.
        steps = Setting(SIGMA_MIN, SIGMA_MAX, self.n_steps, 0).ladder(4)
        if self.kind == "guided":
            return problems.guided(law, self.label, float(self.what), steps)
        if self.kind == "tilted":
            reward, strength = {"ink": (problems.ink, 2.0), "cluster": (problems.cluster, 4.0)}[self.what]
            return problems.tilted(law, self.label, self.what, reward(law, self.label, strength), steps)
        operator = {"inpainting": problems.half, "deblurring": problems.blurred}[self.what](self.size)
        return problems.posterior(law, operator, 0.3, self.what, steps, seed=self.label)


def _cases() -> list[Case]:
    guidance = [Case(i, c, "guided", w) for i, c in (("mnist", 4), ("fashion", 2)) for w in ("4", "2", "1.5")]
    rewards = [Case("mnist", 4, "tilted", what) for what in ("ink", "cluster")]
    seen = [Case("mnist", 0, "posterior", what) for what in ("inpainting", "deblurring")]
    return [*guidance, *rewards, *seen, Case("mnist", 4, "guided", "4", size=28)]


CASES = _cases()


def measure(case: Case, problem: Problem, seed: int) -> tuple[dict[str, dict[str, Any]], dict[str, np.ndarray]]:
    """The errors of each method with the shares of components, and 64 draws of each, by weight."""
    setting = Setting(SIGMA_MIN, SIGMA_MAX, case.n_steps, case.n_states, problem.process)
    n = case.n_states // case.n_steps
    stream = cd.Stream(seed).at("judge")
    found: dict[str, dict[str, Any]] = {"truth": problems.exact_errors(problem, n, stream.at("truth"))}
    found["truth"]["of components"] = problem.true_shares.tolist()
    shown = {"truth": problem.truth[stream.at("shown").categorical(problem.weights.log().expand(64, -1))]}
    for name, method in (GUIDANCE if case.kind == "guided" else REWARD).items():
        began = time.process_time()
        out = method(problem.target, setting, seed)
        cost: dict[str, Any] = {"rows": out.evaluations.rows, "seconds": time.process_time() - began}
        cost["families"] = families(out)
        if problem.log_z is not None:
            cost["log z"] = out.log_z.value - problem.log_z
        found[name] = problems.errors(problem, out.x, out.weights) | cost
        found[name]["of components"] = problem.shares(out.x, out.weights).tolist()
        if isinstance(out, cd.Chains):
            cost["round trips"] = out.diagnostics.round_trips()
            x = after_burn_in(out)
            found[f"{name}, burn-in dropped"] = problems.errors(problem, x, x.new_full((len(x),), 1 / len(x))) | cost
        shown[name] = out.x[stream.at(name).categorical(out.weights.log().expand(64, -1))]
    return found, {name: x[:, 0].numpy().astype(np.float16) for name, x in shown.items()}


def run_all(
    data: Path, results: Results, n_seeds: int = 4, wanted: Callable[[Case], bool] = lambda case: case.size == 14
) -> Iterator[str]:
    """Measure what is not there yet; yields the name of each result."""
    laws: dict[tuple[str, int], FactorLaw] = {}
    made: dict[Case, Problem] = {}
    for seed in range(n_seeds):
        for case in CASES:
            name = f"{case.name} seed {seed}"
            if name in results or not wanted(case) or (case.size == 28 and seed > 0):
                continue
            key = (case.images, case.size)
            if key not in laws:
                laws[key] = problems.known_law(case.images, case.size, data)
            if case not in made:
                made[case] = case.problem(laws[key])
            found, shown = measure(case, made[case], seed)
            record = {"case": asdict(case), "seed": seed, "kept": made[case].kept, "errors": found}
            results.save(name, record, **(shown if seed == 0 else {}))
            yield name


SETTINGS: dict[str, tuple[int, Callable[..., Method], str]] = {
    "RNE, 64 steps, resampled after every 4": (64, partial(smc, cd.PathWork(), 4), "diagonal"),
    "RNE, 64 steps, after every step": (64, partial(smc, cd.PathWork()), "diagonal"),
    "RNE, 128 steps, after every step": (128, partial(smc, cd.PathWork()), "diagonal"),
    "RNE, 128 steps, one variance for all directions": (128, partial(smc, cd.PathWork()), "isotropic"),
    "FKC, 64 steps, resampled after every 4": (64, partial(smc, cd.FeynmanKac(), 4), "diagonal"),
    "FKC, 128 steps, after every step": (128, partial(smc, cd.FeynmanKac()), "diagonal"),
}
"""What was varied, alike for both weights: steps of a walk, when particles are resampled, variances of the kernels."""


def compare_settings(law: FactorLaw, results: Results, n_batches: int = 8, seed: int = 0) -> str:
    """Why particles err at w = 4: the least effective number on the way, families that are left, and log Z.

    Batches of `n_states / n_batches / n_steps` particles are judged one by one.
    """
    case = replace(CASES[0], n_states=2 * CASES[0].n_states)
    problem = case.problem(law)
    assert problem.log_z is not None
    found = {}
    for name, (n_steps, method, variance) in SETTINGS.items():
        process = problem.process if variance == "diagonal" else cd.processes.Gaussian(variance="fisher")
        setting = Setting(SIGMA_MIN, SIGMA_MAX, n_steps, case.n_states, process)
        out = method(n_batches=n_batches, pool="equal")(problem.target, setting, seed)
        assert isinstance(out, cd.Particles)
        batches = [out.of_batches([b]) for b in range(n_batches)]
        found[name] = {
            "particles": out.log_weights.shape[1],
            "least ess": out.level_ess.amin(0).tolist(),
            "families": [families(batch) for batch in batches],
            "log z": (out.batch_log_z - problem.log_z).tolist(),
            "shares": [problems.errors(problem, batch.x, batch.weights)["shares"] for batch in batches],
        }
    results.save("settings", {"case": asdict(case), "seed": seed, "found": found})
    return "settings"


WALKS = {
    "RNE-SMC": (1, 128),
    "RNE-SMC, 4 times the walks": (4, 128),
    "RNE-SMC, 16 times": (16, 128),
    "RNE-SMC, 4 times, steps of half the size": (4, 256),
    "RNE-SMC, 4 times, steps of a quarter": (4, 512),
    "particle Gibbs": (1, 128),
    "particle Gibbs, 4 times": (4, 128),
    "particle Gibbs, 16 times": (16, 128),
}
"""How many times the walks, and steps of each. The particles of a sweep grow with the root, and so do the sweeps."""


def compare_walks(law: FactorLaw, results: Results, n_seeds: int = 4) -> Iterator[str]:
    """Does the error for fours at w = 4 vanish with the budget? Yields the name of each result."""
    case = CASES[0]
    problem: Problem | None = None
    for seed in range(n_seeds):
        for name, (times, n_steps) in WALKS.items():
            key = f"walks {name} seed {seed}"
            if key in results:
                continue
            problem = problem or case.problem(law)
            assert problem.log_z is not None
            n = times * case.n_states // case.n_steps
            setting = Setting(SIGMA_MIN, SIGMA_MAX, n_steps, n * n_steps, problem.process)
            method = gibbs(32 * math.isqrt(times)) if name.startswith("particle Gibbs") else smc(cd.PathWork())
            began = time.process_time()
            out = method(problem.target, setting, seed)
            found: dict[str, Any] = {"rows": out.evaluations.rows, "seconds": time.process_time() - began}
            found |= {"families": families(out), "log z": out.log_z.value - problem.log_z}
            exact = problems.exact_errors(problem, n, cd.Stream(seed).at("walks", name))
            found |= {"exact": exact["shares"], **problems.errors(problem, out.x, out.weights)}
            results.save(key, {"case": asdict(case), "seed": seed, "name": name, "found": found})
            yield key


def tiny() -> dict[str, float]:
    """Errors of plain guidance and of CREPE on invented images of 4 x 4 pixels, in seconds."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(6, 1, 4, 4, generator=generator)
    which = torch.randint(6, (3000,), generator=generator)
    x = centres[which] + 0.3 * torch.randn(3000, 1, 4, 4, generator=generator)
    label = (torch.rand(3000, generator=generator) < torch.linspace(0.1, 0.9, 6)[which]).long()
    law = fit_law(x, label, n_components=6, n_factors=2)
    case = Case("mnist", 1, "guided", "3", n_steps=32, n_states=32_768)
    found, _ = measure(case, case.problem(law), seed=0)
    return {name: error["shares"] for name, error in found.items()}
