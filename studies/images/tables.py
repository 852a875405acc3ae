"""The page of the study: its tables and figures, from the results alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from studies.images import imagenet, pictures
from studies.images.known import CASES, Case
from studies.images.wishes import IMPOSSIBLE, WISHES
from studies.shared.pages import fill, markdown
from studies.shared.results import Results

__all__ = ["fill_page"]

FIGURES = Path(__file__).parent / "figures"


def mean_and_error(values: Sequence[float], digits: int = 3) -> str:
    """Mean +- standard error over seeds.

    >>> mean_and_error([0.1, 0.3])
    '.200 ± .100'
    """
    mean = sum(values) / len(values)
    text = f"{mean:.{digits}f}"
    if len(values) > 1:
        error = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
        text += f" ± {error:.{digits}f}"
    return re.sub(r"\b0\.", ".", text) if abs(mean) < 1 else text


# -- storey 1 ----------------------------------------------------------------------------------------------


def seeds_of(results: Results, case: Case) -> list[dict[str, Any]]:
    return [results[name] for name in results.names(f"{case.name} seed *".replace(" ", "-"))]


def known_value(value: float | None) -> bool:
    """Plain guidance has no log Z, and particle Gibbs no families."""
    return value is not None and not math.isnan(value)


def known_table(results: Results, cases: Iterable[Case], key: str, digits: int) -> str | None:
    """Methods in rows, cases in columns: one error, mean and standard error over seeds."""
    found = {case: seeds_of(results, case) for case in cases}
    found = {case: records for case, records in found.items() if records}
    if not found:
        return None
    names: list[str] = []
    for records in found.values():
        there = [name for name, error in records[0]["errors"].items() if known_value(error.get(key))]
        names += [name for name in there if name not in names]
    if key in ("families", "log z"):  # of all draws of a chain, so once is enough
        names = [name for name in names if not name.endswith("burn-in dropped")]
    head = ["method", *(column(case, records) for case, records in found.items())]
    rows = []
    for name in names:
        cells = []
        for records in found.values():
            values = [r["errors"][name][key] for r in records if name in r["errors"]]
            cells.append(mean_and_error(values, digits) if values else "–")
        rows.append([f"{name}, as many draws" if name == "truth" else name, *cells])
    return markdown(head, rows)


def settings_table(results: Results) -> str | None:
    """What the settings of SMC do at w = 4, per batch: mean and standard error over batches."""
    record = results.get("settings")
    if record is None:
        return None
    rows = []
    for name, found in record["found"].items():
        cells = [mean_and_error(found[key], digits) for key, digits in SETTING_COLUMNS.values()]
        rows.append([name, found["particles"], *cells])
    return markdown(["setting", "particles", *SETTING_COLUMNS], rows)


SETTING_COLUMNS = {
    "least ESS on the way": ("least ess", 1),
    "families at the end": ("families", 1),
    "log Z, too large by": ("log z", 2),
    "TV of shares": ("shares", 3),
}


def column(case: Case, records: list[dict[str, Any]]) -> str:
    what = f"w = {case.what}" if case.kind == "guided" else case.what
    n = len(records)
    kept = "" if case.kind == "posterior" else f"kept {records[0]['kept']:.3f}, "  # of a conjugate posterior it is 1
    return f"{case.images}, {what} ({kept}{n} seed{'s' if n > 1 else ''})"


def known_figure(results: Results, case: Case, shown: Sequence[str], n: int = 12) -> Path | None:
    records = seeds_of(results, case)
    if not records:
        return None
    arrays = results.arrays(f"{case.name} seed 0")
    rows = {name: arrays[name][:n].astype(np.float64) for name in shown}
    shares = {name: np.array([r["errors"][name]["of components"] for r in records]) for name in shown}
    title = f"{case.images}, class {case.label}, guidance w = {case.what}: draws, and shares of clusters"
    return save(pictures.shares_and_images(rows, shares, title), f"known-{case.images}.png")


# -- storey 2 ----------------------------------------------------------------------------------------------


def guidance_table(results: Results, images: str) -> str | None:
    """The twin of the paper's table: per method and number of samples, mean and standard error over seeds."""
    records = [results[name] for name in results.names(f"guidance-{images}-*")]
    if not records:
        return None
    rows = []
    methods = list(records[0]["found"])
    for method in methods:
        for n in sorted({r["samples"] for r in records}):
            seeds = [r["found"][method] for r in records if r["samples"] == n]
            cells = []
            for key, digits in (("log-probability", 3), ("accuracy", 3), ("frechet", 2), ("spread", 2)):
                cells.append(mean_and_error([float(np.mean([c[key] for c in s])) for s in seeds], digits))
            rows.append([method, n, *cells, f"{np.mean([c['rows'] for s in seeds for c in s]):,.0f}"])
    return markdown(["method", "samples", "log-probability", "accuracy", "Fréchet", "spread", "rows"], rows)


def wish_table(results: Results, images: str) -> str | None:
    rows = []
    for wish in (*WISHES[images], IMPOSSIBLE[images]):
        for kind in ("alone", "guided"):
            r = results.get(f"wish {images} {kind} {wish.text}")
            if r is None:
                continue
            scale = r["wish"]["strength"]
            rewards = [f"{v / scale:.2f}" for v in (r["without the wish"], r["smc"]["reward"], r["crepe"]["reward"])]
            accuracy = f"{r['smc']['accuracy']:.2f}, {r['crepe']['accuracy']:.2f}"
            rows.append([wish.text, kind, *rewards, accuracy, r["round trips"], r["verdict"].split("\n")[0]])
    if not rows:
        return None
    head = ["wish", "on", "without it", "RNE-SMC", "CREPE, second half", "accuracy", "round trips", "verdict of CREPE"]
    return markdown(head, rows)


def guidance_figure(results: Results, images: str) -> str | None:
    """Sixteen draws of each method, of one class and one run of 128 samples."""
    name = f"guidance {images} samples 128 seed 0"
    if name not in results:
        return None
    label, arrays = results[name]["classes"][0], results.arrays(name)
    rows = {method: arrays[f"{method} {label}"] for method in results[name]["found"] if f"{method} {label}" in arrays}
    return shown(pictures.rows_of_images(rows), f"guided-{images}.png", f"Guided images of class {label}")


def wish_figures(results: Results, images: str) -> list[str]:
    """The grid of chains, thinned, with the impossible wish last; and rewards along the chains."""
    rows: dict[str, np.ndarray] = {}
    reward: dict[str, np.ndarray] = {}
    of_class: dict[str, np.ndarray] = {}
    asked = [wish.text for wish in (*WISHES[images], IMPOSSIBLE[images])]
    for kind in ("alone", "guided"):
        names = {text: f"wish {images} {kind} {text}" for text in asked}
        if any(name not in results for name in names.values()):
            continue
        if kind == "guided":
            rows = {text: results.arrays(name)["chain"] for text, name in names.items()}
        possible = [results[names[text]] for text in asked[:-1]]
        reward[kind] = np.array([np.mean(r["along"], 1) / r["wish"]["strength"] for r in possible])
        of_class[kind] = np.array([np.mean(r["class along"], 1) for r in possible])
    if not rows:
        return []
    panels = {"reward per strength": reward, "log-probability of the class": of_class}
    grid = pictures.rows_of_images(rows, "One chain each, from left to right; the last wish cannot be fulfilled")
    return [
        shown(grid, f"wishes-{images}.png", "Chains with a wish"),
        shown(pictures.curves(panels), f"along-{images}.png", "Reward and class along the chains"),
    ]


def refinement_figure(results: Results, images: str) -> str | None:
    record = results.get(f"refinement {images}")
    if record is None:
        return None
    arrays = results.arrays(f"refinement {images}")
    pair = {record["before"]: arrays["before"], record["after"]: arrays["after"]}
    return shown(pictures.rows_of_images(pair), f"refinement-{images}.png", "The same chains before and after")


def shown(figure: Any, name: str, text: str) -> str:
    """Save a figure; the Markdown that shows it."""
    return f"![{text}](figures/{save(figure, name).name})"


def together(*parts: str | None) -> str | None:
    """What there is of these parts, or None."""
    there = [part for part in parts if part is not None]
    return "\n\n".join(there) if there else None


def cost_table() -> str:
    return markdown(["preset", "task", "rows", "hours", "gigabytes"], imagenet.cost_table())


def save(figure: Any, name: str) -> Path:
    FIGURES.mkdir(exist_ok=True)
    figure.savefig(FIGURES / name, dpi=110)
    return FIGURES / name


def fill_page(results: Results, page: Path) -> list[Path]:
    """Fill what the results allow, and leave the rest of the page as it is."""
    guided = [c for c in CASES if c.kind == "guided" and c.size == 14]
    others = [c for c in CASES if c.kind != "guided"]
    makers: dict[str, Callable[[], str | None]] = {
        "guidance shares": lambda: known_table(results, guided, "shares", 3),
        "guidance frechet": lambda: known_table(results, guided, "frechet", 2),
        "guidance families": lambda: known_table(results, guided, "families", 0),
        "guidance log z": lambda: known_table(results, guided, "log z", 2),
        "settings": lambda: settings_table(results),
        "rewards families": lambda: known_table(results, others, "families", 0),
        "rewards": lambda: known_table(results, others, "shares", 3),
        "rewards frechet": lambda: known_table(results, others, "frechet", 2),
        "trained mnist": lambda: together(guidance_table(results, "mnist"), guidance_figure(results, "mnist")),
        "wishes mnist": lambda: together(wish_table(results, "mnist"), *wish_figures(results, "mnist")),
        "refinement mnist": lambda: refinement_figure(results, "mnist"),
        "cost": cost_table,
    }
    tables = {name: made for name, make in makers.items() if (made := make()) is not None}
    paths = [fill(page, tables)]
    for case in (c for c in guided if c.what == "4"):
        path = known_figure(results, case, ("truth", "plain CFG", "RNE-SMC", "particle Gibbs", "CREPE"))
        paths += [path] if path else []
    return paths
