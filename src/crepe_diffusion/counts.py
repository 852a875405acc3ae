"""What a run has cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

__all__ = ["Counts"]


@dataclass
class Counts:
    """Exact cost of a run, and what was not finite.

    - `rows`, `calls`: rows that went through a network, and calls of a network;
    - `gradient_rows`: rows that were differentiated as well;
    - `rewards`: evaluations of a reward, in rows;
    - `nonfinite`: how many rows had a prediction or reward that was NaN or infinite, by level.
    """

    rows: int = 0
    calls: int = 0
    gradient_rows: int = 0
    rewards: int = 0
    nonfinite: Counter[int] = field(default_factory=Counter)

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.rows + other.rows,
            self.calls + other.calls,
            self.gradient_rows + other.gradient_rows,
            self.rewards + other.rewards,
            self.nonfinite + other.nonfinite,
        )

    def numbers(self, n_levels: int) -> list[int]:
        """All of them in a row; what was not finite at the first levels."""
        return [self.rows, self.calls, self.gradient_rows, self.rewards, *(self.nonfinite[m] for m in range(n_levels))]

    def add(self, numbers: list[int]) -> None:
        """Count what another has counted, by its `numbers`.

        >>> counts = Counts(rows=3)
        >>> counts.add(Counts(rows=2, nonfinite=Counter({1: 4})).numbers(2))
        >>> counts.rows, counts.nonfinite
        (5, Counter({1: 4}))
        """
        rows, calls, gradient_rows, rewards, *nonfinite = numbers
        more = Counts(rows, calls, gradient_rows, rewards, Counter({m: k for m, k in enumerate(nonfinite) if k}))
        vars(self).update(vars(self + more))

    def copy(self) -> Counts:
        return replace(self, nonfinite=Counter(self.nonfinite))

    def state_dict(self) -> dict[str, Tensor]:
        bad = sorted(self.nonfinite.items())
        numbers = (self.rows, self.calls, self.gradient_rows, self.rewards)
        return {"numbers": torch.tensor(numbers), "nonfinite": torch.tensor(bad, dtype=torch.long).reshape(-1, 2)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Tensor]) -> Counts:
        rows, calls, gradient_rows, rewards = state["numbers"].tolist()
        return cls(rows, calls, gradient_rows, rewards, Counter(dict(state["nonfinite"].tolist())))
