"""One pass before a chain: particles walk down all steps as SMC, and up again from the data end.

    W_k   works of the paths from time k + 1 down to k, from particles weighted to pi_{k+1}
    U_k   works of the paths from time k up to k + 1, from particles weighted to pi_k

    acceptance of the block [a, b] = E min(1, exp(sum_k W_k - sum_k U_k))       over independent pairs, a <= k < b

So one pass predicts every cut of the steps into levels. It also measures the Fisher information, log Z in both
directions, and what the size of the steps does to log Z and to means; and it leaves a weighted population at every
time, from which replicas can start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from crepe_diffusion.batches import IMPOSSIBLE
from crepe_diffusion.devices import home
from crepe_diffusion.diagnostics.estimates import Estimate
from crepe_diffusion.diagnostics.starting import METHODS, StartingPass, by_eve, heaviest
from crepe_diffusion.errors import InputError, NonFiniteError, StoppedError, check_choice
from crepe_diffusion.evaluate import Counts, Evaluator
from crepe_diffusion.models import Model
from crepe_diffusion.paths import log_work, walk
from crepe_diffusion.processes import Evaluation, GaussianProcess, Masked, Process
from crepe_diffusion.progress import Callback, Track
from crepe_diffusion.proposals import Proposal
from crepe_diffusion.random import Stream
from crepe_diffusion.samplers.discretisation import Coupled, Doubling
from crepe_diffusion.samplers.plan import Plan, plan
from crepe_diffusion.samplers.resampling import Systematic
from crepe_diffusion.samplers.result import Particles
from crepe_diffusion.samplers.setup import as_target, finish, part, positive, prepare
from crepe_diffusion.schedules import Ladder
from crepe_diffusion.targets import Target

__all__ = ["Pilot", "pilot"]

RESAMPLE_BELOW = 0.5
"""Particles are resampled where their effective number falls below this share of them."""

FIT_STEPS = 16
"""The Fisher information is measured on so many steps at most, and interpolated between them.

It is smooth in log t, so that 16 of 64 steps serve as well as all of them, for a quarter of the rows.
"""

FEATURES = 32
"""Predictions are compared in so many random directions at most: distances are then right to about a quarter."""


@dataclass(frozen=True)
class Pilot:
    """What the pass found; make one by `pilot(target, steps)`, and print it.

    Times are counted from the data end, `0..T`, for T steps and n particles:

    - `x` (T + 1, n, *event) with `log_weights` and `eve` (T + 1, n): the population at every time, on its way down;
    - `end` (n, *event): the particles at the data end, denoised through the ladder's finishing times;
    - `down` and `up` (T, n): the works of every step, each from the particle's own path. Where particles are
      resampled, survivors keep their place, so that a row follows one path until it is replaced;
    - `up_log_weights`, `up_eve` (T + 1, n): weights of the particles on their way up, which began at the data end;
    - `features` (2, T + 1, n, f): predictions of both, to see which particles are alike;
    - `log_first`: log of the mean of `exp r` at the noise end, which is part of log Z of SMC but not of a pilot;
    - `discretisation`: how much too large log Z is because the steps are not small and the variance was measured from
      few samples, to first order, for paths down, paths up and both (`discretisation.py`);
    - `steps` (n,): by how much double steps would add to the weight of each particle at the data end, which gives the
      same for any mean;
    - `process`: the process with the measured information, `given`: as it was before, None for the models' own;
    - `counts`: the cost of the pass, fit included; `walk_rows` and `state_rows`: network rows of one particle's walk
      through all steps, and of one state; `in_turn`: whether positions change in turn, so that more steps cost nothing.
    """

    target: Target = field(repr=False)
    ladder: Ladder
    process: Process
    given: Process | None = field(repr=False)
    proposal: Proposal
    x: Tensor = field(repr=False)
    end: Tensor = field(repr=False)
    log_weights: Tensor = field(repr=False)
    eve: Tensor = field(repr=False)
    down: Tensor = field(repr=False)
    up: Tensor = field(repr=False)
    up_log_weights: Tensor = field(repr=False)
    up_eve: Tensor = field(repr=False)
    features: Tensor = field(repr=False)
    log_first: Tensor = field(repr=False)
    steps: Tensor = field(repr=False)
    discretisation: dict[str, Estimate]
    counts: Counts
    walk_rows: float
    state_rows: int
    in_turn: bool

    @property
    def n(self) -> int:
        """The number of particles."""
        return self.x.shape[1]

    @property
    def n_steps(self) -> int:
        return len(self.down)

    @property
    def rows(self) -> int:
        """Network rows that the pass has cost."""
        return self.counts.rows

    @property
    def ess(self) -> Tensor:
        """The effective number of particles at every time, (T + 1,), before resampling there."""
        log_w = torch.cat([self.log_weights[1:] + self.down, self.log_weights[-1:]])
        return 1 / (2 * log_w.log_softmax(1)).exp().sum(1)

    def log_z(self, method: str = "bar") -> Estimate:
        """log Z_0 / Z_M by `"down"` (as SMC), `"up"`, or `"bar"` (both, Bennett), with the error of Eves."""
        check_choice("method", method, METHODS)
        first, last = self.log_weights[-1].exp(), self.log_weights[0].exp()
        if method == "down":
            value = float((self.log_weights[1:] + self.down).logsumexp(1).sum())
            change = by_eve(last, self.eve[0]) - by_eve(first, self.eve[-1])
        elif method == "up":
            value = -float((self.up_log_weights[:-1] - self.up).logsumexp(1).sum())
            change = by_eve(self.up_log_weights[-1].exp(), self.up_eve[-1]) - by_eve(last, self.eve[0])
        else:
            value, change = self._bar()
        return Estimate(value, float(change.norm()), _dof(last, self.eve[0]))

    def _bar(self) -> tuple[float, Tensor]:
        """The sum over steps of Bennett's c, where `E_down[f(c - W)] = E_up[f(U - c)]`, and each Eve's share in it."""
        down, up = self.down.nan_to_num(nan=-math.inf), self.up.nan_to_num(nan=math.inf)
        w, v = self.log_weights[1:].exp(), self.up_log_weights[:-1].exp()
        finite = torch.cat([down, up], 1)
        low = finite.where(finite.isfinite(), math.inf).amin(1) - 10
        high = finite.where(finite.isfinite(), -math.inf).amax(1) + 10
        for _ in range(100):
            c = (low + high) / 2
            more = (w * (down - c[:, None]).sigmoid()).sum(1) > (v * (c[:, None] - up).sigmoid()).sum(1)
            low, high = torch.where(more, c, low), torch.where(more, high, c)
        c = (low + high) / 2
        a, b = (down - c[:, None]).sigmoid(), (c[:, None] - up).sigmoid()
        slope = (w * a * (1 - a)).sum(1) + (v * b * (1 - b)).sum(1)
        part_a = w * (a - (w * a).sum(1, keepdim=True)) / slope[:, None]
        part_b = v * (b - (v * b).sum(1, keepdim=True)) / slope[:, None]
        return float(c.sum()), by_eve(part_a, self.eve[1:]) - by_eve(part_b, self.up_eve[:-1])

    @property
    def summary(self) -> StartingPass:
        """The part that a chain keeps."""
        log_z = {method: self.log_z(method) for method in METHODS}
        heavy = heaviest(self.up_log_weights[:-1], self.up)
        end, w, eve, sizes = self.end, self.log_weights[0], self.eve[0], self.discretisation
        return StartingPass(end, w, eve, self.steps, log_z, sizes, self.n_steps, self.rows, heavy)

    def mean(self, function: Callable[[Tensor], Tensor]) -> Estimate:
        """The target's mean of a scalar at the data end, with its standard error."""
        return self.summary.mean(function)

    @property
    def particles(self) -> Particles:
        """The particles at the data end as a batch of SMC, to be pooled with others of the same size."""
        return Particles(
            x=self.end,
            evaluations=self.counts.copy(),
            log_weights=self.log_weights[:1],
            batch_log_z=(self.log_z("down").value + self.log_first)[None],
            eve=self.eve[0],
            level_ess=self.ess[:, None],
            n_resamplings=(self.log_weights[1:-1].std(1) < 1e-12).sum()[None],
            started_from=self.summary,
        )

    # -- what it is for ----------------------------------------------------------------------------------

    def check(self, target: Target | Model) -> None:
        """Refuse a target that this pilot was not made for."""
        target = as_target(target)
        if target.models != self.target.models or target.exponents != self.target.exponents:
            raise InputError(
                f"the pilot was made for other models, or for the exponents {self.target.exponents} of these, not for"
                f" {target.exponents}: make one for this target"
            )

    def given_to(
        self, target: Target | Model, ladder: Ladder | None, process: Process | None, proposal: Proposal | None
    ) -> tuple[Ladder, Process | None, Process, Proposal, Counts]:
        """What a sampler takes from its pilot where nothing was given to it.

        Its ladder, the process as the user gave it and as it was measured, the proposal, and the counts so far.
        """
        self.check(target)
        given, ready = process or self.given, process or self.process
        return ladder or self.ladder, given, ready, proposal or self.proposal, self.counts.copy()

    def acceptance(self, ends: Sequence[int] | Tensor) -> Tensor:
        """The predicted acceptance of the pairs of levels that stand at these times, one less than there are ends.

        >>> from crepe_diffusion.models import GaussianMixture
        >>> from crepe_diffusion.schedules import ladder
        >>> p = GaussianMixture(weights=[1.0], means=[[0.0]], stds=[1.0])
        >>> found = pilot(p, ladder.karras(9, 0.1, 10.0), n=16)
        >>> bool((found.acceptance([0, 4, 8]) > 0.95).all())     # nothing is to be controlled
        True
        """
        ends = [int(e) for e in ends]
        if len(ends) < 2 or sorted(set(ends)) != ends or ends[0] < 0 or ends[-1] > self.n_steps:
            raise InputError(f"ends must be increasing times between 0 and {self.n_steps}, got {ends}")
        rates = []
        for a, b in pairwise(ends):
            gap = self.down[a:b].sum(0)[:, None] - self.up[a:b].sum(0)[None]
            alpha = gap.nan_to_num(nan=-math.inf).clamp(max=0).exp()
            rates.append(self.log_weights[b].exp() @ alpha @ self.up_log_weights[a].exp())
        return torch.stack(rates)

    def iteration_rows(self, pairs: int, substeps: int) -> float:
        """Network rows per iteration and chain of a replica exchange with so many pairs of levels.

        Half of the pairs meet: together their members walk once through all steps, and on average one replica stays.
        """
        walked = self.walk_rows * pairs * substeps / self.n_steps
        return self.walk_rows + self.state_rows if self.in_turn else walked + substeps * self.state_rows

    def plan(self) -> Plan:
        """The cut of these steps into levels at which the exchange is predicted to give most for its rows."""
        return plan(self)

    def replicas(self, levels: Tensor, n_chains: int, stream: Stream) -> tuple[Tensor, Tensor]:
        """Points (chains, levels, *event) to start from, and their Eves (chains, levels): resampled by weight.

        A level whose time is none of the pilot's gets particles of the nearest time.
        """
        k = (self.ladder.times[None] - levels[:, None]).abs().argmin(1)
        points, eves = [], []
        for m, time in enumerate(k.tolist()):
            order = stream.at(m, "order").uniform((n_chains,)).argsort()
            u = (torch.arange(n_chains) + stream.at(m).uniform((1,))) / n_chains
            cumulative = self.log_weights[time].exp().cumsum(0)
            chosen = torch.searchsorted(cumulative, u * cumulative[-1], right=True).clamp(max=self.n - 1)[order]
            points.append(self.x[time, chosen])
            eves.append(self.eve[time, chosen])
        return torch.stack(points, 1), torch.stack(eves, 1)

    def __str__(self) -> str:
        end = self.ess[0]
        lines = [
            f"pilot of {self.n} particles over {self.n_steps} steps: {self.rows:,} network rows",
            f"  log Z            {self.log_z('bar')}   (down {self.log_z('down')}, up {self.log_z('up')})",
            f"  step size        {self.discretisation['bar']} of log Z",
            f"  effective        {float(end):.1f} particles at the data end, {float(self.ess.min()):.1f} at least",
            str(self.plan()),
        ]
        return "\n".join(lines)

    # -- to be kept --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """All of it but target, kind of process and proposal, as tensors."""
        own = {name: getattr(self, name) for name in TENSORS}
        sizes = [self.discretisation[m] for m in METHODS]
        own["discretisation"] = torch.tensor([(e.value, e.error, e.dof) for e in sizes], dtype=torch.float64)
        own["cost"] = torch.tensor([self.walk_rows, self.state_rows, self.in_turn], dtype=torch.float64)
        parts = {
            "ladder": self.ladder.state_dict(),
            "counts": self.counts.state_dict(),
            "process": self.process.state_dict(),
        }
        return own | {f"{name}.{key}": v for name, state in parts.items() for key, v in state.items()}

    @classmethod
    def from_state_dict(
        cls,
        state: dict[str, Tensor],
        target: Target | Model,
        *,
        process: Process | None = None,
        proposal: Proposal | None = None,
    ) -> Pilot:
        """The pilot whose `state_dict` this is, made with the same target, process and proposal."""
        target = as_target(target)
        ready = process or target.models[0].process()
        walk_rows, state_rows, in_turn = state["cost"].tolist()
        return cls(
            target=target,
            ladder=Ladder.from_state_dict(part(state, "ladder")),
            process=ready.restored(part(state, "process")) if ready.needs_fit() else ready,
            given=process,
            proposal=proposal or Proposal(),
            discretisation=dict(zip(METHODS, map(Estimate, *state["discretisation"].T.tolist()), strict=True)),
            counts=Counts.from_state_dict(part(state, "counts")),
            walk_rows=walk_rows,
            state_rows=int(state_rows),
            in_turn=bool(in_turn),
            **{name: state[name] for name in TENSORS},
        )


TENSORS = ("x", "end", "log_weights", "eve", "down", "up", "up_log_weights", "up_eve", "features", "log_first", "steps")


def pilot(
    target: Target | Model,
    steps: Ladder | Sequence[float] | Tensor,
    n: int = 64,
    seed: int = 0,
    *,
    process: Process | None = None,
    proposal: Proposal | None = None,
    micro_batch: int | None = None,
    nonfinite: str = "raise",
    fit_samples: int | None = None,
    progress: bool | None = None,
    callback: Callback | None = None,
) -> Pilot:
    """Walk n particles down all steps and up again: `n (2 T + 1)` evaluations, plus those of the Fisher fit.

    Gaussian states cost `n T / 2` more, to see what double steps would change; not with known densities, nor where the
    proposal noises as trained.

    `steps` is a ladder, all of whose times are used whatever its levels, or its times. `fit_samples` are used where
    the process needs its information measured; by default as many as give one number for all coordinates to 3 %, or one
    per coordinate to 12 %, and 256 at most.

    >>> from crepe_diffusion.models import GaussianMixture
    >>> from crepe_diffusion.schedules import ladder
    >>> p = GaussianMixture(weights=[0.3, 0.7], means=[[-4.0], [3.0]], stds=[0.5, 0.4])
    >>> found = pilot(p ** 2.0, ladder.karras(17, 0.01, 20.0), n=32, fit_samples=64)
    >>> found.rows == 2 + 64 * 17 + 32 * (2 * 16 + 8 + 1)
    True
    >>> found.plan().ladder.n_levels < 17
    True
    """
    target, n = as_target(target), positive("n", n, 2)
    steps = replace(steps, substeps=1) if isinstance(steps, Ladder) else Ladder(torch.as_tensor(steps))
    ready, stream, n_steps = process or target.models[0].process(), Stream(seed), len(steps.times) - 1
    fit_on = Ladder(steps.times[torch.linspace(0, n_steps, min(n_steps, FIT_STEPS) + 1).round().long()])
    n_fitted = len(target.models) * len(fit_on.times) if ready.needs_fit() else 0
    track = Track(n_fitted + 2 * n_steps, "steps", progress, callback)

    def advance() -> None:
        if track.advance() and track.done < track.total:
            raise StoppedError(f"stopped after {track.done} of {track.total} steps: a pilot needs all of them")

    with track:
        evaluate = prepare(
            target,
            steps,
            stream.at("setup"),
            process=process,
            proposal=proposal,
            micro_batch=micro_batch,
            nonfinite=nonfinite,
            fit_samples=_enough(ready, target) if fit_samples is None else fit_samples,
            fit_on=fit_on,
            check=_one_law,
            advance=advance,
        )
        rows = evaluate.counts.rows
        found = _Pass(evaluate, n, stream, advance)
        down = found.walk_down()
        up = found.walk_up()
        walked = evaluate.counts.rows - rows - n * found.state_rows - found.coupled.rows - found.doubling.rows
    return Pilot(
        target=target,
        ladder=steps,
        process=evaluate.process,
        given=process,
        proposal=evaluate.proposal,
        x=torch.stack(down.x).cpu(),
        end=finish(evaluate, down.x[0], stream.at("finish")).cpu(),
        log_weights=torch.stack(down.log_weights),
        eve=torch.stack(down.eve),
        down=torch.stack(down.works),
        up=torch.stack(up.works),
        up_log_weights=torch.stack(up.log_weights),
        up_eve=torch.stack(up.eve),
        features=torch.stack([torch.stack(down.features), torch.stack(up.features)]).cpu(),
        log_first=found.log_first,
        steps=found.steps,
        discretisation=found.doubling.estimates(_dof(down.log_weights[0].exp(), down.eve[0])),
        counts=evaluate.counts.copy(),
        walk_rows=walked / (2 * n),
        state_rows=found.state_rows,
        in_turn=found.in_turn,
    )


def _enough(process: Process, target: Target) -> int:
    """Samples for a Fisher fit. The mean of n d squares has a relative error of sqrt(2 / (n d)): 3 % for 2,048.

    An error of A moves log Z by about d times its square, so that 256 samples are enough in any dimension. Where each
    coordinate has a number of its own, 128 samples give it to 12 %.
    """
    kind = process.to_measure()
    if kind is None or not isinstance(process, GaussianProcess):
        return 16
    least = 16 if kind.is_isotropic else 128
    needed = math.ceil(2048 / process.dimension(torch.Size(target.models[0].event_shape)))
    return max(least, min(256, needed))


@dataclass
class _Found:
    """What is kept of a walk in one direction, from the data end."""

    x: list[Tensor] = field(default_factory=list)
    log_weights: list[Tensor] = field(default_factory=list)
    eve: list[Tensor] = field(default_factory=list)
    works: list[Tensor] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)


@dataclass
class _Particles:
    """Particles at one time; `before` they were here, if the last step is the first of two that are compared."""

    x: Tensor
    seen: Evaluation
    log_w: Tensor
    eve: Tensor
    steps: Tensor
    before: _Particles | None = None

    def rows(self, index: Tensor, log_w: Tensor) -> _Particles:
        there = index.to(self.x.device)
        return _Particles(self.x[there], self.seen.rows(there), log_w, self.eve[index], self.steps[index])


class _Pass:
    """The two walks; what they share is how particles are weighted, resampled and looked at."""

    log_first: Tensor
    state_rows: int

    def __init__(self, evaluate: Evaluator, n: int, stream: Stream, advance: Callable[[], None]):
        self.evaluate, self.n, self.stream, self.advance = evaluate, n, stream, advance
        self.times = evaluate.ladder.times
        self.top = len(self.times) - 1
        self.end: _Particles | None = None
        self.in_turn = isinstance(evaluate.process, Masked) and evaluate.process.takes_turns
        self.doubling, self.coupled = Doubling(evaluate, n), Coupled(evaluate)
        self.steps = torch.zeros(n, dtype=torch.float64)

    def walk_down(self) -> _Found:
        evaluate, n, found = self.evaluate, self.n, _Found()
        x = evaluate.noise(self.stream.at("noise"), n)
        before = evaluate.counts.rows
        seen = evaluate(x, self.times[-1:].expand(n))
        # Where tokens are asked for, a state costs nothing unless a reward looks at its predictions.
        self.state_rows = evaluate.network_rows if evaluate.counts.rows > before else 0
        reward = home(seen.reward)[0]
        self.log_first = reward.to(torch.float64).logsumexp(0) - math.log(n)
        here = _Particles(x, seen, _normalised(reward, self.top), torch.arange(n), self.steps)
        self._keep(found, here, self.top)
        for k in range(self.top - 1, -1, -1):
            here, work = self._step(here, k + 1, -1)
            found.works.append(work)
            if k > 0 and here.before is None:
                here = self._resampled(here, self.stream.at("down", k))
            self._keep(found, here, k)
        self.end, self.steps = here, here.steps
        for values in (found.x, found.log_weights, found.eve, found.works, found.features):
            values.reverse()
        return found

    def walk_up(self) -> _Found:
        assert self.end is not None, "particles walk down first"
        found = _Found()
        index, log_w = Systematic()(self.end.log_w[None], self.stream.at("up"))
        here = self.end.rows(index[0], log_w[0])
        self._keep(found, here, 0)
        for k in range(self.top):
            here, work = self._step(here, k, 1)
            found.works.append(work)
            if k < self.top - 1 and here.before is None:
                here = self._resampled(here, self.stream.at("up", k))
            self._keep(found, here, k + 1)
        return found

    def _step(self, here: _Particles, k: int, direction: int) -> tuple[_Particles, Tensor]:
        """One step from time k, and its work: the gain of weight on the way down, the loss on the way up."""
        index = torch.full((self.n,), k)
        branch = self.stream.at("walk", k, direction)
        path = walk(self.evaluate, here.x, here.seen, index, torch.full((self.n,), direction), 1, branch)
        work = log_work(path, self.evaluate.coefficients)
        work = home(work)[0]
        log_w = _normalised(here.log_w - direction * work, k + direction)
        there = _Particles(path.x, path.seen, log_w, here.eve, here.steps)
        if here.before is not None:
            before, points = here.before, tuple((p.x, p.seen) for p in (here.before, here, there))
            assert len(points) == 3
            self.doubling.add(points, before.log_w, before.eve, k - direction, direction)
            if direction < 0 and self.coupled.applies(self.evaluate):
                there.steps = here.steps + self.coupled.gain(points, k - direction)
        elif not self.doubling.exact:
            there.before = here
        self.advance()
        return there, work

    def _resampled(self, here: _Particles, stream: Stream) -> _Particles:
        if 1 / float((2 * here.log_w).exp().sum()) > RESAMPLE_BELOW * self.n:
            return here
        index, log_w = Systematic()(here.log_w[None], stream)
        return here.rows(_in_place(index[0]), log_w[0])

    def _keep(self, found: _Found, here: _Particles, k: int) -> None:
        found.x.append(here.x)
        found.log_weights.append(here.log_w)
        found.eve.append(here.eve)
        process, t = self.evaluate.process, self.evaluate.times[k].expand(self.n)
        if not self.evaluate.keeps_predictions:
            found.features.append(_token_features(here.x, self.stream.at("features")))
            return
        predictions = process.expectation(here.x, t, here.seen.predictions, self.evaluate.coefficients)
        flat = predictions.flatten(1).to(torch.float32)
        if flat.shape[1] > FEATURES:
            directions = self.stream.at("features").normal((flat.shape[1], FEATURES), dtype=torch.float32)
            flat = flat @ directions.to(flat.device)
        found.features.append(flat)


def _one_law(evaluate: Evaluator) -> None:
    if evaluate.n_groups > 1:
        raise InputError(
            f"a pilot is of one law, but these chains have {evaluate.n_groups} conditions or prompts: make one for each"
        )


def _token_features(x: Tensor, stream: Stream) -> Tensor:
    """States of tokens in random directions, where predictions are not kept, (rows, features).

    Every token at every position has its own direction, nearly orthogonal to all others: distances count the
    positions in which two states differ.
    """
    flat = x.flatten(1)
    place = torch.arange(flat.shape[1], device=x.device) * (int(flat.max()) + 1)
    frequencies = 1e3 * stream.normal((FEATURES, 1), device=x.device)[:, 0]
    return torch.stack([torch.sin((flat + place) * f).sum(1) for f in frequencies], 1).to(torch.float32)


def _normalised(log_w: Tensor, k: int) -> Tensor:
    """Log-weights that sum to one; a path that is not possible has none."""
    log_w = log_w.where(log_w > IMPOSSIBLE / 2, -math.inf)
    if not bool((log_w > -math.inf).any()):
        raise NonFiniteError(f"all weights of the pilot vanished at time {k}: use more particles")
    return log_w.log_softmax(0)


def _in_place(index: Tensor) -> Tensor:
    """The same ancestors, in an order in which those that survive keep their place.

    >>> _in_place(torch.tensor([0, 0, 2, 2])).tolist()
    [0, 0, 2, 2]
    >>> _in_place(torch.tensor([1, 1, 1, 3])).tolist()
    [1, 1, 1, 3]
    """
    n = len(index)
    copies = index.bincount(minlength=n)
    out = torch.arange(n)
    out[copies == 0] = torch.arange(n).repeat_interleave((copies - 1).clamp(min=0))
    return out


def _dof(w: Tensor, eve: Tensor) -> float:
    return max(1.0, 1 / float(by_eve(w, eve).square().sum()) - 1)
