"""Two tables of docs/devices.md: `python tools/devices.py [--only waits|rounding] [--write-docs]`.

waits     how often the CPU waits for the model's device, and what travels, on the pretend device of the tests; a wait
          is a value that is read, an operation whose shape depends on values, or a copy to the CPU
rounding  the largest |log_alpha| of two equal models with guidance 7.5 on 3 x 512 x 512 numbers, which should be 0
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from unittest.mock import patch

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import crepe_diffusion as cd  # noqa: E402
from crepe_diffusion.processes import gaussian  # noqa: E402
from pretend import DEVICE, Pretend  # noqa: E402
from studies.bench.timing import ratio  # noqa: E402
from studies.shared.pages import fill, markdown  # noqa: E402
from test_devices import CASES, evaluations_of, largest_log_alpha  # noqa: E402

N_ITERATIONS = 4
LADDERS = {"down to 0.02": cd.ladder.karras(5, 0.02, 80.0), "down to 0.002": cd.ladder.karras(9, 0.002, 80.0)}


def waits() -> str:
    header = ["case", "evaluations", "waits", "waits per evaluation", "bytes to the CPU", "bytes to the device"]
    return markdown(header, [_waits_of(name) for name in CASES])


def _waits_of(name: str) -> list[str]:
    with Pretend() as device:
        sampler = CASES[name](DEVICE)
        device.reset()
        calls = evaluations_of(sampler, N_ITERATIONS)
    each = (calls, device.waits, device.bytes_to_host, device.bytes_to_device)
    evaluations, waited, up, down = (value / N_ITERATIONS for value in each)
    return [name, f"{evaluations:g}", f"{waited:g}", f"{waited / evaluations:.2f}", f"{up:,.0f}", f"{down:,.0f}"]


def rounding() -> str:
    z = cd.Stream(0).normal((8, 3 * 512 * 512), dtype=torch.float32)
    lines = []
    for name, piece in {"float64 beyond 1,024 numbers": gaussian.PIECE, "float32 alone": 10**9}.items():
        with patch.object(gaussian, "PIECE", piece):
            found = [f"{largest_log_alpha(ladder):.4f}" for ladder in LADDERS.values()]

            def plain() -> torch.Tensor:
                return torch.linalg.vector_norm(z, dim=1).to(torch.float64).square()

            longer = ratio(lambda: gaussian._sum_squares(z, torch.float64), plain, n=21, clock=time.thread_time)
            lines.append([name, *found, f"{longer.value:.2f}"])
    return markdown(["squares are summed in", *(f"noise {name}" for name in LADDERS), "time of the sum"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["waits", "rounding"], help="one of the tables")
    parser.add_argument("--write-docs", action="store_true", help="also fill the tables of docs/devices.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, make in {"waits": waits, "rounding": rounding}.items():
        if options.only in (None, name):
            table = make()
            print(table, end="\n\n")
            if options.write_docs:
                fill(ROOT / "docs" / "devices.md", {name: table})


if __name__ == "__main__":
    main()
