"""Trees against the sum over all pictures: posteriors, densities, draws, guided laws, and samplers of them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import crepe_diffusion as cd
from checks import assert_frequencies, refuted
from studies.digits import __main__ as command
from studies.digits import study, tables
from studies.digits.laws import BLOCK, Guided, TreeModel, binary_digits, load_trees
from studies.digits.trees import Forest, chow_liu
from studies.shared.results import Results


def random_forest(n_trees: int, n_pixels: int, seed: int) -> Forest:
    """Trees of random shape, with the root anywhere."""
    generator = torch.Generator().manual_seed(seed)
    parents = []
    for _ in range(n_trees):
        order = torch.randperm(n_pixels, generator=generator)
        parent = torch.full((n_pixels,), -1)
        for i in range(1, n_pixels):
            parent[order[i]] = order[int(torch.randint(i, (), generator=generator))]
        parents.append(parent)
    tables = 0.05 + 0.9 * torch.rand(n_trees, n_pixels, 2, generator=generator, dtype=torch.float64)
    root = torch.stack(parents) < 0
    return Forest(torch.stack(parents), torch.where(root[..., None], tables[..., :1], tables))


def all_pictures(n: int) -> torch.Tensor:
    return torch.tensor(list(itertools.product((0, 1), repeat=n)))


def check_posterior(forest: Forest, truth: Forest, likelihood: torch.Tensor) -> None:
    """By Bayes' rule over all pictures of the trees in `truth`."""
    x = all_pictures(truth.n_pixels)
    seen = torch.stack([likelihood[:, i, x[:, i]] for i in range(truth.n_pixels)]).prod(0)  # (rows, pictures)
    joint = truth.log_prob(x).exp()[:, None] * seen
    marginals, log_evidence = forest.posterior(likelihood)
    assert_close(log_evidence, joint.sum(-1).log(), atol=1e-12, rtol=0)
    one = torch.einsum("krs,si->kri", joint / joint.sum(-1, keepdim=True), x.to(torch.float64))
    assert_close(marginals[..., 1], one, atol=1e-12, rtol=0)
    assert_close(marginals.sum(-1), torch.ones_like(one), atol=1e-12, rtol=0)


def test_posteriors_are_bayes_rule():
    forest = random_forest(3, 7, seed=0)
    generator = torch.Generator().manual_seed(1)
    likelihood = torch.rand(20, 7, 2, generator=generator, dtype=torch.float64)
    likelihood[5:10] = 1.0  # nothing seen
    known = torch.nn.functional.one_hot(torch.randint(2, (10, 7), generator=generator), 2).to(torch.float64)
    some = torch.rand(10, 7, 1, generator=generator) < 0.5
    likelihood[10:] = torch.where(some, known, 1.0)
    check_posterior(forest, forest, likelihood)
    wrong = forest.tables.clone()
    wrong[1, 3, 0] += 0.01
    refuted(check_posterior, Forest(forest.parents, wrong), forest, likelihood)


@pytest.mark.parametrize("n_children", [2, 3, 5, 6])
def test_pixels_may_have_many_children(n_children):
    """Messages of siblings are multiplied by halves: each counts once, whatever their number; rows are in blocks."""
    generator = torch.Generator().manual_seed(n_children)
    parents = torch.tensor([[-1, *[0] * n_children, 1], [1, -1, *[1] * (n_children - 1), 0]])
    tables = 0.05 + 0.9 * torch.rand(2, n_children + 2, 1, generator=generator, dtype=torch.float64)
    tables = torch.where(parents[..., None] < 0, tables, torch.cat([tables, 1 - tables**2], -1))
    forest = Forest(parents, tables)
    check_posterior(forest, forest, torch.rand(9, n_children + 2, 2, generator=generator, dtype=torch.float64))
    model = TreeModel(forest, [0.3, 0.7], (n_children + 2,))
    x = torch.randint(3, (2 * BLOCK + 3, n_children + 2), generator=generator)
    whole = model.predict(x, torch.ones(len(x)))
    for rows in (slice(0, 2), slice(BLOCK - 1, BLOCK + 1), slice(-1, None)):
        assert_close(whole[rows], model.predict(x[rows], torch.ones(len(x))[rows]), atol=1e-12, rtol=0)


def test_draws_have_the_law_of_their_tree():
    forest = random_forest(2, 4, seed=2)
    p = forest.log_prob(all_pictures(4)).exp()
    assert_close(p.sum(1), torch.ones(2, dtype=torch.float64))
    x = forest.sample(20_000, 1, torch.Generator().manual_seed(0))
    drawn = (x * torch.tensor([8, 4, 2, 1])).sum(1)
    assert_frequencies(drawn, p[1])
    refuted(assert_frequencies, drawn, p[0])


def test_the_likeliest_tree_has_the_joint_laws_of_its_pairs():
    """A chain of five pixels is found again, and its pairs have the frequencies of the data."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(2, (4000, 1), generator=generator)
    for flip in (0.1, 0.2, 0.05, 0.3):
        x = torch.cat([x, x[:, -1:] ^ (torch.rand(4000, 1, generator=generator) < flip)], 1)
    parents, table = chow_liu(x, noise=0.0)
    joined = {frozenset((i, int(p))) for i, p in enumerate(parents) if p >= 0}
    assert joined == {frozenset((i, i + 1)) for i in range(4)}
    for i, p in enumerate(parents.tolist()):
        if p >= 0:
            assert_close(table[i, 1], x[x[:, p] == 1][:, i].double().mean(), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["masked", "uniform"])
def test_predictions_are_those_of_the_table(kind):
    """A mixture of trees is also a table, whose model is another piece of code."""
    forest, weights = random_forest(3, 4, seed=3), [0.2, 0.5, 0.3]
    model = TreeModel(forest, weights, (2, 2), kind)
    law = model.log_prob(all_pictures(4)).exp().reshape(2, 2, 2, 2)
    table = cd.models.TokenTable(law, kind)
    x = torch.tensor(list(itertools.product(range(3 if kind == "masked" else 2), repeat=4)))
    t = torch.linspace(0.1, 0.9, len(x), dtype=torch.float64)
    mine = model.predict(x.reshape(-1, 2, 2), t).flatten(1, 2).exp()
    theirs = table.predict(x, t).exp()
    assert_close(mine, theirs, atol=1e-12, rtol=0)
    other = TreeModel(forest, [0.3, 0.5, 0.2], (2, 2), kind)
    refuted(assert_close, other.predict(x.reshape(-1, 2, 2), t).flatten(1, 2).exp(), theirs, atol=1e-3, rtol=0)


@pytest.mark.parametrize("unconditional", ["mixture", "own tree"])
def test_the_truth_of_guidance_is_the_sum_over_pictures(unconditional):
    problem = Guided(random_forest(11, 4, seed=4), 7, 2.0, unconditional)
    x = all_pictures(4)
    conditional, free = problem.models
    log_pi = 2 * conditional.log_prob(x) - free.log_prob(x)
    pi, log_z = log_pi.softmax(0), float(log_pi.logsumexp(0))
    truth = problem.truth(40_000)
    assert abs(truth.log_z - log_z) < 0.02
    known = study.truth_of(study.Case(side=2, n_truth=40_000), problem)
    for name, values in problem.statistics(x).items():
        assert_close(known.means[name], pi @ values, atol=0.012, rtol=0)
        assert_close(known.variances[name], float((pi @ values**2 - (pi @ values) ** 2).mean()), atol=0.012, rtol=0)
    out = cd.SMC(problem.target, cd.ladder.linear(3), n_particles=4000, seed=0).sample(progress=False)
    assert abs(out.log_z.value - log_z) < 4 * out.log_z.error
    means = {k: out.weights @ v for k, v in problem.statistics(out.x).items()}
    assert_close(means["pixels"], pi @ problem.statistics(x)["pixels"], atol=0.04, rtol=0)


def test_every_method_of_the_study_runs_and_is_counted(tmp_path, monkeypatch):
    """Four pixels: rows stay within the budget, and plain guidance alone has no estimate of Z."""
    problem = Guided(random_forest(11, 4, seed=5), 9, 2.0, "own tree")
    case = study.Case(side=2, digit=9, strength=2.0, rows=1200, n_truth=4000, at_once=1)
    known, results = study.truth_of(case, problem), Results(tmp_path)
    small = {
        "plain guidance": study.Plain(),
        "SMC of Lee et al.": study.Lee(most=3),
        "SMC": study.one_pass,
        "particle Gibbs": study.Gibbs(n_particles=16),
        "replica exchange": study.Exchange(n_chains=4),
    }
    monkeypatch.setattr(study, "METHODS", small)
    monkeypatch.setattr(tables, "METHODS", small)
    floors = {"floors": study.floors(case, known), "floors of turns": study.floors(case, known, 2)}
    assert floors["floors of turns"]["pixels"] == pytest.approx(floors["floors"]["pixels"] / math.sqrt(2))
    results.save(f"{case.name} truth", {**floors, "log_z": 0.0, "share": 1.0})
    for method in study.METHODS:
        found = study.measure(case, method, 0, known, problem)
        assert 0 < found["rows"] <= 1.02 * case.rows
        assert math.isnan(found["log_z"]) == (method == "plain guidance")
        assert all(math.isfinite(e) and e < 0.4 for e in found["errors"].values()), (method, found)
        assert 0 < found["stated"] < 0.2
        results.save(f"{case.name} {method} 0", found)
    table = tables.summary(case, results)
    assert table is not None
    assert len(table.splitlines()) == 3 + len(study.METHODS)  # its turns are its pixels
    assert tables.summary(replace(case, digit=1), results) is None


@pytest.mark.parametrize("method", ["SMC", "SMC of Lee et al., walks as ours", "particle Gibbs", "replica exchange"])
def test_walks_of_another_strength_are_corrected_at_the_data_end(method):
    """Four pixels, w = 3 and walks of strength 1: log Z is that of the guided law, and not that of the walks."""
    problem = Guided(random_forest(11, 4, seed=5), 9, 3.0, "mixture")
    case = study.Case(side=2, digit=9, strength=3.0, unconditional="mixture", rows=12_000, at_once=1, walk=1.0)
    known = study.truth_of(case, problem)
    out = study.METHODS[method](case, problem, 0)

    def right(weights):
        posterior = problem.statistics(out.x)["posterior"]
        assert abs(float(weights @ posterior) - float(known.means["posterior"])) < 0.03

    right(out.weights)
    assert abs(out.log_z.value - known.log_z) < 0.1 < abs(known.log_z)  # that of the walks is 0
    if isinstance(out, cd.Particles):
        refuted(right, torch.full_like(out.weights, 1 / len(out.weights)))


def test_the_law_in_turns_has_a_known_normaliser():
    """Turns of one pixel are the law itself; two turns of two pixels, by the sum over pictures and orders."""
    problem = Guided(random_forest(11, 4, seed=5), 9, 2.0, "own tree")
    x = all_pictures(4)

    def log_z(at_once: int) -> float:
        total = torch.zeros(len(x), dtype=torch.float64)
        orders = list(itertools.permutations(range(4)))
        for order in orders:
            log_p = torch.zeros(2, len(x), dtype=torch.float64)
            for k in range(0, 4, at_once):
                seen = torch.full_like(x, 2)
                seen[:, order[:k]] = x[:, order[:k]]
                for j, model in enumerate(problem.models):
                    found = model.predict(seen.reshape(-1, 2, 2), torch.ones(len(x))).flatten(1, 2)
                    for i in order[k : k + at_once]:
                        log_p[j] += found[torch.arange(len(x)), i, x[:, i]]
            total += (2 * log_p[0] - log_p[1]).exp()
        return math.log(float(total.sum()) / len(orders))

    alone, pairs = log_z(1), log_z(2)
    for at_once, expected in ((1, alone), (2, pairs)):
        value, error = study.turned(study.Case(side=2, digit=9, strength=2.0, at_once=at_once), problem, n=20_000)
        assert abs(value - expected) < 4 * error < abs(alone - pairs) / 2


def test_shipped_trees_are_trees_of_digits():
    """Each digit's own draws are told from the others by the trees themselves."""
    trees = load_trees(14)
    assert (trees.n_trees, trees.n_pixels) == (11, 196)
    x = torch.cat([trees.sample(20, c, torch.Generator().manual_seed(c)) for c in range(10)])
    right = trees.log_prob(x)[:10].argmax(0) == torch.arange(10).repeat_interleave(20)
    assert right.double().mean() > 0.9


def test_the_command_says_what_to_do_in_one_sentence(tmp_path, monkeypatch, capsys):
    for arguments, sentence in (
        (["fit", "--mnist", "none.npz"], "no file none.npz: it holds x_train"),
        (["paint", "--weights", "none.safetensors"], "no weights at none.safetensors"),
    ):
        monkeypatch.setattr("sys.argv", ["digits", *arguments, "--out", str(tmp_path)])
        with pytest.raises(SystemExit) as left:
            command.main()
        assert left.value.code == 2
        assert capsys.readouterr().err.startswith(sentence)


def test_bad_input_is_named(tmp_path):
    with pytest.raises(cd.InputError, match="x_train, y_train"):
        binary_digits(tmp_path / "none.npz", 14)
    with pytest.raises(cd.InputError, match="digit must be 0 to 9, got 10"):
        Guided(load_trees(14), 10, 2.0)
    with pytest.raises(cd.InputError, match="do not fit a forest"):
        TreeModel(random_forest(2, 4, seed=0), [1.0], (2, 2))
