"""Points to evaluations: every network evaluation and every reward of a run goes through here, and is counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from crepe_diffusion.batches import IMPOSSIBLE, rows_like
from crepe_diffusion.errors import InputError, NonFiniteError, check_choice
from crepe_diffusion.processes import Evaluation, Process
from crepe_diffusion.proposals import Proposal
from crepe_diffusion.schedules import Ladder
from crepe_diffusion.targets import Reward, Target

__all__ = ["Counts", "Evaluator"]


@dataclass
class Counts:
    """Exact cost: network rows and calls, rows that also went backwards, rewards, and what was not finite."""

    rows: int = 0
    calls: int = 0
    gradient_rows: int = 0
    rewards: int = 0
    nonfinite: Counter[int] = field(default_factory=Counter)

    def copy(self) -> Counts:
        return replace(self, nonfinite=Counter(self.nonfinite))

    def state_dict(self) -> dict[str, Tensor]:
        bad = sorted(self.nonfinite.items())
        numbers = (self.rows, self.calls, self.gradient_rows, self.rewards)
        return {"numbers": torch.tensor(numbers), "nonfinite": torch.tensor(bad, dtype=torch.long).reshape(-1, 2)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Tensor]) -> Counts:
        rows, calls, gradient_rows, rewards = state["numbers"].tolist()
        return cls(rows, calls, gradient_rows, rewards, Counter(dict(state["nonfinite"].tolist())))


class Evaluator:
    """Evaluates all models and rewards of a target, in one batch per distinct network."""

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
        self.counts = counts or Counts()
        self.groups: dict[object, list[int]] = {}
        for j, model in enumerate(target.models):
            self.groups.setdefault(model.network, []).append(j)
        shared = [[target.models[j] for j in members] for members in self.groups.values()]
        self.network_rows = sum(models[0].rows_together(models) for models in shared)
        process.check_times(ladder.times)
        process.check_event(torch.Size(target.models[0].event_shape))
        discrete = process.is_discrete
        for reward in target.rewards:
            if discrete and self._guidance(reward) != "none":
                raise InputError(
                    f"reward {reward.name!r}: guidance {self._guidance(reward)!r} needs a Gaussian diffusion"
                )
            if not discrete and reward.on == "mode":
                raise InputError(f"reward {reward.name!r}: on='mode' is for discrete models")

    def _guidance(self, reward: Reward) -> str:
        return self.proposal.guidance or reward.guidance

    @property
    def has_gradients(self) -> bool:
        """Whether the proposal sees the gradient of every reward."""
        return all(self._guidance(r) != "none" for r in self.target.rewards)

    def empty(self, n: int, device: torch.device | str = "cpu") -> Tensor:
        """A batch of states to be filled."""
        dtype = torch.long if self.process.is_discrete else self.target.models[0].dtype
        return torch.zeros(n, *self.target.models[0].event_shape, dtype=dtype, device=device)

    def noise(self, stream, n: int) -> Tensor:  # type: ignore[no-untyped-def]
        """Draws from the law of the noise end."""
        return self.process.noise(stream, self.empty(n), float(self.ladder.times[-1]), self.coefficients)

    def __call__(self, x: Tensor, t: Tensor, *, rewards: bool = True) -> Evaluation:
        """What models and rewards say of each row; `rewards=False` skips them where no gradient is needed."""
        size = len(x) if self.micro_batch is None else max(1, self.micro_batch // max(1, self.network_rows))
        evaluations = [self._chunk(x[i : i + size], t[i : i + size], rewards) for i in range(0, len(x), size)]
        return evaluations[0] if len(evaluations) == 1 else Evaluation.cat(evaluations)

    def _chunk(self, x: Tensor, t: Tensor, rewards: bool) -> Evaluation:
        gradient = [r for r in self.target.rewards if self._guidance(r) == "gradient"]
        free = [r for r in self.target.rewards if self._guidance(r) == "jacobian-free"]
        blind = [r for r in self.target.rewards if self._guidance(r) == "none"]
        guidance = None
        value = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        through = [r for r in gradient if r.on == "prediction"]
        with torch.set_grad_enabled(bool(through)):
            x_in = x.detach().requires_grad_() if gradient else x
            predictions = self._predict(x_in, t)
            if gradient:
                with torch.enable_grad():
                    r = self._reward(gradient, x_in, t, predictions)
                    guidance = torch.autograd.grad(r.sum(), x_in)[0]
                value = value + r.detach()
                self.counts.gradient_rows += len(x) * self.network_rows if through else 0
            # Copies, since a network may reuse its output and replicas remember theirs.
            predictions = tuple(p.detach().clone() for p in predictions)
        with torch.no_grad():
            if free:
                r, g = self._jacobian_free(free, x, t, predictions)
                value, guidance = value + r, g if guidance is None else guidance + g
            if blind and rewards:
                value = value + self._reward(blind, x, t, predictions)
            if guidance is not None and self.proposal.clip is not None:
                norm = t.to(guidance.dtype) * guidance.flatten(1).norm(dim=1)
                guidance = guidance * rows_like((self.proposal.clip / norm).clamp(max=1), guidance)
            predictions, value, guidance = self._check(x, t, predictions, value, guidance)
            return Evaluation(predictions, self.process.drift(x, t, predictions, guidance, self.coefficients), value)

    def _predict(self, x: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        out: list[Tensor | None] = [None] * len(self.target.models)
        for members in self.groups.values():
            models = [self.target.models[j] for j in members]
            for j, prediction in zip(members, models[0].predict_together(models, x, t), strict=True):
                self._check_prediction(prediction, x, j)
                out[j] = prediction
            self.counts.calls += 1
        self.counts.rows += len(x) * self.network_rows
        return tuple(out)  # type: ignore[arg-type]

    def _check_prediction(self, prediction: Tensor, x: Tensor, j: int) -> None:
        if not self.process.is_discrete:
            if prediction.dtype != x.dtype:
                raise InputError(f"model {j} returned {prediction.dtype} for a state of {x.dtype}; both must be equal")
            if prediction.shape != x.shape:
                raise InputError(f"model {j} returned shape {tuple(prediction.shape)} for states {tuple(x.shape)}")
        elif prediction.shape[:-1] != x.shape or not prediction.dtype.is_floating_point:
            raise InputError(
                f"model {j} returned {prediction.dtype} of shape {tuple(prediction.shape)};"
                f" log-probabilities of shape {(*x.shape, 'V')} are wanted"
            )

    def _reward(self, terms: list[Reward], x: Tensor, t: Tensor, predictions: tuple[Tensor, ...]) -> Tensor:
        """`sum_i scale_i gamma_i(u) r_i`, in float64."""
        total = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        for term in terms:
            total = total + self._term(term, self._shown(term, x, t, predictions), t)
        return total

    def _shown(self, term: Reward, x: Tensor, t: Tensor, predictions: tuple[Tensor, ...]) -> Tensor:
        if term.on == "state":
            return x
        expected = self.process.expectation(x, t, predictions, self.coefficients)
        return expected.argmax(-1) if term.on == "mode" else expected

    def _term(self, term: Reward, seen: Tensor, t: Tensor) -> Tensor:
        r = term.function(seen)
        if not isinstance(r, Tensor) or r.shape != (len(seen),):
            got = f"shape {tuple(r.shape)}" if isinstance(r, Tensor) else repr(type(r).__name__)
            raise InputError(f"reward {term.name!r} must return one number a row, shape ({len(seen)},); got {got}")
        self.counts.rewards += len(seen)
        weight, r = term.weight(t, self.ladder), r.to(torch.float64)
        # A constraint that is annealed away does not bind: 0 times minus infinity is 0 here.
        return (weight * r).where((weight != 0) | r.isfinite(), 0.0)

    def _jacobian_free(
        self, terms: list[Reward], x: Tensor, t: Tensor, predictions: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """The gradient at the prediction, with the network's Jacobian replaced by its mean."""
        value = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        guidance = torch.zeros_like(x)
        for term in terms:
            with torch.enable_grad():
                seen = self._shown(term, x, t, predictions).detach().requires_grad_()
                r = self._term(term, seen, t)
                g = torch.autograd.grad(r.sum(), seen)[0]
            value = value + r.detach()
            guidance = guidance + (g if term.on == "state" else self.process.pull_back(g, t, self.coefficients))
        return value, guidance

    def _check(
        self, x: Tensor, t: Tensor, predictions: tuple[Tensor, ...], value: Tensor, guidance: Tensor | None
    ) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None]:
        """A NaN is news: counted by level, then raised, or turned into an impossible reward and so rejected."""
        suspects = [*predictions, *([] if guidance is None else [guidance])]
        bad, value = value.isnan() | (value == torch.inf), value.clamp(min=IMPOSSIBLE)
        for z in suspects:
            # A row sum is finite unless an entry is not; log-probabilities of -inf are legal.
            total = z.flatten(1).sum(1) if not self.process.is_discrete else z.clamp(min=-1e4).flatten(1).sum(1)
            bad = bad | ~total.isfinite()
        if not bad.any():
            return predictions, value, guidance
        levels = torch.searchsorted(self.ladder.levels.to(t), t[bad].contiguous()).clamp(max=self.ladder.n_levels - 1)
        self.counts.nonfinite.update(levels.tolist())
        if self.nonfinite == "raise":
            first = float(t[bad][0])
            raise NonFiniteError(
                f"{int(bad.sum())} of {len(x)} rows had a prediction or reward that is NaN or infinite,"
                f" first at level {int(levels[0])} (t = {first:g});"
                ' look at the model and reward there, or pass nonfinite="reject" to reject and count them'
            )
        repaired = tuple(p.where(~rows_like(bad, p), torch.zeros_like(p)) for p in predictions)
        if guidance is not None:
            guidance = guidance.where(~rows_like(bad, guidance), torch.zeros_like(guidance))
        return repaired, value.where(~bad, IMPOSSIBLE), guidance
