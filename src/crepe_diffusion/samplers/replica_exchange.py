"""CREPE: accelerated, non-reversible parallel tempering between the noise levels of a diffusion.

for n = 1, 2, ...
    communication   pairs (m - 1, m) with m = n mod 2 walk towards each other and trade levels, or not
    exploration     every replica moves at its own level
    output          the replica at level 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from crepe_diffusion.diagnostics import Diagnostics, ess, rhat
from crepe_diffusion.errors import InputError
from crepe_diffusion.evaluate import Counts, Evaluator
from crepe_diffusion.kernels import Explorer, Starter, State, Swaps, metropolis, swap
from crepe_diffusion.kernels.swap import Accept
from crepe_diffusion.models import Model
from crepe_diffusion.paths import walk
from crepe_diffusion.processes import Evaluation, FisherTable, Gaussian, Process
from crepe_diffusion.proposals import Proposal
from crepe_diffusion.random import Stream
from crepe_diffusion.samplers.setup import Settings, finish, prepare
from crepe_diffusion.schedules import Ladder
from crepe_diffusion.targets import Target

__all__ = ["Info", "ReplicaExchange", "Samples"]


@dataclass(frozen=True)
class Info:
    """What a person may want to know of one iteration."""

    iteration: int
    swaps: Swaps
    explored: Tensor | None
    level: Tensor
    replica: Tensor
    born: Tensor
    counts: Counts


@dataclass(frozen=True)
class Samples:
    """Draws of the target level, `x` (draws, chains, *event), with their lineage and the chain's diagnostics."""

    x: Tensor
    iteration: Tensor
    replica: Tensor
    born: Tensor
    diagnostics: Diagnostics
    evaluations: Counts

    def scalar(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """A scalar of each draw, (draws, chains)."""
        return function(self.x.flatten(0, 1)).reshape(self.x.shape[:2])

    def ess(self, function: Callable[[Tensor], Tensor]) -> float:
        return ess(self.scalar(function))

    def rhat(self, function: Callable[[Tensor], Tensor]) -> float:
        return rhat(self.scalar(function))

    def flat(self) -> Tensor:
        """All draws of all chains, (draws * chains, *event)."""
        return self.x.flatten(0, 1)


class ReplicaExchange:
    """Samples a target built from pretrained diffusions; iterate it for as long as you like.

    - `levels`: the ladder; `n_chains` independent chains run in one batch;
    - `process`: kernels other than the model's own default; `proposal`: how replicas walk;
    - `explorer`: `Bounce()`, `Langevin()`, `SingleToken()` or None; `accept`: the rule for swaps;
    - `micro_batch`: the most network rows in one call; `nonfinite`: `"raise"` or `"reject"`;
    - `fit_samples`: samples for the Fisher variance, where the process asks for it;
    - `start`: the `snapshot()` of a chain to go on from, bit for bit. Its ladder replaces `levels`.

    Per iteration and chain: `(M + 1) * K` rows of each network, one call per sub-step, plus the explorer's.

    >>> from crepe_diffusion.models import GaussianMixture
    >>> from crepe_diffusion.schedules import ladder
    >>> p = GaussianMixture(weights=[0.3, 0.7], means=[[-4.0], [3.0]], stds=[0.5, 0.4])
    >>> chain = ReplicaExchange(p ** 2.0, ladder.karras(11, 0.01, 20.0), n_chains=2, seed=0)
    >>> chain.sample(20, burn_in=10).x.shape
    torch.Size([20, 2, 1])
    """

    def __init__(
        self,
        target: Target | Model,
        levels: Ladder,
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
        start: dict[str, Tensor] | None = None,
    ):
        if int(n_chains) != n_chains or n_chains < 1:
            raise InputError(f"n_chains must be a positive integer, got {n_chains!r}")
        self.stream = Stream(seed)
        self.n_chains = int(n_chains)
        self.explorer, self.accept = explorer, accept
        self.settings = Settings(proposal or Proposal(), micro_batch, nonfinite, fit_samples)
        self.asked_process = process
        if start is not None:
            self._restore(target, process, start)
            return
        self.evaluate = prepare(target, levels, process, self.settings, self.stream.at("setup"), check=self._check)
        self.iteration = 0
        self.state = self._initial()
        self.diagnostics = Diagnostics(self.state.level)
        self.setup_evaluations = self.evaluate.counts.copy()

    # -- the algorithm -----------------------------------------------------------------------------------

    def step(self) -> Info:
        """One iteration: communication, then exploration of every replica."""
        n = self.iteration + 1
        stream = self.stream.at(n)
        state, swaps = swap(self.state, self.evaluate, n, stream.at("swap"), self.accept)
        explored = renewed = None
        if self.explorer is not None:
            state, moved = self.explorer(state, self.evaluate, stream.at("explore"))
            if self.renews:
                renewed = moved.reshape(state.level.shape)
            else:
                explored = state.by_level(moved)
        self.state, self.iteration = state, n
        self.diagnostics.record(n, state.level, swaps.log_work, swaps.accepted, swaps.active, explored, renewed)
        replica = state.replica_at()[:, 0]
        born = self.diagnostics.trips.born.gather(1, replica[:, None])[:, 0]
        return Info(n, swaps, explored, state.level, replica, born, self.evaluate.counts)

    def __iter__(self) -> Iterator[tuple[Tensor, Info]]:
        """Yields the target level's samples (chains, *event) forever; stop whenever you like."""
        while True:
            info = self.step()
            yield self.output(), info

    def output(self) -> Tensor:
        """The replicas at level 0, finished below it where the ladder says so, (chains, *event)."""
        x = self.state.x[self.state.row_at(0)]
        return finish(self.evaluate, x, self.stream.at(self.iteration, "finish"))

    def sample(self, n: int, *, burn_in: int = 0, thin: int = 1) -> Samples:
        """Run `burn_in` iterations, then `n` draws, one every `thin` iterations; diagnostics start after burn-in."""
        for name, value, least in (("n", n, 1), ("burn_in", burn_in, 0), ("thin", thin, 1)):
            if int(value) != value or value < least:
                raise InputError(f"{name} must be an integer of at least {least}, got {value!r}")
        for _ in range(burn_in):
            self.step()
        if burn_in:
            self.restart_diagnostics()
        draws, infos = [], []
        for _ in range(n):
            for _ in range(thin):
                info = self.step()
            draws.append(self.output())
            infos.append(info)
        return Samples(
            x=torch.stack(draws),
            iteration=torch.tensor([i.iteration for i in infos]),
            replica=torch.stack([i.replica for i in infos]),
            born=torch.stack([i.born for i in infos]),
            diagnostics=self.diagnostics,
            evaluations=self.evaluate.counts.copy(),
        )

    @property
    def renews(self) -> bool:
        """Whether the explorer draws replicas anew now and then rather than moving all of them a little."""
        return getattr(self.explorer, "renews", False)

    # -- changing one's mind -----------------------------------------------------------------------------

    @property
    def target(self) -> Target:
        return self.evaluate.target

    @target.setter
    def target(self, target: Target | Model) -> None:
        """Online refinement: replicas stay where they are, and what is known of them is evaluated anew."""
        if isinstance(target, Model):
            target = target.as_target()
        same = isinstance(target, Target) and target.models == self.target.models
        self._prepare(target, self.ladder, self.evaluate.process if same else self.asked_process)

    @property
    def ladder(self) -> Ladder:
        return self.evaluate.ladder

    @ladder.setter
    def ladder(self, levels: Ladder) -> None:
        if levels.n_levels != self.ladder.n_levels:
            raise InputError(f"{levels.n_levels} levels for {self.ladder.n_levels} replicas: start a new chain instead")
        self._prepare(self.target, levels, self.evaluate.process)

    def adapt(self) -> Ladder:
        """Move the levels so that all pairs reject equally, from what was recorded; between rounds, never within.

        Needs a round long enough to estimate every pair's rejection. The chain then needs a new burn-in.
        """
        self.ladder = equal_rejection(self.ladder, self.diagnostics)
        return self.ladder

    def restart(self, x: Tensor, level: int) -> None:
        """All replicas anew, from one point a chain (chains, *event) at this level: noised above, denoised below it."""
        wanted, top = (self.n_chains, *self.state.x.shape[1:]), self.ladder.n_levels - 1
        if not 0 <= level <= top or x.shape != wanted:
            raise InputError(f"need a level of 0 to {top} and points {wanted}, got {level!r} and {tuple(x.shape)}")
        self.state = self._around(x, level, self.stream.at(self.iteration, "restart"))
        self.diagnostics = Diagnostics(self.state.level)

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
        self.diagnostics = Diagnostics(self.state.level)
        self.diagnostics.trips.phase, self.diagnostics.trips.born = trips.phase, trips.born

    # -- stopping and going on ---------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Tensor]:
        """All that the next iterations depend on besides target, settings and seed, as tensors that may be kept.

        Predictions are part of it: a network's last bits may depend on the batch, so they are not evaluated again.
        """
        seen, process = self.state.seen, self.evaluate.process
        tensors = {"x": self.state.x, "level": self.state.level, "iteration": torch.tensor(self.iteration)}
        tensors |= {f"seen.prediction.{j}": p for j, p in enumerate(seen.predictions)}
        tensors |= {"seen.drift": seen.drift, "seen.reward": seen.reward}
        parts = {
            "ladder": self.ladder.state_dict(),
            "diagnostics": self.diagnostics.state_dict(),
            "counts": self.evaluate.counts.state_dict(),
            "setup": self.setup_evaluations.state_dict(),
        }
        if isinstance(process, Gaussian) and isinstance(process.information, FisherTable):
            parts["fisher"] = process.information.state_dict()
        tensors |= {f"{part}.{name}": value for part, state in parts.items() for name, value in state.items()}
        return {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}

    def _restore(self, target: Target | Model, process: Process | None, start: dict[str, Tensor]) -> None:
        def part(name: str) -> dict[str, Tensor]:
            return {key[len(name) + 1 :]: value for key, value in start.items() if key.startswith(name + ".")}

        if isinstance(target, Model):
            target = target.as_target()
        if not isinstance(target, Target):
            raise InputError(f"the target must be a model or a product of models, got {target!r}")
        process = process or target.models[0].process()
        if process.needs_fit() and "fisher.times" in start:
            process = process.fitted(FisherTable(**part("fisher")))
        levels, counts = Ladder.from_state_dict(part("ladder")), Counts.from_state_dict(part("counts"))
        self.evaluate = prepare(target, levels, process, self.settings, self.stream.at("setup"), counts)
        if self.explorer is not None:
            self.explorer.check(self.evaluate)
        level, x = start["level"].clone(), start["x"].clone()
        event, predictions = target.models[0].event_shape, part("seen.prediction")
        if x.shape != (level.numel(), *event) or len(level) != self.n_chains or len(predictions) != len(target.models):
            raise InputError(
                f"the snapshot holds {len(level)} chains of {len(predictions)} models on events {tuple(x.shape[1:])},"
                f" but {self.n_chains} chains of {len(target.models)} models on events {event} are asked for"
            )
        evaluations = tuple(predictions[str(j)].clone() for j in range(len(predictions)))
        self.state = State(x, Evaluation(evaluations, start["seen.drift"].clone(), start["seen.reward"].clone()), level)
        self.iteration = int(start["iteration"])
        self.diagnostics = Diagnostics.from_state_dict(part("diagnostics"))
        self.setup_evaluations = Counts.from_state_dict(part("setup"))

    def _check(self, evaluate: Evaluator) -> None:
        if self.explorer is not None:
            self.explorer.check(evaluate)

    def _prepare(self, target: Target, levels: Ladder, process: Process | None) -> None:
        """All or nothing: if the new target cannot be evaluated, the chain goes on with the old one."""
        stream = self.stream.at(self.iteration, "setup")
        evaluate = prepare(target, levels, process, self.settings, stream, self.evaluate.counts, self._check)
        seen = evaluate(self.state.x, levels.levels[self.state.level.flatten()])
        self.evaluate, self.state = evaluate, State(self.state.x, seen, self.state.level)
        self.restart_diagnostics()

    def _initial(self) -> State:
        """Every chain denoises once by the proposal and leaves a replica at each level it passes.

        An explorer that knows a better place to begin is asked for it.
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
    order = (torch.arange(n)[None] * n_chains + torch.arange(n_chains)[:, None]).flatten()
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
