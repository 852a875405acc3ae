"""Objects from files and from Python: what is named is what runs, whoever wrote it."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

import crepe_diffusion as cd
from configured_objects import Counting, Holder, Restarting, never
from crepe_diffusion.run import Run, files, read_run
from crepe_diffusion.run.configured import configure, merged, plain
from run_worker import assert_same_run

EXAMPLES = Path(__file__).parent.parent / "examples"
LADDER = cd.ladder.karras(4, 0.05, 20.0)


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_sync", lambda path: None)


def mixture() -> cd.models.GaussianMixture:
    return cd.models.GaussianMixture([0.3, 0.7], [[-4.0], [3.0]], [0.5, 0.4])


def exchange(**options) -> cd.ReplicaExchange:
    return cd.ReplicaExchange(mixture(), LADDER, n_chains=2, fit_samples=16, **options)


def config(folder: Path) -> dict:
    return tomllib.loads((folder / "config.toml").read_text())


def test_the_rule_that_was_passed_is_the_one_that_runs(tmp_path: Path) -> None:
    with Run(tmp_path / "run", exchange(explorer=cd.Bounce(accept=never))) as run:
        run.run(iterations=8)
    data = read_run(tmp_path / "run")
    assert float(np.nansum(data.trace["explored"])) == 0, "nothing is accepted"
    assert config(tmp_path / "run")["sampler"]["explorer"]["accept"] == "configured_objects:never"
    with Run.resume(tmp_path / "run", target=mixture()) as run:
        assert run.sampler.explorer == cd.Bounce(accept=never)
        run.run(iterations=12)
    assert float(np.nansum(read_run(tmp_path / "run").trace["explored"])) == 0
    with Run(tmp_path / "other", exchange(explorer=cd.Bounce())) as run:  # the usual rule does accept
        run.run(iterations=8)
    assert float(np.nansum(read_run(tmp_path / "other").trace["explored"])) > 0


def test_what_no_file_can_hold_has_to_be_passed_again(tmp_path: Path) -> None:
    def rule(log_alpha, stream):
        return torch.zeros_like(log_alpha, dtype=torch.bool)

    explorer = cd.Bounce(accept=rule)
    for name in ("whole", "parts"):
        with Run(tmp_path / name, exchange(explorer=explorer)) as run:
            run.run(iterations=10 if name == "whole" else 4)
    assert config(tmp_path / "parts")["sampler"]["explorer"] == {"python": "Bounce(n_steps=1)"}
    with pytest.raises(cd.InputError, match=r"explorer was made in Python, Bounce\(n_steps=1\).*explorer=\.\.\."):
        Run.resume(tmp_path / "parts", target=mixture())
    with pytest.raises(cd.InputError, match=r"config\.toml was changed"):
        Run.resume(tmp_path / "parts", target=mixture(), explorer=cd.Langevin())
    with pytest.raises(cd.InputError, match="unknown key 'explore', did you mean 'explorer'"):
        Run.resume(tmp_path / "parts", target=mixture(), explore=explorer)
    with Run.resume(tmp_path / "parts", target=mixture(), explorer=explorer) as run:
        assert run.sampler.explorer is explorer
        run.run(iterations=10)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_a_subclass_stays_what_it_is(tmp_path: Path) -> None:
    with Run(tmp_path / "run", exchange(explorer=Counting(label="other"))) as run:
        run.run(iterations=2)
    assert config(tmp_path / "run")["sampler"]["explorer"]["kind"] == "configured_objects:Counting"
    with Run.resume(tmp_path / "run", target=mixture()) as run:
        assert type(run.sampler.explorer) is Counting
        assert run.sampler.explorer.label == "other"


@pytest.mark.parametrize(
    "value",
    [
        cd.Bounce(3),
        Counting(label="x"),
        cd.Langevin(0.5),
        cd.SingleToken(2),
        cd.stitching.Restitch(n_steps=10, between=(0.1, 0.3)),
        cd.Proposal((0.1, 0.9), (1.0, 2.0), "none", 3.0),
        cd.processes.Gaussian(variance=0.5),
        cd.processes.GaussianData(0.3),
        cd.anneal.power(3.0),
        cd.anneal.linear(),
        LADDER,
        Holder(Counting, Counting(2)),
        Holder("word"),
        Holder(0.5),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_object_is_its_table(value: object) -> None:
    table = plain(value)
    again = configure(table, "x").value
    assert type(again) is type(value)
    assert plain(again) == table
    assert repr(again) == repr(value)


def test_nested_tables_make_nested_objects() -> None:
    table = {"kind": "crepe_diffusion.processes:Gaussian", "information": {"kind": "gaussian-data", "rho": 2}}
    process = configure(table, "[sampler] process").value
    assert process.information == cd.processes.GaussianData(2.0)
    with pytest.raises(cd.InputError, match="information: unknown key 'roh', did you mean 'rho'"):
        configure({"kind": "gaussian", "information": {"kind": "gaussian-data", "roh": 2}}, "[sampler] process")


def test_fields_of_a_base_class_are_checked_by_their_types() -> None:
    """`zero_mean` is a field of another module's class than `Gaussian`, and so is a class in place of a word."""
    with pytest.raises(cd.InputError, match="zero_mean must be a whole number, got 'first'"):
        configure({"kind": "gaussian", "zero_mean": "first"}, "[sampler] process")
    process = configure({"kind": "gaussian", "variance": "crepe_diffusion.processes:FisherTable"}, "process").value
    assert process.variance is cd.processes.FisherTable


def test_tables_are_merged_unless_their_kind_differs() -> None:
    defaults = {"n": 1, "explorer": {"kind": "bounce", "n_steps": 2}}
    assert merged(defaults, {"explorer": {"n_steps": 3}})["explorer"] == {"kind": "bounce", "n_steps": 3}
    assert merged(defaults, {"explorer": {"kind": "langevin"}})["explorer"] == {"kind": "langevin"}
    assert merged({"function": "a:b"}, {"function": {"slope": 2}})["function"] == {"kind": "a:b", "slope": 2}


def test_the_example_names_a_strangers_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for name in ("whole", "parts"):
        with Run.start(tmp_path / name, EXAMPLES / "my_moves.toml") as run:
            run.run(iterations=12 if name == "whole" else 5)
    my_moves = sys.modules["my_moves"]
    with Run.resume(tmp_path / "parts") as run:
        sampler = run.sampler
        assert sampler.explorer == my_moves.Twice(cd.Bounce(1), 2)
        (reward,) = sampler.target.rewards
        assert reward.function == my_moves.Near(1.0, 2.0)
        t = sampler.ladder.times
        gamma = torch.where(t < 19.9, 4 / (4 + t**2), 0.0)  # less than a hundredth is negligible
        assert torch.equal(reward.weight(t, sampler.ladder), gamma), "annealed in time, not by level"
        run.run(iterations=12)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    written = config(tmp_path / "whole")
    assert written["reward"][0]["anneal"] == {"kind": "my_moves:Blurred", "width": 2.0}
    assert written["sampler"]["explorer"]["move"]["n_steps"] == 1


@pytest.mark.parametrize("name", ["sampler", "ladder"])
def test_defaults_of_an_experiment_are_not_arguments_of_another_kind(name: str, tmp_path: Path) -> None:
    """The built-in experiment has an explorer and a noise range, which `plain` and `ladder` do not take."""
    other = {"sampler": {"kind": "plain"}, "ladder": {"kind": "ladder", "times": [0.1, 1.0, 20.0]}}
    with Run.start(tmp_path / "run", {"experiment": "mixture-tilt", name: other[name]}) as run:
        run.run(iterations=2)
    assert config(tmp_path / "run")[name]["kind"] == other[name]["kind"]
    with Run.start(tmp_path / "same", {"experiment": "mixture-tilt", "sampler": {"n_chains": 3}}) as run:
        assert (run.sampler.n_chains, run.sampler.explorer) == (3, cd.Bounce())


def test_a_strangers_sampler_runs_resumes_and_is_reported(tmp_path: Path) -> None:
    target = mixture().tilt(lambda x: 0.1 * x[:, 0], name="right")

    def go(folder: Path, *stops: int) -> None:
        run = Run(folder, Restarting(target, LADDER, n_chains=3, seed=4, memory=0.25), thin=2, burn_in=4)
        for n in stops:
            run.run(iterations=n)
            for _ in range(2 if n < 11 else 0):  # sampled behind the checkpoint, as by a process that was killed
                run._keep(run.sampler.step())
            run.recorder.flush()
            run.close()
            run = Run.resume(folder, target=target)
        assert type(run.sampler) is Restarting
        assert (run.sampler.memory, run.sampler.seed) == (0.25, 4)
        if len(run.history.entries) == 1:
            run.refine(change={"right": {"scale": 2.0}})
        run.run(iterations=30)
        run.close()

    go(tmp_path / "whole", 11)
    go(tmp_path / "parts", 5, 7, 11)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    data = read_run(tmp_path / "whole")
    assert data.diagnostics is None
    assert data.columns.keys() == {"step"}
    assert data.trace["parity"].tolist() == [n % 2 for n in range(1, 31)]
    assert data.target.tolist() == [0] * 5 + [1] * 10
    again = np.abs(np.diff(data.x[:, :, 0], axis=0))
    assert (again > 0).all()
    assert not [r for r in cd.verdict(data).reasons if "arrivals" in r or "levels" in r]
    page = cd.write_report(data, tmp_path / "report.html").read_text()
    sections = re.findall(r"<h2>([^<]*)</h2>", page)
    assert "Scalars and burn-in" in sections
    assert "Communication" not in sections
    assert "Free energy" not in sections
    from crepe_diffusion.report import write_comparison

    with Run(tmp_path / "exchange", exchange()) as run:
        run.run(iterations=30)
    assert "Comparison" in write_comparison([data, read_run(tmp_path / "exchange")], tmp_path).read_text()


def test_plain_sampling_runs_too(tmp_path: Path) -> None:
    with Run(tmp_path / "run", cd.Plain(mixture(), LADDER, n_chains=4, fit_samples=16)) as run:
        run.run(iterations=6)
        with pytest.raises(cd.InputError, match="has no levels"):
            Run(tmp_path / "adapts", cd.Plain(mixture(), LADDER, fit_samples=16), adapt_at=[3])
    with Run.resume(tmp_path / "run", target=mixture()) as run:
        run.run(iterations=8)
    assert read_run(tmp_path / "run").x.shape == (8, 4, 1)
    with pytest.raises(cd.InputError, match="a sampler that can go on"):
        Run(tmp_path / "other", mixture())


def test_a_folder_of_another_schema_is_refused_by_name(tmp_path: Path) -> None:
    with Run(tmp_path / "run", exchange()) as run:
        run.run(iterations=2)
    information = files.read_json(tmp_path / "run/run.json")
    files.write_json(tmp_path / "run/run.json", {**information, "schema": 1})
    for call in (lambda: read_run(tmp_path / "run"), lambda: Run.resume(tmp_path / "run", target=mixture())):
        with pytest.raises(cd.InputError, match="was written in schema 1; this version reads 3 only"):
            call()
