"""The sentence model from data to weights, and as a model of the library."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import pad

import crepe_diffusion as cd
from crepe_diffusion.run import publish
from studies.sentences import text
from studies.sentences.network import PRESETS, Sizes, Transformer
from studies.shared.masking import MaskedLoss, held_out, hide
from studies.shared.results import Results
from studies.shared.training import Settings, load_weights, save_tensors, train

__all__ = [
    "LABELS",
    "PRESETS",
    "SETTINGS",
    "Guided",
    "conditional",
    "label_nats",
    "load_network",
    "make_prompt",
    "row_nats",
    "ship",
    "train_network",
    "word_nats",
]

LABELS = ("negative", "positive")
SETTINGS = Settings(n_steps=9_000, batch=64, rate=2e-3, warm_up=300, average=0.999)
EVERY = 200
"""Steps between two checkpoints."""
N_VALIDATED = 2_000
"""Held-out rows by which a network is judged, about so many."""
WEIGHTS = Path(__file__).parent / "weights" / "sentences.safetensors"


def train_network(folder: Path, preset: str = "medium", settings: Settings = SETTINGS) -> Iterator[dict[str, float]]:
    """Train on the rows that `data` wrote to this folder, and write `sentences.safetensors` there at every yield."""
    results = Results(folder)
    if "rows" not in results:
        raise cd.InputError(f"no rows in {folder}: run `python -m studies.sentences data --data {folder}` first")
    rows = {name: torch.from_numpy(a) for name, a in results.arrays("rows").items()}
    sizes = PRESETS[preset]
    torch.manual_seed(settings.seed)
    network = Transformer(sizes)
    network.begin_with(rows["train"].long())
    loss = MaskedLoss(sizes.vocabulary, sizes.n_labels)

    def batches(n: int, generator: torch.Generator) -> Tensor:
        chosen = rows["train"][torch.randint(len(rows["train"]), (n,), generator=generator)]
        return chosen.long()

    validate = held_out(_some(rows["held_out"]), loss)
    for line in train(network, batches, settings, folder / preset, objective=loss, validate=validate, every=EVERY):
        tensors, _ = load_weights(folder / preset / "average.safetensors")
        about = {"sizes": json.dumps(asdict(sizes)), "log": json.dumps(line)}
        save_tensors(folder / "sentences.safetensors", tensors, about)
        yield line


def _some(rows: Tensor) -> Tensor:
    return rows[:: max(1, len(rows) // N_VALIDATED)].long()


def ship(folder: Path, out: Path = WEIGHTS) -> dict[str, float]:
    """Copy the averaged weights in half precision, and the tokenizer, to where the study reads them."""
    tensors, about = load_weights(folder / "sentences.safetensors")
    save_tensors(out, {name: value.half() for name, value in tensors.items()}, about)
    publish(out.with_name(text.TOKENIZER.name), (folder / text.TOKENIZER.name).read_bytes())
    line: dict[str, float] = json.loads(about["log"])
    network, rows = load_network(out), _some(torch.from_numpy(Results(folder).arrays("rows")["held_out"]))
    nats = label_nats(network, rows)
    found = {"label, nats": float(nats.mean()), "label, share right": float((nats > 0).double().mean())}
    return {**line, "rows": len(rows), "nats per word": word_nats(network, rows), **found}


def load_network(path: Path = WEIGHTS) -> Transformer:
    """A trained network, ready to predict."""
    tensors, about = load_weights(path)
    network = Transformer(Sizes(**json.loads(about["sizes"])))
    network.load_state_dict({name: value.float() for name, value in tensors.items()})
    return network.eval().requires_grad_(False)


@torch.no_grad()
def row_nats(network: Transformer, x: Tensor, label: Tensor, n: int = 8, seed: int = 0) -> Tensor:
    """The bound on `-log p(x | label)` that the network is trained on, (rows,): the mean of `n` sets of hidden places.

    Unknown words are not counted. The same seed hides the same places, so that differences are less noisy.
    """
    generator, mask = torch.Generator().manual_seed(seed), network.sizes.vocabulary
    total = torch.zeros(len(x), dtype=torch.float64)
    for _ in range(n):
        hidden = hide((x.shape[0], x.shape[1]), generator)
        hidden = hidden[torch.randperm(len(x), generator=generator)]  # later rows have more hidden: not always the same
        asked = hidden & (x != mask)
        logits = network.logits(x.masked_fill(hidden, mask), label, asked)
        each = torch.nn.functional.cross_entropy(logits, x[asked], reduction="none")
        row = asked.nonzero()[:, 0]
        total.index_add_(0, row, (each * (x.shape[1] / hidden.sum(1))[row]).double())
    return total / n


def label_nats(network: Transformer, rows: Tensor, n: int = 8) -> Tensor:
    """How many nats more likely each row (tokens, label) is with its own label than with the other one, (rows,)."""
    x, label = rows[:, :-1], rows[:, -1]
    return row_nats(network, x, 1 - label, n) - row_nats(network, x, label, n)


def word_nats(network: Transformer, rows: Tensor, n: int = 8) -> float:
    """Nats per word of rows (tokens, label) given their labels, with what it costs that a sentence ends; rows with
    unknown words are left out."""
    known = rows[(rows[:, :-1] < network.sizes.vocabulary).all(1)]
    x = known[:, :-1]
    return float(row_nats(network, x, known[:, -1], n).sum() / (x != text.PAD).sum())


class Reader(torch.nn.Module):
    """The network as a function of (tokens, t, (label, hidden)): what stands at hidden positions is not shown to it.

    Rows may be shorter than the network's: what is behind them is padding. Log-probabilities are computed at masked
    positions alone, since no kernel looks elsewhere; there they are uniform.
    """

    def __init__(self, network: Transformer):
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, t: Tensor, condition: tuple[Tensor, Tensor]) -> Tensor:
        label, hidden = condition
        mask, behind = self.network.sizes.vocabulary, (0, self.network.sizes.length - x.shape[1])
        asked, seen = x == mask, pad(x.masked_fill(hidden, mask), behind, value=text.PAD)
        log_p = torch.full((*x.shape, mask), -math.log(mask))
        log_p[asked] = self.network.logits(seen, label, pad(asked, behind)).log_softmax(-1)
        return log_p


def conditional(
    network: Transformer, label: int | None, prompt: Tensor | None = None, hidden: Tensor | None = None
) -> cd.models.TokenModel:
    """The law of sentences with this label (None: of all sentences), that have the tokens of the prompt where it is not
    -1, and end where it does. The network does not see the prompt where `hidden` is true: the partner of guidance by a
    prompt."""
    sizes = network.sizes
    length = sizes.length if prompt is None else len(prompt)
    if label is not None and label not in range(sizes.n_labels):
        raise cd.InputError(f"label must be one of {', '.join(LABELS)}, or None, got {label!r}")
    condition = (
        torch.tensor(sizes.n_labels if label is None else label),
        torch.zeros(length, dtype=torch.bool) if hidden is None else hidden,
    )
    return cd.models.TokenModel(
        Reader(network), (length,), sizes.vocabulary, condition=condition, prompt=prompt, network=network
    )


def make_prompt(tokenizer: Tokenizer, words: str = "", n_free: int = 12, length: int = text.LENGTH) -> Tensor:
    """A prompt: the words, then `n_free` free positions (-1), which must fit into the model."""
    said = text.encode(tokenizer, words, length) if words else []
    if len(said) + n_free > length:
        raise cd.InputError(
            f"{words!r} has {len(said)} tokens and {n_free} are to be drawn, but the model takes {length}: shorten the"
            f" prompt, or draw at most {length - len(said)}"
        )
    return torch.tensor([*said, *[-1] * n_free])


@dataclass(frozen=True)
class Guided:
    """Sentences guided with strength w: by the label, or where there is none, by the words of the prompt."""

    network: Transformer
    strength: float
    label: int | None
    prompt: Tensor

    @cached_property
    def models(self) -> tuple[cd.models.TokenModel, cd.models.TokenModel]:
        """The conditional and the unconditional model, which are one network."""
        said = self.prompt > text.PAD
        if self.label is None and not bool(said.any()):
            raise cd.InputError("there is nothing to guide by: give a label, or a prompt with words")
        hidden = said if self.label is None else None
        one, other = (conditional(self.network, at, self.prompt, h) for at, h in ((self.label, None), (None, hidden)))
        return one, other

    @property
    def length(self) -> int:
        """Positions that are drawn."""
        return int((self.prompt < 0).sum())

    @property
    def target(self) -> cd.Target:
        return cd.guided(*self.models, self.strength)

    def proposal(self, strength: float) -> cd.Proposal:
        """Walks guided by this strength instead."""
        return cd.Proposal(exponents=(1 - strength, strength))
