"""The command line: run, resume, refine, report, compare, check, list."""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
import tomllib
import traceback
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crepe_diffusion import __version__
from crepe_diffusion.errors import InputError, NonFiniteError

if TYPE_CHECKING:
    from crepe_diffusion.run import Progress, Run, control

__all__ = ["main"]

Command = Callable[[argparse.Namespace], int]
EXTRAS = {"matplotlib": "plots", "rich": "plots"}
"""Which extra brings a package; all others that may be missing belong to runs."""
FINISHED, FAILED, USAGE, INTERRUPTED, DAMAGED = 0, 1, 2, 3, 4

EXAMPLES = """\
examples:
  crepe-diffusion list                                      built-in experiments
  crepe-diffusion run mixture-tilt --out runs/tilt          one of them, as it comes
  crepe-diffusion run my.toml --set sampler.seed=3          your own, with one value changed
  crepe-diffusion resume runs/tilt --iterations 10000       go on, for longer
  crepe-diffusion refine runs/tilt --add wall kind=near centre=2.0 scale=0.5
  crepe-diffusion refine runs/tilt --change wall scale=2 --remove right
  crepe-diffusion report runs/tilt                          runs/tilt/report.html
  crepe-diffusion report runs/a runs/b --out both.html      runs of two seeds as one
  crepe-diffusion compare runs/tilt runs/other --out compare.html
  crepe-diffusion check runs/tilt                           verify every file

exit codes:
  0  done, a stop rule was met        3  stopped by Ctrl-C or SIGTERM, everything written; resume goes on
  1  failed                           4  a file is damaged; its name is on standard error
  2  a wrong argument or configuration
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name may hold what an ASCII terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    parser = _parser()
    given = parser.parse_args(arguments)
    command: Command = given.command
    try:
        if command in (_run, _resume, _check):
            return _with_others(command, given)
        return command(given)
    except KeyboardInterrupt:
        _warn(_stopped(given))
        return INTERRUPTED
    except ModuleNotFoundError as error:
        if given.traceback:
            traceback.print_exc()
        package = (error.name or "").partition(".")[0]
        if package == "crepe_diffusion":
            raise
        extra = EXTRAS.get(package, "run")
        _warn(f"crepe-diffusion: needs {package!r}: pip install 'crepe-diffusion[{extra}]'")
        return FAILED
    except Exception as error:
        if given.traceback:
            traceback.print_exc()
        kind = "" if isinstance(error, (InputError, RuntimeError, NonFiniteError)) else f"{type(error).__name__}: "
        _warn(f"crepe-diffusion: {kind}{error}")
        if not kind and not isinstance(error, RuntimeError):
            return USAGE if isinstance(error, InputError) else FAILED
        if not given.traceback and kind:
            _warn("(--traceback shows where)")
        return DAMAGED if type(error).__name__ == "DamagedError" else FAILED


def _with_others(command: Command, given: argparse.Namespace) -> int:
    """One of the processes of torchrun: number 0 prints; a clean stop is no failure that torchrun should repeat."""
    several = "TORCHELASTIC_RUN_ID" in os.environ
    if not several and given.groups == given.model_processes == 1:
        return command(given)
    from crepe_diffusion.run.team import distributed

    if several and command is _check and not given.replay:
        raise InputError("check needs one process only, unless it is check --replay")
    if command is _run and given.out is None:
        raise InputError("with several processes the folder must be given, --out DIR")
    with distributed(given.groups, given.model_processes) as group:
        if group is not None and not group.leads:
            given.quiet = given.no_report = True
        if group is not None and given.groups > 1:
            _take_group(command, given, group.index)
        code = command(given)
    return FINISHED if code == INTERRUPTED else code


def _take_group(command: Command, given: argparse.Namespace, index: int) -> None:
    """Each group has a folder within the given one, and a seed that follows from the given one."""
    from crepe_diffusion.run.pooling import group_folder, parts

    if command is not _run:
        n = len(parts(given.folder))
        if n != given.groups:
            raise InputError(f"{given.folder} holds {n} group{'s' if n > 1 else ''}, not {given.groups}")
        given.folder = group_folder(given.folder, index)
        return
    from crepe_diffusion.run.team import seed_of

    given.out = group_folder(given.out, index)
    given.seed_of = lambda seed: seed_of(seed, index)


def _stopped(given: argparse.Namespace) -> str:
    """What a second Ctrl-C, or one before anything was sampled, leaves behind."""
    folder = getattr(given, "folder", None)
    if given.command not in (_run, _resume):
        return "stopped"
    if isinstance(folder, Path) and any((folder / "checkpoints").glob("[0-9]*")):
        return "stopped at once; resume goes on from the last checkpoint"
    return "stopped before anything was sampled; there is no run to resume"


def _say(text: object) -> None:
    """Print a line; that nobody reads it is no reason to fail."""
    _print(text, "stdout")


def _warn(text: object) -> None:
    _print(text, "stderr")


def _print(text: object, name: str) -> None:
    stream = getattr(sys, name)
    try:
        print(text, file=stream, flush=True)
    except (OSError, ValueError):  # the reader has gone, the disk is full, the stream was closed
        # Nothing is left in it that would fail again when the interpreter ends.
        setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as the process lasts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="crepe-diffusion",
        description="Control pretrained diffusion models by replica exchange; a run is a folder.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"crepe-diffusion {__version__}")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--traceback", action="store_true", help="show where an error came from")
    shared.add_argument("--quiet", action="store_true", help="print errors only")
    stop = argparse.ArgumentParser(add_help=False)
    rules = stop.add_argument_group("stop rules (in place of the configuration's; whichever is met first)")
    rules.add_argument("--iterations", type=int, metavar="N", help="iterations since the beginning")
    rules.add_argument("--seconds", type=float, metavar="S", help="seconds of running, over all sessions")
    rules.add_argument("--evaluations", type=int, metavar="N", help="network rows")
    rules.add_argument("--ess", type=float, metavar="N", help="effective sample size")
    rules.add_argument("--ess-scalar", metavar="NAME", help="of this scalar (default: of every one that varies)")
    stop.add_argument("--no-report", action="store_true", help="do not write report.html at the end")
    trusting = argparse.ArgumentParser(add_help=False)
    trusting.add_argument("--trust", action="store_true", help="run the code that a folder from elsewhere names")
    many = argparse.ArgumentParser(add_help=False)
    shares = many.add_argument_group("many processes (with torchrun)")
    shares.add_argument("--groups", type=int, default=1, metavar="G", help="independent groups, DIR/group-000, ...")
    shares.add_argument("--model-processes", type=int, default=1, metavar="M", help="processes that hold one network")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(
        name: str, function: Callable[[argparse.Namespace], int], help: str, *parents: argparse.ArgumentParser
    ) -> Any:
        sub = commands.add_parser(name, help=help, description=help, parents=[shared, *parents])
        sub.set_defaults(command=function)
        return sub

    sub = add("run", _run, "start a run from a TOML file or a built-in experiment", stop, many)
    sub.add_argument("config", metavar="CONFIG", help="a TOML file, or a name from `crepe-diffusion list`")
    sub.add_argument("--out", type=Path, metavar="DIR", help="the run's folder (default: runs/NAME, runs/NAME-2, ...)")
    sub.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE", help="change one value")
    sub = add("resume", _resume, "go on with a run, bit for bit where it was left", stop, trusting, many)
    sub.add_argument("folder", type=Path, metavar="DIR")
    sub.add_argument("--allow-changed", action="store_true", help="accept a changed configuration or model")
    sub = add("refine", _refine, "add, change or remove reward terms of a run, stopped or running", trusting)
    sub.add_argument("folder", type=Path, metavar="DIR")
    sub.add_argument("--add", nargs="+", action="append", default=[], metavar=("NAME", "KEY=VALUE"))
    sub.add_argument("--change", nargs="+", action="append", default=[], metavar=("NAME", "KEY=VALUE"))
    sub.add_argument("--remove", nargs="+", action="extend", default=[], metavar="NAME")
    sub.add_argument("--wait", type=float, default=30.0, metavar="S", help="how long to wait for a running process")
    sub = add("report", _report, "write report.html: verdict first, then figures")
    sub.add_argument("folders", type=Path, nargs="+", metavar="DIR", help="several are pooled: runs of other seeds")
    sub.add_argument("--out", type=Path, metavar="FILE", help="default: DIR/report.html")
    sub = add("compare", _compare, "put several runs side by side at equal network evaluations")
    sub.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    sub.add_argument("--out", type=Path, default=Path("compare.html"), metavar="FILE")
    sub = add("check", _check, "verify every checksum and array, and name the files that are bad", trusting, many)
    sub.add_argument("folder", type=Path, metavar="DIR")
    sub.add_argument(
        "--replay", action="store_true", help="run again from the older checkpoint to the newer, and compare every bit"
    )
    sub.add_argument(
        "--drop-damaged", type=Path, metavar="NEW", help="write a copy without damaged chunks, and name what is lost"
    )
    add("list", _list, "the built-in experiments")
    return parser


# -- commands --------------------------------------------------------------------------------------------------


def _run(given: argparse.Namespace) -> int:
    from crepe_diffusion.presets import builtin
    from crepe_diffusion.run import Run
    from crepe_diffusion.run.config import read_toml

    path = Path(given.config)
    is_name = path.suffix != ".toml" and not path.exists()
    if is_name and path.name.replace("-", "_") in builtin.__all__:
        config = builtin.preset(given.config)
    elif is_name:
        from crepe_diffusion.run.experiment import find

        find(given.config)  # an error lists what there is
        config = {"experiment": given.config}
    else:
        config = read_toml(path)
    for text in given.set:
        _assign(config, text)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and (given.out / "config.toml").exists():
        # torchrun starts the same command again after one of the processes has died.
        given.folder, given.allow_changed, given.trust = given.out, False, False
        return _resume(given)
    if given.groups > 1:
        table = config.setdefault("sampler", {})
        table["seed"] = given.seed_of(table.get("seed", 0))
    folder = given.folder = given.out or _free(Path("runs") / path.stem)
    run = Run.start(folder, config, import_path="" if is_name else str(path.resolve().parent))
    return _go(run, given)


def _resume(given: argparse.Namespace) -> int:
    from crepe_diffusion.run import Run

    def notify(text: str) -> None:
        _warn(f"crepe-diffusion: {text}")

    run = Run.resume(given.folder, allow_changed=given.allow_changed, trust=given.trust, notify=notify)
    return _go(run, given)


def _go(run: Run, given: argparse.Namespace) -> int:
    """Run until a stop rule is met, show how it goes, and print where everything lies."""
    with run, _bar(given.quiet, str(given.folder)) as progress:
        outcome = run.run(
            iterations=given.iterations,
            seconds=given.seconds,
            evaluations=given.evaluations,
            ess=given.ess,
            ess_scalar=given.ess_scalar,
            progress=progress,
        )
    if not given.quiet:
        _say(f"{given.folder}: {outcome.reason} after {run.sampler.iteration} iterations")
    if outcome.finished and not given.no_report:
        decode = run.history.experiment.decode
        path = _write_report([given.folder], given.folder / "report.html", given.quiet, decode)
        if path is not None and not given.quiet:
            _say(path)
    return FINISHED if outcome.finished else INTERRUPTED


def _refine(given: argparse.Namespace) -> int:
    from crepe_diffusion.run import control
    from crepe_diffusion.run.pooling import parts

    add = [_reward(words) for words in given.add]
    change = {words[0]: {k: v for k, v in _reward(words).items() if k != "name"} for words in given.change}
    if not (add or change or given.remove):
        raise InputError("nothing to do: give --add, --change or --remove")
    for folder in parts(given.folder):
        _refine_one(folder, control.Request("", add, given.remove, change), given.trust, given.wait)
    return FINISHED


def _refine_one(folder: Path, request: control.Request, trust: bool, wait: float) -> None:
    from crepe_diffusion.run import control
    from crepe_diffusion.run.config import read_toml
    from crepe_diffusion.run.folder import read_targets, require_run, status
    from crepe_diffusion.run.opening import rehearse

    require_run(folder)
    running = status(folder) == "running"
    in_python = read_toml(folder / "config.toml").get("experiment") == "python"
    if running or in_python:
        control.refined(read_targets(folder)[-1]["rewards"], request)
    else:
        rehearse(folder, request, trust)
    path = control.leave(folder, request)
    if not running:
        when = "is evaluated" if in_python else "is in force"
        _say(f"{folder} is not running; the new target {when} when it is resumed")
        return
    answer = control.await_answer(path, wait)
    if answer is None:
        _say(f"{folder} has not answered within {wait:g} s; it will after its present iteration")
        return
    accepted, text = answer
    if not accepted:
        raise InputError(f"refused, the run goes on as before: {text}")
    _say(f"{folder}: {text}")


def _report(given: argparse.Namespace) -> int:
    if given.out is None and len(given.folders) > 1:
        raise InputError("several runs are pooled: give the page, --out FILE")
    path = _write_report(given.folders, given.out or given.folders[0] / "report.html", quiet=False)
    if path is not None:
        _say(path)
    return FINISHED if path is not None else FAILED


def _compare(given: argparse.Namespace) -> int:
    from crepe_diffusion.report import write_comparison
    from crepe_diffusion.run import read_run

    _say(write_comparison([read_run(folder) for folder in given.folders], given.out))
    return FINISHED


def _check(given: argparse.Namespace) -> int:
    from crepe_diffusion.run.folder import problems
    from crepe_diffusion.run.pooling import parts

    if given.replay:
        return _replay(given)
    if given.drop_damaged is not None:
        return _drop(given)
    found = [error for folder in parts(given.folder) for error in problems(folder)]
    for error in found:
        _warn(error)
    if not given.quiet:
        _say(f"{given.folder}: {'all files are whole' if not found else f'{len(found)} bad'}")
    return DAMAGED if found else FINISHED


def _replay(given: argparse.Namespace) -> int:
    from crepe_diffusion.run.replaying import replay

    done = replay(given.folder, trust=given.trust)
    for text in done.differences:
        _warn(f"differs: {text}")
    verdict = f"{len(done.differences)} differences" if done.differences else "every bit agrees"
    if not given.quiet:
        _say(f"{given.folder}: iterations {done.first} to {done.last} were run again, {verdict}")
    return FAILED if done.differences else FINISHED


def _drop(given: argparse.Namespace) -> int:
    from crepe_diffusion.run import copy_without_damage

    lost = copy_without_damage(given.folder, given.drop_damaged)
    for text in lost:
        _warn(text)
    if not given.quiet:
        _say(
            f"{given.drop_damaged}: {len(lost)} chunks left out" if lost else "no chunk is damaged; nothing was copied"
        )
    return FINISHED


def _list(given: argparse.Namespace) -> int:
    from crepe_diffusion.presets import builtin

    names = [name.replace("_", "-") for name in builtin.__all__]
    for name in names:
        summary = (getattr(builtin, name.replace("-", "_")).__doc__ or "").splitlines()[0]
        _say(f"{name:<{max(map(len, names))}}  {summary}")
    return FINISHED


# -- parts -----------------------------------------------------------------------------------------------------


def _write_report(
    folders: list[Path], path: Path, quiet: bool, decode: Callable[..., Any] | None = None
) -> Path | None:
    try:
        from crepe_diffusion.report import write_report
        from crepe_diffusion.run import read_runs
    except ImportError as error:
        if not quiet:
            _warn(f"no report: {error}; pip install 'crepe-diffusion[plots]'")
        return None
    return Path(write_report(read_runs(folders), path, decode=decode))


def _free(folder: Path) -> Path:
    """The folder, or the first numbered one beside it that does not exist."""
    n, free = 1, folder
    while free.exists():
        n += 1
        free = folder.with_name(f"{folder.name}-{n}")
    return free


def _value(text: str) -> Any:
    """A TOML value; what is none is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _assign(config: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    *tables, last = key.strip().split(".")
    if not equals or not last:
        raise InputError(f"--set wants TABLE.KEY=VALUE, such as sampler.seed=3; got {text!r}")
    place: Any = config
    for name in tables:
        place = place.setdefault(name, {})
        if not isinstance(place, dict):
            raise InputError(f"--set {text!r}: {name!r} is not a table; rewards are changed in the file or by refine")
    place[last] = _value(value.strip())


def _reward(words: list[str]) -> dict[str, Any]:
    """`NAME KEY=VALUE ...` as a reward table; keys that are none of `Reward`'s belong to its function."""
    from crepe_diffusion.targets import Reward

    table: dict[str, Any] = {"name": words[0]}
    for word in words[1:]:
        key, equals, _ = word.partition("=")
        if not equals:
            raise InputError(f"{words[0]!r} is followed by KEY=VALUE pairs, got {word!r}")
        if key == "name":
            raise InputError(f"a reward term keeps its name: {words[0]!r} cannot be given {word!r}")
        own = key.partition(".")[0] in Reward.__dataclass_fields__
        _assign(table, word if own else f"function.{word}")
    return table


@contextmanager
def _bar(quiet: bool, name: str) -> Any:
    """Something to call with `Progress`: a bar on a terminal, nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bars
    except ImportError:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[state]}"))
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(name, total=1.0, state="")

        def show(p: Progress) -> None:
            bars.update(task, completed=p.share, state=_state(p))

        yield show


def _state(p: Progress) -> str:
    """`1,200 it  312 it/s  acceptance 0.52  ESS 340  0:42 left`."""
    parts = [f"{p.iteration:,} it", f"{p.rate:.3g} it/s"]
    parts += [f"acceptance {p.acceptance:.2f}"] if math.isfinite(p.acceptance) else []
    parts += [f"ESS {p.ess:.0f}"] if p.ess > 0 else []
    if math.isfinite(p.seconds_left):
        minutes, seconds = divmod(round(p.seconds_left), 60)
        parts.append(f"{minutes}:{seconds:02d} left")
    return "  ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
