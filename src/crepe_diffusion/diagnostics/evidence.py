"""What a verdict and a report are made of: the numbers of a run, each computed once and only from draws that count.

judged = draws of the target now in force, after burn-in
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from crepe_diffusion.diagnostics.data import RunData
from crepe_diffusion.diagnostics.estimates import Estimate, deviates, ess, mean_of, rhat, tours_of
from crepe_diffusion.diagnostics.exchange import Diagnostics, enough_levels
from crepe_diffusion.diagnostics.starting import with_steps

__all__ = ["DRIFT_Z", "MIN_DRAWS", "Evidence", "ScalarSummary"]

# Below this many draws a chain's autocorrelation, and with it every error, is a guess.
MIN_DRAWS = 20
# How improbable a disagreement of chains must be before it counts: there may be a dozen scalars.
CHANCE = 1e-5
# Halves of a run that differ by so many standard errors: 0.3 % of scalars by chance.
DRIFT_Z = 3.0
# Bennett's estimate and its jackknife cost a quarter of a microsecond a number: half a second for this many.
LOG_Z_NUMBERS = 2_000_000


@dataclass(frozen=True, eq=False)
class ScalarSummary:
    """One scalar of the judged draws, `values` (draws, chains), the tour of each draw, and what the size of the steps
    does to its mean, where that is known.
    """

    name: str
    values: np.ndarray
    tours: torch.Tensor | None = None
    steps: Estimate | None = None

    @cached_property
    def n_nonfinite(self) -> int:
        return int((~np.isfinite(self.values)).sum())

    @cached_property
    def is_constant(self) -> bool:
        return bool(self.values.size) and bool((self.values == self.values.flat[0]).all())

    @property
    def can_be_judged(self) -> bool:
        return len(self.values) >= MIN_DRAWS and not self.n_nonfinite and not self.is_constant

    @cached_property
    def _tensor(self) -> torch.Tensor:
        return torch.as_tensor(np.ascontiguousarray(self.values), dtype=torch.float64)

    @cached_property
    def ess(self) -> float:
        return ess(self._tensor, self.tours) if self.can_be_judged else math.nan

    @cached_property
    def rhat(self) -> float:
        return rhat(self._tensor) if self.can_be_judged else math.nan

    @cached_property
    def mean(self) -> Estimate:
        if self.can_be_judged:
            return mean_of(self._tensor, self.tours)
        return Estimate(
            float(self.values.mean()) if self.values.size else math.nan, 0.0 if self.is_constant else math.nan
        )

    @property
    def stated(self) -> Estimate:
        """The mean with an error that contains the size of the steps."""
        return with_steps(self.mean, self.steps)

    @property
    def shift(self) -> float:
        """What the size of the steps does to the mean, in standard deviations; 0 where that was not measured."""
        if self.steps is None or not self.can_be_judged:
            return 0.0
        return abs(self.steps.value) / float(self.values.std())

    @cached_property
    def rhat_by_chance(self) -> float:
        """What R-hat may reach in chains that agree.

        `R^2 - 1` is the variance of the means of k half-chains in units of the scalar's, which is chi-squared with
        k - 1 degrees of freedom over k - 1, divided by the effective size of a half-chain; the latter is taken from
        the chains one by one, so that their disagreement cannot excuse itself.
        """
        from scipy.stats import chi2

        own = [ess(*self._part(np.s_[:, [c]])) for c in range(self.values.shape[1])]
        n, k = max(1.0, float(np.mean(own)) / 2), 2 * self.values.shape[1]
        return math.sqrt(1 + float(chi2.isf(CHANCE, k - 1)) / (k - 1) / n)

    @cached_property
    def drift(self) -> float:
        """Second half's mean minus the first's, in standard errors (`deviates`)."""
        return _drift(self._tensor, self.tours) if self.can_be_judged else math.nan

    def _part(self, index: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Some of the values with their tours."""
        return self._tensor[index], None if self.tours is None else self.tours[index]

    def burn_in_over(self) -> int:
        """How many of these draws to drop so that the halves of the rest agree; all of them if they never do."""
        n = len(self.values)
        for cut in (n * k // 20 for k in range(13)):
            if n - cut < MIN_DRAWS:
                break
            if abs(_drift(*self._part(np.s_[cut:]))) < DRIFT_Z / 2:
                return cut
        return n

    def odd_chain(self) -> tuple[int, float, float]:
        """The chain whose mean is farthest from that of the others, its mean and theirs."""
        means = self.values.mean(0)
        others = (means.sum() - means) / max(1, len(means) - 1)
        c = int(np.abs(means - others).argmax())
        return c, float(means[c]), float(others[c])


def _drift(values: torch.Tensor, tours: torch.Tensor | None) -> float:
    half = len(values) // 2
    parts = [(values[i], None if tours is None else tours[i]) for i in (np.s_[:half], np.s_[-half:], np.s_[:])]
    first, second, both = (mean_of(*part) for part in parts)
    # A transient inflates the first half's own error and so would hide itself; the second half's serves for both.
    serves = second if second.error else both
    difference = second.value - first.value
    return math.copysign(deviates(difference, math.sqrt(2) * serves.error, serves.dof), difference)


class Evidence:
    """One run's numbers, each computed once."""

    def __init__(self, data: RunData):
        self.data = data

    @property
    def exchanges(self) -> bool:
        """Whether replicas were exchanged at all; all that concerns levels needs that."""
        return self.data.diagnostics is not None

    @property
    def diagnostics(self) -> Diagnostics:
        assert self.data.diagnostics is not None, "the sampler of this run exchanges nothing"
        return self.data.diagnostics

    @cached_property
    def judged(self) -> np.ndarray:
        """Which draws belong to the present target and come after burn-in."""
        data = self.data
        return (data.target == len(data.targets) - 1) & (np.arange(len(data.target)) >= data.n_burnt)

    @property
    def n_draws(self) -> int:
        return int(self.judged.sum())

    @cached_property
    def scalars(self) -> list[ScalarSummary]:
        """The chosen scalars of the judged draws; where none was chosen, the mean of the event."""
        chosen = {name: v[self.judged] for name, v in self.data.scalars.items()}
        if not chosen:
            x = self.data.x[self.judged]
            chosen = {"mean of x": x.reshape(*x.shape[:2], -1).mean(-1, dtype=np.float64)}
        shifts = self.data.starting_shifts
        return [
            ScalarSummary(name, np.asarray(v, dtype=np.float64), self.tours, shifts.get(name))
            for name, v in chosen.items()
        ]

    @cached_property
    def tours(self) -> torch.Tensor | None:
        """The tour of each judged draw, (draws, chains); none where replicas are not recorded."""
        return tours_of({name: values[self.judged] for name, values in self.data.columns.items()})

    @cached_property
    def finite_works(self) -> np.ndarray:
        """The share of finite log-works at each pair."""
        down, up = self.diagnostics.works()
        finite = (down.isfinite() & up.isfinite()).double()
        return (finite.mean((0, 1)) if len(down) else torch.zeros(finite.shape[2])).numpy()

    @property
    def works_known(self) -> bool:
        """A hard constraint may make some works infinite, but not most, and not all of a pair."""
        return float(np.median(self.finite_works)) > 0.5 and bool((self.finite_works > 0).all())

    @cached_property
    def acceptance(self) -> np.ndarray:
        """Of each pair; counted swaps where no log-work was finite."""
        d = self.diagnostics
        if self.works_known:
            return d.acceptance().numpy()
        return (d.accepts.sum(0) / (d.tries * d.n_chains).clamp(min=1)).numpy()

    @cached_property
    def interval(self) -> np.ndarray:
        """95 % intervals of the acceptance, (pairs, 2)."""
        if self.works_known:
            return self.diagnostics.acceptance_interval().numpy()
        return np.repeat(self.acceptance[:, None], 2, axis=1)

    @cached_property
    def barrier(self) -> Estimate:
        return (
            self.diagnostics.barrier() if self.works_known else Estimate(float((1 - self.acceptance).sum()), math.nan)
        )

    @property
    def suggested_levels(self) -> int:
        return enough_levels(self.barrier.value, len(self.data.levels))

    @cached_property
    def predicted_round_trips(self) -> float:
        return self.diagnostics.predicted_round_trips() if self.works_known else 0.0

    @cached_property
    def log_z_stride(self) -> int:
        """The free energies use every meeting whose number is a multiple of this."""
        return math.ceil(self.diagnostics.works()[0].numel() / LOG_Z_NUMBERS) or 1

    @cached_property
    def log_z(self) -> dict[str, Estimate]:
        d = _thinned(self.diagnostics, self.log_z_stride)
        return {method: d.log_z(method) for method in ("down", "up", "bar")}

    @property
    def stated_log_z(self) -> Estimate:
        """By Bennett's estimate; its error contains the size of the steps where the starting pass measured it."""
        start = self.data.started_from
        return with_steps(self.log_z["bar"], None if start is None else start.discretisation["bar"])

    @cached_property
    def explored(self) -> np.ndarray:
        """Acceptance of the explorer at each level; empty without one."""
        d = self.diagnostics
        return (d.explored / d.n_explored).numpy() if d.n_explored else np.zeros(0)

    def time(self, level: int) -> str:
        return f"{self.data.levels[min(level, len(self.data.levels) - 1)]:.3g}"


def _thinned(diagnostics: Diagnostics, stride: int) -> Diagnostics:
    """A copy that holds every `stride`-th meeting only."""
    if stride == 1:
        return diagnostics
    copy = Diagnostics(torch.zeros(diagnostics.n_chains, diagnostics.n_levels, dtype=torch.long))
    copy._down, copy._up = (w[::stride] for w in diagnostics.works())
    return copy
