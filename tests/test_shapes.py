"""Shapes in annotations are really checked while tests run: a wrong one raises where it enters."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import TypeCheckError

import crepe_diffusion as cd
from crepe_diffusion.kernels import State
from crepe_diffusion.paths import walk
from crepe_diffusion.processes import Evaluation

MODEL = cd.models.GaussianMixture([0.4, 0.6], [[-1.0, 0.0], [2.0, 1.0]], [0.5, 0.3])


def test_view_rows_must_agree():
    with pytest.raises(TypeCheckError):
        Evaluation((torch.zeros(3, 2),), torch.zeros(3, 2), torch.zeros(4))


def test_state_levels_have_a_chain_axis():
    with pytest.raises(TypeCheckError):
        State(torch.zeros(3, 2), Evaluation((torch.zeros(3, 2),), torch.zeros(3, 2), torch.zeros(3)), torch.arange(3))


def test_walk_wants_one_direction_a_row():
    chain = cd.ReplicaExchange(MODEL, cd.ladder.karras(4, 0.1, 5.0))
    down = torch.full((4,), -1)
    index = chain.state.level.flatten()
    with pytest.raises(TypeCheckError):
        walk(chain.evaluate, chain.state.x, chain.state.seen, index, down[:2], 1, chain.stream)
