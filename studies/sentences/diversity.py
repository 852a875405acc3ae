"""How different sentences are: distinct-n and self-BLEU.

distinct-n  =  different n-grams / all n-grams of the set
self-BLEU   =  mean over sentences of BLEU against all others, n-grams up to 4: 1 if each has its copy
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

__all__ = ["distinct", "self_bleu"]


def _grams(text: str, n: int) -> Counter[tuple[str, ...]]:
    words = text.split()
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def distinct(texts: Sequence[str], n: int) -> float:
    """The share of n-grams that are different.

    >>> distinct(["a good film", "a good plot"], 2)                       # "a good" is there twice
    0.75
    """
    counts: Counter[tuple[str, ...]] = Counter()
    for text in texts:
        counts.update(_grams(text, n))
    return len(counts) / max(1, counts.total())


def self_bleu(texts: Sequence[str], n_most: int = 4) -> float:
    """Mean BLEU of each text against all others; a precision of zero counts as half an n-gram, and the reference for
    the length is the nearest one. Texts without words are left out.

    >>> self_bleu(["a dull film about a war", "a dull film about a war"])
    1.0
    >>> self_bleu(["a dull film about a war", "the cast does what it can"]) < 0.2
    True
    """
    words = [text.split() for text in texts if text.split()]
    if len(words) < 2:
        return math.nan
    texts = [" ".join(w) for w in words]
    log_bleu = [0.0] * len(texts)
    for n in range(1, n_most + 1):
        each = [_grams(text, n) for text in texts]
        most: dict[tuple[str, ...], list[int]] = {}  # the two largest counts of an n-gram: the second is "all others"
        for grams in each:
            for gram, count in grams.items():
                most[gram] = sorted([*most.get(gram, []), count], reverse=True)[:2]
        for i, grams in enumerate(each):
            if not grams:  # too short for such n-grams: they say nothing about it
                continue
            hits = 0
            for gram, count in grams.items():
                first, *second = most[gram]
                hits += min(count, first if count < first else (second[0] if second else 0))
            log_bleu[i] += math.log(max(hits, 0.5) / grams.total()) / min(n_most, len(words[i]))
    lengths = Counter(len(w) for w in words)

    def penalty(length: int) -> float:
        lengths[length] -= 1
        nearest = min((v for v in lengths if lengths[v] > 0), key=lambda v: (abs(v - length), v))
        lengths[length] += 1
        return min(0.0, 1 - nearest / length)

    return math.fsum(math.exp(b + penalty(len(w))) for b, w in zip(log_bleu, words, strict=True)) / len(words)
