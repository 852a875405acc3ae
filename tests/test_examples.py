"""Every file in `examples/` runs, and does what it is an example of; every TOML file there runs and resumes."""

from __future__ import annotations

import ast
import math
import re
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import my_moves
import pytest
import torch
from full_covariance import AXES, RHO, TIMES, Full, processes, rotated, worst_error
from mala import Mala, RandomBounce, variance_error
from my_sampler import Independence, left_share
from smc_weight import Cautious, Killing

import crepe_diffusion as cd
from checks import assert_mean, refuted
from crepe_diffusion.processes import Coefficients, Evaluation, FisherTable, Gaussian
from crepe_diffusion.run import Run, files
from crepe_diffusion.samplers.information import fit_information
from run_worker import assert_same_run

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
TABLES = sorted(FOLDER.glob("*.toml"))


def full_covariance() -> None:
    """Exact for Gaussian data of any covariance at any step size; the diagonal of the same matrix is not."""

    def exact(process, step):
        assert worst_error(process, *step) <= 1e-9

    for step in ((0.1, 0.5), (0.5, 1.0), (0.1, 5.0)):
        exact(processes()["full"], step)
        refuted(exact, processes()["diagonal"], step)


def mala() -> None:
    """The variance of Gaussian data stays right at a step at which plain Langevin doubles it."""

    def right(explorer):
        assert abs(variance_error(explorer)) < 0.02  # four standard errors

    right(Mala(0.5))
    right(RandomBounce(2))
    refuted(right, cd.Langevin(5.0))


def my_sampler() -> None:
    """Shares of the modes of a tilted mixture are right with the acceptance test, and not without it."""
    truth = 0.3 * math.exp(1 + 0.25 / 32) / (0.3 * math.exp(1 + 0.25 / 32) + 0.7 * math.exp(-0.75 + 0.16 / 32))
    assert_mean(left_share(40), truth)
    refuted(assert_mean, left_share(40, accept=lambda log_alpha, stream: log_alpha > -math.inf), truth)


PROPERTIES: dict[str, Callable[[], None]] = {"full_covariance": full_covariance, "mala": mala, "my_sampler": my_sampler}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_runs(path, capsys):
    names = runpy.run_path(str(path), run_name=path.stem)
    if "main" in names:
        names["main"](4)  # few draws: what it prints is another test's business
        assert capsys.readouterr().out
    else:
        assert path.with_suffix(".toml") in TABLES


def named_explorer(sampler):
    assert sampler.explorer == Mala(0.2)


def named_variance(sampler):
    information = sampler.evaluate.process.information
    assert type(information) is Full
    assert information.values.shape[-2:] == (2, 2), "measured, as a matrix"


def named_network(sampler):
    assert len(sampler.target.models) == 2
    before = sampler.evaluate.counts.copy()
    sampler.step()
    assert sampler.evaluate.counts.calls - before.calls == sampler.ladder.substeps, "one call for both models"


def named_reward(sampler):
    (reward,) = sampler.target.rewards
    assert (reward.function, reward.anneal) == (my_moves.Near(1.0, 2.0), my_moves.Blurred(2.0))


def named_sampler(sampler):
    assert type(sampler) is Independence
    assert isinstance(sampler, cd.Continuing)
    assert sampler.n_chains == 8


def named_weight(sampler):
    assert (sampler.weight, sampler.resampling) == (Cautious(0.3), Killing())


def named_whole(sampler):
    """Alone; what several processes make of it is in test_run_groups.py."""
    assert sampler.target.models[0].event_shape == (8,)
    assert sampler.target.rewards[0].guidance == "gradient"


NAMED = {
    "adapter": named_network,
    "full_covariance": named_variance,
    "mala": named_explorer,
    "my_moves": named_reward,
    "my_sampler": named_sampler,
    "smc_weight": named_weight,
    "split_network": named_whole,
}


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_file_runs_what_it_names_and_goes_on_bit_for_bit(path, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_sync", lambda path: None)
    for name, n in (("whole", 8), ("parts", 3)):
        with Run.start(tmp_path / name, path) as run:
            run.run(iterations=n)
    with Run.resume(tmp_path / "parts") as run:
        run.run(iterations=8)
        sampler = run.sampler
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    NAMED[path.stem](sampler)


HEAVY = ("mala", "my_sampler")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in HEAVY else n for n in PROPERTIES])
def test_an_example_keeps_its_promise(name):
    PROPERTIES[name]()


def test_the_guide_states_how_long_each_example_is():
    """The table of docs/extending.md: `[`Name`](../examples/file.py) | lines |`."""
    text = (FOLDER.parent / "docs" / "extending.md").read_text()
    rows = re.findall(r"\[`(\w+)`\]\(\.\./examples/(\w+\.py)\) \| (\d+) \|", text)
    assert {file for _, file, _ in rows} == {path.name for path in EXAMPLES}
    for name, file, stated in rows:
        body = ast.parse((FOLDER / file).read_text()).body
        (found,) = (n for n in body if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name == name)
        first = min([found.lineno, *(d.lineno for d in found.decorator_list)])
        assert found.end_lineno - first + 1 == int(stated), f"{name} of {file}"


def both(pieces: int = 1) -> tuple[Gaussian, Gaussian]:
    """Two models in common axes: as full matrices, and as diagonals for a process that was given the axes."""
    t2 = TIMES[:, None] ** 2
    shares = torch.stack([t2 / (t2 + RHO**2), t2 / (t2 + RHO.flip(0) ** 2 + 0.1)])
    mean = cd.Stream(5).normal((2, 3))
    full = Full(TIMES, (AXES * shares[:, :, None]) @ AXES.T, mean @ AXES.T)
    table = FisherTable(TIMES, shares, mean)
    matrix = Gaussian(variance=Full, information=full)
    diagonal = Gaussian(variance="fisher-diagonal", information=table, basis=AXES.T.contiguous())
    return (matrix, diagonal) if pieces == 1 else (matrix.repeated(pieces), diagonal.repeated(pieces))


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_full_matrix_is_a_diagonal_in_its_own_axes(pieces):
    """All that a process derives from its information agrees: two models, mixed times, events of one or two pieces."""
    law, n, event = Coefficients((-0.4, 1.7), (-0.1, 1.2), 0.15, 0.8), 12, (pieces, 3)
    s, t = torch.tensor([0.1, 0.3]).double().repeat(6), torch.tensor([0.5, 2.0, 5.0]).double().repeat_interleave(4)
    draw = lambda *names: cd.Stream(7).at(*names).normal((n, *event))  # noqa: E731
    at_s, at_t = (Evaluation((draw(e, "p"), draw(e, "q")), draw(e, "drift"), torch.zeros(n)) for e in "st")

    def agree(full, diagonal):
        def derived(process):
            models, proposal = process.log_ratios(draw("x"), draw("y"), at_s, at_t, s, t, law)
            _, mean = process._top(t[-1:], law)
            pulled = process.pull_back(draw("g"), t, law)
            return models, proposal, pulled, process.posterior_variance(t, event), process.embed(mean, draw("x")[:1])

        for a, b in zip(derived(full), derived(diagonal), strict=True):
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)

    agree(*both(pieces))
    full, diagonal = both(pieces)
    refuted(agree, full, replace(diagonal, basis=None))


def test_noise_of_a_full_matrix_has_that_covariance():
    full, _ = both()
    law, n = Coefficients((1.0, 1.0), (1.0, 1.0), 0.25, 0.75), 40_000
    x = full.noise(cd.Stream(2), torch.zeros(n, 3, dtype=torch.float64), 0.1, law)
    precision = full.information.values[:, 0].sum(0) / 0.1**2

    def check(covariance):
        z = (x - x.mean(0)) @ torch.linalg.cholesky(torch.linalg.inv(covariance))
        assert (z.T @ z / n - torch.eye(3)).abs().max() < 5 * (2 / n) ** 0.5

    check(torch.linalg.inv(precision))
    refuted(check, torch.linalg.inv(precision).diagonal().diag())


def test_a_full_matrix_is_measured_from_samples_and_from_data():
    n, model, process = 10_000, rotated((1.0,), torch.zeros(1, 3)), Gaussian(variance=Full)
    ladder = cd.ladder.geometric(20, 0.02, 100.0)
    data = cd.Stream(1).normal((n, 3)) * RHO @ AXES.T
    fitted = fit_information(model.as_target(), ladder, process, n, cd.Stream(0))
    measured = cd.information_from_data(model, data, ladder.times, process, cd.Stream(2))

    def check(values, rho):
        t2 = ladder.times[:, None] ** 2
        exact = (AXES * (t2 / (t2 + rho**2))[:, None]) @ AXES.T
        assert (values[0] - exact).abs().max() < 5 * (2 / n) ** 0.5

    for information in (fitted, measured):
        check(information.values, RHO)
        refuted(check, information.values, RHO.flip(0))
