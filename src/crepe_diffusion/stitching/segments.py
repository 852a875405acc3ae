"""Several independent copies of one model in one state, which a reward couples."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from crepe_diffusion.errors import InputError
from crepe_diffusion.models import Model
from crepe_diffusion.processes import Process

__all__ = ["Segments"]


class Segments(Model):
    """`n` independent copies of a model: the event gets a leading segment axis, and log-densities sum over it.

    A reward then couples the segments (trajectory stitching). One state costs `n` network rows.

    >>> from crepe_diffusion.models import GaussianMixture
    >>> Segments(GaussianMixture(weights=[1.0], means=[[0.0, 0.0]], stds=[1.0]), 3).event_shape
    (3, 2)
    """

    def __init__(self, model: Model, n: int):
        if int(n) != n or n < 1:
            raise InputError(f"the number of segments must be a positive integer, got {n!r}")
        self.model, self.n = model, int(n)
        self.event_shape = (self.n, *model.event_shape)
        self.dtype = model.dtype
        self.network_rows = self.n * model.network_rows

    @property
    def device(self) -> torch.device:
        return self.model.device

    def process(self) -> Process:
        """The process of the model, with its axes after the segment axis and its measurements repeated along it."""
        return self.model.process().repeated(self.n)

    @property
    def network(self) -> Hashable:
        return ("segments", self.n, self.model.network)

    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        return self.predict_together([self], x, t)[0]

    def predict_together(self, models: Sequence[Model], x: Tensor, t: Tensor) -> list[Tensor]:
        inner = [m.model for m in models]  # type: ignore[attr-defined]
        out = self.model.predict_together(inner, x.flatten(0, 1), t.repeat_interleave(self.n))
        return [p.reshape(len(x), self.n, *p.shape[1:]) for p in out]

    def rows_together(self, models: Sequence[Model]) -> int:
        return self.n * self.model.rows_together([m.model for m in models])  # type: ignore[attr-defined]
