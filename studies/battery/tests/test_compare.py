"""What a method costs: the arithmetic on records that were written by hand, and new methods on a tiny problem."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch

from checks import refuted
from studies.battery import compare
from studies.battery.calibration import chosen
from studies.battery.methods import METHODS, N_PARTICLES
from studies.battery.problems import tokens

PROBLEM = "masked tokens 4x3 mild w=2 w'=2"


def run(method: str, deviation: float, rows: int = 1000, budget: int = 1000) -> dict:
    """A run whose two scalars are off by this many standard deviations, up and down."""
    means = {
        "a": {"value": 0.5 + 0.2 * deviation, "truth": 0.5, "variance": 0.04},
        "b": {"value": 3.0 - 2.0 * deviation, "truth": 3.0, "variance": 4.0},
    }
    return {"problem": PROBLEM, "method": method, "budget": budget, "rows": rows, "means": means}


def test_independent_draws_cost_one():
    walk = chosen(PROBLEM).walk_rows

    def check(deviation: float) -> None:
        (cost,) = compare.costs([run("exact", deviation), run("exact", -deviation)])
        assert cost.value == pytest.approx(1)
        assert cost.effective == pytest.approx(1000 / walk)

    check((walk / 1000) ** 0.5)
    refuted(check, 2 * (walk / 1000) ** 0.5)


def test_a_run_that_broke_off_has_found_nothing():
    broken = {**run(compare.SMC, 0.0), "means": {}, "rows": 0}
    (cost,) = compare.costs([broken, run(compare.SMC, 0.0)])
    assert cost.effective == pytest.approx(2)
    assert not cost.works


def test_signed_errors_are_means_of_each_set_up():
    log_z = {"log_z": {"value": 1.5, "truth": 1.0}}
    runs = [{**run("a", d), "seed": seed, **log_z} for seed, d in ((0, 0.1), (0, 0.3), (1, -0.2), (1, -0.4))]
    text = compare.signed(runs, 1000)
    assert f"| {PROBLEM} | a | 0 | 2 | a | +0.2000 ± 0.1000 | +0.5000 ± 0.0000 |" in text
    assert f"| {PROBLEM} | a | 1 | 2 | a | -0.3000 ± 0.1000 | +0.5000 ± 0.0000 |" in text
    assert PROBLEM not in compare.signed(runs, 2000)


def test_marks_are_judged_against_the_best_of_the_others(tmp_path: Path):
    runs = [run(compare.SMC, d) for d in (0.1, -0.1)] + [run("particle Gibbs", d) for d in (0.13, -0.13)]
    runs += [run("exchange, few chains", d) for d in (0.3, -0.3)] + [run("cd.sample", d) for d in (0.11, -0.11)]
    found = compare.costs(runs)
    text = compare.summary(found)
    assert "| particle Gibbs | the best SMC, where it works | 2 | 1.7 | 1 of 1 | 1 of 1 |" in text
    assert "| exchange, few chains | the best SMC, where it works | 5 | 9 | 0 of 1 | 0 of 1 |" in text
    assert "| cd.sample | the best of the others | 1.5 | 1.2 | 1 of 1 | 1 of 1 |" in text
    assert compare.table(found).count("**") == 2
    compare.figure(found, tmp_path / "compare.png")
    assert (tmp_path / "compare.png").stat().st_size > 5_000


def test_what_chance_does_to_a_ratio():
    """Lognormal errors of one width: log of a ratio is normal with twice their variance."""

    def cost(method: str, value: float, error: float) -> compare.Cost:
        return compare.Cost(PROBLEM, method, 1000, value, error, 100.0)

    one = compare.Comparison(cost("cd.sample", 3.0, 0.75), (cost("SMC", 2.0, 0.5),))

    def check(true: float, mark: float, width: float) -> None:
        share = float((one.by_chance(true, np.random.default_rng(1)) <= mark).mean())
        expected = NormalDist().cdf(math.log(mark / true) / width)
        assert share == pytest.approx(expected, abs=5 * math.sqrt(0.25 / compare.DRAWN))

    width = math.sqrt(2 * math.log1p(0.25**2))
    check(1.0, 1.5, width)
    check(1.4, 1.5, width)
    refuted(check, 1.4, 1.2, width / 2)
    # The best of several is too small, so that the ratio to it is too large.
    many = compare.Comparison(one.own, one.rest * 4)
    assert np.mean(many.by_chance(1.0, np.random.default_rng(1))) > 1.2
    assert np.mean(one.by_chance(1.0, np.random.default_rng(1))) == pytest.approx(math.exp(width**2 / 2), rel=0.05)


def test_costs_are_kept_and_new_ones_replace_the_old(tmp_path: Path):
    runs = [run(compare.SMC, 0.1), run(compare.SMC, -0.1), run("cd.sample", 0.2), run("cd.sample", -0.2)]
    first = compare.kept(tmp_path, compare.costs(runs))
    assert [c.method for c in first] == ["SMC, small pilot", "cd.sample"]
    again = compare.kept(tmp_path, compare.costs([run(compare.SMC, 0.3), run("particle Gibbs", 0.3, budget=500)]))
    assert [(c.method, c.budget) for c in again] == [("particle Gibbs", 500), (compare.SMC, 1000), ("cd.sample", 1000)]
    assert again[1].value == pytest.approx(9 * first[0].value)
    assert again[2] == first[1]


def test_forecasts_stand_beside_what_was_measured():
    walk = chosen(PROBLEM).walk_rows
    ideal = 1000 / walk  # effective draws per 1,000 rows, at a cost of 1
    made = {"SMC": ideal / 2, "particle Gibbs": ideal / 4, "replica exchange": ideal / 8, "chosen": "SMC"}
    deviation = (walk / 1000) ** 0.5
    runs = [run(compare.SMC, 2 * deviation), {**run("cd.sample", deviation), **made}]
    runs += [{**run("cd.sample", deviation), **made, "chosen": "replica exchange"}]
    text = compare.forecasts(compare.costs(runs))
    assert f"| {PROBLEM} | 1,000 | 2 / 4 | 4 / - | 8 / - | SMC, small pilot 1, exchange, few chains 1 |" in text


@pytest.mark.parametrize("method", ["SMC, small pilot", "exchange, few chains", "particle Gibbs", "cd.sample"])
def test_methods_obey_the_budget_with_their_set_up(method):
    problem = tokens("masked", 4, 3)
    one, two = METHODS[method](problem, 2000, 1, 2)
    # Whole batches of SMC: what is left of the budget does not pay for another one.
    unit = N_PARTICLES * problem.walk_rows if method == compare.SMC else 0
    for group in (one, two):
        assert 0 < group.setup < group.rows
        assert 0.85 * 2000 - unit < group.rows < 1.15 * 2000
    assert not torch.equal(one.out.x, two.out.x)
