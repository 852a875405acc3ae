"""One picture: what the network draws by itself, with guidance, and with a wish."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

import crepe_diffusion as cd
from studies.images import pictures
from studies.images.data import CLASSES
from studies.images.model import Painter
from studies.images.trained import SCALE, SIZES, pixels
from studies.images.wishes import WISHES

__all__ = ["gallery"]


def gallery(painters: Sequence[Painter], path: Path, n_chains: int = 4, n_iterations: int = 12, seed: int = 0) -> Path:
    """Draws of replica exchange: of one class, guided, and with each wish; for one network after the other.

    Each row shows the same chains three times, `n_iterations` apart.
    """
    rows = {}
    for painter in painters:
        first = WISHES[painter.images][0].label
        name = CLASSES[painter.images][first]
        targets = {
            f"{name}, no guidance": painter.conditional(first),
            f"guided by {SCALE}, debiased": painter.guided(first, SCALE),
            **{wish.text: wish.tilt(painter.conditional(wish.label), painter) for wish in WISHES[painter.images]},
        }
        for text, target in targets.items():
            setting = SIZES[painter.size].setting(painter, target, 0)
            chain = cd.ReplicaExchange(target, setting.ladder(8), n_chains=n_chains, process=setting.process, seed=seed)
            shown = []
            for _ in range(3):
                for _ in range(n_iterations):
                    chain.step()
                shown.append(pixels(chain.output()))
            rows[text if text not in rows else f"{text}, {painter.name}"] = np.concatenate(shown)
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures.rows_of_images(rows).savefig(path, dpi=110, bbox_inches="tight")
    return path
