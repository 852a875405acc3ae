"""Laws of k residues, built from masked language models of antibodies.

    pi(x)  ~  E_order[ prod_j p_j(x; order)^{c_j} ]  exp(r(x)),      p_j(x; order) = prod_i p_j(x_i | residues before i)

The conditionals of a masked language model need not belong to one joint law, so the order counts; it is uniformly
random and the same for all models. With few free positions everything can be enumerated: `21^k - 20^k` predictions of
each network, `k!` orders, `20^k` sequences.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.errors import InputError
from studies.antibodies.antibody import LETTERS, MASK, Antibody

__all__ = ["Known", "enumerated", "known_answers", "language_model", "least_likely", "sequences"]

Network = Callable[[Tensor], Tensor]
N = len(LETTERS)


def language_model(network: Network, prompt: Tensor) -> cd.models.Model:
    """A network from tokens (rows, length) to logits (rows, length, 21) as a masked diffusion of the free residues."""
    return cd.models.from_masked_lm(network, mask_id=MASK, prompt=prompt, vocab_size=N + 1)


def least_likely(network: Network, antibody: Antibody, k: int) -> list[int]:
    """The k framework positions whose residues the network finds least likely, given all others; in order."""
    positions = antibody.framework
    if not 1 <= k <= len(positions):
        raise InputError(f"k must be 1 to {len(positions)}, the size of the framework of {antibody.name}, got {k!r}")
    x = antibody.tokens.repeat(len(positions), 1)
    rows = torch.arange(len(positions))
    x[rows, positions] = MASK
    with torch.no_grad():
        log_p = network(x)[rows, positions, :N].log_softmax(-1)
    found = log_p[rows, antibody.tokens[positions]].argsort()[:k]
    return sorted(positions[int(i)] for i in found)


def sequences(prompt: Tensor) -> Tensor:
    """All sequences that fill the masks of a prompt, (20^k, length); the last free position changes fastest."""
    free = (prompt == MASK).nonzero()[:, 0]
    out = prompt.repeat(N ** len(free), 1)
    out[:, free] = torch.cartesian_prod(*[torch.arange(N)] * len(free)).reshape(-1, len(free))
    return out


class Known:
    """A network whose answers to all states of k free residues are kept: the same function without its cost.

    It sees the free residues alone, (rows, k), since all others are frozen.

    >>> network = lambda x: torch.zeros(*x.shape, 21)
    >>> known = known_answers(network, torch.tensor([3, 20, 20]))
    >>> known.n_rows, known(torch.tensor([[20, 7]])).shape
    (41, torch.Size([1, 2, 21]))
    """

    def __init__(self, logits: Tensor):
        self.logits, self.k = logits, logits.shape[1]
        self.n_rows = (N + 1) ** self.k - N**self.k

    def index(self, states: Tensor) -> Tensor:
        """The row of states (rows, k)."""
        return (states * (N + 1) ** torch.arange(self.k - 1, -1, -1)).sum(-1)

    def __call__(self, x: Tensor) -> Tensor:
        return self.logits[self.index(x)]

    def model(self) -> cd.models.Model:
        return cd.models.from_masked_lm(self, mask_id=MASK, length=self.k, vocab_size=N + 1)

    def log_prob(self, order: Sequence[int]) -> Tensor:
        """`log p(x; order)` of all sequences, (20^k,), in the order of `sequences`."""
        complete = torch.cartesian_prod(*[torch.arange(N)] * self.k).reshape(-1, self.k)
        state, total = torch.full_like(complete, MASK), torch.zeros(len(complete), dtype=torch.float64)
        log_p = self.logits[..., :N].to(torch.float64).log_softmax(-1)
        for i in order:
            total += log_p[self.index(state), i, complete[:, i]]
            state[:, i] = complete[:, i]
        return total


def known_answers(network: Network, prompt: Tensor, batch: int = 64) -> Known:
    """All answers of a network to this prompt: `21^k - 20^k` rows. States without a mask are asked nothing."""
    free = (prompt == MASK).nonzero()[:, 0]
    k = len(free)
    if k > 4:
        raise InputError(f"{k} free positions have {(N + 1) ** k - N**k:,} states: enumerate 4 at most")
    states = torch.cartesian_prod(*[torch.arange(N + 1)] * k).reshape(-1, k)
    partial = (states == MASK).any(1).nonzero()[:, 0]
    x = prompt.repeat(len(partial), 1)
    x[:, free] = states[partial]
    with torch.no_grad():
        logits = torch.cat([network(part)[:, free] for part in x.split(batch)])
    return Known(torch.zeros(len(states), k, N + 1, dtype=logits.dtype).index_copy_(0, partial, logits))


def enumerated(factors: Sequence[tuple[Known, float]], reward: Tensor | None = None) -> tuple[Tensor, float]:
    """`pi` of all sequences, (20^k,), and `log Z`, under the random-order law."""
    k = factors[0][0].k
    orders = list(itertools.permutations(range(k)))
    each = torch.stack([sum((c * known.log_prob(o) for known, c in factors), torch.zeros(())) for o in orders])
    log_pi = each.logsumexp(0) - math.log(len(orders))
    if reward is not None:
        log_pi = log_pi + reward.to(torch.float64)
    log_z = float(log_pi.logsumexp(0))
    return (log_pi - log_z).exp(), log_z
