"""Memory of long texts: `python tools/token_memory.py` prints the table of docs/language-models.md.

A network with the shape of SEDD (its small variant by default: 12 blocks of width 768) and random weights, 33 levels,
micro-batches of one row. Every line is measured in a process of its own: the largest resident memory during one
iteration of a chain, less that before it, in units of one float32 prediction of the micro-batch. To save time, the
chain starts where a model that knows nothing has left it, and `at_once` is so large that a walk has about one turn.
`--process` chooses how tokens change: `turns` (the default), `at-once`, `uniform`, `uniform-at-once` or `euler`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import crepe_diffusion as cd
from crepe_diffusion.processes import Euler, Masked, Process, Uniform

VOCAB = 50258
LENGTHS = (64, 256, 1024)


class Block(nn.Module):
    """Attention and a two-layer network, both shifted and scaled by the noise."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList([nn.LayerNorm(width, elementwise_affine=False) for _ in range(2)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.adapt = nn.Linear(width, 4 * width)

    def forward(self, h: Tensor, c: Tensor) -> Tensor:
        shift, scale, shift_2, scale_2 = self.adapt(c)[:, None].chunk(4, -1)
        parts = self.qkv(self.norms[0](h) * (1 + scale) + shift).chunk(3, -1)
        q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in parts)
        h = h + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return h + self.wide(self.norms[1](h) * (1 + scale_2) + shift_2)


class Scores(nn.Module):
    """`f(ids, sigmabar)`: log concrete scores (rows, length, V), 0 at a position's own id."""

    def __init__(self, vocab: int, width: int, depth: int, heads: int):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.noise = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(depth)])
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: Tensor, sigmabar: Tensor) -> Tensor:
        h, c = self.tokens(ids), self.noise(sigmabar[:, None].log())
        for block in self.blocks:
            h = block(h, c)
        return self.head(h).scatter_(-1, ids[..., None], 0.0)


def resident() -> tuple[float, float]:
    """Resident memory of this process now, and at its highest since the last call of `forget`, in MiB."""
    status = Path("/proc/self/status").read_text()
    now, most = (int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) / 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[index]
    return now, most


def forget() -> None:
    """The highest resident memory becomes the present one."""
    Path("/proc/self/clear_refs").write_text("5")


PROCESSES = ("turns", "at-once", "uniform", "uniform-at-once", "euler")


def process_of(kind: str, prompt: Tensor, levels: int) -> Process:
    if kind.startswith("uniform"):
        return Uniform(VOCAB, prompt, at_once=len(prompt) if kind == "uniform" else None)
    if kind == "turns":
        return Masked(VOCAB, prompt, mask_id=VOCAB - 1, at_once=-(-3 * len(prompt) // (2 * (levels - 1))))
    masked = Masked(VOCAB, prompt, mask_id=VOCAB - 1, at_once=None)
    return masked if kind == "at-once" else Euler(base=masked)


def target_of(scores: Callable[[Tensor, Tensor], Tensor], kind: str, prompt: Tensor, guided: bool) -> cd.Target:
    if kind.startswith("uniform"):
        if guided:
            raise SystemExit("--guided hides a prompt by masks, and the uniform process has none")
        return cd.models.TokenModel(Normalised(scores), prompt.shape, VOCAB, "uniform", prompt=prompt) ** 1.5
    model = cd.models.from_sedd(scores, mask_id=VOCAB - 1, prompt=prompt, vocab_size=VOCAB)
    return cd.guided(model, model.hiding(), 2.0) if guided else model**1.5


@dataclass(frozen=True)
class Normalised:
    """Log-probabilities from scores."""

    scores: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        return self.scores(x, t).log_softmax(-1)


def measure(length: int, levels: int, width: int, depth: int, guided: bool, kind: str) -> str:
    torch.manual_seed(0)
    network = Scores(VOCAB, width, depth, heads=12).eval().requires_grad_(False)
    prompt = torch.full((length,), -1)
    prompt[0] = 464
    options = {"process": process_of(kind, prompt, levels), "micro_batch": 1 + guided}
    nothing = torch.zeros(1, 1, VOCAB)
    first = target_of(lambda ids, noise: nothing.expand(*ids.shape, -1), kind, prompt, guided)
    least = 0.0 if kind == "turns" else 0.001
    start = cd.ReplicaExchange(first, cd.ladder.linear(levels, least, 0.999), **options)
    target = target_of(network, kind, prompt, guided)
    chain = cd.ReplicaExchange(target, start.ladder, start=start.snapshot(), **options)
    with torch.no_grad():
        network(torch.zeros(1, 2, dtype=torch.long), torch.ones(1))
    forget()
    before, clock, known = resident()[0], time.perf_counter(), chain.evaluate.counts.rows
    chain.step()
    one = (1 + guided) * length * VOCAB * 4 / 2**20
    peak, rows = resident()[1] - before, chain.evaluate.counts.rows - known
    weights = sum(p.numel() for p in network.parameters()) * 4 / 2**20
    return (
        f"| {kind} | {length:,} | {levels} | {'yes' if guided else 'no'} | {weights:,.0f} | {one:,.0f} | {peak:,.0f}"
        f" | {peak / one:.2f} | {rows} | {(time.perf_counter() - clock) / rows:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--levels", type=int, default=33)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--guided", action="store_true", help="a guided pair, in micro-batches of its two rows")
    parser.add_argument("--process", choices=PROCESSES, default="turns")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    options = (given.levels, given.width, given.depth, given.guided, given.process)
    if given.here:
        print(measure(given.lengths[0], *options))
        return
    header = ["process", "length", "levels", "guided", "weights, MiB", "one prediction, MiB", "peak, MiB", "ratio"]
    print(" | ".join(["", *header, "rows", "s per row", ""]).strip())
    print("|---" * (len(header) + 2) + "|", flush=True)
    for length in given.lengths:
        command = [sys.executable, __file__, *sys.argv[1:], "--lengths", str(length), "--here"]
        print(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip(), flush=True)


if __name__ == "__main__":
    main()
