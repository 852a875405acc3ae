"""Exact cost: what the network itself sees, row by row and call by call, and no cached seen that is out of date.

(M + 1) K rows an iteration and chain without exploration, in K calls; SMC: M K + 1 rows a particle.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import crepe_diffusion as cd
from checks import f64, refuted
from crepe_diffusion.processes import Gaussian, Masked, Uniform

M = 4
DATA = cd.models.GaussianMixture([0.4, 0.6], [[-1.0, 0.3], [1.5, -0.5]], [0.6, 0.4])
PROCESS = Gaussian(variance=0.8)


class Network:
    """A denoiser that counts; with a condition it shifts the data."""

    def __init__(self):
        self.rows = self.calls = self.largest = 0

    def __call__(self, y, t, condition=None):
        self.rows, self.calls, self.largest = self.rows + len(y), self.calls + 1, max(self.largest, len(y))
        shift = 0.0 if condition is None else condition
        return DATA.predict(y - shift, t) + shift

    def model(self, shift=None):
        condition = None if shift is None else f64([shift, -shift])
        return cd.models.Denoiser(self, (2,), condition=condition, dtype=torch.float64, process=PROCESS)


def ladder(substeps=1):
    return cd.ladder.karras(M + 1, 0.1, 10.0, substeps=substeps)


def spent(networks, run):
    """Rows and calls of each network during a call, and what the evaluator says of the same."""
    before = [(n.rows, n.calls) for n in networks]
    run()
    return [(n.rows - r, n.calls - c) for n, (r, c) in zip(networks, before, strict=True)]


def check_iterations(chain, networks, rows, calls, n=6):
    """Every iteration costs exactly this much, whatever was accepted, and the counts say so."""
    for _ in range(n):
        before = chain.evaluate.counts.copy()
        found = spent(networks, chain.step)
        assert found == [(rows, calls)] * len(networks)
        counts = chain.evaluate.counts
        assert (counts.rows - before.rows, counts.calls - before.calls) == tuple(map(sum, zip(*found, strict=True)))


# -- replica exchange ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("n_chains", [1, 3])
def test_an_iteration_costs_one_call_a_substep_and_one_row_a_replica(k, n_chains):
    network = Network()
    chain = cd.ReplicaExchange(network.model() ** 1.5, ladder(k), n_chains=n_chains)
    assert (network.rows, network.calls) == (n_chains * (M * k + 1), M * k + 1)  # one pass down, no fit
    assert chain.setup_evaluations.rows == network.rows
    check_iterations(chain, [network], n_chains * (M + 1) * k, k)
    refuted(check_iterations, chain, [network], n_chains * M * k, k)


def test_models_that_share_a_network_share_its_calls():
    network = Network()
    target = cd.guided(network.model(0.5), network.model(0.0), 1.7)
    check_iterations(cd.ReplicaExchange(target, ladder(2), n_chains=3), [network], 2 * 3 * (M + 1) * 2, 2)


def test_models_that_do_not_share_are_called_one_by_one():
    networks = [Network(), Network()]
    target = networks[0].model() ** 0.8 * networks[1].model() ** 0.6
    check_iterations(cd.ReplicaExchange(target, ladder(2), n_chains=3), networks, 3 * (M + 1) * 2, 2)


def test_equal_models_are_evaluated_and_counted_once():
    network = Network()
    target = network.model() ** 0.8 * network.model() ** 0.6
    check_iterations(cd.ReplicaExchange(target, ladder(), n_chains=2), [network], 2 * (M + 1), 1)


def test_a_power_of_a_model_times_itself_is_one_factor():
    network = Network()
    model = network.model()
    check_iterations(cd.ReplicaExchange(model**0.8 * model, ladder()), [network], M + 1, 1)


def test_segments_cost_their_number_in_one_call():
    network = Network()
    model = cd.stitching.Segments(network.model(), 3)
    chain = cd.ReplicaExchange(model.tilt(lambda x: -(x[:, 0] - x[:, 2]).square().sum(1)), ladder(2), n_chains=2)
    check_iterations(chain, [network], 3 * 2 * (M + 1) * 2, 2)


@pytest.mark.parametrize("size", [1, 4, 7, 100])
def test_micro_batches_split_calls_and_change_no_row(size):
    network = Network()
    chain = cd.ReplicaExchange(network.model() ** 1.5, ladder(2), n_chains=3, micro_batch=size)
    rows = 3 * (M + 1)
    calls = -(-rows // size)
    check_iterations(chain, [network], 2 * rows, 2 * calls)
    assert network.largest <= size


def test_a_micro_batch_bounds_what_the_network_sees_of_several_factors():
    network = Network()
    target = cd.guided(network.model(0.5), network.model(0.0), 1.7)
    chain = cd.ReplicaExchange(target, ladder(), n_chains=3, micro_batch=6)
    chain.sample(3)
    assert network.largest == 6


EXPLORERS = {"Langevin": (cd.Langevin(), 1), "Bounce": (cd.Bounce(), 2), "Bounce of two": (cd.Bounce(2), 4)}


@pytest.mark.parametrize("name", EXPLORERS)
def test_explorers_cost_what_they_say(name):
    explorer, cost = EXPLORERS[name]
    network = Network()
    chain = cd.ReplicaExchange(network.model() ** 1.5, ladder(2), n_chains=3, explorer=explorer)
    check_iterations(chain, [network], 3 * (M + 1) * (2 + cost), 2 + cost)


class Tokens:
    """A model of four tokens that records the rows of each call, and the times that they get."""

    def __init__(self):
        self.rows, self.times = [], []

    def __call__(self, x, t):
        self.rows.append(len(x))
        self.times.append((x.clone(), t.clone()))
        return torch.full((*x.shape, 3), -1.0986, dtype=torch.float64)

    def model(self, prompt=None):
        return cd.models.TokenModel(self, (4,), 3, dtype=torch.float64, prompt=prompt)


@pytest.mark.parametrize("n_moves", [1, 3])
def test_single_token_moves_cost_one_row_each(n_moves):
    network = Tokens()
    process = Masked(3, at_once=None)
    options = {"process": process, "explorer": cd.SingleToken(n_moves), "n_chains": 2}
    chain = cd.ReplicaExchange(network.model() ** 1.5, cd.ladder.linear(M + 1), **options)
    network.rows.clear()
    chain.step()
    assert network.rows == [2 * (M + 1)] * (1 + n_moves)


@pytest.mark.parametrize("levels", [3, 9, 33])
@pytest.mark.parametrize("substeps", [1, 3])
def test_a_descent_of_tokens_costs_one_row_per_token(levels, substeps):
    """However many levels: SMC and the start of a chain evaluate the noise end, then each change of a token."""
    times = cd.ladder.linear(levels, substeps=substeps)
    network = Tokens()
    cd.SMC(network.model(), times, n_particles=16).sample()
    assert sum(network.rows) == 16 * (1 + 4)
    network = Tokens()
    chain = cd.ReplicaExchange(network.model(), times, n_chains=16)
    assert sum(network.rows) == 16 * (1 + 4) == chain.evaluate.counts.rows
    network = Tokens()
    cd.Plain(network.model(), times).sample(16)
    assert sum(network.rows) == 16 * 4
    network = Tokens()
    cd.SMC(network.model(torch.tensor([-1, 2, -1, -1])), times, n_particles=16).sample()
    assert sum(network.rows) == 16 * (1 + 3)


def test_an_iteration_of_tokens_costs_its_changes_and_its_idle_rows():
    network, n = Tokens(), 16
    chain = cd.ReplicaExchange(network.model() ** 1.5, cd.ladder.linear(4), n_chains=n, accept=always)
    for _ in range(6):
        before, level, rows = chain.state.x.clone(), chain.state.level, sum(network.rows)
        chain.step()
        idle = (chain.state.level == level).sum()  # all pairs swap, so who keeps its level had no partner
        assert sum(network.rows) - rows == (chain.state.x != before).sum() + idle
    assert sum(network.rows) == chain.evaluate.counts.rows


@pytest.mark.parametrize(("nodes", "of_steps"), [(2, (6 * 2 + 1, 2, 2)), (5, (6 * 5 + 4, 4, 4))])
def test_ratios_of_the_uniform_process_cost_their_changes_and_their_nodes(nodes, of_steps):
    """Steps that do not touch 0 are short; in the lowest one this model never grows certain, so it has all panels."""
    network, n = Tokens(), 16
    model = cd.models.TokenModel(network, (4,), 3, "uniform", dtype=torch.float64)
    process = Uniform(3, at_once=1, nodes=nodes)
    chain = cd.ReplicaExchange(model**1.5, cd.ladder.linear(4), n_chains=n, process=process, accept=always)
    for _ in range(6):
        before, level, rows = chain.state.x.clone(), chain.state.level.clone(), sum(network.rows)
        chain.step()
        moved = (chain.state.level != level).flatten()
        changes = (chain.state.x != before).sum(1)[moved]
        spent = torch.tensor(of_steps)[torch.minimum(chain.state.level, level).flatten()[moved]].sum()
        assert sum(network.rows) - rows == 4 * n + spent + (changes - 1).clamp(min=0).sum()


def always(log_alpha, stream):
    return torch.ones_like(log_alpha, dtype=torch.bool)


def test_models_of_masked_tokens_get_the_share_of_masks_as_their_time():
    network, prompt = Tokens(), torch.tensor([-1, 2, -1, -1])
    chain = cd.ReplicaExchange(network.model(prompt) ** 1.5, cd.ladder.linear(5, 0.1, 0.95), explorer=cd.SingleToken())
    chain.sample(5)
    for x, t in network.times:
        torch.testing.assert_close(t, ((x == 3).sum(1).double() / 3).clamp(0.1, 0.95))


def test_the_fit_costs_its_samples_and_a_look():
    network = Network()
    model = cd.models.Denoiser(network, (2,), dtype=torch.float64)
    chain = cd.ReplicaExchange(model**1.5, ladder(2), n_chains=3, fit_samples=50)
    steps = 2 * M + 1
    assert network.rows == 2 + 50 * steps + 3 * steps == chain.evaluate.counts.rows


def test_finishing_costs_a_row_a_step_and_chain():
    network = Network()
    steps = cd.ladder.karras(M + 1, 0.1, 10.0, n_finish=3)
    chain = cd.ReplicaExchange(network.model() ** 1.5, steps, n_chains=4)
    assert spent([network], lambda: chain.sample(2, burn_in=3)) == [(5 * 4 * (M + 1) + 2 * 4 * 3, 5 + 2 * 3)]


@pytest.mark.parametrize("guidance", ["none", "gradient", "jacobian-free"])
def test_rewards_and_gradients_are_counted_where_they_are_used(guidance):
    seen = {"rows": 0}

    def reward(x):
        seen["rows"] += len(x)
        return x[:, 0]

    network = Network()
    chain = cd.ReplicaExchange(network.model().tilt(reward, guidance=guidance), ladder(3), n_chains=2)
    before, seen["rows"] = chain.evaluate.counts.copy(), 0
    chain.step()
    counts, rows = chain.evaluate.counts, 2 * (M + 1)
    assert counts.rows - before.rows == 3 * rows
    # A black-box reward is called only at the ends of a walk and at the three lower levels, where it matters, a guiding
    # one at every sub-step.
    called = chain.target.rewards[0].called_at(chain.ladder)
    assert called.tolist() == [guidance != "none" or m < 3 for m in range(M + 1)]
    assert counts.rewards - before.rewards == seen["rows"] == (2 * 3 if guidance == "none" else 3 * rows)
    assert counts.gradient_rows - before.gradient_rows == (3 * rows if guidance == "gradient" else 0)


# -- the others ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(
    ("weight", "reward"),
    [
        (cd.PathWork(), False),
        (cd.PathWork(), True),
        (cd.FeynmanKac(), False),
        (cd.FeynmanKac(), True),
        (cd.Twisted(), True),
    ],
    ids=str,
)
def test_smc_costs_a_row_a_step_and_particle(weight, reward, k):
    network = Network()
    target = network.model() if isinstance(weight, cd.Twisted) else network.model() ** 1.5
    if reward:
        target = target.tilt(lambda x: x[:, 0], guidance="gradient")
    smc = cd.SMC(target, ladder(k), n_particles=5, n_batches=2, weight=weight)
    assert network.rows == 0
    particles = smc.sample()
    per_particle = 2 * M * k + 1 if isinstance(weight, cd.FeynmanKac) and reward else M * k + 1
    assert (network.rows, network.calls) == (10 * per_particle, per_particle)
    assert particles.evaluations.rows == network.rows


def test_plain_guidance_costs_a_row_a_step():
    network = Network()
    cd.Plain(network.model() ** 1.5, ladder(3)).sample(7)
    assert (network.rows, network.calls) == (7 * 3 * M, 3 * M)


# -- no stale seen -------------------------------------------------------------------------------------------


def check_fresh(chain):
    """What each replica remembers of its point is what an evaluation would say now."""
    state = chain.state
    fresh = chain.evaluate(state.x, chain.ladder.levels[state.level.flatten()])
    for old, new in zip((*state.seen.predictions, state.seen.drift), (*fresh.predictions, fresh.drift), strict=True):
        torch.testing.assert_close(old, new, atol=1e-12, rtol=0)
    torch.testing.assert_close(state.seen.reward, fresh.reward, atol=1e-12, rtol=0)


def reward(x):
    return x[:, 0] - x[:, 1] ** 2


TARGETS = {
    "tempered": DATA**1.5,
    "tilted": DATA.tilt(reward),
    "guided by gradient": DATA.tilt(reward, guidance="gradient"),
    "guided without jacobian": DATA.tilt(reward, guidance="jacobian-free", on="state"),
}


@pytest.mark.parametrize("explorer", [None, cd.Bounce(), cd.Bounce(2), cd.Langevin()], ids=repr)
@pytest.mark.parametrize("target", TARGETS)
def test_no_view_is_stale(target, explorer):
    if isinstance(explorer, cd.Langevin) and target == "tilted":
        pytest.skip("Langevin needs the gradient")
    chain = cd.ReplicaExchange(TARGETS[target], ladder(2), n_chains=3, process=PROCESS, explorer=explorer, seed=1)
    check_fresh(chain)
    for _ in range(6):
        chain.step()
        check_fresh(chain)
    chain.target = (DATA**1.3).tilt(reward, guidance="gradient", scale=2.0)
    check_fresh(chain)
    chain.sample(4)
    chain.adapt()
    check_fresh(chain)
    chain.step()
    check_fresh(chain)
    chain.state = replace(chain.state, x=chain.state.x.roll(1, 0))
    refuted(check_fresh, chain)


@pytest.mark.parametrize("explorer", [None, cd.Bounce(), cd.SingleToken(2)], ids=repr)
@pytest.mark.parametrize("kind", ["masked", "uniform"])
def test_no_view_of_tokens_is_stale(kind, explorer):
    table = f64([[0.4, 0.05, 0.1], [0.1, 0.05, 0.05], [0.05, 0.15, 0.05]])
    model = cd.models.TokenTable(table, kind)
    steps = cd.ladder.linear(5, 0.05, 0.95, substeps=2)
    target = (model**1.5).tilt(lambda p: p[:, 0, 0] - 2 * p[:, 1, 2])
    chain = cd.ReplicaExchange(target, steps, n_chains=4, explorer=explorer)
    check_fresh(chain)
    for _ in range(10):
        chain.step()
        check_fresh(chain)


def test_a_step_does_not_change_what_was_handed_out_before():
    """States and draws are values: later iterations do not write into them."""
    chain = cd.ReplicaExchange(DATA**1.5, ladder(2), n_chains=3, process=PROCESS, explorer=cd.Bounce())
    kept = []
    for _ in range(8):
        info = chain.step()
        tensors = (
            chain.output(),
            chain.state.x,
            chain.state.seen.drift,
            *chain.state.seen.predictions,
            info.swaps.log_work,
        )
        kept.append((tensors, [z.clone() for z in tensors]))
    for tensors, copies in kept:
        for z, copy in zip(tensors, copies, strict=True):
            torch.testing.assert_close(z, copy, atol=0, rtol=0, equal_nan=True)


BOUNCED = {
    "Gaussian": (lambda reward: DATA.tilt(reward, negligible=0.0), PROCESS, lambda: ladder(2)),
    "turns": (
        lambda reward: Tokens().model().tilt(reward, on="state", negligible=0.0),
        Masked(3, at_once=1),
        lambda: cd.ladder.linear(M + 1, 0.1, 0.9, substeps=2),
    ),
    "at once": (
        lambda reward: Tokens().model().tilt(reward, on="state", negligible=0.0),
        Masked(3, at_once=None),
        lambda: cd.ladder.linear(M + 1, 0.1, 0.9, substeps=2),
    ),
}


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("name", BOUNCED)
def test_a_bounce_evaluates_rewards_where_it_ends_and_not_where_it_turns(name, kept, monkeypatch):
    if not kept:
        monkeypatch.setattr("crepe_diffusion.processes.discrete.MOST_KEPT", 0)
    target, process, steps = BOUNCED[name]
    rows = []

    def reward(x):
        rows.append(len(x))
        return x.double().flatten(1).sum(1)

    options = {"process": process, "n_chains": 2, "explorer": cd.Bounce(2)}
    chain = cd.ReplicaExchange(target(reward), steps(), **options)
    rows.clear()
    chain.step()
    assert sum(rows) == 2 * 2 * (M + 1), "after the swap and after the bounce"
