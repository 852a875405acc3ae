"""From shipped weights to a plan, its pictures, and a way-point that is added later; small enough for every day."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import crepe_diffusion as cd
from studies.mazes import __main__ as command
from studies.mazes.evaluate import ends, judge, passes
from studies.mazes.model import load_maze_model, shipped
from studies.mazes.preset import LangevinFromPool
from studies.mazes.stitch import PAPER, Style, plan_target, segments_for, way_point_term
from studies.mazes.study import CRITERIA, Job, run_all, run_job
from studies.shared.results import Results

MAZE, MODEL = load_maze_model("medium")
TASK = MAZE.tasks[0]
PLAN = Path(command.__file__).parent / "plan.toml"


def small(**changes):
    config = tomllib.loads(PLAN.read_text())
    config["sampler"] |= {"n_chains": 1, "n_particles": 6}
    config["sampler"]["starter"]["n_candidates"] = 512
    config["output"] = {"burn_in": 0}
    config["stop"]["iterations"] = 2
    return {**config, **changes}


def successes(plans: torch.Tensor) -> float:
    return float(judge(MAZE, MAZE.unnormalise(plans), *ends(MAZE, TASK)).success.double().mean())


def test_shipped_weights_plan_and_are_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with cd.Run.start(tmp_path / "run", small()) as run:
        run.run()
    data = cd.read_run(tmp_path / "run")
    assert successes(torch.as_tensor(data.x[:, 0])) > 0.7
    assert float(data.scalars["success"].mean()) == pytest.approx(successes(torch.as_tensor(data.x[:, 0])))
    command.main(["look", str(tmp_path / "run"), "--quiet"])
    from PIL import Image

    with Image.open(tmp_path / "run" / "plans.gif") as movie:
        assert getattr(movie, "n_frames", 1) > 1
    assert "plans.png" in capsys.readouterr().out


def test_without_the_junctions_nothing_hangs_together(tmp_path: Path):
    ends_only = [{"name": name} for name in ("start", "goal")]
    config = small(reward=ends_only)
    config["sampler"]["starter"] = {"kind": "none"}
    with cd.Run.start(tmp_path / "run", config) as run:
        run.run()
    assert successes(torch.as_tensor(cd.read_run(tmp_path / "run").x[:, 0])) == 0


def test_start_and_goal_are_moved_and_a_way_point_is_added_from_a_file(tmp_path: Path):
    """As `crepe-diffusion refine` does it: plans of the next pool take the place of the kept one."""
    start, goal, via = (MAZE.xy(cell) for cell in ((6, 6), (1, 1), (6, 1)))
    with cd.Run.start(tmp_path / "run", small(options={"n_segments": 7})) as run:
        run.run()
        assert not judge(MAZE, MAZE.unnormalise(run.sampler.output()), start, goal).success.any()
        added = (("start", "start", start), ("goal", "goal", goal), ("way-point", "matched", via))
        moved = [
            {
                "name": name,
                "function": {"kind": name, "x": float(point[0]), "y": float(point[1])},
                "anneal": {"kind": anneal},
                "guidance": "gradient",
            }
            for name, anneal, point in added
        ]
        run.refine(add=moved, remove=["start", "goal"])
        run.run(iterations=4)
        plans = MAZE.unnormalise(run.sampler.output())
    assert judge(MAZE, plans, start, goal).success.all()
    assert passes(plans, via).all()


def test_a_way_point_is_passed_soon_after_it_is_added():
    """At the level that is restitched, it is passed at once; swaps then carry it down."""
    style = Style(n_levels=61, n_candidates=1024, between=(0.07, 0.16))
    n = segments_for(MAZE, TASK) + 1
    chain = cd.ReplicaExchange(
        plan_target(MAZE, MODEL, TASK, n, style),
        style.ladder(),
        explorer=cd.stitching.Restitch(1024, 1.0, (0.07, 0.16)),
        proposal=cd.Proposal(clip=style.clip),
        seed=2,
    )
    chain.step()
    point = MAZE.xy((4, 6))

    def passing() -> bool:
        level = int((chain.ladder.levels > 0.16).nonzero()[0]) - 1
        seen = [chain.state.seen.predictions[0][chain.state.row_at(m)] for m in range(level - 3, level + 1)]
        return bool(passes(MAZE.unnormalise(torch.cat(seen)), point, 1.0).any())

    assert not passing()
    term = way_point_term(MAZE, MODEL, n, style, point)
    chain.target = cd.Target(chain.target.factors, (*chain.target.rewards, term))
    for _ in range(3):
        chain.step()
    assert passing()


def test_the_papers_preset_has_the_papers_numbers():
    steps = PAPER.ladder()
    assert (steps.n_levels, steps.substeps) == (601, 1)
    assert (float(steps.times[0]), float(steps.times[-1])) == pytest.approx((0.001, 20.0))
    target = plan_target(MAZE, MODEL, TASK, 5, PAPER)
    weights = {r.name: (r.function.weight, r.function.l1, r.function.l2) for r in target.rewards}
    assert weights == {"start": (500, 10, 1), "goal": (500, 10, 1), "junctions": (100, 10, 1)}
    gamma = target.rewards[0].weight(steps.times[[0, 300, 600]], steps)
    torch.testing.assert_close(gamma, torch.tensor([1.0, 0.55**10, 0.1**10], dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("method", ["crepe", "smc"])
def test_a_job_of_the_study_is_run_once(tmp_path: Path, method: str):
    results = Results(tmp_path)
    job = Job("tiny", 1, 8_000, "medium", style=Style(n_levels=31, n_candidates=256), method=method)
    record = run_job(job, results)
    before = results.path(job.result).stat().st_mtime_ns
    assert run_job(job, results) == json.loads(json.dumps(record))
    assert list(run_all([job], results, n_workers=1)) == [job.result]
    assert results.path(job.result).stat().st_mtime_ns == before
    assert 0.5 * job.rows < record["rows"][-1] < 1.5 * job.rows  # the budget is kept within an iteration

    if method == "crepe":  # every tenth plan is kept, and is as good as was recorded
        verdict = judge(MAZE, torch.from_numpy(results.arrays(job.result)["plans"]).flatten(0, 1), *ends(MAZE, TASK))
        for k, name in enumerate(CRITERIA):
            assert [flags[k][0] for flags in record["flags"][9::10]] == getattr(verdict, name).tolist()
        assert len(record["flags"]) == len(record["rows"]) >= 20
    assert len(run_job(replace(job, name="one", rows=200), results)["rows"]) == 1  # less than one iteration needs
    with pytest.raises(cd.InputError, match=r"measured with the settings .*'rows': 8000.*remove it or choose another"):
        run_job(replace(job, rows=9_000), results)


def test_what_is_asked_for_must_exist(tmp_path: Path):
    with pytest.raises(cd.InputError, match=f"no shipped weights for 'huge'; there are {', '.join(shipped())}"):
        load_maze_model("huge")
    with pytest.raises(cd.InputError, match="task must be between 1 and 5, got 6"):
        cd.Run.start(tmp_path / "run", small(options={"task": 6}))


def test_the_papers_preset_begins_with_a_plan_of_a_pool_and_is_read_back(tmp_path: Path):
    """Bit for bit where restitching begins; then all replicas move."""
    style, pool = replace(PAPER, n_levels=31), cd.stitching.Restitch(64, between=(0.05, 0.2))

    def chain(explorer):
        return cd.ReplicaExchange(plan_target(MAZE, MODEL, TASK, 4, style), style.ladder(), explorer=explorer)

    one, same, other = chain(LangevinFromPool(pool=pool)), chain(pool), chain(cd.Langevin())
    assert torch.equal(one.state.x, same.state.x)
    assert not torch.equal(one.state.x, other.state.x)
    assert bool(one.step().explored.all())

    config = tomllib.loads(PLAN.with_name("preset.toml").read_text())
    config["options"] |= {"maze": "medium", "n_segments": 4, "n_levels": 31}
    config["ladder"]["n_levels"] = 31
    config["sampler"]["explorer"]["pool"] = {"kind": "restitch", "n_candidates": 64, "between": [0.05, 0.2]}
    with cd.Run.start(tmp_path / "run", config) as run:
        run.run(iterations=3)
    command.main(["preset", str(tmp_path / "run"), "--out", str(tmp_path), "--quiet"])
    found, plans = Results(tmp_path)["preset"], torch.as_tensor(cd.read_run(tmp_path / "run").x[:, 0])
    verdict = judge(MAZE, MAZE.unnormalise(plans), *ends(MAZE, TASK))
    assert [(w["first"], w["last"]) for w in found["windows"]] == [(1, 1), (2, 2), (3, 3)]
    for name in ("start", "goal", "walls", "success"):
        assert [w[name] for w in found["windows"]] == getattr(verdict, name).double().tolist()
    assert found["rows"] > 3 * 2 * 4 * 31  # swaps and Langevin moves

    config["sampler"]["accept"] = "studies.mazes.preset:never"
    with cd.Run.start(tmp_path / "alone", config) as run:
        run.run(iterations=3)
    command.main(["preset", str(tmp_path / "alone"), "--out", str(tmp_path), "--quiet"])
    assert [w["acceptance"] for w in Results(tmp_path)["preset alone"]["windows"]] == [0.0] * 3
    assert Results(tmp_path)["preset"] == found
