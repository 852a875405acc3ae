"""What the core needs of a pretrained model, and two wrappers that make a model out of a function.

Gaussian   D(y, sigma)   = E[x_0 | y]                       same shape as y
discrete   log p(x, t)   = log P(x_0^i = v | x_t = x)       shape of x, then V
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from crepe_diffusion.errors import InputError, check_choice
from crepe_diffusion.models.conditions import Condition, Each, check_condition, for_rows, map_leaves, structure
from crepe_diffusion.models.networks import as_tensor, device_of, identity
from crepe_diffusion.processes import Gaussian, Masked, Process, Uniform

if TYPE_CHECKING:
    from crepe_diffusion.targets import Target

__all__ = ["Denoiser", "Model", "TokenModel"]


class Model(ABC):
    """A pretrained diffusion: one factor of a target. Powers and products of models are targets.

    A model of your own has

    - `event_shape`, the shape of one state, without the batch axis;
    - `dtype`, the dtype of its states, `torch.float32` or `torch.float64` (states of discrete models are integers, and
      `dtype` is that of the time that the network gets);
    - `predict(x, t)`: one prediction per row. `x` is (rows, *event_shape), `t` is (rows,) and differs between rows. A
      Gaussian model returns `E[x_0 | x_t]` in the variance-exploding coordinate (`x_t = x_0 + t * noise`), with the
      shape, dtype and device of x; a discrete model returns `log P(x_0^i = v | x_t)`, shape (*x.shape, V). A row of the
      result depends on the same row of x and t, and on nothing else; repeated calls give equal results;
    - `process()`: the noising process that it was trained on;
    - `device`, where its states live; by default where the parameters of its network are.

    If several models share one network, `network`, `predict_together` and `rows_together` make it one call; a function
    that gets its condition as an argument needs only `Denoiser` or `TokenModel`.

    >>> class Shrink(Model):                                                     # the denoiser of N(0, 1) data
    ...     event_shape, dtype = (2,), torch.float64
    ...     def predict(self, x, t):
    ...         return x / (1 + t[:, None] ** 2)
    ...     def process(self):
    ...         return Gaussian()
    >>> (Shrink() ** 2.0).exponents
    (2.0,)
    """

    event_shape: tuple[int, ...]
    dtype: torch.dtype
    network_rows: int = 1
    """How many rows of its network one state costs."""
    sigma_range: tuple[float, float] | None = None
    """The noise of a Gaussian model from nearly none to nearly nothing else, where it is known: a ladder's ends."""

    @property
    def device(self) -> torch.device:
        """Where its states live: the device of its network's parameters, or the CPU if it has none."""
        return device_of(self)

    @abstractmethod
    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        """One prediction per row of x, at the time of that row."""

    @abstractmethod
    def process(self) -> Process:
        """The process that this model was trained on, with the kernels that suit it best."""

    @property
    def n_conditions(self) -> int:
        """How many conditions its chains have: 1 if all have the same."""
        return 1

    def at_rows(self, which: Tensor) -> Model:
        """The same model for rows of which each has the condition of this number, (rows,)."""
        return self

    @property
    def network(self) -> Hashable:
        """Models with equal values are evaluated in one call of `predict_together`."""
        return id(self)

    def predict_together(self, models: Sequence[Model], x: Tensor, t: Tensor) -> list[Tensor]:
        """One prediction per model, for models whose `network` equals that of this one."""
        return [model.predict(x, t) for model in models]

    def rows_together(self, models: Sequence[Model]) -> int:
        """How many network rows one state costs `predict_together`."""
        return sum(model.network_rows for model in models)

    def as_target(self) -> Target:
        from crepe_diffusion.targets import Target

        return Target(((self, 1.0),))

    def __pow__(self, exponent: float) -> Target:
        return self.as_target() ** exponent

    def __mul__(self, other: Model | Target) -> Target:
        return self.as_target() * other

    def tilt(self, reward: Callable[[Tensor], Tensor], **options: Any) -> Target:
        """See `Target.tilt`."""
        return self.as_target().tilt(reward, **options)


class _Wrapped(Model):
    """A function `f(x, t)` or, with a condition, `f(x, t, condition)`."""

    def __init__(
        self,
        function: Callable[..., Tensor],
        event_shape: Sequence[int],
        condition: Condition | Each | None,
        network: object,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ):
        if not callable(function):
            raise InputError(f"a model wraps a function of (x, t), got {function!r}")
        if condition is not None:
            check_condition(condition)
        elif network is not None:
            raise InputError("network= is for models that differ in their condition: give condition= as well")
        check_arguments(function, 2 if condition is None else 3)
        if dtype not in (torch.float32, torch.float64):
            raise InputError(
                f"dtype must be torch.float32 or torch.float64, got {dtype!r}; a network of lower precision casts"
                " inside of the function"
            )
        self.function = function
        self.event_shape = checked_event(event_shape)
        self.condition = condition
        self.dtype = dtype
        self._device = None if device is None else torch.device(device)
        self._network = function if network is None else network
        self.which: Tensor | None = None

    @property
    def n_conditions(self) -> int:
        return len(self.condition.conditions) if isinstance(self.condition, Each) else 1

    def at_rows(self, which: Tensor) -> Model:
        if self.n_conditions == 1:
            return self
        bound = copy(self)
        bound.which = which
        return bound

    @property
    def device(self) -> torch.device:
        return device_of(self.function) if self._device is None else self._device

    @property
    def network(self) -> Hashable:
        return (identity(self._network), structure(self.condition))

    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        return self.predict_together([self], x, t)[0]

    def predict_together(self, models: Sequence[Model], x: Tensor, t: Tensor) -> list[Tensor]:
        t = t.to(x.dtype if x.dtype.is_floating_point else self.dtype)
        if self.condition is None:  # the models are equal, so one prediction serves them all
            return [as_tensor(self.function(x, t), "the function of a model")] * len(models)
        n = len(models)
        each = [for_rows(m.condition, m.which, x) for m in models]  # type: ignore[attr-defined]
        batch = map_leaves(lambda *leaves: torch.cat(leaves), *each)
        out = self.function(x.repeat(n, *[1] * (x.ndim - 1)), t.repeat(n), batch)
        return list(as_tensor(out, "the function of a model").chunk(n))

    def rows_together(self, models: Sequence[Model]) -> int:
        return 1 if self.condition is None else len(models)


def check_arguments(function: Callable[..., Any], n: int) -> None:
    """Refuse a function that does not take (x, t), or (x, t, condition), as far as its signature tells."""
    try:
        takes = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        takes.bind(*[None] * n)
    except TypeError:
        needed = ("x", "t", "condition")[:n]
        raise InputError(f"a model is called with ({', '.join(needed)}), but its function takes {takes}") from None


def checked_event(event_shape: object) -> tuple[int, ...]:
    """The shape of one state as a tuple of positive integers."""
    if isinstance(event_shape, dict):
        raise InputError(
            f"a state is one tensor, got a dictionary with keys {sorted(map(str, event_shape))} as event_shape: join"
            " its tensors in one, and take them apart inside of the function"
        )
    sizes = tuple(event_shape) if isinstance(event_shape, Sequence) and not isinstance(event_shape, str) else ()
    if not sizes or not all(isinstance(n, Integral) and int(n) > 0 for n in sizes):
        raise InputError(f"event_shape must be a tuple of positive integers, such as (3, 64, 64), got {event_shape!r}")
    return tuple(int(n) for n in sizes)


class Denoiser(_Wrapped):
    """A Gaussian diffusion given by its denoiser `D(y, sigma)`, or `D(y, sigma, condition)`.

    `condition` is a tensor (a class label, an embedding), or a tuple or dictionary of tensors, without a batch axis, or
    `Each` of several, one for each chain. The function gets it with one row per state.

    Models of the same network with different conditions are evaluated in one call. Two functions are the same network
    if they are the same object, bound methods of the same object, `functools.partial` of the same things, or closures
    with the same code and contents. For everything else, give both models the same object as `network`: their functions
    must then compute the same from (y, sigma, condition).

    States live where the parameters of the network are; `device` says so for a function that has none.
    `sigma_range` is the noise on which the network was trained; `cd.sample` takes its ladder from it.

    >>> model = Denoiser(lambda y, sigma: y / (1 + sigma[:, None] ** 2), event_shape=(3,))   # N(0, 1) data
    >>> model.predict(torch.ones(1, 3), torch.ones(1)).tolist()
    [[0.5, 0.5, 0.5]]
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        event_shape: Sequence[int],
        *,
        condition: Condition | Each | None = None,
        network: object = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        process: Process | None = None,
        sigma_range: tuple[float, float] | None = None,
    ):
        super().__init__(function, event_shape, condition, network, dtype, device)
        self._process = process or Gaussian()
        self.sigma_range = None if sigma_range is None else _checked_range(sigma_range)

    def process(self) -> Process:
        return self._process


def _checked_range(sigma_range: Sequence[float]) -> tuple[float, float]:
    try:
        low, high = (float(sigma) for sigma in sigma_range)
    except (TypeError, ValueError):
        low, high = math.nan, math.nan
    if not 0 < low < high < math.inf:
        raise InputError(f"sigma_range must be two noise levels, 0 < low < high, got {sigma_range!r}")
    return low, high


def check_prompt(prompt: Tensor | None, event_shape: tuple[int, ...]) -> None:
    """A prompt has one number per position: a token where the position is frozen, -1 where it is free.

    Several prompts, one for each chain, have a first axis more.
    """
    if prompt is None:
        return
    if not isinstance(prompt, Tensor) or prompt.dtype.is_floating_point or prompt.dtype == torch.bool:
        got = f"a tensor of {prompt.dtype}" if isinstance(prompt, Tensor) else repr(prompt)
        raise InputError(f"a prompt is a tensor of integers, a token or -1 for each position, got {got}")
    if tuple(prompt.shape) != event_shape and tuple(prompt.shape[1:]) != event_shape:
        raise InputError(f"a prompt needs the shape of the event {event_shape}, got {tuple(prompt.shape)}")


class TokenModel(_Wrapped):
    """A discrete diffusion given by `log P(x_0^i = v | x_t)`, as `f(tokens, t)` or `f(tokens, t, condition)`.

    `kind` is the noising process, `"masked"` or `"uniform"`; the mask is token `mask_id`, by default `vocab_size`, and
    predictions of a mask below `vocab_size` are minus infinity; `prompt` freezes positions; `condition`, `network` and
    `device` are those of `Denoiser`.

    >>> model = TokenModel(lambda x, t: torch.zeros(*x.shape, 4).log_softmax(-1), event_shape=(2,), vocab_size=4)
    >>> model.predict(torch.tensor([[4, 4]]), torch.ones(1)).exp()[0, 0].tolist()
    [0.25, 0.25, 0.25, 0.25]
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        event_shape: Sequence[int],
        vocab_size: int,
        kind: str = "masked",
        *,
        mask_id: int | None = None,
        prompt: Tensor | None = None,
        condition: Condition | Each | None = None,
        network: object = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ):
        check_choice("kind", kind, ("masked", "uniform"))
        super().__init__(function, event_shape, condition, network, dtype, device)
        check_prompt(prompt, self.event_shape)
        if kind == "uniform" and mask_id is not None:
            raise InputError(f"the uniform process has no mask, got mask_id {mask_id!r}")
        self._process: Masked | Uniform = (
            Masked(vocab_size, prompt, mask_id=mask_id) if kind == "masked" else Uniform(vocab_size, prompt)
        )

    def process(self) -> Process:
        return self._process
