"""What a draw of a language model costs: `python tools/token_cost.py` prints the table of docs/language-models.md.

Arithmetic, not measurement. A row takes `2 L (12 d^2 n + d V) + 4 L^2 d n` operations (n blocks of width d, length L),
on a card that does 312e12 of them per second at best (A100, bfloat16) and 40 % of that in use. Memory: weights of two
bytes, and three float32 predictions of a micro-batch of 8 rows. A descent reveals all free tokens in at most 128 rows.
An effective draw of a guided chain: 9 levels whose swaps are rejected half of the time, so that a draw from the noise
end arrives every 18 iterations, and each iteration costs one descent of both networks.
"""

from __future__ import annotations

SPEED, BATCH = 0.4 * 312e12, 8
ITERATIONS = 18  # 2 + 2 (levels - 1) r / (1 - r) with r = 1/2, as in tools/checkpoint_costs.py
FAMILIES = {  # width, blocks, vocabulary, length, free tokens
    "BERT base": (768, 12, 30522, 64, 8),
    "ESM-2 150M": (640, 30, 33, 256, 32),
    "ESM-2 650M": (1280, 33, 33, 256, 32),
    "MDLM": (768, 12, 50258, 1024, 1024),
    "SEDD small": (768, 12, 50258, 1024, 1024),
    "SEDD medium": (1024, 24, 50258, 1024, 1024),
    "LLaDA 8B": (4096, 32, 126464, 256, 128),
}


def main() -> None:
    header = ["checkpoint", "length, free", "ms per row", "rows per descent", "s per descent", "rows, guided"]
    print(" | ".join(["", *header, "s per effective draw, guided", "memory, GiB", ""]).strip())
    print("|---" * (len(header) + 2) + "|")
    for name, (d, n, vocab, length, free) in FAMILIES.items():
        weights = 12 * d * d * n + d * vocab
        seconds = (2 * length * weights + 4 * length**2 * d * n) / SPEED
        at_once = -(-free // 128)
        rows = -(-free // at_once)
        memory = (2 * weights + 3 * 4 * BATCH * length * vocab) / 2**30
        draw = ITERATIONS * 2 * rows * seconds
        times = f"{1e3 * seconds:.2g} | {rows} | {rows * seconds:.2g} | {2 * rows} | {draw:,.2f}"
        print(f"| {name} | {length:,}, {free:,} | {times} | {memory:.1f} |")


if __name__ == "__main__":
    main()
