"""Runs in folders: what they keep, how they go on, what they refuse."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.diagnostics import RunData
from crepe_diffusion.presets import builtin
from crepe_diffusion.run import DamagedError, Run, checkpoint, files, stopping
from crepe_diffusion.run.folder import problems, read_run, status
from crepe_diffusion.run.log import chain_lines
from crepe_diffusion.run.store import Column, Store, read_store
from run_worker import assert_same_run

NAMES = [name.replace("_", "-") for name in builtin.__all__]


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here pulls the plug."""
    monkeypatch.setattr(files, "_sync", lambda path: None)


def small(**tables: Any) -> dict[str, Any]:
    """A configuration that takes milliseconds."""
    config = {
        "experiment": "mixture-tilt",
        "ladder": {"n_levels": 4, "substeps": 1},
        "sampler": {"n_chains": 2, "fit_samples": 16},
        "output": {"burn_in": 0},
        "stop": {"iterations": 10},
    }
    for name, table in tables.items():
        config[name] = {**config.get(name, {}), **table} if isinstance(table, dict) else table
    return config


def mixture(shift: float = 0.0, dtype: torch.dtype = torch.float64) -> cd.models.GaussianMixture:
    return cd.models.GaussianMixture([0.3, 0.7], [[-4.0 + shift], [3.0]], [0.5, 0.4], dtype=dtype)


# -- going on ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_equals_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    config = {"experiment": name, "sampler": {"n_chains": 2, "fit_samples": 16}, "output": {"burn_in": 4}}
    with Run.start(tmp_path / "whole", config) as run:
        assert run.run(iterations=12).finished
    with Run.start(tmp_path / "parts", config) as run:
        run.run(iterations=5)
    with Run.resume(tmp_path / "parts") as run:
        run.run(iterations=6)
    with Run.resume(tmp_path / "parts") as run:
        run.run(iterations=12)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    data = read_run(tmp_path / "whole")
    assert data.n_draws == 12
    assert data.n_burnt == 4
    assert data.diagnostics.n_iterations == 8


def test_a_run_equals_the_sampler_that_it_wraps(tmp_path: Path) -> None:
    ladder = cd.ladder.karras(5, 0.05, 20.0, substeps=2, n_finish=3)
    target = (mixture(dtype=torch.float32) ** 1.5).tilt(lambda x: x[:, 0], guidance="gradient", name="right")
    settings: dict[str, Any] = {"n_chains": 3, "seed": 5, "proposal": cd.Proposal("paper", clip=2.0)}
    chain = cd.ReplicaExchange(target, ladder, explorer=cd.Langevin(0.5), **settings)
    wanted = chain.sample(6, burn_in=4, thin=2)
    sampler = cd.ReplicaExchange(target, ladder, explorer=cd.Langevin(0.5), **settings)
    with Run(tmp_path / "run", sampler, thin=2, burn_in=4) as run:
        assert run.sampler is sampler
        run.run(iterations=7)
    with Run.resume(tmp_path / "run", target=target) as run:
        run.run(iterations=16)
        assert run.sampler.stream == chain.stream
    data = read_run(tmp_path / "run")
    assert data.n_burnt == 2
    assert np.array_equal(data.x[2:], wanted.chains.numpy())
    assert np.array_equal(data.iteration[2:], wanted.iteration.numpy())
    assert np.array_equal(data.columns["born"][2:], wanted.born.numpy())
    assert torch.equal(data.diagnostics.acceptance(), wanted.diagnostics.acceptance())
    assert data.diagnostics.log_z() == wanted.diagnostics.log_z()


def test_draws_carry_their_lineage(tmp_path: Path) -> None:
    with Run.start(tmp_path / "run", small(output={"thin": 3, "trace_every": 2})) as run:
        run.run(iterations=40)
        infos = run.sampler
    data = read_run(tmp_path / "run")
    assert data.iteration.tolist() == list(range(3, 41, 3))
    assert data.trace["iteration"].tolist() == list(range(2, 41, 2))
    assert (data.columns["born"] <= data.iteration[:, None]).all()
    last = infos.state.replica_at()[:, 0].numpy()
    assert (data.trace["level"][-1][np.arange(2), last] == 0).all()
    active = ~np.isnan(data.trace["acceptance"])
    assert (active.sum(0) == [20, 0, 20]).all() or (active.sum(0) == [0, 20, 0]).all()
    assert data.trace["rows"][-1] == data.counts.rows
    assert (np.diff(data.trace["seconds"]) > 0).all()


def test_blocks_are_written_and_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crepe_diffusion.run.store.LONGEST_BLOCK", 16)
    with Run.start(tmp_path / "one", small()) as run:
        run.run(iterations=50)
    with Run.start(tmp_path / "two", small()) as run:
        for n in (15, 16, 17, 32, 50):
            run.run(iterations=n)
    assert_same_run(tmp_path / "two", tmp_path / "one")
    assert len(list((tmp_path / "one/samples.zarr/x").glob("c.*"))) == 4


def test_other_tools_read_the_samples(tmp_path: Path) -> None:
    xarray, zarr = pytest.importorskip("xarray"), pytest.importorskip("zarr")
    with Run.start(tmp_path / "run", small()) as run:
        run.run(iterations=20)
    data = read_run(tmp_path / "run")
    group = zarr.open_group(tmp_path / "run/samples.zarr", mode="r")
    for name, wanted in (("x", data.x), ("iteration", data.iteration), ("scalars/x", data.scalars["x"])):
        assert np.array_equal(group[name][:], wanted)
    assert np.array_equal(group["trace/level"][:], data.trace["level"])
    single = zarr.open_array(tmp_path / "run/samples.zarr/trace/acceptance", mode="r")
    assert np.array_equal(single[:], data.trace["acceptance"], equal_nan=True)
    opened = xarray.open_zarr(tmp_path / "run/samples.zarr")
    assert opened.x.dims == ("draw", "chain", "event_0")
    assert np.array_equal(opened.x.values, data.x)
    assert data.to_xarray().x.dims == ("chain", "draw", "event_0")


# -- changing one's mind -------------------------------------------------------------------------------------------


def test_refinement_is_part_of_the_run(tmp_path: Path) -> None:
    wall = {"name": "wall", "function": {"kind": "near", "centre": 2.0}}
    with Run.start(tmp_path / "run", small(output={"burn_in": 3})) as run:
        run.run(iterations=8)
        run.refine(add=[wall])
        run.run(iterations=14)
        run.refine(remove=["right"], change={"wall": {"scale": 3.0, "function": {"width": 0.5}}})
        run.run(iterations=20)
    data = read_run(tmp_path / "run")
    assert data.target.tolist() == [0] * 8 + [1] * 6 + [2] * 6
    assert [t["from_iteration"] for t in data.targets] == [1, 9, 15]
    assert [[r["name"] for r in t["rewards"]] for t in data.targets] == [["right"], ["right", "wall"], ["wall"]]
    assert data.targets[2]["rewards"][0]["function"] == {"kind": "near", "centre": 2.0, "width": 0.5, "axis": 0}
    assert data.n_burnt == 17
    assert data.diagnostics.n_iterations == 3
    assert "15 new target: wall (scale 3)" in [" ".join(line.split()) for line in chain_lines(tmp_path / "run/log.txt")]


def test_a_refinement_survives_a_crash_before_any_checkpoint(tmp_path: Path) -> None:
    def go(folder: Path, crash: bool) -> None:
        run = Run.start(folder, small())
        run.run(iterations=6)
        run.refine(change={"right": {"scale": 4.0}})
        if crash:
            while run.history.take_up(run.sampler):
                run._target_changed()
            for _ in range(3):
                run._keep(run.sampler.step())
            run.close()
            run = Run.resume(folder)
        run.run(iterations=12)
        run.close()

    go(tmp_path / "whole", False)
    go(tmp_path / "crashed", True)
    assert_same_run(tmp_path / "crashed", tmp_path / "whole")


def test_two_refinements_before_any_iteration(tmp_path: Path) -> None:
    for name in ("whole", "parts"):
        run = Run.start(tmp_path / name, small())
        run.refine(change={"right": {"scale": 4.0}})
        run.refine(change={"right": {"scale": 2.0}})
        if name == "parts":
            run.close()
            run = Run.resume(tmp_path / name)
        run.run(iterations=4)
        run.close()
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    assert read_run(tmp_path / "whole").target.tolist() == [2] * 4


def test_a_refused_refinement_changes_nothing(tmp_path: Path) -> None:
    with Run.start(tmp_path / "a", small()) as run:
        run.run(iterations=5)
        with pytest.raises(cd.InputError, match=r"no reward term 'rigth', did you mean 'right'\?"):
            run.refine(remove=["rigth"])
        with pytest.raises(cd.InputError, match="unknown key 'scal', did you mean 'scale'"):
            run.refine(change={"right": {"scal": 2.0}})
        with pytest.raises(cd.InputError, match="function: unknown key 'center', did you mean 'centre'"):
            run.refine(add=[{"name": "wall", "function": {"kind": "near", "center": 1.0}}])
        with pytest.raises(cd.InputError, match="there is a reward 'right' already"):
            run.refine(add=[{"name": "right", "function": {"kind": "near"}}])
        with pytest.raises(cd.NonFiniteError):
            run.refine(add=[cd.Reward(lambda x: x[:, 0] * math.nan, name="broken")])
        with pytest.raises(cd.InputError, match="nothing to change"):
            run.refine()
        run.run(iterations=10)
    with Run.start(tmp_path / "b", small()) as run:
        run.run(iterations=10)
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_rewards_made_in_python_are_asked_for_again(tmp_path: Path) -> None:
    target, ladder = mixture().tilt(lambda x: x[:, 0], name="right"), cd.ladder.karras(4, 0.05, 20.0)
    wall = cd.Reward(lambda x: -(x[:, 0] ** 2), name="wall")
    with Run(tmp_path / "run", cd.ReplicaExchange(target, ladder, fit_samples=16)) as run:
        run.run(iterations=4)
        run.refine(add=[wall], change={"right": {"scale": 0.5}})
        run.run(iterations=8)
    with pytest.raises(cd.InputError, match="made in Python: resume it there"):
        Run.resume(tmp_path / "run")
    with pytest.raises(cd.InputError, match="function of reward 'wall' was made in Python"):
        Run.resume(tmp_path / "run", target=target)
    with pytest.raises(cd.InputError, match="rewards or the proposal give other values"):
        Run.resume(tmp_path / "run", target=target, rewards=[cd.Reward(lambda x: x[:, 0], name="wall")])
    with Run.resume(tmp_path / "run", target=target, rewards=[wall]) as run:
        run.run(iterations=10)
    assert read_run(tmp_path / "run").target.tolist() == [0] * 4 + [1] * 6


# -- refusing ------------------------------------------------------------------------------------------------------


def test_a_changed_model_is_refused(tmp_path: Path) -> None:
    ladder = cd.ladder.karras(4, 0.05, 20.0)
    with Run(tmp_path / "run", cd.ReplicaExchange(mixture(), ladder, fit_samples=16)) as run:
        run.run(iterations=4)
    with pytest.raises(cd.InputError, match="the model or its process gives other values"):
        Run.resume(tmp_path / "run", target=mixture(0.1))
    notes: list[str] = []
    with Run.resume(tmp_path / "run", target=mixture(0.1), allow_changed=True, notify=notes.append) as run:
        run.run(iterations=6)
    assert "the model or its process gives other values" in notes[0]


def test_a_process_is_kept_or_has_to_be_passed_again(tmp_path: Path) -> None:
    ladder = cd.ladder.karras(4, 0.05, 20.0)
    with Run(
        tmp_path / "run", cd.ReplicaExchange(mixture(), ladder, process=cd.processes.Gaussian(variance=1.0))
    ) as run:
        run.run(iterations=2)
    with Run.resume(tmp_path / "run", target=mixture()) as run:
        assert run.sampler.process == cd.processes.Gaussian(variance=1.0)
    with pytest.raises(cd.InputError, match=r"config\.toml was changed"):
        Run.resume(tmp_path / "run", target=mixture(), process=cd.processes.Gaussian(variance=0.5))
    narrow = cd.processes.Gaussian(variance=1.0, basis=torch.eye(1, dtype=torch.float32))
    with Run(tmp_path / "narrow", cd.ReplicaExchange(mixture(), ladder, process=narrow)) as run:
        run.run(iterations=2)
    with pytest.raises(cd.InputError, match=r"\[sampler\] process was made in Python, Gaussian.*process=\.\.\."):
        Run.resume(tmp_path / "narrow", target=mixture())
    with Run.resume(tmp_path / "narrow", target=mixture(), process=narrow) as run:
        run.run(iterations=4)


def test_a_changed_configuration_is_refused(tmp_path: Path) -> None:
    with Run.start(tmp_path / "run", small()) as run:
        run.run(iterations=4)
    path = tmp_path / "run/config.toml"
    text = path.read_text()
    path.write_text(text.replace("slope = 0.5", "slope = 0.6"))
    with pytest.raises(cd.InputError, match=r"config\.toml was changed"):
        Run.resume(tmp_path / "run")
    path.write_text(text.replace("seed = 0", "sede = 0"))
    with pytest.raises(cd.InputError, match=r"config\.toml: \[sampler\]: unknown key 'sede', did you mean 'seed'"):
        Run.resume(tmp_path / "run")
    notes: list[str] = []
    path.write_text(text.replace("iterations = 4", "iterations = 6"))
    with Run.resume(tmp_path / "run", notify=notes.append) as run:
        assert run.run().reason == "iterations = 6"
    assert "changed only where it may be" in notes[0]


BAD = [
    ({"samplr": {}}, "unknown key 'samplr', did you mean 'sampler'"),
    ({"sampler": {"n_chain": 2}}, r"\[sampler\]: unknown key 'n_chain', did you mean 'n_chains'"),
    ({"sampler": {"n_chains": "two"}}, r"\[sampler\] n_chains must be a whole number, got 'two'"),
    ({"sampler": {"n_chains": 0}}, "n_chains must be a positive integer, got 0"),
    ({"sampler": {"explorer": "bounce"}}, r"\[sampler\] explorer must be a table with kind, got 'bounce'"),
    ({"sampler": {"explorer": {"kind": "bounc"}}}, "explorer: unknown kind 'bounc', did you mean 'bounce'"),
    ({"sampler": {"explorer": {"kind": "bounce", "n_step": 2}}}, "explorer: unknown key 'n_step', did you mean"),
    ({"sampler": {"explorer": {"kind": "bounce", "n_steps": 1.5}}}, "n_steps must be a whole number, got 1.5"),
    ({"sampler": {"explorer": {"kind": "no_such:Move"}}}, "cannot import 'no_such'"),
    ({"sampler": {"kind": "smc", "n_chains": 2}}, "unknown key 'n_chains'"),
    ({"sampler": {"target": 1}}, "'target' is not a key"),
    ({"output": {"burn_in": {"kind": "bounce"}}}, r"\[output\] burn_in must be a whole number, got Bounce"),
    ({"sampler": {"explorer": {"kind": "os:getcwd"}}}, "explorer must be a table with kind, got '/"),
    ({"ladder": {"kind": "cosine"}}, "unknown kind 'cosine'.* known are karras, geometric, linear"),
    ({"ladder": {"sigma_max": -1}}, "sigma_max must be positive"),
    ({"output": {"thin": 0}}, r"\[output\] thin must be at least 1, got 0"),
    ({"output": {"scalars": ["y"]}}, r"\[output\] scalars: no 'y'"),
    ({"stop": {"ess": 10, "ess_scalar": "y"}}, "'y' is not recorded; recorded are x, last mode"),
    ({"options": {"mean": [1.0]}}, r"\[options\]: unknown key 'mean', did you mean 'means'"),
    ({"reward": [{"scale": 2.0}]}, r"\[\[reward\]\]: 'name' must be given"),
    ({"reward": [{"name": "a", "function": {"kind": "nera"}}]}, "unknown kind 'nera', did you mean 'near'"),
    (
        {"reward": [{"name": "a", "function": {"kind": "near"}, "anneal": {"kind": "powr"}}]},
        "anneal: unknown kind 'powr', did you mean 'power'",
    ),
    ({"reward": {"name": "a"}}, "two pairs of brackets"),
    ({"experiment": "mixture-tlit"}, "no experiment 'mixture-tlit', did you mean 'mixture-tilt'"),
    ({"experiment": "no.such:thing"}, "cannot import 'no.such'"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_a_wrong_configuration_says_what_would_be_right(change: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(cd.InputError, match=message):
        Run.start(tmp_path / "run", small(**change))
    with Run.start(tmp_path / "run", small()) as run:  # and nothing is left in the way
        run.run(iterations=1)


def test_the_resolved_configuration_starts_the_same_run(tmp_path: Path) -> None:
    with Run.start(tmp_path / "first", small()) as run:
        run.run()
    with Run.start(tmp_path / "again", tmp_path / "first/config.toml") as run:
        run.run()
    assert_same_run(tmp_path / "again", tmp_path / "first")
    assert (tmp_path / "again/config.toml").read_text() == (tmp_path / "first/config.toml").read_text()


def test_builders_and_rewards_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "my_models_7.py").write_text(
        "import crepe_diffusion as cd\n"
        "from crepe_diffusion.run import Experiment\n"
        "def build(mean: float = 1.0):\n"
        "    p = cd.models.GaussianMixture([1.0], [[mean]], [1.0])\n"
        "    return Experiment(p.as_target(), defaults={'ladder': {'n_levels': 3}, 'sampler': {'fit_samples': 16}})\n"
        "def away(x, point=0.0):\n"
        "    return (x[:, 0] - point).abs()\n"
    )
    (tmp_path / "my.toml").write_text(
        'experiment = "my_models_7:build"\n[options]\nmean = 2\n[stop]\niterations = 3\n'
        '[[reward]]\nname = "away"\nfunction = { kind = "my_models_7:away" }\n'
    )
    with Run.start(tmp_path / "run", tmp_path / "my.toml") as run:
        run.run()
    config = read_run(tmp_path / "run").config
    assert config["ladder"]["n_levels"] == 3
    assert config["reward"][0]["function"] == {"kind": "my_models_7:away", "point": 0.0}
    assert list(read_run(tmp_path / "run").scalars) == ["x[0]"]
    with Run.resume(tmp_path / "run") as run:
        run.run(iterations=5)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with Run.start(tmp_path / "run", small()) as run:
        run.run(iterations=2)
        assert status(tmp_path / "run") == "running"
        with pytest.raises(cd.InputError, match="another process"):
            Run.resume(tmp_path / "run")
    assert status(tmp_path / "run") == "finished"
    with pytest.raises(cd.InputError, match="already holds a run"):
        Run.start(tmp_path / "run", small())
    with pytest.raises(cd.InputError, match="was closed"):
        run.run()


# -- stopping ------------------------------------------------------------------------------------------------------


def test_stop_rules(tmp_path: Path) -> None:
    with Run.start(tmp_path / "run", small(stop={"iterations": 0})) as run:
        assert run.run(evaluations=400).reason == "evaluations = 400"
        rows = run.sampler.evaluate.counts.rows
        assert 400 <= rows < 400 + 40
        assert run.run(seconds=run.seconds + 0.05).reason.startswith("seconds = ")
        outcome = run.run(ess=12.0, ess_scalar="x", iterations=5000)
        assert outcome.reason == "ess = 12"
        assert run.ess() >= 12
        n = run.sampler.iteration
    with Run.resume(tmp_path / "run") as run:
        assert run.run().reason == "ess = 12"
        assert run.sampler.iteration == n


def test_a_constant_scalar_does_not_keep_the_ess_rule_from_firing(tmp_path: Path) -> None:
    scalars = {"x": lambda x: x[:, 0], "flat": lambda x: 0 * x[:, 0]}
    sampler = cd.ReplicaExchange(mixture(), cd.ladder.karras(4, 0.05, 20.0), n_chains=2, fit_samples=16)
    with Run(tmp_path / "run", sampler, scalars=scalars) as run:
        assert run.run(ess=12.0, iterations=5000).reason == "ess = 12"
        assert 12 <= run.ess() == run.ess_rule.seen
    last = [line for line in chain_lines(tmp_path / "run/log.txt") if "effective sample size" in line][-1]
    assert last.endswith(f"effective sample size {run.ess_rule.seen:.1f}, without flat: constant so far")


@pytest.mark.parametrize("chosen", [None, "flat"])
def test_an_ess_rule_that_cannot_be_met_says_so(
    chosen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "MOST_CONSTANT_DRAWS", 50)
    scalars = {"flat": lambda x: 0 * x[:, 0], "odd": lambda x: x[:, 0] if chosen else 0 * x[:, 0] + 1}
    sampler = cd.ReplicaExchange(mixture(), cd.ladder.karras(4, 0.05, 20.0), fit_samples=16)
    with Run(tmp_path / "run", sampler, scalars=scalars) as run:
        # Another rule will end it: a line in the log is enough.
        assert run.run(ess=12.0, ess_scalar=chosen, iterations=60).reason == "iterations = 60"
        assert "the rule ess = 12 cannot be met: constant in all of 51 draws" in (tmp_path / "run/log.txt").read_text()
        with pytest.raises(cd.InputError, match=r"cannot be met: constant in all of \d+ draws are flat"):
            run.run(ess=12.0, ess_scalar=chosen)
        n = run.sampler.iteration
        assert run.run(iterations=n + 2).finished
    assert read_run(tmp_path / "run").n_draws == n + 2


def test_progress_is_shown(tmp_path: Path) -> None:
    seen = []
    with Run.start(tmp_path / "run", small()) as run:
        run.run(iterations=30, progress=seen.append)
    assert seen[-1].iteration == 30
    assert seen[-1].share == 1.0
    assert seen[-1].seconds_left == 0.0
    assert 0 < seen[-1].acceptance <= 1
    assert seen[-1].ess > 0


def test_a_failing_reward_keeps_what_was_sampled(tmp_path: Path) -> None:
    calls = 0

    def reward(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x[:, 0] * (math.nan if calls > 40 else 1.0)

    target, ladder = mixture().tilt(reward), cd.ladder.karras(4, 0.05, 20.0)
    with Run(tmp_path / "run", cd.ReplicaExchange(target, ladder, fit_samples=16)) as run:
        with pytest.raises(cd.NonFiniteError):
            run.run(iterations=500)
        n = run.sampler.iteration
    assert read_run(tmp_path / "run").n_draws == n
    assert "failed after iteration" in (tmp_path / "run/log.txt").read_text()
    calls = -(10**9)
    with Run.resume(tmp_path / "run", target=target) as run:
        run.run(iterations=n + 3)
    assert read_run(tmp_path / "run").iteration.tolist() == list(range(1, n + 4))


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("whole", "full"):
        with Run.start(tmp_path / name, small()) as run:
            run.run(iterations=4)
            if name == "full":
                with monkeypatch.context() as patch:
                    patch.setattr("crepe_diffusion.run.store.publish_all", full)
                    with pytest.raises(OSError, match="No space"):
                        run.run(iterations=7)
            else:
                run.run(iterations=9)
    with Run.resume(tmp_path / "full") as run:
        assert run.sampler.iteration == 4
        run.run(iterations=9)
    assert_same_run(tmp_path / "full", tmp_path / "whole")


@pytest.mark.parametrize(("wanted", "most"), [(0.001, 1), (0.0, 10**6)], ids=["now and then", "always"])
def test_on_a_slow_disk_readers_wait_and_not_the_chain(wanted: float, most: int, tmp_path: Path) -> None:
    """A flush of 20 ms may come every 2 s; at every iteration if that was asked for."""
    n_flushes = 0
    with Run.start(tmp_path / "run", small(output={"flush_seconds": wanted})) as run:
        flush = run.recorder.store.flush

        def slow(*, arrays: bool = True) -> None:
            nonlocal n_flushes
            n_flushes += not arrays  # the last one belongs to the checkpoint
            time.sleep(0.02)
            flush(arrays=arrays)

        run.recorder.store.flush = slow  # type: ignore[method-assign]
        run.run(iterations=8)
    assert n_flushes == min(8, most)


@pytest.mark.parametrize("shape", [(1, 2), (3, 5), (4, 21), (16, 3)])
def test_the_trace_does_not_depend_on_how_many_rows_are_made_at_once(shape: tuple[int, int]) -> None:
    """After a crash rows are written again, in other company."""
    stream, infos = cd.Stream(1), []
    ladder = cd.ladder.karras(shape[1], 0.05, 20.0)
    sampler = cd.ReplicaExchange(mixture(), ladder, n_chains=shape[0], fit_samples=16, explorer=cd.Bounce())
    info = sampler.step()
    for n in range(1, 101):
        work = 30 * stream.at(n).normal(shape)
        work[:, 0] = [math.nan, -math.inf, math.inf, 0.0][n % 4]
        swaps = replace(info.swaps, log_work=work, active=torch.arange(1, shape[1]) % 2 == n % 2)
        level = torch.arange(shape[1]).expand(shape).roll(n, 1)
        explored = stream.at(n, 1).uniform(shape) < 0.3
        infos.append(replace(info, iteration=n, rows=10 * n, swaps=swaps, level=level, explored=explored))
    whole = sampler.trace_rows(infos)
    assert whole.keys() == sampler.trace_columns.keys() == {"acceptance", "level", "explored"}
    for size in (1, 7, 64):
        parts = [sampler.trace_rows(infos[i : i + size]) for i in range(0, 100, size)]
        for name, values in whole.items():
            assert np.concatenate([part[name] for part in parts]).tobytes() == values.tobytes(), name
    assert np.array_equal(np.isnan(whole["acceptance"]), ~np.stack([i.swaps.active for i in infos]))


def test_rows_given_together_are_spread_over_blocks(tmp_path: Path) -> None:
    wide = np.arange(50.0)[:, None] + np.arange(8192) / 8192
    store = Store(tmp_path, {"x": Column("float64")}, {"wide": Column("float64", (8192,), ("i",))})
    store.create()
    assert store.trace.block == 16
    for first, last in ((0, 7), (7, 16), (16, 49), (49, 50)):
        store.trace.extend({"wide": wide[first:last]})
    store.flush()
    assert np.array_equal(read_store(tmp_path)[1]["wide"], wide)


# -- checkpoints ---------------------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path) -> None:
    config = small(output={"checkpoint_iterations": 5})
    for name in ("whole", "hurt"):
        with Run.start(tmp_path / name, config) as run:
            run.run(iterations=17)
    newest = tmp_path / "hurt/checkpoints/00000017/state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    assert any(str(newest) in str(p) for p in problems(tmp_path / "hurt"))
    data = read_run(tmp_path / "hurt")  # the samples are whole; the state is not needed for a report
    assert data.n_draws == 17
    notes: list[str] = []
    for name in ("whole", "hurt"):
        with Run.resume(tmp_path / name, notify=notes.append) as run:
            assert run.sampler.iteration == (17 if name == "whole" else 15)
            run.run(iterations=20)
    assert len(notes) == 1
    assert str(newest) in notes[0]
    aside = tmp_path / "hurt/checkpoints/damaged-00000017"
    assert aside.is_dir()
    assert [p.path for p in problems(tmp_path / "hurt")] == [aside]
    files.shutil.rmtree(aside)
    assert_same_run(tmp_path / "hurt", tmp_path / "whole")
    for path in (tmp_path / "hurt/checkpoints").iterdir():
        (path / "state.json").write_text("{}")
    with pytest.raises(DamagedError, match="holds no checkpoint that is whole"):
        Run.resume(tmp_path / "hurt")


def test_the_history_is_also_in_the_checkpoint(tmp_path: Path) -> None:
    for name in ("whole", "hurt"):
        with Run.start(tmp_path / name, small()) as run:
            run.run(iterations=4)
            run.refine(change={"right": {"scale": 2.0}})
            run.run(iterations=8)
    path = tmp_path / "hurt/targets.json"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DamagedError, match=str(path)):
        read_run(tmp_path / "hurt")
    notes: list[str] = []
    for name in ("whole", "hurt"):
        with Run.resume(tmp_path / name, notify=notes.append) as run:
            run.run(iterations=10)
    assert_same_run(tmp_path / "hurt", tmp_path / "whole")
    assert str(path) in notes[0]


def test_two_checkpoints_are_kept(tmp_path: Path) -> None:
    with Run.start(tmp_path / "run", small(output={"checkpoint_iterations": 2})) as run:
        run.run(iterations=9)
    assert sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir()) == ["00000008", "00000009"]
    position, tensors = checkpoint.load(tmp_path / "run/checkpoints/00000009")
    assert position.n_draws == 9
    assert tensors["x"].shape == (8, 1)


def test_a_snapshot_of_another_chain_is_refused() -> None:
    ladder = cd.ladder.karras(4, 0.05, 20.0)
    start = cd.ReplicaExchange(mixture(), ladder, n_chains=2, fit_samples=16).snapshot()
    with pytest.raises(cd.InputError, match="holds 2 chains of 1 models"):
        cd.ReplicaExchange(mixture(), ladder, n_chains=3, start=start)


def test_data_of_a_chain_in_memory() -> None:
    chain = cd.ReplicaExchange(mixture(), cd.ladder.karras(4, 0.05, 20.0), n_chains=2, fit_samples=16)
    samples = chain.sample(12, burn_in=3)
    data = RunData.of(samples, chain, {"x": lambda x: x[:, 0]}, name="memory")
    assert np.array_equal(data.scalars["x"], samples.chains[..., 0].numpy())
    assert data.diagnostics.n_iterations == 12
    assert data.n_chains == 2
