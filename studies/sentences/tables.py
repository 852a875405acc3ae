"""The tables of the page, from what was measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from studies.sentences import sweep
from studies.sentences.strengths import CELLS, CHAINS, METHOD_NAMES, N_CHAINS, STRENGTHS, chain_name, perplexity_of
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
    """The sweep on the network, cell by cell."""
    found = [(cell, [summary(results, *cell, method) for method in METHOD_NAMES]) for cell in sorted(CELLS)]
    rows = [[f"{target:g}, {proposal:g}", *map(_both, each)] for (target, proposal), each in found if any(each)]
    return markdown(["target, proposal", *METHOD_NAMES], rows) if rows else None


def by_target(results: Results, target: float, method: str) -> dict[str, float] | None:
    """Accuracy and perplexity of all runs with this target, whatever their proposal: corrected, they have one law.

    The errors are those of the mean over runs with one label, put together. Draws of plain guidance have no proposal
    but the target, and are independent: their errors are those of the cell.
    """
    if method == "plain":
        return summary(results, target, target, method)
    runs = [run for proposal in STRENGTHS for run in _runs(results, target, proposal, method).values()]
    if len(runs) < 2:
        return None
    labels = np.array([run["label"] for run in runs])
    accuracy = np.array([np.mean(run["right"]) for run in runs])
    rate = np.array([sum(run["nats"]) / sum(run["tokens"]) for run in runs])
    perplexity = math.exp(rate.mean())
    return {
        "accuracy": float(accuracy.mean()),
        "accuracy error": _error_within(accuracy, labels),
        "perplexity": perplexity,
        "perplexity error": perplexity * _error_within(rate, labels),
    }


def _error_within(values: np.ndarray, labels: np.ndarray) -> float:
    """The standard error of the mean of values whose mean depends on their label.

    >>> _error_within(np.array([1.0, 3.0, 11.0, 13.0]), np.array([0, 0, 1, 1]))
    0.7071067811865476
    """
    groups = [values[labels == label] for label in np.unique(labels)]
    return math.sqrt(sum(len(g) * float(g.var(ddof=1)) for g in groups if len(g) > 1)) / len(values)


def _both(one: dict[str, Any] | None) -> str:
    """Accuracy and perplexity with their errors."""
    if one is None:
        return "–"
    accuracy = f"{one['accuracy']:.2f} ± {one['accuracy error']:.2f}"
    return f"{accuracy}; {one['perplexity']:,.0f} ± {one['perplexity error']:,.0f}"


def targets(results: Results) -> str | None:
    """Accuracy and perplexity against the target's strength, over all proposals."""
    found = [(target, [by_target(results, target, method) for method in METHOD_NAMES]) for target in STRENGTHS]
    rows = [[f"{target:g}", *map(_both, each)] for target, each in found if any(each)]
    return markdown(["target", *METHOD_NAMES], rows) if rows else None


def slopes(runs: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]] | None:
    """How accuracy grows with the strength of the target and with that of the proposal, each with its error.

    Least squares over runs, with a level of its own for each label; None where the two strengths are not apart. A
    method that corrects follows the target.

    >>> runs = [
    ...     {"target": t, "proposal": p, "label": label, "right": [t - 0.5 * p + label]}
    ...     for t in (1.0, 1.4)
    ...     for p in (1.0, 1.4)
    ...     for label in (0, 1)
    ... ]
    >>> [round(slope, 6) for slope, _ in slopes(runs)]
    [1.0, -0.5]
    """
    labels = sorted({run["label"] for run in runs})
    x = np.array([(run["target"], run["proposal"], *(run["label"] == label for label in labels)) for run in runs])
    y = np.array([np.mean(run["right"]) for run in runs])
    n_numbers = x.shape[1]
    if len(y) <= n_numbers or np.linalg.matrix_rank(x) < n_numbers:
        return None
    found = np.linalg.lstsq(x, y, rcond=None)[0]
    variance = float(np.square(y - x @ found).sum()) / (len(y) - n_numbers)
    errors = np.sqrt(np.diag(variance * np.linalg.inv(x.T @ x)))
    return [(float(found[i]), float(errors[i])) for i in (0, 1)]


def methods(results: Results) -> str | None:
    """Every method against SMC of the same cell and seed, over all cells; what it follows; diversity; verdicts."""
    rows = []
    for method in METHOD_NAMES:
        pairs, runs = [], []
        for cell in CELLS:
            other = _runs(results, *cell, "SMC")
            for key, run in _runs(results, *cell, method).items():
                runs.append(run)
                if key in other and method != "SMC":
                    ours, theirs = (
                        (float(np.mean(r["right"])), sum(r["nats"]) / sum(r["tokens"])) for r in (run, other[key])
                    )
                    pairs.append((ours[0] - theirs[0], ours[1] - theirs[1]))
        if runs:
            against = [_mean(list(values), 2) for values in zip(*pairs, strict=True)] if len(pairs) > 1 else ["–", "–"]
            follows = [f"{slope:+.2f} ± {error:.2f}" for slope, error in slopes(runs) or ()] or ["–", "–"]
            different = np.mean([len(set(r["texts"])) for r in runs])
            rows.append([method, len(runs), *against, *follows, f"{different:.0f}"])
            rows[-1] += [
                f"{np.mean([r['distinct'][1] for r in runs]):.2f}",
                f"{np.mean([r['self-bleu'] for r in runs]):.2f}",
            ]
            rows[-1] += [_level([r["verdict"] for r in runs])]
    header = ["method", "runs", "accuracy - SMC's", "log perplexity - SMC's", "slope in target", "slope in proposal"]
    return markdown([*header, "different texts", "distinct-2", "self-BLEU", "verdicts"], rows) if rows else None


def chains(results: Results) -> str | None:
    """The long chains, in quarters."""
    rows = []
    for cell, seed in itertools.product(CHAINS, range(N_CHAINS)):
        found = results.get(chain_name(cell, seed))
        if found and "texts" in found:
            parts = np.array_split(np.arange(len(found["texts"])), 4)
            right, nats, tokens = (np.array(found[k]) for k in ("right", "nats", "tokens"))
            quarters = ", ".join(f"{right[part].mean():.2f}" for part in parts)
            perplexity = ", ".join(f"{perplexity_of(nats[part], tokens[part]):,.0f}" for part in parts)
            rows.append([f"{cell[0]:g}, {cell[1]:g}", f"{right.mean():.2f} ({quarters})"])
            rows[-1] += [f"{perplexity_of(nats, tokens):,.0f} ({perplexity})", found["tours"]]
            rows[-1] += [f"{found['acceptance']:.2f} ({found['least acceptance']:.2f})", found["verdict"]]
    header = ["target, proposal", "accuracy (by quarters)", "perplexity (by quarters)", "tours"]
    return markdown([*header, "acceptance (least)", "verdict"], rows) if rows else None


def fill_page(page: Path, results: Results) -> Path:
    found = {"mixture": twin(results, "mixture"), "own": twin(results, "own"), "paper": paper(results)}
    found |= {"network": network(results), "targets": targets(results), "methods": methods(results)}
    found |= {"chains": chains(results)}
    return fill(page, {name: table for name, table in found.items() if table is not None})
