"""Every Python block of the README runs as it is printed, and gives the numbers that it states."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import crepe_diffusion as cd

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def run(block: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(block, str(README), "exec"), names)
    return names


def right(estimate: cd.Estimate, truth: float) -> None:
    assert abs(estimate.value - truth) < 4 * estimate.error < 0.2


def test_the_first_block_gives_the_tilted_law_by_all_methods(capsys: pytest.CaptureFixture[str]) -> None:
    names = run(BLOCKS[0])
    left, other = (0.3 * torch.tensor(1 + 0.25 / 32).exp(), 0.7 * torch.tensor(-0.75 + 0.16 / 32).exp())
    truth, log_z = float(left / (left + other)), float((left + other).log())
    assert f"exactly {truth:.3f} and {log_z:.3f}" in BLOCKS[0]
    choice, judged, *results = capsys.readouterr().out.splitlines()
    assert "was chosen" in choice
    assert judged == "verdict: ok"
    assert len(results) == 3
    assert results[1].endswith(" ok")
    for line in results:
        share, own = (cd.Estimate(float(a), float(b)) for a, b in re.findall(r"(\S+) \+- (\S+)", line))
        right(share, truth)
        right(own, log_z)
    names["chain"].target = names["strong"]  # as the text after the block states
    assert names["chain"].sample(2).x.isfinite().all()


def test_the_second_block_gives_the_square_of_a_table() -> None:
    right(run(BLOCKS[1])["chain"].sample(100).mean(lambda x: (x == 0).all(1)), 0.16 / 0.30)


def test_every_block_is_tested() -> None:
    assert len(BLOCKS) == 2


def test_it_is_short() -> None:
    assert len(README.read_text().splitlines()) < 120


def test_linked_files_exist() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README.read_text())
    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []
