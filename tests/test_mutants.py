"""The mutation tool itself: what it changes, what it leaves alone, and that the same seed draws the same."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from dataclasses import replace
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
    places = {m.new: tool.Place(m, SOURCE) for m in tool.Mutator("f.py", SOURCE).all()}
    assert places["4"].lines == range(5, 12)  # a default is read when the function is defined
    assert places["4"].function is None
    assert places["6"].lines == range(8, 9)  # the head of a condition, not its body
    assert places["pass"].lines == range(10, 11)
    assert places["pass"].function == ("f", 5)
    source = b"n = 3\n\nclass A:\n    m = 5\n\n    @p\n    def f(self):\n        return (\n            self.m * 2\n"
    source += b"        )\n"
    places = {m.new: tool.Place(m, source) for m in tool.Mutator("f.py", source).all()}
    assert {new: place.lines for new, place in places.items()} == {
        "4": range(1, 12), "6": range(3, 11), "((self.m) / (2))": range(8, 11), "3": range(8, 11),
    }  # fmt: skip
    assert places["3"].function == ("A.f", 6)  # Python counts from the decorator


def test_marks_are_the_lines_that_a_function_executes(tool):
    """Its value and its text are as before; only statements that were reached are marked."""
    source = b"""def f(a):
    \"\"\"A text.\"\"\"
    for b in range(a):
        if b > 1:
            return [
                b,
            ]
        elif b > 5:
            a = 0
    try:
        return 1 / a
    except ZeroDivisionError:
        return None
    finally:
        b = 3
"""
    found, values = {}, {}
    for a in (0, 1, 3):
        space = {tool.MARKS: bytearray(20)}
        exec(compile(tool.marked(source), "f.py", "exec"), space)
        values[a] = space["f"](a)
        assert space["f"].__doc__ == "A text."
        found[a] = [line for line, m in enumerate(space[tool.MARKS]) if m]
    assert values == {0: None, 1: 1.0, 3: [2]}
    assert found == {0: [3, 10, 11, 12, 13, 15], 1: [3, 4, 8, 10, 11, 15], 3: [3, 4, 5, 8]}


def test_the_interval_of_a_share_is_that_of_the_binomial_law(tool):
    """At its ends the observed count has a probability of 2.5 % to be reached."""
    low, high = tool.interval(9, 10)
    assert 10 * low**9 * (1 - low) + low**10 == pytest.approx(0.025)
    assert 1 - high**10 == pytest.approx(0.025)
    assert tool.interval(5, 5) == (pytest.approx(0.025**0.2), 1.0)
    assert tool.interval(0, 5)[0] == 0.0


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

def early(a):
    return a + 5

value = early(1)
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
    """Both functions by a fixture of the module; what no test executes survives at once, what no test checks later.

    A process that imports the mutant and one that exchanges the code of a function judge alike.
    """
    root = tmp_path / "copy"
    monkeypatch.setattr(tool, "SHOWN", ("it",))
    package = root / tool.PACKAGE
    for folder in (package, root / "tests", *(package / name for name in tool.MUTATED if "." not in name)):
        folder.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    (package / "paths.py").write_text(CODE)
    (root / "tests" / "test_it.py").write_text(TESTS)
    known = tool.Known(root, tmp_path / "kept.json", 60)
    assert {name.split("::")[1]: lines for name, (_, lines) in known.tests.items()} == {
        "test_runs": {"paths.py": [3]},
        "test_value": {"paths.py": [3, 6]},
    }
    assert known.imported == {"paths.py": [12]}
    trials = [tool.Trial.of(m, root, known, 60) for m in tool.mutants(root)]
    found = {(t.mutant.line, t.mutant.kind): tool.judge(t, root) for t in trials}
    assert {place for place, r in found.items() if r["status"] == "killed"} == {
        (3, "operator"), (3, "constant"), (6, "operator"), (6, "constant"),
    }  # fmt: skip
    assert all(r["by"] == "tests/test_it.py::test_value" for r in found.values() if r["status"] == "killed")
    assert {place for place, r in found.items() if r["by"] == "no test executes it"} == {
        (9, "operator"), (9, "constant"), (12, "operator"), (12, "constant"),
    }  # fmt: skip
    assert found[14, "constant"]["status"] == "survived"  # of the module, so that it may matter to any test

    live = [t for t in trials if t.function]
    assert {t.mutant.line for t in live} == {3, 6, 9}  # that of line 12 was called at import
    kept = tmp_path / "records.json"

    def note(trial, record):
        records = json.loads(kept.read_text()) if kept.exists() else []
        kept.write_text(json.dumps([*records, [trial.mutant.line, trial.mutant.kind, record["status"], record["by"]]]))

    assert tool.run_tests(root, ["tests/test_it.py"], 60, tool.Exchange(root, live[:4], note)).code == 0
    assert [tuple(r) for r in json.loads(kept.read_text())] == [
        (t.mutant.line, t.mutant.kind, "killed", "tests/test_it.py::test_value") for t in live[:4]
    ]
    only = [replace(t, shown=[n for n in t.shown if "runs" in n], seconds=t.seconds[:1]) for t in live[:1]]
    assert tool.judge(only[0], root)["status"] == "survived"
    tool.run_tests(root, ["tests/test_it.py"], 60, tool.Exchange(root, only, note))
    assert json.loads(kept.read_text())[-1][2] == "survived"
    assert (package / "paths.py").read_text() == CODE
