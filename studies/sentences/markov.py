"""A twin of the sentence model whose truth is known: a hidden Markov model of word classes for each sentiment.

    p(x | c) = sum_z p(z_1) p(x_1 | z_1) prod_i p(z_i | z_{i-1}) p(x_i | z_i)
    p(x)     = the mean of both (mixture), or a model of its own

`p(x_0^i = v | x_t, c)` under any mask is exact by one pass forward and one backward: what is masked has no evidence.
The guided law is `p(x | c) (p(x | c) / p(x))^(w - 1)`, so draws of `p(x | c)` with these weights are exact draws of it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.errors import InputError, check_choice
from crepe_diffusion.processes import Masked, Process
from studies.shared.exact import Truth
from studies.shared.training import load_weights, save_tensors

__all__ = ["Bank", "Guided", "MarkovModel", "Truth", "fit", "load_twin", "make_twin", "words_of"]

LENGTH, N_WORDS, N_CLASSES = 12, 256, 16
OTHER = "<other>"
NEGATIVE, POSITIVE, ALL = range(3)
TWIN = Path(__file__).parent / "weights" / "twin.safetensors"


class Bank:
    """Hidden Markov models over the same words: `first` (K, H), `steps` (K, H, H), `words` (K, H, V), all normalised.

    >>> bank = Bank(torch.ones(1, 1), torch.ones(1, 1, 1), torch.tensor([[[0.25, 0.75]]]))
    >>> bank.log_evidence(torch.tensor([[1, 2, 0]])).exp().tolist()       # the middle one is masked: 0.75 * 0.25
    [[0.1875]]
    """

    def __init__(self, first: Tensor, steps: Tensor, words: Tensor):
        self.first, self.steps, self.words = (z.to(torch.float64) for z in (first, steps, words))
        self.n_models, self.n_hidden, self.n_words = self.words.shape

    def __getitem__(self, models: Sequence[int]) -> Bank:
        chosen = list(models)
        return Bank(self.first[chosen], self.steps[chosen], self.words[chosen])

    def _evidence(self, x: Tensor) -> Tensor:
        """`p(x_i | z_i)`, (L, K, rows, H), and 1 where x is masked."""
        table = torch.cat([self.words, torch.ones_like(self.words[..., :1])], -1).transpose(1, 2)  # (K, V + 1, H)
        return table[:, x.T].transpose(0, 1)

    def forward(self, evidence: Tensor) -> tuple[Tensor, Tensor]:
        """`p(z_i | x_1 .. x_i)` (L, K, rows, H), and `log p(x_1 .. x_L)` (K, rows)."""
        here, total = self.first[:, None] * evidence[0], torch.zeros(evidence.shape[1:3], dtype=torch.float64)
        found: list[Tensor] = []
        for i in range(len(evidence)):
            if i:
                here = (found[-1] @ self.steps) * evidence[i]
            scale = here.sum(-1, keepdim=True)
            found.append(here / scale)
            total = total + scale[..., 0].log()
        return torch.stack(found), total

    def backward(self, evidence: Tensor) -> Tensor:
        """`p(x_{i+1} .. x_L | z_i)` (L, K, rows, H), up to a factor of each i."""
        back = self.steps.transpose(1, 2)
        found = [torch.ones_like(evidence[0])]
        for i in range(len(evidence) - 1, 0, -1):
            here = (found[-1] * evidence[i]) @ back
            found.append(here / here.sum(-1, keepdim=True))
        return torch.stack(found[::-1])

    def log_evidence(self, x: Tensor) -> Tensor:
        """`log p` of the words that are not masked, (K, rows)."""
        return self.forward(self._evidence(x))[1]

    def posterior(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`p(x_i = v | the words that are not masked)` at masked positions, (K, rows, L, V), and their log evidence."""
        evidence = self._evidence(x)
        alpha, total = self.forward(evidence)
        hidden = alpha * self.backward(evidence)
        hidden = (hidden / hidden.sum(-1, keepdim=True)).permute(1, 2, 0, 3)  # (K, rows, L, H)
        return hidden @ self.words[:, None], total

    def sample(self, n: int, model: int, length: int, generator: torch.Generator) -> Tensor:
        """Sentences (n, length) of one model."""

        def draw(p: Tensor) -> Tensor:
            u = torch.rand(len(p), 1, generator=generator, dtype=torch.float64)
            return (p.cumsum(-1) < u * p.sum(-1, keepdim=True)).sum(-1).clamp(max=p.shape[-1] - 1)

        hidden, found = draw(self.first[model].expand(n, -1)), []
        for i in range(length):
            hidden = draw(self.steps[model][hidden]) if i else hidden
            found.append(draw(self.words[model][hidden]))
        return torch.stack(found, 1)


def fit(x: Tensor, n_words: int, n_hidden: int, n_rounds: int, seed: int = 0, prior: float = 0.05) -> Bank:
    """One model of sentences (n, L) by expectation maximisation; `prior` is added to every count, so nothing is zero.

    >>> x = torch.tensor([[0, 1, 0, 1, 0]] * 50 + [[1, 0, 1, 0, 1]] * 50)
    >>> bank = fit(x, 2, 2, 60)
    >>> round(float(bank.log_evidence(x[:1]).exp()), 1)
    0.5
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        p = 0.5 + torch.rand(shape, generator=generator, dtype=torch.float64)
        return p / p.sum(-1, keepdim=True)

    frequency = torch.bincount(x.flatten(), minlength=n_words).to(torch.float64) + prior
    words = random(1, n_hidden, n_words) * frequency
    bank = Bank(random(1, n_hidden), random(1, n_hidden, n_hidden), words / words.sum(-1, keepdim=True))
    flat = x.T.flatten()
    for _ in range(n_rounds):
        evidence = bank._evidence(x)
        alpha, _ = bank.forward(evidence)
        beta = bank.backward(evidence)
        hidden = alpha * beta
        hidden = (hidden / hidden.sum(-1, keepdim=True))[:, 0]  # (L, rows, H)
        pair = alpha[:-1, 0, :, :, None] * bank.steps[0] * (beta[1:, 0] * evidence[1:, 0])[:, :, None]
        pair = (pair / pair.sum((-2, -1), keepdim=True)).sum((0, 1))
        counts = torch.zeros(n_words, n_hidden, dtype=torch.float64).index_add_(0, flat, hidden.flatten(0, 1)).T
        tables = (hidden[0].sum(0) + prior, pair + prior, counts + prior * frequency / frequency.sum() * n_words)
        bank = Bank(*((t / t.sum(-1, keepdim=True))[None] for t in tables))
    return bank


def words_of(text: str) -> list[str]:
    """Lower-case words and signs."""
    return text.lower().split()


def make_twin(
    corpus: Sequence[tuple[str, int]], out: Path = TWIN, n_rounds: int = 100, n_words: int = N_WORDS
) -> dict[str, float]:
    """Fit three models to the first words of labelled sentences, and write them: negative, positive, all."""
    counts = Counter(word for text, _ in corpus for word in words_of(text))
    vocabulary = [OTHER, *(word for word, _ in counts.most_common(n_words - 1))]
    index = {word: i for i, word in enumerate(vocabulary)}
    rows = [([index.get(w, 0) for w in words_of(text)[:LENGTH]], label) for text, label in corpus]
    rows = [(tokens, label) for tokens, label in rows if len(tokens) == LENGTH]
    x, labels = torch.tensor([tokens for tokens, _ in rows]), torch.tensor([label for _, label in rows])
    parts = [x[labels == NEGATIVE], x[labels == POSITIVE], x]
    banks = [fit(part, len(vocabulary), N_CLASSES, n_rounds, seed) for seed, part in enumerate(parts)]
    tensors = {
        name: torch.cat([getattr(b, name) for b in banks]).to(torch.float32) for name in ("first", "steps", "words")
    }
    save_tensors(out, tensors, {"words": json.dumps(vocabulary), "sentences": str(len(x)), "rounds": str(n_rounds)})
    found = {
        name: float(b.log_evidence(p).mean()) / LENGTH
        for name, b, p in zip(("negative", "positive", "all"), banks, parts, strict=True)
    }
    return {**found, "sentences": float(len(x)), "other": float((x == 0).double().mean())}


def load_twin(path: Path = TWIN) -> tuple[Bank, list[str]]:
    """The shipped twin and its words."""
    tensors, about = load_weights(path)
    parts = [tensors[name].to(torch.float64) for name in ("first", "steps", "words")]
    return Bank(*(p / p.sum(-1, keepdim=True) for p in parts)), json.loads(about["words"])


class MarkovModel(cd.models.Model):
    """A mixture of the models of a bank, as a masked diffusion with exact predictions; the mask is word `n_words`.

    Models of one bank are evaluated together.
    """

    dtype = torch.float64

    def __init__(self, bank: Bank, weights: Sequence[float], length: int):
        if len(weights) != bank.n_models:
            raise InputError(f"{len(weights)} weights do not fit a bank of {bank.n_models} models")
        self.bank, self.event_shape = bank, (length,)
        self.log_weights = torch.tensor(weights, dtype=torch.float64).log()
        self._process = Masked(bank.n_words)

    def process(self) -> Process:
        return self._process

    @property
    def network(self) -> Hashable:
        return id(self.bank)

    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        return self.predict_together([self], x, t)[0]

    def predict_together(self, models: Sequence[cd.models.Model], x: Tensor, t: Tensor) -> list[Tensor]:
        posterior, log_evidence = self.bank.posterior(x)
        out = []
        for model in models:
            assert isinstance(model, MarkovModel)
            shares = (model.log_weights[:, None] + log_evidence).softmax(0)
            out.append(torch.einsum("kr,kriv->riv", shares, posterior).log())
        return out

    def log_prob(self, x: Tensor) -> Tensor:
        """`log p(x)` of complete sentences."""
        return (self.log_weights[:, None] + self.bank.log_evidence(x)).logsumexp(0)


@dataclass(frozen=True)
class Guided:
    """Guidance towards a sentiment with strength w; `unconditional` is `"mixture"` or `"own"`, a model of everything.

    >>> bank = Bank(torch.ones(3, 1), torch.ones(3, 1, 1), torch.tensor([[[0.5, 0.5]], [[0.1, 0.9]], [[0.2, 0.8]]]))
    >>> Guided(bank, 1.4, length=2).target.exponents
    (-0.4, 1.4)
    """

    bank: Bank
    strength: float
    unconditional: str = "mixture"
    label: int = POSITIVE
    length: int = LENGTH

    def __post_init__(self) -> None:
        check_choice("unconditional", self.unconditional, ("mixture", "own"))
        if self.label not in (NEGATIVE, POSITIVE):
            raise InputError(f"label must be 0 (negative) or 1 (positive), got {self.label!r}")

    @cached_property
    def models(self) -> tuple[MarkovModel, MarkovModel]:
        """The conditional and the unconditional model."""
        if self.unconditional == "mixture":
            bank, one = self.bank[[NEGATIVE, POSITIVE]], [float(c == self.label) for c in range(2)]
            both = (one, [0.5, 0.5])
        else:
            bank, both = self.bank[[self.label, ALL]], ([1.0, 0.0], [0.0, 1.0])
        return MarkovModel(bank, both[0], self.length), MarkovModel(bank, both[1], self.length)

    @property
    def target(self) -> cd.Target:
        target = cd.guided(*self.models, self.strength)
        return target

    def proposal(self, strength: float) -> cd.Proposal:
        """Walks guided by this strength instead."""
        return cd.Proposal(exponents=(1 - strength, strength))

    def truth(self, n: int, seed: int = 0) -> Truth:
        """`n` draws of `p(x | c)` and their weights."""
        x = self.bank.sample(n, self.label, self.length, torch.Generator().manual_seed(seed))
        conditional, unconditional = self.models
        log_w = (self.strength - 1) * (conditional.log_prob(x) - unconditional.log_prob(x))
        return Truth(x, log_w.softmax(0), float(log_w.logsumexp(0)) - math.log(n))

    def statistics(self, x: Tensor) -> dict[str, Tensor]:
        """What errors are measured of, (rows, numbers): `P(label | x)`, nats per word under both models, all words."""
        log_p = self.bank[[NEGATIVE, POSITIVE]].log_evidence(x)
        counts = torch.zeros(len(x), self.bank.n_words, dtype=torch.float64)
        counts.scatter_add_(1, x, torch.full(x.shape, 1 / self.length, dtype=torch.float64))
        return {
            "accuracy": log_p.softmax(0)[self.label][:, None],
            "nats": -(log_p.logsumexp(0) - math.log(2))[:, None] / self.length,
            "words": counts,
        }
