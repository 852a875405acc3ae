"""The tables of the page, from what was measured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from studies.sentences import sweep
from studies.sentences.strengths import CELLS, CHAINS, METHOD_NAMES, perplexity_of
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


def _runs(results: Results, target: float, proposal: float, method: str) -> list[list[dict[str, Any]]]:
    """Judged runs of a cell, by label."""
    found: list[list[dict[str, Any]]] = [[], []]
    names = results.names(f"net-{target:g}-{proposal:g}-{method.replace(' ', '-')}-*")
    for record in map(results.__getitem__, names):
        if "texts" in record:
            found[record["label"]].append(record)
    return found


def summary(results: Results, target: float, proposal: float, method: str) -> dict[str, Any] | None:
    """What was judged of a cell: accuracy and perplexity of each label that is there, then of both together."""
    by_label = [records for records in _runs(results, target, proposal, method) if records]
    runs = [record for records in by_label for record in records]
    if not runs:
        return None

    def pool(records: list[dict[str, Any]], name: str) -> list[Any]:
        return [v for record in records for v in record[name]]

    parts = [*by_label, runs]
    return {
        "accuracy": [float(np.mean(pool(records, "right"))) for records in parts],
        "perplexity": [perplexity_of(pool(records, "nats"), pool(records, "tokens")) for records in parts],
        "words": float(np.mean([len(t.split()) for t in pool(runs, "texts")])),
        "distinct": np.mean([record["distinct"] for record in runs], 0).tolist(),
        "self-bleu": float(np.mean([record["self-bleu"] for record in runs])),
        "rows": float(np.mean([record["rows"] for record in runs])),
        "verdicts": [record["verdict"] for record in runs],
    }


def _with_parts(values: list[float], form: str) -> str:
    """Of all, and in brackets of each label if there are two."""
    *each, both = (format(v, form) for v in values)
    return f"{both} ({' / '.join(each)})" if len(each) > 1 else both


def network(results: Results) -> str | None:
    """The sweep on the network; in brackets negative and positive sentences apart."""
    rows = []
    for target, proposal in CELLS:
        for method in METHOD_NAMES:
            found = summary(results, target, proposal, method)
            if found:
                rows.append([f"{target:g}, {proposal:g}", method, _with_parts(found["accuracy"], ".2f")])
                rows[-1] += [_with_parts(found["perplexity"], ",.0f"), f"{found['words']:.1f}"]
                rows[-1] += [f"{found['distinct'][1]:.2f}", f"{found['self-bleu']:.2f}", f"{found['rows']:,.0f}"]
                rows[-1] += [_level(found["verdicts"])]
    header = ["target, proposal", "method", "accuracy", "perplexity", "words", "distinct-2", "self-BLEU", "rows"]
    return markdown([*header, "verdicts"], rows) if rows else None


def chains(results: Results) -> str | None:
    """The long chains, in quarters."""
    rows = []
    for target, proposal in CHAINS:
        found = results.get(f"chain {target:g} {proposal:g}")
        if found and "texts" in found:
            parts = np.array_split(np.arange(len(found["texts"])), 4)
            accuracy = ", ".join(f"{np.mean([found['right'][i] for i in part]):.2f}" for part in parts)
            perplexity = ", ".join(
                f"{perplexity_of([found['nats'][i] for i in part], [found['tokens'][i] for i in part]):,.0f}"
                for part in parts
            )
            acceptance = f"{found['acceptance']:.2f} ({found['least acceptance']:.2f})"
            rows.append([f"{target:g}, {proposal:g}", accuracy, perplexity, len(set(found["texts"]))])
            rows[-1] += [len(found["texts"]), found["tours"], acceptance, found["verdict"]]
    header = ["target, proposal", "accuracy by quarters", "perplexity by quarters", "different texts", "of", "tours"]
    return markdown([*header, "acceptance (least)", "verdict"], rows) if rows else None


def fill_page(page: Path, results: Results) -> Path:
    found = {"mixture": twin(results, "mixture"), "own": twin(results, "own"), "paper": paper(results)}
    found |= {"network": network(results), "chains": chains(results)}
    return fill(page, {name: table for name, table in found.items() if table is not None})
