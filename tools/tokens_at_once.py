"""Error against positions that change at once: `python tools/tokens_at_once.py` prints the table of docs/decisions.md.

Chains of steep tables (4 tokens of 3, p^2 and guidance 2) begin in the known law of each level, so that only the bias
of the ratio shows, and not how slowly a chain finds its law. TV of the draws of the last iterations from the truth.
"""

from __future__ import annotations

import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.kernels import State
from crepe_diffusion.processes import Masked, Uniform

VOCAB, LENGTH, CHAINS, BURN_IN, DRAWS = 3, 4, 500, 20, 20
PROCESSES = {"masked": Masked, "uniform": Uniform}


def target(kind: str, task: str) -> cd.Target:
    p, q = (
        cd.models.TokenTable(cd.Stream(5).at("steep", i).uniform((1, *(VOCAB,) * LENGTH))[0] ** 3 + 1e-3, kind)
        for i in range(2)
    )
    return cd.guided(q, p, 2.0) if task == "guidance 2" else p**2.0


def log_law(target: cd.Target, states: Tensor, t: float) -> Tensor:
    """Known up to a constant."""
    return sum((c * m.log_prob(states, t).clamp(min=-1e4) for m, c in target.factors), torch.zeros(len(states)))


def bias(kind: str, task: str, n_levels: int, at_once: int | None) -> tuple[float, float]:
    """TV from the law, and network rows per iteration and chain."""
    wanted, levels = target(kind, task), cd.ladder.linear(n_levels)
    chain = cd.ReplicaExchange(wanted, levels, n_chains=CHAINS, process=PROCESSES[kind](VOCAB, at_once=at_once))
    states = wanted.models[0].all_states()
    stream = cd.Stream(1)
    at = [
        states[stream.at(m).categorical(log_law(wanted, states, t).expand(CHAINS, -1))]
        for m, t in enumerate(levels.levels.tolist())
    ]
    x, level = torch.stack(at, dim=1).flatten(0, 1), torch.arange(n_levels).expand(CHAINS, -1).clone()
    chain.state = State(x, chain.evaluate(x, levels.levels.repeat(CHAINS)), level)
    before = chain.evaluate.counts.rows
    drawn = chain.sample(DRAWS, burn_in=BURN_IN).x
    index = (drawn * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(1)
    clean = wanted.models[0].states
    truth = torch.softmax(log_law(wanted, clean, 0.0), 0)
    distance = (torch.bincount(index, minlength=len(truth)) / len(index) - truth).abs().sum() / 2
    rows = (chain.evaluate.counts.rows - before) / CHAINS / (BURN_IN + DRAWS) / chain.evaluate.network_rows
    return float(distance), rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("| process, target, levels | 1 at once | 2 | 3 | all |\n|---|---|---|---|---|")
    for kind in PROCESSES:
        for task in ("tempering 2", "guidance 2"):
            for n_levels in (3, 5, 9):
                cells = ["{:.3f} ({:.1f})".format(*bias(kind, task, n_levels, n)) for n in (1, 2, 3, None)]
                print(f"| {kind}, {task}, {n_levels} | {' | '.join(cells)} |", flush=True)
