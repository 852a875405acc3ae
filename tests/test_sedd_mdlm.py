"""SEDD and MDLM: networks of their interface whose law is a table, against the closed form and their own samplers."""

from __future__ import annotations

import math

import pytest
import torch

import crepe_diffusion as cd
from checks import assert_frequencies, refuted
from crepe_diffusion.processes import Masked

V, LENGTH = 3, 3
TABLE = cd.models.TokenTable(cd.Stream(5).uniform((1, V, V, V))[0] ** 3)


class Sedd(torch.nn.Module):
    """`f(ids, sigmabar)`: log concrete scores with the mask last, 0 at a position's own id, as the owner returns."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.factor, self.noises = factor, []

    def forward(self, ids, sigmabar):
        self.noises.append((ids, sigmabar))
        log_p = TABLE.predict(ids, torch.full((len(ids),), 0.5)) - sigmabar.double().expm1().log()[:, None, None]
        log_score = torch.cat([log_p + math.log(self.factor), torch.zeros(*ids.shape, 1, dtype=log_p.dtype)], -1)
        return log_score.scatter(-1, ids[..., None], 0.0).float()


class Mdlm(torch.nn.Module):
    """`f(ids, sigma)`: logits with the mask in the middle of the vocabulary, as where a tokenizer has one."""

    MASK = 1

    def __init__(self):
        super().__init__()
        self.noises = []

    def forward(self, ids, sigma):
        self.noises.append((ids, sigma))
        log_p = TABLE.predict(TO_TABLE[ids], torch.full((len(ids),), 0.5))
        logits = torch.full((*ids.shape, V + 1), 3.0, dtype=log_p.dtype)  # it would like to say "mask"
        logits[..., FROM_TABLE] = log_p + 1.7
        return logits.float()


FROM_TABLE = torch.tensor([0, 2, 3])
TO_TABLE = torch.tensor([0, V, 1, 2])
FAMILIES = {
    "sedd": (Sedd, cd.models.from_sedd, V, torch.arange(V)),
    "mdlm": (Mdlm, cd.models.from_mdlm, Mdlm.MASK, FROM_TABLE),
}


@pytest.fixture(params=FAMILIES)
def family(request):
    """The network, its model, the id of the mask, and the ids of the table's tokens."""
    network, adapter, mask, names = FAMILIES[request.param]
    made = network().eval()
    return made, adapter(made, mask_id=mask, length=LENGTH, vocab_size=V + 1), mask, names


def states(mask, names):
    """All states that have a mask, in the network's ids and in the table's."""
    x = TABLE.all_states()
    x = x[(x == V).any(1)]
    return torch.cat([names, torch.tensor([mask])])[x], x


def test_probabilities_are_the_posteriors_of_the_table(family):
    _, model, mask, names = family
    ids, x = states(mask, names)
    t = torch.linspace(0.05, 0.95, len(x))
    found, expected = model.predict(ids, t).exp(), TABLE.predict(x, t).exp().float()
    masked = x == V
    check = lambda wanted: torch.testing.assert_close(  # noqa: E731
        found[masked][:, names], wanted[masked], atol=2e-6, rtol=0
    )
    check(expected)
    refuted(check, expected.roll(1, -1))
    worst = (found[masked][:, names] - expected[masked]).abs().max()
    print(f"largest difference of a probability, {type(model.function.network).__name__}: {float(worst):.1e}")
    assert (found[..., mask][masked] == 0).all()


def test_the_mass_of_scores_shows_a_network_that_is_off():
    """Scores 10 % too large: predictions are the same, the sum over tokens is 1.1."""
    ids, x = states(V, torch.arange(V))
    masked = x == V
    for factor in (1.0, 1.1):
        model = cd.models.from_sedd(Sedd(factor), mask_id=V, length=LENGTH, vocab_size=V + 1)
        mass = model.mass(ids, torch.linspace(0.05, 0.95, len(x)))[masked]
        torch.testing.assert_close(mass, torch.full_like(mass, factor), atol=1e-5, rtol=0)


def test_a_step_has_the_probabilities_of_the_owners_sampler(family):
    """SEDD: score_v (e^dsigma - 1), its analytic predictor; MDLM: p(v) (m_t - m_s) / m_t with m = 1 - e^-sigmabar."""
    network, model, mask, names = family
    ids, x = states(mask, names)
    n = len(ids)
    s, t = torch.full((n,), 0.3).double(), torch.full((n,), 0.8).double()
    process = Masked(V + 1, at_once=None, mask_id=mask)
    found = process.denoising(ids, model.predict(ids, t).double(), s, t).exp()

    def owner(s, t):
        if isinstance(network, Sedd):
            noise_s, noise_t = -torch.log1p(-s), -torch.log1p(-t)
            return network(ids, noise_t).double().exp() * ((noise_t - noise_s).expm1()[:, None, None])
        p = network(ids, torch.zeros(n)).double()
        p[..., mask] = -torch.inf
        return p.softmax(-1) * ((t - s) / t)[:, None, None]

    def check(s, t):
        expected = owner(s, t)[..., names][x == V]
        torch.testing.assert_close(found[..., names][x == V], expected, atol=2e-6, rtol=0)

    check(s, t)
    refuted(check, s + 0.1, t)
    worst = (found[..., names] - owner(s, t)[..., names])[x == V].abs().max()
    print(f"largest difference of a step, {type(network).__name__}: {float(worst):.1e}")


def test_plain_draws_have_the_law_of_the_table(family):
    _, model, _, names = family
    back = torch.zeros(V + 1, dtype=torch.long)
    back[names] = torch.arange(V)
    x = back[cd.Plain(model, cd.ladder.linear(4, 0.0, 0.999), seed=1).sample(3000).x]
    index = (x * V ** torch.arange(LENGTH - 1, -1, -1)).sum(1)
    law = TABLE.probabilities.reshape((V,) * LENGTH)
    assert_frequencies(index, law.flatten())
    independent = torch.einsum("i,j,k->ijk", law.sum((1, 2)), law.sum((0, 2)), law.sum((0, 1)))
    refuted(assert_frequencies, index, independent.flatten())


def test_control_off_gives_zero(family):
    _, model, _, _ = family

    def largest(target):
        chain = cd.ReplicaExchange(target, cd.ladder.linear(4, 0.0, 0.999), n_chains=4)
        return max(float(chain.step().swaps.log_work.nan_to_num().abs().max()) for _ in range(4))

    print(f"largest work with control off: {largest(model):.1e}")
    assert largest(model) < 2e-6
    assert largest(model**1.1) > 0.1


def test_sedd_gets_the_total_noise_of_the_share_of_masks(family):
    network, model, mask, _ = family
    if isinstance(network, Mdlm):
        timed = cd.models.from_mdlm(network, mask_id=mask, length=LENGTH, vocab_size=V + 1, time_conditioning=True)
        cd.Plain(model, cd.ladder.linear(4, 0.0, 0.999)).sample(3)
        assert all((noise == 0).all() for _, noise in network.noises)
        network.noises.clear()
        model = timed
    cd.Plain(model, cd.ladder.linear(4, 0.0, 0.999)).sample(3)
    for ids, noise in network.noises:
        share = (ids == mask).float().mean(1).clamp(max=0.999)
        torch.testing.assert_close(noise, -torch.log1p(-share), atol=1e-4, rtol=1e-4)
