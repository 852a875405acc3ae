"""Requests to a run: what cannot be evaluated is refused, answered and logged, and the run goes on as it was."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.cli import main
from crepe_diffusion.run import Run, control, files
from crepe_diffusion.run.folder import read_run
from run_worker import assert_same_run
from test_run import small


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_sync", lambda path: None)


def reward(**fields: Any) -> dict[str, Any]:
    return {"name": "w", "function": {"kind": "near", **fields}}


class Leaving:
    def __init__(self) -> None:
        raise SystemExit(7)

    def __call__(self, x: Tensor) -> Tensor:
        return x[:, 0]


def imaginary(x: Tensor) -> Tensor:
    return 1j * x[:, 0]


def garbled(x: Tensor) -> Tensor:
    raise ValueError("no UTF-8: \udc80")


BAD: list[dict[str, Any]] = [
    {"add": [reward(axis=7)]},
    {"add": [reward(axis="abc")]},
    {"add": [reward(centre=[1, 2])]},
    {"add": [reward(centre=float("nan"))]},
    {"add": [reward(kind="os:system")]},
    {"add": [reward(kind="builtins:len")]},
    {"add": [reward(kind="sys:exit")]},
    {"add": [reward(kind="test_run_requests:Leaving")]},
    {"add": [reward(kind="test_run_requests:imaginary")]},
    {"add": [reward(kind="test_run_requests:garbled")]},
    {"add": [{"name": "w"}]},
    {"add": ["w"]},
    {"add": [{"name": "w", "function": {"kind": "near"}, "scale": float("inf")}]},
    {"add": [{"name": "w", "function": {"kind": "near"}, "anneal": {"kind": "power", "exponent": "x"}}]},
    {"add": [{"name": "w", "function": {"kind": "near"}, "guidance": "up"}]},
    {"add": [{"name": ["w"], "function": {"kind": "near"}}]},
    {"change": {"right": {"function": {"slope": "abc"}}}},
    {"change": {"right": {"function": {"axis": 7}}}},
    {"change": {"right": {"function": {"slope": [1.0]}}}},
    {"change": {"right": ["scale"]}},
    {"change": {"wrong": {"scale": 2.0}}},
    {"remove": ["wrong"]},
    {"remove": [["right"]]},
    {"remove": ["right"], "change": {"right": {"scale": 2.0}}},
]


def leave(folder: Path, request: dict[str, Any]) -> Path:
    whole = {"add": [], "remove": [], "change": {}, **request}
    return control.leave(folder, control.Request("", whole["add"], whole["remove"], whole["change"]))


def test_bad_requests_leave_a_run_as_it_was(tmp_path: Path) -> None:
    with Run.start(tmp_path / "whole", small()) as run:
        run.run(iterations=12)
    told: list[str] = []
    with Run.start(tmp_path / "asked", small()) as run:
        run.run(iterations=4)
        live = [leave(run.folder, request) for request in BAD]
        run.run(iterations=8)
    stopped = [leave(tmp_path / "asked", request) for request in BAD[:4]]
    with Run.resume(tmp_path / "asked", notify=told.append) as run:
        run.run(iterations=12)
    for path in [*live, *stopped]:
        assert not path.exists()
        answer = json.loads(path.with_suffix(".answer.json").read_text())
        assert answer["accepted"] is False, answer
    assert len(told) == len(stopped)
    assert all(text.startswith("refinement refused: ") for text in told)
    assert (tmp_path / "asked/log.txt").read_text().count("refinement refused") == len(live) + len(stopped)
    assert "IndexError: index 7 is out of bounds" in (tmp_path / "asked/log.txt").read_text()
    assert_same_run(tmp_path / "asked", tmp_path / "whole")


def test_the_client_evaluates_a_request_to_a_stopped_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    with Run.start(folder, small()) as run:
        run.run(iterations=4)
    before = sorted(p for p in folder.rglob("*") if p.is_file())
    for words, message in (
        (["--add", "w", "kind=near", "axis=7"], "IndexError: index 7 is out of bounds"),
        (["--change", "right", "slope=abc"], "slope must be a number, got 'abc'"),
        (["--add", "w", "kind=near", "centre=[1,2]"], "centre must be a number"),
    ):
        assert main(["refine", str(folder), *words]) == 2
        assert message in capsys.readouterr().err
    assert sorted(p for p in folder.rglob("*") if p.is_file()) == before
    # What was left before counts: the second change builds on the first.
    assert main(["refine", str(folder), "--add", "wall", "kind=near", "centre=2.0"]) == 0
    assert main(["refine", str(folder), "--change", "wall", "scale=3", "--remove", "right"]) == 0
    with Run.resume(folder) as run:
        run.run(iterations=6)
    (wall,) = read_run(folder).targets[-1]["rewards"]
    assert (wall["name"], wall["scale"], wall["function"]["centre"]) == ("wall", 3.0, 2.0)


def test_words_of_the_client_that_mean_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    with Run.start(folder, small()) as run:
        run.run(iterations=2)
    for words in (["--change", "right", "name=left", "scale=2"], ["--add", "w", "kind=near", "name=right"]):
        assert main(["refine", str(folder), *words]) == 2
        assert "a reward term keeps its name" in capsys.readouterr().err
    assert main(["refine", str(folder), "--remove", "right", "right"]) == 0


def test_a_module_that_leaves_when_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaving_16.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with Run.start(tmp_path / "run", small()) as run:
        path = leave(run.folder, {"add": [reward(kind="leaving_16:height")]})
        run.run(iterations=3)
    assert "'leaving_16' ends the program when it is imported" in path.with_suffix(".answer.json").read_text()


SEEN: set[float] = set()
ARMED: list[bool] = []


def late(x: Tensor) -> Tensor:
    """Fine wherever the run stands, and nowhere else."""
    values = set(x.flatten().tolist())
    if ARMED and not values <= SEEN:
        raise ValueError("never seen")
    SEEN.update(values)
    return x[:, 0]


@pytest.mark.parametrize("in_python", [False, True])
def test_a_target_that_fails_later_can_be_taken_away(in_python: bool, tmp_path: Path) -> None:
    """It was accepted, and ends the run in its first iteration; so it did at every resume, before any request."""
    folder, n = tmp_path / "run", 4
    ARMED.clear()
    with Run.start(folder, small()) as run:
        run.run(iterations=n)
        run.refine(add=[{"name": "w", "function": {"kind": "test_run_requests:late"}}])
        ARMED.append(True)
        with pytest.raises(ValueError, match="never seen"):
            run.run(iterations=8)
        assert run.sampler.iteration == n
    if not in_python:
        assert main(["refine", str(folder), "--remove", "w"]) == 0
    with Run.resume(folder) as run:
        if in_python:
            run.refine(remove=["w"])
        run.run(iterations=8)
    with Run.start(tmp_path / "whole", small()) as run:
        run.run(iterations=8)
    assert [len(t["rewards"]) for t in read_run(folder).targets] == [1, 2, 1]
    assert read_run(folder).target.tolist() == [0] * n + [2] * n
    # The target is the first one again, so the draws are.
    assert read_run(folder).x.tolist() == read_run(tmp_path / "whole").x.tolist()


def test_a_reward_of_ones_own_may_fail_in_any_way(tmp_path: Path) -> None:
    def hopeless(x: Tensor) -> Tensor:
        raise KeyError("weights")

    with Run.start(tmp_path / "run", small()) as run:
        run.run(iterations=3)
        before = dataclasses.replace(run.history.experiment), run.sampler.evaluate.counts.copy()
        with pytest.raises(cd.InputError, match="the new target cannot be evaluated: KeyError: 'weights'"):
            run.refine(add=[cd.Reward(hopeless, name="hopeless")])
        assert (run.history.experiment, run.sampler.evaluate.counts) == before
        run.run(iterations=5)
    assert read_run(tmp_path / "run").target.tolist() == [0] * 5


def test_a_random_reward_is_no_target(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    with Run.start(tmp_path / "run", small()) as run:
        run.run(iterations=2)
        noisy = cd.Reward(lambda x: x[:, 0] + torch.randn(len(x), generator=generator), name="noisy")
        with pytest.raises(cd.InputError, match="a reward gives other values when it is called again"):
            run.refine(add=[noisy])
