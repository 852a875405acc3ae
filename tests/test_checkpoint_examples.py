"""The examples of Gaussian checkpoints run in miniature, end in a picture, and are as short as they promise."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "checkpoints"
SLOW = pytest.mark.slow
NAMES = ("edm", "flow", "dit", "ddpm", "stable_diffusion", "flow_transformers")
QUICK = ("edm", "flow")  # the others load diffusers, whose classes are among the default tests of the adapters


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=SLOW) for n in NAMES])
def test_it_runs_and_ends_in_a_verdict_and_a_picture(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(FOLDER / f"{name}.py"))["main"](3)
    assert re.search("look|do not trust|ok", capsys.readouterr().out)
    if name != "flow":
        from PIL import Image

        (picture,) = tmp_path.glob("*.png")
        assert Image.open(picture).size[0] >= 8


@pytest.mark.parametrize("name", NAMES)
def test_it_has_fewer_than_fifteen_lines_and_the_guide_says_how_many(name):
    body = ast.parse((FOLDER / f"{name}.py").read_text()).body
    (main,) = (n for n in body if isinstance(n, ast.FunctionDef) and n.name == "main")
    lines = main.end_lineno - main.lineno
    assert lines < 15
    guide = (FOLDER.parents[1] / "docs" / "your-model.md").read_text()
    assert f"[{name}.py](../examples/checkpoints/{name}.py) | {lines} |" in guide
