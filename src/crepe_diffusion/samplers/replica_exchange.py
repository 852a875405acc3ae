"""CREPE: accelerated, non-reversible parallel tempering between the noise levels of a diffusion.

for n = 1, 2, ...
    communication   pairs (m - 1, m) with m = n mod 2 walk towards each other and trade levels, or not
    exploration     every replica moves at its own level
    output          the replica at level 0
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from crepe_diffusion.diagnostics import Diagnostics
from crepe_diffusion.diagnostics.exchange import accept_probability
from crepe_diffusion.diagnostics.starting import StartingPass
from crepe_diffusion.errors import InputError
from crepe_diffusion.evaluate import Counts, Evaluator
from crepe_diffusion.kernels import Explorer, Starter, State, Swaps, metropolis, swap
from crepe_diffusion.kernels.explore import explore
from crepe_diffusion.kernels.state import Moved, by_rows
from crepe_diffusion.kernels.swap import Accept
from crepe_diffusion.models import Model
from crepe_diffusion.paths import walk
from crepe_diffusion.processes import Evaluation, Process
from crepe_diffusion.progress import Callback, Track
from crepe_diffusion.proposals import Proposal
from crepe_diffusion.random import Stream
from crepe_diffusion.samplers.base import Column, Info
from crepe_diffusion.samplers.pilot import Pilot
from crepe_diffusion.samplers.result import Chains
from crepe_diffusion.samplers.setup import finish, packed, part, positive, prepare, prepare_again
from crepe_diffusion.schedules import Ladder
from crepe_diffusion.targets import Target

__all__ = ["Exchange", "ReplicaExchange", "equal_rejection"]


MOST_LEVELS_TRACED = 1024
"""Levels of all replicas are part of the trace up to this many numbers per iteration."""


@dataclass(frozen=True)
class Exchange(Info):
    """What happened in one iteration.

    `swaps` between neighbours; `explored` (chains, levels): which replicas the explorer moved; `level` (chains,
    replicas) after it; `replica` and `born` (chains,): the replica at level 0, and when it was at the noise end last.
    """

    swaps: Swaps
    explored: Tensor | None
    level: Tensor
    replica: Tensor
    born: Tensor


class ReplicaExchange:
    """Samples a target built from pretrained diffusions; iterate it for as long as you like.

    - `n_chains` independent chains run in one batch;
    - `process`: kernels other than the model's own default; `proposal`: how replicas walk;
    - `explorer`: `Bounce()`, `Langevin()`, `SingleToken()` or None; `accept`: the rule for swaps;
    - `micro_batch`: the most network rows in one call; `nonfinite`: `"raise"` or `"reject"`;
    - `fit_samples`: samples for the Fisher variance, where the process needs it;
    - `pilot`: a pass made by `cd.pilot`. Replicas start from its population at their level; process and proposal are
      the pilot's unless given, and so is the ladder, by its plan. Its cost is part of the chain's counts;
    - `start`: the `snapshot()` of a chain to go on from, bit for bit. Its ladder replaces the given one.

    Per iteration and chain: `(M + 1) * K` rows of each network, one call per sub-step, plus the explorer's.

    >>> from crepe_diffusion.models import GaussianMixture
    >>> from crepe_diffusion.schedules import ladder
    >>> p = GaussianMixture(weights=[0.3, 0.7], means=[[-4.0], [3.0]], stds=[0.5, 0.4])
    >>> chain = ReplicaExchange(p ** 2.0, ladder.karras(11, 0.01, 20.0), n_chains=2, seed=0)
    >>> chain.sample(20, burn_in=10).x.shape
    torch.Size([40, 1])
    >>> from crepe_diffusion.samplers import pilot
    >>> found = pilot(p ** 2.0, ladder.karras(17, 0.01, 20.0), n=32)
    >>> ReplicaExchange(p ** 2.0, pilot=found, n_chains=2).ladder.n_levels < 17
    True
    """

    def __init__(
        self,
        target: Target | Model,
        ladder: Ladder | None = None,
        *,
        n_chains: int = 1,
        seed: int = 0,
        process: Process | None = None,
        proposal: Proposal | None = None,
        explorer: Explorer | None = None,
        accept: Accept = metropolis,
        micro_batch: int | None = None,
        nonfinite: str = "raise",
        fit_samples: int = 256,
        pilot: Pilot | None = None,
        start: dict[str, Tensor] | None = None,
    ):
        ready, counts = process, None
        if pilot is not None:
            planned = pilot.plan().ladder if ladder is None else ladder
            ladder, process, ready, proposal, counts = pilot.given_to(target, planned, process, proposal)
        elif ladder is None:
            raise InputError("give a ladder, such as ladder.karras(51), or a pilot, which plans one")
        self.n_chains, self.seed, self.stream = positive("n_chains", n_chains), seed, Stream(seed)
        self.explorer, self.accept = explorer, accept
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
        self.started_from: StartingPass | None = None
        if start is not None:
            self._restore(start)
            return
        self.iteration = 0
        if pilot is None:
            self.state = self._initial()
            self.diagnostics = self._no_diagnostics()
        else:
            self._start_from(pilot)
        self.setup_evaluations = self.evaluate.counts.copy()

    # -- the algorithm -----------------------------------------------------------------------------------

    def step(self) -> Exchange:
        """One iteration: communication, then exploration of every replica."""
        n = self.iteration + 1
        stream = self.stream.at(n)
        state, swaps = swap(self.state, self.evaluate, n, stream.at("swap"), self.accept)
        explored = renewed = None
        if self.explorer is not None:
            state, moved = explore(self.explorer, state, self.evaluate, stream.at("explore"))
            moved = moved.cpu()
            if self.renews:
                renewed = moved.reshape(state.level.shape)
            else:
                explored = state.by_level(moved)
        self.state, self.iteration = state, n
        self.diagnostics.record(n, state.level, swaps.log_work, swaps.accepted, swaps.active, explored, renewed)
        replica = state.replica_at()[:, 0]
        born = self.diagnostics.trips.born.gather(1, replica[:, None])[:, 0]
        return Exchange(n, self.evaluate.counts.rows, swaps, explored, state.level, replica, born)

    def __iter__(self) -> Iterator[tuple[Tensor, Exchange]]:
        """Yields the target level's samples (chains, *event) forever; stop whenever you like."""
        while True:
            info = self.step()
            yield self.output(), info

    def output(self) -> Tensor:
        """The replicas at level 0, denoised through the ladder's finishing times, (chains, *event)."""
        return finish(self.evaluate, self.state.at(0), self.stream.at(self.iteration, "finish"))

    def sample(
        self,
        n: int,
        *,
        burn_in: int = 0,
        thin: int = 1,
        progress: bool | None = None,
        callback: Callback | None = None,
    ) -> Chains:
        """Run `burn_in` iterations, then `n` draws per chain, one every `thin` iterations.

        Diagnostics start after burn-in. `callback` is called after every iteration; if it stops the call, the result
        holds the draws so far, and the chain can go on from there.
        """
        positive("n", n), positive("burn_in", burn_in, 0), positive("thin", thin)
        draws, infos = [self.evaluate.empty(0)], []
        with Track(burn_in + n * thin, "iterations", progress, callback) as track:
            for i in range(1 - burn_in, n * thin + 1):
                info = self.step()
                if i == 0:
                    self.restart_diagnostics()
                if i > 0 and i % thin == 0:
                    draws.append(self.output())
                    infos.append(info)
                if track.advance():
                    break
        nothing = torch.zeros(0, self.n_chains, dtype=torch.long)
        return Chains(
            x=torch.cat(draws).cpu(),
            evaluations=self.evaluate.counts.copy(),
            iteration=torch.tensor([i.iteration for i in infos], dtype=torch.long),
            replica=torch.cat([nothing, *(i.replica[None] for i in infos)]),
            born=torch.cat([nothing, *(i.born[None] for i in infos)]),
            diagnostics=self.diagnostics,
            started_from=self.started_from,
            ladder=self.ladder,
        )

    # -- what is kept of it ------------------------------------------------------------------------------

    @property
    def draw_columns(self) -> dict[str, Column]:
        """Which replica made a draw, and in which iteration it was at the noise end last."""
        shape, names = (self.n_chains,), ("chain",)
        return {"replica": Column("int32", shape, names), "born": Column("int64", shape, names)}

    @property
    def trace_columns(self) -> dict[str, Column]:
        """The mean over chains of min(1, alpha) per pair, of the explorer's moves per level, and all levels if few."""
        chains, replicas = self.state.level.shape
        columns = {"acceptance": Column("float32", (replicas - 1,), ("pair",))}
        if chains * replicas <= MOST_LEVELS_TRACED:
            columns["level"] = Column("int16", (chains, replicas), ("chain", "replica"))
        if self.explorer is not None and not self.renews:
            columns["explored"] = Column("float32", (replicas,), ("level",))
        return columns

    def draw_row(self, info: Exchange) -> dict[str, np.ndarray]:
        return {"replica": info.replica.numpy(force=True), "born": info.born.numpy(force=True)}

    def trace_rows(self, infos: Sequence[Exchange]) -> dict[str, np.ndarray]:
        # Many at once: one by one, these few numbers would cost half of what a store costs.
        work, active = torch.stack([i.swaps.log_work for i in infos]), torch.stack([i.swaps.active for i in infos])
        alpha = accept_probability(work[..., 1:], work[..., :-1]).mean(1).where(active, math.nan)
        rows = {"acceptance": alpha, "level": torch.stack([i.level for i in infos])}
        explored = [i.explored for i in infos if i.explored is not None]
        if explored:
            rows["explored"] = torch.stack(explored).to(torch.float32).mean(1)
        return {name: rows[name].numpy(force=True) for name in self.trace_columns}

    @property
    def renews(self) -> bool:
        """Whether the explorer draws some replicas again from scratch, rather than moving all of them a little."""
        return getattr(self.explorer, "renews", False)

    # -- changing one's mind -----------------------------------------------------------------------------

    @property
    def target(self) -> Target:
        return self.evaluate.target

    @target.setter
    def target(self, target: Target | Model) -> None:
        """Online refinement: replicas stay where they are and are evaluated again.

        An explorer that is a `Starter` gives new points to start from instead: swaps would draw segments of the old
        plans through walls, and restitching would take these for draws of the model that fit better than any other.
        """
        self._prepare(target, self.ladder)
        self.started_from = None  # the pilot was made for another target
        if isinstance(self.explorer, Starter):
            self.restart(*self.explorer.begin(self.evaluate, self.n_chains, self.stream.at(self.iteration, "begin")))

    @property
    def ladder(self) -> Ladder:
        return self.evaluate.ladder

    @ladder.setter
    def ladder(self, ladder: Ladder) -> None:
        if ladder.n_levels != self.ladder.n_levels:
            raise InputError(f"{ladder.n_levels} levels for {self.ladder.n_levels} replicas: start a new chain instead")
        self._prepare(self.target, ladder)

    def adapt(self) -> Ladder:
        """Move the levels so that all pairs reject equally, from what was recorded; between rounds, never within.

        Needs a round long enough to estimate every pair's rejection. The chain then needs a new burn-in.
        """
        self.ladder = equal_rejection(self.ladder, self.diagnostics)
        return self.ladder

    def restart(self, x: Tensor, level: int) -> None:
        """New replicas from one point per chain (chains, *event) at this level: noised above, denoised below it."""
        wanted, top = (self.n_chains, *self.state.x.shape[1:]), self.ladder.n_levels - 1
        if not 0 <= level <= top or x.shape != wanted:
            raise InputError(f"need a level of 0 to {top} and points {wanted}, got {level!r} and {tuple(x.shape)}")
        x = x.to(self.evaluate.device)
        self.state = self._around(x, level, self.stream.at(self.iteration, "restart"))
        self.diagnostics = self._no_diagnostics()

    def _around(self, x: Tensor, level: int, stream: Stream) -> State:
        """Replicas at every level that come from these points at one."""
        evaluate, top, k = self.evaluate, self.ladder.n_levels - 1, self.ladder.substeps
        start = evaluate(x, self.ladder.levels[level].expand(len(x)))
        found = {level: (x, start)}
        for step, last in ((-1, 0), (1, top)):
            here, seen = x, start
            direction = torch.full((len(x),), step)
            for m in range(level, last, step):
                path = walk(evaluate, here, seen, torch.full((len(x),), m * k), direction, k, stream.at(m, step))
                here, seen = found[m + step] = path.x, path.seen
        points, evaluations = zip(*(found[m] for m in range(top + 1)), strict=True)
        return _of_levels(list(points), list(evaluations), self.n_chains)

    def restart_diagnostics(self) -> None:
        """Forget what was recorded (after burn-in, or when the target changed); the index process goes on."""
        trips = self.diagnostics.trips
        self.diagnostics = self._no_diagnostics()
        self.diagnostics.trips.phase, self.diagnostics.trips.born = trips.phase, trips.born

    # -- stopping and going on ---------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Tensor]:
        """All that the next iterations depend on besides target, settings and seed, as tensors that may be kept.

        Predictions are part of it: a network's last bits may depend on the batch, so they are not evaluated again.
        """
        whole = self.state.whole()
        seen = whole.seen
        state = {"x": whole.x, "level": whole.level, "iteration": torch.tensor(self.iteration)}
        state |= {f"seen.prediction.{j}": p for j, p in enumerate(seen.predictions)}
        state |= {"seen.drift": seen.drift, "seen.reward": seen.reward}
        parts = {"": state, "diagnostics": self.diagnostics.state_dict(), "setup": self.setup_evaluations.state_dict()}
        if self.started_from is not None:
            parts["pilot"] = self.started_from.state_dict()
        return packed(self.evaluate, parts)

    def _restore(self, start: dict[str, Tensor]) -> None:
        level, x = start["level"].clone(), self._there(start["x"])
        models, predictions = self.target.models, part(start, "seen.prediction")
        event, n_kept = models[0].event_shape, len(models) if self.evaluate.keeps_predictions else 0
        if x.shape != (level.numel(), *event) or len(level) != self.n_chains or len(predictions) != n_kept:
            raise InputError(
                f"the snapshot holds {len(level)} chains of {len(predictions)} models on events {tuple(x.shape[1:])},"
                f" but {self.n_chains} chains of {len(models)} models on events {event} are wanted"
            )
        seen = tuple(self._there(predictions[str(j)]) for j in range(len(predictions)))
        reward = self._there(start["seen.reward"]).to(self.evaluate.real)
        self.state = State(x, Evaluation(seen, self._there(start["seen.drift"]), reward), level)
        self.iteration = int(start["iteration"])
        self.diagnostics = Diagnostics.from_state_dict(part(start, "diagnostics"))
        self.setup_evaluations = Counts.from_state_dict(part(start, "setup"))
        if summary := part(start, "pilot"):
            self.started_from = StartingPass.from_state_dict(summary)

    def _there(self, value: Tensor) -> Tensor:
        """A tensor of a snapshot as one of the model's device that may be written to."""
        return value.to(self.evaluate.device, copy=True)

    def _no_diagnostics(self) -> Diagnostics:
        """Diagnostics to which nothing has been recorded."""
        event = torch.Size(self.target.models[0].event_shape)
        return Diagnostics(self.state.level, approximate=self.evaluate.process.multiplies(event))

    def _check(self, evaluate: Evaluator) -> None:
        if self.explorer is not None:
            self.explorer.check(evaluate)

    def _prepare(self, target: Target | Model, ladder: Ladder) -> None:
        """All or nothing: if the new target cannot be evaluated, the chain goes on with the old one."""
        evaluate = prepare_again(
            self.evaluate,
            target,
            ladder,
            self.stream.at(self.iteration, "setup"),
            process=self.process,
            fit_samples=self.fit_samples,
            check=self._check,
        )
        state = self.state.own(evaluate)

        def again(part: State, evaluate: Evaluator, rows: slice) -> Moved:
            return part.x, evaluate(part.x, ladder.levels[part.level.flatten()]), ()

        _, seen, _ = by_rows(state, evaluate, again)
        self.evaluate, self.state = evaluate, replace(state, seen=seen)
        self.restart_diagnostics()

    def _start_from(self, pilot: Pilot) -> None:
        """Every replica is a particle of the pilot at its level, and the tours of its relatives are one tour."""
        n, levels = self.n_chains, self.ladder.levels
        x, eve = pilot.replicas(levels, n, self.stream.at("pilot"))
        x = x.flatten(0, 1).to(self.evaluate.device)
        seen = self.evaluate(x, levels.repeat(n))
        self.state = State(x, seen, torch.arange(len(levels)).expand(n, -1).clone())
        self.diagnostics = self._no_diagnostics()
        below = self.state.level < len(levels) - 1
        self.diagnostics.trips.born = torch.where(below, -1 - eve, self.diagnostics.trips.born)
        self.started_from = pilot.summary

    def _initial(self) -> State:
        """Every chain denoises once by the proposal and leaves a replica at each level it passes.

        An explorer that is a `Starter` gives its own points to start from instead.
        """
        evaluate, levels, k = self.evaluate, self.evaluate.ladder.n_levels, self.evaluate.ladder.substeps
        stream = self.stream.at("initial")
        if isinstance(self.explorer, Starter):
            return self._around(*self.explorer.begin(evaluate, self.n_chains, stream.at("begin")), stream)
        x = evaluate.noise(stream.at("noise"), self.n_chains)
        seen = evaluate(x, evaluate.ladder.times[-1:].expand(self.n_chains))
        down = torch.full((self.n_chains,), -1)
        points, evaluations = [x], [seen]
        for m in range(levels - 1, 0, -1):
            path = walk(evaluate, x, seen, torch.full((self.n_chains,), m * k), down, k, stream.at(m))
            x, seen = path.x, path.seen
            points.append(x)
            evaluations.append(seen)
        return _of_levels(points[::-1], evaluations[::-1], self.n_chains)


def _of_levels(points: list[Tensor], evaluations: list[Evaluation], n_chains: int) -> State:
    """A state from points (chains, *event) at every level."""
    n = len(points)
    order = (torch.arange(n)[None] * n_chains + torch.arange(n_chains)[:, None]).flatten().to(points[0].device)
    return State(
        torch.cat(points)[order], Evaluation.cat(evaluations).rows(order), torch.arange(n).expand(n_chains, -1).clone()
    )


def equal_rejection(ladder: Ladder, diagnostics: Diagnostics, n_levels: int | None = None) -> Ladder:
    """The ladder on which every pair rejects equally often, given what was recorded on this one (Syed et al. 2022).

    The cumulative rejection is read as a function of the time index, linear between levels, and cut evenly.
    """
    rejection = (1 - diagnostics.acceptance()).clamp(min=1e-3)
    if not torch.isfinite(rejection).all():
        raise InputError("no acceptance has been recorded yet: run some iterations before adapting the ladder")
    cumulative = torch.cat([torch.zeros(1, dtype=torch.float64), rejection.cumsum(0)])
    wanted = torch.linspace(0, float(cumulative[-1]), n_levels or ladder.n_levels, dtype=torch.float64)
    high = torch.searchsorted(cumulative, wanted).clamp(1, len(cumulative) - 1)
    share = (wanted - cumulative[high - 1]) / (cumulative[high] - cumulative[high - 1])
    return ladder.moved(((high - 1) + share.clamp(0, 1)) * ladder.substeps)
