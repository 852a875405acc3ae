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
