"""Local exploration: a kernel at each level on its own, applied to every replica whether or not it swapped.

Langevin     x' = x + h grad log pi_t + sqrt(2 h) xi,   h = t (t - t_below)       approximate
Bounce       up a little, down again, accepted with log_work(down) - log_work(up)  as exact as log_work
SingleToken   one token at a time with the density ratios of the target             exact for exact ratios
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from crepe_diffusion.batches import rows_like
from crepe_diffusion.devices import home
from crepe_diffusion.errors import InputError
from crepe_diffusion.evaluate import Evaluator
from crepe_diffusion.kernels.state import Moved, State, by_rows
from crepe_diffusion.kernels.swap import Accept, metropolis
from crepe_diffusion.paths import log_target_ratio, log_work, walk
from crepe_diffusion.processes import Evaluation
from crepe_diffusion.processes.discrete import TokenMoves
from crepe_diffusion.random import Stream

__all__ = ["Bounce", "Explorer", "Langevin", "ParticleStarter", "SingleToken", "Start", "Starter", "explore"]


@runtime_checkable
class Explorer(Protocol):
    """A move that leaves each pi_m invariant; the second value marks the rows that moved, for the record.

    An explorer with `renews = True` draws those rows again, whatever they were, rather than moving all rows a little.
    One whose class itself has `by_rows = True` moves every row alone, by random numbers whose first axis is the row.
    Where rows are cut into blocks, it gets a block at a time, as if that were one chain: `level` is (1, rows). Others
    get all rows; with `gathers = True` those of this process, and call `state.whole()` when they need more.
    """

    def __call__(self, state: State, evaluate: Evaluator, stream: Stream) -> tuple[State, Tensor]: ...

    def check(self, evaluate: Evaluator) -> None:
        """Refuse a target that this explorer cannot serve."""


def explore(explorer: Explorer, state: State, evaluate: Evaluator, stream: Stream) -> tuple[State, Tensor]:
    """One move of all rows, of which every process makes its own if they move by themselves."""
    its = vars(type(explorer))
    if not its.get("by_rows", False):
        return explorer(state if its.get("gathers", False) else state.whole(), evaluate, stream)
    state = state.own(evaluate)

    def move(part: State, evaluate: Evaluator, rows: slice) -> Moved:
        new, moved = explorer(part, evaluate, stream.from_row(rows.start))
        return new.x, new.seen, (moved.cpu(),)

    x, seen, (moved,) = by_rows(state, evaluate, move)
    return replace(state, x=x, seen=seen), moved


@dataclass(frozen=True)
class Start:
    """Weighted particles at one level; rows of `x` run over batches, then particles.

    `log_weights` (batches, particles) are proper: the mean of `exp(log_weight) f(x)` is the integral of
    `exp(r_t) f prod_j p_j^c_j`. `fresh`, of the same shape: which particles have nothing in common with a kept one.
    """

    x: Tensor
    level: int
    log_weights: Tensor
    fresh: Tensor


@runtime_checkable
class Starter(Protocol):
    """An explorer that also has a better place to start from than plain denoising."""

    def begin(self, evaluate: Evaluator, n_chains: int, stream: Stream) -> tuple[Tensor, int]:
        """One point per chain, (chains, *event), and the level it belongs to."""


@runtime_checkable
class ParticleStarter(Protocol):
    """Draws weighted particles at a level below the noise end, from which SMC and particle Gibbs go down."""

    def check(self, evaluate: Evaluator) -> None:
        """Refuse a target that this starter cannot serve."""

    def start_level(self, evaluate: Evaluator) -> int:
        """The level at which particles start."""

    def particles(
        self,
        evaluate: Evaluator,
        n_batches: int,
        n_particles: int,
        stream: Stream,
        kept: tuple[Tensor, Evaluation] | None = None,
    ) -> Start:
        """Independent batches of particles. With a `kept` point per batch, (batches, *event), that one is particle 0,
        and the others have the law that they would have had if all had been drawn and this one chosen among them.
        """


@dataclass(frozen=True)
class Langevin:
    """The paper's corrector, unadjusted: `scale` multiplies its step. One evaluation per row.

    Biased by the step size, and not guarded by an acceptance test; needs the gradient of every reward.
    """

    scale: float = 1.0
    by_rows: ClassVar[bool] = True

    def check(self, evaluate: Evaluator) -> None:
        if evaluate.process.is_discrete:
            raise InputError("Langevin exploration is for Gaussian diffusions; use Bounce or SingleToken")
        if not evaluate.has_gradients:
            raise InputError('Langevin exploration needs rewards with guidance="gradient"; use Bounce for the others')
        if evaluate.coefficients.proposal != evaluate.coefficients.target:
            raise InputError("Langevin exploration follows the target's score, but the proposal has other exponents")

    def __call__(self, state: State, evaluate: Evaluator, stream: Stream) -> tuple[State, Tensor]:
        process = evaluate.process
        times, level = evaluate.ladder.times, state.level.flatten()
        # Below level 0 the ladder is continued by its own last gap.
        below = torch.cat([(2 * times[:1] - times[1:2]).clamp(min=0.0), times])[level * evaluate.ladder.substeps]
        t = times[level * evaluate.ladder.substeps]
        h = (self.scale * t * (t - below)).to(state.x.dtype).to(state.x.device)
        noise = process.project(stream.normal(tuple(state.x.shape), dtype=state.x.dtype, device=state.x.device))
        drift = process.project(state.seen.drift)
        x = state.x + rows_like(h, drift) * drift + rows_like((2 * h).sqrt(), noise) * noise
        return State(x, evaluate(x, t), state.level), torch.ones_like(level, dtype=torch.bool)


@dataclass(frozen=True)
class Bounce:
    """Walk `n_steps` sub-steps up and as many down again; both paths share their noisy end.

    Invariant as far as `log_work` is exact, for Gaussian and discrete states, and without the reward's gradient.
    Costs `2 * n_steps` evaluations per row; replicas at the noise end stay.
    """

    n_steps: int = 1
    accept: Accept = field(default=metropolis, repr=False)
    by_rows: ClassVar[bool] = True

    def check(self, evaluate: Evaluator) -> None:
        if not 1 <= self.n_steps <= evaluate.ladder.substeps:
            raise InputError(
                f"n_steps must be between 1 and the ladder's {evaluate.ladder.substeps} sub-steps, got {self.n_steps!r}"
            )

    def __call__(self, state: State, evaluate: Evaluator, stream: Stream) -> tuple[State, Tensor]:
        level = state.level.flatten()
        rises = (level < evaluate.ladder.n_levels - 1).long()
        index = level * evaluate.ladder.substeps
        up = walk(evaluate, state.x, state.seen, index, rises, self.n_steps, stream.at("up"), end_rewards=False)
        down = walk(evaluate, up.x, up.seen, index + rises * self.n_steps, -rises, self.n_steps, stream.at("down"))
        log_alpha = log_work(down, evaluate.coefficients) - log_work(up, evaluate.coefficients)
        log_alpha, possible = home(log_alpha, state.seen.possible)
        log_alpha = log_alpha.where(possible, torch.inf)  # nothing to balance where the target has no weight
        accepted = self.accept(log_alpha.where(rises > 0, -torch.inf), stream.at("accept"))
        x, seen = state.take(accepted, down.x, down.seen)
        return State(x, seen, state.level), accepted


@dataclass(frozen=True)
class SingleToken:
    """Metropolis-Hastings for discrete states: `n_moves` single-token proposals, one evaluation per row each."""

    n_moves: int = 1
    accept: Accept = field(default=metropolis, repr=False)
    by_rows: ClassVar[bool] = True

    def check(self, evaluate: Evaluator) -> None:
        if not evaluate.process.is_discrete:
            raise InputError("SingleToken exploration is for discrete processes; use Bounce or Langevin")
        if not isinstance(evaluate.process, TokenMoves) or not evaluate.process.moves_single:
            raise InputError(
                f"SingleToken exploration needs single-token moves, which {type(evaluate.process).__name__} does not"
                " have; use Masked, Uniform or Bounce"
            )

    def __call__(self, state: State, evaluate: Evaluator, stream: Stream) -> tuple[State, Tensor]:
        process = evaluate.process
        assert isinstance(process, TokenMoves)
        t = evaluate.ladder.levels[state.level.flatten()]
        moved = torch.zeros(len(t), dtype=torch.bool)
        for i in range(self.n_moves):
            branch = stream.at(i)
            if evaluate.keeps_predictions:
                y = process.local_move(state.x, state.seen.drift, branch)
                seen = evaluate(y, t)
                log_alpha = log_target_ratio(evaluate, state.x, y, state.seen, seen, t)
                log_alpha = log_alpha - process.local_log_q(state.x, y, state.seen, seen)
            else:
                y, seen, log_alpha = self._ask(state, evaluate, t, branch)
            accepted = self.accept(home(log_alpha)[0], branch.at("accept"))
            moved = moved | accepted
            x, seen = state.take(accepted, y, seen)
            state = State(x, seen, state.level)
        return state, moved

    def _ask(self, state: State, evaluate: Evaluator, t: Tensor, stream: Stream) -> tuple[Tensor, Evaluation, Tensor]:
        """The same move where no prediction is kept: its token is asked for, and its reward evaluated."""
        process, when, t = evaluate.process, t, t.to(evaluate.device, evaluate.real)
        assert isinstance(process, TokenMoves)
        asked = process.single(state.x, stream)
        noisy = process.noisier(state.x, asked)
        tokens, log_p = evaluate.ask(noisy, t, asked)
        y, ratios = process.changed(noisy, asked, tokens), process.single_ratios(asked, log_p, t)
        seen, models = evaluate(y, when), ratios[:-1]
        if process.log_probs is not None:
            models = process.log_density_ratios(state.x, y, state.seen, seen, t)
        c = torch.tensor(evaluate.coefficients.target, dtype=models.dtype, device=models.device)
        return y, seen, c @ models - ratios[-1] + seen.reward - state.seen.reward
