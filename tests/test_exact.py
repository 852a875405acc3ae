"""The law, exactly: enumerate one shipped iteration and check that it leaves the target invariant.

max |pi P - pi| <= 1e-12        for each parity, explorer, task and process, with a proposal that matches none
"""

from __future__ import annotations

import pytest
import torch

import crepe_diffusion as cd
from crepe_diffusion.processes import Counted, Evaluation, Masked
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


PAIR = {"vocab": 2, "length": 2, "dependent": True}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("at_once", [None, 1, 2])
def test_dependent_positions_with_exact_densities(task, at_once):
    """Two dependent tokens: whatever the kernels, exact densities leave the target invariant."""
    assert worst(tokens("masked", task, **PAIR, oracle=True, at_once=at_once)) <= TOLERANCE


@pytest.mark.parametrize("at_once", [None, 2])
def test_dependent_positions_are_approximate_where_they_change_together(at_once):
    """A broken twin of the next test: both tokens at once, multiplied as if they were independent."""
    assert worst(tokens("masked", "tempering", **PAIR, at_once=at_once)) > 1e-4


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("explorer", [None, cd.Bounce(), cd.SingleToken()], ids=name)
def test_dependent_positions_are_exact_one_by_one(task, explorer):
    n_levels = 3 if explorer is None else 2
    assert worst(tokens("masked", task, **PAIR, n_levels=n_levels, explorer=explorer, at_once=1)) <= TOLERANCE


def test_three_dependent_positions_and_a_prompt():
    toy = tokens("masked", "everything", vocab=2, length=3, dependent=True, n_levels=2, at_once=1)
    assert worst(toy) <= TOLERANCE
    assert worst(tokens("masked", "everything", vocab=2, length=3, dependent=True, n_levels=2, at_once=2)) > 1e-4
    prompt = torch.tensor([-1, 1, -1])
    toy = tokens("masked", "everything", vocab=2, length=3, dependent=True, n_levels=3, at_once=1, prompt=prompt)
    assert worst(toy) <= TOLERANCE


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("explorer", [None, cd.Bounce()], ids=name)
def test_counted_masks_are_exact_one_by_one(task, explorer):
    n_levels = 3 if explorer is None else 2
    assert worst(tokens("masked", task, **PAIR, n_levels=n_levels, explorer=explorer, at_once=1, counted=True)) <= 1e-12


def test_counted_masks_with_a_prompt_and_unequal_steps():
    """Three positions and two levels below the noise end: one step changes one position, the other two."""
    options = {"vocab": 2, "length": 3, "dependent": True, "at_once": 1, "counted": True}
    assert worst(tokens("masked", "everything", n_levels=3, **options)) <= TOLERANCE
    assert worst(tokens("masked", "everything", n_levels=3, prompt=torch.tensor([-1, 1, -1]), **options)) <= TOLERANCE


class LastMasked(Counted):
    """A broken twin: up, the last positions are masked; down, any of the masked ones is revealed."""

    def ranks(self, x, may, s, t, up, stream):
        rank = super().ranks(x, may, s, t, up, stream)
        n = (rank > 0).sum(1, keepdim=True)
        last = may.flip(1).cumsum(1).flip(1) * may
        return torch.where(up[:, None], last.where(last <= n, 0), rank)


def test_counted_masks_at_places_that_are_not_random_are_seen():
    toy = tokens("masked", "everything", **PAIR, at_once=1, counted=True)
    toy.chain.evaluate.process = LastMasked(2, at_once=1)
    assert worst(toy) > 1e-4


@pytest.mark.parametrize("substeps", [2, 3])
def test_substeps_make_no_difference_one_by_one(substeps):
    toy = tokens("masked", "everything", **PAIR, n_levels=2, substeps=substeps, explorer=cd.Bounce(2), at_once=1)
    assert worst(toy) <= TOLERANCE


@pytest.mark.parametrize("task", TASKS)
def test_dependent_positions_of_the_uniform_process(task):
    """Exact up to the quadrature over time, whose error falls geometrically with its nodes."""
    errors = [worst(tokens("uniform", task, **PAIR, n_levels=2, at_once=1, nodes=n)) for n in (2, 6, 20)]
    assert errors[2] <= TOLERANCE < errors[1] < errors[0] / 10
    assert worst(tokens("uniform", task, **PAIR, n_levels=2, at_once=None)) > 2 * errors[1]


class InTheirOrder(Masked):
    """A broken twin: down, positions are revealed from left to right; up, they are masked in random order."""

    def turns(self, x, s, t, up, stream):
        random = super().turns(x, s, t, up, stream)
        return torch.where(up[:, None], random, (random > 0).cumsum(1) * (random > 0))


class ReadTooEarly(Masked):
    """A broken twin: on the way up, the conditional of a token is read at the state that still has it."""

    def log_conditionals(self, seen, x, positions, chosen):
        earlier = self.__dict__.pop("earlier", None)
        if earlier is None:
            copies = tuple(p.clone() for p in seen.predictions)
            self.__dict__["earlier"] = Evaluation(copies, seen.drift.clone(), seen.reward)
        return super().log_conditionals(earlier or seen, x, positions, chosen)


@pytest.mark.parametrize("twin", [InTheirOrder, ReadTooEarly])
def test_an_order_that_is_not_random_and_a_conditional_of_another_state_are_seen(twin):
    toy = tokens("masked", "everything", **PAIR, at_once=1)
    toy.chain.evaluate.process = twin(2, at_once=1)
    assert worst(toy) > 1e-4


def test_metropolis_is_exact_for_dependent_positions():
    """Density ratios of single tokens are exact for any table, so exploration alone is invariant."""
    toy = tokens("masked", "everything", **PAIR, oracle=True, explorer=cd.SingleToken())
    toy.chain.accept = lambda log_alpha, stream: torch.zeros_like(log_alpha, dtype=torch.bool)
    assert violation(toy.chain, toy.states, toy.log_pi, n=2) <= TOLERANCE
