"""Particle Gibbs: conditional SMC that keeps one path per chain, on the same works.

for n = 1, 2, ...
    up       draw the upper part of the kept path again by walking up from x_0
    down     N - 1 free particles walk down from the noise end; the kept path is the N-th and is never lost
    choose   the next kept path by the final weights; all N particles count, by the same weights

The upward kernel is part of the extended target `pi_0(x_0) prod_m P_m(x_m | x_{m-1})`, so the first move is an exact
draw, and the works of the kept path are those of the walk up. The others are the Gibbs steps of Andrieu, Doucet and
Holenstein (2010). They leave the target invariant for any N >= 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from crepe_diffusion.devices import home
from crepe_diffusion.diagnostics.starting import StartingPass
from crepe_diffusion.errors import InputError
from crepe_diffusion.evaluate import Evaluator
from crepe_diffusion.kernels import ParticleStarter, Start
from crepe_diffusion.models import Model
from crepe_diffusion.paths import log_work, walk
from crepe_diffusion.processes import Evaluation, Process
from crepe_diffusion.progress import Callback, Track
from crepe_diffusion.proposals import Proposal
from crepe_diffusion.random import Stream
from crepe_diffusion.samplers.base import Column, Info
from crepe_diffusion.samplers.pilot import Pilot
from crepe_diffusion.samplers.resampling import Systematic, ancestors
from crepe_diffusion.samplers.result import Sweeps
from crepe_diffusion.samplers.setup import finish, packed, part, positive, prepare, prepare_again
from crepe_diffusion.samplers.smc import Descent, Reference, descend, padded, resample_unequal
from crepe_diffusion.samplers.weights import PathWork
from crepe_diffusion.schedules import Ladder
from crepe_diffusion.targets import Target

__all__ = ["ParticleGibbs", "Sweep", "conditional_systematic"]


@dataclass(frozen=True)
class Sweep(Info):
    """What happened in one sweep, for each chain.

    `changed`: whether another path was chosen; `replica` and `born`: the particle at the noise end from which the kept
    path descends, and the iteration in which it was drawn there; `log_z`: the estimate of all N particles, whose
    inverse is unbiased; `survivors` and `level_ess` (levels, chains): how many particles of each level have descendants
    at level 0, and the effective number of particles.
    """

    changed: Tensor
    replica: Tensor
    born: Tensor
    log_z: Tensor
    survivors: Tensor
    level_ess: Tensor


class ParticleGibbs:
    """A chain whose iterations are passes of SMC that keep one path of the last; go on for as long as you like.

    - `n_particles`, with the kept one: the more, the likelier is a sweep to leave its path;
    - `n_chains` independent chains run in one batch; they begin with a pass of SMC each, of `N (M K + 1)` rows;
    - `ess_threshold`: chains whose effective number of particles is below this share are resampled, by the systematic
      rule given that the kept path goes on;
    - `starter`: where free particles start instead of the noise end, such as `stitching.Restitch`; the kept path then
      goes up only so far. After a change of the target, the first sweep keeps no path: it is a pass of SMC;
    - `pilot`: as for `SMC`; chains begin with a pass of their own all the same;
    - the others are those of `ReplicaExchange`.

    Per sweep and chain: `(N - 1) (M K + 1)` rows down and `M K` up; a walk of tokens that change in turns costs one row
    per turn instead of `M K`. Ancestor sampling is left out: it would bring new upper parts to the kept path, and the
    walk up brings an independent one in every sweep. That walk is exact as far as `log_work` is: where steps are large,
    the bias is that of replica exchange, and may be larger than that of SMC.

    >>> from crepe_diffusion.models import GaussianMixture
    >>> from crepe_diffusion.schedules import ladder
    >>> p = GaussianMixture(weights=[0.3, 0.7], means=[[-4.0], [3.0]], stds=[0.5, 0.4])
    >>> chain = ParticleGibbs(p ** 2.0, ladder.karras(11, 0.01, 20.0), n_particles=8, n_chains=2, seed=0)
    >>> out = chain.sample(20, burn_in=5)
    >>> out.x.shape, round(float(out.weights.sum()), 12)
    (torch.Size([320, 1]), 1.0)
    """

    def __init__(
        self,
        target: Target | Model,
        ladder: Ladder | None = None,
        *,
        n_particles: int = 32,
        n_chains: int = 1,
        ess_threshold: float = 0.5,
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
        self.n_particles, self.n_chains = positive("n_particles", n_particles, 2), positive("n_chains", n_chains)
        if not 0 <= ess_threshold <= 1:
            raise InputError(f"ess_threshold must be between 0 and 1, got {ess_threshold!r}")
        self.ess_threshold, self.starter = ess_threshold, starter
        self.seed, self.stream = seed, Stream(seed)
        self.process, self.fit_samples = process, fit_samples
        self.evaluate = prepare(
            target,
            ladder,
            self.stream.at("setup"),
            process=ready,
            proposal=proposal,
            micro_batch=micro_batch,
            nonfinite=nonfinite,
            fit_samples=fit_samples,
            counts=counts,
            start=start,
            check=self._check,
        )
        self.iteration, self.keeps = 0, True
        self.replica = self.born = torch.zeros(self.n_chains, dtype=torch.long)
        if start is None:
            self._begin()
            if pilot is not None and self.ladder.times.equal(pilot.ladder.times):
                self.started_from = pilot.summary
        else:
            self._restore(start)

    diagnostics = None
    started_from: StartingPass | None

    # -- the algorithm -----------------------------------------------------------------------------------

    def step(self) -> Sweep:
        """One sweep: up, down, choose."""
        n = self.iteration + 1
        stream = self.stream.at(n)
        reference, sound = self._walk_up(stream.at("up")) if self.keeps else (None, torch.ones(self.n_chains).bool())
        down, start = self._descend(stream.at("start"), stream.at("down"), reference)
        kept = torch.zeros_like(down.log_weights).log()
        kept[:, 0] = 0.0
        # Where the walk up met a point that is impossible, there is no path to compare with: all stays as it was.
        log_w = torch.where(sound[:, None], down.log_weights, kept)
        chosen = stream.at("choose").categorical(log_w)
        self._keep(down, chosen)
        history = down.ancestors()
        eve = history[-1].gather(1, chosen[:, None])[:, 0]
        new = eve > 0 if start is None else start.fresh.gather(1, eve[:, None])[:, 0]
        self.replica, self.born = torch.where(new, eve, self.replica), torch.where(new, n, self.born)
        changed, self.keeps = (chosen > 0) | (not self.keeps), True
        self.iteration, self.particles = n, (down.x, log_w)
        return Sweep(
            iteration=n,
            rows=self.evaluate.counts.rows,
            changed=changed,
            replica=self.replica,
            born=self.born,
            log_z=down.log_z.where(sound, math.nan),
            survivors=padded([_n_different(a) for a in history[::-1]], self.evaluate),
            level_ess=down.level_ess,
        )

    def _walk_up(self, stream: Stream) -> tuple[Reference, Tensor]:
        """The kept path with its upper part drawn again, and whether all of that is possible, (chains,)."""
        evaluate, k = self.evaluate, self.ladder.substeps
        x, seen, up = self.x, self.seen, torch.ones(self.n_chains, dtype=torch.long)
        points, evaluations, works = [x], [seen], []
        sound = torch.ones(self.n_chains, dtype=torch.bool, device=x.device)
        top = self.ladder.n_levels - 1 if self.starter is None else self.starter.start_level(evaluate)
        for m in range(top):
            path = walk(evaluate, x, seen, torch.full((self.n_chains,), m * k), up, k, stream.at(m))
            x, seen, work = path.x, path.seen, log_work(path, evaluate.coefficients)
            sound = sound & work.isfinite() & seen.possible
            points.append(x)
            evaluations.append(seen)
            works.append(work)
        # An impossible path has weights that mean nothing, but must not break those of the other chains.
        works = [work.where(sound, 0.0) for work in works]
        evaluations = [self.seen, *(replace(e, reward=e.reward.where(sound, 0.0)) for e in evaluations[1:])]
        return Reference(points, evaluations, evaluations[-1].reward, works), home(sound)[0]

    def _descend(
        self, starting: Stream, stream: Stream, reference: Reference | None = None
    ) -> tuple[Descent, Start | None]:
        """A pass of SMC, given the reference if there is one; and where its particles start, None for the noise end."""
        start, rule = None, Systematic() if reference is None else conditional_systematic
        if self.starter is not None:
            kept = None if reference is None else (reference.x[-1], reference.seen[-1])
            start = self.starter.particles(self.evaluate, self.n_chains, self.n_particles, starting, kept)
            if reference is not None:
                reference = replace(reference, first=start.log_weights[:, 0])
        down = descend(
            self.evaluate,
            PathWork(),
            self.n_chains,
            self.n_particles,
            lambda log_w, stream: resample_unequal(rule, log_w, self.ess_threshold, stream),
            stream,
            reference=reference,
            start=start,
        )
        return down, start

    def _check(self, evaluate: Evaluator) -> None:
        if self.starter is not None:
            self.starter.check(evaluate)

    def _keep(self, down: Descent, chosen: Tensor) -> None:
        rows = (chosen + torch.arange(self.n_chains) * self.n_particles).to(down.x.device)
        self.x, self.seen = down.x[rows], down.seen.rows(rows)

    def _begin(self) -> None:
        """A pass of SMC for each chain."""
        stream = self.stream.at("initial")
        down, _ = self._descend(stream.at("start"), stream)
        self._keep(down, stream.at("choose").categorical(down.log_weights))

    def sample(
        self,
        n: int,
        *,
        burn_in: int = 0,
        progress: bool | None = None,
        callback: Callback | None = None,
    ) -> Sweeps:
        """Run `burn_in` sweeps, then `n` of which every particle is part of the result.

        `callback` is called after every sweep; if it stops the call, the result holds the sweeps so far, and the chain
        can go on from there. Where the ladder has finishing times, all particles are finished.
        """
        positive("n", n), positive("burn_in", burn_in, 0)
        x, log_w, infos, before = [self.evaluate.empty(0)], [], [], []
        with Track(burn_in + n, "sweeps", progress, callback) as track:
            for i in range(1 - burn_in, n + 1):
                kept = (self.replica, self.born)
                info = self.step()
                if i > 0:
                    before.append(kept)
                    x.append(finish(self.evaluate, self.particles[0], self.stream.at(self.iteration, "finish")))
                    log_w.append(self.particles[1])
                    infos.append(info)
                if track.advance():
                    break
        chains, levels = self.n_chains, self.ladder.n_levels
        return Sweeps(
            x=torch.cat(x).cpu(),
            evaluations=self.evaluate.counts.copy(),
            log_weights=_stacked(log_w, (chains, self.n_particles)),
            changed=_stacked([i.changed for i in infos], (chains,)),
            replica=_stacked([replica for replica, _ in before], (chains,)),
            born=_stacked([born for _, born in before], (chains,)),
            sweep_log_z=_stacked([i.log_z for i in infos], (chains,)),
            survivors=_stacked([i.survivors for i in infos], (levels, chains)),
            level_ess=_stacked([i.level_ess for i in infos], (levels, chains)),
            started_from=self.started_from,
        )

    def output(self) -> Tensor:
        """The end points of the kept paths, denoised through the ladder's finishing times, (chains, *event)."""
        return finish(self.evaluate, self.x, self.stream.at(self.iteration, "finish"))

    # -- what is kept of it ------------------------------------------------------------------------------

    @property
    def draw_columns(self) -> dict[str, Column]:
        """The particle at the noise end from which a draw descends, and the iteration in which it was drawn there."""
        shape, names = (self.n_chains,), ("chain",)
        return {"replica": Column("int32", shape, names), "born": Column("int64", shape, names)}

    @property
    def trace_columns(self) -> Mapping[str, Column]:
        """Means over chains: the share that changed its path, and survivors and effective particles of each level."""
        each = Column("float32", (self.ladder.n_levels,), ("level",))
        return {"changed": Column("float32"), "survivors": each, "ess": each}

    def draw_row(self, info: Sweep) -> dict[str, np.ndarray]:
        return {"replica": info.replica.numpy(force=True), "born": info.born.numpy(force=True)}

    def trace_rows(self, infos: Sequence[Sweep]) -> dict[str, np.ndarray]:
        rows = {
            "changed": torch.stack([i.changed for i in infos]).to(torch.float32).mean(1),
            "survivors": torch.stack([i.survivors for i in infos]).to(torch.float32).mean(2),
            "ess": torch.stack([i.level_ess for i in infos]).mean(2),
        }
        return {name: value.numpy(force=True) for name, value in rows.items()}

    def restart_diagnostics(self) -> None:
        """Nothing is accumulated."""

    # -- changing the target, stopping and going on ------------------------------------------------------

    @property
    def target(self) -> Target:
        return self.evaluate.target

    @target.setter
    def target(self, target: Target | Model) -> None:
        """Online refinement: the kept points stay where they are and are evaluated again.

        With a starter, nothing is kept. A pool takes the segments of a kept plan for draws of the model. Walking up
        towards a new target from a plan of another one, they are drawn through walls, and fit it better than any draw.
        """
        evaluate = prepare_again(
            self.evaluate,
            target,
            self.ladder,
            self.stream.at(self.iteration, "setup"),
            process=self.process,
            fit_samples=self.fit_samples,
            check=self._check,
        )
        self.seen = evaluate(self.x, evaluate.ladder.times[:1].expand(self.n_chains))
        self.evaluate, self.keeps = evaluate, self.starter is None
        self.started_from = None  # the pilot was made for another target

    @property
    def ladder(self) -> Ladder:
        return self.evaluate.ladder

    def snapshot(self) -> dict[str, Tensor]:
        """All that the next sweeps depend on besides target, settings and seed."""
        state = {"x": self.x, "iteration": torch.tensor(self.iteration), "replica": self.replica, "born": self.born}
        state |= {"keeps": torch.tensor(self.keeps)}
        state |= {f"seen.prediction.{j}": p for j, p in enumerate(self.seen.predictions)}
        parts = {"": {**state, "seen.drift": self.seen.drift, "seen.reward": self.seen.reward}}
        if self.started_from is not None:
            parts["pilot"] = self.started_from.state_dict()
        return packed(self.evaluate, parts)

    def _restore(self, start: dict[str, Tensor]) -> None:
        wanted, predictions = self.evaluate.empty(self.n_chains), part(start, "seen.prediction")
        n_kept = len(self.target.models) if self.evaluate.keeps_predictions else 0
        if start["x"].shape != wanted.shape or len(predictions) != n_kept:
            raise InputError(
                f"the snapshot holds points {tuple(start['x'].shape)} of {len(predictions)} models, not"
                f" {tuple(wanted.shape)} of {len(self.target.models)}"
            )
        device, real = self.evaluate.device, self.evaluate.real
        self.x, self.iteration = start["x"].to(device, copy=True), int(start["iteration"])
        self.replica, self.born = start["replica"].clone(), start["born"].clone()
        self.keeps = bool(start.get("keeps", True))
        if summary := part(start, "pilot"):
            self.started_from = StartingPass.from_state_dict(summary)
        self.seen = Evaluation(
            tuple(predictions[str(j)].to(device, copy=True) for j in range(len(predictions))),
            start["seen.drift"].to(device, copy=True),
            start["seen.reward"].to(device, real, copy=True),
        )


def conditional_systematic(log_weights: Tensor, stream: Stream) -> tuple[Tensor, Tensor]:
    """The systematic rule given that particle 0 goes on as particle 0 (Chopin and Singh 2015).

    One offset u decides how many copies each particle gets. If one of the N slots is chosen at random and turns out to
    hold particle 0, then u has a density in proportion to the copies of particle 0. The copies are constant between the
    fractional parts of the cumulative weights, so one of these intervals is drawn. The slots are then rotated so that
    a random copy of particle 0 comes first: the law of systematic resampling is the same for all rotations.
    """
    b, n = log_weights.shape
    weights = log_weights.exp()
    ends = (n * weights.cumsum(1)).remainder(1.0).sort(1).values
    ends = torch.cat([torch.zeros(b, 1, dtype=ends.dtype), ends, torch.ones(b, 1, dtype=ends.dtype)], 1)
    middle = (ends[:, 1:] + ends[:, :-1]) / 2
    copies = (n * weights[:, :1] - middle).ceil().clamp(min=0)
    p = ends.diff(dim=1) * copies
    p[:, 0].clamp_(min=1e-300)  # a weight that is too small for a number still goes on, by the smallest offset
    drawn = stream.at("offset").categorical(p.log())
    parents = ancestors(weights, (torch.arange(n) + middle.gather(1, drawn[:, None])) / n)
    mine = (parents == 0).to(torch.float64)
    mine[:, 0] = 1.0  # particle 0 has the first slots; rounding must not lose it
    turn = stream.at("turn").categorical(mine.log())
    parents = parents.gather(1, (torch.arange(n) + turn[:, None]) % n)
    parents[:, 0] = 0
    return parents, torch.full_like(log_weights, -math.log(n))


def _n_different(index: Tensor) -> Tensor:
    """How many different numbers each row (chains, particles) holds."""
    return torch.zeros_like(index).scatter(1, index, 1).sum(1)


def _stacked(rows: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    return torch.stack(rows) if rows else torch.zeros(0, *shape)
