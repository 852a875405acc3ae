"""The examples of language models run in miniature, and are as short as they promise."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "checkpoints"
NAMES = ("bert", "esm", "llada", "sedd", "mdlm")


@pytest.fixture(autouse=True)
def beside(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    sys.modules.pop("token_stand_ins", None)


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_and_says_words(name, capsys):
    runpy.run_path(str(FOLDER / f"{name}.py"))["main"](6)
    said = capsys.readouterr().out
    words = ("the cat", "M K T", "the dog ran on the", "the cat", "")[NAMES.index(name)]
    assert words in said
    assert "[MASK]" not in said


@pytest.mark.parametrize("name", NAMES)
def test_it_has_fewer_than_fifteen_lines_of_its_own(name):
    text = (FOLDER / f"{name}.py").read_text()
    (main,) = (n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == "main")
    lines = main.end_lineno - main.lineno  # without that of its name
    assert lines < 15
    guide = (FOLDER.parents[1] / "docs" / "language-models.md").read_text()
    assert f"[{name}.py](../examples/checkpoints/{name}.py) | {lines} |" in guide
