"""Small faults, planted one at a time: does any test notice?

    share killed = mutants on which a test fails / mutants tried

A mutant is one change of the source: an operator, a comparison, a sign, a constant, a condition, a dropped
statement, two arguments in the wrong order, a function exchanged for its sibling. N of them are drawn by a seed from
all that can be made of `MUTATED`. Texts, annotations, errors and assertions are not mutated, nor is what cannot matter:
arguments of `SYMMETRIC` functions, and whether `zip` compares lengths.

Which lines each default test executes, and how long it takes, is measured once on the sound sources. A mutant is then
shown to the tests that execute it until one fails or `--budget` seconds of tests are spent: first those that are quick
and have little else to do (`Known.able`). One that no test executes survives at once. So the share is a lower bound:
tests that come later, tests marked slow, checks of shapes, and tests that run the package in another process might
notice more.

A mutant of a function's body becomes the code of that function in a fork of a process that has imported everything
(a tenth of a second for most); others, such as defaults, are imported by a process of their own.

    python tools/mutants.py --seed 2     go on where the last call stopped; records are in results/mutants.json

Tests run on a copy of the repository, so that the sources here are never touched. Time limits count processor time.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import gc
import hashlib
import importlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from itertools import accumulate, islice
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "src/crepe_diffusion"
RESULTS = ROOT / "results"
MUTATED = ("paths.py", "kernels", "processes", "samplers")
# Files of tests that are shown a mutant, besides doctests: those about these rooms.
SHOWN = (
    "adapt", "adaptive", "asking", "choose", "conditions", "contract", "contract_models", "contract_samplers",
    "counted", "counts", "devices", "diagnostics", "discrete_models", "draws", "edges", "exact", "examples", "gaussian",
    "in_place", "inputs", "models", "nonfinite", "padding", "particle_gibbs", "pilot", "plan", "planted_bugs",
    "quadrature", "random", "restitch", "samplers", "schedules", "sharing", "smc", "smc_joints", "starter", "tours",
    "verdict",
)  # fmt: skip
# Once, before tests are forked: what takes long to import.
IMPORTED = ("arviz_stats", "beartype", "jaxtyping", "scipy.stats", "torch.distributed.tensor", "zarr.testing")

ARITHMETIC = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.Pow: "*", ast.FloorDiv: "/", ast.Mod: "//",
    ast.BitAnd: "|", ast.BitOr: "&",
}  # fmt: skip
COMPARISONS = {
    ast.Lt: ("<=", ">="), ast.LtE: ("<", ">"), ast.Gt: (">=", "<="), ast.GtE: (">", "<"), ast.Eq: ("!=",),
    ast.NotEq: ("==",), ast.Is: ("is not",), ast.IsNot: ("is",), ast.In: ("not in",), ast.NotIn: ("in",),
}  # fmt: skip
SIGNS = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is",
    ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip
SIBLINGS = {
    "sum": "mean", "mean": "sum", "any": "all", "all": "any", "zeros": "ones", "ones": "zeros", "log": "exp",
    "exp": "log", "zeros_like": "ones_like", "ones_like": "zeros_like", "argmin": "argmax", "argmax": "argmin",
    "amin": "amax", "amax": "amin", "min": "max", "max": "min", "sqrt": "square", "square": "sqrt",
    "softmax": "log_softmax", "log_softmax": "softmax", "floor": "ceil", "ceil": "floor", "k_up": "k_down",
    "k_down": "k_up", "target": "proposal",
}  # fmt: skip
SYMMETRIC = ("max", "min", "maximum", "minimum", "hypot", "logaddexp", "equal")


@dataclass(frozen=True)
class Mutant:
    """One change of one file: the text from `start` to `end` (bytes) becomes `new`."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    new: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]

    def diff(self, source: bytes) -> str:
        before, after = (text.decode().splitlines() for text in (source, self.apply(source)))
        lines = list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]
        return "\n".join(line for line in lines if not line.startswith("@@"))


class Mutator:
    """All mutants of one file, in the order of its text."""

    def __init__(self, file: str, source: bytes):
        self.file, self.source = file, source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[Mutant] = []

    def all(self) -> list[Mutant]:
        self._visit(ast.parse(self.source))
        return sorted(self.found, key=lambda m: (m.start, m.end, m.kind, m.new))

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> str:
        start, end = self._span(node)
        return self.source[start:end].decode()

    def _add(self, node: ast.expr | ast.stmt, kind: str, new: str) -> None:
        start, end = self._span(node)
        self.found.append(Mutant(self.file, node.lineno, kind, start, end, new))

    def _visit(self, node: ast.AST) -> None:
        if isinstance(node, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)):
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return  # a docstring, or `...`
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.keyword) and node.arg == "strict":
            return
        for change in CHANGES:
            change(self, node)
        skipped = {"annotation", "returns", "decorator_list", "bases"}
        for name, value in ast.iter_fields(node):
            if name in skipped:
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    self._visit(child)

    def arithmetic(self, node: ast.AST) -> None:
        if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            new = f"(({self._text(node.left)}) {ARITHMETIC[type(node.op)]} ({self._text(node.right)}))"
            self._add(node, "operator", new)
        if isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
            self._add(
                node, "operator", f"{self._text(node.target)} {ARITHMETIC[type(node.op)]}= {self._text(node.value)}"
            )

    def comparison(self, node: ast.AST) -> None:
        if not isinstance(node, ast.Compare):
            return
        operands = [f"({self._text(e)})" for e in (node.left, *node.comparators)]
        for i, op in enumerate(node.ops):
            for other in COMPARISONS[type(op)]:
                signs = [other if i == k else SIGNS[type(o)] for k, o in enumerate(node.ops)]
                rest = "".join(f" {sign} {operand}" for sign, operand in zip(signs, operands[1:], strict=True))
                self._add(node, "comparison", f"({operands[0]}{rest})")

    def logic(self, node: ast.AST) -> None:
        if isinstance(node, ast.BoolOp):
            word = " or " if isinstance(node.op, ast.And) else " and "
            self._add(node, "logic", "(" + word.join(f"({self._text(v)})" for v in node.values) + ")")
        if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.UAdd):
            self._add(node, "sign", f"({self._text(node.operand)})")
        if isinstance(node, (ast.If, ast.While)) and not isinstance(node.test, (ast.Compare, ast.UnaryOp)):
            self._add(node.test, "condition", f"(not ({self._text(node.test)}))")
        if isinstance(node, ast.IfExp):
            self._add(
                node,
                "condition",
                f"({self._text(node.orelse)} if {self._text(node.test)} else {self._text(node.body)})",
            )

    def constant(self, node: ast.AST) -> None:
        if not isinstance(node, ast.Constant):
            return
        if isinstance(node.value, bool):
            self._add(node, "constant", str(not node.value))
        elif isinstance(node.value, int):
            self._add(node, "constant", str(node.value + 1))
        elif isinstance(node.value, float):
            self._add(node, "constant", repr(2 * node.value if node.value else 1.0))

    def statement(self, node: ast.AST) -> None:
        """Drop what can be dropped without leaving a name undefined."""
        if isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            self._add(node, "dropped", "pass")
        if isinstance(node, ast.Assign):
            names = {n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
            read = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
            stored = all(isinstance(t, (ast.Subscript, ast.Attribute)) for t in node.targets)
            if names and (names <= read or stored):
                self._add(node, "dropped", "pass")

    def arguments(self, node: ast.AST) -> None:
        if not isinstance(node, ast.Call) or any(isinstance(a, ast.Starred) for a in node.args):
            return
        if isinstance(node.func, (ast.Name, ast.Attribute)) and ast.unparse(node.func).split(".")[-1] in SYMMETRIC:
            return
        for a, b in zip(node.args, node.args[1:], strict=False):
            (start, middle), (back, end) = self._span(a), self._span(b)
            if self._text(a) != self._text(b):
                between = self.source[middle:back].decode()
                new = self._text(b) + between + self._text(a)
                self.found.append(Mutant(self.file, a.lineno, "arguments", start, end, new))

    def sibling(self, node: ast.AST) -> None:
        if isinstance(node, ast.Attribute) and node.attr in SIBLINGS and isinstance(node.ctx, ast.Load):
            self._add(node, "sibling", f"({self._text(node.value)}).{SIBLINGS[node.attr]}")
        if isinstance(node, ast.keyword) and node.arg in ("min", "max"):
            start, end = self._span(node.value)
            name = SIBLINGS[node.arg]
            new = f"{name}={self._text(node.value)}"
            self.found.append(Mutant(self.file, node.lineno, "sibling", start - len(node.arg) - 1, end, new))


CHANGES: tuple[Callable[[Mutator, ast.AST], None], ...] = (
    Mutator.arithmetic, Mutator.comparison, Mutator.logic, Mutator.constant, Mutator.statement, Mutator.arguments,
    Mutator.sibling,
)  # fmt: skip


def files(root: Path) -> list[str]:
    """Mutated files, relative to the package."""
    package = root / PACKAGE
    found = [package / place for place in MUTATED]
    found = [f for path in found for f in ([path] if path.is_file() else sorted(path.rglob("*.py")))]
    return [str(f.relative_to(package)) for f in found if f.name != "__init__.py"]


def mutants(root: Path) -> list[Mutant]:
    """Every mutant of every file, in order."""
    return [m for file in files(root) for m in Mutator(file, (root / PACKAGE / file).read_bytes()).all()]


def draw(root: Path, every: list[Mutant], n: int, seed: int) -> list[Mutant]:
    """The first n of a random order that compile and differ from the source."""

    def differs(mutant: Mutant) -> bool:
        source = (root / PACKAGE / mutant.file).read_bytes()
        try:
            return ast.dump(ast.parse(mutant.apply(source))) != ast.dump(ast.parse(source))
        except SyntaxError:
            return False

    shuffled = random.Random(seed).sample(every, len(every))
    return list(islice(filter(differs, shuffled), n))


# -- running tests --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How tests ended: their exit code (None: out of time), processor seconds, and the test that failed."""

    code: int | None
    seconds: float
    failed: str = ""

    @property
    def killed(self) -> bool:
        """A test failed (1), the package cannot be imported (2) or breaks pytest (3), or time ran out."""
        return self.code in (None, 1, 2, 3)

    @property
    def judged(self) -> bool:
        """Not so if the process was ended from outside, or pytest was called wrongly."""
        return self.killed or self.code == 0


def forked(work: Callable[[], int], limit: float) -> Outcome:
    """What `work` returns in a fork, within `limit` seconds of processor time and thirty times that by the clock."""
    with tempfile.TemporaryFile("w+") as output:
        before = time.monotonic()
        child = os.fork()
        if child == 0:
            os.setsid()
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            sys.stdout = sys.stderr = os.fdopen(1, "w", closefd=False)
            resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 5))
            ended = 3
            try:
                ended = work()
            finally:
                sys.stdout.flush()
                os._exit(ended)
        seconds: float = 0.0
        code: int | None = None
        while time.monotonic() - before < 30 * limit:
            pid, status, usage = os.wait4(child, os.WNOHANG)
            if pid:
                seconds, code = usage.ru_utime + usage.ru_stime, os.waitstatus_to_exitcode(status)
                break
            time.sleep(0.03)
        else:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        output.seek(0)
        failed = [line for line in output.read().splitlines() if line.startswith(("FAILED", "ERROR"))]
    if code in (-signal.SIGXCPU, -signal.SIGPROF):
        code = None
    return Outcome(code, seconds, failed[0].split(" - ")[0].split(" ", 1)[1] if failed else "")


def run_tests(root: Path, paths: Sequence[str], limit: float, plugin: object = None) -> Outcome:
    """pytest in a fork that has what was imported here, above all torch, and imports the package and its tests."""

    def work() -> int:
        os.chdir(root)
        # A mutant of equal length, written in the same second, would not be seen through bytecode.
        os.environ |= {"PYTHONPATH": f"{root / 'src'}:{root}", "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        sys.path[:0] = [str(root / "src"), str(root)]
        for name in [name for name in sys.modules if name.split(".")[0] == Path(PACKAGE).name]:
            del sys.modules[name]
        # Default tests, but shapes of tensors are not checked: that would double the time to import the package.
        options = ["-o", "addopts=", "-m", "not slow", "--doctest-modules", "--doctest-ignore-import-errors"]
        options += ["-x", "-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={root}.tmp"]
        return int(pytest.main([*options, *paths], plugins=[plugin] if plugin else []))

    return forked(work, limit)


def copy_of(root: Path, to: Path) -> Path:
    """The files of a repository that are not ignored, as they are on disk."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, to / name)
    return to


# -- which tests execute a mutant ------------------------------------------------------------------------------


Lines = dict[str, list[int]]  # by file
Tests = dict[str, tuple[float, Lines]]  # seconds, and what is executed

MARKS = "_marks_"


def marked(source: bytes) -> ast.Module:
    """The source with a mark before every statement of a function: `_marks_[its line] = 1`."""
    tree = ast.parse(source)

    def mark(line: int, at: ast.stmt) -> ast.stmt:
        new = ast.parse(f"{MARKS}[{line}] = 1").body[0]
        for node in ast.walk(new):
            ast.copy_location(node, at)
        return new

    def visit(node: ast.AST, within: bool) -> None:
        within |= isinstance(node, ast.FunctionDef)
        for child in ast.iter_child_nodes(node):
            visit(child, within)
        for name, body in ast.iter_fields(node):
            if within and isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                statements = [s for line in body for s in (mark(line.lineno, line), line)]
                if name == "body" and isinstance(node, ast.ExceptHandler):
                    statements.insert(0, mark(node.lineno, body[0]))
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and name == "body" and ast.get_docstring(node):
                    del statements[0]
                setattr(node, name, statements)

    visit(tree, within=False)
    return tree


class Marking(SourceFileLoader):
    """Imports a file of the package with marks."""

    def __init__(self, name: str, path: str, marks: bytearray):
        super().__init__(name, path)
        self.marks = marks

    def get_code(self, fullname: str) -> CodeType:
        return compile(marked(self.get_data(self.path)), self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__[MARKS] = self.marks
        super().exec_module(module)


class Watch:
    """A plugin of pytest: processor seconds of each test, and the lines of mutated files that it executes.

    What a fixture of a module does is part of every test that uses it. `imported` are lines that importing and
    collecting execute.
    """

    def __init__(self, root: Path, seconds: float, note: Callable[[str, Tests, Lines], None]):
        self.root, self.seconds, self.note = root, seconds, note
        lengths = {file: (root / PACKAGE / file).read_bytes().count(b"\n") + 2 for file in files(root)}
        self.marks = {file: bytearray(n) for file, n in lengths.items()}
        self.shared: dict[str, tuple[float, set[tuple[str, int]]]] = {}
        self.tests: Tests = {}
        self.began: float | None = None

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The loader that marks, as a finder of `sys.meta_path`."""
        file = fullname.partition(".")[2].replace(".", "/") + ".py"
        if fullname.split(".")[0] != Path(PACKAGE).name or file not in self.marks:
            return None
        place = str(self.root / PACKAGE / file)
        return spec_from_file_location(fullname, place, loader=Marking(fullname, place, self.marks[file]))

    def taken(self) -> set[tuple[str, int]]:
        """Lines that were marked since the last call."""
        found = {(file, line) for file, marks in self.marks.items() for line, m in enumerate(marks) if m}
        for marks in self.marks.values():
            marks[:] = bytes(len(marks))
        return found

    def pytest_configure(self) -> None:
        sys.meta_path.insert(0, cast(Any, self))

    def pytest_collection_finish(self) -> None:
        self.imported = by_file(self.taken())

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        outer, before = self.taken(), time.process_time()
        try:
            return (yield)
        finally:
            self.shared[fixturedef.argname] = time.process_time() - before, self.taken()
            for file, line in outer:
                self.marks[file][line] = 1

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        self.taken()
        before, known = time.process_time(), set(self.shared)
        self.began = before if self.began is None else self.began
        if enough := before - self.began > self.seconds:
            item.add_marker(pytest.mark.skip(reason="enough tests of this file are known"))
        try:
            return (yield)
        finally:
            seconds, lines = time.process_time() - before, self.taken()
            for name in self.shared.keys() & set(getattr(item, "fixturenames", ())):
                seconds += self.shared[name][0] if name in known else 0.0
                lines = lines | self.shared[name][1]
            if not enough:
                self.tests[item.nodeid] = round(seconds, 3), by_file(lines)
            if nextitem is None or nextitem.path != item.path:
                self.note(item.nodeid.split("::")[0], self.tests, self.imported)
                self.tests, self.began, self.shared = {}, None, {}


def by_file(lines: set[tuple[str, int]]) -> Lines:
    return {file: sorted(n for f, n in lines if f == file) for file in sorted({f for f, _ in lines})}


def digest(*paths: Path) -> str:
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def write(path: Path, kept: object, indent: int | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(kept, indent=indent))
    new.replace(path)


class Known:
    """What is known of tests: measured once per content of a test file, on sound sources.

    tests: seconds and lines of every default test
    imported: lines that run before any test does
    """

    def __init__(self, root: Path, path: Path, seconds: float):
        sources = digest(*(root / PACKAGE / file for file in files(root)))
        shown = [*(f"tests/test_{name}.py" for name in SHOWN), *(f"{PACKAGE}/{file}" for file in files(root))]
        contents = {name: digest(root / name) for name in shown}
        kept = json.loads(path.read_text()) if path.exists() else {}
        if kept.get("sources") != sources:
            kept = {"sources": sources, "imported": {}, "files": {}}

        def note(name: str, tests: Tests, imported: Lines) -> None:
            kept["files"][name] = {"digest": contents[name], "tests": tests}
            for file, lines in imported.items():
                kept["imported"][file] = sorted({*lines, *kept["imported"].get(file, ())})
            write(path, kept)

        new = [name for name in shown if kept["files"].get(name, {}).get("digest") != contents[name]]
        if new:
            outcome = run_tests(root, new, 3600, Watch(root, seconds, note))
            if outcome.code not in (0, 5):  # 5: every test is slow
                raise SystemExit(f"without any mutant: {outcome.failed or outcome.code}")
            print(f"tests watched: {outcome.seconds:.0f} s", flush=True)
            kept = json.loads(path.read_text()) if path.exists() else kept
            for name in set(new) - kept["files"].keys():
                note(name, {}, {})
        self.tests: Tests = {t: known for name in shown for t, known in kept["files"][name]["tests"].items()}
        self.imported: Lines = kept["imported"]

    def able(self, file: str, lines: range) -> list[str]:
        """Tests that execute one of these lines, in the order in which they are shown a mutant.

        First come quick tests that execute little else, that execute a line nearby which few others do, such as the
        error behind a condition, and that stand in the file named after this one. Of a test with many cases, later ones
        come later.
        """
        near = range(lines.start, lines.stop + 2)
        able = {name: set(near) & set(known[1].get(file, ())) for name, known in self.tests.items()}
        able = {name: seen for name, seen in able.items() if not seen.isdisjoint(lines)}
        times = {line: sum(line in seen for seen in able.values()) for line in near}
        costs = {}
        for name, here in able.items():
            seconds, seen = self.tests[name]
            rare = min(times[line] for line in here) / len(able)
            own = 0.25 if f"test_{Path(file).stem}." in name else 1.0
            costs[name] = (seconds + 0.02) * sum(map(len, seen.values())) ** 0.5 * rare * own
        before: dict[str, int] = {}
        for name in sorted(costs, key=costs.__getitem__):
            function = name.split("[")[0]
            before[function] = before.get(function, 0) + 1
            costs[name] *= before[function]
        return sorted(costs, key=costs.__getitem__)


# -- showing tests a mutant ------------------------------------------------------------------------------------


class Place:
    """Where a mutant is.

    lines: executed when it matters. Within a function those of its statement; a default, a field or a constant of the
        module is read at import, so there it is the lines of the whole function, class or file
    function: the outermost function that has it in its body, as (qualified name, first line); None if there is none
    """

    def __init__(self, mutant: Mutant, source: bytes):
        tree = ast.parse(source)
        at, around = source[: mutant.start].count(b"\n") + 1, [cast(ast.AST, tree)]
        while inner := [
            node
            for node in ast.iter_child_nodes(around[-1])
            if isinstance(node, (ast.stmt, ast.ExceptHandler)) and node.lineno <= at <= (node.end_lineno or at)
        ]:
            around.append(inner[-1])
        self.lines = self._lines(around, at, source)
        self.function: tuple[str, int] | None = None
        functions = [node for node in around if isinstance(node, ast.FunctionDef)]
        if functions and functions[0] is not around[-1]:
            classes = [node.name for node in around[: around.index(functions[0])] if isinstance(node, ast.ClassDef)]
            first = min([functions[0].lineno, *(d.lineno for d in functions[0].decorator_list)])
            self.function = ".".join([*classes, functions[0].name]), first

    @staticmethod
    def _lines(around: list[ast.AST], at: int, source: bytes) -> range:
        last = around[-1]
        rooms = (ast.FunctionDef, ast.ClassDef, ast.Module)
        if not isinstance(last, rooms) and isinstance(around[-2], (ast.ClassDef, ast.Module)):
            last = around[-2]
        if isinstance(last, ast.Module):
            return range(1, source.count(b"\n") + 2)
        assert isinstance(last, (ast.stmt, ast.ExceptHandler))
        end = last.end_lineno or at
        if not isinstance(last, rooms) and (body := getattr(last, "body", None)):
            end = max(last.lineno, body[0].lineno - 1)  # the head of a loop, a condition or a block
        return range(last.lineno, end + 1)


@dataclass(frozen=True)
class Trial:
    """A mutant and the tests that it is shown, in this order."""

    mutant: Mutant
    source: bytes
    able: int
    shown: list[str]
    seconds: list[float]
    function: tuple[str, int] | None  # if its code can be exchanged in a process that has imported it

    @classmethod
    def of(cls, mutant: Mutant, root: Path, known: Known, budget: float) -> Trial:
        source = (root / PACKAGE / mutant.file).read_bytes()
        place = Place(mutant, source)
        able = known.able(mutant.file, place.lines)
        spent = list(accumulate(known.tests[name][0] for name in able))
        shown = [name for name, s in zip(able, spent, strict=True) if s <= budget] or able[:1]
        early = not set(place.lines).isdisjoint(known.imported.get(mutant.file, ()))
        seconds = [known.tests[name][0] for name in shown]
        return cls(mutant, source, len(able), shown, seconds, None if early else place.function)

    def record(self, outcome: Outcome | None) -> dict[str, object]:
        record: dict[str, object] = {
            "where": f"{PACKAGE}/{self.mutant.file}:{self.mutant.line}",
            "kind": self.mutant.kind,
            "diff": self.mutant.diff(self.source),
            "able": self.able,
            "shown": len(self.shown),
        }
        if outcome is None:
            return record | {"status": "survived", "by": "no test executes it", "seconds": 0.0}
        if outcome.killed:
            record |= {"status": "killed", "by": outcome.failed or "time"}
        else:
            record |= {"status": "survived" if outcome.judged else "unjudged", "by": f"exit code {outcome.code}"}
        return record | {"seconds": round(outcome.seconds, 2)}

    @property
    def limit(self) -> float:
        return 30 + 3 * sum(self.seconds)


class Chosen:
    """A plugin of pytest: these tests only, in this order."""

    def __init__(self, tests: list[str]):
        self.order = {test: i for i, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.order), key=lambda i: self.order[i.nodeid])


def judge(trial: Trial, root: Path) -> dict[str, object]:
    """Show a mutant to its tests in a process that imports it."""
    if not trial.shown:
        return trial.record(None)
    file = root / PACKAGE / trial.mutant.file
    try:
        file.write_bytes(trial.mutant.apply(trial.source))
        outcome = run_tests(root, sorted({t.split("::")[0] for t in trial.shown}), trial.limit, Chosen(trial.shown))
    finally:
        file.write_bytes(trial.source)
    return trial.record(outcome)


class Exchange:
    """A plugin of pytest: after one collection, each mutant becomes the code of its function in a fork.

    So neither the package nor tests are imported again. A test that fails is run once more on the sound source,
    after the same ones if they are quick; it must pass there. Mutants whose function is not found are left.
    """

    def __init__(self, root: Path, trials: Sequence[Trial], note: Callable[[Trial, dict[str, object]], None]):
        self.root, self.trials, self.note = root, trials, note
        self.failed = ""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        self.functions: dict[tuple[str, str, int], list[FunctionType]] = {}
        for f in gc.get_objects():
            if isinstance(f, FunctionType):
                code = f.__code__
                self.functions.setdefault((code.co_filename, code.co_qualname, code.co_firstlineno), []).append(f)
        gc.freeze()
        for trial in self.trials:
            self.note(trial, trial.record(self.shown(trial)))
        return True

    def shown(self, trial: Trial) -> Outcome:
        path = str(self.root / PACKAGE / trial.mutant.file)
        assert trial.function is not None
        name, line = trial.function
        live = self.functions.get((path, name, line), [])
        changed = [
            code
            for code in codes(compile(trial.mutant.apply(trial.source), path, "exec", dont_inherit=True))
            if (code.co_qualname, code.co_firstlineno) == (name, line)
        ]
        if not live or len(changed) != 1 or changed[0].co_freevars != live[0].__code__.co_freevars:
            return Outcome(-1, 0.0)
        seconds = dict(zip(trial.shown, trial.seconds, strict=True))
        while True:
            outcome = forked(partial(self.run, seconds, live, changed[0]), trial.limit)
            if not outcome.failed:
                return outcome
            until = dict(islice(seconds.items(), list(seconds).index(outcome.failed) + 1))
            again = until if sum(until.values()) < 1 else {outcome.failed: seconds[outcome.failed]}
            if not forked(partial(self.run, again), trial.limit).killed:
                return outcome
            del seconds[outcome.failed]  # it fails here whatever the source

    def run(self, seconds: dict[str, float], live: Sequence[FunctionType] = (), code: CodeType | None = None) -> int:
        for f in live:
            f.__code__ = cast(CodeType, code)
        items = [self.items[name] for name in seconds]
        for item, following in zip(items, [*items[1:], None], strict=True):
            signal.setitimer(signal.ITIMER_PROF, 10 + 5 * seconds[item.nodeid])
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                print(f"\nFAILED {self.failed}", flush=True)
                return 1
        return 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


def codes(code: CodeType) -> list[CodeType]:
    """A code object and all within it."""
    return [code, *(inner for c in code.co_consts if isinstance(c, CodeType) for inner in codes(c))]


class Study:
    """The records of one source tree; killed mutants stay killed while sources are the same, whatever tests do."""

    def __init__(self, path: Path, root: Path):
        self.path, self.sources = path, digest(*(root / PACKAGE / file for file in files(root)))
        self.read()

    def read(self) -> None:
        kept = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.records: dict[str, dict[str, object]] = kept["records"] if kept.get("sources") == self.sources else {}

    def note(self, mutant: Mutant, record: dict[str, object]) -> None:
        self.records[key_of(mutant)] = record
        survivors = [r for r in self.records.values() if r["status"] != "killed"]
        write(self.path, {"sources": self.sources, "survivors": survivors, "records": self.records}, indent=1)

    def status(self, mutant: Mutant) -> object:
        return self.records.get(key_of(mutant), {}).get("status", "unjudged")


def key_of(mutant: Mutant) -> str:
    return hashlib.sha256(repr(asdict(mutant)).encode()).hexdigest()[:12]


def interval(k: int, n: int) -> tuple[float, float]:
    """The exact 95 % interval of a share (Clopper and Pearson)."""
    from scipy.special import betaincinv

    low = float(betaincinv(k, n - k + 1, 0.025)) if k else 0.0
    return low, float(betaincinv(k + 1, n - k, 0.975)) if k < n else 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--n", type=int, default=100, help="how many mutants to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file", default="", help="only files of the package whose path contains this")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of tests that one mutant is shown")
    parser.add_argument("--watch", type=float, default=120.0, help="seconds of tests that are known of a test file")
    parser.add_argument("--again", action="store_true", help="try earlier survivors again, after adding tests")
    parser.add_argument("--list", action="store_true", help="show what would be tried, and run nothing")
    options = parser.parse_args()

    every = [m for m in mutants(ROOT) if options.file in m.file]
    drawn = draw(ROOT, every, options.n, options.seed)
    print(f"{len(drawn)} of {len(every)} mutants in {len(files(ROOT))} files", flush=True)
    if options.list:
        for mutant in drawn:
            source = (ROOT / PACKAGE / mutant.file).read_bytes()
            print(f"\n{mutant.file}:{mutant.line} ({mutant.kind})\n{mutant.diff(source)}")
        return

    for name in IMPORTED:
        importlib.import_module(name)
    study, told = Study(RESULTS / "mutants.json", ROOT), os.dup(1)

    def note(trial: Trial, record: dict[str, object]) -> None:
        study.note(trial.mutant, record)
        text = f"{record['status']:8} {record['where']} {record['seconds']} s {record['by']}\n"
        os.write(told, (text if record["status"] == "killed" else f"{text}{record['diff']}\n").encode())

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        root = copy_of(ROOT, Path(folder) / "copy")
        known = Known(root, RESULTS / "mutants_tests.json", options.watch)
        tried_again = ("unjudged", "survived") if options.again else ("unjudged",)
        trials = [Trial.of(m, root, known, options.budget) for m in drawn if study.status(m) in tried_again]
        live = [t for t in trials if t.shown and t.function]
        if live:
            paths = sorted({name.split("::")[0] for t in live for name in t.shown})
            outcome = run_tests(root, paths, sum(t.limit for t in live) + 600, Exchange(root, live, note))
            if outcome.code != 0:
                raise SystemExit(f"ended early: {outcome.code} {outcome.failed}")
            study.read()
        for trial in trials:
            if trial not in live or study.status(trial.mutant) == "unjudged":
                note(trial, judge(trial, root))

    tried = [r for r in (study.records[key_of(m)] for m in drawn) if r["status"] != "unjudged"]
    killed = sum(r["status"] == "killed" for r in tried)
    low, high = interval(killed, len(tried))
    print(
        f"killed {killed} of {len(tried)}: {killed / len(tried):.1%}, 95 % interval {low:.1%} to {high:.1%}; "
        f"survivors are in {study.path.relative_to(ROOT)}"
    )
    if len(tried) < len(drawn):
        print(f"{len(drawn) - len(tried)} were ended from outside: call again to try them again")


if __name__ == "__main__":
    main()
