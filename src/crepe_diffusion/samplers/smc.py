"""Sequential Monte Carlo on the same paths: particles walk down together, are weighted, and resampled.

for m = M, ..., 1
    walk        every particle goes from level m to m - 1 and gains weight      (weights.py)
    resample    batches whose weights have become unequal                       (resampling.py)

Particles come in independent batches of `n_particles`; each batch has its own weights and log Z. One pass of all
batches is one iteration, and passes are pooled by Z like batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from crepe_diffusion.batches import IMPOSSIBLE, rows_like
from crepe_diffusion.devices import home
from crepe_diffusion.diagnostics.starting import StartingPass
from crepe_diffusion.errors import InputError, NonFiniteError, StoppedError, check_choice
from crepe_diffusion.evaluate import Evaluator
from crepe_diffusion.kernels import ParticleStarter, Start
from crepe_diffusion.models import Model
from crepe_diffusion.processes import Evaluation, Process
from crepe_diffusion.progress import Callback, Track
from crepe_diffusion.proposals import Proposal
from crepe_diffusion.random import Stream
from crepe_diffusion.samplers.base import Column, Info
from crepe_diffusion.samplers.pilot import Pilot
from crepe_diffusion.samplers.resampling import Resampling, Systematic
from crepe_diffusion.samplers.result import Particles
from crepe_diffusion.samplers.setup import finish, packed, part, positive, prepare, prepare_again
from crepe_diffusion.samplers.weights import PathWork, Weight
from crepe_diffusion.schedules import Ladder
from crepe_diffusion.targets import Target

__all__ = ["SMC", "Descent", "Pass", "Reference", "descend", "padded", "resample_unequal"]


# -- one pass --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """A path that is kept: a point per batch with its evaluation at every level, and the work between levels.

    `x[m]` is (batches, *event), `first` (batches,) the log-weight at the noise end, `work[m]` (batches,) the log-work
    between the levels m and m + 1.
    """

    x: list[Tensor]
    seen: list[Evaluation]
    first: Tensor
    work: list[Tensor]


@dataclass(frozen=True)
class Descent:
    """Particles at level 0; rows of `x` run over batches, then particles. M is the level at which they started.

    `log_weights` (batches, particles) are normalised, `log_z` (batches,) is relative to the noise law. `parents[m]`
    (batches, particles) are the particles at level m from which those that went on below it came, for m = 1, ..., M.
    `level_ess` is (levels, batches), for all levels of the ladder: those above the start have the value of the start.
    """

    x: Tensor
    seen: Evaluation
    log_weights: Tensor
    log_z: Tensor
    parents: list[Tensor]
    level_ess: Tensor
    n_resamplings: Tensor

    def ancestors(self) -> list[Tensor]:
        """The particle at each level from which those at level 0 descend, each (batches, particles); the Eves last."""
        found = [torch.arange(self.log_weights.shape[1]).expand(self.log_weights.shape)]
        for parent in self.parents[1:]:
            found.append(parent.gather(1, found[-1]))
        return found


Resample = Callable[[Tensor, Stream], tuple[Tensor, Tensor, Tensor]]
"""From normalised log-weights: parents (batches, particles), new log-weights, and which batches were resampled."""


def descend(
    evaluate: Evaluator,
    weight: Weight,
    n_batches: int,
    n_particles: int,
    resample: Resample,
    stream: Stream,
    *,
    reference: Reference | None = None,
    start: Start | None = None,
    advance: Callable[[int], None] = lambda level: None,
) -> Descent:
    """Particles from the noise end, or from a `start` below it, to level 0. With a `reference`, it is particle 0 of
    each batch and does not walk.

    `advance` is called with each level that was reached. Weights and parents are on the CPU, states where they are.
    """
    b, n, top = n_batches, n_particles, evaluate.ladder.n_levels - 1 if start is None else start.level
    free = torch.arange(b * n).reshape(b, n)[:, 0 if reference is None else 1 :].flatten()
    rows = len(free)
    x = evaluate.noise(stream.at("noise"), rows) if start is None else start.x[free]
    seen = evaluate(x, evaluate.ladder.levels[top].expand(rows))
    gained = weight.first(evaluate, x, seen) if start is None else start.log_weights.flatten()[free]
    if reference is not None:
        x, seen, gained = _joined(reference, top, reference.first, x, seen, gained)
    log_w, log_z = _normalised(home(gained)[0].reshape(b, n) - math.log(n), top)
    level_ess, n_resamplings = [_ess(log_w)], torch.zeros(b, dtype=torch.long)
    same = torch.arange(n).expand(b, n)
    parents = [same]
    for m in range(top, 0, -1):
        here = stream.at(m)
        if reference is not None:
            index = free.to(x.device)
            x, seen = x[index], seen.rows(index)
        x, seen, gained = weight.descend(evaluate, x, seen, m, here.at("walk"))
        if reference is not None:
            x, seen, gained = _joined(reference, m - 1, reference.work[m - 1], x, seen, gained)
        log_w, total = _normalised(log_w + home(gained)[0].reshape(b, n), m - 1)
        log_z = log_z + total
        level_ess.append(_ess(log_w))
        if m > 1:
            parent, log_w, chosen = resample(log_w, here.at("resample"))
            n_resamplings += chosen
            parents.append(parent)
            index = (parent + torch.arange(b)[:, None] * n).flatten().to(x.device)
            x, seen = x[index], seen.rows(index)
        advance(m - 1)
    # Particles at the noise end are not resampled, so they are their own parents there.
    return Descent(x, seen, log_w, log_z, [same, *parents[:0:-1], same], padded(level_ess, evaluate), n_resamplings)


def padded(from_top: list[Tensor], evaluate: Evaluator) -> Tensor:
    """Values of each level from level 0 to the noise end, (levels, batches), where some end below it."""
    above = evaluate.ladder.n_levels - len(from_top)
    return torch.stack([*from_top[::-1], *from_top[:1] * above])


def _joined(
    reference: Reference, level: int, gained: Tensor, x: Tensor, seen: Evaluation, free: Tensor
) -> tuple[Tensor, Evaluation, Tensor]:
    """The free particles of each batch behind its reference, and what they all gained."""
    b = len(gained)
    rows = torch.arange(b, b + len(x)).reshape(b, -1)
    order = torch.cat([torch.arange(b)[:, None], rows], 1).flatten().to(x.device)
    together = Evaluation.cat([reference.seen[level], seen]).rows(order)
    return torch.cat([reference.x[level], x])[order], together, torch.cat([gained, free])[order]


def resample_unequal(
    rule: Resampling, log_w: Tensor, ess_threshold: float, stream: Stream
) -> tuple[Tensor, Tensor, Tensor]:
    """Resample the batches whose effective number of particles is below the share `ess_threshold`."""
    n = log_w.shape[1]
    # Equal weights have an ESS of n only up to rounding, and a threshold of 1 means always.
    chosen = _ess(log_w) <= ess_threshold * n * (1 + 1e-12)
    index, weights = rule(log_w, stream)
    index = torch.where(chosen[:, None], index, torch.arange(n))
    return index, torch.where(chosen[:, None], weights, log_w), chosen


# -- the sampler -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass(Info):
    """One pass of all batches: its estimate of log Z of each, (batches,), and `level_ess` (levels, batches).

    `accepted`: whether the draw of a batch was replaced by one of this pass; `replica`, `born` and `kept_log_z` are the
    particle, the pass and its log Z of the draw that is kept now.
    """

    log_z: Tensor
    level_ess: Tensor
    accepted: Tensor
    replica: Tensor
    born: Tensor
    kept_log_z: Tensor


class SMC:
    """The methods that CREPE is compared with, at exactly counted cost: `M * K + 1` evaluations per particle.

    - `n_batches` independent batches of `n_particles` walk in one network batch;
    - `weight`: `PathWork()`, `FeynmanKac()`, `Twisted()`, `Steering()`, `DiscreteGuidance()` or any `Weight`;
    - `resampling`: `Systematic()`, `Stratified()`, `Multinomial()`, `Residual()`, `Partial()` or any `Resampling`,
      applied to the batches whose effective number of particles is below the share `ess_threshold`;
    - `pool`: batches count by their estimates of Z (`"z"`), or equally (`"equal"`), which is biased for small ones;
    - `starter`: where particles start instead of the noise end, such as `stitching.Restitch`; with `PathWork()` only;
    - `pilot`: a pass made by `cd.pilot`. Steps, process and proposal are the pilot's unless given, errors contain
      what it measured of the size of its steps, and its cost is part of the counts;
    - `start`: the `snapshot()` of a sampler to go on from, bit for bit;
    - the others are those of `ReplicaExchange`.

    It goes on for as long as you like: `sample(n)` makes n further passes and pools their batches by Z, and the results
    of several calls are pooled by `Particles.joined`. A run in a folder keeps draws of equal weight, one per batch and
    pass: `step` draws a particle of the new pass by its weight, and accepts it with probability `min(1, Z_new / Z_old)`
    (particle independent Metropolis-Hastings; Andrieu, Doucet and Holenstein 2010), else the draw before it counts
    again. Both are consistent for batches of any size; pooling by Z has the smaller error, since all particles count.

    Feynman-Kac correctors with a reward cost `2 M K + 1`. `log_z` is relative to the noise law without its reward.

    >>> from crepe_diffusion.models import GaussianMixture
    >>> from crepe_diffusion.schedules import ladder
    >>> p = GaussianMixture(weights=[0.3, 0.7], means=[[-4.0], [3.0]], stds=[0.5, 0.4])
    >>> out = SMC(p ** 2.0, ladder.karras(11, 0.01, 20.0), n_particles=8, n_batches=3, seed=0).sample()
    >>> out.x.shape, round(float(out.weights.sum()), 12)
    (torch.Size([24, 1]), 1.0)
    >>> smc = SMC(p ** 2.0, ladder.karras(11, 0.01, 20.0), n_particles=8, seed=0)
    >>> smc.sample(3).n_batches, smc.iteration
    (3, 3)
    """

    def __init__(
        self,
        target: Target | Model,
        ladder: Ladder | None = None,
        *,
        n_particles: int = 64,
        n_batches: int = 1,
        weight: Weight | None = None,
        resampling: Resampling | None = None,
        ess_threshold: float = 0.5,
        pool: str = "z",
        starter: ParticleStarter | None = None,
        seed: int = 0,
        process: Process | None = None,
        proposal: Proposal | None = None,
        micro_batch: int | None = None,
        nonfinite: str = "raise",
        fit_samples: int = 256,
        pilot: Pilot | None = None,
        start: dict[str, Tensor] | None = None,
    ):
        ready, counts, self.started_from = process, None, None
        if pilot is not None:
            ladder, process, ready, proposal, counts = pilot.given_to(target, ladder, process, proposal)
        elif ladder is None:
            raise InputError("give a ladder, such as ladder.karras(51), or a pilot, which has one")
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
        if starter is not None and type(self.weight) is not PathWork:
            raise InputError(f"a starter gives weights of the target itself: use PathWork(), not {self.weight!r}")
        self.starter = starter
        self.seed, self.stream = seed, Stream(seed)
        self.process, self.fit_samples = process, fit_samples
        self.evaluate = prepare(
            target,
            ladder,
            self.stream.at("setup"),
            process=ready,
            proposal=self.weight.proposal(proposal or Proposal()),
            micro_batch=micro_batch,
            nonfinite=nonfinite,
            fit_samples=fit_samples,
            counts=counts,
            start=start,
            check=self._check,
        )
        self.iteration = 0
        self.x = self.evaluate.empty(self.n_batches).cpu()
        self.replica = self.born = torch.zeros(self.n_batches, dtype=torch.long)
        self.log_z = torch.full((self.n_batches,), -math.inf, dtype=torch.float64)
        if start is not None:
            if start["x"].shape != self.x.shape:
                raise InputError(f"the snapshot holds draws {tuple(start['x'].shape)}, not {tuple(self.x.shape)}")
            self.iteration, self.x, self.log_z = int(start["iteration"]), start["x"].clone(), start["log_z"].clone()
            self.replica, self.born = start["replica"].clone(), start["born"].clone()
            if summary := part(start, "pilot"):
                self.started_from = StartingPass.from_state_dict(summary)
        # A pilot knows what its own steps do to path works.
        elif pilot is not None and type(self.weight) is PathWork and self.ladder.times.equal(pilot.ladder.times):
            self.started_from = pilot.summary

    started_from: StartingPass | None
    diagnostics = None

    @property
    def n_chains(self) -> int:
        """A chain of a run is a batch."""
        return self.n_batches

    # -- the algorithm -----------------------------------------------------------------------------------

    def sample(self, n: int = 1, *, progress: bool | None = None, callback: Callback | None = None) -> Particles:
        """`n` passes down the ladder for every batch, from where the sampler stands.

        `callback` is called after every level. If it stops the call, the result holds the passes that were completed,
        and the next call begins with the one that was not. Particles are draws of the target at level 0 only: if no
        pass was completed, `StoppedError` is raised.
        """
        positive("n", n)
        done: list[Particles] = []
        top = self.ladder.n_levels - 1 if self.starter is None else self.starter.start_level(self.evaluate)
        with Track(n * top, "levels", progress, callback) as track:
            stopped = False

            def advance(level: int) -> None:
                nonlocal stopped
                stopped = track.advance()
                if stopped and level:
                    raise StoppedError(f"stopped at level {level}: particles there are not yet draws of the target")

            while len(done) < n and not stopped:
                try:
                    particles = self._pass(advance)
                except StoppedError:
                    if not done:
                        raise
                    break
                self.iteration += 1
                done.append(particles)
        return Particles.joined(done)

    def step(self) -> Pass:
        """One pass, and a decision for each batch whether its draw is replaced by one of it."""
        particles = self._pass(lambda level: None)
        n = self.iteration + 1
        stream = self._stream(n)
        drawn = stream.at("draw").categorical(particles.log_weights)
        accepted = stream.at("accept").bernoulli(particles.batch_log_z - self.log_z)
        rows = drawn + torch.arange(self.n_batches) * self.n_particles
        self.x = torch.where(rows_like(accepted, self.x), particles.x[rows], self.x)
        self.log_z = torch.where(accepted, particles.batch_log_z, self.log_z)
        self.replica, self.born = torch.where(accepted, drawn, self.replica), torch.where(accepted, n, self.born)
        self.iteration = n
        return Pass(
            iteration=n,
            rows=self.evaluate.counts.rows,
            log_z=particles.batch_log_z,
            level_ess=particles.level_ess,
            accepted=accepted,
            replica=self.replica,
            born=self.born,
            kept_log_z=self.log_z,
        )

    def _stream(self, n: int) -> Stream:
        """Of pass n; the first one has that of the seed itself."""
        return self.stream if n == 1 else self.stream.at("pass", n)

    def _pass(self, advance: Callable[[int], None]) -> Particles:
        stream, start = self._stream(self.iteration + 1), None
        if self.starter is not None:
            start = self.starter.particles(self.evaluate, self.n_batches, self.n_particles, stream.at("start"))
        down = descend(
            self.evaluate,
            self.weight,
            self.n_batches,
            self.n_particles,
            self._resampled,
            stream,
            start=start,
            advance=advance,
        )
        first = torch.arange(self.n_batches)[:, None] * self.n_particles
        return Particles(
            x=finish(self.evaluate, down.x, stream.at("finish")).cpu(),
            evaluations=self.evaluate.counts.copy(),
            log_weights=down.log_weights,
            batch_log_z=down.log_z,
            eve=(down.ancestors()[-1] + first).flatten(),
            level_ess=down.level_ess,
            n_resamplings=down.n_resamplings,
            pool=self.pool,
            started_from=self.started_from,
        )

    def _check(self, evaluate: Evaluator) -> None:
        self.weight.check(evaluate)
        if self.starter is not None:
            self.starter.check(evaluate)

    def _resampled(self, log_w: Tensor, stream: Stream) -> tuple[Tensor, Tensor, Tensor]:
        """Parents, new normalised log-weights, and which batches were resampled; the others keep their weights."""
        return resample_unequal(self.resampling, log_w, self.ess_threshold, stream)

    # -- going on ----------------------------------------------------------------------------------------

    def output(self) -> Tensor:
        """The draws that the last `step` kept, one per batch, of equal weight: (batches, *event)."""
        if not bool(self.log_z.isfinite().all()):
            raise InputError("there are no draws before the first step: call step() first")
        return self.x

    @property
    def draw_columns(self) -> dict[str, Column]:
        """The particle, the pass from which a draw comes, and the log Z of its batch there."""
        shape, names = (self.n_batches,), ("chain",)
        types = {"replica": "int32", "born": "int64", "log_z": "float64"}
        return {name: Column(dtype, shape, names) for name, dtype in types.items()}

    @property
    def trace_columns(self) -> Mapping[str, Column]:
        """log Z of every batch, the share of draws replaced, and the mean effective number of particles per level."""
        return {
            "log_z": Column("float64", (self.n_batches,), ("chain",)),
            "accepted": Column("float32"),
            "ess": Column("float32", (self.ladder.n_levels,), ("level",)),
        }

    def draw_row(self, info: Pass) -> dict[str, np.ndarray]:
        row = {"replica": info.replica, "born": info.born, "log_z": info.kept_log_z}
        return {name: value.numpy(force=True) for name, value in row.items()}

    def trace_rows(self, infos: Sequence[Pass]) -> dict[str, np.ndarray]:
        rows = {
            "log_z": torch.stack([i.log_z for i in infos]),
            "accepted": torch.stack([i.accepted for i in infos]).to(torch.float32).mean(1),
            "ess": torch.stack([i.level_ess.mean(1) for i in infos]),
        }
        return {name: value.numpy(force=True) for name, value in rows.items()}

    def restart_diagnostics(self) -> None:
        """There are none: passes are independent."""

    @property
    def target(self) -> Target:
        return self.evaluate.target

    @target.setter
    def target(self, target: Target | Model) -> None:
        """The next pass is one of the new target, and its draws replace those of the old one."""
        self.evaluate = prepare_again(
            self.evaluate,
            target,
            self.ladder,
            self.stream.at(self.iteration, "setup"),
            process=self.process,
            fit_samples=self.fit_samples,
            check=self._check,
        )
        self.log_z = torch.full_like(self.log_z, -math.inf)
        self.started_from = None

    @property
    def ladder(self) -> Ladder:
        return self.evaluate.ladder

    def snapshot(self) -> dict[str, Tensor]:
        """All that the next iterations depend on besides target, settings and seed."""
        state = {"x": self.x, "iteration": torch.tensor(self.iteration), "log_z": self.log_z}
        state |= {"replica": self.replica, "born": self.born}
        return packed(self.evaluate, {"": state, **self._pilot_state()})

    def _pilot_state(self) -> dict[str, dict[str, Tensor]]:
        return {} if self.started_from is None else {"pilot": self.started_from.state_dict()}


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
