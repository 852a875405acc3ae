"""Small accidents around a run: none may end it for good, spoil another one, or go unseen."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crepe_diffusion as cd
from crepe_diffusion.cli import main
from crepe_diffusion.report import page
from crepe_diffusion.run import Run, control, files, opening
from crepe_diffusion.run.folder import read_run, status
from test_run import mixture, small

LADDER = cd.ladder.karras(4, 0.05, 20.0)
ONE = cd.processes.Gaussian(variance=1.0)


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_sync", lambda path: None)


def test_adapting_with_nothing_recorded_is_no_end(tmp_path: Path) -> None:
    with Run.start(tmp_path / "run", small(output={"adapt_at": [1, 6], "burn_in": 2})) as run:
        run.run(iterations=3)
    with Run.resume(tmp_path / "run") as run:
        run.run(iterations=8)
    log = (tmp_path / "run/log.txt").read_text()
    assert "levels stay as they are: no acceptance has been recorded yet" in log
    assert "levels moved to" in log


def test_a_run_stays_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        with Run.start("run", small(sampler={"seed": len(name)})) as run:
            run.run(iterations=2)
    monkeypatch.chdir(tmp_path / "here")
    with Run.resume("run") as run:
        monkeypatch.chdir(tmp_path / "there")
        run.run(iterations=4)
    assert [read_run(tmp_path / name / "run").n_draws for name in ("here", "there")] == [4, 2]


def test_two_starts_into_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process begins and ends between our look at the folder and our lock."""
    held = opening._held

    def late(folder: Path) -> Any:
        monkeypatch.setattr(opening, "_held", held)
        with Run.start(folder, small(sampler={"seed": 1})) as run:
            run.run(iterations=2)
        return held(folder)

    monkeypatch.setattr(opening, "_held", late)
    with pytest.raises(cd.InputError, match="already holds a run"):
        Run.start(tmp_path / "run", small())
    assert read_run(tmp_path / "run").config["sampler"]["seed"] == 1
    with Run.resume(tmp_path / "run") as run:  # and the lock is free
        run.run(iterations=3)


def test_options_of_many_types(tmp_path: Path) -> None:
    (tmp_path / "my_options_16.py").write_text(
        "from pathlib import Path\n"
        "import torch\n"
        "import crepe_diffusion as cd\n"
        "from crepe_diffusion.run import Experiment\n"
        "def build(path: Path = Path('net.pt'), dtype: torch.dtype = torch.float32, limit: float | None = None,\n"
        "          device: torch.device = torch.device('cpu'), names: list[str] | None = None):\n"
        "    assert isinstance(path, Path) and isinstance(dtype, torch.dtype) and isinstance(device, torch.device)\n"
        "    assert limit is None or isinstance(limit, float)\n"
        "    p = cd.models.GaussianMixture([1.0], [[1.0]], [1.0], dtype=dtype)\n"
        "    return Experiment(p.as_target(), defaults={'ladder': {'n_levels': 3}, 'sampler': {'fit_samples': 16}})\n"
    )
    given: list[dict[str, Any]] = [{}, {"path": "a/b.pt", "dtype": "float64", "limit": 2, "device": "cpu"}]
    for i, options in enumerate(given):
        config = {"experiment": "my_options_16:build", "options": options, "stop": {"iterations": 2}}
        with Run.start(tmp_path / f"run{i}", config, import_path=str(tmp_path)) as run:
            run.run()
        with Run.resume(tmp_path / f"run{i}") as run:
            run.run(iterations=3)
    written = read_run(tmp_path / "run0").config["options"]
    assert written == {"path": "net.pt", "dtype": "float32", "device": "cpu"}
    assert read_run(tmp_path / "run1").x.dtype == "float64"
    with pytest.raises(cd.InputError, match="dtype must be a type of torch such as 'float32', got 'float23'"):
        Run.start(tmp_path / "bad", {"experiment": "my_options_16:build", "options": {"dtype": "float23"}})


class Net(nn.Module):
    def __init__(self, shift: float = 0.0):
        super().__init__()
        self.bias = nn.Parameter(torch.full((1,), 1.0 + shift, dtype=torch.float64))
        self.register_buffer("cache", torch.rand(1), persistent=False)

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        return (y + t[:, None] ** 2 * self.bias) / (1 + t[:, None] ** 2)


def network(net: nn.Module) -> cd.Target:
    return cd.models.Denoiser(net, (1,), dtype=torch.float64).as_target()


def test_a_small_change_of_the_weights_is_seen(tmp_path: Path) -> None:
    with Run(tmp_path / "run", cd.ReplicaExchange(network(Net()), LADDER, process=ONE)) as run:
        run.run(iterations=2)
    with pytest.raises(cd.InputError, match="the weights of a network are not those that the run began with"):
        Run.resume(tmp_path / "run", target=network(Net(1e-9)), process=ONE)
    with Run.resume(tmp_path / "run", target=network(Net(1e-9)), process=ONE, allow_changed=True) as run:
        run.run(iterations=3)
    with Run.resume(tmp_path / "run", target=network(Net(1e-9)), process=ONE) as run:
        run.run(iterations=4)


def test_a_model_that_differs_between_the_ends_is_seen(tmp_path: Path) -> None:
    """Only at middle levels, and only by a function: no weights, and nothing at the ends of the ladder."""

    def model(shift: float) -> cd.Target:
        def denoise(y: Tensor, t: Tensor) -> Tensor:
            return y / (1 + t[:, None] ** 2) + shift * ((t > 0.1) & (t < 10)).to(y)[:, None]

        return cd.models.Denoiser(denoise, (1,), dtype=torch.float64).as_target()

    with Run(tmp_path / "run", cd.ReplicaExchange(model(0.0), LADDER, process=ONE)) as run:
        run.run(iterations=2)
    with pytest.raises(cd.InputError, match="the model or its process gives other values"):
        Run.resume(tmp_path / "run", target=model(0.1), process=ONE)


def test_dropout_inside_of_a_function_is_seen(tmp_path: Path) -> None:
    def denoise(y: Tensor, t: Tensor) -> Tensor:
        return nn.functional.dropout(y, 0.5) / (1 + t[:, None] ** 2)

    target = cd.models.Denoiser(denoise, (1,), dtype=torch.float64).as_target()
    with pytest.raises(cd.InputError, match="a model gives other values when it is called again"):
        Run(tmp_path / "run", cd.ReplicaExchange(target, LADDER, process=ONE))


def test_any_failure_is_logged_and_keeps_what_was_sampled(tmp_path: Path) -> None:
    calls = 0

    def reward(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 30:
            raise ZeroDivisionError("of mine")
        return x[:, 0]

    sampler = cd.ReplicaExchange(mixture().tilt(reward), LADDER, process=ONE)
    with Run(tmp_path / "run", sampler) as run:
        with pytest.raises(ZeroDivisionError):
            run.run(iterations=500)
        n = run.sampler.iteration
    assert read_run(tmp_path / "run").n_draws == n > 2
    assert f"failed after iteration {n}: ZeroDivisionError: of mine" in (tmp_path / "run/log.txt").read_text()


@pytest.fixture
def hears_hangups():
    """The tests themselves may run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hears_hangups")
@pytest.mark.parametrize("name", ["SIGHUP"])
def test_a_signal_writes_everything(name: str, tmp_path: Path) -> None:
    with Run.start(tmp_path / "run", small()) as run:

        def kill() -> None:
            while run.sampler.iteration < 3:
                time.sleep(0.01)
            os.kill(os.getpid(), getattr(signal, name))

        thread = threading.Thread(target=kill)
        thread.start()
        outcome = run.run(iterations=10**6)
        thread.join()
        assert (outcome.reason, outcome.finished) == (name, False)
        assert read_run(tmp_path / "run").n_draws == run.sampler.iteration
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:  # nohup
        with Run.resume(tmp_path / "run") as run:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGHUP)).start()
            assert run.run(seconds=run.seconds + 0.2).finished
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ctrl_c_before_there_is_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    for place, message in (
        ("crepe_diffusion.run.opening._first_sampler", "there is no run to resume"),
        ("crepe_diffusion.run.runner.Run._loop", "resume goes on from the last checkpoint"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, interrupted)
            words = ["--set", "ladder.n_levels=3", "--set", "sampler.fit_samples=16"]
            assert main(["run", "mixture-tilt", "--out", str(tmp_path / "run"), *words]) == 3
        assert message in capsys.readouterr().err


def test_output_that_nobody_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "caf\u00e9"
    with Run.start(folder, small()) as run:
        run.run(iterations=2)
    reader, writer = os.pipe()
    os.close(reader)
    streams: list[Any] = [
        os.fdopen(writer, "w"),
        open("/dev/full", "w") if os.path.exists("/dev/full") else None,  # noqa: SIM115
        io.TextIOWrapper(io.BytesIO(), encoding="ascii"),
        None,
    ]
    closed = io.StringIO()
    closed.close()
    for stream in [*streams, closed]:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["check", str(folder)]) == 0
        monkeypatch.undo()
    assert b"caf\\xe9: all files are whole" in streams[2].buffer.getvalue()


def test_a_stop_rule_that_is_refused_is_not_kept(tmp_path: Path) -> None:
    """It was written first, and refused at every resume."""
    with Run.start(tmp_path / "run", small()) as run:
        run.run(iterations=2)
        with pytest.raises(cd.InputError, match="ess_scalar: 'nothing' is not one of x, last mode"):
            run.run(ess_scalar="nothing")
    with Run.resume(tmp_path / "run") as run:
        run.run(iterations=3)


def test_a_name_of_any_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As of a folder `café` where the locale is C."""
    folder = tmp_path / os.fsdecode(b"caf\xff")
    with Run.start(folder, small()) as run:
        run.run(iterations=2)
    page.publish(folder / "report.html", page.document(str(folder), ""), [])
    assert "caf\\udcff" in (folder / "report.html").read_text()
    (tmp_path / "file").touch()
    assert main(["run", "mixture-tilt", "--out", str(tmp_path / "file")]) == 2
    assert "file is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("rule", ["seconds"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_a_stop_rule_is_a_number(rule: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(cd.InputError, match=rf"\[stop\] {rule} must be finite and at least 0, got {value}"):
        Run.start(tmp_path / "run", small(stop={rule: float(value)}))
    with pytest.raises(cd.InputError, match="flush_seconds must be at least 0, got nan"):
        Run.start(tmp_path / "run", small(output={"flush_seconds": float("nan")}))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / f"{files.ASIDE}x").symlink_to("/dev/full")
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/x'"):
        files.publish(tmp_path / "x", b"content")


def test_a_report_takes_no_other_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    with Run.start(folder, small()) as run:
        run.run(iterations=2)
    os.mkfifo(tmp_path / "device")
    assert main(["report", str(folder), "--out", str(tmp_path / "device")]) == 2
    assert "is not a file" in capsys.readouterr().err
    assert not (tmp_path / "device").is_file()
    assert main(["report", str(folder), "--out", str(folder / "config.toml")]) == 2
    assert "config.toml is no page" in capsys.readouterr().err
    outside.mkdir()
    (outside / "mine.html").write_text("mine")
    picture = page.Picture("a", b"png", "alt")
    (folder / "figures").symlink_to(outside)
    with pytest.raises(cd.InputError, match="figures is a link"):
        page.publish(folder / "report.html", "text", [picture])
    (folder / "figures").unlink()
    (folder / "report.html").symlink_to(outside / "mine.html")
    (folder / "figures").mkdir()
    (folder / "figures/a.png").symlink_to(outside / "mine.html")
    page.publish(folder / "report.html", "text", [picture])
    assert (outside / "mine.html").read_text() == "mine"
    assert (folder / "report.html").read_text() == "text"
    assert (folder / "figures/a.png").read_bytes() == b"png"


def test_an_outcome_of_another_session_is_not_believed(tmp_path: Path) -> None:
    with Run.start(tmp_path / "run", small()) as run:
        run.run(iterations=2)
        old = (tmp_path / "run/outcome.json").read_bytes()
        run.run(iterations=4)
    assert status(tmp_path / "run") == "finished"
    (tmp_path / "run/outcome.json").write_bytes(old)
    assert status(tmp_path / "run") == "stopped"


def test_requests_of_any_size_are_not_read(tmp_path: Path) -> None:
    with Run.start(tmp_path / "run", small()) as run:
        path = control.leave(run.folder, control.Request("", [], ["x" * 2**20], {}))
        run.run(iterations=2)
    assert "larger than" in path.with_suffix(".answer.json").read_text()
