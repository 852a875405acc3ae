"""The command line: what it prints, and the codes it exits with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import crepe_diffusion as cd
from crepe_diffusion.cli import main
from crepe_diffusion.run.folder import read_run, status
from run_worker import SERVER

SMALL = ["--set", "ladder.n_levels=4", "--set", "sampler.fit_samples=16", "--set", "sampler.n_chains=2"]


def start(folder: Path, *more: str) -> int:
    return main(["run", "mixture-tilt", "--out", str(folder), "--no-report", "--quiet", *SMALL, *more])


def test_run_check_refine_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert start(folder, "--iterations", "8") == 0
    assert main(["check", str(folder)]) == 0
    assert "all files are whole" in capsys.readouterr().out
    assert (
        main(["refine", str(folder), "--add", "wall", "kind=near", "centre=2.0", "scale=0.5", "--remove", "right"]) == 0
    )
    assert "not running" in capsys.readouterr().out
    assert main(["resume", str(folder), "--iterations", "12", "--no-report"]) == 0
    assert "iterations = 12" in capsys.readouterr().out
    data = read_run(folder)
    assert data.target.tolist() == [0] * 8 + [1] * 4
    (wall,) = data.targets[1]["rewards"]
    assert (wall["scale"], wall["function"]["centre"]) == (0.5, 2.0)
    chunk = folder / "samples.zarr/x/c.0.0.0"
    chunk.write_bytes(chunk.read_bytes()[:-2])
    assert main(["check", str(folder)]) == 4
    assert str(chunk) in capsys.readouterr().err
    assert main(["resume", str(folder), "--iterations", "14"]) == 4
    assert str(chunk) in capsys.readouterr().err


def test_errors_are_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["run", "mixture-tlt"], "did you mean 'mixture-tilt'"),
        (["run", str(tmp_path / "no.toml")], "does not exist"),
        (["run", "mixture-tilt", "--set", "sampler.sed=1"], "did you mean 'seed'"),
        (["run", "mixture-tilt", "--set", "seed"], "TABLE.KEY=VALUE"),
        (["resume", str(tmp_path / "nowhere")], "does not exist"),
        (["check", str(tmp_path)], "holds no run"),
        (["report", str(tmp_path)], "holds no run"),
    ):
        assert main(arguments) == 2
        err = capsys.readouterr().err
        assert message in err
        assert "Traceback" not in err
    assert main(["check", str(tmp_path), "--traceback"]) == 2
    assert "Traceback" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit:
        main(["run"])
    assert exit.value.code == 2
    with pytest.raises(SystemExit) as exit:
        main(["--help"])
    assert exit.value.code == 0
    assert "examples:" in capsys.readouterr().out


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 4


def long_run(folder: Path) -> None:
    os._exit(start(folder, "--iterations", "1000000"))


def wait_until(true) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_running_run_is_refined_and_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    child = SERVER.Process(target=long_run, args=(folder,))
    child.start()
    wait_until(lambda: (folder / "checkpoints/00000000").exists())
    assert status(folder) == "running"
    time.sleep(0.5)
    assert main(["refine", str(folder), "--change", "right", "slope=1.5"]) == 0
    assert "in force from iteration" in capsys.readouterr().out
    assert main(["refine", str(folder), "--add", "wall", "kind=nera"]) == 2
    assert "did you mean 'near'" in capsys.readouterr().err
    time.sleep(0.3)
    os.kill(child.pid, signal.SIGTERM)
    child.join(60)
    assert child.exitcode == 3
    assert status(folder) == "stopped"
    assert main(["check", str(folder)]) == 0
    data = read_run(folder)
    assert len(data.targets) == 2
    assert (data.target[data.iteration >= data.targets[1]["from_iteration"]] == 1).all()
    assert "SIGTERM" in (folder / "log.txt").read_text()
    n = data.n_draws
    assert main(["resume", str(folder), "--iterations", str(n + 5), "--no-report", "--quiet"]) == 0
    assert read_run(folder).iteration.tolist() == list(range(1, n + 6))


HIDING = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
import crepe_diffusion as cd
from crepe_diffusion.cli import main
sys.exit(main({arguments!r}))
"""


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["list"], 0, "mixture-tilt"),
        (["run", "mixture-tilt", "--out", "nowhere"], 1, "pip install 'crepe-diffusion[run]'"),
        (["report", "nowhere"], 1, "pip install 'crepe-diffusion[plots]'"),
    ],
)
def test_without_the_extras(arguments: list[str], code: int, text: str, tmp_path: Path) -> None:
    hidden = ["safetensors", "google_crc32c", "tomli_w", "rich", "zarr", "xarray", "matplotlib"]
    script = HIDING.format(hidden=hidden, arguments=arguments)
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert text in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out.strip() == f"crepe-diffusion {cd.__version__}"


def test_a_run_of_latents_ends_in_a_report_with_decoded_images(tmp_path: Path) -> None:
    table = 'experiment = "configured_objects:latents"\n[ladder]\nkind = "karras"\nn_levels = 3\nsigma_min = 0.1\n'
    (tmp_path / "latents.toml").write_text(table + "[sampler]\nfit_samples = 16\n[stop]\niterations = 4\n")
    folder = tmp_path / "run"
    assert main(["run", str(tmp_path / "latents.toml"), "--out", str(folder), "--quiet"]) == 0
    text = (folder / "report.html").read_text("utf-8")
    assert "4 draws as images, spread over the run" in text
    assert main(["report", str(folder)]) == 0  # by itself it has no decoder, and says so
    assert "channels 0 to 2 of 4, not decoded" in (folder / "report.html").read_text("utf-8")
