"""The mutation tool itself: what it changes, what it leaves alone, and that the same seed draws the same."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "tools" / "mutants.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("mutants", PATH)
    sys.modules["mutants"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["mutants"]


SOURCE = b'''"""A text with 1 + 1."""
__all__ = ["f"]


def f(a: "1 + 1", b: int = 3) -> "2 * 2":
    """Another: 0 < 1."""
    assert a < b
    if a > 5:
        raise ValueError(f"{a + 1} is more than {5}")
    a = a * b
    return -g(a, b).clamp(min=0.5)
'''

EXPECTED = {
    ("constant", 5, "4"), ("comparison", 8, "((a) >= (5))"), ("comparison", 8, "((a) <= (5))"), ("constant", 8, "6"),
    ("dropped", 10, "pass"), ("operator", 10, "((a) / (b))"), ("sign", 11, "(g(a, b).clamp(min=0.5))"),
    ("arguments", 11, "b, a"), ("constant", 11, "1.0"), ("sibling", 11, "max=0.5"),
}  # fmt: skip


def test_every_change_is_made_once_and_texts_errors_and_annotations_are_left_alone(tool):
    found = tool.Mutator("f.py", SOURCE).all()
    assert {(m.kind, m.line, m.new) for m in found} == EXPECTED
    assert len(found) == len(EXPECTED)
    for mutant in found:
        assert ast.dump(ast.parse(mutant.apply(SOURCE))) != ast.dump(ast.parse(SOURCE))
        assert len(mutant.diff(SOURCE).splitlines()) == 2


def test_mutants_of_the_package_are_many_and_always_the_same(tool):
    root = PATH.parents[1]
    every = tool.mutants(root)
    assert len({tool.key_of(m) for m in every}) == len(every) > 1000
    assert {m.file for m in every} <= set(tool.files(root))
    assert len({m.file for m in every}) > 10
    drawn = tool.draw(root, every, 5, seed=1)
    assert tool.draw(root, every, 7, seed=1)[:5] == drawn != tool.draw(root, every, 5, seed=2)


def test_a_mutant_is_reached_by_its_statement_and_a_default_by_its_whole_function(tool):
    lines = {m.new: tool.reach(m, SOURCE) for m in tool.Mutator("f.py", SOURCE).all()}
    assert lines["4"] == range(5, 12)  # a default is read when the function is defined
    assert lines["6"] == range(8, 9)  # the head of a condition, not its body
    assert lines["pass"] == range(10, 11)
    source = b"n = 3\n\nclass A:\n    m = 5\n\n    def f(self):\n        return (\n            self.m * 2\n        )\n"
    lines = {m.new: tool.reach(m, source) for m in tool.Mutator("f.py", source).all()}
    assert lines == {"4": range(1, 11), "6": range(3, 10), "((self.m) / (2))": range(7, 10), "3": range(7, 10)}


@pytest.mark.slow
def test_a_mutant_that_tests_notice_is_killed_and_one_that_they_do_not_survives(tool, tmp_path):
    (tmp_path / "test_it.py").write_text("def test_it():\n    assert 1 + 1 == 2\n")
    assert not tool.run_tests(tmp_path, ["test_it.py"], 60).killed
    (tmp_path / "test_it.py").write_text("def test_it():\n    assert 1 - 1 == 2\n")
    outcome = tool.run_tests(tmp_path, ["test_it.py"], 60)
    assert outcome.killed
    assert outcome.failed == "test_it.py::test_it"
    (tmp_path / "test_it.py").write_text("def test_it():\n    while True:\n        pass\n")
    outcome = tool.run_tests(tmp_path, ["test_it.py"], 6)
    assert outcome.killed
    assert outcome.code is None
    (tmp_path / "test_it.py").write_text("import os\n\ndef test_it():\n    os.kill(os.getpid(), 9)\n")
    outcome = tool.run_tests(tmp_path, ["test_it.py"], 60)
    assert (outcome.killed, outcome.judged) == (False, False)  # ended from outside: no test has noticed anything


CODE = """
def used(a):
    return a + 1

def checked(a):
    return used(a) * 2

def unused(a):
    return a - 3
"""
TESTS = """
import pytest
from crepe_diffusion.paths import checked, used

@pytest.fixture(scope="module")
def value():
    return checked(3)

def test_runs():
    used(1)

def test_value(value):
    assert value == 8
"""


@pytest.mark.slow
def test_tests_are_shown_what_they_execute(tool, tmp_path, monkeypatch):
    """Both functions by a fixture of the module; what no test executes survives at once, what no test checks later."""
    monkeypatch.setattr(tool, "SHOWN", ("it",))
    package = tmp_path / tool.PACKAGE
    for folder in (package, tmp_path / "tests", *(package / name for name in tool.MUTATED if "." not in name)):
        folder.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    (package / "paths.py").write_text(CODE)
    (tmp_path / "tests" / "test_it.py").write_text(TESTS)
    tests = tool.watched(tmp_path, tmp_path / "kept.json", 60)
    assert {name.split("::")[1]: lines for name, (_, lines) in tests.items()} == {
        "test_runs": {"paths.py": [3]},
        "test_value": {"paths.py": [3, 6]},
    }
    found = {(m.line, m.kind): tool.judge(m, tmp_path, tests, 60) for m in tool.mutants(tmp_path)}
    assert {place for place, r in found.items() if r["status"] == "killed"} == {
        (3, "operator"), (3, "constant"), (6, "operator"), (6, "constant"),
    }  # fmt: skip
    assert all(r["by"] == "tests/test_it.py::test_value" for r in found.values() if r["status"] == "killed")
    assert all(r["by"] == "no test executes it" for r in found.values() if r["status"] == "survived")
    only = {name: test for name, test in tests.items() if "runs" in name}
    assert tool.judge(tool.mutants(tmp_path)[0], tmp_path, only, 60)["status"] == "survived"
    assert (
        tool.judge(tool.mutants(tmp_path)[0], tmp_path, {}, 60, ["tests/test_it.py::test_value"])["status"] == "killed"
    )
    assert (package / "paths.py").read_text() == CODE
