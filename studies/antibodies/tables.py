"""The tables of the page, from what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studies.antibodies import exact, humanise
from studies.shared.pages import fill, markdown
from studies.shared.results import Results

__all__ = ["fill_page"]

LAWS = (
    "Sapiens^2",
    "Sapiens x AntiBERTy",
    "guidance by the loops, w = 2",
    "few mutations",
    "human, few mutations",
)


def _seeds(results: Results, stem: str) -> list[Any]:
    return [results[name] for name in results.names(f"{stem} ?".replace(" ", "-"))]


def _mean(values: list[float], digits: int = 3) -> str:
    """Mean and its standard error over seeds."""
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n):.{digits}f}"


def enumerated(results: Results, case: str) -> str | None:
    """TV to the enumerated law: rows are laws, columns are methods."""
    rows = []
    for law in LAWS:
        about = results.get(f"{case} law {law}")
        found = {method: _seeds(results, f"{case} tv {law} {method}") for method in exact.METHODS}
        if about and all(found.values()):
            tvs = [_mean([f["tv"] for f in found[method]]) for method in exact.METHODS]
            few = "" if about["k"] == len(exact.CASES[case].free) else f" (k = {about['k']})"
            rows.append([law + few, _mean(about["floors"]), *tvs])
    return markdown(["law", "independent draws", *exact.METHODS], rows) if rows else None


def long_runs(results: Results, case: str) -> str | None:
    """Eight times the rows on the first law, one seed: what falls with the rows, and what stays."""
    rows = []
    for method in exact.LONG:
        found = results.get(f"{case} long {method}")
        if found:
            rows.append([method, f"{found['tv']:.4f}", f"{found['floor']:.4f}", f"{found['log_z']:+.4f}"])
    return markdown(["method", "TV", "independent draws", "log Z - truth"], rows) if rows else None


BOTH = tuple(method for method in humanise.METHODS if method.startswith("both models"))
OTHERS = tuple(method for method in humanise.METHODS if method not in BOTH)


def humanised(results: Results, antibody: str, k: int, methods: Sequence[str]) -> str | None:
    """What each method offers, means over draws (and over seeds)."""
    columns = {"P(human)": 3, "log P(human)": 2, "Sapiens": 2, "AntiBERTy": 2, "mutations": 1, "apart": 1}
    costs = ("rows", "rewards")
    rows = []
    for method in methods:
        found = _seeds(results, f"humanise {antibody} {k} {method}")
        if found:
            numbers = [_mean([f[name] for f in found], digits) for name, digits in columns.items()]
            rows.append([method, *numbers, f"{found[0]['different']} of {found[0]['draws']}"])
            rows[-1] += [found[0][cost] for cost in costs]
    return markdown(["method", *columns, "different", "rows", "black box"], rows) if rows else None


def best(results: Results, antibody: str, k: int, methods: Sequence[str]) -> str | None:
    """The draw with the largest P(human) of each method, to be copied."""
    found = {m: _seeds(results, f"humanise {antibody} {k} {m}") for m in methods}
    lines = [f">{m}, P(human) {f[0]['P(human)']:.3f} on average\n{f[0]['best']}" for m, f in found.items() if f]
    return "```\n" + "\n".join(lines) + "\n```" if lines else None


def fill_page(page: Path, results: Results) -> Path:
    found = {
        **{f"enumerated {case}": enumerated(results, case) for case in exact.CASES},
        "long": long_runs(results, "4D5"),
        "humanised": humanised(results, "4D5", 24, OTHERS),
        "both": humanised(results, "4D5", 24, BOTH),
        "sequences": best(results, "4D5", 24, OTHERS),
        "sequences of both": best(results, "4D5", 24, BOTH),
    }
    return fill(page, {name: table for name, table in found.items() if table is not None})
