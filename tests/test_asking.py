"""Long texts keep no predictions: tokens are asked for instead. The draws have the bits of runs that keep them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import crepe_diffusion as cd
from checks import refuted
from crepe_diffusion.processes import Euler, Masked, Uniform, discrete
from crepe_diffusion.samplers.pilot import _token_features

V, LENGTH = 3, 4
JOINT, OTHER = (cd.Stream(8).at(i).uniform((1, *[V] * LENGTH))[0] ** 3 for i in range(2))
PROMPT = torch.tensor([-1, 2, -1, -1])


def reward(on):
    return lambda z: (z[..., 0] if on == "prediction" else (z == 0)).double().sum(-1)


def guided(prompt=None, kind="masked"):
    return cd.guided(*(cd.models.TokenTable(p, kind, prompt=prompt) for p in (JOINT, OTHER)), 1.5)


def targets(kind):
    return {
        "guided": guided(None, kind),
        "prompted": guided(PROMPT, kind),
        "state": guided(None, kind).tilt(reward("state"), on="state"),
        "prediction": guided(PROMPT, kind).tilt(reward("prediction")),
        "mode": (guided(None, kind) ** 1.2).tilt(reward("mode"), on="mode"),
    }


TARGETS = targets("masked")
LADDER = cd.ladder.of([0.02, 0.2, 0.4, 0.6, 0.7, 0.8, 0.98], substeps=2)
OPTIONS = {"seed": 3, "micro_batch": 5}


def exchange(target, process, explorer=None):
    chain = cd.ReplicaExchange(target, LADDER, n_chains=2, explorer=explorer, process=process, **OPTIONS)
    works = [chain.step().swaps.log_work.nan_to_num() for _ in range(4)]
    return (chain.state.x, chain.state.level, chain.output(), torch.stack(works)), chain.evaluate


def gibbs(target, process):
    sampler = cd.ParticleGibbs(target, LADDER, n_chains=2, n_particles=4, process=process, **OPTIONS)
    out = sampler.sample(3)
    return (out.x, out.log_weights), sampler.evaluate


def smc(target, process):
    sampler = cd.SMC(target, LADDER, n_particles=6, n_batches=2, process=process, **OPTIONS)
    out = sampler.sample()
    return (out.x, out.log_weights, out.batch_log_z), sampler.evaluate


def plain(target, process):
    sampler = cd.Plain(target, LADDER, process=process, **OPTIONS)
    return (sampler.sample(8).x,), sampler.evaluate


def piloted(target, process):
    found = cd.pilot(target, cd.ladder.of([0.02, 0.3, 0.6, 0.98]), n=8, seed=1, process=process)
    return (found.down, found.up, found.x), cd.Plain(target, LADDER, process=process).evaluate


PROCESSES = {
    "masked": lambda prompt: Masked(V, prompt, at_once=1),
    "masked by two": lambda prompt: Masked(V, prompt, at_once=2),
    "masked at once": lambda prompt: Masked(V, prompt, at_once=None),
    "uniform": lambda prompt: Uniform(V, prompt, at_once=1),
    "uniform by two": lambda prompt: Uniform(V, prompt, at_once=2),
    "uniform at once": lambda prompt: Uniform(V, prompt, at_once=None),
    "Euler, masked": lambda prompt: Euler(base=Masked(V, prompt)),
    "Euler, uniform": lambda prompt: Euler(base=Uniform(V, prompt)),
}
WAYS = {
    "exchange": exchange,
    "bounce": lambda target, process: exchange(target, process, cd.Bounce()),
    "single tokens": lambda target, process: exchange(target, process, cd.SingleToken(2)),
    "smc": smc,
    "particle gibbs": gibbs,
    "plain": plain,
    "pilot": piloted,
}


FIRST = {
    ("exchange", "prediction", "masked"),
    ("exchange", "mode", "uniform by two"),
    ("bounce", "state", "masked by two"),
    ("bounce", "guided", "Euler, uniform"),
    ("single tokens", "mode", "masked"),
    ("single tokens", "prediction", "uniform at once"),
    ("smc", "prediction", "Euler, masked"),
    ("particle gibbs", "prompted", "masked at once"),
    ("plain", "guided", "uniform"),
    ("pilot", "mode", "masked by two"),
}
TRIPLES = [
    pytest.param(way, target, process, marks=() if (way, target, process) in FIRST else pytest.mark.slow)
    for way in WAYS
    for target in TARGETS
    for process in PROCESSES
    if not (way == "single tokens" and process.startswith("Euler"))
]


@pytest.mark.parametrize(("way", "target", "process"), TRIPLES)
def test_draws_are_the_same_whether_predictions_are_kept_or_not(way, target, process, monkeypatch):
    target = targets("uniform" if "uniform" in process else "masked")[target]
    process = PROCESSES[process](target.models[0].process().prompt)
    kept, evaluate = WAYS[way](target, process)
    assert evaluate.keeps_predictions
    monkeypatch.setattr(discrete, "MOST_KEPT", 0)
    asked, evaluate = WAYS[way](target, process)
    assert not evaluate.keeps_predictions
    for a, b in zip(kept, asked, strict=True):
        assert torch.equal(a, b)


def test_a_conditional_of_the_cleaner_end_is_seen(monkeypatch):
    """The broken twin: tokens that are masked are read where they still are."""
    process = PROCESSES["masked"](None)
    kept, _ = exchange(TARGETS["guided"], process)
    monkeypatch.setattr(discrete, "MOST_KEPT", 0)
    monkeypatch.setattr(Masked, "noisier", lambda self, x, asked: x)
    refuted(torch.testing.assert_close, kept[3], exchange(TARGETS["guided"], process)[0][3], atol=1e-6, rtol=0)


def test_a_step_that_is_asked_at_its_cleaner_end_is_seen(monkeypatch):
    process = PROCESSES["uniform at once"](None)
    kept, _ = exchange(guided(None, "uniform"), process)
    monkeypatch.setattr(discrete, "MOST_KEPT", 0)
    monkeypatch.setattr(Uniform, "noised", lambda self, x, s, t, stream: x)
    refuted(torch.testing.assert_close, kept[3], exchange(guided(None, "uniform"), process)[0][3], atol=1e-6, rtol=0)


class Counting:
    def __init__(self):
        self.rows = 0

    def __call__(self, x, t):
        self.rows += len(x)
        return torch.full((*x.shape, V), -1.0986, dtype=torch.float64)

    def model(self):
        return cd.models.TokenModel(self, (LENGTH,), V, dtype=torch.float64)


def test_asking_costs_one_row_per_change_and_one_more_where_rewards_look_at_predictions(monkeypatch):
    monkeypatch.setattr(discrete, "MOST_KEPT", 0)
    for levels in (3, 9):
        network = Counting()
        cd.SMC(network.model(), cd.ladder.linear(levels), n_particles=16).sample()
        assert network.rows == 16 * LENGTH
        network = Counting()
        cd.SMC(network.model().tilt(reward("prediction")), cd.ladder.linear(levels), n_particles=16).sample()
        assert network.rows == 16 * (LENGTH + levels)
    network = Counting()
    chain = cd.ReplicaExchange(network.model(), cd.ladder.linear(4), n_chains=16)
    for _ in range(6):
        before, rows = chain.state.x.clone(), network.rows
        chain.step()  # control is off, so every walk is accepted, and only fresh noise changes besides
        idle_top = chain.state.level == 3
        changes = (chain.state.x != before).reshape(16, 4, LENGTH)
        assert network.rows - rows in (int(changes.sum()), int(changes[~idle_top].sum()))
    assert network.rows == chain.evaluate.counts.rows


@pytest.mark.parametrize("on", ["prediction", "state"])
def test_chains_that_ask_go_on_bit_for_bit(on, monkeypatch):
    monkeypatch.setattr(discrete, "MOST_KEPT", 0)
    target, options = guided().tilt(reward(on), on=on), {"n_chains": 3, "explorer": cd.SingleToken()}
    for sampler in (cd.ReplicaExchange, cd.ParticleGibbs):
        given = options if sampler is cd.ReplicaExchange else {"n_chains": 3, "n_particles": 4}
        first = sampler(target, LADDER, **given)
        for _ in range(3):
            first.step()
        assert not any("prediction" in name for name in first.snapshot())
        again = sampler(target, LADDER, start=first.snapshot(), **given)
        for _ in range(3):
            first.step(), again.step()
        assert torch.equal(first.output(), again.output())


def test_a_run_that_asks_stops_goes_on_and_knows_its_model(tmp_path, monkeypatch):
    monkeypatch.setattr(discrete, "MOST_KEPT", 0)
    with cd.Run(tmp_path / "run", cd.ReplicaExchange(guided(), LADDER, n_chains=2)) as run:
        run.run(iterations=4)
    with cd.Run.resume(tmp_path / "run", target=guided()) as run:
        run.run(iterations=8)
    other = cd.guided(*(cd.models.TokenTable(p) for p in (OTHER, JOINT)), 1.5)
    with pytest.raises(cd.InputError, match="model"):
        cd.Run.resume(tmp_path / "run", target=other)


def test_predictions_that_are_not_finite_are_counted_and_rejected(monkeypatch):
    monkeypatch.setattr(discrete, "MOST_KEPT", 0)

    def function(x, t):
        bad = (x == torch.tensor([0, V, V, V])).all(1)
        out = cd.models.TokenTable(JOINT).predict(x, t)
        return out.where(~bad[:, None, None], torch.nan)

    model = cd.models.TokenModel(function, (LENGTH,), V, dtype=torch.float64)
    chain = cd.ReplicaExchange(model**1.5, cd.ladder.linear(4), n_chains=8, nonfinite="reject")
    out = chain.sample(30)
    assert sum(chain.evaluate.counts.nonfinite.values()) > 0
    assert (out.x < V).all()
    with pytest.raises(cd.NonFiniteError, match="NaN or infinite, first at level"):
        cd.ReplicaExchange(model**1.5, cd.ladder.linear(4), n_chains=8).sample(30)


def peak_bytes(run):
    """The most bytes that tensors held at one time while this ran, by torch's own record of allocations."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = torch.tensor([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())])
    return int(sizes.cumsum(0).max())


VOCAB, LONG = 6000, 96
LARGE = {
    "masked": Masked(VOCAB, mask_id=VOCAB - 1, at_once=16),
    "masked at once": Masked(VOCAB, mask_id=VOCAB - 1, at_once=None),
    "uniform": Uniform(VOCAB, at_once=16),
    "uniform at once": Uniform(VOCAB, at_once=None),
    "Euler": Euler(base=Masked(VOCAB, mask_id=VOCAB - 1)),
}


@pytest.mark.parametrize(
    ("process", "on"), [(name, None) for name in LARGE] + [("masked", "mode"), ("uniform", "mode")]
)
def test_memory_is_at_most_three_predictions_of_the_micro_batch(process, on):
    """V = 6,000 and 96 positions: 2.3 MB each."""
    table = torch.randn(VOCAB, 8, generator=torch.Generator().manual_seed(0))

    def network(ids, sigmabar):
        return table[ids].cumsum(1) @ table.T

    model = cd.models.from_sedd(network, mask_id=VOCAB - 1, length=LONG, vocab_size=VOCAB)
    if process.startswith("uniform"):
        model = cd.models.TokenModel(lambda x, t: network(x, t).log_softmax(-1), (LONG,), VOCAB, "uniform")
    target = model**1.5 if on is None else model.tilt(lambda z: (z < 3000).double().mean(1), on=on)
    ladder = cd.ladder.linear(3, 0.01, 0.99)
    chain = cd.ReplicaExchange(target, ladder, n_chains=2, process=LARGE[process], micro_batch=1)
    assert not chain.evaluate.keeps_predictions
    one = LONG * VOCAB * 4

    def small(run):
        assert peak_bytes(run) < 3 * one

    small(chain.step)
    refuted(small, lambda: chain.evaluate.networks.predict(chain.state.x, torch.ones(6)))  # the whole batch


KNOWN = {
    "single tokens, masked": (lambda: Masked(V, at_once=1), cd.SingleToken(2)),
    "single tokens, uniform": (lambda: Uniform(V, at_once=None), cd.SingleToken(2)),
    "turns": (lambda: Masked(V, at_once=2), None),
    "all at once": (lambda: Masked(V, at_once=None), None),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_densities_are_used_whether_predictions_are_kept_or_not(name, monkeypatch):
    """Another density than that of the models: works and draws follow it, and the same if tokens are asked for."""
    make, explorer = KNOWN[name]
    target = guided(None, "masked" if isinstance(make(), Masked) else "uniform")
    logs = tuple(lambda x, t, c=c: c * (t + 0.1) * (x == 0).double().sum(1) for c in (0.3, 1.1))
    process = replace(make(), log_probs=logs)
    kept, _ = exchange(target, process, explorer)
    without, _ = exchange(target, make(), explorer)
    assert not torch.allclose(kept[3], without[3])
    monkeypatch.setattr(discrete, "MOST_KEPT", 0)
    asked, evaluate = exchange(target, process, explorer)
    assert not evaluate.keeps_predictions
    for a, b in zip(kept, asked, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("process", ["masked by two", "uniform at once"])
def test_a_pilot_of_long_texts_finds_what_a_pilot_of_short_ones_finds(process, monkeypatch):
    """What the size of steps does, and rows of a walk, to which comparing steps does not count."""
    target = guided(None, "uniform" if "uniform" in process else "masked")
    steps, made = cd.ladder.of([0.02, 0.3, 0.5, 0.7, 0.98]), PROCESSES[process](None)
    kept = cd.pilot(target, steps, n=8, seed=1, process=made)
    monkeypatch.setattr(discrete, "MOST_KEPT", 0)
    asked = cd.pilot(target, steps, n=8, seed=1, process=made)
    for way, size in kept.discretisation.items():
        assert size.value != 0
        assert (asked.discretisation[way].value, asked.discretisation[way].error) == pytest.approx(
            (size.value, size.error)
        )
    # Of each model: two pairs of steps are compared each way, by three ratios. A state that rests costs nothing.
    assert asked.walk_rows == (asked.rows - 2 * 8 * 2 * 2 * 3) / (2 * 8)
    assert (kept.walk_rows, kept.state_rows) == ((kept.rows - 2 * 8) / (2 * 8), 2)
    assert asked.state_rows == 0
    assert asked.features.shape == (2, 5, 8, 32)
    assert torch.equal(asked.features[0, 0], _token_features(asked.x[0], cd.Stream(1).at("features")))


def test_a_prediction_is_kept_up_to_its_size(monkeypatch):
    monkeypatch.setattr(discrete, "MOST_KEPT", V * LENGTH)
    assert Masked(V).keeps_predictions(torch.Size([LENGTH]))
    assert not Masked(V).keeps_predictions(torch.Size([LENGTH + 1]))
