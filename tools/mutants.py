"""Small faults, planted one at a time: does any test notice?

    share killed = mutants on which a test fails / mutants tried

A mutant is one change of the source: an operator, a comparison, a sign, a constant, a condition, a dropped
statement, two arguments in the wrong order, a function exchanged for its sibling. N of them are drawn by a seed from
all that can be made of the files in `TESTS`. Each is first shown to the tests listed for its file, quickest first; one
that survives is shown to every default test of `tests/` and to the doctests of the package. Texts, annotations, errors
and assertions are not mutated.

    python tools/mutants.py --n 150          go on where the last call stopped; records are in results/mutants.json

Every worker has a copy of the repository, so that the sources here are never touched. Time limits count processor time.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from queue import Queue
from threading import Lock

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "src/crepe_diffusion"
RESULTS = ROOT / "results" / "mutants.json"

TOKENS = ("asked", "discrete", "euler", "masked", "uniform")
# Which tests are shown a mutant first: a folder or file of the package, and names of files in tests/.
TESTS = {
    "paths.py": ("exact", "gaussian", "nonfinite", "planted_bugs", "discrete_models", "asking"),
    "kernels": ("exact", "counts", "nonfinite", "gaussian", "inputs", "diagnostics", "planted_bugs"),
    **{f"processes/{name}.py": ("discrete_models", "exact", "inputs", "asking") for name in TOKENS},
    "processes": ("gaussian", "models", "exact", "inputs", "smc", "discrete_models"),
    "samplers/choose.py": ("choose",),
    "samplers/discretisation.py": ("pilot",),
    "samplers/particle_gibbs.py": ("particle_gibbs", "starter", "counts", "inputs"),
    "samplers/pilot.py": ("pilot", "choose"),
    "samplers/plan.py": ("pilot", "choose"),
    "samplers/resampling.py": ("smc_joints", "smc", "inputs"),
    "samplers/result.py": ("smc", "samplers", "tours", "verdict", "inputs", "particle_gibbs"),
    "samplers/weights.py": ("smc_joints", "smc", "planted_bugs", "inputs"),
    "samplers": ("smc", "counts", "inputs", "diagnostics", "adapt", "nonfinite", "random", "gaussian"),
}

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
            self._add(node, "sibling", f"{self._text(node.value)}.{SIBLINGS[node.attr]}")
        if isinstance(node, ast.keyword) and node.arg in ("min", "max"):
            start, end = self._span(node.value)
            name = SIBLINGS[node.arg]
            new = f"{name}={self._text(node.value)}"
            self.found.append(Mutant(self.file, node.lineno, "sibling", start - len(node.arg) - 1, end, new))


CHANGES: tuple[Callable[[Mutator, ast.AST], None], ...] = (
    Mutator.arithmetic, Mutator.comparison, Mutator.logic, Mutator.constant, Mutator.statement, Mutator.arguments,
    Mutator.sibling,
)  # fmt: skip


def files(root: Path) -> dict[str, tuple[str, ...]]:
    """Mutated files of the package with the tests shown first; the first entry of `TESTS` that fits."""
    out: dict[str, tuple[str, ...]] = {}
    for place, tests in TESTS.items():
        path = root / PACKAGE / place
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            name = str(file.relative_to(root / PACKAGE))
            if file.name != "__init__.py":
                out.setdefault(name, tests)
    return out


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


def run_tests(root: Path, paths: list[str], limit: float) -> Outcome:
    """pytest in its own process, for at most `limit` seconds of processor time or eight times that by the clock."""
    env = {
        **os.environ,
        "PYTHONPATH": f"{root / 'src'}:{root}",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",  # or a mutant of equal length, written in the same second, would not be seen
    }
    limited = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_CPU, ({int(limit)}, {int(limit) + 5}));"
        " import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", limited, "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *paths]
    with tempfile.TemporaryFile("w+") as output:
        before = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=root,
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        seconds, code = 0.0, None
        while time.monotonic() - before < 8 * limit:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                seconds, code = usage.ru_utime + usage.ru_stime, os.waitstatus_to_exitcode(status)
                process.returncode = code
                break
            time.sleep(0.1)
        else:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
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


class Study:
    """The records of one source tree; killed mutants stay killed while sources are the same, whatever tests do."""

    def __init__(self, path: Path, root: Path):
        self.path, self.root, self.lock = path, root, Lock()
        sources = [(root / PACKAGE / f).read_bytes() for f in files(root)]
        self.digest = hashlib.sha256(b"\0".join(sources)).hexdigest()[:16]
        self.records: dict[str, dict[str, object]] = {}
        self.seconds: dict[str, float] = {}
        if path.exists():
            kept = json.loads(path.read_text())
            self.seconds = kept["seconds"]
            if kept["sources"] == self.digest:
                self.records = kept["records"]

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        survivors = [r for r in self.records.values() if r["status"] != "killed"]
        kept = {
            "sources": self.digest,
            "killed": len(self.records) - len(survivors),
            "tried": len(self.records),
            "survivors": survivors,
            "seconds": self.seconds,
            "records": self.records,
        }
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(kept, indent=1))
        new.replace(self.path)

    def note(self, key: str, record: dict[str, object]) -> None:
        with self.lock:
            self.records[key] = record
            self.save()


def key_of(mutant: Mutant) -> str:
    return hashlib.sha256(repr(asdict(mutant)).encode()).hexdigest()[:12]


def judge(study: Study, mutant: Mutant, root: Path, confirm: bool) -> dict[str, object]:
    """Show one mutant to the tests of its file and, if it survives, to all."""
    file = root / PACKAGE / mutant.file
    source = file.read_bytes()
    first = sorted((f"tests/test_{name}.py" for name in files(root)[mutant.file]), key=study.seconds.__getitem__)
    rest = [test for test in sorted(study.seconds, key=study.seconds.__getitem__) if test not in first]
    record: dict[str, object] = {
        "where": f"{PACKAGE}/{mutant.file}:{mutant.line}",
        "kind": mutant.kind,
        "diff": mutant.diff(source),
    }
    earlier = study.records.get(key_of(mutant), {})
    begun = time.monotonic()
    try:
        file.write_bytes(mutant.apply(source))
        stages = ([] if earlier.get("status") == "unconfirmed" else [first]) + ([rest] if confirm else [])
        seconds = 0.0
        for paths in stages:
            outcome = run_tests(root, paths, 30 + 3 * sum(study.seconds[p] for p in paths))
            seconds += outcome.seconds
            if not outcome.judged:
                record |= {"status": "unjudged", "by": f"exit code {outcome.code}"}
                break
            if outcome.killed:
                record |= {"status": "killed", "by": outcome.failed or "time"}
                break
        else:
            record |= {"status": "survived" if confirm else "unconfirmed"}
    finally:
        file.write_bytes(source)
    return record | {"seconds": round(seconds, 1), "clock": round(time.monotonic() - begun, 1)}


def baseline(study: Study, root: Path, drawn: list[Mutant], confirm: bool) -> None:
    """Processor seconds of the test files that will be needed, on sound sources, where all must pass; measured once."""
    tests = [str(p.relative_to(root)) for p in sorted((root / "tests").glob("test_*.py"))]
    study.seconds = {name: s for name, s in study.seconds.items() if name in (*tests, PACKAGE)}
    first = {f"tests/test_{name}.py" for m in drawn for name in files(root)[m.file]}
    for name in (*tests, PACKAGE) if confirm else sorted(first):
        if name not in study.seconds:
            outcome = run_tests(root, [name], 1200)
            if outcome.code not in (0, 5):  # 5: every test of the file is slow
                raise SystemExit(f"{name} fails without any mutant: {outcome.failed or outcome.code}")
            study.seconds[name] = outcome.seconds
            study.save()
            print(f"{name}: {outcome.seconds:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--n", type=int, default=150, help="how many mutants to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--file", default="", help="only files of the package whose path contains this")
    parser.add_argument("--quick", action="store_true", help="do not show survivors to the complete suite yet")
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

    study, confirm = Study(RESULTS, ROOT), not options.quick
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        roots: Queue[Path] = Queue()
        for i in range(options.jobs):
            roots.put(copy_of(ROOT, Path(folder) / f"worker{i}"))
        root = roots.get()
        baseline(study, root, drawn, confirm)
        roots.put(root)

        def open_still(mutant: Mutant) -> bool:
            status = study.records.get(key_of(mutant), {}).get("status")
            return (
                status in (None, "unjudged")
                or (status == "unconfirmed" and confirm)
                or (status != "killed" and options.again)
            )

        def attempt(mutant: Mutant) -> None:
            root = roots.get()
            try:
                record = judge(study, mutant, root, confirm)
            finally:
                roots.put(root)
            study.note(key_of(mutant), record)
            print(f"{record['status']:11} {record['where']} {record['seconds']} s {record.get('by', '')}", flush=True)
            if record["status"] != "killed":
                print(record["diff"], flush=True)

        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(attempt, filter(open_still, drawn)))

    tried = [r for r in (study.records[key_of(m)] for m in drawn) if r["status"] != "unjudged"]
    killed = sum(r["status"] == "killed" for r in tried)
    print(f"killed {killed} of {len(tried)} ({killed / len(tried):.0%}); survivors are in {RESULTS.relative_to(ROOT)}")
    if len(tried) < len(drawn):
        print(f"{len(drawn) - len(tried)} were ended from outside: call again to try them again")


if __name__ == "__main__":
    main()
