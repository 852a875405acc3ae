"""Sample cold from a model trained hot, by every method at the same number of network evaluations.

    pi(x) ~ p_hot(x)^beta,      beta = T_hot / T_cold

`paper` methods use the paper's ladder (201 steps from 0.001 to 10 nm, a level every 4), its Euler-Maruyama kernels with
the reference process, and its proposal. `own` methods differ in four things: the Fisher variance, the balanced
proposal, Metropolised local moves, and levels moved until all pairs reject equally.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.errors import InputError
from crepe_diffusion.models import Denoiser
from crepe_diffusion.processes import EulerMaruyama, Gaussian
from crepe_diffusion.run.files import publish
from crepe_diffusion.schedules import Ladder

__all__ = ["METHODS", "UNTEMPERED", "Budget", "Draws", "file_name", "load_draws", "save_draws", "temper"]


SHORTEST_ROUND = 10  # iterations: each pair meets five times, the least from which a rejection can be told


@dataclass(frozen=True)
class Budget:
    """What one method may spend: network rows, in how many chains or batches, and how long the ladder is.

    The paper's is 50,000 iterations of one chain, or 50 batches of 1,000 particles, of 201 steps each. Chains share
    one network batch, so several short ones cost less time than a long one; each has its own burn-in.
    """

    rows: int = 50_000 * 201
    n_chains: int = 10
    n_levels: int = 51
    substeps: int = 4
    batch: int = 1000
    burn_in: float = 0.1
    """The share of the rows that replica exchange spends before it keeps samples (and adapts its ladder)."""
    n_adapt: int = 3
    fit_samples: int = 512
    micro_batch: int = 4096


@dataclass(frozen=True)
class Draws:
    """Molecules `x` (draws, atoms, 3) as the sampler left them, equally weighted, and what the run says of itself."""

    x: Tensor
    about: dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """Ladder, kernels and local moves of a method."""

    ladder: Ladder
    options: dict[str, Any]
    explorer: cd.Langevin | cd.Bounce


def paper(model: Denoiser, budget: Budget) -> Setting:
    """The reference process has the scale of the data."""
    scale = float(model.function.scales)  # type: ignore[attr-defined]
    levels = cd.ladder.karras(budget.n_levels, 0.001, 10.0, substeps=budget.substeps)
    process = EulerMaruyama(zero_mean=0, reference=scale)
    return Setting(levels, {"process": process, "proposal": cd.Proposal("paper")}, cd.Langevin())


def own(model: Denoiser, budget: Budget) -> Setting:
    """The noise end need not be far beyond the data, whose scale is 0.2 nm: its law is known from the fit.

    Samples are finished from level 0 to no noise at all: what is left there would show in the energy of bonds.
    """
    levels = replace(cd.ladder.karras(budget.n_levels, 0.0005, 2.0, substeps=budget.substeps), finish=(0.0,))
    return Setting(levels, {"process": Gaussian(zero_mean=0), "fit_samples": budget.fit_samples}, cd.Bounce())


def exchange(setting: Setting, model: Denoiser, beta: float, budget: Budget, seed: int, adapt: bool) -> Draws:
    """Replica exchange until the rows are spent."""
    chain = cd.ReplicaExchange(
        model**beta, setting.ladder, n_chains=budget.n_chains, seed=seed, explorer=setting.explorer,
        micro_batch=budget.micro_batch, **setting.options,
    )  # fmt: skip
    pieces = budget.n_adapt + 1 if adapt else 1
    for piece in range(1, pieces + 1):
        end, least = budget.rows * budget.burn_in * piece / pieces, chain.iteration + SHORTEST_ROUND
        while chain.evaluate.counts.rows < end or (adapt and chain.iteration < least):
            chain.step()
        if piece < pieces:
            chain.adapt()
    chain.restart_diagnostics()
    draws: list[Tensor] = []
    while not draws or chain.evaluate.counts.rows < budget.rows:
        chain.step()
        draws.append(chain.output())
    diagnostics = chain.diagnostics
    about = {
        "rows": chain.evaluate.counts.rows,
        "iterations": chain.iteration,
        "acceptance": diagnostics.acceptance().tolist(),
        "levels": chain.ladder.levels.tolist(),
        "round_trips": int(diagnostics.trips.n_trips.sum()),
        "restarts": int(diagnostics.trips.n_restarts.sum()),
    }
    return Draws(torch.stack(draws).flatten(0, 1), about)


def particles(setting: Setting, model: Denoiser, beta: float, budget: Budget, seed: int, weights: str) -> Draws:
    """SMC in batches, resampled at every level as in the paper, and resampled to equal weights at the end."""
    cost = budget.batch * len(setting.ladder.times)
    smc = cd.SMC(
        model**beta, setting.ladder, n_particles=budget.batch, n_batches=max(1, budget.rows // cost), weights=weights,
        ess_threshold=1.0, seed=seed, micro_batch=budget.micro_batch, **setting.options,
    )  # fmt: skip
    out = smc.sample()
    about = {"rows": out.evaluations.rows, "log_z": out.log_z.tolist(), "ess": out.ess.tolist()}
    return Draws(out.resampled(smc.stream.at("last")), about)


def plain(setting: Setting, model: Denoiser, beta: float, budget: Budget, seed: int) -> Draws:
    """Follow the annealed score with no correction."""
    guidance = cd.Guidance(model**beta, setting.ladder, seed=seed, micro_batch=budget.micro_batch, **setting.options)
    n = max(1, budget.rows // len(setting.ladder.times))
    x = guidance.sample(n)
    return Draws(x, {"rows": guidance.evaluate.counts.rows})


UNTEMPERED = "model, untempered"
"""Plain samples of the hot model: how well they fit hot dynamics bounds everything after."""

Run = Callable[[Denoiser, float, Budget, int], Draws]

METHODS: dict[str, Run] = {
    UNTEMPERED: lambda m, b, budget, seed: plain(own(m, budget), m, 1.0, budget, seed),
    "annealed score, paper": lambda m, b, budget, seed: plain(paper(m, budget), m, b, budget, seed),
    "FKC, annealed score": lambda m, b, budget, seed: particles(paper(m, budget), m, b, budget, seed, "fkc"),
    "FKC, annealed noise": lambda m, b, budget, seed: particles(paper(m, budget), m, b, budget, seed, "fkc-noise"),
    "RNE, paper": lambda m, b, budget, seed: particles(paper(m, budget), m, b, budget, seed, "rne"),
    "CREPE, paper": lambda m, b, budget, seed: exchange(paper(m, budget), m, b, budget, seed, adapt=False),
    "annealed score, own": lambda m, b, budget, seed: plain(own(m, budget), m, b, budget, seed),
    "RNE, own": lambda m, b, budget, seed: particles(own(m, budget), m, b, budget, seed, "rne"),
    "CREPE, own": lambda m, b, budget, seed: exchange(own(m, budget), m, b, budget, seed, adapt=True),
}


def temper(
    model: Denoiser, beta: float, folder: Path, budget: Budget, seeds: tuple[int, ...], methods: tuple[str, ...]
) -> Iterator[Path]:
    """Draws of each method and seed, each in a file of its own; what is there already is not done again."""
    for name in methods:
        if name not in METHODS:
            raise InputError(f"no method {name!r}; there are {', '.join(METHODS)}")
    for name in methods:
        for seed in seeds:
            path = folder / f"{file_name(name)}-{seed}.safetensors"
            if not path.exists():
                draws = METHODS[name](model, beta, budget, seed)
                save_draws(path, Draws(draws.x, {"method": name, "seed": seed, "beta": beta, **draws.about}))
            yield path


def file_name(method: str) -> str:
    return method.replace(", ", "-").replace(" ", "-").lower()


def save_draws(path: Path, draws: Draws) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    publish(path, save({"x": draws.x.float().contiguous()}, {"about": json.dumps(draws.about)}))


def load_draws(path: Path) -> Draws:
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["about"])
    return Draws(load_file(path)["x"], about)
