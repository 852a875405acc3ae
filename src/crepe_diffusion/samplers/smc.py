"""Sequential Monte Carlo on the same paths: particles walk down together, are weighted, and resampled.

for m = M, ..., 1
    walk        every particle goes from level m to m - 1 and gains weight      (weights.py)
    resample    batches whose weights have become unequal                       (resampling.py)

Particles come in independent batches of `n_particles`; each batch has its own weights and log Z.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from crepe_diffusion.batches import IMPOSSIBLE
from crepe_diffusion.errors import InputError, NonFiniteError, StoppedError, check_choice
from crepe_diffusion.models import Model
from crepe_diffusion.processes import Process
from crepe_diffusion.progress import Callback, Track
from crepe_diffusion.proposals import Proposal
from crepe_diffusion.random import Stream
from crepe_diffusion.samplers.resampling import Resampling, Systematic
from crepe_diffusion.samplers.result import Particles
from crepe_diffusion.samplers.setup import finish, positive, prepare
from crepe_diffusion.samplers.weights import PathWork, Weight
from crepe_diffusion.schedules import Ladder
from crepe_diffusion.targets import Target

__all__ = ["SMC"]


class SMC:
    """The methods that CREPE is compared with, at exactly counted cost: `M * K + 1` evaluations per particle.

    - `n_batches` independent batches of `n_particles` walk in one network batch;
    - `weight`: `PathWork()`, `FeynmanKac()`, `Twisted()`, `Steering()`, `DiscreteGuidance()` or any `Weight`;
    - `resampling`: `Systematic()`, `Stratified()`, `Multinomial()`, `Residual()`, `Partial()` or any `Resampling`,
      applied to the batches whose effective number of particles is below the share `ess_threshold`;
    - `pool`: batches count by their estimates of Z (`"z"`), or equally (`"equal"`), which is biased for small ones;
    - the others are those of `ReplicaExchange`.

    Feynman-Kac correctors with a reward cost `2 M K + 1`. `log_z` is relative to the noise law without its reward.

    >>> from crepe_diffusion.models import GaussianMixture
    >>> from crepe_diffusion.schedules import ladder
    >>> p = GaussianMixture(weights=[0.3, 0.7], means=[[-4.0], [3.0]], stds=[0.5, 0.4])
    >>> out = SMC(p ** 2.0, ladder.karras(11, 0.01, 20.0), n_particles=8, n_batches=3, seed=0).sample()
    >>> out.x.shape, round(float(out.weights.sum()), 12)
    (torch.Size([24, 1]), 1.0)
    """

    def __init__(
        self,
        target: Target | Model,
        ladder: Ladder,
        *,
        n_particles: int = 64,
        n_batches: int = 1,
        weight: Weight | None = None,
        resampling: Resampling | None = None,
        ess_threshold: float = 0.5,
        pool: str = "z",
        seed: int = 0,
        process: Process | None = None,
        proposal: Proposal | None = None,
        micro_batch: int | None = None,
        nonfinite: str = "raise",
        fit_samples: int = 256,
    ):
        self.n_particles, self.n_batches = positive("n_particles", n_particles), positive("n_batches", n_batches)
        if not 0 <= ess_threshold <= 1:
            raise InputError(f"ess_threshold must be between 0 and 1, got {ess_threshold!r}")
        self.ess_threshold = ess_threshold
        check_choice("pool", pool, ("z", "equal"))
        self.pool = pool
        self.weight: Weight = PathWork() if weight is None else weight
        if not callable(getattr(self.weight, "descend", None)) or isinstance(self.weight, type):
            raise InputError(
                "weight must be an object such as cd.PathWork(), cd.FeynmanKac(), cd.Twisted(), cd.Steering() or"
                f" cd.DiscreteGuidance(), got {weight!r}"
            )
        self.resampling: Resampling = Systematic() if resampling is None else resampling
        if not callable(self.resampling) or isinstance(self.resampling, type):
            raise InputError(
                "resampling must be an object such as cd.Systematic(), cd.Stratified(), cd.Multinomial(),"
                f" cd.Residual() or cd.Partial(), got {resampling!r}"
            )
        self.stream = Stream(seed)
        self.evaluate = prepare(
            target,
            ladder,
            self.stream.at("setup"),
            process=process,
            proposal=self.weight.proposal(proposal or Proposal()),
            micro_batch=micro_batch,
            nonfinite=nonfinite,
            fit_samples=fit_samples,
            check=self.weight.check,
        )

    @property
    def target(self) -> Target:
        return self.evaluate.target

    @property
    def ladder(self) -> Ladder:
        return self.evaluate.ladder

    def sample(self, *, progress: bool | None = None, callback: Callback | None = None) -> Particles:
        """One pass down the ladder for every batch; the same draws at every call.

        `callback` is called after every level. Particles are draws of the target at level 0 only: if it stops the
        pass before, there is nothing to return, and `StoppedError` is raised.
        """
        evaluate, n, b = self.evaluate, self.n_particles, self.n_batches
        rows, top = b * n, self.ladder.n_levels - 1
        x = evaluate.noise(self.stream.at("noise"), rows)
        seen = evaluate(x, self.ladder.times[-1:].expand(rows))
        log_w, log_z = _normalised(self.weight.first(evaluate, x, seen).reshape(b, n) - math.log(n), top)
        level_ess = [_ess(log_w)]
        n_resamplings = torch.zeros(b, dtype=torch.long)
        eve = torch.arange(rows)
        with Track(top, "levels", progress, callback) as track:
            for m in range(top, 0, -1):
                stream = self.stream.at(m)
                x, seen, gained = self.weight.descend(evaluate, x, seen, m, stream.at("walk"))
                log_w, total = _normalised(log_w + gained.reshape(b, n), m - 1)
                log_z = log_z + total
                level_ess.append(_ess(log_w))
                if m > 1:
                    index, log_w, chosen = self._resampled(log_w, stream.at("resample"))
                    n_resamplings += chosen
                    x, seen, eve = x[index], seen.rows(index), eve[index]
                if track.advance() and m > 1:
                    raise StoppedError(f"stopped at level {m - 1}: particles there are not yet draws of the target")
        return Particles(
            x=finish(evaluate, x, self.stream.at("finish")),
            evaluations=evaluate.counts.copy(),
            log_weights=log_w,
            batch_log_z=log_z,
            eve=eve,
            level_ess=torch.stack(level_ess[::-1]),
            n_resamplings=n_resamplings,
            pool=self.pool,
        )

    def _resampled(self, log_w: Tensor, stream: Stream) -> tuple[Tensor, Tensor, Tensor]:
        """Row indices, new normalised log-weights, and which batches were resampled; the others keep their weights."""
        b, n = log_w.shape
        # Equal weights have an ESS of n only up to rounding, and a threshold of 1 means always.
        chosen = _ess(log_w) <= self.ess_threshold * n * (1 + 1e-12)
        index, weights = self.resampling(log_w, stream)
        index = torch.where(chosen[:, None], index, torch.arange(n))
        log_w = torch.where(chosen[:, None], weights, log_w)
        return (index + torch.arange(b)[:, None] * n).flatten(), log_w, chosen


def _ess(log_w: Tensor) -> Tensor:
    """Effective number of particles of each batch."""
    return 1 / (2 * log_w).exp().sum(1)


def _normalised(log_w: Tensor, level: int) -> tuple[Tensor, Tensor]:
    """Log-weights that sum to one in each batch, and the log of what they summed to before.

    A particle has no weight if its path met a prediction that was not finite, or if it came from where the target is
    zero.
    """
    log_w = log_w.where(log_w > IMPOSSIBLE / 2, -math.inf)
    total = log_w.logsumexp(1)
    vanished = ~total.isfinite()
    if vanished.any():
        bad = int(vanished.sum())
        raise NonFiniteError(
            f"all weights of {bad} of {len(log_w)} batches vanished at level {level}: use more particles"
        )
    return log_w - total[:, None], total
