"""Rewards: annealed along the ladder, and with the gradient that the proposal follows.

r_t(x) = sum_i scale_i gamma_i(t) r_i(z_i),        z = E[x_0 | x_t = x], or x itself, or the most probable tokens
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from crepe_diffusion.batches import called
from crepe_diffusion.devices import real
from crepe_diffusion.errors import InputError, check_choice
from crepe_diffusion.processes import Coefficients, Process
from crepe_diffusion.processes.discrete import Discrete
from crepe_diffusion.schedules import Annealing, Ladder, anneal

__all__ = ["GUIDANCE", "Reward", "RewardSum"]

FORBIDDEN = -20.0
"""What `scale * function` counts above level 0 where the function is minus infinity: exp(-20) is never."""

GUIDANCE = ("none", "gradient", "jacobian-free")
NEGLIGIBLE = 0.01
"""Share of a reward that is left out. The step of the target at the cut is smaller than what the last pair of levels
makes anyway: a power p on M pairs grows by about p / M there."""
# Operations whose derivative is zero wherever it exists.
FLAT = ("Round", "Floor", "Ceil", "Trunc", "Sign")


@dataclass(frozen=True)
class Reward:
    """One term of the log-tilt: `scale * gamma * function(z)`.

    - `function`: from a batch z to one number per row, larger is better;
    - `anneal`: `gamma`, a function of the progress u along the ladder (0 at the noise end, 1 at the data end), or of
      the time t if it is marked by `anneal.of_time` (see `Annealing`);
    - `on`: the input z of the function: `"prediction"` (E[x_0 | x_t]; token probabilities for discrete models),
      `"state"` (x_t itself), or `"mode"` (the most probable tokens);
    - `guidance`: how the proposal uses the gradient: `"none"`, `"gradient"` (through the network) or `"jacobian-free"`
      (the gradient at the prediction times the mean Jacobian of the network);
    - `decode`: the function gets `decode(z)`, such as the images of latents (`p.decode`);
    - `batch_size`: the largest number of rows that decode and function get at once;
    - `negligible`: gamma counts as 0 where it is below this share of its value at level 0, and the function is not
      called there. By default 0.01 with `guidance="none"`, and 0 with a gradient.

    The function returns a tensor, a NumPy array or a list, one number per row. Minus infinity is a hard constraint: it
    binds at level 0, and at noisier levels, where a prediction is not yet the end, it counts as -20 before annealing.

    >>> ladder = Ladder(torch.tensor([0.1, 1.0, 10.0]))
    >>> fading = Reward(lambda x: x[:, 0], anneal=anneal.of_time(lambda t: 1 / (1 + t)), scale=2.0)
    >>> [round(w, 2) for w in fading.weight(ladder.times, ladder).tolist()]
    [1.82, 1.0, 0.18]
    """

    function: Callable[[Tensor], Tensor]
    anneal: Annealing = field(default_factory=lambda: anneal.power(5))
    guidance: str = "none"
    on: str = "prediction"
    scale: float = 1.0
    name: str = "reward"
    decode: Callable[[Tensor], Tensor] | None = None
    batch_size: int | None = None
    negligible: float | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise InputError(f"a reward is a function of a batch, got {self.function!r}")
        if not callable(self.anneal):
            raise InputError(f"anneal must be a function such as anneal.power(5), got {self.anneal!r}")
        check_choice("guidance", self.guidance, GUIDANCE)
        check_choice("on", self.on, ("prediction", "state", "mode"))
        if not math.isfinite(self.scale):
            raise InputError(f"the scale of a reward must be finite, got {self.scale!r}")
        if self.decode is not None and not callable(self.decode):
            raise InputError(f"decode must be a function from states to images, such as p.decode, got {self.decode!r}")
        if self.batch_size is not None and (not isinstance(self.batch_size, int) or self.batch_size < 1):
            raise InputError(f"batch_size must be a positive number of rows, got {self.batch_size!r}")
        if self.negligible is not None and not 0 <= self.negligible < 1:
            raise InputError(f"negligible must be a share of at least 0 and below 1, got {self.negligible!r}")

    def weight(self, t: Tensor, ladder: Ladder) -> Tensor:
        """`scale * gamma` at each time, and exactly 0 where gamma is negligible."""
        gamma = self._gamma(t, ladder)
        least = self._least_share * abs(float(self._gamma(ladder.times[:1], ladder)))
        return self.scale * gamma.where(gamma.abs() >= least, 0.0)

    @property
    def _least_share(self) -> float:
        if self.negligible is None:
            return NEGLIGIBLE if self.guidance == "none" else 0.0
        return self.negligible

    def called_at(self, ladder: Ladder) -> Tensor:
        """Whether the function is called at each level."""
        return (self.weight(ladder.levels, ladder) != 0).expand(ladder.n_levels)

    def _gamma(self, t: Tensor, ladder: Ladder) -> Tensor:
        u = t if getattr(self.anneal, "of_time", False) else ladder.progress(t)
        return called(self.anneal, f"the annealing of reward {self.name!r}", u)

    def check_weight(self, ladder: Ladder) -> None:
        """Refuse an annealing that does not give one finite number per time of this ladder."""
        gamma = self._gamma(ladder.times, ladder)
        if not isinstance(gamma, Tensor) or gamma.shape not in ((), ladder.times.shape):
            got = f"shape {tuple(gamma.shape)}" if isinstance(gamma, Tensor) else repr(gamma)
            raise InputError(f"reward {self.name!r}: anneal must return a tensor with one number per time, got {got}")
        if not gamma.isfinite().all():
            first = float(ladder.times[~gamma.expand(ladder.times.shape).isfinite()][0])
            raise InputError(f"reward {self.name!r}: anneal must be finite on the ladder, but is not at t = {first:g}")


class RewardSum:
    """All rewards of a target, sorted by how the proposal uses their gradients: `gradient`, `free`, `blind`.

    Times may be on the CPU wherever states are. A reward that vanishes at some of them is called with other rows only,
    and which rows these are can be seen there without waiting for a device.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        guidance: str | None,
        ladder: Ladder,
        process: Process,
        coefficients: Coefficients,
    ):
        self.ladder, self.process, self.coefficients = ladder, process, coefficients
        self.differentiable: set[str] = set()
        styles: dict[str, list[Reward]] = {style: [] for style in GUIDANCE}
        for reward in rewards:
            style = guidance or reward.guidance
            if process.is_discrete and style != "none":
                raise InputError(f"reward {reward.name!r}: guidance {style!r} needs a Gaussian diffusion")
            if not process.is_discrete and reward.on == "mode":
                raise InputError(f"reward {reward.name!r}: on='mode' is for discrete models")
            reward.check_weight(ladder)
            styles[style].append(reward)
        self.rewards = tuple(rewards)
        # Rows are picked only for rewards that vanish somewhere.
        self._fading = {r.name for r in rewards if not bool((r.weight(ladder.times, ladder) != 0).all())}
        self.blind, self.gradient, self.free = (styles[style] for style in GUIDANCE)
        self.through_networks = any(r.on == "prediction" for r in self.gradient)
        """Whether the networks must be differentiated."""
        self.on_predictions = any(r.on != "state" for r in rewards)
        """Whether some reward looks at what the networks predict."""

    def value(self, rewards: list[Reward], x: Tensor, t: Tensor, predictions: tuple[Tensor, ...]) -> Tensor:
        """`sum_i scale_i gamma_i r_i` of some of the rewards, in the dtype of works."""
        total = torch.zeros(len(x), dtype=real(x.device), device=x.device)
        for reward in rewards:
            total = total + self._annealed(reward, self._shown(reward, x, t, predictions), t)
        return total

    def value_and_gradient(self, x: Tensor, t: Tensor, predictions: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Of the rewards with `guidance="gradient"`, in x, through the networks that made the predictions from x."""
        if self.through_networks and not all(p.requires_grad for p in predictions):
            j = [p.requires_grad for p in predictions].index(False)
            raise InputError(
                f'guidance="gradient" differentiates the models, but the prediction of model {j} has no gradient (is'
                ' there torch.no_grad, .detach or numpy inside?); use guidance="jacobian-free" or "none"'
            )
        with torch.enable_grad():
            r = self.value(self.gradient, x, t, predictions)
            gradient = _gradient(r, x)
        return r.detach(), gradient

    def jacobian_free(self, x: Tensor, t: Tensor, predictions: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Of the rewards with `guidance="jacobian-free"`: the networks' Jacobian is replaced by its mean."""
        value = torch.zeros(len(x), dtype=real(x.device), device=x.device)
        guidance = torch.zeros_like(x)
        for reward in self.free:
            with torch.enable_grad():
                shown = self._shown(reward, x, t, predictions).detach().requires_grad_()
                r = self._annealed(reward, shown, t)
                g = _gradient(r, shown)
            value = value + r.detach()
            if reward.on != "state":
                g = self.process.pull_back(g, t.to(x.device, value.dtype), self.coefficients)
            guidance = guidance + g
        return value, guidance

    def _shown(self, reward: Reward, x: Tensor, t: Tensor, predictions: tuple[Tensor, ...]) -> Tensor:
        if reward.on == "state":
            return x
        t = t.to(x.device, real(x.device))
        if reward.on == "mode":
            assert isinstance(self.process, Discrete)
            return self.process.mode(x, t, predictions, self.coefficients)
        return self.process.expectation(x, t, predictions, self.coefficients)

    def n_rows(self, rewards: list[Reward], t: Tensor) -> int:
        """How many rows of these times the rewards are called with, whichever process calls them."""
        fading = [int((r.weight(t, self.ladder) != 0).expand(len(t)).sum()) for r in rewards if r.name in self._fading]
        return sum(fading) + len(t) * (len(rewards) - len(fading))

    def __str__(self) -> str:
        """At how many levels each reward is called."""
        n = [(r.name, int(r.called_at(self.ladder).sum())) for r in self.rewards]
        return ", ".join(f"reward {name!r} is called at {k} of {self.ladder.n_levels} levels" for name, k in n)

    def _annealed(self, reward: Reward, shown: Tensor, t: Tensor) -> Tensor:
        weight, device = reward.weight(t, self.ladder).expand(len(shown)), shown.device
        here = weight.to(device, real(device))
        if reward.name not in self._fading:
            return _weighted(here, self._bound(reward, self._values(reward, shown), t))
        at = (weight != 0).nonzero()[:, 0]
        rows, total = at.to(device), torch.zeros_like(here)
        if not len(rows):
            return total
        values = self._bound(reward, self._values(reward, shown.index_select(0, rows)), t.expand(len(shown))[at])
        return total.index_add(0, rows, _weighted(here[rows], values))

    def _bound(self, reward: Reward, r: Tensor, t: Tensor) -> Tensor:
        """Values in which minus infinity stands at level 0 alone, where constraints bind.

        Above it a prediction does not tell where a state will end. If states that are forbidden there were lost, so
        would be all paths through them to states that are allowed: particles, which have no way back, would miss these.
        """
        binds = (t <= self.ladder.times[0]).expand(len(r)).to(r.device)
        return r.where(binds | (r != -torch.inf), FORBIDDEN / (reward.scale or 1.0))

    def _values(self, reward: Reward, shown: Tensor) -> Tensor:
        """The reward of each row, by batches of the reward's own size."""
        parts = [self._batch(reward, z) for z in shown.split(reward.batch_size or max(1, len(shown)))]
        r = parts[0] if len(parts) == 1 else torch.cat(parts)
        if shown.requires_grad and reward.name not in self.differentiable:
            if not _depends(r, shown):
                raise _not_differentiable(reward)
            self.differentiable.add(reward.name)
        return r

    def _batch(self, reward: Reward, shown: Tensor) -> Tensor:
        def function(z: Tensor) -> object:
            return reward.function(z if reward.decode is None else _decoded(reward, z))

        try:
            r = as_values(called(function, f"reward {reward.name!r}", shown), shown)
        except RuntimeError as error:
            if shown.requires_grad and "requires grad" in str(error):  # torch's words for numpy() of such a tensor
                raise _not_differentiable(reward) from error
            raise
        if not isinstance(r, Tensor) or r.shape != (len(shown),):
            got = f"shape {tuple(r.shape)}" if isinstance(r, Tensor) else repr(type(r).__name__)
            raise InputError(f"reward {reward.name!r} must return one number per row, shape ({len(shown)},); got {got}")
        if r.is_complex():
            raise InputError(f"reward {reward.name!r} must return real numbers, got {r.dtype}")
        return r


def _decoded(reward: Reward, z: Tensor) -> Tensor:
    assert reward.decode is not None
    out = reward.decode(z)
    if not isinstance(out, Tensor) or not out.ndim or len(out) != len(z):
        got = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"an object of type {type(out).__name__!r}"
        raise InputError(
            f"decode of reward {reward.name!r} must return a tensor with a row for each of {len(z)}, got {got}"
        )
    return out


def as_values(out: object, like: Tensor) -> object:
    """A tensor on the device of `like` from what a reward may return: a tensor, an array, or a list of numbers."""
    if isinstance(out, (list, tuple)) and out and all(isinstance(z, Tensor) and z.numel() == 1 for z in out):
        return torch.stack([z.reshape(()) for z in out]).to(like.device)
    if isinstance(out, (list, tuple, np.ndarray)) and not np.iscomplexobj(out):
        try:
            return torch.as_tensor(np.asarray(out, dtype=np.float64)).to(real(like.device)).to(like.device)
        except (TypeError, ValueError):
            return out
    return out.to(like.device) if isinstance(out, Tensor) else out


def _weighted(weight: Tensor, r: Tensor) -> Tensor:
    r = r.to(weight.dtype)
    # A constraint that is annealed away does not bind: 0 times minus infinity is 0 here.
    return (weight * r).where((weight != 0) | r.isfinite(), 0.0)


def _gradient(r: Tensor, x: Tensor) -> Tensor:
    """Of the sum of r in x; zero where no reward was called."""
    return torch.autograd.grad(r.sum(), x)[0] if r.requires_grad else torch.zeros_like(x)


def _depends(value: Tensor, source: Tensor) -> bool:
    """Whether a gradient can flow from a value to its source on some way without a flat operation."""
    end = torch.autograd.graph.get_gradient_edge(source).node
    ways, seen = [value.grad_fn], set()
    while ways:
        node = ways.pop()
        if node is None or node in seen:
            continue
        if node is end:
            return True
        seen.add(node)
        if not node.name().startswith(FLAT):
            ways.extend(following for following, _ in node.next_functions)
    return False


def _not_differentiable(reward: Reward) -> InputError:
    return InputError(
        f"reward {reward.name!r} cannot be differentiated (is there numpy, .detach or round inside?):"
        ' use guidance="none", which needs no gradient'
    )
