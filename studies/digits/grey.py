"""Grey digits of the trained network, guided by every method side by side. No truth is known here.

    pi(x)  ~  p(x | digit)^1.2 p(x)^(-0.2),      28 x 28 pixels of 16 levels

Every method may use the rows of `n_draws` plain draws in `n_steps` steps. Draws are judged by a classifier of images of
14 x 14 that the study of images ships (accuracy, Frechet distance of its features to those of real digits, spread), and
by how near they are to the nearest image that the network was trained on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

import crepe_diffusion as cd
from crepe_diffusion.processes import Masked
from studies.digits.network import SIDE, Pixels, grey_digits, load_models
from studies.images import inception
from studies.images.model import Painter, load_painter
from studies.images.trained import by_weight, judged

__all__ = ["METHODS", "Judge", "Plan", "fid", "guided", "path_of"]

STRENGTH = 1.2
N_MODELS = 2


@dataclass(frozen=True)
class Plan:
    """What a method may use for one digit."""

    n_steps: int = 48
    n_draws: int = 128
    n_chains: int = 8

    @property
    def levels(self) -> cd.Ladder:
        """Three steps between two levels: resampling at every step only adds noise."""
        return cd.ladder.linear(self.n_steps // 3 + 1)

    @property
    def rows(self) -> int:
        return N_MODELS * self.n_steps * self.n_draws

    def process(self, levels: int) -> Masked:
        """Counted masks, and so many pixels at once that a way down has `n_steps` turns."""
        return Masked(levels, at_once=math.ceil(SIDE**2 / self.n_steps)).counted()


PLANS = {"grey": Plan(), "paper": Plan(n_steps=200, n_draws=512)}
"""By what results are called: what two cores can afford for several digits, and the steps and draws of the paper."""


def guided(network: Pixels, digit: int) -> cd.Target:
    models = load_models(network)
    return cd.guided(models[digit], models[-1], STRENGTH)


# -- methods ----------------------------------------------------------------------------------------------------

Method = Callable[[cd.Target, Masked, Plan, int], cd.Result]


def _plain(target: cd.Target, process: Masked, plan: Plan, seed: int) -> cd.Result:
    sampler = cd.Plain(target, cd.ladder.linear(plan.n_steps + 1), seed=seed, process=process)
    return sampler.sample(plan.n_draws, progress=False)


def _lee(target: cd.Target, process: Masked, plan: Plan, seed: int) -> cd.Result:
    """As published: batches of 128, all pixels of a step at once, partial resampling of 80 % below a share of 0.2."""
    sampler = cd.SMC(
        target,
        cd.ladder.linear(plan.n_steps + 1),
        n_particles=min(128, plan.n_draws),
        n_batches=max(1, plan.n_draws // 128),
        pool="equal",
        seed=seed,
        process=Masked(process.vocab_size, at_once=None),
        weight=cd.DiscreteGuidance(),
        resampling=cd.Partial(0.8),
        ess_threshold=0.2,
    )
    return sampler.sample(progress=False)


def _smc(target: cd.Target, process: Masked, plan: Plan, seed: int) -> cd.Result:
    sampler = cd.SMC(target, plan.levels, n_particles=plan.n_draws, seed=seed, process=process)
    return sampler.sample(progress=False)


def _gibbs(target: cd.Target, process: Masked, plan: Plan, seed: int) -> cd.Result:
    """One chain of a quarter of the particles: a pass of SMC, with which it begins, and three sweeps."""
    sampler = cd.ParticleGibbs(
        target, plan.levels, n_particles=plan.n_draws // 4, n_chains=1, seed=seed, process=process
    )
    return sampler.sample(3, progress=False)


def _crepe(target: cd.Target, process: Masked, plan: Plan, seed: int) -> cd.Result:
    """Chains on the ladder that a pilot plans, from its population; the pilot costs a quarter of the rows."""
    n = max(2, plan.rows // 4 // (N_MODELS * (2 * plan.n_steps + 1)))
    found = cd.pilot(target, cd.ladder.linear(plan.n_steps + 1), n=n, seed=seed, process=process, progress=False)
    chain = cd.ReplicaExchange(target, pilot=found, n_chains=plan.n_chains, seed=seed, process=process)
    before = chain.evaluate.counts.rows
    chain.sample(2, progress=False)  # even and odd pairs of levels cost differently
    each = (chain.evaluate.counts.rows - before) / 2
    return chain.sample(max(2, int((plan.rows - chain.evaluate.counts.rows) / each)), progress=False)


METHODS: dict[str, Method] = {
    "plain guidance": _plain,
    "SMC of Lee et al.": _lee,
    "SMC": _smc,
    "particle Gibbs": _gibbs,
    "CREPE": _crepe,
}


def path_of(network: Pixels, digit: int, plan: Plan, n_iterations: int, seed: int = 0) -> Tensor:
    """The states of one chain at all its levels, (iterations, levels, 28, 28), noise last; on a ladder for the eye.

    The ladder of a pilot has two levels at this strength, since whole ways down are accepted often enough.
    """
    chain = cd.ReplicaExchange(
        guided(network, digit), plan.levels, n_chains=1, seed=seed, process=plan.process(network.sizes.levels)
    )
    seen = []
    for _ in range(n_iterations):
        chain.step()
        state = chain.state
        at = state.replica_at()[0]
        seen.append(state.x.reshape(*state.level.shape, SIDE, SIDE)[0, at])
    return torch.stack(seen)


# -- judging ----------------------------------------------------------------------------------------------------


def as_image(x: Tensor, levels: int) -> Tensor:
    """Levels of grey (n, 28, 28) as images (n, 1, 28, 28) in [-1, 1]."""
    return x[:, None].float() / (levels - 1) * 2 - 1


@dataclass(frozen=True)
class Judge:
    """A classifier with the moments of its features, the training images, and test images for comparison.

    `near` is the distance to the nearest training image that one in a hundred test images falls below.
    """

    painter: Painter
    levels: int
    training: Tensor
    test: Tensor
    label: Tensor
    near: float

    @classmethod
    def load(cls, mnist: Path, levels: int, n_test: int = 2000) -> Judge:
        training, test = (grey_digits(mnist, levels, part) for part in ("train", "test"))
        pixels = training[:, :-1].to(torch.uint8)
        near = float(nearest(test[:n_test, :-1], pixels).quantile(0.01))
        x = test[:, :-1].reshape(-1, SIDE, SIDE)
        return cls(load_painter("mnist-14"), levels, pixels, x, test[:, -1], near)

    def real(self, digit: int, n: int) -> Tensor:
        """Test images of a digit: what a method could reach."""
        return self.test[self.label == digit][:n]

    def __call__(self, x: Tensor, weights: Tensor, digit: int) -> dict[str, float]:
        """Of draws (n, 28, 28) with weights; near copies are counted among as many draws taken by weight."""
        found = judged(self.painter, digit, avg_pool2d(as_image(x, self.levels), 2), weights)
        distance = nearest(x.flatten(1), self.training)
        return found | {"near copies": float(weights.double() @ (distance < self.near).double())}


def nearest(x: Tensor, others: Tensor, batch: int = 10_000) -> Tensor:
    """The distance of every row of x (n, d) to the nearest of `others` (m, d), in levels."""
    rows, best = x.float(), torch.full((len(x),), math.inf)
    for part in others.split(batch):
        best = torch.minimum(best, torch.cdist(rows, part.float()).amin(1))
    return best


def fid(network: torch.nn.Module, judge: Judge, digit: int, drawn: dict[str, Tensor]) -> dict[str, float]:
    """FID of draws (n, 28, 28) of each method to half of the test images of a digit, and of as many others of them."""
    real = judge.test[judge.label == digit]
    half, n = len(real) // 2, max(len(x) for x in drawn.values())

    def seen(x: Tensor) -> Tensor:
        return inception.features(network, (x.float() * (255 / (judge.levels - 1))).round().to(torch.uint8))

    truth = seen(real[:half])
    return {name: inception.distance(seen(x), truth) for name, x in ({"real": real[half : half + n]} | drawn).items()}


def run(network: Pixels, judge: Judge, method: str, digit: int, plan: Plan, seed: int) -> tuple[dict[str, Any], Tensor]:
    """One method on one digit: what the judge found, and `n_draws` draws by weight, to look at and for Inception."""
    out = METHODS[method](guided(network, digit), plan.process(network.sizes.levels), plan, seed)
    found = judge(out.x, out.weights, digit) | {
        "rows": out.evaluations.rows,
        "draws": len(out.x),
        "different": len(torch.unique(out.x.flatten(1), dim=0)),
        "effective": 1 / float(out.weights.double().square().sum()),
    }
    return found, by_weight(out, plan.n_draws, seed)
