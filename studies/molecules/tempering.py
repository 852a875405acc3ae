"""Sample cold from a model trained hot, by every method at the same number of network evaluations.

    pi(x) ~ p_hot(x)^beta,      beta = T_hot / T_cold

`paper` methods use the paper's ladder (201 steps from 0.001 to 10 nm, a level every 4), its Euler-Maruyama kernels with
the reference process, and its proposal. `own` methods use the Fisher variance, the balanced proposal, Metropolised
local moves, levels moved until all pairs reject equally, and a ladder for stiff molecules: equal ratios of noise, for
each matters as much to bonds, and few levels with many steps between. A pair that is five times as far apart accepts
only a little less often, for as many steps, and with fewer levels a replica has sooner walked through all of them.

Each alpha carbon chooses its hand under much noise, and a model that errs there draws molecules of both, which no
dynamics make. With `alphas` every method samples `pi(x) exp(r(x))` instead,

    r(x) = 10 (|sum_c tanh(2 V_c)| - n),      V_c the signed volume at one of n alpha carbons, in units of bonds

which is nearly 0 where all are of one hand, whichever, and near -20 for each that is not, less `BROKEN` for each bond
longer than `LONGEST`. The reward is a black box that acts below `DECIDED`. Earlier and with its gradient it would tell
a molecule which hand to take while that is open; then hardly one has mixed hands on the way down, but the others are
changed too (`docs/decisions.md`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion import InputError
from crepe_diffusion.models import Denoiser
from crepe_diffusion.processes import EulerMaruyama, Gaussian
from studies.molecules import springs
from studies.molecules.network import BOND, volumes
from studies.shared.results import Results

__all__ = [
    "ABLATIONS",
    "METHODS",
    "UNTEMPERED",
    "USUAL",
    "Budget",
    "Cooling",
    "Draws",
    "drawn",
    "file_name",
    "kept_draws",
    "measured_springs",
    "temper",
]


ENDS = (0.0005, 1.5)  # nm
LONGEST, BROKEN = 0.2, 1e3  # nm; bonds are 0.10 to 0.15. What a longer one costs
DECIDED = 0.03  # nm; the hand of a residue shows in predictions from far more noise on
N_SPRINGS, N_SPRING_TIMES = 256, 12
"""Draws of the model whose errors show its springs, and noise levels between which these are interpolated."""
SHORTEST_ROUND = 10  # iterations: each pair meets five times, the least from which a rejection can be estimated


@dataclass(frozen=True)
class Budget:
    """What one method may spend: network rows, in how many chains or batches, and how long the ladder is.

    The paper's is 50,000 iterations of one chain, or 50 batches of 1,000 particles, of 201 steps each. Chains share
    one network batch, so several short ones cost less time than a long one; each has its own burn-in.
    """

    rows: int = 50_000 * 201
    n_levels: int = 51
    substeps: int = 4
    n_chains: int = 4
    own_levels: int = 11
    own_substeps: int = 20
    own_chains: int = 32
    batch: int = 1000
    burn_in: float = 0.2
    """The share of the rows that replica exchange spends before it keeps samples (and adapts its ladder)."""
    n_adapt: int = 1
    fit_samples: int = 512
    micro_batch: int = 4096


@dataclass(frozen=True)
class Cooling:
    """The target `p^beta`, with all `alphas` (a carbon and three neighbours, each) of one hand if they are given.

    `bonds` are those of the molecule, for springs.
    """

    beta: float
    alphas: tuple[tuple[int, ...], ...] = ()
    bonds: tuple[tuple[int, ...], ...] = ()

    def target(self, model: Denoiser) -> cd.Target:
        """The tilt to one hand does not grow with the power."""
        cold = model.as_target() ** self.beta
        if not self.alphas:
            return cold
        centres = torch.tensor(self.alphas)
        bonds = torch.tensor(self.bonds, dtype=torch.long).reshape(-1, 2)

        def one_hand(x: Tensor) -> Tensor:
            mixed = 10 * ((2 * volumes(x, centres) / BOND**3).tanh().sum(1).abs() - len(centres))
            lengths = (x[:, bonds[:, 0]] - x[:, bonds[:, 1]]).norm(dim=2)
            return mixed - BROKEN * (lengths > LONGEST).sum(1)

        late = cd.anneal.of_time(lambda t: 1 / (1 + (t / DECIDED) ** 2))
        return cold.tilt(one_hand, name="one hand", anneal=late)


@dataclass(frozen=True)
class Draws:
    """Molecules `x` (draws, atoms, 3) as the sampler left them, equally weighted, and the record of the run.

    Draws of one `family` (draws,) are relatives: they descend from one visit to the noise end.
    """

    x: Tensor
    family: Tensor
    about: dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """Ladders, kernels and local moves of a method."""

    ladder: cd.Ladder
    options: dict[str, Any]
    explorer: cd.Langevin | cd.Bounce
    n_chains: int
    resampling: cd.Ladder
    """The ladder of particles, which lose nothing by frequent levels."""
    ess_threshold: float
    pool: str
    """How batches of particles are pooled."""
    adapted: bool
    finished: bool
    """Whether draws are replaced by what the model predicts from level 0."""


def paper(model: Denoiser, budget: Budget) -> Recipe:
    """The reference process has the scale of the data."""
    scale = float(model.function.scales)  # type: ignore[attr-defined]
    levels = cd.ladder.karras(budget.n_levels, 0.001, 10.0, substeps=budget.substeps)
    process = EulerMaruyama(zero_mean=0, reference=scale)
    options = {"process": process, "proposal": cd.Proposal("paper")}
    return Recipe(levels, options, cd.Langevin(), budget.n_chains, levels, 1.0, "equal", adapted=False, finished=False)


def own(model: Denoiser, budget: Budget, variance: str | float = "fisher") -> Recipe:
    """The noise end need not be far beyond the data, whose scale is 0.2 nm: its law is known from the fit.

    What noise is left at level 0 would show in the lengths of bonds to hydrogen, which have no spread of their own, so
    draws are replaced by their predictions. A denoising step to no noise would not do: its isotropic variance is that
    of soft directions. At a seventh of the spread of the stiffest other bond, both change that by a percent.
    """
    levels = cd.ladder.geometric(budget.own_levels, *ENDS, substeps=budget.own_substeps)
    resampling = cd.ladder.geometric(budget.n_levels, *ENDS, substeps=budget.substeps)
    options = {"process": Gaussian(zero_mean=0, variance=variance), "fit_samples": budget.fit_samples}
    return Recipe(levels, options, cd.Bounce(), budget.own_chains, resampling, 0.5, "z", adapted=True, finished=True)


def many_levels(model: Denoiser, budget: Budget) -> Recipe:
    """As many steps, cut into as many levels as the paper's; fewer chains, since each needs more iterations."""
    recipe = own(model, budget)
    return replace(recipe, ladder=recipe.resampling, n_chains=budget.n_chains)


def exchange(recipe: Recipe, model: Denoiser, cooling: Cooling, budget: Budget, seed: int) -> Draws:
    """Replica exchange until the rows are spent."""
    adapt = recipe.adapted
    chain = cd.ReplicaExchange(
        cooling.target(model), recipe.ladder, n_chains=recipe.n_chains, seed=seed, explorer=recipe.explorer,
        micro_batch=budget.micro_batch, **recipe.options,
    )  # fmt: skip
    pieces = budget.n_adapt + 1 if adapt else 1
    for piece in range(1, pieces + 1):
        end, least = budget.rows * budget.burn_in * piece / pieces, chain.iteration + SHORTEST_ROUND
        while chain.evaluate.counts.rows < end or (adapt and chain.iteration < least):
            chain.step()
        if piece < pieces:
            chain.adapt()
    chain.restart_diagnostics()
    out = chain.sample(budget.rows, callback=lambda _: chain.evaluate.counts.rows >= budget.rows, progress=False)
    diagnostics = chain.diagnostics
    about = {
        "rows": chain.evaluate.counts.rows,
        "iterations": chain.iteration,
        "acceptance": diagnostics.acceptance().tolist(),
        "levels": chain.ladder.levels.tolist(),
        "round_trips": int(diagnostics.trips.n_trips.sum()),
        "restarts": int(diagnostics.trips.n_restarts.sum()),
    }
    return finish(recipe, model, Draws(out.x, out.tours.flatten(), about), budget)


Sampler = Callable[[Recipe, Denoiser, Cooling, Budget, int], Draws]


def measured_springs(model: Denoiser, cooling: Cooling, budget: Budget, seed: int) -> tuple[springs.Springs, int]:
    """The process with springs as the model's own draws show them, and the rows this took.

    Those draws are made by all steps of the budget with one variance.
    """
    recipe = own(model, budget)
    measuring = replace(budget, rows=N_SPRINGS * len(recipe.ladder.times))
    seen = plain(recipe, model, Cooling(1.0), measuring, seed)
    times, generator = np.geomspace(*ENDS, N_SPRING_TIMES), torch.Generator().manual_seed(seed)
    network = springs.measured(model, np.array(cooling.bonds), seen.x, times, generator)
    process = springs.Springs(zero_mean=0, variance="fisher", network=network)
    return process, seen.about["rows"] + springs.N_ERRORS * len(times)


def sprung(method: Sampler, model: Denoiser, cooling: Cooling, budget: Budget, seed: int, fewer: int = 1) -> Draws:
    """A method with the covariance of springs, and so many times fewer steps between its levels."""
    process, spent = measured_springs(model, cooling, budget, seed)
    substeps = {name: max(1, getattr(budget, name) // fewer) for name in ("own_substeps", "substeps")}
    recipe = own(model, replace(budget, **substeps))
    recipe = replace(recipe, options=recipe.options | {"process": process})
    draws = method(recipe, model, cooling, replace(budget, rows=budget.rows - spent), seed)
    return replace(draws, about=draws.about | {"rows": draws.about["rows"] + spent})


def finish(recipe: Recipe, model: Denoiser, draws: Draws, budget: Budget) -> Draws:
    """The draws as the method leaves them; predictions are counted as rows."""
    if not recipe.finished:
        return draws
    sigma = float(recipe.ladder.times[0])
    parts = [model.predict(x, torch.full((len(x),), sigma)) for x in draws.x.split(budget.micro_batch)]
    return replace(draws, x=torch.cat(parts), about=draws.about | {"rows": draws.about["rows"] + len(draws.x)})


def particles(
    recipe: Recipe, model: Denoiser, cooling: Cooling, budget: Budget, seed: int, weight: cd.Weight | None = None
) -> Draws:
    """SMC in batches, resampled to equal weights at the end."""
    n_batches = max(1, budget.rows // (budget.batch * len(recipe.resampling.times)))
    smc = cd.SMC(
        cooling.target(model), recipe.resampling, n_particles=budget.batch, n_batches=n_batches, seed=seed,
        weight=weight or cd.PathWork(), ess_threshold=recipe.ess_threshold, pool=recipe.pool,
        micro_batch=budget.micro_batch, **recipe.options,
    )  # fmt: skip
    out = smc.sample()
    about = {"rows": out.evaluations.rows, "log_z": out.batch_log_z.tolist(), "ess": out.batch_ess.tolist()}
    rows = out.resampled_rows(smc.stream.at("last"))
    return finish(recipe, model, Draws(out.x[rows], out.eve[rows], about), budget)


def plain(recipe: Recipe, model: Denoiser, cooling: Cooling, budget: Budget, seed: int) -> Draws:
    """Follow the annealed score with no correction."""
    target = cooling.target(model)
    guidance = cd.Plain(target, recipe.ladder, seed=seed, micro_batch=budget.micro_batch, **recipe.options)
    n = max(1, budget.rows // len(recipe.ladder.times))
    x = guidance.sample(n).x
    return finish(recipe, model, Draws(x, torch.arange(n), {"rows": guidance.evaluate.counts.rows}), budget)


UNTEMPERED = "model, untempered"
"""Plain samples of the hot model: how well they fit hot dynamics bounds everything after."""

Run = Callable[[Denoiser, Cooling, Budget, int], Draws]

METHODS: dict[str, Run] = {
    UNTEMPERED: lambda m, c, budget, seed: plain(own(m, budget), m, replace(c, beta=1.0), budget, seed),
    "annealed score, paper": lambda m, c, budget, seed: plain(paper(m, budget), m, c, budget, seed),
    "FKC, annealed score": lambda m, c, budget, seed: particles(paper(m, budget), m, c, budget, seed, cd.FeynmanKac()),
    "FKC, annealed noise": lambda m, c, budget, seed: particles(
        paper(m, budget), m, c, budget, seed, cd.FeynmanKac(cooled=True)
    ),
    "RNE, paper": lambda m, c, budget, seed: particles(paper(m, budget), m, c, budget, seed),
    "CREPE, paper": lambda m, c, budget, seed: exchange(paper(m, budget), m, c, budget, seed),
    "annealed score, own": lambda m, c, budget, seed: plain(own(m, budget), m, c, budget, seed),
    "RNE, own": lambda m, c, budget, seed: particles(own(m, budget), m, c, budget, seed),
    "CREPE, own": lambda m, c, budget, seed: exchange(own(m, budget), m, c, budget, seed),
    "CREPE, own, 51 levels": lambda m, c, budget, seed: exchange(many_levels(m, budget), m, c, budget, seed),
    "CREPE, own, springs": lambda m, c, budget, seed: sprung(exchange, m, c, budget, seed),
    "CREPE, own, springs, 50 steps": lambda m, c, budget, seed: sprung(exchange, m, c, budget, seed, 4),
    "RNE, own, springs, 50 steps": lambda m, c, budget, seed: sprung(particles, m, c, budget, seed, 4),
    "CREPE, own, 400 steps": lambda m, c, budget, seed: exchange(
        own(m, replace(budget, own_substeps=2 * budget.own_substeps)), m, c, budget, seed
    ),
    "CREPE, own, v = d": lambda m, c, budget, seed: exchange(own(m, budget, math.inf), m, c, budget, seed),
    "CREPE, own, DDPM variance": lambda m, c, budget, seed: exchange(own(m, budget, 0.0), m, c, budget, seed),
}
USUAL = tuple(name for name in METHODS if "springs" not in name)
"""What `temper` does if it is not told; springs take two to four times the time of a row."""
ABLATIONS = tuple(METHODS)[-7:]
"""What the number and the size of steps do, and their variance; of the first seed only."""


def temper(
    model: Denoiser, cooling: Cooling, folder: Path, budget: Budget, seeds: tuple[int, ...], methods: tuple[str, ...]
) -> Iterator[str]:
    """Draw by each method with each seed, and keep the draws; those that are kept already are not drawn again."""
    for name in methods:
        if name not in METHODS:
            raise InputError(f"no method {name!r}; there are {', '.join(METHODS)}")
    kept = kept_draws(folder)
    for name in methods:
        for seed in seeds[:1] if name in ABLATIONS else seeds:
            facts = {"method": name, "seed": seed, "beta": cooling.beta, "one hand": bool(cooling.alphas)}
            facts |= {"model": fingerprint(model.function.state_dict())}  # type: ignore[attr-defined]
            facts |= {"budget": asdict(budget)}
            result = f"{file_name(name)} {seed}"
            if result in kept:
                before = kept[result]
                changed = [key for key, value in facts.items() if before.get(key) != value]
                if changed:
                    path, what = kept.path(result), " and ".join(changed)
                    raise InputError(f"{path} was drawn with another {what}; choose another folder")
            else:
                draws = METHODS[name](model, cooling, budget, seed)
                arrays = {"x": draws.x.float().numpy(), "family": draws.family.numpy()}
                kept.save(result, {**facts, **draws.about}, **arrays)
            yield result


def kept_draws(folder: Path) -> Results:
    """Where `temper` keeps its draws: the molecules as the array `x`, and a record of how they were drawn."""
    return Results(folder / "draws")


def drawn(folder: Path, method: str) -> tuple[np.ndarray, np.ndarray] | None:
    """The draws of all seeds of a method that are kept, and the family of each; None if there are none."""
    kept = kept_draws(folder)
    found = [kept.arrays(name) for name in kept.names() if kept[name]["method"] == method]
    if not found:
        return None
    family = [f["family"] + i * 2**32 for i, f in enumerate(found)]
    return np.concatenate([f["x"] for f in found]), np.concatenate(family)


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """A short hash of the weights, so that draws of one model are not taken for those of another."""
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(name.encode() + value.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def file_name(method: str) -> str:
    return method.replace(", ", "-").replace(" = ", "-is-").replace(" ", "-").lower()
