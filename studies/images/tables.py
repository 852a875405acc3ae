"""The page of the study: its tables and figures, from the results alone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from studies.images import imagenet, pictures
from studies.images.data import CLASSES
from studies.images.known import CASES, WALKS, Case
from studies.images.model import SETTINGS, WEIGHTS
from studies.images.restoring import OPERATORS, rows_of
from studies.images.tails import WAYS
from studies.images.wishes import IMPOSSIBLE, WISHES, Wish
from studies.shared.pages import fill, markdown
from studies.shared.results import Results
from studies.shared.training import load_weights

__all__ = ["fill_page"]

FIGURES = Path(__file__).parent / "figures"
PAINTERS = ("mnist-14", "mnist", "fashion")


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


def walks_table(results: Results) -> str | None:
    """What more walks do at w = 4: mean and standard error over seeds."""
    records = [results[name] for name in results.names("walks-*")]
    if not records:
        return None
    rows = []
    for name in WALKS:
        found = [r["found"] for r in records if r["name"] == name]
        if found:
            cells = [
                mean_and_error(values, digits) if (values := [f[key] for f in found if known_value(f[key])]) else "–"
                for key, digits in WALK_COLUMNS.values()
            ]
            rows.append([name, f"{found[0]['rows']:,}", len(found), *cells])
    return markdown(["method", "rows", "seeds", *WALK_COLUMNS], rows)


def tails_table(results: Results) -> str | None:
    """Weights of one step, from exact draws: spread, tail index and the largest, by kernels and by densities."""
    record = results.get("tails steps")
    if record is None:
        return None
    rows = [
        [f"{r['t']:.2f}", *(f"{r[key][i]:.2f}" for i in range(3) for key in ("RNE", "exact"))]
        for r in record["found"]
        if max(r["RNE"][0], r["exact"][0]) >= 0.05
    ]
    names = ("standard deviation", "tail index", "largest log-weight")
    return markdown(["noise", *(f"{name}, {key}" for name in names for key in ("RNE", "exact"))], rows)


def resampled_table(results: Results) -> str | None:
    """What is left of 256 walks, with weights of either kind: mean and standard error over seeds."""
    columns = {name: WALK_COLUMNS[name] for name in ("families", "log Z, too large by", "TV of shares", "Fréchet")}
    found = {way: results.get(f"tails resampled {way}") for way in WAYS}
    rows = [
        [way, *(mean_and_error([s[key] for s in record["found"]], digits) for key, digits in columns.values())]
        for way, record in found.items()
        if record is not None
    ]
    return markdown(["weights", *columns], rows) if rows else None


WALK_COLUMNS = {
    "TV of shares": ("shares", 3),
    "as many exact draws": ("exact", 3),
    "Fréchet": ("frechet", 2),
    "families": ("families", 0),
    "log Z, too large by": ("log z", 2),
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


TRAINED_COLUMNS = {
    "log-probability": ("log-probability", 3),
    "accuracy": ("accuracy", 3),
    "Fréchet": ("frechet", 1),
    "variety": ("variety", 2),
}


def guidance_table(results: Results, painter: str) -> str | None:
    """The twin of the paper's table: per method and number of samples, mean and standard error over seeds."""
    records = [results[name] for name in results.names(f"guidance-{painter}-class-*")]
    if not records:
        return None
    rows = []
    for method in dict.fromkeys(method for r in sorted(records, key=_size) for method in r["found"]):
        for n in sorted({_size(r) for r in records if method in r["found"]}):
            seeds = [r["found"][method] for r in records if r["samples"] == n and method in r["found"]]
            cells = [mean_and_error([s[key] for s in seeds], digits) for key, digits in TRAINED_COLUMNS.values()]
            counts = (f"{np.mean([s[key] for s in seeds]):,.0f}" for key in ("images", "rows"))
            rows.append([method, n, *cells, *counts])
    first = ("no guidance", "plain CFG")
    rows.sort(key=lambda row: first.index(row[0]) if row[0] in first else len(first))
    for row in rows:
        row[1] = "independent" if row[0] in first else row[1]
    return markdown(["method", "samples", *TRAINED_COLUMNS, "images", "rows"], rows)


def _size(record: dict[str, Any]) -> int:
    return int(record["samples"])


def inception_table(results: Results, painter: str) -> str | None:
    """FID of the methods: mean and standard error over seeds."""
    records = [results[name] for name in results.names(f"inception-guidance-{painter}-class-*")]
    if not records:
        return None
    rows = [
        [method, *(mean_and_error([r[key][method] for r in records], 1) for key in ("fid", "halves"))]
        for method in records[0]["fid"]
    ]
    n, n_real, seconds = records[0]["n"], records[0]["n_real"], sum(r["seconds"] for r in records)
    text = f"{n} draws of each against {n_real} test images, {len(records)} seeds; {seconds:.0f} seconds of a core."
    return markdown(["", "FID, 512 samples", f"FID between {n // 2} and {n // 2} of its draws"], rows) + "\n\n" + text


def network_table(folder: Path) -> str:
    """What is shipped: facts of the trainings, from the files themselves."""
    rows = []
    for path in sorted(folder.glob("*.safetensors")):
        if path.stem.startswith("law"):
            continue
        facts = {key: json.loads(value) for key, value in load_weights(path)[1].items()}
        size, last, settings = facts["network"]["size"], facts["last"], facts["settings"]
        steps = f"{last['step']:,} of {settings['n_steps']:,}"
        accuracy = facts.get("classifier", {}).get("accuracy")
        command = f"`train --images {facts['images']} --size {size}`"
        if settings["n_steps"] != SETTINGS[size].n_steps:
            command = command[:-1] + f" --steps {settings['n_steps']}`"
        rows.append(
            [
                path.stem,
                f"{size} x {size}",
                f"{steps}, {settings['batch']} images each",
                f"{last['validation']:.4f}",
                "–" if accuracy is None else f"{accuracy:.3f}",
                f"{path.stat().st_size / 1e6:.1f} MB",
                command,
            ]
        )
    return markdown(
        ["file", "pixels", "steps", "held-out loss", "accuracy of its classifier", "size", "command"],
        rows,
    )


def restored_table(results: Results, painter: str) -> str | None:
    """Posteriors with a network: means over the hidden images, and standard errors."""
    records = [results[name] for name in results.names(f"restored-{painter}-class-*")]
    if not records:
        return None
    rows = []
    for what in OPERATORS:
        there = [r["found"] for r in records if r["what"] == what]
        for method in there[0] if there else ():
            cells = [mean_and_error([found[method][key] for found in there], digits) for key, digits in RESTORED]
            counted = [found[method]["families"] for found in there if found[method]["families"] is not None]
            rows.append([what, method, *cells, mean_and_error(counted, 0) if counted else "–"])
    head = ["", "method", "misfit", "error of the mean", "variance of draws", "probability of its class", "families"]
    return markdown(head, rows)


RESTORED = (("misfit", 2), ("error", 3), ("variance", 3), ("class", 2))


def restored_figure(results: Results, painter: str) -> str | None:
    """Of up to two hidden images per operator: the image, what was seen, and draws of each method."""
    rows: dict[str, np.ndarray] = {}
    for what in OPERATORS:
        names = results.names(f"restored-{painter}-class-*-{what}-seed-0")[:2]
        if not names:
            return None
        rows |= {f"{what}, {method}": x for method, x in rows_of(results, names, 6).items()}
    text = "A test image, what is seen of it, and six draws of what it may have been"
    return shown(pictures.rows_of_images(rows, text), f"restored-{painter}.png", text)


def wish_table(results: Results, painter: str) -> str | None:
    rows = []
    for wish in wishes_of(painter):
        for kind in ("alone", "guided"):
            r = results.get(f"wish {painter} {kind} {wish.text}")
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


def long_table(results: Results, painter: str) -> str | None:
    """Long chains of wishes that can be fulfilled and of one that cannot."""
    found = (results.get(f"long wish {painter} {wish.text}") for wish in wishes_of(painter))
    records = [record for record in found if record is not None]
    if not records:
        return None
    head = ["wish", "iterations", "reward", "accuracy", "round trips", "verdict", "why"]
    rows = [
        [
            r["wish"],
            r["iterations"],
            f"{r['reward']:.2f}",
            f"{r['accuracy']:.2f}",
            r["round trips"],
            r["verdict"],
            "; ".join(r["reasons"]) or "–",
        ]
        for r in records
    ]
    return markdown(head, rows)


def wishes_of(painter: str) -> list[Wish]:
    """All wishes of a network, the impossible one last."""
    images = painter.split("-")[0]
    return [*WISHES[images], IMPOSSIBLE[images]]


def guidance_figure(results: Results, painter: str, n: int = 16) -> str | None:
    """Draws of each method, of one class and one run of as many samples as there are."""
    names = sorted(results.names(f"guidance-{painter}-class-*-seed-0"), key=lambda name: _size(results[name]))
    if not names:
        return None
    record, arrays = results[names[-1]], results.arrays(names[-1])
    rows = {method: arrays[method][:n] for method in record["found"] if method in arrays}
    what = CLASSES[painter.split("-")[0]][record["class"]]
    text = f'Guided images of class "{what}": draws of one run of {record["samples"]} samples'
    return shown(pictures.rows_of_images(rows, text), f"guided-{painter}.png", text)


def wish_figures(results: Results, painter: str) -> list[str]:
    """The grid of chains, thinned, with the impossible wish last; and rewards along the chains."""
    rows: dict[str, np.ndarray] = {}
    reward: dict[str, np.ndarray] = {}
    of_class: dict[str, np.ndarray] = {}
    asked = [wish.text for wish in wishes_of(painter)]
    for kind in ("alone", "guided"):
        names = {text: f"wish {painter} {kind} {text}" for text in asked}
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
        shown(grid, f"wishes-{painter}.png", "Chains with a wish"),
        shown(pictures.curves(panels), f"along-{painter}.png", "Reward and class along the chains"),
    ]


def refinement_figure(results: Results, painter: str) -> str | None:
    record = results.get(f"refinement {painter}")
    if record is None:
        return None
    arrays = results.arrays(f"refinement {painter}")
    pair = {record["before"]: arrays["before"], record["after"]: arrays["after"]}
    return shown(pictures.rows_of_images(pair), f"refinement-{painter}.png", "The same chains before and after")


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
    figure.savefig(FIGURES / name, dpi=110, bbox_inches="tight")
    return FIGURES / name


def fill_page(results: Results, page: Path) -> list[Path]:
    """Fill what the results allow, and leave the rest of the page as it is."""
    guided = [c for c in CASES if c.kind == "guided" and c.size == 14]
    others = [c for c in CASES if c.kind != "guided"]
    made = {
        "guidance shares": known_table(results, guided, "shares", 3),
        "guidance frechet": known_table(results, guided, "frechet", 2),
        "guidance families": known_table(results, guided, "families", 0),
        "guidance log z": known_table(results, guided, "log z", 2),
        "settings": settings_table(results),
        "walks": walks_table(results),
        "tails": tails_table(results),
        "tails resampled": resampled_table(results),
        "rewards families": known_table(results, others, "families", 0),
        "rewards": known_table(results, others, "shares", 3),
        "rewards frechet": known_table(results, others, "frechet", 2),
        "networks": network_table(WEIGHTS),
        "cost": cost_table(),
    }
    for painter in PAINTERS:
        made |= {
            f"trained {painter}": together(guidance_table(results, painter), guidance_figure(results, painter)),
            f"inception {painter}": inception_table(results, painter),
            f"wishes {painter}": together(wish_table(results, painter), *wish_figures(results, painter)),
            f"long {painter}": long_table(results, painter),
            f"refinement {painter}": refinement_figure(results, painter),
            f"restored {painter}": together(restored_table(results, painter), restored_figure(results, painter)),
        }
    tables = {name: text for name, text in made.items() if text is not None}
    paths = [fill(page, tables)]
    for case in (c for c in guided if c.what == "4"):
        path = known_figure(results, case, ("truth", "plain CFG", "RNE-SMC", "particle Gibbs", "CREPE"))
        paths += [path] if path else []
    return paths
