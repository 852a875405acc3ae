"""The shipped network as an experiment: guided images with wishes, from a file (`seven.toml`) to a report."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.run import Experiment
from studies.images.model import load_painter
from studies.images.wishes import MEASURES, Wish

__all__ = ["painting"]


def painting(weights: str = "mnist-14", label: int = 7, scale: float = 1.0) -> Experiment:
    """Images of one class, guided by `scale`; a `[[reward]]` of kind `wish` has a strength and signs of measures."""
    painter = load_painter(weights)
    n_classes = len(painter.models) - 1
    if not 0 <= label < n_classes:
        raise cd.InputError(f"label must be between 0 and {n_classes - 1}, got {label}")
    target = painter.conditional(label) if scale == 1 else painter.guided(label, scale)

    class Wanted:
        def __init__(
            self, ink: float = 0.0, thick: float = 0.0, left: float = 0.0, wide: float = 0.0, strength: float = 3.0
        ):
            signs = {"ink": ink, "thick": thick, "left": left, "wide": wide}
            self.reward = Wish("", label, {k: v for k, v in signs.items() if v}, strength=strength).reward(painter)

        def __call__(self, x: Tensor) -> Tensor:
            return self.reward(x)

    def of_class(x: Tensor) -> Tensor:
        return painter.classifier(x.float())[:, label].double()

    scalars: dict[str, Any] = {name: measure for name, measure in MEASURES.items()}
    steps = {"kind": "karras", "n_levels": 5, "sigma_min": 0.02, "sigma_max": 20.0, "substeps": 8, "n_finish": 6}
    return Experiment(
        target,
        rewards={"wish": Wanted},
        scalars=scalars | {"class": of_class},
        defaults={"ladder": steps},
        process=painter.process(target),
        decode=lambda x: ((x + 1) / 2).clamp(0, 1),
    )
