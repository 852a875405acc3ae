"""What the core needs of a pretrained model, and the two wrappers that make one out of a function.

Gaussian   D(y, sigma)   = E[x_0 | y]                       same shape as y
discrete   log p(x, t)   = log P(x_0^i = v | x_t = x)       shape of x, then V
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from crepe_diffusion.errors import InputError, check_choice
from crepe_diffusion.processes import Gaussian, Masked, Process, Uniform

if TYPE_CHECKING:
    from crepe_diffusion.targets import Target

__all__ = ["Denoiser", "Model", "TokenModel"]


class Model(ABC):
    """A pretrained diffusion: one factor of a target. Powers and products of models are targets."""

    event_shape: tuple[int, ...]
    dtype: torch.dtype
    network_rows: int = 1
    """How many rows of its network one event costs."""

    @abstractmethod
    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        """The prediction for each row of x at its own time."""

    @abstractmethod
    def process(self) -> Process:
        """The process this model was trained on, with the kernels that suit it best."""

    @property
    def network(self) -> Hashable:
        """Models with equal values are evaluated in one batch."""
        return id(self)

    def predict_together(self, models: Sequence[Model], x: Tensor, t: Tensor) -> list[Tensor]:
        """Predictions of several models that share this one's network, in one call where possible."""
        return [model.predict(x, t) for model in models]

    def rows_together(self, models: Sequence[Model]) -> int:
        """How many network rows one event costs them all."""
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
        condition: Tensor | None,
        dtype: torch.dtype,
    ):
        if not callable(function):
            raise InputError(f"a model wraps a function of (x, t), got {function!r}")
        self.function = function
        self.event_shape = tuple(int(n) for n in event_shape)
        self.condition = condition
        self.dtype = dtype

    @property
    def network(self) -> Hashable:
        return (id(self.function), self.condition is None)

    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        return self.predict_together([self], x, t)[0]

    def predict_together(self, models: Sequence[Model], x: Tensor, t: Tensor) -> list[Tensor]:
        if self.condition is None:  # equal models, so one call serves them all
            return [self.function(x, t.to(self._time_dtype(x)))] * len(models)
        n = len(models)
        conditions = [m.condition.to(x.device).expand(len(x), *m.condition.shape) for m in models]  # type: ignore[attr-defined]
        out = self.function(
            x.repeat(n, *[1] * (x.ndim - 1)), t.to(self._time_dtype(x)).repeat(n), torch.cat(conditions)
        )
        return list(out.chunk(n))

    def rows_together(self, models: Sequence[Model]) -> int:
        return 1 if self.condition is None else len(models)

    def _time_dtype(self, x: Tensor) -> torch.dtype:
        return x.dtype if x.dtype.is_floating_point else self.dtype


class Denoiser(_Wrapped):
    """A Gaussian diffusion given by its denoiser `D(y, sigma)`, or `D(y, sigma, condition)`.

    `condition` is a tensor without a batch axis (a class label, an embedding); models that wrap the same function
    with different conditions are evaluated in one batch.

    >>> model = Denoiser(lambda y, sigma: y / (1 + sigma[:, None] ** 2), event_shape=(3,))   # N(0, 1) data
    >>> model.predict(torch.ones(1, 3), torch.ones(1)).tolist()
    [[0.5, 0.5, 0.5]]
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        event_shape: Sequence[int],
        *,
        condition: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        process: Process | None = None,
    ):
        super().__init__(function, event_shape, condition, dtype)
        self._process = process or Gaussian()

    def process(self) -> Process:
        return self._process


def check_prompt(prompt: Tensor | None, event_shape: tuple[int, ...]) -> None:
    """A prompt says of every position whether it is frozen (a token) or free (-1)."""
    if prompt is not None and tuple(prompt.shape) != event_shape:
        raise InputError(f"a prompt needs the shape of the event {event_shape}, got {tuple(prompt.shape)}")


class TokenModel(_Wrapped):
    """A discrete diffusion given by `log P(x_0^i = v | x_t)`, as `f(tokens, t)` or `f(tokens, t, condition)`."""

    def __init__(
        self,
        function: Callable[..., Tensor],
        event_shape: Sequence[int],
        vocab_size: int,
        kind: str = "masked",
        *,
        prompt: Tensor | None = None,
        condition: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        check_choice("kind", kind, ("masked", "uniform"))
        super().__init__(function, event_shape, condition, dtype)
        check_prompt(prompt, self.event_shape)
        self._process = Masked(vocab_size, prompt) if kind == "masked" else Uniform(vocab_size, prompt)

    def process(self) -> Process:
        return self._process
