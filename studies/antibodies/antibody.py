"""Antibodies as tokens: residues 0 .. 19 in alphabetical order of their letters, 20 where one is to be drawn.

A design freezes what must stay (the loops that bind, and all positions that are not listed) and frees k positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crepe_diffusion.errors import InputError

__all__ = ["ANTIBODIES", "LETTERS", "MASK", "Antibody", "decode", "encode"]

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
MASK = len(LETTERS)


def encode(sequence: str) -> Tensor:
    """Tokens (length,) of a sequence; `_` is a position to be drawn.

    >>> encode("AC_Y").tolist()
    [0, 1, 20, 19]
    """
    tokens = []
    for i, letter in enumerate(sequence):
        if letter not in LETTERS + "_":
            raise InputError(
                f"{letter!r} at position {i + 1} is none of the 20 residues {LETTERS}: write _ where one is to be drawn"
            )
        tokens.append(MASK if letter == "_" else LETTERS.index(letter))
    if not tokens:
        raise InputError("the sequence is empty: give the residues of a variable domain")
    return torch.tensor(tokens)


def decode(x: Tensor) -> str:
    """The letters of one row of tokens.

    >>> decode(encode("AC_Y"))
    'AC_Y'
    """
    return "".join((LETTERS + "_")[int(v)] for v in x)


@dataclass(frozen=True)
class Antibody:
    """A variable domain, and its loops (CDRs, by Kabat's definition) as they are written in it.

    >>> ANTIBODIES["4D5"].framework[:3], len(ANTIBODIES["4D5"].framework)
    ([0, 1, 2], 87)
    """

    name: str
    sequence: str
    loops: tuple[str, ...]
    source: str

    @property
    def tokens(self) -> Tensor:
        return encode(self.sequence)

    @property
    def framework(self) -> list[int]:
        """Positions outside of the loops."""
        inside: set[int] = set()
        for loop in self.loops:
            start = self.sequence.find(loop)
            if start < 0 or not loop:
                raise InputError(f"{self.name} does not contain the loop {loop!r}: write it as in the sequence")
            inside |= set(range(start, start + len(loop)))
        return [i for i in range(len(self.sequence)) if i not in inside]

    def prompt(self, free: Sequence[int]) -> Tensor:
        """The tokens with masks at the free positions, which count from 0."""
        outside = [i for i in free if not 0 <= i < len(self.sequence)]
        if outside or not free:
            raise InputError(f"free positions are numbers from 0 to {len(self.sequence) - 1}, got {list(free)}")
        tokens = self.tokens
        tokens[list(free)] = MASK
        return tokens

    def n_mutations(self, x: Tensor) -> Tensor:
        """How many residues of each row differ from the antibody's."""
        return (x != self.tokens).sum(1)


ANTIBODIES = {
    antibody.name: antibody
    for antibody in (
        Antibody(
            "4D5",
            "EVQLQQSGPELVKPGASLKLSCTASGFNIKDTYIHWVKQRPEQGLEWIGRIYPTNGYTRYDPKFQDKATITADTSSNTAYLQVSRLTSEDTAVYYCSRWGGDGFYAMDYWGQGASVTVSS",
            ("DTYIH", "RIYPTNGYTRYDPKFQD", "WGGDGFYAMDY"),
            "heavy chain of the mouse antibody from which trastuzumab was made (Carter et al. 1992)",
        ),
        Antibody(
            "trastuzumab",
            "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS",
            ("DTYIH", "RIYPTNGYTRYADSVKG", "WGGDGFYAMDY"),
            "heavy chain of the humanised antibody (Carter et al. 1992)",
        ),
        Antibody(
            "OKT3",
            "QVQLQQSGAELARPGASVKMSCKASGYTFTRYTMHWVKQRPGQGLEWIGYINPSRGYTNYNQKFKDKATLTTDKSSSTAYMQLSSLTSEDSAVYYCARYYDDHYCLDYWGQGTTLTVSS",
            ("RYTMH", "YINPSRGYTNYNQKFKD", "YYDDHYCLDY"),
            "heavy chain of muromonab-CD3, a mouse antibody (Kung et al. 1979)",
        ),
    )
}
