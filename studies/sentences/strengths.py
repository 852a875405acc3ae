"""The paper's sweep on the network: target strengths times proposal strengths, every method at equal rows, both labels.

A unit is one run of one method on one cell with one label and one seed. Its draws are kept, and judged afterwards: the
share of texts whose sentiment is the wanted one, perplexity, distinct-n and self-BLEU of `N_JUDGED` draws by weight.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

import crepe_diffusion as cd
from studies.sentences import text
from studies.sentences.diversity import distinct, self_bleu
from studies.sentences.model import LABELS, Guided, make_prompt
from studies.sentences.network import Transformer
from studies.sentences.sweep import METHODS, Group, masked
from studies.shared.results import Results

__all__ = [
    "CELLS",
    "CHAINS",
    "STRENGTHS",
    "Unit",
    "chain_name",
    "judge",
    "measure",
    "perplexity_of",
    "reference",
    "run_chain",
    "units",
]

STRENGTHS = (1.0, 1.2, 1.4, 1.8)
N_FREE = 12
"""Words of a sentence at most; what is behind them is padding. The exact walk costs one row per word."""
ROWS = 1_950
"""Rows of each model in a unit: 150 particles, in batches of 50 as in the paper."""
N_JUDGED = 96
EVERY_READ = 3
"""Sentiment is judged of `N_JUDGED` draws of a run, perplexity, which costs ten times as much, of every third."""
METHOD_NAMES = ("plain", "SMC", "particle Gibbs", "replica exchange")
FIRST = [(1.4, 1.4), (1.4, 1.0), (1.8, 1.8), (1.0, 1.0), (1.8, 1.0), (1.2, 1.2), (1.2, 1.0)]
CELLS = FIRST + [(a, b) for a in STRENGTHS for b in STRENGTHS if (a, b) not in FIRST]
"""(target, proposal): the diagonal and the proposal without guidance first."""

CHAINS = [(1.4, 1.0), (1.4, 1.4)]
"""Where the paper saw accuracy drop along the chain, and its neighbour."""
N_CHAINS = 3
"""Runs of each, since one alone does not show what is chance."""


def chain_name(cell: tuple[float, float], seed: int) -> str:
    return f"chain {cell[0]:g} {cell[1]:g} {seed}"


@dataclass(frozen=True)
class Unit:
    """One run; plain guidance corrects nothing, so its target is its proposal.

    >>> Unit(1.4, 1.0, "SMC", 1, 0).name
    'net 1.4 1 SMC positive 0'
    """

    target: float
    proposal: float
    method: str
    label: int
    seed: int

    @property
    def numbers(self) -> int:
        """A seed of its own: with the same random numbers everywhere, runs that correct little have the same draws."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4], "big") >> 1

    @property
    def name(self) -> str:
        return f"net {self.target:g} {self.proposal:g} {self.method} {LABELS[self.label]} {self.seed}"


def methods_of(target: float, proposal: float) -> tuple[str, ...]:
    """Plain guidance runs where the target is the proposal, and alone where both are 1: nothing is to be corrected."""
    if target == proposal == 1:
        return METHOD_NAMES[:1]
    return METHOD_NAMES if target == proposal else METHOD_NAMES[1:]


def units(cells: Sequence[tuple[float, float]], seeds: Sequence[int]) -> Iterator[Unit]:
    """All runs of these cells, seed by seed and label by label, so that what is there first is a whole sweep."""
    for seed in seeds:
        for label in reversed(range(len(LABELS))):
            for target, proposal in cells:
                for method in methods_of(target, proposal):
                    yield Unit(target, proposal, method, label, seed)


def measure(network: Transformer, tokenizer: Tokenizer, unit: Unit, rows: int = ROWS, n_free: int = N_FREE) -> Group:
    """The draws of one unit with their weights."""
    prompt = make_prompt(tokenizer, n_free=n_free, length=network.sizes.length)
    problem = Guided(network, unit.target, unit.label, prompt)
    groups, used = METHODS[unit.method](problem, problem.proposal(unit.proposal), rows, unit.numbers, 1)
    return Group(groups[0].x, groups[0].weights, groups[0].log_z, groups[0].verdict, used)


def run_chain(
    network: Transformer,
    tokenizer: Tokenizer,
    cell: tuple[float, float],
    label: int,
    n: int = 1_000,
    burn_in: int = 150,
    n_free: int = N_FREE,
    seed: int = 0,
) -> tuple[Tensor, dict[str, Any]]:
    """One long chain from the noise end, as in the paper: draws (n, length), and what the verdict says of them."""
    prompt = make_prompt(tokenizer, n_free=n_free, length=network.sizes.length)
    problem = Guided(network, cell[0], label, prompt)
    process = masked(problem).counted()
    chain = cd.ReplicaExchange(
        problem.target,
        cd.ladder.linear(n_free + 1),
        n_chains=1,
        process=process,
        proposal=problem.proposal(cell[1]),
        seed=seed,
    )
    out = chain.sample(n, burn_in=burn_in, progress=False)
    acceptance = chain.diagnostics.acceptance()
    verdict = out.verdict()
    return out.x, {
        "tours": len(torch.unique(out.born[:, 0] * (n_free + 1) + out.replica[:, 0])),
        "acceptance": float(acceptance.mean()),
        "least acceptance": float(acceptance.min()),
        "verdict": verdict.level,
        "says": str(verdict),
        "rows": out.evaluations.rows / 2,
        "n": n,
    }


# -- judging -------------------------------------------------------------------------------------------------------


def choose(weights: np.ndarray, n: int) -> np.ndarray:
    """Indices of `n` draws by weight, systematically: each occurs n w_i times, rounded up or down.

    >>> choose(np.array([0.5, 0.0, 0.5]), 4).tolist()
    [0, 0, 2, 2]
    """
    places = (np.arange(n) + 0.5) / n
    total = np.cumsum(weights / weights.sum())
    return np.minimum(np.searchsorted(total, places), len(weights) - 1)


Scorer = Callable[[Sequence[str]], Tensor]


def judge(
    results: Results, tokenizer: Tokenizer, sentiment: Scorer, perplexity: Scorer, n: int = N_JUDGED
) -> Iterator[str]:
    """Score every unit and chain that has no scores yet; yields its name. The same text of a run is scored once."""

    def score(texts: Sequence[str], judge: Scorer) -> np.ndarray:
        new = sorted(set(texts))
        found = dict(zip(new, judge(new).tolist(), strict=True))
        return np.array([found[t] for t in texts])

    for name in results.names("net-*") + results.names("chain-*"):
        record = results[name]
        if "texts" in record:
            continue
        arrays = results.arrays(name)
        weights = arrays.get("weights", np.ones(len(arrays["x"])))
        chosen = choose(weights, n if "weights" in arrays else len(weights) // 5)
        texts = [text.decode(tokenizer, torch.from_numpy(arrays["x"][i])) for i in chosen]
        p = score(texts, sentiment)
        nats, tokens = score(texts[:: EVERY_READ if "weights" in arrays else 1], perplexity).T
        right = p > 0.5 if record["label"] == 1 else p < 0.5
        record |= {
            "texts": texts,
            "right": right.astype(int).tolist(),
            "nats": np.round(nats, 3).tolist(),
            "tokens": tokens.astype(int).tolist(),
            "distinct": [distinct(texts, k) for k in (1, 2, 3)],
            "self-bleu": self_bleu(texts),
        }
        results.save(name, record, **arrays)
        yield name


def reference(
    sentences: Sequence[tuple[str, int]], sentiment: Scorer, perplexity: Scorer, n: int = 200
) -> dict[str, float]:
    """How the judges do on sentences that people wrote: accuracy on all, perplexity of the beginnings of the first n.

    Beginnings are as long as what is drawn. Their words in random order are there too: what a text without grammar has.
    """
    texts, labels = [s for s, _ in sentences], torch.tensor([label for _, label in sentences])
    p = sentiment(texts)
    begun = [" ".join(t.split()[:N_FREE]) for t in texts[:n]]
    generator = np.random.default_rng(0)
    mixed = [" ".join(generator.permutation(t.split())) for t in begun]
    found = {name: perplexity(t).sum(0) for name, t in (("perplexity", begun), ("of words in random order", mixed))}
    values = {name: math.exp(float(nats / tokens)) for name, (nats, tokens) in found.items()}
    return {
        "sentences": float(len(texts)),
        "accuracy": float(((p > 0.5) == (labels == 1)).double().mean()),
        "called positive": float((p > 0.5).double().mean()),
        **values,
        "distinct-2": distinct(begun[:N_JUDGED], 2),
        "self-bleu": self_bleu(begun[:N_JUDGED]),
    }


def perplexity_of(nats: Iterable[float], tokens: Iterable[int]) -> float:
    """`exp` of the mean nats per token, over all texts.

    >>> round(perplexity_of([4.0, 2.0], [2, 1]), 2)                       # two nats per token
    7.39
    """
    return math.exp(math.fsum(nats) / max(1, sum(tokens)))
