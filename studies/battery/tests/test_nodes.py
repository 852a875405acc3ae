"""The ratio of uniform tokens on the battery's steep tables: exact enough now, and not with three nodes everywhere."""

from __future__ import annotations

import pytest

from crepe_diffusion.processes import Uniform
from studies.battery.nodes import ThreeEverywhere, errors
from studies.battery.problems import tokens


@pytest.mark.parametrize(("length", "vocab"), [(4, 3), (8, 2)])
def test_steep_tables_need_more_nodes_where_a_step_touches_0(length, vocab):
    problem = tokens("uniform", length, vocab, steepness="steep")
    now, before = (errors(problem, 9, process) for process in (Uniform(vocab), ThreeEverywhere(vocab)))
    assert max(now.largest, abs(now.log_z), now.distance) < 0.001
    assert min(before.largest, abs(before.log_z), before.distance) > 0.01
    assert before.nodes == pytest.approx(24)
    assert now.nodes < 1.1 * before.nodes
