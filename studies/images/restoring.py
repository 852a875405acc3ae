"""Posteriors with a trained network: which images may it have been, of which half or a blurred copy was seen?

    p(x) N(seen; H E[x_0 | x], noise^2)         H shows the upper half, or a blurred image of half the size

The hidden image is a test image, so a draw can be compared with it; the truth about the posterior is known in storey 1
alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

import crepe_diffusion as cd
from studies.images.methods import Method, Setting, families, piloted, plain, smc
from studies.images.model import Painter
from studies.images.problems import SIGMA_MIN, blurred, half, widened
from studies.images.trained import N_FINISH, by_weight, pixels
from studies.shared.results import Results

__all__ = ["OPERATORS", "observation", "restore"]

OPERATORS: dict[str, Callable[[int], Tensor]] = {"inpainting": half, "deblurring": blurred}
METHODS: dict[str, Method] = {"plain guidance": plain, "RNE-SMC": smc(cd.PathWork()), "CREPE": piloted(16)}
NOISE = 0.3
CLASSES = {"mnist": (2, 5), "fashion": (7, 9)}


def observation(painter: Painter, label: int, what: str) -> tuple[cd.Target, Tensor, Tensor, Tensor]:
    """The posterior of a test image of this class; the image, the operator and what is seen of it."""
    if painter.examples is None:
        raise cd.InputError(f"the file of {painter.name!r} has no test images; `ship` writes them")
    hidden, operator = painter.examples[label], OPERATORS[what](painter.size).float()
    noise = cd.Stream(label).at("noise", what).normal((len(operator),)).float()
    seen = operator @ hidden.flatten() + NOISE * noise

    def reward(x: Tensor) -> Tensor:
        return -0.5 * (x.flatten(1) @ operator.T.to(x) - seen.to(x)).square().sum(1) / NOISE**2

    anneal = cd.anneal.of_time(widened(NOISE))
    return painter.models[-1].tilt(reward, guidance="gradient", anneal=anneal), hidden, operator, seen


def restore(
    painter: Painter, results: Results, n_steps: int = 48, n_walks: int = 32, n: int = 8, seed: int = 0
) -> Iterator[str]:
    """Two images, both operators, all methods at equal rows; yields the name of each result.

    `misfit` is the squared distance to what was seen, per pixel of it and in units of its noise: about 1 for draws of
    the posterior. `error` is that of the mean of the draws, and `variance` what the draws expect it to be, both per
    pixel of the image and in units of the hidden image's own squares: equal on average, if the draws are right.
    """
    for label in CLASSES[painter.images]:
        for what in OPERATORS:
            name = f"restored {painter.name} class {label} {what} seed {seed}"
            if name in results:
                continue
            target, hidden, operator, seen = observation(painter, label, what)
            setting = Setting(
                SIGMA_MIN, 20.0, n_steps, n_walks * (n_steps + 1 + N_FINISH), painter.process(target), N_FINISH
            )
            found: dict[str, dict[str, Any]] = {}
            shown = {"hidden": pixels(hidden[None]), "seen": pixels(as_image(seen, what, painter.size)[None])}
            for key, method in METHODS.items():
                began = time.process_time()
                out = method(target, setting, seed)
                cost = {"rows": out.evaluations.rows, "seconds": time.process_time() - began, "families": families(out)}
                found[key] = judged(out, hidden, operator, seen) | cost
                with torch.no_grad():
                    of_class = painter.classifier(out.x.float())[:, label].exp().double()
                found[key]["class"] = float(out.weights.double() @ of_class)
                shown[key] = pixels(by_weight(out, n, seed))
            results.save(name, {"class": label, "what": what, "seed": seed, "found": found}, **shown)
            yield name


def judged(out: cd.Result, hidden: Tensor, operator: Tensor, seen: Tensor) -> dict[str, float]:
    x, w, truth = out.x.flatten(1).double(), out.weights.double(), hidden.flatten().double()
    mean = w @ x
    scale = float(truth.var(correction=0))
    return {
        "misfit": float(w @ (x @ operator.T.double() - seen.double()).square().mean(1)) / NOISE**2,
        "error": float((mean - truth).square().mean()) / scale,
        "variance": float(w @ (x - mean).square().mean(1)) / scale,
    }


def as_image(seen: Tensor, what: str, size: int) -> Tensor:
    """(1, size, size): what is not seen is grey, and what is small is enlarged."""
    if what == "inpainting":
        rows = seen.reshape(1, -1, size)
        return torch.cat([rows, torch.zeros(1, size - rows.shape[1], size)], 1)
    small = seen.reshape(1, size // 2, size // 2)
    return small.repeat_interleave(2, 1).repeat_interleave(2, 2)


def rows_of(results: Results, names: list[str], n: int) -> dict[str, np.ndarray]:
    """One row of images for each method: of every result the hidden image, what was seen, and draws."""
    rows: dict[str, list[np.ndarray]] = {}
    for name in names:
        arrays = results.arrays(name)
        for method in METHODS:
            parts = [arrays["hidden"], arrays["seen"], arrays[method][:n]]
            rows.setdefault(method, []).append(np.concatenate(parts))
    return {method: np.concatenate(parts) for method, parts in rows.items()}
