"""What happens to a chain at set iterations besides its steps, wherever it is run or run again."""

from __future__ import annotations

from typing import Any

from crepe_diffusion.errors import InputError
from crepe_diffusion.run.config import Output
from crepe_diffusion.samplers.base import Continuing

__all__ = ["chain_events"]


def chain_events(sampler: Continuing[Any], output: Output, first: int) -> list[str]:
    """After an iteration under a target that came into force at iteration `first`: lines for the log."""
    n, lines = sampler.iteration, []
    if n in output.adapt_at:
        try:
            ladder = sampler.adapt()  # type: ignore[attr-defined]
            lines.append(f"levels moved to {' '.join(f'{t:.4g}' for t in ladder.levels.tolist())}")
        except InputError as error:  # too little was recorded: no reason to end, now and at every resumption
            lines.append(f"levels stay as they are: {error}")
    if output.burn_in and n == first - 1 + output.burn_in:
        sampler.restart_diagnostics()
        lines.append("end of burn-in")
    return lines
