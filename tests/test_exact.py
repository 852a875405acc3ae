"""The law, exactly: enumerate one shipped iteration and check that it leaves the target invariant.

max |pi P - pi| <= 1e-12        for each parity, explorer, task and process, with a proposal that matches none
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import crepe_diffusion as cd
from enumeration import violation
from finite import TASKS, Toy, line, tokens

TOLERANCE = 1e-12


def name(explorer: object) -> str:
    return type(explorer).__name__


def worst(toy: Toy) -> float:
    """Over both parities."""
    return max(violation(toy.chain, toy.states, toy.log_pi, n) for n in (1, 2))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("explorer", [None, cd.Bounce(), cd.SingleToken()], ids=name)
@pytest.mark.parametrize("kind", ["masked", "uniform"])
def test_tokens(kind, task, explorer):
    vocab = 2 if kind == "uniform" and explorer is not None else 3
    assert worst(tokens(kind, task, vocab=vocab, explorer=explorer)) <= TOLERANCE


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("explorer", [None, cd.Bounce()], ids=name)
def test_line_with_gaussian_kernels(task, explorer):
    assert worst(line(task, n_levels=3 if explorer is None else 2, explorer=explorer)) <= TOLERANCE


@pytest.mark.parametrize("task", TASKS)
def test_substeps(task):
    assert worst(tokens("masked", task, substeps=3)) <= TOLERANCE
    assert worst(tokens("uniform", task, vocab=2, substeps=2, n_levels=2)) <= TOLERANCE
    assert worst(line(task, substeps=2, n_levels=2)) <= TOLERANCE


def test_bounce_on_three_points_and_levels():
    assert violation(*vars(line("everything", explorer=cd.Bounce())).values(), n=1) <= TOLERANCE


@pytest.mark.parametrize("n_levels", [2, 4, 5])
def test_other_ladders(n_levels):
    assert worst(tokens("masked", "everything", vocab=2, n_levels=n_levels)) <= TOLERANCE


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("explorer", [None, cd.SingleToken()], ids=name)
def test_independent_positions(task, explorer):
    assert worst(tokens("masked", task, vocab=2, length=2, explorer=explorer)) <= TOLERANCE


def test_several_moves_in_a_row():
    assert worst(tokens("masked", "everything", vocab=2, explorer=cd.SingleToken(n_moves=2))) <= TOLERANCE


def test_prompt_stays():
    toy = tokens("masked", "everything", length=2, vocab=2, prompt=torch.tensor([-1, 1]), explorer=cd.SingleToken())
    assert worst(toy) <= TOLERANCE
    assert len(toy.states) == 3


@pytest.mark.parametrize("task", TASKS)
def test_dependent_positions_with_exact_densities(task):
    """Two dependent tokens that move at once: the factorised ratio is approximate, the exact density is not."""
    assert worst(tokens("masked", task, vocab=2, length=2, oracle=True)) <= TOLERANCE


def test_dependent_positions_are_approximate_without_them():
    """A broken twin: the same table through the factorised kernels must be seen to be off."""
    toy = tokens("masked", "tempering", vocab=2, length=2, oracle=True)
    toy.chain.evaluate.process = replace(toy.chain.evaluate.process, log_probs=None)
    assert worst(toy) > 1e-4


def test_metropolis_is_exact_for_dependent_positions():
    """Density ratios of single tokens are exact for any table, so exploration alone is invariant."""
    toy = tokens("masked", "everything", vocab=2, length=2, oracle=True, explorer=cd.SingleToken())
    toy.chain.accept = lambda log_alpha, stream: torch.zeros_like(log_alpha, dtype=torch.bool)
    assert violation(toy.chain, toy.states, toy.log_pi, n=2) <= TOLERANCE
