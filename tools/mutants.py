"""Small faults, planted one at a time: does any test notice?

    share killed = mutants on which a test fails / mutants tried

A mutant is one change of the source: an operator, a comparison, a sign, a constant, a condition, a dropped
statement, two arguments in the wrong order, a function exchanged for its sibling. N of them are drawn by a seed from
all that can be made of `MUTATED`. Texts, annotations, errors and assertions are not mutated.

Which lines each default test executes, and how long it takes, is measured once on the sound sources. A mutant is then
shown to the tests that execute it, quickest first, until one fails or `--budget` seconds of tests are spent; one that
no test executes survives at once. So the share is a lower bound: tests that come later, tests marked slow, and tests
that run the package in another process might notice more.

    python tools/mutants.py --n 150          go on where the last call stopped; records are in results/mutants.json

Tests run on a copy of the repository, so that the sources here are never touched. Time limits count processor time.
"""

from __future__ import annotations

import argparse
import ast
import difflib
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
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, islice
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "src/crepe_diffusion"
RESULTS = ROOT / "results"
MUTATED = ("paths.py", "kernels", "processes", "samplers")
# Files of tests that are shown a mutant, besides doctests: those about these rooms.
SHOWN = (
    "adapt", "adaptive", "asking", "choose", "conditions", "counted", "counts", "diagnostics", "discrete_models",
    "draws", "exact", "gaussian", "inputs", "models", "nonfinite", "particle_gibbs", "pilot", "plan", "planted_bugs",
    "random", "samplers", "smc", "smc_joints", "starter", "tours", "verdict",
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


Tests = dict[str, tuple[float, dict[str, list[int]]]]  # seconds, and lines by file


class Watch:
    """A plugin of pytest: processor seconds of each test, and the lines of mutated files that it executes.

    What a fixture of a module does is part of every test that uses it.
    """

    def __init__(self, root: Path, to: Path, seconds: float):
        self.folder, self.names, self.to, self.seconds = f"{root / PACKAGE}/", set(files(root)), to, seconds
        self.lines: set[tuple[str, int]] = set()
        self.shared: dict[str, tuple[float, set[tuple[str, int]]]] = {}
        self.tests: Tests = {}

    def called(self, frame: FrameType, event: str, value: object) -> Callable[..., Any] | None:
        """What Python calls at every call of a function: an observer of its lines, or none."""
        file = frame.f_code.co_filename.removeprefix(self.folder)
        if file not in self.names:
            return None

        def line(frame: FrameType, event: str, value: object) -> Callable[..., Any]:
            self.lines.add((file, frame.f_lineno))
            return line

        return line

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        outer, self.lines, before = self.lines, set(), time.process_time()
        try:
            return (yield)
        finally:
            self.shared[fixturedef.argname] = time.process_time() - before, self.lines
            self.lines = outer

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Function) -> Generator[None, object, object]:
        self.lines, before, known = set(), time.process_time(), set(self.shared)
        if before > self.seconds:
            item.add_marker(pytest.mark.skip(reason="enough tests of this file are known"))
            return (yield)
        threading.settrace(self.called)
        sys.settrace(self.called)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            seconds, lines = time.process_time() - before, self.lines
            for name in self.shared.keys() & set(getattr(item, "fixturenames", ())):
                seconds += self.shared[name][0] if name in known else 0.0
                lines = lines | self.shared[name][1]
            by_file = {file: sorted(n for f, n in lines if f == file) for file in {f for f, _ in lines}}
            self.tests[item.nodeid] = round(seconds, 3), by_file

    def pytest_sessionfinish(self) -> None:
        self.to.write_text(json.dumps(self.tests))


class Chosen:
    """A plugin of pytest: these tests only, in this order."""

    def __init__(self, tests: list[str]):
        self.order = {test: i for i, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.order), key=lambda i: self.order[i.nodeid])


def run_tests(root: Path, paths: list[str], limit: float, plugin: object = None) -> Outcome:
    """pytest in a fork, for at most `limit` seconds of processor time or eight times that by the clock.

    A fork has what was imported here, above all torch, and imports only the package and its tests.
    """
    with tempfile.TemporaryFile("w+") as output:
        before = time.monotonic()
        child = os.fork()
        if child == 0:
            os.setsid()
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            sys.stdout = sys.stderr = os.fdopen(1, "w", closefd=False)
            os.chdir(root)
            # A mutant of equal length, written in the same second, would not be seen through bytecode.
            os.environ |= {"PYTHONPATH": f"{root / 'src'}:{root}", "PYTHONDONTWRITEBYTECODE": "1"}
            sys.dont_write_bytecode = True
            sys.path[:0] = [str(root / "src"), str(root)]
            for name in [name for name in sys.modules if name.split(".")[0] == Path(PACKAGE).name]:
                del sys.modules[name]
            resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 5))
            # Default tests, but shapes of tensors are not checked: that would double the time to import the package.
            options = ["-o", "addopts=", "-m", "not slow", "--doctest-modules", "--doctest-ignore-import-errors"]
            options += ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
            ended = 3
            try:
                ended = int(pytest.main([*options, *paths], plugins=[plugin] if plugin else []))
            finally:
                sys.stdout.flush()
                os._exit(ended)
        seconds: float = 0.0
        code: int | None = None
        while time.monotonic() - before < 8 * limit:
            pid, status, usage = os.wait4(child, os.WNOHANG)
            if pid:
                seconds, code = usage.ru_utime + usage.ru_stime, os.waitstatus_to_exitcode(status)
                break
            time.sleep(0.05)
        else:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        output.seek(0)
        failed = [line for line in output.read().splitlines() if line.startswith(("FAILED", "ERROR"))]
    if code == -signal.SIGXCPU:
        code = None
    return Outcome(code, seconds, failed[0].split(" - ")[0].split(" ", 1)[1] if failed else "")


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


def digest(*paths: Path) -> str:
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def write(path: Path, kept: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(kept, indent=1))
    new.replace(path)


def watched(root: Path, path: Path, seconds: float) -> Tests:
    """Seconds and executed lines of every default test, on sound sources; measured once per content of a test file."""
    sources = digest(*(root / PACKAGE / file for file in files(root)))
    kept = json.loads(path.read_text()) if path.exists() else {}
    known = kept["files"] if kept.get("sources") == sources else {}
    found: Tests = {}
    for name in (*(f"tests/test_{name}.py" for name in SHOWN), *(f"{PACKAGE}/{place}" for place in MUTATED)):
        content = digest(root / name) if name.startswith("tests") else sources
        if known.get(name, {}).get("digest") != content:
            with tempfile.TemporaryDirectory() as folder:
                to = Path(folder) / "lines.json"
                outcome = run_tests(root, [name], 1200, Watch(root, to, seconds))
                if outcome.code not in (0, 5):  # 5: every test of the file is slow
                    raise SystemExit(f"{name} fails without any mutant: {outcome.failed or outcome.code}")
                known[name] = {"digest": content, "tests": json.loads(to.read_text())}
            write(path, {"sources": sources, "files": known})
            print(f"{name}: {outcome.seconds:.1f} s", flush=True)
        found |= known[name]["tests"]
    return found


def reach(mutant: Mutant, source: bytes) -> range:
    """Lines that are executed when the mutant matters.

    Within a function those of its statement; a default, a field or a constant of the module is read at import, so there
    it is the lines of the whole function, class or file.
    """
    tree = ast.parse(source)
    at, around = source[: mutant.start].count(b"\n") + 1, [cast(ast.AST, tree)]
    while inner := [
        node
        for node in ast.iter_child_nodes(around[-1])
        if isinstance(node, (ast.stmt, ast.ExceptHandler)) and node.lineno <= at <= (node.end_lineno or at)
    ]:
        around.append(inner[-1])
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


def judge(mutant: Mutant, root: Path, tests: Tests, budget: float, named: Sequence[str] = ()) -> dict[str, object]:
    """Show one mutant to the tests that execute it, quickest first, until one fails or `budget` seconds are spent.

    If tests are named, it is shown those instead.
    """
    file = root / PACKAGE / mutant.file
    source = file.read_bytes()
    lines = set(reach(mutant, source))
    able = sorted((s, name) for name, (s, seen) in tests.items() if lines.intersection(seen.get(mutant.file, ())))
    spent = list(accumulate(s for s, _ in able))
    shown = [name for (_, name), s in zip(able, spent, strict=True) if s <= budget] or [name for _, name in able[:1]]
    record: dict[str, object] = {
        "where": f"{PACKAGE}/{mutant.file}:{mutant.line}",
        "kind": mutant.kind,
        "diff": mutant.diff(source),
        "able": len(able),
        "shown": len(shown),
    }
    if not shown and not named:
        return record | {"status": "survived", "by": "no test executes it", "seconds": 0.0}
    try:
        file.write_bytes(mutant.apply(source))
        if named:
            outcome = run_tests(root, list(named), 600)
        else:
            paths = sorted({name.split("::")[0] for name in shown})
            outcome = run_tests(root, paths, 30 + 3 * spent[len(shown) - 1], Chosen(shown))
    finally:
        file.write_bytes(source)
    if outcome.killed:
        record |= {"status": "killed", "by": outcome.failed or "time"}
    else:
        record |= {"status": "survived" if outcome.judged else "unjudged", "by": f"exit code {outcome.code}"}
    return record | {"seconds": round(outcome.seconds, 1)}


class Study:
    """The records of one source tree; killed mutants stay killed while sources are the same, whatever tests do."""

    def __init__(self, path: Path, root: Path):
        self.path, self.sources = path, digest(*(root / PACKAGE / file for file in files(root)))
        kept = json.loads(path.read_text()) if path.exists() else {}
        self.records: dict[str, dict[str, object]] = kept["records"] if kept.get("sources") == self.sources else {}

    def note(self, key: str, record: dict[str, object]) -> None:
        self.records[key] = record
        survivors = [r for r in self.records.values() if r["status"] != "killed"]
        write(self.path, {"sources": self.sources, "survivors": survivors, "records": self.records})


def key_of(mutant: Mutant) -> str:
    return hashlib.sha256(repr(asdict(mutant)).encode()).hexdigest()[:12]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--n", type=int, default=150, help="how many mutants to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file", default="", help="only files of the package whose path contains this")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tests that one mutant is shown")
    parser.add_argument("--watch", type=float, default=120.0, help="seconds of tests that are known of a test file")
    parser.add_argument("--test", nargs="*", default=[], help="tests to show, such as tests/test_smc.py::test_name")
    parser.add_argument("--again", action="store_true", help="try earlier survivors again, after adding tests")
    parser.add_argument("--list", action="store_true", help="show what would be tried, and run nothing")
    options = parser.parse_args()

    every = [m for m in mutants(ROOT) if options.file in m.file]
    drawn = draw(ROOT, every, options.n, options.seed)
    print(f"{len(drawn)} of {len(every)} mutants in {len(files(ROOT))} files")
    if options.list:
        for mutant in drawn:
            source = (ROOT / PACKAGE / mutant.file).read_bytes()
            print(f"\n{mutant.file}:{mutant.line} ({mutant.kind})\n{mutant.diff(source)}")
        return

    for name in IMPORTED:
        importlib.import_module(name)
    study = Study(RESULTS / "mutants.json", ROOT)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        root = copy_of(ROOT, Path(folder))
        tests = {} if options.test else watched(root, RESULTS / "mutants_tests.json", options.watch)
        for mutant in drawn:
            status = study.records.get(key_of(mutant), {}).get("status")
            if status in (None, "unjudged") or (status == "survived" and options.again):
                record = judge(mutant, root, tests, options.budget, options.test)
                study.note(key_of(mutant), record)
                print(f"{record['status']:8} {record['where']} {record['seconds']} s {record['by']}", flush=True)
                if record["status"] != "killed":
                    print(record["diff"], flush=True)

    tried = [r for r in (study.records[key_of(m)] for m in drawn) if r["status"] != "unjudged"]
    share = sum(r["status"] == "killed" for r in tried) / len(tried)
    error = (share * (1 - share) / len(tried)) ** 0.5
    print(f"killed {share:.1%} +- {error:.1%} of {len(tried)}; survivors are in {study.path.relative_to(ROOT)}")
    if len(tried) < len(drawn):
        print(f"{len(drawn) - len(tried)} were ended from outside: call again to try them again")


if __name__ == "__main__":
    main()
