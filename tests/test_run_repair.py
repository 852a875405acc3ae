"""A run checked against itself, and a run without its damaged chunks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import crepe_diffusion as cd
from crepe_diffusion.cli import main
from crepe_diffusion.run import DamagedError, Run, checkpoint, copy_without_damage, files, replay
from crepe_diffusion.run.folder import problems, read_run
from test_run import mixture, small


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_sync", lambda path: None)


def test_a_run_is_replayed_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Across an adaptation, the end of burn-in and a change of the target, with a draw every other iteration."""
    folder = tmp_path / "run"
    with Run.start(folder, small(output={"adapt_at": [6], "burn_in": 5, "thin": 2})) as run:
        run.run(iterations=3)
        (tmp_path / "run/checkpoints/00000000").rename(tmp_path / "aside")
        with pytest.raises(cd.InputError, match="needs two whole checkpoints"):
            replay(folder)
        (tmp_path / "aside").rename(folder / "checkpoints/00000000")
        run.run(iterations=8)
        assert main(["check", str(folder), "--replay"]) == 0
        assert "iterations 4 to 8 were run again, every bit agrees" in capsys.readouterr().out
        run.refine(change={"right": {"scale": 2.0}})
        run.run(iterations=11)
    assert replay(folder).differences == []
    # A checkpoint that is whole, but not what the one before leads to.
    path = folder / "checkpoints/00000008/state.json"
    state = files.read_json(path)
    _, tensors = checkpoint.load(path.parent)
    tensors = {name: value for name, value in tensors.items() if not name.startswith(("counts.", "diagnostics."))}
    tensors["x"] += 1e-12
    content = checkpoint.safetensors.torch.save(tensors)
    (path.parent / "state.safetensors").write_bytes(content)
    state["files"]["state.safetensors"] = files.digest(content)
    state["sizes"]["state.safetensors"] = len(content)
    files.write_json(path, state)
    assert not list(problems(folder))
    found = replay(folder).differences
    assert any("checkpoint 11: x" in text for text in found)
    assert main(["check", str(folder), "--replay", "--quiet"]) == 1


def test_a_run_made_in_python_is_replayed_in_python(tmp_path: Path) -> None:
    sampler = cd.ReplicaExchange(mixture(), cd.ladder.karras(4, 0.05, 20.0, n_finish=2), fit_samples=16)
    with Run(tmp_path / "run", sampler) as run:
        run.run(iterations=2)
        run.run(iterations=4)
    assert replay(tmp_path / "run", target=mixture()).differences == []
    assert replay(tmp_path / "run", target=mixture(0.1)).differences


def test_damaged_chunks_are_left_out_of_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("crepe_diffusion.run.store.LONGEST_BLOCK", 4)
    folder, new = tmp_path / "run", tmp_path / "new"
    with Run.start(folder, small()) as run:
        run.run(iterations=10)
        run.run(iterations=14)
    before = read_run(folder)
    assert copy_without_damage(folder, new) == []
    assert not new.exists()
    chunk = folder / "samples.zarr/x/c.1.0.0"
    chunk.write_bytes(chunk.read_bytes()[:-3])
    trace = folder / "samples.zarr/trace/level/c.0.0.0"
    trace.unlink()
    with pytest.raises(DamagedError):
        read_run(folder)
    assert main(["check", str(folder), "--drop-damaged", str(new)]) == 0
    told = capsys.readouterr().err
    assert "lost: 4 draws, 5 to 8 of 14 (x: chunk does not match its checksum)" in told
    assert "lost: 4 rows of the trace, 1 to 4 of 14 (trace/level: chunk missing or unreadable" in told
    assert not list(problems(new))
    data, kept = read_run(new), np.r_[0:4, 8:14]
    assert np.array_equal(data.x, before.x[kept])
    assert data.iteration.tolist() == before.iteration[kept].tolist()
    assert data.trace["iteration"].tolist() == list(range(5, 15))
    assert sum("lost: 4" in note for note in data.notes) == 2
    with pytest.raises(cd.InputError, match="is not an empty folder"):
        copy_without_damage(folder, new)
    # Both go on alike: a chain does not look back at its draws.
    with Run.resume(new) as run:
        run.run(iterations=18)
    assert sum("lost: 4" in note for note in read_run(new).notes) == 2
    with Run.start(tmp_path / "whole", small()) as run:
        run.run(iterations=18)
    assert np.array_equal(read_run(new).x[10:], read_run(tmp_path / "whole").x[14:])
