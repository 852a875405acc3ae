"""From points to evaluations: every network evaluation and every reward of a run is made here, and counted.

Evaluation = predictions D_j(x, t), reward r_t(x), and the drift of the proposal that follows from both
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from crepe_diffusion.batches import IMPOSSIBLE, rows_like
from crepe_diffusion.counts import Counts
from crepe_diffusion.devices import is_home, real, resident
from crepe_diffusion.errors import InputError, NonFiniteError, check_choice
from crepe_diffusion.models.conditions import Each
from crepe_diffusion.models.networks import Networks, common_device
from crepe_diffusion.processes import Discrete, Evaluation, Process
from crepe_diffusion.processes.asked import Asked
from crepe_diffusion.processes.discrete import at_positions
from crepe_diffusion.proposals import Proposal
from crepe_diffusion.random import Stream
from crepe_diffusion.rewards import RewardSum
from crepe_diffusion.schedules import Ladder
from crepe_diffusion.sharing import Rows, by_blocks
from crepe_diffusion.targets import Target

__all__ = ["Counts", "Evaluator"]

NOT_NORMALISED = 0.2
"""Probabilities may sum to 1 within this much: networks of half precision round each by a few thousandths."""


class Evaluator:
    """Evaluates all models and rewards of a target: one call per network, at most `micro_batch` network rows at once.

    Samplers and explorers get one. It holds what a move needs: `target`, `ladder`, `process`, `proposal` with its
    `coefficients`, and the `counts` of what was evaluated. Batching of networks is done by `models.networks`, rewards
    and their gradients by `rewards`.

    >>> from crepe_diffusion.models import GaussianMixture
    >>> from crepe_diffusion.processes import Gaussian
    >>> p = GaussianMixture(weights=[1.0], means=[[0.0]], stds=[1.0])
    >>> ladder = Ladder(torch.tensor([0.1, 1.0, 10.0]))
    >>> evaluate = Evaluator(p.tilt(lambda x: 2 * x[:, 0]), ladder, Gaussian(variance=1.0), Proposal())
    >>> at = evaluate(torch.ones(1, 1, dtype=torch.float64), ladder.times[:1])
    >>> round(at.predictions[0].item(), 3), round(at.reward.item(), 3), evaluate.counts.rows
    (0.99, 1.98, 1)
    """

    def __init__(
        self,
        target: Target,
        ladder: Ladder,
        process: Process,
        proposal: Proposal,
        *,
        micro_batch: int | None = None,
        nonfinite: str = "raise",
        counts: Counts | None = None,
    ):
        check_choice("nonfinite", nonfinite, ("raise", "reject"))
        if micro_batch is not None and (int(micro_batch) != micro_batch or micro_batch < 1):
            raise InputError(f"micro_batch must be a positive number of rows, got {micro_batch!r}")
        self.target, self.ladder, self.process, self.proposal = target, ladder, process, proposal
        self.micro_batch, self.nonfinite = micro_batch, nonfinite
        self.coefficients = proposal.coefficients(target)
        self.device = common_device(target.models)
        self.real = real(self.device)
        self.counts = counts or Counts()
        self._part: tuple[slice, int] | None = None
        process.check_times(ladder.times)
        process.check_event(torch.Size(target.models[0].event_shape))
        self.networks = Networks(target.models, process.is_discrete)
        self.rewards = RewardSum(target.rewards, proposal.guidance, ladder, process, self.coefficients)
        self._covered = min([float(ladder.times[0]), *ladder.finish]), float(ladder.times[-1])
        self.keeps_predictions = process.keeps_predictions(torch.Size(target.models[0].event_shape))
        """Whether an evaluation holds predictions; if not, it holds rewards only, and tokens are asked for."""

    @property
    def n_groups(self) -> int:
        """How many groups of chains have a law of their own, by their conditions or prompts."""
        event = torch.Size(self.target.models[0].event_shape)
        return max(self.networks.n_conditions, self.process.n_prompts(event))

    @property
    def network_rows(self) -> int:
        """How many network rows one state costs."""
        return self.networks.rows

    @property
    def has_gradients(self) -> bool:
        """Whether the proposal follows the gradient of every reward."""
        return not self.rewards.blind

    @property
    def times(self) -> Tensor:
        """The times of the ladder, on the model's device."""
        return resident(self.ladder.times, self.device, self.real)

    def empty(self, n: int) -> Tensor:
        """A batch of states to be filled, on the model's device."""
        dtype = torch.long if self.process.is_discrete else self.target.models[0].dtype
        return torch.zeros(n, *self.target.models[0].event_shape, dtype=dtype, device=self.device)

    def noise(self, stream: Stream, n: int) -> Tensor:
        """Draws from the law of the noise end."""
        return self.process.noise(stream, self.empty(n), float(self.ladder.times[-1]), self.coefficients)

    def __call__(self, x: Tensor, t: Tensor, *, rewards: bool = True, which: Tensor | None = None) -> Evaluation:
        """One evaluation per row, at its own time; `rewards=False` skips rewards whose gradient is not needed.

        Waits for the device once, to see whether all numbers are finite; once more if t is there and not on the CPU,
        and a reward is not called at all times. Where no prediction is kept, a network is called only if a reward looks
        at predictions. Rows that are not a whole batch need the numbers of their conditions, those entries of `which`.
        """
        x = x.to(self.device)
        if not self.keeps_predictions and not (rewards and self.rewards.on_predictions):
            return self.known(x, t, Evaluation.nothing(x), rewards=rewards)
        which = self.which(len(x)) if which is None else which

        def parts(rows: Rows) -> tuple[Tensor, ...]:
            return self._chunk(x[rows], t[rows], rewards, which[rows])

        *predictions, drift, reward, bad = by_blocks(parts, len(x), self.block(len(x)))
        terms = self.rewards
        self._count(len(x), terms.through_networks)
        self.counts.rewards += terms.n_rows([*terms.gradient, *terms.free, *(terms.blind if rewards else [])], t)
        return self._mended(x, t, Evaluation(tuple(predictions), drift, reward), bad)

    def block(self, n: int) -> int:
        """How many states are evaluated at once."""
        return n if self.micro_batch is None else max(1, self.micro_batch // max(1, self.network_rows))

    def _count(self, n: int, differentiated: bool = False) -> None:
        """Of n states, whichever process evaluated them; rows that pad a block cost as much as others."""
        size = max(1, self.block(n))
        n_blocks = -(-n // size)
        rows = self.network_rows * (n if n_blocks == 1 else n_blocks * size)
        self.counts.calls += self.networks.n_calls * n_blocks
        self.counts.rows += rows
        self.counts.gradient_rows += rows if differentiated else 0

    def known(self, x: Tensor, t: Tensor, seen: Evaluation, *, rewards: bool = True) -> Evaluation:
        """The evaluation at time t of points whose predictions hold at all times: their rewards, and no network row."""
        if not len(x):
            return seen
        if not rewards or not self.rewards.blind:
            nothing = torch.zeros_like(seen.reward)
            return Evaluation(seen.predictions, seen.drift, nothing.where(seen.possible, IMPOSSIBLE))
        size = len(x) if self.micro_batch is None else self.micro_batch

        def values(rows: Rows) -> tuple[Tensor, ...]:
            predictions = tuple(p[rows] for p in seen.predictions)
            with torch.no_grad():
                return (self.rewards.value(self.rewards.blind, x[rows], t[rows], predictions),)

        (value,) = by_blocks(values, len(x), size)
        self.counts.rewards += self.rewards.n_rows(self.rewards.blind, t)
        # A prediction that was not finite has been counted already.
        bad = (value.isnan() | (value == torch.inf)) & seen.possible
        value = value.clamp(min=IMPOSSIBLE).where(seen.possible, IMPOSSIBLE)
        self._count_bad(t, bad)
        return Evaluation(seen.predictions, seen.drift, value.where(~bad, IMPOSSIBLE))

    def ask(self, x: Tensor, t: Tensor, asked: Asked, *, which: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The tokens that are asked for, (rows, k), and the numbers (models + 1, rows), NaN if not finite.

        Costs one row of each network per row. Of a prediction nothing else is kept, so that memory holds one
        prediction of the micro-batch and what its network needs.
        """
        process, t = self.process, t.to(self.device, self.real)
        assert isinstance(process, Discrete)
        which = self.which(len(x)) if which is None else which

        def answers(rows: Rows) -> tuple[Tensor, ...]:
            y, time = x[rows], t[rows]
            tokens = torch.zeros_like(asked.positions[rows])
            log_p = torch.zeros(len(self.target.models) + 1, len(y), dtype=self.real, device=x.device)
            bad = torch.zeros(len(y), dtype=torch.bool, device=x.device)
            with torch.no_grad():
                predictions = self._predict(y, time, which[rows])
                for c in asked.columns(len(y) * predictions[0].shape[-1]):
                    part = asked.part(rows, c)
                    here = tuple(at_positions(p, part.positions) for p in predictions)
                    spoilt = self._not_finite(here)
                    here = tuple(p.where(~rows_like(spoilt, p), 0.0) for p in here)
                    tokens[:, c], found = part.answer(process, part.here(y), time, here, self.coefficients)
                    log_p += found
                    bad |= spoilt
            return tokens, log_p.T, bad

        tokens, log_p, bad = by_blocks(answers, len(x), self.block(len(x)))
        log_p = log_p.T
        self._count(len(x))
        bad = bad | (tokens < 0).any(1)  # draws that were impossible: see `random.category`
        self._count_bad(t, bad)
        return tokens.clamp(min=0), log_p.where(~bad, torch.nan)

    def _predict(self, x: Tensor, t: Tensor, which: Tensor) -> tuple[Tensor, ...]:
        predictions = self.networks.predict(x, self._model_time(x, t), which)
        if isinstance(self.process, Discrete) and self.networks.totals is None:
            totals = [self.process.total(x, log_p, f"model {j}") for j, log_p in enumerate(predictions)]
            self.networks.totals = torch.stack(totals)
        return predictions

    def _check_totals(self, totals: list[float]) -> None:
        for j, total in enumerate(totals):
            if math.isfinite(total) and abs(total - 1) > NOT_NORMALISED:
                raise InputError(
                    f"model {j} returned numbers whose exponentials sum to {total:.3g} over the tokens of a position:"
                    " log-probabilities are needed, such as logits.log_softmax(-1)"
                )

    def _model_time(self, x: Tensor, t: Tensor) -> Tensor:
        """The time that the models get, inside of what the ladder covers."""
        return self.process.model_time(x, t).clamp(*self._covered)

    def which(self, n_rows: int) -> Tensor:
        """The number of the condition of each row of a whole batch, on the CPU; 0 if all have the same."""
        rows, n = self._part or (slice(None), n_rows)
        return Each.which_of(self.networks.n_conditions, n)[rows]

    def part(self, rows: slice, n: int) -> Evaluator:
        """For these rows of a batch of n, alone: they have their conditions, and counts of their own."""
        part = copy(self)
        part.counts, part._part = Counts(), (rows, n)
        return part

    def _chunk(self, x: Tensor, t: Tensor, rewards: bool, which: Tensor) -> tuple[Tensor, ...]:
        """Predictions, drift and reward of some rows, and which of them have a number that is not finite."""
        terms, n, when = self.rewards, len(x), t
        t = t.to(self.device, self.real)
        lost = None
        if self.process.is_discrete and not is_home(x):  # draws that were impossible: see Stream.categorical
            lost, x = (x < 0).flatten(1).any(1), x.clamp(min=0)
        guidance = None
        value = torch.zeros(n, dtype=self.real, device=x.device)
        with torch.set_grad_enabled(terms.through_networks):
            x_in = x.detach().requires_grad_() if terms.gradient else x
            predictions = self._predict(x_in, t, which)
            if terms.gradient:
                r, guidance = terms.value_and_gradient(x_in, when, predictions)
                value = value + r
            # Copies, since a network may reuse its output and replicas keep theirs.
            if self.keeps_predictions:
                predictions = tuple(p.detach().clone() for p in predictions)
        with torch.no_grad():
            if terms.free:
                r, g = terms.jacobian_free(x, when, predictions)
                value, guidance = value + r, g if guidance is None else guidance + g
            blind = terms.blind if rewards else []
            if blind:
                value = value + terms.value(blind, x, when, predictions)
            if guidance is not None and self.proposal.clip is not None:
                norm = t.to(guidance.dtype) * guidance.flatten(1).norm(dim=1)
                guidance = guidance * rows_like((self.proposal.clip / norm).clamp(max=1), guidance)
            rewarded = bool(terms.gradient or terms.free or blind)
            bad = self._not_finite(predictions, value if rewarded else None, guidance)
            bad = bad if lost is None else bad | lost
            value = value.clamp(min=IMPOSSIBLE) if rewarded else value
            if not self.keeps_predictions:
                return Evaluation.nothing(x).drift, value, bad
            return *predictions, self.process.drift(x, t, predictions, guidance, self.coefficients), value, bad

    def _not_finite(
        self, predictions: tuple[Tensor, ...], value: Tensor | None = None, guidance: Tensor | None = None
    ) -> Tensor:
        """Which rows have a number that is not finite; minus infinity is a legal reward."""
        bad = None if value is None else value.isnan() | (value == torch.inf)
        for z in predictions if guidance is None else (*predictions, guidance):
            # A row sum is finite unless an entry is not; log-probabilities of -inf are legal.
            total = z.flatten(1).sum(1) if not self.process.is_discrete else z.clamp(min=-1e4).flatten(1).sum(1)
            # 0 times what is not finite is NaN: two operations where `isfinite` takes five.
            spoilt = total * 0 != 0
            bad = spoilt if bad is None else bad | spoilt
        assert bad is not None  # a target has a model
        return bad

    def _mended(self, x: Tensor, t: Tensor, seen: Evaluation, bad: Tensor) -> Evaluation:
        """Rows that are not finite are counted by level, then raised, or made impossible and so rejected."""
        if not self._count_bad(t, bad):
            return seen
        if not self.keeps_predictions:
            return replace(seen, reward=seen.reward.where(~bad, IMPOSSIBLE))
        predictions = tuple(p.where(~rows_like(bad, p), torch.zeros_like(p)) for p in seen.predictions)
        t = t.to(self.device, self.real)
        drift = self.process.drift(x, t, predictions, None, self.coefficients)
        drift = seen.drift.where(~rows_like(bad, drift), drift)
        return Evaluation(predictions, drift, seen.reward.where(~bad, IMPOSSIBLE))

    def _count_bad(self, t: Tensor, bad: Tensor) -> bool:
        """Whether there are rows that are not finite; they are counted, and raised if that was asked for."""
        found = bad.any()[None]
        sums = self.networks.totals
        if sums is not None and len(sums):
            found, self.networks.totals = torch.cat([found.to(sums.dtype), sums]), sums[:0]
        some, *totals = found.tolist()
        self._check_totals(totals)
        if not some:
            return False
        t, n = t.cpu().to(torch.float64), len(bad)
        t = t[bad.cpu()]
        levels = torch.searchsorted(self.ladder.levels, t.contiguous()).clamp(max=self.ladder.n_levels - 1)
        self.counts.nonfinite.update(levels.tolist())
        if self.nonfinite == "raise":
            raise NonFiniteError(
                f"{len(t)} of {n} rows had a prediction or reward that is NaN or infinite,"
                f" first at level {int(levels[0])} (t = {float(t[0]):g});"
                ' look at the model and reward there, or pass nonfinite="reject" to reject and count them'
            )
        return True
