"""Every Python block of the README runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_there_are_examples() -> None:
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_example_runs(block: str) -> None:
    exec(compile(block, str(README), "exec"), {})


def test_linked_files_exist() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README.read_text())
    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []
