"""What every sampler returns: draws with weights, and means of them with their errors.

mean(f) = sum_i w_i f(x_i) +- its standard error,   sum_i w_i = 1
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from crepe_diffusion.batches import called
from crepe_diffusion.diagnostics import Diagnostics, Estimate, RunData, Verdict, ess, rhat, verdict
from crepe_diffusion.diagnostics.data import default_scalars
from crepe_diffusion.diagnostics.estimates import mean_of, tours
from crepe_diffusion.diagnostics.starting import StartingPass, with_steps
from crepe_diffusion.diagnostics.verdict import FEW_CLUSTERS, judge_particles
from crepe_diffusion.errors import InputError, check_choice
from crepe_diffusion.evaluate import Counts
from crepe_diffusion.random import Stream
from crepe_diffusion.samplers.resampling import Systematic
from crepe_diffusion.schedules import Ladder

__all__ = ["Chains", "Function", "Independent", "Particles", "Result", "Sweeps"]

LARGE_BATCH = 16
"""Eves compete within their batch, so that they are independent only where it has many particles."""

Function = Callable[[Tensor], Tensor]
"""A scalar of each draw: (n, *event) to (n,)."""


@dataclass(frozen=True)
class Result(ABC):
    """Draws `x` (n, *event) of the target and what they cost; `weights` (n,) sum to one.

    >>> from crepe_diffusion.models import GaussianMixture
    >>> from crepe_diffusion.samplers import SMC, Plain, ReplicaExchange
    >>> from crepe_diffusion.schedules import ladder
    >>> p, steps = GaussianMixture(weights=[1.0], means=[[1.0]], stds=[0.5]), ladder.karras(6, 0.05, 10.0)
    >>> calls = [
    ...     ReplicaExchange(p, steps, n_chains=4).sample(20),
    ...     SMC(p, steps, n_particles=10, n_batches=8).sample(),
    ...     Plain(p, steps).sample(80),
    ... ]
    >>> for out in calls:
    ...     mean = out.mean(lambda x: x[:, 0])
    ...     assert out.x.shape == (80, 1) and out.weights.shape == (80,)
    ...     assert abs(mean.value - 1.0) < 5 * mean.error < 1.0
    """

    x: Tensor
    evaluations: Counts

    @property
    @abstractmethod
    def weights(self) -> Tensor:
        """One per draw, (n,), float64; their sum is 1."""

    @abstractmethod
    def mean(self, function: Function) -> Estimate:
        """The target's mean of a scalar, with its standard error."""

    @abstractmethod
    def ess(self, function: Function) -> float:
        """How many independent draws of the target would give this mean the same error."""

    @property
    @abstractmethod
    def log_z(self) -> Estimate:
        """log Z_0 / Z_M, or NaN where the sampler has no estimate of it."""

    @abstractmethod
    def verdict(self, scalars: Mapping[str, Function] | None = None) -> Verdict:
        """Whether to trust these draws, judged by some scalars of them; the first coordinates where none are given."""

    def values(self, function: Function) -> Tensor:
        """The scalar of each draw, (n,)."""
        values = called(function, "a scalar of the draws", self.x)
        if not isinstance(values, Tensor) or values.shape != (len(self.x),):
            got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else repr(type(values).__name__)
            raise InputError(f"a scalar of the draws must be one number per draw, shape ({len(self.x)},); got {got}")
        return values

    def _variance(self, values: Tensor) -> float:
        return float(self.weights @ (values - self.weights @ values).square())

    def _shifts(self, scalars: Mapping[str, Function], start: StartingPass | None) -> dict[str, float]:
        """What the size of the steps does to each mean, in standard deviations, where a pilot measured it."""
        if start is None:
            return {}
        spread = {name: math.sqrt(self._variance(self.values(f).to(torch.float64))) for name, f in scalars.items()}
        return {name: abs(start.shift(scalars[name]).value) / sd for name, sd in spread.items() if sd}

    def _uniform(self) -> Tensor:
        return torch.full((len(self.x),), 1 / max(1, len(self.x)), dtype=torch.float64, device=self.x.device)


@dataclass(frozen=True)
class Chains(Result):
    """Draws of several chains; rows run over draws, then chains.

    `iteration` is (draws,); `replica` and `born` are (draws, chains): the replica that made the draw, and the iteration
    in which it was at the noise end last. `diagnostics` are those of the sampler since burn-in. `started_from` is the
    pass from which the chains started, if any.
    """

    iteration: Tensor
    replica: Tensor
    born: Tensor
    diagnostics: Diagnostics
    ladder: Ladder
    started_from: StartingPass | None = None

    @property
    def n_chains(self) -> int:
        return self.diagnostics.n_chains

    def by_chain(self, values: Tensor) -> Tensor:
        """Values of the rows, (n, ...), arranged as (draws, chains, ...)."""
        return values.unflatten(0, (len(values) // self.n_chains, self.n_chains))

    @property
    def chains(self) -> Tensor:
        """The draws as (draws, chains, *event)."""
        return self.by_chain(self.x)

    def of_chains(self, chains: Sequence[int] | range) -> Chains:
        """What these chains alone have given; the counts stay those of all.

        >>> from crepe_diffusion.models import GaussianMixture
        >>> from crepe_diffusion.samplers import ReplicaExchange
        >>> from crepe_diffusion.schedules import ladder
        >>> p = GaussianMixture(weights=[1.0], means=[[1.0]], stds=[0.5])
        >>> out = ReplicaExchange(p, ladder.karras(6, 0.05, 10.0), n_chains=4).sample(20)
        >>> out.of_chains([1, 3]).x.shape
        torch.Size([40, 1])
        """
        index = list(chains)
        return replace(
            self,
            x=self.chains[:, index].flatten(0, 1),
            replica=self.replica[:, index],
            born=self.born[:, index],
            diagnostics=self.diagnostics.of_chains(index),
        )

    def scalar(self, function: Function) -> Tensor:
        """A scalar of each draw, (draws, chains)."""
        return self.by_chain(self.values(function))

    @property
    def weights(self) -> Tensor:
        return self._uniform()

    def mean(self, function: Function) -> Estimate:
        """The error is the largest of those by autocorrelation, by tours and by chains.

        Where the chains started from a pilot, it contains what that measured of the size of the steps, on paths down.
        """
        start = self.started_from
        found = mean_of(self.scalar(function).to(torch.float64), self.tours)
        return with_steps(found, None if start is None else start.shift(function))

    def ess(self, function: Function) -> float:
        return ess(self.scalar(function), self.tours)

    @property
    def tours(self) -> Tensor:
        """The tour of each draw, (draws, chains): draws of one tour descend from one arrival at the noise end."""
        return tours(self.replica, self.born)

    def verdict(self, scalars: Mapping[str, Function] | None = None) -> Verdict:
        return verdict(RunData.of(self, scalars=None if scalars is None else dict(scalars)))

    def rhat(self, function: Function) -> float:
        """Rank-normalised split R-hat of a scalar."""
        return rhat(self.scalar(function))

    @property
    def log_z(self) -> Estimate:
        """By Bennett's estimate from the paths in both directions; `diagnostics.log_z` has others.

        Where the chains started from a pilot, the error contains what it measured of the size of the steps.
        """
        start = self.started_from
        return with_steps(self.diagnostics.log_z(), None if start is None else start.discretisation["bar"])


@dataclass(frozen=True)
class Particles(Result):
    """Weighted draws; rows run over batches, then particles.

    - `log_weights` (batches, particles), normalised in each batch; `batch_log_z` (batches,): its estimate of log Z;
    - `eve` (n,): the particle at the noise end from which each draw descends, a number of its own for each batch;
    - `level_ess` (levels, batches): the effective number of particles at each level, before resampling there;
    - `started_from`: the pilot of the sampler, if it has the same steps: it has measured what their size does;
    - `pool` weighs the batches: by their estimates of Z, `"z"`, which is consistent for batches of any size, or
      `"equal"`, which keeps the bias that one batch has.

    Errors come from independent clusters, which are the batches, or the Eves of batches that are few and large. With
    the weight `W_g` of each cluster, the formula is that of tours:

        error^2 = sum_g (sum_{i in g} w_i (f_i - mean))^2 / (1 - sum_g W_g^2)

    Relatives inside a cluster may be correlated in any way. `1 / sum_g W_g^2` clusters count, and one less is the
    number of degrees of freedom; where all draws have one Eve, the error is infinite.
    """

    log_weights: Tensor
    batch_log_z: Tensor
    eve: Tensor
    level_ess: Tensor
    n_resamplings: Tensor
    pool: str = "z"
    started_from: StartingPass | None = None

    def __post_init__(self) -> None:
        check_choice("pool", self.pool, ("equal", "z"))

    @staticmethod
    def joined(parts: Sequence[Particles]) -> Particles:
        """All batches of several results of one sampler, pooled as those of the last; its counts include the others.

        >>> from crepe_diffusion.models import GaussianMixture
        >>> from crepe_diffusion.samplers import SMC
        >>> from crepe_diffusion.schedules import ladder
        >>> p = GaussianMixture(weights=[1.0], means=[[1.0]], stds=[0.5])
        >>> smc = SMC(p ** 2.0, ladder.karras(6, 0.05, 10.0), n_particles=10, n_batches=4)
        >>> Particles.joined([smc.sample(), smc.sample(2)]).n_batches
        12
        """
        if not parts:
            raise InputError("there is nothing to join: give at least one result")
        if len(parts) == 1:
            return parts[0]
        first = np.cumsum([0, *(len(part.x) for part in parts[:-1])]).tolist()
        return replace(
            parts[-1],
            x=torch.cat([part.x for part in parts]),
            log_weights=torch.cat([part.log_weights for part in parts]),
            batch_log_z=torch.cat([part.batch_log_z for part in parts]),
            eve=torch.cat([part.eve + i for i, part in zip(first, parts, strict=True)]),
            level_ess=torch.cat([part.level_ess for part in parts], 1),
            n_resamplings=torch.cat([part.n_resamplings for part in parts]),
        )

    def of_batches(self, batches: Sequence[int] | range) -> Particles:
        """What these batches alone have given; the counts stay those of all."""
        index = list(batches)
        return replace(
            self,
            x=self.by_batch(self.x)[index].flatten(0, 1),
            log_weights=self.log_weights[index],
            batch_log_z=self.batch_log_z[index],
            eve=self.by_batch(self.eve)[index].flatten(),
            level_ess=self.level_ess[:, index],
            n_resamplings=self.n_resamplings[index],
        )

    @property
    def n_batches(self) -> int:
        return len(self.log_weights)

    def by_batch(self, values: Tensor) -> Tensor:
        """Values of the rows, (n, ...), arranged as (batches, particles, ...)."""
        return values.unflatten(0, (self.n_batches, -1))

    @property
    def batch_ess(self) -> Tensor:
        """Effective number of particles in each batch at the end, (batches,): `1 / sum_i w_i^2`."""
        return 1 / (2 * self.log_weights).exp().sum(1)

    @property
    def batch_weights(self) -> Tensor:
        """How much each batch counts, (batches,)."""
        if self.pool == "z":
            return self.batch_log_z.softmax(0)
        return torch.full_like(self.batch_log_z, 1 / self.n_batches)

    @property
    def weights(self) -> Tensor:
        return (self.log_weights.exp() * self.batch_weights[:, None]).flatten()

    @property
    def clusters(self) -> Tensor:
        """The independent cluster to which each draw belongs, (n,), counted from 0."""
        if self._by_batches:
            return torch.arange(self.n_batches, device=self.eve.device).repeat_interleave(self.log_weights.shape[1])
        return self.eve.unique(return_inverse=True)[1]

    @property
    def _by_batches(self) -> bool:
        return self.n_batches >= FEW_CLUSTERS or (self.n_batches > 1 and self.log_weights.shape[1] < LARGE_BATCH)

    @property
    def diagnostics(self) -> dict[str, Tensor]:
        """What to look at first: effective sizes, how many Eves are left, how often each batch was resampled."""
        eves = torch.tensor([len(e.unique()) for e in self.by_batch(self.eve)])
        return {
            "ess": self.batch_ess,
            "level_ess": self.level_ess,
            "eves": eves,
            "n_resamplings": self.n_resamplings,
        }

    @property
    def discretisation(self) -> Estimate | None:
        """How much too large log Z is due to the size of the steps, where a pilot measured it."""
        return None if self.started_from is None else self.started_from.discretisation["down"]

    @property
    def unseen(self) -> float:
        """The share of the weight on paths that so many particles may well have missed, where a pilot walked up."""
        return 0.0 if self.started_from is None else self.started_from.unseen(self.log_weights.numel())

    def mean(self, function: Function) -> Estimate:
        """The error is that of clusters: batches, or the Eves of a few large ones; and of the steps, where known."""
        start = self.started_from
        return with_steps(self._mean(function), None if start is None else start.shift(function))

    def _mean(self, function: Function) -> Estimate:
        values = self.values(function).to(torch.float64)
        value = float(self.weights @ values)
        sums, shares = self._by_cluster(values - value), self._by_cluster(torch.ones_like(values))
        repeated = float(shares.square().sum())
        if repeated > 1 - 1e-12:
            return Estimate(value, math.inf, 1.0)
        return Estimate(value, math.sqrt(float(sums.square().sum()) / (1 - repeated)), max(1 / repeated - 1, 1.0))

    def _by_cluster(self, values: Tensor) -> Tensor:
        """Weighted sums of the values of each cluster."""
        clusters = self.clusters
        total = torch.zeros(int(clusters.max()) + 1, dtype=torch.float64, device=values.device)
        return total.index_add(0, clusters, self.weights * values)

    def ess(self, function: Function) -> float:
        variance, error = self._variance(self.values(function).to(torch.float64)), self._mean(function).error
        return variance / error**2 if error else 0.0

    @property
    def log_z(self) -> Estimate:
        """The log of the mean of the batches' unbiased estimates of Z, with the error of a jackknife on the log scale.

        For a few large batches the error is that of the Eves' weights, `(N sum_e W_e^2 - 1) / (N - 1)` for the relative
        variance of Z (Lee and Whiteley 2018, without their factor for the number of resamplings, which would lower it).
        What particles may have missed (`unseen`) and the size of the steps are part of the error where they are known.
        """
        found = self._log_z
        return with_steps(replace(found, error=math.hypot(found.error, self.unseen)), self.discretisation)

    @property
    def _log_z(self) -> Estimate:
        b, n = self.log_weights.shape
        value = float(self.batch_log_z.logsumexp(0)) - math.log(b)
        if not self._by_batches:
            repeated, total = float(self._by_cluster(torch.ones_like(self.weights)).square().sum()), b * n
            error = math.sqrt(max(0.0, total * repeated - 1) / (total - 1)) if total > 1 else math.nan
            return Estimate(value, error, max(1 / repeated - 1, 1.0))
        shares = self.batch_log_z.softmax(0)
        without = (-shares).log1p()  # log of the mean of all but one batch, up to a constant
        spread = float((without - without.mean()).square().sum()) if bool(shares.max() < 1) else math.inf
        return Estimate(value, math.sqrt((b - 1) / b * spread), max(1 / float(shares.square().sum()) - 1, 1.0))

    def verdict(self, scalars: Mapping[str, Function] | None = None) -> Verdict:
        chosen = default_scalars(tuple(self.x.shape[1:])) if scalars is None else scalars
        shares = self._by_cluster(torch.ones(len(self.x), dtype=torch.float64)).tolist()
        kind = "batches" if self._by_batches else "ancestors"
        sizes = {name: self.ess(f) for name, f in chosen.items()}
        b, n = self.log_weights.shape
        narrowest = float(self.level_ess.amin(0).mean()) / n
        shifts = self._shifts(chosen, self.started_from)
        return judge_particles(shares, kind, self._log_z, sizes, self.discretisation, (narrowest, b * n), shifts)

    def resampled_rows(self, stream: Stream) -> Tensor:
        """Which rows, (n,), are equally weighted draws: of all batches by weight, or of each if they count equally.

        `eve[rows]` tells which of these draws are relatives.
        """
        log_w = self.weights.log()[None] if self.pool == "z" else self.log_weights
        index, _ = Systematic()(log_w, stream)
        b, n = log_w.shape
        return (index + torch.arange(b)[:, None] * n).flatten()

    def resampled(self, stream: Stream) -> Tensor:
        """Equally weighted draws (n, *event), those of `resampled_rows`."""
        return self.x[self.resampled_rows(stream)]


@dataclass(frozen=True)
class Sweeps(Result):
    """All particles of the sweeps of particle Gibbs, weighted; rows run over sweeps, then chains, then particles.

    `log_weights` (sweeps, chains, particles) are normalised in each sweep, and all sweeps count equally; particle 0 is
    the path that was kept before the sweep, and the next one is chosen by these weights. `replica` and `born` are
    (sweeps, chains): the particle and the iteration at the noise end from which particle 0 descends; `changed` is
    whether another path was chosen. `survivors` and `level_ess` are (sweeps, levels, chains). `started_from` is the
    pilot of the sampler, if it has the same steps: errors contain what it measured of their size.
    """

    log_weights: Tensor
    changed: Tensor
    replica: Tensor
    born: Tensor
    sweep_log_z: Tensor
    survivors: Tensor
    level_ess: Tensor
    started_from: StartingPass | None = None

    @property
    def n_chains(self) -> int:
        return self.log_weights.shape[1]

    def of_chains(self, chains: Sequence[int] | range) -> Sweeps:
        """What these chains alone have given; the counts stay those of all."""
        index = list(chains)
        return replace(
            self,
            x=self.x.unflatten(0, self.log_weights.shape)[:, index].flatten(0, 2),
            log_weights=self.log_weights[:, index],
            changed=self.changed[:, index],
            replica=self.replica[:, index],
            born=self.born[:, index],
            sweep_log_z=self.sweep_log_z[:, index],
            survivors=self.survivors[:, :, index],
            level_ess=self.level_ess[:, :, index],
        )

    @property
    def weights(self) -> Tensor:
        n = max(1, self.log_weights.shape[0] * self.log_weights.shape[1])
        return (self.log_weights.exp() / n).flatten()

    @property
    def diagnostics(self) -> dict[str, Tensor]:
        """What to look at first: how often each chain left its path (chains,), and the means of each level (levels,) of
        the particles with descendants at level 0 and of the effective number of particles.
        """
        return {
            "changed": self.changed.to(torch.float64).mean(0),
            "survivors": self.survivors.to(torch.float64).mean((0, 2)),
            "level_ess": self.level_ess.mean((0, 2)),
        }

    def scalar(self, function: Function) -> Tensor:
        """The weighted mean of a scalar in each sweep, (sweeps, chains)."""
        values = self.values(function).to(torch.float64).reshape(self.log_weights.shape)
        return (self.log_weights.exp() * values).sum(2)

    @property
    def tours(self) -> Tensor:
        """A number for each sweep, (sweeps, chains), the same while kept paths descend from one point at the noise end.

        All particles of a sweep belong to the tour of the path that was kept before it, with which they compete.
        """
        return tours(self.replica, self.born)

    def mean(self, function: Function) -> Estimate:
        """The error is the larger of those by autocorrelation of sweeps and by tours, with the steps where known."""
        start = self.started_from
        return with_steps(self._mean(function), None if start is None else start.shift(function))

    def _mean(self, function: Function) -> Estimate:
        return mean_of(self.scalar(function), self.tours)

    def ess(self, function: Function) -> float:
        error = self._mean(function).error
        return self._variance(self.values(function).to(torch.float64)) / error**2 if error else 0.0

    @property
    def log_z(self) -> Estimate:
        """`-log mean(1 / Z_n)` over the sweeps: with the kept path among the particles, `E[1 / Z_n] = 1 / Z` exactly.

        NaN where the target is zero on a path up, or not finite. Its error contains the size of the steps, if known.
        """
        return with_steps(self._log_z, self._steps)

    @property
    def _steps(self) -> Estimate | None:
        """Walks up decide as much as walks down, so it is the mean of both that counts."""
        return None if self.started_from is None else self.started_from.discretisation["bar"]

    @property
    def _log_z(self) -> Estimate:
        log_z = self.sweep_log_z
        if not log_z.numel() or not bool(log_z.isfinite().all()):
            return Estimate(math.nan, math.nan)
        value = math.log(log_z.numel()) - float((-log_z).flatten().logsumexp(0))
        inverse = mean_of((value - log_z).exp(), self.tours)
        return Estimate(value, inverse.error, inverse.dof)

    def verdict(self, scalars: Mapping[str, Function] | None = None) -> Verdict:
        """Judged as particles are, with tours as their clusters."""
        if not len(self.x):
            return Verdict("do not trust", ["there are no draws"], ["run longer"])
        chosen = default_scalars(tuple(self.x.shape[1:])) if scalars is None else scalars
        shares = (self.tours.unique(return_counts=True)[1] / self.tours.numel()).tolist()
        sizes, shifts = {name: self.ess(f) for name, f in chosen.items()}, self._shifts(chosen, self.started_from)
        start, beside = self.started_from, None
        if start is not None:
            pairs = {name: (self._mean(f), start.mean(f)) for name, f in chosen.items()}
            beside = {**pairs, "log Z": (self._log_z, start.log_z["bar"])}, len(start.x)
        return judge_particles(shares, "tours", self._log_z, sizes, self._steps, shifts=shifts, beside=beside)


@dataclass(frozen=True)
class Independent(Result):
    """Independent draws without weights; how far their law is from the target is not measured."""

    diagnostics: None = None

    @property
    def weights(self) -> Tensor:
        return self._uniform()

    def mean(self, function: Function) -> Estimate:
        values = self.values(function).to(torch.float64)
        error = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return Estimate(float(values.mean()), error)

    def ess(self, function: Function) -> float:
        return float(len(self.values(function)))

    def verdict(self, scalars: Mapping[str, Function] | None = None) -> Verdict:
        return Verdict("look", ["nothing corrects these draws, and nothing measures how far they are from the target"])

    @property
    def log_z(self) -> Estimate:
        return Estimate(math.nan, math.nan)
