"""The whole way from shipped weights to a plan, pictures of it and a change of mind, small enough for every day."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import torch

import crepe_diffusion as cd
from studies.mazes import __main__ as command
from studies.mazes.evaluate import ends, judge, passes
from studies.mazes.model import load, shipped
from studies.mazes.page import write_page
from studies.mazes.refinement import Refinement, refine
from studies.mazes.stitch import PAPER, Style, plan_target, segments_for, way_point_term
from studies.mazes.study import Job, run_job

MAZE, MODEL = load("medium")
TASK = MAZE.tasks[0]


def small(**changes):
    config = tomllib.loads(Path("studies/mazes/plan.toml").read_text())
    config["sampler"] |= {"restitch_candidates": 512, "n_chains": 1}
    config["output"]["burn_in"] = 0
    config["stop"]["iterations"] = 12
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
    ends_only = [{"name": name, "kind": "python"} for name in ("start", "goal")]
    config = small(reward=ends_only)
    config["sampler"]["explorer"] = "none"
    with cd.Run.start(tmp_path / "run", config) as run:
        run.run()
    assert successes(torch.as_tensor(cd.read_run(tmp_path / "run").x[:, 0])) == 0


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
    style = Style(n_levels=31, n_candidates=256 if method == "crepe" else 0)
    job = Job("tiny", 1, 8_000, "medium", style=style, method=method)
    path = run_job(job, tmp_path)
    before = path.stat().st_mtime_ns
    assert run_job(job, tmp_path).stat().st_mtime_ns == before
    record = json.loads(path.read_text())
    assert 0.5 * job.rows < record["rows"][-1] < 1.5 * job.rows  # the budget is kept within an iteration
    assert len(record["flags"]) == len(record["rows"])


def test_what_is_asked_for_must_exist(tmp_path: Path):
    with pytest.raises(cd.InputError, match=f"no shipped weights for 'huge'; there are {', '.join(shipped())}"):
        load("huge")
    with pytest.raises(cd.InputError, match="task must be between 1 and 5, got 6"):
        cd.Run.start(tmp_path / "run", small(options={"task": 6}))


def test_the_page_is_written_from_whatever_results_there_are(tmp_path: Path):
    """Also where there are no data to compare the model with, as in a fresh clone."""
    results, docs = tmp_path / "results", tmp_path / "docs"
    command.main(["quality", "--data", str(tmp_path / "none"), "--out", str(results), "--quiet"])
    job = Job("CREPE, ours", 1, 12_000, "medium", style=Style(n_levels=31, n_candidates=512))
    record = json.loads(run_job(job, results).read_text())
    text = write_page(results, docs, "make mazes").read_text()
    late = [flags[-1][0] for flags in record["flags"][len(record["flags"]) // 2 :]]
    assert f"| {100 * sum(late) / len(late):.0f} % |" in text
    assert "The model alone" not in text
    assert (docs / "figures" / "maze-plans.png").exists()


def test_a_way_point_on_the_fly_is_on_the_page(tmp_path: Path):
    case = Refinement(task=1, cell=(4, 6), n_before=10, n_after=5, n_chains=1, weights="medium")
    lines = list(refine(case, tmp_path, Style(n_levels=31, n_candidates=256)))
    assert [line["iteration"] for line in lines] == list(range(1, 16))
    share = 100 * lines[9]["success"][0]
    assert (
        f"| 10 to 10, before | {100 * lines[9]['passes'][0]:.0f} % | {share:.0f} % |"
        in write_page(tmp_path, tmp_path, "make mazes").read_text()
    )
