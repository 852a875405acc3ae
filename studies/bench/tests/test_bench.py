"""Times are split as stated, rows are counted exactly, and the store costs little."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import crepe_diffusion as cd
from studies.bench.__main__ import HERE, TITLES
from studies.bench.bench import build, cases, measure, store_cost
from studies.bench.processes import gain
from studies.bench.timing import Watch, rows_cost, watching
from studies.shared.pages import fill


@pytest.mark.parametrize("case", cases(quick=True), ids=lambda c: c.name)
def test_an_iteration_is_split_into_network_random_numbers_and_rest(case) -> None:  # type: ignore[no-untyped-def]
    timing = measure(replace(case, n_levels=6, n_iterations=2), n_warm_up=1)
    assert 0 < timing.network < timing.seconds
    assert 0 < timing.random < timing.seconds - timing.network


def test_rows_that_do_not_fit_the_formula_are_an_error() -> None:
    case = replace(cases(quick=True)[-1], n_levels=6)
    chain, _ = build(case)
    rows = case.n_levels * case.substeps * case.n_chains
    with rows_cost(chain.evaluate.counts, rows, case.name):
        chain.step()
    wrong = rows_cost(chain.evaluate.counts, rows + 1, case.name)
    with pytest.raises(AssertionError, match=f"2x64, no reward: {rows} network rows, expected {rows + 1}"), wrong:
        chain.step()


def test_watched_methods_are_put_back() -> None:
    class Clock:
        def tick(self) -> int:
            return 3

    clock, before = Clock(), cd.Stream.normal
    with watching((cd.Stream, "normal"), (clock, "tick")) as watch:
        assert clock.tick() == 3
    assert watch.calls == 1
    assert cd.Stream.normal is before
    assert vars(clock) == {}


def test_a_watch_adds_up_the_time_of_blocks_that_fail() -> None:
    watch = Watch()
    for _ in range(2):
        with pytest.raises(KeyError), watch.running():
            raise KeyError
    assert watch.calls == 2
    assert watch.seconds > 0


def test_every_part_has_its_place_in_the_page(tmp_path: Path) -> None:
    page = Path(shutil.copy(HERE / "README.md", tmp_path))
    fill(page, dict.fromkeys(TITLES, "new"))
    assert page.read_text().count("-->\nnew\n<!-- end -->") == len(TITLES)


@pytest.mark.slow
def test_the_store_costs_little(tmp_path: Path) -> None:
    cost = store_cost(tmp_path / "run")
    print(cost)
    assert cost.share < 0.02


@pytest.mark.slow
def test_two_processes_share_the_work_of_a_large_network() -> None:
    large = replace(cases(quick=True)[0], n_levels=36, n_iterations=4)
    found = gain(large)
    assert found.work_ratio > 1.3
