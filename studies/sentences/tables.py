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


def _runs(results: Results, target: float, proposal: float, method: str) -> dict[str, dict[str, Any]]:
    """Judged runs of a cell, by label and seed."""
    names = results.names(f"net-{target:g}-{proposal:g}-{method.replace(' ', '-')}-*")
    return {name.split(method.replace(" ", "-"))[-1]: results[name] for name in names if "texts" in results[name]}


def summary(results: Results, target: float, proposal: float, method: str) -> dict[str, Any] | None:
    """Accuracy and perplexity of the judged draws of a cell, each with its error, and the verdicts on its runs.

    Errors are those of as many independent texts as there are different ones.
    """
    runs = list(_runs(results, target, proposal, method).values())
    if not runs:
        return None
    right, nats, tokens, texts = (
        np.array([v for r in runs for v in r[k]]) for k in ("right", "nats", "tokens", "texts")
    )
    different = len(set(texts)) / len(texts)
    accuracy, rate = right.mean(), nats.sum() / tokens.sum()
    scatter = (nats - rate * tokens).std() / tokens.mean()
    return {
        "accuracy": float(accuracy),
        "accuracy error": math.sqrt(accuracy * (1 - accuracy) / (len(right) * different)),
        "perplexity": math.exp(rate),
        "perplexity error": math.exp(rate) * scatter / math.sqrt(len(nats) * different),
        "verdicts": [run["verdict"] for run in runs],
    }


def network(results: Results) -> str | None:
    """The sweep on the network: accuracy and perplexity of each method, and verdicts on two of them."""
    rows = []
    for target, proposal in sorted(CELLS):
        found = {method: summary(results, target, proposal, method) for method in METHOD_NAMES}
        if any(found.values()):
            rows.append([f"{target:g}, {proposal:g}"])
            for one in found.values():
                accuracy = one and f"{one['accuracy']:.2f} ± {one['accuracy error']:.2f}"
                rows[-1].append(
                    f"{accuracy}, {one['perplexity']:,.0f} ± {one['perplexity error']:,.0f}" if one else "–"
                )
    return markdown(["target, proposal", *METHOD_NAMES], rows) if rows else None


def methods(results: Results) -> str | None:
    """Every method against SMC of the same cell and seed, over all cells; then diversity and verdicts of its runs."""
    rows = []
    for method in METHOD_NAMES:
        pairs, runs = [], []
        for cell in CELLS:
            other = _runs(results, *cell, "SMC")
            for key, run in _runs(results, *cell, method).items():
                runs.append(run)
                if key in other and method != "SMC":
                    both = (run, other[key])
                    accuracy, log_perplexity = (
                        [np.mean(r["right"]) for r in both],
                        [sum(r["nats"]) / sum(r["tokens"]) for r in both],
                    )
                    pairs.append((accuracy[0] - accuracy[1], log_perplexity[0] - log_perplexity[1]))
        if runs:
            against = [_mean([float(v) for v in values], 2) for values in zip(*pairs, strict=True)] or ["–", "–"]
            words, different = (
                np.mean([len(t.split()) for r in runs for t in r["texts"]]),
                np.mean([len(set(r["texts"])) for r in runs]),
            )
            rows.append([method, len(runs), *(against if len(pairs) > 1 else ["–", "–"]), f"{words:.1f}"])
            rows[-1] += [f"{different:.0f}", f"{np.mean([r['distinct'][1] for r in runs]):.2f}"]
            rows[-1] += [f"{np.mean([r['self-bleu'] for r in runs]):.2f}", _level([r["verdict"] for r in runs])]
    header = ["method", "runs", "accuracy - that of SMC", "log perplexity - that of SMC", "words", "different texts"]
    return markdown([*header, "distinct-2", "self-BLEU", "verdicts"], rows) if rows else None


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
    found |= {"network": network(results), "methods": methods(results), "chains": chains(results)}
    return fill(page, {name: table for name, table in found.items() if table is not None})
