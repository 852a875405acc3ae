"""The tables of the page, from what was measured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from studies.digits import grey
from studies.digits.study import METHODS, Case, cases
from studies.shared.pages import fill, markdown
from studies.shared.results import Results

__all__ = ["fill_page", "summary"]

NUMBERS = ("posterior", "pixels", "pairs")


def mean_and_error(values: list[float]) -> str:
    """Mean over seeds and its standard error.

    >>> mean_and_error([0.1, 0.3])
    '0.2000 ± 0.1000'
    """
    n = len(values)
    mean = math.fsum(values) / n
    if math.isnan(mean):
        return "–"
    if n == 1:
        return f"{mean:.4f}"
    return f"{mean:.4f} ± {math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n):.4f}"


def summary(case: Case, results: Results) -> str | None:
    """Errors of all methods on one case, or None if it was not measured."""
    truth = results.get(f"{case.name} truth")
    if truth is None:
        return None
    one = truth["floors"]["pixels"]
    turned = results.get(f"{case.name} turns")
    bias = f"{turned['log_z'] - truth['log_z']:.4f} ± {turned['error']:.4f}" if turned else "–"
    rows: list[list[Any]] = []
    exact_draws = {case.side**2: truth["floors"], case.turns: truth["floors of turns"]}  # one where turns are pixels
    for turns, floors in exact_draws.items():
        if turns == case.side**2 or case.kind == "masked":
            exact = [f"{floors[k]:.4f}" for k in NUMBERS]
            share = f"{floors['pixels'] / one:.2f}"
            log_z = "–" if turns == case.side**2 else bias
            rows.append([f"exact draws, {turns} turns", *exact, exact[1], log_z, share, case.rows, ""])
    for method in METHODS:
        # Seeds are numbers, and a method's name may begin with another's.
        names = [n for n in results.names(f"{case.name} {method} ?".replace(" ", "-")) if n.rsplit("-", 1)[1].isdigit()]
        found = [results[name] for name in names]
        if found:
            errors = [mean_and_error([f["errors"][k] for f in found]) for k in NUMBERS]
            stated = mean_and_error([f["stated"] for f in found])
            ratio = math.fsum(f["errors"]["pixels"] for f in found) / len(found) / one
            cost = round(sum(f["rows"] for f in found) / len(found))
            log_z = mean_and_error([f["log_z"] for f in found])
            rows.append([method, *errors, stated, log_z, f"{ratio:.2f}", cost, len(found)])
    header = ["method", "P(digit)", "pixels", "pairs", "pixels, stated", "log Z - truth", "pixels / floor", "rows"]
    return markdown([*header, "seeds"], rows)


def painted(results: Results, plan: str = "grey") -> str | None:
    """What the judge found of the network's digits with this plan: means over digits, and seeds."""
    columns = {"accuracy": 3, "log-probability": 3, "frechet": 1, "spread": 2, "near copies": 3}
    costs = {"effective": 0, "different": 0, "draws": 0, "rows": 0}
    rows = []
    for method in ("real", *grey.METHODS):
        pattern = f"{plan}-real-?" if method == "real" else f"{plan} {method} ? ?".replace(" ", "-")
        found = [results[name] for name in results.names(pattern)]
        if found:
            mean = {
                k: f"{sum(f[k] for f in found) / len(found):.{d}f}"
                for k, d in {**columns, **costs}.items()
                if k in found[0]
            }
            seen = [results[name][method] for name in results.names("inception-?-?") if plan == "grey"]
            mean["FID"] = f"{sum(seen) / len(seen):.1f}" if seen else "–"
            rows.append([method, *(mean.get(k, "–") for k in (*columns, "FID", *costs)), len(found)])
    return markdown(["method", *columns, "FID", *costs, "runs"], rows) if rows else None


def fill_page(page: Path, results: Results) -> Path:
    """Put every case that was measured into its place."""
    found = {f"case {i}": summary(case, results) for i, case in enumerate(cases())}
    found |= {"network": painted(results), "network paper": painted(results, "paper")}
    return fill(page, {name: table for name, table in found.items() if table is not None})
