"""Masks that are counted: no coins in the weights of particles, and states that keep their number of masks."""

from __future__ import annotations

import math

import pytest
import torch

import crepe_diffusion as cd
from checks import refuted
from crepe_diffusion.processes import Counted, Masked
from crepe_diffusion.samplers import plan as planning
from crepe_diffusion.samplers.plan import Cut

LENGTH, VOCAB = 4, 3
P, Q = (cd.models.TokenTable(cd.Stream(seed).uniform((VOCAB,) * LENGTH) ** 2 + 0.03, "masked") for seed in (1, 2))
TARGETS = {"guidance": cd.guided(Q, P, 2.0), "product": P * Q}


def alike(*p):
    """Independent positions with the same law."""
    one, joint = torch.tensor(p, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    for _ in range(LENGTH):
        joint = (joint[:, None] * one).flatten()
    return cd.models.TokenTable(joint.reshape((VOCAB,) * LENGTH), "masked")


def particles(target, process, n=2_000):
    return cd.SMC(target, cd.ladder.linear(LENGTH + 1), n_particles=n, process=process).sample(progress=False)


def check_equal_weights(process, target):
    """Every token that is revealed multiplies the weight by the same number, so that all particles count alike."""
    out = particles(target, process)
    assert int(out.n_resamplings) == 0
    assert float(out.log_weights.max() - out.log_weights.min()) < 1e-9


def test_positions_that_are_alike_give_equal_weights_and_with_coins_they_do_not():
    p, q = alike(0.2, 0.3, 0.5), alike(0.6, 0.3, 0.1)
    for target in (cd.guided(q, p, 3.0), p * q, p**2.0):
        check_equal_weights(Counted(VOCAB), target)
        refuted(check_equal_weights, Masked(VOCAB), target)


@pytest.mark.parametrize("task", TARGETS)
def test_particles_have_the_law_of_the_target(task):
    """Dependent positions, against the tables."""
    target = TARGETS[task]
    x = torch.cartesian_prod(*[torch.arange(VOCAB)] * LENGTH)
    log_pi = torch.stack([c * model.log_prob(x) for model, c in target.factors]).sum(0)
    pi, n = log_pi.softmax(0), 2_000
    out = particles(target, Counted(VOCAB), n)
    index = (out.x * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(1)
    share = torch.zeros(len(x), dtype=torch.float64).index_add_(0, index, out.weights)
    floor = float((pi * (1 - pi) / n).sqrt().sum()) / math.sqrt(2 * math.pi)  # of independent draws, on average
    assert float((share - pi).abs().sum()) / 2 < 1.5 * floor
    assert abs(out.log_z.value - float(log_pi.logsumexp(0))) < 0.05


def test_every_state_of_a_level_has_its_number_of_masks():
    chain = cd.ReplicaExchange(TARGETS["product"], cd.ladder.linear(4), n_chains=3, process=P.process().counted())
    for _ in range(5):
        chain.step()
        masks = (chain.state.x == VOCAB).sum(1).reshape(chain.state.level.shape)
        assert torch.equal(masks, torch.tensor([0, 1, 3, 4])[chain.state.level])


def test_a_pilot_with_a_level_per_position_starts_a_chain():
    found = cd.pilot(TARGETS["guidance"], cd.ladder.linear(LENGTH + 1), n=64, process=Counted(VOCAB))
    out = cd.ReplicaExchange(TARGETS["guidance"], pilot=found, n_chains=2, process=Counted(VOCAB)).sample(3)
    assert (out.x < VOCAB).all()


def test_levels_of_a_plan_stand_at_the_steps_of_its_pilot(monkeypatch):
    """21 steps of three positions each, cut into four blocks that are not equally long."""
    monkeypatch.setattr(planning, "_predict", lambda pilot, m, k: Cut(m, k, 0.0, 0.0, 0.0, effective=float(m == 4)))
    model = cd.models.TokenModel(lambda x, t: torch.full((*x.shape, 2), 0.5).log(), (63,), 2)
    process = Counted(2, at_once=3)
    found = cd.pilot(model**2.0, cd.ladder.linear(22), n=4, process=process)
    chain = cd.ReplicaExchange(model**2.0, pilot=found, n_chains=2)
    chain.sample(2)
    masks = (chain.state.x == 2).sum(1).reshape(chain.state.level.shape)
    assert torch.equal(masks, torch.tensor([0, 15, 30, 48, 63])[chain.state.level])


def test_what_would_change_the_number_of_masks_is_refused():
    with pytest.raises(cd.InputError, match="at_once must be a number"):
        Counted(VOCAB, at_once=None)
    with pytest.raises(cd.InputError, match="let it end at 1"):
        cd.SMC(P, cd.ladder.linear(3, t_max=0.7), process=Counted(VOCAB)).sample()
    with pytest.raises(cd.InputError, match="which Counted does not have"):
        cd.ReplicaExchange(P, cd.ladder.linear(3), process=Counted(VOCAB), explorer=cd.SingleToken())
    chain = cd.ReplicaExchange(P, cd.ladder.linear(3), process=Counted(VOCAB))
    chain.ladder = cd.ladder.of([0.0, 0.25, 1.0])
    with pytest.raises(cd.InputError, match="2 masks where 1 of 4 positions are masked"):
        chain.step()


@pytest.mark.parametrize(("up", "t", "right"), [(True, 0.5, 1), (False, 0.75, 3)])
def test_a_state_with_another_number_of_masks_is_named(up, t, right):
    """Of two rows the second is wrong: it has two masks, where time .25 has one and time .75 three."""
    sound = [VOCAB, 0, 0, 0] if up else [VOCAB, VOCAB, VOCAB, 0]
    x = torch.tensor([sound, [VOCAB, VOCAB, 0, 0]])
    times = torch.full((2,), 0.25, dtype=torch.float64), torch.full((2,), t, dtype=torch.float64)
    with pytest.raises(cd.InputError, match=f"a state has 2 masks where {right} of 4 positions are masked"):
        Counted(VOCAB).turns(x, *times, torch.full((2,), up), cd.Stream(0))
    turns = Counted(VOCAB).turns(x[:1], *(z[:1] for z in times), torch.full((1,), up), cd.Stream(0))
    assert sorted(turns[0].tolist()) == [0, 0, 0, 1] if up else [0, 0, 1, 2]
