"""One picture: what the network draws by itself, with guidance, and with a wish."""

from __future__ import annotations

from pathlib import Path

import crepe_diffusion as cd
from studies.images import pictures
from studies.images.model import Painter
from studies.images.trained import SCALE, Sizes, pixels
from studies.images.wishes import WISHES

__all__ = ["gallery"]


def gallery(painter: Painter, path: Path, sizes: Sizes | None = None, n: int = 12, seed: int = 0) -> Path:
    """Draws of plain sampling and of replica exchange: guided, and with each wish."""
    sizes = sizes or Sizes(n_iterations=24)
    first = WISHES[painter.images][0].label
    targets = {
        "no guidance": painter.conditional(first),
        f"guided by {SCALE}, debiased": painter.guided(first, SCALE),
        **{wish.text: wish.tilt(painter.conditional(wish.label), painter) for wish in WISHES[painter.images]},
    }
    rows = {}
    for name, target in targets.items():
        setting = sizes.setting(painter, target, 0)
        chain = cd.ReplicaExchange(target, setting.ladder(8), n_chains=n, process=setting.process, seed=seed)
        for _ in range(sizes.n_iterations):
            chain.step()
        rows[name] = pixels(chain.output())
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures.rows_of_images(rows).savefig(path, dpi=110)
    return path
