"""Storey 2: a trained network. Guidance without its bias, wishes, a wish that cannot be fulfilled, a change of mind.

No truth is known here. Images are judged by the classifier (log-probability and accuracy of the wanted class), by the
Fréchet distance of its features to those of real images of the class, and by their variety within a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

import crepe_diffusion as cd
from studies.images.methods import Method, Setting, after_burn_in, crepe, gibbs, plain, runs_of, smc
from studies.images.model import Painter
from studies.images.problems import frechet_of_moments, moments_of
from studies.images.wishes import IMPOSSIBLE, WISHES, Wish
from studies.shared.results import Results

__all__ = ["SIZES", "Sizes", "guidance_table", "refine", "wish_curves"]

SCALE = 1.7
"""The strength of guidance in the paper's table; with wishes it is 1.3."""
SCALE_WITH_WISH = 1.3
N_FINISH = 6  # plain steps below level 0
N_SHOWN = 128  # draws that are kept of a run: the first are drawn, Inception sees all


@dataclass(frozen=True)
class Sizes:
    """Steps of a walk; samples of a run and images of a class in the table; iterations of a chain with a wish."""

    n_steps: int = 32
    n_samples: tuple[int, ...] = (8, 32, 128, 512)
    n_images: int = 512
    classes: tuple[int, ...] = (4,)
    n_iterations: int = 96
    n_chains: int = 4
    n_seeds: int = 3

    def setting(self, painter: Painter, target: cd.Target, n_states: int) -> Setting:
        return Setting(0.1, 20.0, self.n_steps, n_states, painter.process(target), N_FINISH)


SIZES = {14: Sizes(), 28: Sizes(n_iterations=24)}
"""What is measured by default; a row of 28 x 28 pixels costs four of 14 x 14."""


def judged(painter: Painter, label: int, x: Tensor, weights: Tensor, run: Tensor | None = None) -> dict[str, float]:
    """Of images that should be of this class: `spread` is the total variance of features relative to real images'.

    If `run` (rows,) tells to which run each belongs, `variety` is the same within runs: 1 for independent draws of the
    data, 0 for copies.
    """
    with torch.no_grad():
        features = torch.cat([painter.classifier.features(rows.float()) for rows in x.split(512)])
        log_p = painter.classifier.head(features).log_softmax(1).double()
    w, features = weights.double(), features.double()
    moments, real = moments_of(features, w), (painter.features[0][label], painter.features[1][label])
    scale = float(real[1].trace())
    found = {
        "log-probability": float(w @ log_p[:, label]),
        "accuracy": float(w @ (log_p.argmax(1) == label).double()),
        "frechet": frechet_of_moments(moments, real),
        "spread": float(moments[1].trace()) / scale,
    }
    return found if run is None else found | {"variety": variety(features, w, run) / scale}


def variety(features: Tensor, weights: Tensor, run: Tensor) -> float:
    """The total variance of features (rows, k) within runs, unbiased for equal weights; the mean over runs.

    >>> variety(torch.tensor([[0.0], [2.0], [5.0], [5.0]]), torch.full((4,), 0.25), torch.tensor([0, 0, 1, 1]))
    1.0
    """
    found = []
    for r in run.unique():
        x, w = features[run == r], weights[run == r]
        found.append(float(moments_of(x, w)[1].trace()) * len(x) / max(1, len(x) - 1))
    return sum(found) / len(found)


# -- the paper's table -------------------------------------------------------------------------------------


def table_methods(n: int, runs: int) -> dict[str, Method]:
    """One run of n particles, or one chain, each repeated `runs` times in one batch."""
    small = max(2, min(n // 2, 32))
    return {
        "plain CFG": plain,
        "FKC": smc(cd.FeynmanKac(), 4, n_batches=runs, pool="equal"),
        "RNE-SMC": smc(cd.PathWork(), 4, n_batches=runs, pool="equal"),
        "particle Gibbs": gibbs(small, 4, n_chains=runs),
        "CREPE": crepe(substeps=8, n_chains=runs),
    }


def guidance_table(painter: Painter, results: Results, sizes: Sizes) -> Iterator[str]:
    """For every number of samples, method, class and seed: what guided images are like.

    Small runs are repeated until all sizes are judged by as many images. The samples of plain guidance are independent,
    so a run of another size is another way to divide them, and they are drawn once; beside them, without guidance.
    The largest runs come first, with all seeds.
    """
    most = max(sizes.n_samples)
    for n, seed, label in product(sorted(sizes.n_samples, reverse=True), range(sizes.n_seeds), sizes.classes):
        name = f"guidance {painter.name} class {label} samples {n} seed {seed}"
        if name in results:
            continue
        target, runs = painter.guided(label, SCALE), max(1, sizes.n_images // n)
        setting = sizes.setting(painter, target, runs * n * (sizes.n_steps + 1 + N_FINISH))
        ways = {key: (target, method) for key, method in table_methods(n, runs).items()}
        if n == most:
            ways = {"no guidance": (painter.conditional(label), plain)} | ways
        else:
            del ways["plain CFG"]
        found: dict[str, dict[str, float]] = {}
        shown = {}
        for key, (wanted, method) in ways.items():
            began = time.process_time()
            out = method(wanted, replace(setting, process=painter.process(wanted)), seed)
            rows = float(out.evaluations.rows)
            cost = {"rows": rows, "seconds": time.process_time() - began, "images": float(len(out.x))}
            run = runs_of(out, n)
            found[key] = judged(painter, label, out.x, out.weights, run) | cost
            shown[key] = pixels(by_weight(out, N_SHOWN, seed))
            if isinstance(out, cd.Chains):
                x = after_burn_in(out)
                equal = torch.full((len(x),), 1 / len(x))
                cost |= {"images": float(len(x)), "round trips": float(out.diagnostics.round_trips())}
                found[f"{key}, burn-in dropped"] = judged(painter, label, x, equal, run[-len(x) :]) | cost
        record = {"samples": n, "runs": runs, "class": label, "seed": seed, "found": found}
        results.save(name, record, **(shown if seed == 0 or n == most else {}))
        yield name


def by_weight(out: cd.Result, n: int, seed: int) -> Tensor:
    """n draws, each taken with its weight."""
    return out.x[cd.Stream(seed).at("shown").categorical(out.weights.log().expand(n, -1))]


def pixels(x: Tensor) -> np.ndarray:
    """(n, size, size) bytes."""
    return ((x[:, 0] + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).numpy(force=True)


# -- wishes ------------------------------------------------------------------------------------------------


def wished(
    painter: Painter, base: cd.Target, wish: Wish, sizes: Sizes, seed: int
) -> tuple[cd.ReplicaExchange, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Chains with a wish; its reward, and the log-probability of the class, of images."""
    reward, setting = wish.reward(painter), sizes.setting(painter, base, 0)
    chain = cd.ReplicaExchange(
        wish.tilt(base, painter), setting.ladder(8), n_chains=sizes.n_chains, process=setting.process, seed=seed
    )

    def values(x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([reward(rows) for rows in x.split(512)]).double()

    def of_class(x: Tensor) -> Tensor:
        with torch.no_grad():
            return painter.classifier(x)[:, wish.label].double()

    return chain, values, of_class


def run_wish(painter: Painter, base: cd.Target, wish: Wish, sizes: Sizes, seed: int) -> tuple[dict[str, Any], Tensor]:
    """A chain with a wish: the reward of every draw and what the verdict says; SMC at the same rows beside it."""
    chain, values, of_class = wished(painter, base, wish, sizes, seed)
    out = chain.sample(sizes.n_iterations, progress=False)
    target, setting = chain.target, sizes.setting(painter, base, 0)
    n = out.evaluations.rows // len(target.models) // (sizes.n_steps + 1)
    particles = cd.SMC(target, setting.ladder(4), n_particles=n, process=setting.process, seed=seed).sample(
        progress=False
    )
    free = cd.Plain(base, setting.ladder(1), process=setting.process, seed=seed).sample(64, progress=False)
    half = out.chains[len(out.chains) // 2 :].flatten(0, 1)
    verdict = out.verdict({"reward": values, "class": of_class})
    record = {
        "wish": asdict(wish) | {"signs": dict(wish.signs)},
        "rows": [out.evaluations.rows, particles.evaluations.rows],
        "along": out.by_chain(values(out.x)).tolist(),
        "class along": out.by_chain(of_class(out.x)).tolist(),
        "without the wish": float(values(free.x).mean()),
        "smc": {
            "reward": float(particles.weights @ values(particles.x)),
            **judged(painter, wish.label, particles.x, particles.weights),
        },
        "crepe": {
            "reward": float(values(half).mean()),
            **judged(painter, wish.label, half, torch.full((len(half),), 1 / len(half))),
        },
        "verdict": str(verdict),
        "smc verdict": str(particles.verdict({"reward": values, "class": of_class})),
        "round trips": out.diagnostics.round_trips(),
        "barrier": out.diagnostics.barrier().value,
    }
    return record, out.chains


def wish_curves(painter: Painter, results: Results, sizes: Sizes, seed: int = 0) -> Iterator[str]:
    """Five wishes, alone and on top of guidance without its bias; and one that the class cannot fulfil."""
    for wish in (*WISHES[painter.images], IMPOSSIBLE[painter.images]):
        for kind, base in (
            ("alone", painter.conditional(wish.label)),
            ("guided", painter.guided(wish.label, SCALE_WITH_WISH)),
        ):
            name = f"wish {painter.name} {kind} {wish.text}"
            if name not in results:
                record, chains = run_wish(painter, base, wish, sizes, seed)
                every = max(1, len(chains) // 12)
                results.save(name, record | {"seed": seed}, chain=pixels(chains[::every, 0]), last=pixels(chains[-1]))
                yield name


def long_chains(painter: Painter, results: Results, sizes: Sizes, n_times: int = 8, seed: int = 0) -> Iterator[str]:
    """Does the verdict tell a wish that the class cannot fulfil from others, if chains are `n_times` as long?

    Beside the impossible wish: those of the same class.
    """
    impossible, wishes = IMPOSSIBLE[painter.images], WISHES[painter.images]
    for wish in (impossible, *(w for w in wishes if w.label == impossible.label)):
        name = f"long wish {painter.name} {wish.text}"
        if name in results:
            continue
        chain, values, of_class = wished(painter, painter.conditional(wish.label), wish, sizes, seed)
        began = time.process_time()
        out = chain.sample(n_times * sizes.n_iterations, progress=False)
        half = out.chains[len(out.chains) // 2 :].flatten(0, 1)
        verdict = out.verdict({"reward": values, "class": of_class})
        record = {
            "wish": wish.text,
            "reward": float(values(half).mean()) / wish.strength,
            "accuracy": judged(painter, wish.label, half, torch.full((len(half),), 1 / len(half)))["accuracy"],
            "iterations": len(out.chains),
            "round trips": out.diagnostics.round_trips(),
            "verdict": verdict.level,
            "reasons": verdict.reasons,
            "seconds": time.process_time() - began,
            "seed": seed,
        }
        results.save(name, record, last=pixels(out.chains[-1]))
        yield name


def refine(
    painter: Painter,
    results: Results,
    sizes: Sizes,
    advance: Callable[[], object] = lambda: None,
    seed: int = 0,
) -> str:
    """A chain whose wish is turned round half-way; nothing starts again."""
    first = WISHES[painter.images][0] if WISHES[painter.images][0].signs else WISHES[painter.images][1]
    second = Wish(f"the opposite of {first.text}", first.label, {k: -v for k, v in first.signs.items()})
    base = painter.conditional(first.label)
    setting = sizes.setting(painter, base, 0)
    chain = cd.ReplicaExchange(
        first.tilt(base, painter),
        setting.ladder(8),
        n_chains=2 * sizes.n_chains,
        process=setting.process,
        seed=seed,
    )
    reward = first.reward(painter)
    along, shown = [], []
    for n in range(2 * sizes.n_iterations):
        if n == sizes.n_iterations:
            chain.target = second.tilt(base, painter)
        chain.step()
        x = chain.output()
        along.append(reward(x).tolist())
        if n in (sizes.n_iterations - 1, 2 * sizes.n_iterations - 1):
            shown.append(pixels(x))
        advance()
    name = f"refinement {painter.name}"
    record = {"before": first.text, "after": second.text, "changed": sizes.n_iterations, "along": along, "seed": seed}
    results.save(name, record, before=shown[0], after=shown[1])
    return name
