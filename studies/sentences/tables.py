"""The tables of the page, from what was measured."""

from __future__ import annotations

import math
from pathlib import Path

from studies.sentences import sweep
from studies.shared.pages import fill, markdown
from studies.shared.results import Results

__all__ = ["fill_page"]


def _mean(values: list[float], digits: int = 3) -> str:
    """Mean of the groups and its standard error."""
    n, mean = len(values), math.fsum(values) / len(values)
    if math.isnan(mean):
        return "–"
    return f"{mean:+.{digits}f} ± {math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n):.{digits}f}"


def _level(verdicts: list[str | None]) -> str:
    return ", ".join(f"{verdicts.count(v)} {v}" for v in ("ok", "look", "do not trust") if v in verdicts) or "–"


def twin(results: Results, unconditional: str) -> str | None:
    """Errors of every method in every cell with this unconditional model."""
    rows = []
    for cell in sweep.cells():
        truth = results.get(f"twin {cell.name} truth")
        if cell.unconditional != unconditional or truth is None:
            continue
        strengths = f"{cell.target:g}, {cell.proposal:g}"
        floor = truth["floors"]
        exact = [f"0 ± {floor['accuracy'] / 2:.3f}", f"0 ± {floor['nats'] / 2:.3f}", f"{1e4 * floor['words']:.1f}"]
        rows.append([strengths, f"exact draws ({truth['accuracy']:.3f}, {truth['nats']:.3f})", *exact, "–", "–"])
        for method in sweep.METHODS:
            found = results.get(f"twin {cell.name} {method}")
            if found:
                words = math.fsum(found["words"]) / len(found["words"])
                errors = [
                    _mean(found["accuracy"]),
                    _mean(found["nats"]),
                    f"{1e4 * words:.1f}",
                    _mean(found["log_z"], 2),
                ]
                rows.append([strengths, method, *errors, _level(found["verdicts"])])
    header = ["target, proposal", "method", "P(positive)", "nats per word", "words, 1e-4", "log Z - truth", "verdicts"]
    return markdown(header, rows) if rows else None


def paper(results: Results) -> str | None:
    """The paper's setting: one chain per run, 100 steps, 150 + 1,000 iterations."""
    rows = []
    for cell in sweep.PAPER:
        found, truth = results.get(f"paper {cell.name}"), results.get(f"twin {cell.name} truth")
        if found and truth:
            values = ", ".join(f"{v:.3f}" for v in found["accuracy"])
            nats = ", ".join(f"{v:.2f}" for v in found["nats"])
            tours = ", ".join(map(str, found["tours"]))
            acceptance = f"{found['acceptance']:.2f} ({found['least acceptance']:.2f})"
            rows.append([f"{cell.target:g}, {cell.proposal:g}", f"{truth['accuracy']:.3f}", values])
            rows[-1] += [f"{truth['nats']:.2f}", nats, tours, acceptance, _level(found["verdicts"])]
    header = ["target, proposal", "true P(positive)", "of each chain", "true nats", "of each chain", "tours"]
    return markdown([*header, "acceptance (least)", "verdicts"], rows) if rows else None


def fill_page(page: Path, results: Results) -> Path:
    found = {"mixture": twin(results, "mixture"), "own": twin(results, "own"), "paper": paper(results)}
    return fill(page, {name: table for name, table in found.items() if table is not None})
