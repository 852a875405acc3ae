"""Discrete diffusions against brute force: posteriors by Bayes' rule over all clean sequences, kernels by their sums.

p_t(x) = sum_{x_0} p(x_0) prod_i q_t(x^i | x_0^i),   q_t(x | x_0) = a [x = x_0] + (1 - a) (mask, or 1 / V)
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import crepe_diffusion as cd
from checks import assert_frequencies, f64, refuted
from crepe_diffusion.errors import InputError
from crepe_diffusion.evaluate import Evaluator
from crepe_diffusion.kernels import State
from crepe_diffusion.paths import log_work, walk
from crepe_diffusion.processes import Coefficients, Euler, Evaluation, Masked, Uniform
from crepe_diffusion.processes.discrete import changed_position
from crepe_diffusion.random import Stream

STREAM = Stream(5)
V = 3
KINDS = ("masked", "uniform")
PLAIN = Coefficients((1.0,), (1.0,), k_up=0.0, k_down=1.0)
JOINT = STREAM.at("joint").uniform((1, V, V, V))[0] ** 3  # far from independent
SINGLE = [f64([0.2, 0.7, 0.1]), f64([0.55, 0.05, 0.4]), f64([0.3, 0.3, 0.4])]
PRODUCT = torch.einsum("i,j,k->ijk", *SINGLE)


def table(p, kind, prompt=None):
    return cd.models.TokenTable(p, kind, prompt=prompt)


def times(value: float, n: int) -> torch.Tensor:
    return torch.full((n,), value, dtype=torch.float64)


def q(kind: str, x: int, x_0: int, t: float) -> float:
    """One position, from the definition."""
    if kind == "masked":
        return (1 - t) * (x == x_0) + t * (x == V)
    return (1 - t) * (x == x_0) + t / V


def joint(p, kind, x, t, prompt=(-1, -1, -1)):
    """p(x_0) q_t(x | x_0) for every x_0, one after the other."""
    out = {}
    for x_0 in itertools.product(range(V), repeat=p.ndim):
        weight = float(p[x_0] / p.sum())
        for i in range(p.ndim):
            weight *= q(kind, x[i], x_0[i], t) if prompt[i] < 0 else float(x[i] == x_0[i])
        out[x_0] = weight
    return out


def reachable(model, t):
    """All states of positive probability at t."""
    x = model.all_states()
    return x[model.log_prob(x, t) > -math.inf]


# -- the table against Bayes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [(-1, -1, -1), (-1, 2, -1)], ids=["free", "prompted"])
@pytest.mark.parametrize("t", [0.0, 0.3, 0.85, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_marginals_and_posteriors_of_a_table_are_those_of_bayes(kind, t, prompt):
    model = table(JOINT, kind, torch.tensor(prompt))
    x = reachable(model, t)
    log_prob, predicted = model.log_prob(x, t), model.predict(x, times(t, len(x))).exp()

    def check(p):
        for row, state in enumerate(x.tolist()):
            weights = joint(p, kind, state, t, prompt)
            total = sum(weights.values())
            assert float(log_prob[row].exp()) == pytest.approx(total, rel=1e-12)
            for i, v in itertools.product(range(3), range(V)):
                marginal = sum(w for x_0, w in weights.items() if x_0[i] == v) / total
                assert float(predicted[row, i, v]) == pytest.approx(marginal, abs=1e-12)

    check(JOINT)
    refuted(check, JOINT.transpose(0, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_marginals_sum_to_one_at_every_time(kind):
    model = table(JOINT, kind)
    x = model.all_states()
    for t in (0.0, 0.2, 0.7, 1.0):
        assert float(model.log_prob(x, t).exp().sum()) == pytest.approx(1.0, abs=1e-12)


# -- kernels -------------------------------------------------------------------------------------------------

PROCESSES = {
    "masked": Masked(V),
    "uniform": Uniform(V),
    "euler masked": Euler(base=Masked(V)),
    "euler uniform": Euler(base=Uniform(V)),
}


def one_position(kind, t):
    """Every state of a single position, with the true prediction there."""
    model = table(SINGLE[1], kind.split()[-1])
    x = model.all_states()
    log_p = model.predict(x, times(t, len(x)))
    process = PROCESSES[kind]
    return model, x, process.drift(x, times(t, len(x)), (log_p,), None, PLAIN)


@pytest.mark.parametrize("kind", PROCESSES)
def test_kernels_are_normalised(kind):
    s, t = 0.3, 0.55
    _, x, log_p = one_position(kind, t)
    process = PROCESSES[kind]
    for log_k in (
        process.noising(x, times(s, len(x)), times(t, len(x))),
        process.denoising(x, log_p, times(s, len(x)), times(t, len(x))),
    ):
        torch.testing.assert_close(log_k.exp().sum(-1), torch.ones_like(log_k[..., 0]), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_noising_composes_and_reaches_the_marginal(kind):
    """F(s -> t) F(t -> u) = F(s -> u), and q_s F = q_t."""
    process, model = PROCESSES[kind], table(SINGLE[1], kind)
    x = model.all_states()

    def kernel(s, t):
        return process.noising(x, times(s, len(x)), times(t, len(x)))[:, 0].exp()

    torch.testing.assert_close(kernel(0.1, 0.4) @ kernel(0.4, 0.8), kernel(0.1, 0.8), atol=1e-14, rtol=0)
    torch.testing.assert_close(model.log_prob(x, 0.1).exp() @ kernel(0.1, 0.8), model.log_prob(x, 0.8).exp())


@pytest.mark.parametrize("kind", KINDS)
def test_denoising_of_one_position_reverses_noising_exactly(kind):
    """B(x_s | x_t) p_t(x_t) = F(x_t | x_s) p_s(x_s), the definition of the reverse kernel."""
    s, t, process = 0.25, 0.8, PROCESSES[kind]

    def check(t_used):
        model, x, log_p = one_position(kind, t_used)
        at = times(s, len(x)), times(t, len(x))
        down = process.denoising(x, log_p, *at)[:, 0].exp() * model.log_prob(x, t).exp()[:, None]
        up = process.noising(x, *at)[:, 0].exp() * model.log_prob(x, s).exp()[:, None]
        torch.testing.assert_close(down, up.T, atol=1e-14, rtol=0)

    check(t)
    if kind == "uniform":  # where the prediction of a position depends on time
        refuted(check, 0.7)


def pairs_of_states(model, s, t):
    """All pairs that one noising step can join."""
    clean, noisy = reachable(model, s), reachable(model, t)
    i, j = (g.flatten() for g in torch.meshgrid(torch.arange(len(clean)), torch.arange(len(noisy)), indexing="ij"))
    x_s, x_t = clean[i], noisy[j]
    log_f = model.process().noising(x_s, times(s, len(i)), times(t, len(i)))
    possible = log_f.gather(-1, x_t[..., None]).sum((1, 2)) > -math.inf
    return x_s[possible], x_t[possible]


def check_ratio(model, s, t, chosen=None):
    x_s, x_t = pairs_of_states(model, s, t)
    if chosen is not None:
        keep = chosen(x_s, x_t)
        x_s, x_t = x_s[keep], x_t[keep]
    n, process = len(x_s), model.process()
    log_p = model.predict(x_t, times(t, n))
    at_t = Evaluation((log_p,), process.drift(x_t, times(t, n), (log_p,), None, PLAIN), torch.zeros(n))
    found, proposal = process.log_ratios(x_s, x_t, at_t, at_t, times(s, n), times(t, n), PLAIN)
    truth = model.log_prob(x_s, s) - model.log_prob(x_t, t)
    torch.testing.assert_close(found[0], truth, atol=1e-12, rtol=0)
    torch.testing.assert_close(proposal, truth, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("s", "t"), [(0.0, 0.4), (0.2, 0.3), (0.35, 0.95), (0.5, 1.0)])
@pytest.mark.parametrize("kind", KINDS)
def test_log_ratios_are_exact_for_one_and_for_independent_positions(kind, s, t):
    check_ratio(table(SINGLE[0], kind), s, t)
    check_ratio(table(PRODUCT, kind), s, t)
    refuted(check_ratio, table(JOINT, kind), s, t)


def test_masked_log_ratios_are_exact_while_at_most_one_position_is_revealed():
    """However dependent the positions are: only several revealed at once are an approximation."""

    def at_most(n):
        return lambda x_s, x_t: (x_s != x_t).sum(1) <= n

    check_ratio(table(JOINT, "masked"), 0.3, 0.6, at_most(1))
    refuted(check_ratio, table(JOINT, "masked"), 0.3, 0.6, at_most(2))


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_positions_are_clean_at_every_time_and_do_not_count_in_ratios(kind):
    def prompted(x_s, x_t):
        return (x_s[:, 1] == 2) & (x_t[:, 1] == 2)

    check_ratio(table(PRODUCT, kind, torch.tensor([-1, 2, -1])), 0.2, 0.7, prompted)
    refuted(check_ratio, table(JOINT, kind, torch.tensor([-1, 2, -1])), 0.2, 0.7, prompted)


# -- concrete scores -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_concrete_scores_are_ratios_of_marginals(kind):
    """log p_t(x with position i set to v) - log p_t(x), for each v that one denoising jump can reach."""
    model, t = table(JOINT, kind), 0.45
    process, x = model.process(), reachable(model, t)

    def check(t_used):
        score = process.log_concrete(x, model.predict(x, times(t, len(x))), times(t_used, len(x)))
        seen = 0
        for i, v in itertools.product(range(3), range(V)):
            y = x.clone()
            y[:, i] = v
            truth = model.log_prob(y, t) - model.log_prob(x, t)
            may = (x[:, i] == V) if kind == "masked" else (x[:, i] != v)
            torch.testing.assert_close(score[may, i, v], truth[may], atol=1e-12, rtol=0)
            assert (score[~may, i, v] == -math.inf).all()
            seen += int(may.sum())
        assert seen > 50

    check(t)
    refuted(check, 0.46)


@pytest.mark.parametrize("kind", KINDS)
def test_local_moves_have_the_ratio_of_densities_and_of_their_own_probabilities(kind):
    model, t, n = table(JOINT, kind), 0.45, 4000
    process = model.process()
    states = reachable(model, t)
    x = states[torch.arange(n) % len(states)]

    def at(y):
        log_p = model.predict(y, times(t, n))
        return Evaluation((log_p,), process.drift(y, times(t, n), (log_p,), None, LAW), torch.zeros(n))

    def log_q(x, y, drift):
        """Probability of the move itself: a position, then mask it, reveal it, or take another token."""
        i = (x != y).int().argmax(1)
        here, new = (z.gather(1, i[:, None])[:, 0] for z in (x, y))
        if kind == "uniform":
            return torch.full((n,), -math.log(3 * (V - 1)), dtype=torch.float64)
        revealed = drift[torch.arange(n), i, new.clamp(max=V - 1)]
        return torch.where(here == V, revealed, 0.0) - math.log(3)

    y = process.local_move(x, at(x).drift, STREAM.at("move"))
    assert ((x != y).sum(1) == 1).all()
    models, proposal = (
        process.log_density_ratios(x, y, at(x), at(y), times(t, n)),
        process.local_log_q(x, y, at(x), at(y)),
    )
    assert (process.log_density_ratios(x, x, at(x), at(x), times(t, n)) == 0).all()
    with pytest.raises(InputError, match="one position at most, got"):
        process.log_density_ratios(x, x.flip(0), at(x), at(x.flip(0)), times(t, n))
    torch.testing.assert_close(models[0], model.log_prob(y, t) - model.log_prob(x, t), atol=1e-12, rtol=0)
    expected = log_q(x, y, at(x).drift) - log_q(y, x, at(y).drift)
    torch.testing.assert_close(proposal, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_local_moves_are_drawn_with_those_probabilities(kind):
    model, t, n = table(JOINT, kind), 0.45, 20_000
    process, start = model.process(), torch.tensor([[V, 1, 0]] if kind == "masked" else [[2, 1, 0]])
    drift = process.drift(start, times(t, 1), (model.predict(start, times(t, 1)),), None, LAW)
    y = process.local_move(start.expand(n, -1), drift.expand(n, -1, -1), STREAM.at("drawn"))
    position = (y != start).int().argmax(1)
    assert_frequencies(position, torch.full((3,), 1 / 3))
    moved = y[position == 0, 0]
    expected = torch.cat([drift[0, 0].exp(), torch.zeros(1)]) if kind == "masked" else f64([0.5, 0.5, 0])
    assert_frequencies(moved, expected)
    refuted(assert_frequencies, moved, expected.roll(1))


# -- Euler kernels -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [0.5, 1.0])
def test_masked_euler_kernels_are_the_closed_form_up_to_their_floor(t):
    """With survival linear in t, rates times the step are the exact probabilities, also from where nothing survives."""
    s = 0.3
    _, x, log_p = one_position("masked", t)
    _, _, score = one_position("euler masked", t)
    at = times(s, len(x)), times(t, len(x))
    exact, euler = PROCESSES["masked"], PROCESSES["euler masked"]
    assert torch.equal(euler.log_concrete(x, log_p, at[1]), exact.log_concrete(x, log_p, at[1]))
    torch.testing.assert_close(exact.noising(x, *at).exp(), euler.noising(x, *at).exp(), atol=1e-7, rtol=0)
    torch.testing.assert_close(
        exact.denoising(x, log_p, *at).exp(), euler.denoising(x, score, *at).exp(), atol=1e-6, rtol=0
    )


def test_uniform_euler_kernels_err_by_the_square_of_the_step():
    """A method of first order: the measured order of one step's error is two."""
    t = 0.5
    _, x, log_p = one_position("uniform", t)
    _, _, score = one_position("euler uniform", t)
    exact, euler = PROCESSES["uniform"], PROCESSES["euler uniform"]
    errors = {"up": [], "down": []}
    for step in (0.02, 0.01):
        at = times(t - step, len(x)), times(t, len(x))
        errors["up"].append((exact.noising(x, *at).exp() - euler.noising(x, *at).exp()).abs().max())
        down = exact.denoising(x, log_p, *at).exp() - euler.denoising(x, score, *at).exp()
        errors["down"].append(down.abs().max())
    # Noising is frozen at its start, where the rate of a linear survival is exact.
    assert errors["up"][0] < 1e-7
    assert 1.8 < math.log2(errors["down"][0] / errors["down"][1]) < 2.2


# -- walks ---------------------------------------------------------------------------------------------------

LAW = Coefficients((0.8,), (0.7,), k_up=0.0, k_down=1.0)


@pytest.mark.parametrize("rises", [True, False], ids=["up", "down"])
@pytest.mark.parametrize("kind", PROCESSES)
def test_walks_are_drawn_from_the_kernels(kind, rises):
    """All positions jointly: independent draws from the rows of F or B of the proposal."""
    process, n, s, t = PROCESSES[kind], 20_000, 0.3, 0.6
    model = table(JOINT, kind.split()[-1])
    x = torch.tensor([[1, V, V]] if "masked" in kind else [[1, 0, 2]])
    drift = process.drift(x, times(t, 1), (model.predict(x, times(t, 1)),), None, LAW)
    at_x = Evaluation((), drift.expand(n, -1, -1), torch.zeros(n))
    drawn = process.step(x.expand(n, -1), at_x, times(s, n), times(t, n), torch.full((n,), rises), STREAM.at("w"), LAW)
    at = times(s, 1), times(t, 1)
    rows = (process.noising(x, *at) if rises else process.denoising(x, drift, *at))[0].exp()
    flat = (drawn * process.n_states ** torch.arange(3)).sum(1)
    expected = torch.einsum("i,j,k->kji", *rows).flatten()
    # Categories too rare for a chi-square (and Euler's floor of 1e-8) are gathered in one.
    rare = expected < 2.5e-4
    index = torch.cumsum(~rare, 0) * ~rare
    gathered = torch.zeros(int(index.max()) + 1, dtype=torch.float64).index_add(0, index, expected)

    def check(p):
        assert_frequencies(index[flat], p)

    check(gathered)
    refuted(check, gathered.flip(0))


def test_the_proposal_draws_tokens_from_the_normalised_product():
    p, other = table(JOINT, "masked"), table(PRODUCT, "masked")
    x, t = torch.tensor([[V, 0, V]]), times(0.5, 1)
    a, b = p.predict(x, t), other.predict(x, t)
    drift = Masked(V).drift(x, t, (a, b), None, Coefficients((1.0, 1.0), (-0.5, 1.5), 0.0, 1.0))
    expected = a.exp() ** -0.5 * b.exp() ** 1.5
    torch.testing.assert_close(drift[0, 0].exp(), (expected / expected.sum(-1, keepdim=True))[0, 0])


def test_a_token_that_a_model_excludes_stays_excluded():
    a, b = f64([[[0.5, 0.5, 0.0]]]).log(), f64([[[0.0, 0.3, 0.7]]]).log()
    drift = Masked(V).drift(
        torch.tensor([[V]]), times(0.5, 1), (a, b), None, Coefficients((1.0, 1.0), (1.0, 2.0), 0.0, 1.0)
    )
    assert drift.exp().tolist() == [[[0.0, 1.0, 0.0]]]


def test_rewards_see_known_tokens_as_certain_and_others_as_the_combined_prediction():
    p, other = table(JOINT, "masked"), table(PRODUCT, "masked")
    x, t, coefficients = torch.tensor([[V, 1, V]]), times(0.5, 1), Coefficients((3.0, -1.0), (1.0, 0.0), 0.0, 1.0)
    a, b = p.predict(x, t), other.predict(x, t)
    seen = Masked(V).expectation(x, t, (a, b), coefficients)
    assert seen[0, 1].tolist() == [0.0, 1.0, 0.0]
    mixed = a.exp() ** 1.5 * b.exp() ** -0.5
    torch.testing.assert_close(seen[0, [0, 2]], (mixed / mixed.sum(-1, keepdim=True))[0, [0, 2]])


def test_a_token_that_only_a_model_of_negative_exponent_excludes_is_not_excluded():
    """`p^(1-w) q^w` grows without bound where p vanishes and q does not; it vanishes where q does."""
    p, q = f64([[[0.0, 0.6, 0.4]]]).log(), f64([[[0.3, 0.7, 0.0]]]).log()
    x, t, coefficients = torch.tensor([[V]]), times(0.5, 1), Coefficients((-1.0, 2.0), (-0.5, 1.5), 0.0, 1.0)

    def check(drift, seen):
        assert drift.exp().tolist() == [[[1.0, 0.0, 0.0]]]
        assert drift.isinf().tolist() == [[[False, False, True]]]
        assert seen.tolist() == [[[1.0, 0.0, 0.0]]]

    process = Masked(V)
    check(process.drift(x, t, (p, q), None, coefficients), process.expectation(x, t, (p, q), coefficients))
    neither = f64([[[0.0, 0.7, 0.3]]]).log()  # excluded by both: the positive exponent decides
    drift = process.drift(x, t, (p, neither), None, coefficients)
    assert drift.isinf().tolist() == [[[True, False, False]]]
    expected = p[..., 1:].exp() ** -0.5 * neither[..., 1:].exp() ** 1.5
    torch.testing.assert_close(drift[..., 1:].exp(), expected / expected.sum())


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_see_the_prompt_as_certain_whatever_the_model_predicts_there(kind):
    """A network need not repeat its prompt; a reward on the prediction sees the prompt's own token."""
    prompt, shown = torch.tensor([-1, 2, -1]), []
    flat = cd.models.TokenModel(
        lambda x, t: f64([0.5, 0.3, 0.2]).log().expand(*x.shape, V), (3,), V, kind, prompt=prompt, dtype=torch.float64
    )

    def reward(seen):
        shown.append(seen)
        return seen[:, 1, 2]

    run = cd.ReplicaExchange(flat.tilt(reward), cd.ladder.linear(4, 0.1, 0.9), n_chains=4)
    run.sample(3)
    for seen in shown:
        assert (seen[:, 1] == f64([0.0, 0.0, 1.0])).all()
    free = torch.cat(shown)[:, [0, 2]]
    assert ((free - f64([0.5, 0.3, 0.2])).abs() < 1e-12).all(-1).any()


# -- the law of a chain on steep tables ----------------------------------------------------------------------


def steep(kind: str, vocab: int, length: int, task: str):
    """A target whose single-token ratios reach several hundred."""
    shape = (1, *(vocab,) * length)
    p, q = (table(STREAM.at("steep", i).uniform(shape)[0] ** 3 + 1e-3, kind) for i in range(2))
    return cd.guided(q, p, 2.0) if task == "guidance" else p**2.0


def draws(log_pi, n: int, *names) -> torch.Tensor:
    """Indices from unnormalised log-probabilities, without a row of them for each."""
    p = torch.softmax(log_pi, 0).cumsum(0)
    return torch.searchsorted(p, STREAM.at(*names).uniform((n,)), right=True).clamp(max=len(p) - 1)


def exact_state(chain: cd.ReplicaExchange, n: int) -> State:
    """Replicas drawn from the known law of each level."""
    target, times = chain.target, chain.ladder.levels
    states = target.models[0].all_states()
    x = []
    for m, t in enumerate(times.tolist()):
        log_pi = sum(c * model.log_prob(states, t).clamp(min=-1e4) for model, c in target.factors)
        x.append(states[draws(log_pi, n, "exact", m)])
    x = torch.stack(x, dim=1).flatten(0, 1)
    level = torch.arange(len(times)).expand(n, -1).clone()
    return State(x, chain.evaluate(x, times.repeat(n)), level)


def distance_from_the_law(target, levels, process, explorer=None, n=1000, iterations=6) -> tuple[float, float]:
    """TV of the data end after a few iterations of chains that begin in their law, and the most of 100 such samples."""
    chain = cd.ReplicaExchange(target, levels, n_chains=n, process=process, explorer=explorer)
    chain.state = exact_state(chain, n)
    for _ in range(iterations):
        chain.step()
    model = target.models[0]
    index = (chain.output() * model.vocab_size ** torch.arange(model.length - 1, -1, -1)).sum(1)
    log_pi = sum(c * m.log_prob(model.states) for m, c in target.factors)
    truth = torch.softmax(log_pi, 0)

    def distance(drawn):
        return float((torch.bincount(drawn, minlength=len(truth)) / n - truth).abs().sum() / 2)

    floor = [distance(draws(log_pi, n, "floor", i)) for i in range(100)]
    return distance(index), max(floor)


@pytest.mark.parametrize("n_levels", [3, 5, 9])
@pytest.mark.parametrize("task", ["guidance", "tempering"])
@pytest.mark.parametrize(("vocab", "length"), [(3, 4), (2, 6)])
def test_chains_keep_the_law_of_steep_tables_one_by_one(vocab, length, task, n_levels):
    """Chains that begin in their law are as close to it as independent draws; false alarms: 1 % of the cases."""

    def check(at_once):
        distance, floor = distance_from_the_law(
            steep("masked", vocab, length, task), cd.ladder.linear(n_levels), Masked(vocab, at_once=at_once)
        )
        assert distance <= floor

    check(1)
    if n_levels == 3:  # with more levels the bias is there, but takes more iterations to show
        refuted(check, None)


@pytest.mark.parametrize("task", ["guidance", "tempering"])
def test_chains_keep_the_law_of_steep_tables_of_the_uniform_process(task):
    def check(at_once):
        process = Uniform(3, at_once=at_once)
        distance, floor = distance_from_the_law(steep("uniform", 3, 4, task), cd.ladder.linear(3), process)
        assert distance <= floor

    check(1)
    refuted(check, None)


def test_densities_of_the_uniform_process_change_with_time_as_its_predictions_say():
    """`d log p_t(x)` from the marginal posteriors, though the positions are far from independent."""
    model, h = table(JOINT, "uniform"), 1e-4
    x, process = model.all_states(), model.process()

    def check(t_used, t=0.37):
        n = len(x)
        log_odds, log_kept = (torch.log(f(f64(t + h)) / f(f64(t - h))) / (2 * h) for f in (process.odds, process.kept))
        replaced = process.n_replaced(x, model.predict(x, times(t_used, n)), process.free(x))
        slope = 3 * log_kept + replaced * log_odds
        difference = (model.log_prob(x, t + h) - model.log_prob(x, t - h)) / (2 * h)
        torch.testing.assert_close(slope, difference, atol=1e-5, rtol=0)

    check(0.37)
    refuted(check, 0.38)


def test_prompts_stay_out_of_the_way_between_the_ends_of_a_uniform_step():
    prompt = torch.tensor([-1, 2, -1])
    model = table(JOINT, "uniform", prompt)
    evaluate = cd.ReplicaExchange(model, cd.ladder.linear(2), process=Uniform(V, prompt, at_once=1, nodes=30)).evaluate
    x = evaluate.noise(STREAM.at("top"), 50)
    start = evaluate(x, times(1.0, 50))
    index, down = torch.ones(50, dtype=torch.long), -torch.ones(50, dtype=torch.long)

    def check(n_nodes):
        evaluate.process = Uniform(V, prompt, at_once=1, nodes=n_nodes)
        path = walk(evaluate, x, start, index, down, 1, STREAM.at("down"))
        truth = model.log_prob(path.x, 0.0) - model.log_prob(x, 1.0)
        torch.testing.assert_close(path.models[0], truth, atol=1e-9, rtol=0)

    check(30)
    refuted(check, 2)


# -- walks in turn: what may go wrong on the way ---------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_between_the_ends_that_is_not_finite_spoils_its_walk_and_no_other(kind):
    """The model fails where the first token is 0 and the others are still masked (or 1)."""
    exact = table(JOINT, kind)

    def predict(x, t):
        other = V if kind == "masked" else 1
        bad = (x[:, 0] == 0) & (x[:, 1:] == other).all(1)
        return exact.predict(x, t).where(~bad[:, None, None], math.nan)

    model = cd.models.TokenModel(predict, (3,), V, kind, dtype=torch.float64)
    n, top = 400, torch.full((3,), V) if kind == "masked" else torch.tensor([1, 1, 1])

    def descend(model, stream):
        chain = cd.ReplicaExchange(exact**1.3, cd.ladder.linear(2), nonfinite="reject")
        evaluate = Evaluator(model**1.3, chain.ladder, exact.process(), cd.Proposal(), nonfinite="reject")
        x = top.expand(n, -1).clone()
        index, down = torch.ones(n, dtype=torch.long), -torch.ones(n, dtype=torch.long)
        return walk(evaluate, x, evaluate(x, times(1.0, n)), index, down, 1, stream), evaluate

    whole, _ = descend(exact, STREAM.at("d"))
    broken, evaluate = descend(model, STREAM.at("d"))
    spoiled = log_work(broken, evaluate.coefficients).isnan()
    assert 0 < int(spoiled.sum()) < n / 2
    met = sum(evaluate.counts.nonfinite.values())  # a walk of the uniform process may meet such a state several times
    assert met == spoiled.sum() if kind == "masked" else met > spoiled.sum()
    works = (log_work(path, evaluate.coefficients)[~spoiled] for path in (whole, broken))
    torch.testing.assert_close(*works)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on", ["prediction", "state", "mode"])
def test_chains_of_tokens_go_on_bit_for_bit_whatever_their_reward_sees(kind, on):
    def reward(seen):
        return (seen[..., 0] if on == "prediction" else (seen == 0)).double().sum(-1)

    target = cd.guided(table(JOINT, kind), table(PRODUCT, kind), 1.5).tilt(reward, on=on)
    options = {"n_chains": 3, "explorer": cd.Bounce(), "micro_batch": 5}
    chain = cd.ReplicaExchange(target, cd.ladder.linear(3, substeps=2), **options)
    chain.sample(2)
    again = cd.ReplicaExchange(target, chain.ladder, start=chain.snapshot(), **options)
    for _ in range(2):
        here, there = chain.step(), again.step()
        assert torch.equal(here.swaps.log_work.nan_to_num(), there.swaps.log_work.nan_to_num())
    assert torch.equal(chain.state.x, again.state.x)
    assert chain.evaluate.counts == again.evaluate.counts
    # What a row remembers is what its point has: nothing is out of date after rows that were not evaluated.
    seen = chain.evaluate(chain.state.x, chain.ladder.levels[chain.state.level.flatten()])
    torch.testing.assert_close(chain.state.seen.reward, seen.reward)
    torch.testing.assert_close(chain.state.seen.predictions, seen.predictions)


@pytest.mark.parametrize("process", [Masked, Uniform])
def test_summary_and_verdict_name_ratios_that_multiply_dependent_tokens(process):
    def named(process, start=None):
        kind = "masked" if isinstance(process, Masked) else "uniform"
        chain = cd.ReplicaExchange(table(JOINT, kind) ** 1.5, cd.ladder.linear(3), process=process, start=start)
        out = chain.sample(3)
        assert ("log-work" in chain.diagnostics.summary()) == any("tokens" in r for r in out.verdict().reasons)
        return "log-work" in chain.diagnostics.summary(), chain.snapshot()

    assert not named(process(V))[0]
    assert not named(process(V, torch.tensor([0, -1, 1]), at_once=None))[0]  # one free position
    found, snapshot = named(process(V, at_once=2))
    assert found
    assert named(process(V, at_once=2), snapshot)[0]


def test_the_default_changes_one_token_at_a_time_up_to_128_of_them():
    assert not Masked(V).multiplies(torch.Size((128,)))
    assert Masked(V).multiplies(torch.Size((129,)))
    assert [Euler(base=Masked(V)).multiplies(torch.Size((n,))) for n in (1, 2)] == [False, True]
    x, n = torch.full((1, 1000), V), 1
    turns = Masked(V).turns(x, times(0.0, n), times(1.0, n), torch.zeros(n, dtype=torch.bool), STREAM.at("long"))
    assert turns[0].bincount().tolist() == [0] + [8] * 125


# -- prompts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("explorer", [None, cd.Bounce(), cd.SingleToken(2)], ids=repr)
def test_prompt_positions_never_change(kind, explorer):
    levels = cd.ladder.linear(5, 0.02, 1.0 if kind == "masked" else 0.98)

    def check(prompt):
        chain = cd.ReplicaExchange(table(JOINT, kind, prompt) ** 1.4, levels, n_chains=4, explorer=explorer)
        for _ in range(20):
            chain.step()
            assert (chain.state.x[:, 1] == 2).all()
        assert chain.state.x[:, 0].unique().numel() > 1
        particles = cd.SMC(table(JOINT, kind, prompt) ** 1.4, levels, n_particles=16).sample()
        assert (particles.x[:, 1] == 2).all()

    check(torch.tensor([-1, 2, -1]))
    refuted(check, None)


def test_jumps_below_the_noise_end_are_part_of_the_uniform_ratio():
    """At the noise end all states are equally probable, so that a step from there hides what jumps contribute."""
    model = table(JOINT, "uniform")
    process = Uniform(V, at_once=1, nodes=30)
    evaluate = cd.ReplicaExchange(model, cd.ladder.linear(3, 0.2), process=process).evaluate
    x = evaluate.noise(STREAM.at("jumps"), 50)
    n, (s, t) = len(x), (float(v) for v in evaluate.times[:2])
    index, down = torch.ones(n, dtype=torch.long), -torch.ones(n, dtype=torch.long)
    path = walk(evaluate, x, evaluate(x, times(t, n)), index, down, 1, STREAM.at("walk"))
    several = (path.x != x).sum(1) > 1
    assert several.any()
    expected = model.log_prob(path.x, s) - model.log_prob(x, t)
    torch.testing.assert_close(path.models[0], expected, atol=1e-9, rtol=0)
    # Without the jumps only time would pass, at the state where the walk ended.
    still = model.log_prob(path.x, s) - model.log_prob(path.x, t)
    assert (still - expected)[several].abs().min() > 1e-3


def test_probabilities_are_summed_where_a_token_is_not_known():
    """A position that is masked and free, whatever the models say of the others; 1 if there is none."""
    process = Masked(3, torch.tensor([-1, 2, -1]))
    log_p = torch.zeros(2, 3, 3, dtype=torch.float64)  # sums of three
    log_p[1, 2] = f64([0.5, 0.2, 0.1]).log()
    known = torch.tensor([[0, 2, 1], [0, 2, 3]])
    assert float(process.total(known, log_p, "it")) == pytest.approx(0.8)
    assert float(process.total(known[:1], log_p[:1], "it")) == 1.0
    assert float(process.total(torch.tensor([[3, 2, 3]]), log_p[:1], "it")) == pytest.approx(3.0)
    with pytest.raises(cd.InputError, match="it returned 2 log-probabilities per position, but vocab_size is 3"):
        process.total(known, log_p[..., :2], "it")


def test_the_share_of_masks_of_few_positions():
    t = f64([0.3, 0.3])
    one = Masked(3, torch.tensor([-1, 2]))
    assert one.model_time(torch.tensor([[3, 2], [1, 2]]), t).tolist() == [1.0, 0.0]
    none = Masked(3, torch.tensor([1, 2]))
    assert none.model_time(torch.tensor([[1, 2], [1, 2]]), t).tolist() == [0.0, 0.0]
    assert Masked(3, at_once=None).model_time(torch.tensor([[3, 2], [1, 2]]), t).tolist() == [0.3, 0.3]


@pytest.mark.parametrize("base", [Masked(3), Uniform(3)], ids=["masked", "uniform"])
def test_euler_kernels_stop_short_of_the_noise_end(base):
    """At t = 1 rates are infinite; they are those of a millionth before it."""
    process, x = Euler(base=base), torch.tensor([[0, base.n_states - 1]])
    log_p = f64([[[0.5, 0.2, 0.3], [0.1, 0.3, 0.6]]]).log()
    end, before, s = f64([1.0]), f64([1 - 1e-6]), f64([0.9])
    assert process.floor == 1e-8
    assert torch.equal(process.in_kernel(x, log_p, end), base.log_concrete(x, log_p, before))
    scores = process.in_kernel(x, log_p, end)
    assert torch.equal(process.denoising(x, scores, s, end), process.denoising(x, scores, s, before))
    assert process.denoising(x, scores, s, end).exp().sum(-1).tolist() == [pytest.approx([1.0, 1.0])]


def test_positions_that_differ_are_found():
    x = torch.tensor([[0, 1, 2], [0, 1, 2], [2, 2, 2]])
    position, moved = changed_position(x, torch.tensor([[0, 1, 2], [0, 1, 0], [2, 0, 2]]))
    assert moved.tolist() == [False, True, True]
    assert position[1:].tolist() == [2, 1]
    with pytest.raises(cd.InputError, match="differ in one position at most, got 2"):
        changed_position(x, torch.tensor([[0, 1, 2], [1, 1, 0], [2, 0, 2]]))
    assert changed_position(x[:0], x[:0])[0].shape == (0,)
    seen = Evaluation((torch.zeros(1, 3, 3),), torch.zeros(1, 3, 3), torch.zeros(1))
    with pytest.raises(cd.InputError, match="where one of them is masked, got two different tokens"):
        Masked(3).density_ratios(x[:1], torch.tensor([[0, 1, 0]]), seen, seen, f64([0.5]))
