"""A configuration is code: whose it is, where it comes from, and what a folder from elsewhere may do."""

from __future__ import annotations

import gzip
import os
import shutil
import sys
from pathlib import Path

import google_crc32c
import pytest

import crepe_diffusion as cd
from crepe_diffusion.cli import main
from crepe_diffusion.run import DamagedError, Run, control, files, trust
from crepe_diffusion.run.folder import problems, read_run
from test_run import small

MODULE = """
import crepe_diffusion as cd
from crepe_diffusion.run import Experiment
def build():
    open({marker!r}, "a").write("x")
    p = cd.models.GaussianMixture([1.0], [[1.0]], [1.0])
    return Experiment(p.as_target(), defaults={{"ladder": {{"n_levels": 3}}, "sampler": {{"fit_samples": 16}}}})
def height(x):
    return x[:, 0]
"""


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_sync", lambda path: None)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "my_code_16.py").write_text(MODULE.format(marker=str(tmp_path / "ran")))
    config = {"experiment": "my_code_16:build", "stop": {"iterations": 2}}
    with Run.start(tmp_path / "run", config, import_path=str(tmp_path)) as run:
        run.run()
    yield tmp_path / "run"
    sys.path.remove(str(tmp_path))
    sys.modules.pop("my_code_16")


def test_code_of_somebody_else_is_not_run(
    mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Run.resume(mine) as run:
        run.run(iterations=3)
    monkeypatch.setenv("XDG_STATE_HOME", str(mine.parent / "state of another user"))
    ran = (mine.parent / "ran").read_text()
    for words in (["resume"], ["refine", "--add", "w", "kind=my_code_16:height"]):
        assert main([words[0], str(mine), *words[1:]]) == 2
        assert "names code that would be run here, 'my_code_16:build'" in capsys.readouterr().err
    assert (mine.parent / "ran").read_text() == ran
    assert main(["resume", str(mine), "--trust", "--iterations", "4", "--no-report", "--quiet"]) == 0
    assert main(["resume", str(mine), "--iterations", "5", "--no-report", "--quiet"]) == 0  # it is one's own now


@pytest.mark.parametrize("experiment", ["os:system", "subprocess:run"])
def test_a_folder_cannot_be_changed_to_name_other_code(experiment: str, mine: Path) -> None:
    path = mine / "config.toml"
    path.write_text(path.read_text().replace("my_code_16:build", experiment))
    with pytest.raises(cd.InputError, match=f"names code that would be run here, '{experiment}'"):
        Run.resume(mine)


@pytest.mark.parametrize("name", ["my-evil:build", "\u00e9vil:build", "0evil:build", "my evil:build", "evil:b uild"])
def test_no_name_of_code_is_overlooked(name: str, tmp_path: Path) -> None:
    """What can be imported is what is looked for; a file of an odd name beside a configuration was not."""
    with Run.start(tmp_path / "run", small()) as run:
        run.run(iterations=1)
    (tmp_path / f"{name.partition(':')[0]}.py").write_text(MODULE.format(marker=str(tmp_path / "ran")))
    path = tmp_path / "run/config.toml"
    path.write_text(path.read_text().replace("mixture-tilt", name))
    files.write_json(
        tmp_path / "run/run.json", {**files.read_json(tmp_path / "run/run.json"), "import_path": str(tmp_path)}
    )
    with pytest.raises(cd.InputError, match=r"names code that would be run here|is not of the form"):
        Run.resume(tmp_path / "run")
    assert not (tmp_path / "ran").exists()


def test_requests_and_targets_that_name_code_are_signed(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    term = {"name": "w", "function": {"kind": "my_code_16:height"}}
    own = control.leave(mine, control.Request("", [term], [], {}))
    with monkeypatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(mine.parent / "another"))
        foreign = control.leave(mine, control.Request("", [{**term, "name": "v"}], [], {}))
    with Run.resume(mine) as run:
        run.run(iterations=4)
    assert "in force from iteration" in own.with_suffix(".answer.json").read_text()
    assert "was not written by you" in foreign.with_suffix(".answer.json").read_text()
    with Run.resume(mine) as run:
        run.run(iterations=5)
    path = mine / "targets.json"
    value = files.read_json(path)
    value["targets"][-1]["rewards"][0]["function"] = {"kind": "os:system"}
    files.write_json(path, value)
    with pytest.raises(cd.InputError, match=r"targets\.json names code .*'os:system'"):
        Run.resume(mine)


def test_a_file_beside_a_configuration_takes_no_installed_modules_place(tmp_path: Path) -> None:
    (tmp_path / "safetensors.py").write_text("raise SystemExit('shadowed')")
    with Run.start(tmp_path / "run", small(), import_path=str(tmp_path)) as run:
        run.run(iterations=1)
    assert sys.path.index(str(tmp_path)) == len(sys.path) - 1
    sys.path.remove(str(tmp_path))


def test_names_of_code_are_found() -> None:
    table = {"a": [{"kind": "my.moves:Mala", "b": ("os:system",)}], "kind": "bounce", "accept": "12:30 o'clock: no"}
    assert trust.named_code([table, "crepe_diffusion.kernels.swap:metropolis"]) == ["my.moves:Mala", "os:system"]
    assert trust.named_code("crepe_diffusion.run.files:publish") == ["crepe_diffusion.run.files:publish"]


def test_links_out_of_a_folder_are_refused(tmp_path: Path) -> None:
    with Run.start(tmp_path / "run", small()) as run:
        run.run(iterations=2)
    shutil.move(tmp_path / "run/targets.json", tmp_path / "targets.json")
    (tmp_path / "run/targets.json").symlink_to(tmp_path / "targets.json")
    for read in (read_run, Run.resume, lambda folder: list(problems(folder))):
        with pytest.raises(cd.InputError, match=r"targets\.json is a link that leads out of"):
            read(tmp_path / "run")
    os.unlink(tmp_path / "run/targets.json")
    shutil.move(tmp_path / "targets.json", tmp_path / "run/inner.json")
    (tmp_path / "run/targets.json").symlink_to("inner.json")
    assert read_run(tmp_path / "run").n_draws == 2


@pytest.mark.parametrize("name", ["targets.json", "samples.zarr/x/c.0.0.0", "log.txt", "control/1.json"])
def test_nobody_waits_at_a_pipe(name: str, tmp_path: Path) -> None:
    with Run.start(tmp_path / "run", small()) as run:
        run.run(iterations=2)
    (tmp_path / "run" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "run" / name)
    for read in (read_run, Run.resume, lambda folder: list(problems(folder))):
        with pytest.raises(cd.InputError, match=f"{name} is neither a file nor a folder"):
            read(tmp_path / "run")


def test_a_running_process_waits_at_no_pipe(tmp_path: Path) -> None:
    with Run.start(tmp_path / "run", small()) as run:
        os.mkfifo(tmp_path / "run/control/1.json")
        run.run(iterations=2)
    assert "not a file" in (tmp_path / "run/control/1.answer.json").read_text()


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    with Run.start(tmp_path / "run", small()) as run:
        run.run(iterations=2)
    shutil.rmtree(tmp_path / "run/samples.zarr/x")
    (tmp_path / "run/samples.zarr/x").symlink_to("x")
    with pytest.raises(cd.InputError, match=r"samples\.zarr/x is a link that leads back to itself"):
        read_run(tmp_path / "run")


def test_files_of_any_size_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse files, which take no room; what reads them whole runs out of memory."""
    with Run.start(tmp_path / "run", small()) as run:
        run.run(iterations=2)
    checkpoint = tmp_path / "run/checkpoints/00000002"
    names = ["state.safetensors", "diagnostics.safetensors"]
    sizes = [(checkpoint / name).stat().st_size for name in names]
    for name, size in zip(names, sizes, strict=True):
        os.truncate(checkpoint / name, 2**40)
        assert any(f"{name}: larger than the {size:,} bytes" in str(p) for p in problems(tmp_path / "run"))
        os.truncate(checkpoint / name, size)
    os.truncate(tmp_path / "run/log.txt", 2**40)
    with pytest.raises(DamagedError, match=r"log\.txt: larger than"):
        Run.resume(tmp_path / "run")
    os.truncate(tmp_path / "run/config.toml", 2**40)
    with pytest.raises(cd.InputError, match=r"config\.toml is larger than"):
        read_run(tmp_path / "run")


def test_what_unpacks_to_more_than_it_should_is_not_unpacked(tmp_path: Path) -> None:
    with Run.start(tmp_path / "run", small()) as run:
        run.run(iterations=2)
    chunk = tmp_path / "run/samples.zarr/trace/acceptance/c.0.0"
    bomb = gzip.compress(bytes(2**26), 9)
    chunk.write_bytes(bomb + google_crc32c.value(bomb).to_bytes(4, "little"))
    wanted = 4096 * 3 * 4
    with pytest.raises(DamagedError, match=f"acceptance/c.0.0: chunk holds {wanted + 1} bytes in place of {wanted}"):
        read_run(tmp_path / "run")
    config = tmp_path / "run/run.json"
    os.truncate(config, files.MOST_JSON + 1)  # sparse: no room is taken
    assert any("run.json: larger than" in str(p) for p in problems(tmp_path / "run"))
