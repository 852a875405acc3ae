"""One condition for all chains, or one for each; prompts too: a chain has the draws that it has among its equals."""

from __future__ import annotations

import pytest
import torch

import crepe_diffusion as cd
from checks import f64, refuted
from crepe_diffusion.models.networks import Networks
from crepe_diffusion.processes import Gaussian, Masked, Uniform, discrete

LADDER = cd.ladder.karras(4, 0.1, 8.0, substeps=2)


class Network:
    """Gaussian data whose mean is given as a tensor, a tuple or a dictionary."""

    def __init__(self):
        self.calls = 0

    def __call__(self, y, t, condition):
        self.calls += 1
        parts = condition.values() if isinstance(condition, dict) else condition
        shift = condition if isinstance(condition, torch.Tensor) else sum(parts)
        return (y + t[:, None] ** 2 * shift) / (1 + t[:, None] ** 2)


def shapes(a, b):
    a, b = f64(a), f64([b, b])
    return {"tensor": a + b, "tuple": (a, b), "dictionary": {"text": a, "size": b}}


def model(network, condition):
    return cd.models.Denoiser(network, (2,), condition=condition, dtype=torch.float64, process=Gaussian(variance=1.0))


def walked(sampler, n=4):
    for _ in range(n):
        sampler.step()
    return sampler.output()


def samplers(target, **options):
    given = {"n_chains": 4, "micro_batch": 5, "seed": 2, **options}
    chain = walked(cd.ReplicaExchange(target, LADDER, explorer=cd.Bounce(), **given))
    gibbs = walked(cd.ParticleGibbs(target, LADDER, n_particles=3, **given))
    n = given.pop("n_chains")
    smc = cd.SMC(target, LADDER, n_batches=n, n_particles=3, **given).sample().x.unflatten(0, (n, 3))
    return chain, gibbs, smc


@pytest.mark.parametrize("shape", ["tensor", "tuple", "dictionary"])
def test_each_chain_has_the_draws_of_its_own_condition(shape):
    first, second = (shapes(a, 0.5)[shape] for a in ([1.0, -2.0], [-3.0, 0.0]))
    nothing, network = shapes([0.0, 0.0], 0.0)[shape], Network()

    def guided(condition):
        return cd.guided(model(network, condition), model(network, nothing), 1.5)

    both = cd.models.Each((first, second))
    assert Networks(guided(both).models, is_discrete=False).n_calls == 1
    together, alone = samplers(guided(both)), [samplers(guided(c)) for c in (first, second)]

    def check(alone):
        for mixed, a, b in zip(together, *alone, strict=True):
            torch.testing.assert_close(mixed, torch.cat([a[:2], b[2:]]), atol=1e-9, rtol=1e-9)

    check(alone)
    refuted(check, alone[::-1])


def test_the_variance_is_measured_over_all_conditions():
    """Three conditions and 256 samples: rounded up to 258. All have unit variance, so one number serves them."""
    each = cd.models.Each([f64([m, 0.0]) for m in (-4.0, 0.0, 9.0)])
    denoiser = cd.models.Denoiser(Network(), (2,), condition=each, dtype=torch.float64)
    chain = cd.ReplicaExchange(denoiser, cd.ladder.karras(9, 0.05, 40.0), n_chains=3 * 40, fit_samples=256)
    out = chain.sample(40, burn_in=10)
    for i, mean in enumerate((-4.0, 0.0, 9.0)):
        found = out.of_chains(range(40 * i, 40 * i + 40)).mean(lambda x: x[:, 0])
        assert abs(found.value - mean) < 5 * found.error < 1.0


def test_a_checkpoint_takes_several_conditions_as_it_takes_one():
    def velocity(x, t, label):
        return x * t[:, None] + label[:, None]

    p = cd.models.from_velocity(velocity, (2,), noise_at=1.0, condition=0.5, dtype=torch.float64)
    x, t = cd.Stream(4).normal((4, 2)), cd.Stream(5).uniform((4,))
    found = p.given(cd.models.Each([0.5, -2.0])).predict(x, t)
    assert torch.equal(found, torch.cat([p.predict(x[:2], t[:2]), p.given(-2.0).predict(x[2:], t[2:])]))


PROMPTS = torch.tensor([[0, -1, -1, 2], [2, -1, -1, 1]])


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("kind", ["masked", "uniform"])
def test_each_chain_of_tokens_has_its_own_prompt(kind, kept, monkeypatch):
    if not kept:
        monkeypatch.setattr(discrete, "MOST_KEPT", 0)
    table = cd.Stream(3).uniform((1, 3, 3, 3, 3))[0] ** 3

    def chain(prompt):
        target = cd.models.TokenTable(table, kind, prompt=prompt) ** 1.5
        return walked(cd.ReplicaExchange(target, cd.ladder.linear(3, 0.05, 0.95), n_chains=4, micro_batch=5), 6)

    together, alone = chain(PROMPTS), [chain(p) for p in PROMPTS]
    assert torch.equal(together, torch.cat([alone[0][:2], alone[1][2:]]))
    assert not torch.equal(together, torch.cat([alone[1][:2], alone[0][2:]]))
    assert (together[:, [0, 3]] == PROMPTS[[0, 0, 1, 1]][:, [0, 3]]).all()


class Tokens:
    """Dependent tokens whose law has a condition: a table for each of two numbers."""

    def __init__(self, kind):
        tables = [cd.Stream(i).uniform((1, 3, 3, 3, 3))[0] ** 3 for i in (3, 4)]
        self.kind, self.laws = kind, [cd.models.TokenTable(p, kind) for p in tables]

    def __call__(self, x, t, condition):
        both = torch.stack([law.predict(x, t) for law in self.laws])
        return both.gather(0, condition[None, :, None, None].expand(1, *both.shape[1:]))[0]

    def model(self, condition):
        return cd.models.TokenModel(self, (4,), 3, self.kind, condition=condition, dtype=torch.float64)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("at_once", [1, None])
@pytest.mark.parametrize("kind", ["masked", "uniform"])
def test_each_chain_of_tokens_has_its_own_condition(kind, at_once, kept, monkeypatch):
    """Walks of tokens evaluate some of the rows only, and these keep their conditions."""
    if not kept:
        monkeypatch.setattr(discrete, "MOST_KEPT", 0)
    network, ladder = Tokens(kind), cd.ladder.linear(3, 0.05, 0.95)
    process = {"masked": Masked, "uniform": Uniform}[kind](3, at_once=at_once)
    first, second, nothing = (torch.tensor(i) for i in (0, 1, 0))

    def draws(condition):
        target = cd.guided(network.model(condition), network.model(nothing), 1.5).tilt(lambda z: z[:, 0, 0])
        given = {"n_chains": 4, "process": process, "micro_batch": 5}
        chain = walked(cd.ReplicaExchange(target, ladder, explorer=cd.SingleToken(), **given), 2)
        gibbs = walked(cd.ParticleGibbs(target, ladder, n_particles=3, **given), 1)
        smc = cd.SMC(target, ladder, n_batches=4, n_particles=3, process=process).sample().x.unflatten(0, (4, 3))
        return chain, gibbs, smc, cd.Plain(target, ladder, **given).sample(1).x

    together, alone = draws(cd.models.Each((first, second))), [draws(c) for c in (first, second)]

    def check(alone):
        for mixed, a, b in zip(together, *alone, strict=True):
            assert torch.equal(mixed, torch.cat([a[:2], b[2:]]))

    check(alone)
    refuted(check, alone[::-1])


def test_a_language_model_takes_several_prompts():
    network = lambda ids: torch.zeros(*ids.shape, 6) + ids.double().mean(1)[:, None, None]  # noqa: E731
    texts = torch.tensor([[0, 4, 2, 2], [5, 3, 2, 2]])
    model = cd.models.from_masked_lm(network, mask_id=2, prompt=texts, forbidden=[0], vocab_size=6)
    out = cd.SMC(cd.guided(model, model.hiding(), 1.5), cd.ladder.linear(3), n_particles=4, n_batches=2).sample()
    assert (out.x[:, :2] == texts[[0] * 4 + [1] * 4][:, :2]).all()
    assert (model.noise(2) == texts).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: model(Network(), cd.models.Each([f64([1.0]), f64([1.0, 2.0])])), "the same keys, shapes and dtypes"),
        (lambda: model(Network(), cd.models.Each([f64([1.0]), 3])), "condition 1 must be a tensor"),
        (
            lambda: cd.ReplicaExchange(model(Network(), cd.models.Each([f64([1.0, 0.0])] * 2)), LADDER, n_chains=3),
            "2 conditions need a number of chains that is a multiple of 2, got 3 rows",
        ),
        (
            lambda: cd.pilot(model(Network(), cd.models.Each([f64([1.0, 0.0])] * 2)), LADDER, n=4),
            "a pilot is of one law, but these chains have 2 conditions",
        ),
        (
            lambda: cd.Plain(cd.models.TokenTable(torch.ones(3, 3)), cd.ladder.linear(3), process=Masked(3, PROMPTS)),
            r"shape of the event \(2,\), got \(2, 4\)",
        ),
        (
            lambda: cd.ReplicaExchange(
                cd.models.TokenTable(torch.ones(3, 3), prompt=torch.tensor([[0, -1], [-1, 1]])), cd.ladder.linear(3)
            ),
            "must freeze the same positions: pad the shorter ones on the left",
        ),
        (
            lambda: cd.ReplicaExchange(
                cd.models.TokenTable(torch.ones(3, 3), prompt=torch.tensor([[0, -1], [1, -1]])), cd.ladder.linear(3)
            ),
            "2 prompts need a number of chains that is a multiple of it, got 1 rows",
        ),
    ],
)
def test_conditions_that_do_not_fit_are_refused(make, message):
    with pytest.raises(cd.InputError, match=message):
        make()
