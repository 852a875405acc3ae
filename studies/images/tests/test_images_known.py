"""The known laws of images: closed forms, exact draws, and what a wrong formula would do to them."""

from __future__ import annotations

import gzip
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import crepe_diffusion as cd
from checks import assert_mean, refuted
from studies.images import data, known, methods, mixture, problems, tables, tails
from studies.shared.results import Results

T = 0.3


@pytest.fixture(scope="module")
def law():
    """Five overlapping clusters of images of 2 x 3 pixels in two classes."""
    g = torch.Generator().manual_seed(0)
    means = torch.randn(5, 6, generator=g, dtype=torch.float64)
    axes = torch.linalg.qr(torch.randn(5, 6, 2, generator=g, dtype=torch.float64))[0]
    variances = torch.rand(5, 2, generator=g, dtype=torch.float64) + 0.2
    first = torch.tensor([0.9, 0.2, 0.6, 0.05, 0.4], dtype=torch.float64)
    weights = torch.tensor([0.1, 0.3, 0.2, 0.25, 0.15], dtype=torch.float64)
    return mixture.FactorLaw(weights, means, axes, variances, 0.1, torch.stack([first, 1 - first], 1), (1, 2, 3))


def same_by_full_matrices(law, weights):
    covariances = (law.axes * law.variances[:, None]) @ law.axes.mT + law.floor * torch.eye(6, dtype=torch.float64)
    return cd.models.GaussianMixture(weights, law.means.reshape(5, 1, 2, 3), covariances=covariances)


def test_factors_are_a_mixture_of_full_covariances(law):
    x, t = cd.Stream(1).normal((7, 1, 2, 3)), torch.linspace(0.1, 2.0, 7).double()

    def check(tried):
        for label in (0, 1):
            ours = tried.conditional(label)
            full = same_by_full_matrices(law, ours.weights)
            torch.testing.assert_close(ours.predict(x, t), full.predict(x, t), rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(ours.log_prob(x, T), full.log_prob(x, T), rtol=1e-10, atol=1e-10)
        both = tried.conditional(0), tried.unconditional()
        for one, together in zip(both, both[0].predict_together(both, x, t), strict=True):
            torch.testing.assert_close(one.predict(x, t), together)

    check(law)
    refuted(lambda: check(replace(law, floor=0.11)))


def test_the_unconditional_model_is_the_mixture_of_the_conditional_ones(law):
    x = cd.Stream(2).normal((50, 1, 2, 3))
    share = law.weights @ law.labels
    both = torch.stack([share[c].log() + law.conditional(c).log_prob(x, T) for c in (0, 1)])
    torch.testing.assert_close(both.logsumexp(0), law.unconditional().log_prob(x, T))
    by_bayes = both[0] - both.logsumexp(0)
    torch.testing.assert_close(law.class_log_probability(x, 0, T), by_bayes)


def test_guided_draws_have_the_guided_law(law):
    w, n = 3.0, 4000
    model = law.conditional(0)
    # Unguided draws, weighted by the definition p(x|c)^w p(x)^(1-w) / p(x|c).
    x = model.sample(40_000, cd.Stream(3), T)
    log_w = (w - 1) * (model.log_prob(x, T) - law.unconditional().log_prob(x, T))
    expected = torch.softmax(log_w, 0) @ x.flatten(1)[:, 0]

    def check(scale):
        draws, kept = mixture.guided_draws(law, 0, scale, n, cd.Stream(4), T)
        assert 0 < kept < 1
        assert len(draws) == n
        assert_mean(draws.flatten(1)[:, 0], float(expected))

    check(w)
    refuted(lambda: check(w - 1))


def test_the_normaliser_of_a_guided_law(law):
    w, n = 3.0, 40_000
    share = float((law.weights @ law.labels)[0])
    x = law.unconditional().sample(n, cd.Stream(12), T)  # by other draws, and by densities alone
    log_ratio = law.conditional(0).log_prob(x, T) - law.unconditional().log_prob(x, T)
    expected = float((w * log_ratio).exp().mean())  # the mean over p of (p(x|c) / p(x))^w

    def check(scale):
        found = mixture.guided_log_mass(law, 0, scale, cd.Stream(13), T, n) - (scale - 1) * math.log(share)
        assert abs(math.exp(found) - expected) < 0.03 * expected  # four standard errors of both

    check(w)
    refuted(lambda: check(w - 0.1))


def test_twisted_smc_is_path_work_for_one_model_with_a_gradient(law):
    target = law.unconditional().tilt(problems.Linear(cd.Stream(8).normal((6,)), 0.3), guidance="gradient")
    setting = methods.Setting(0.1, 10.0, 8, 40 * 9, cd.processes.Gaussian(variance=1.0))
    both = [methods.smc(weight)(target, setting, 3) for weight in (cd.PathWork(), cd.Twisted())]
    torch.testing.assert_close(both[0].weights, both[1].weights)
    torch.testing.assert_close(both[0].x, both[1].x)


def test_exact_work_has_the_true_normaliser_with_few_steps(law):
    target, w = cd.guided(law.conditional(0), law.unconditional(), 3.0), 3.0
    steps = cd.ladder.karras(7, T, 20.0)

    def log_mass(t):
        return mixture.guided_log_mass(law, 0, w, cd.Stream(13), t, 40_000)

    def check(weight):
        out = cd.SMC(target, steps, n_particles=400, n_batches=16, weight=weight, seed=0).sample(progress=False)
        z = (out.batch_log_z - (log_mass(T) - log_mass(20.0))).exp()
        assert_mean(z, 1.0)

    check(tails.ExactWork(law, 0, w))
    refuted(lambda: check(tails.ExactWork(law, 0, w - 0.3)))


def test_tails_are_compared_and_not_again(law, tmp_path, monkeypatch):
    monkeypatch.setattr(known, "CASES", [known.Case("mnist", 1, "guided", "3", n_steps=16, n_states=512)])
    few = {way: tails.WAYS[way] for way in ("RNE", "exact densities, walks guided by 2")}
    monkeypatch.setattr(tails, "WAYS", few)
    results = Results(tmp_path)
    names = list(tails.compare_tails(law, results, n_seeds=1, n=200, every=8))
    assert names == ["tails steps", "tails walks", *(f"tails resampled {way}" for way in tails.WAYS)]
    assert list(tails.compare_tails(law, results, n_seeds=1, n=200, every=8)) == []
    assert [round(r["t"], 2) for r in results["tails steps"]["found"]] == [20.0, 2.31]
    assert tables.tails_table(results).count("\n") >= 2
    assert tables.resampled_table(results).count("exact densities") == 1


def test_families_are_counted_by_their_weight(law):
    target = cd.guided(law.conditional(0), law.unconditional(), 2.0)
    setting = methods.Setting(0.1, 10.0, 8, 4 * 20 * 9, cd.processes.Gaussian(variance=1.0))
    out = methods.smc(cd.PathWork())(target, setting, 0)
    shares = [float(out.weights[out.eve == e].sum()) for e in out.eve.unique()]
    assert methods.families(out) == pytest.approx(1 / sum(share**2 for share in shares))
    assert methods.families(methods.plain(target, setting, 0)) is None
    out = methods.piloted(8)(target, replace(setting, n_states=1000), 0)
    assert out.evaluations.rows <= 2 * 1000
    _, sizes = out.tours.unique(return_counts=True)
    assert methods.families(out) == pytest.approx(len(out.x) ** 2 / int(sizes.square().sum()))


def only(law, k):
    """The law of one component."""
    parts = {name: getattr(law, name)[k : k + 1] for name in ("means", "axes", "variances", "labels")}
    return replace(law, weights=torch.ones(1).double(), **parts)


def test_a_tilt_of_one_component_is_drawn_exactly(law):
    model, reward = only(law, 1).unconditional(), problems.Linear(cd.Stream(8).normal((6,)), 0.3)

    def check(weighted):
        x, log_q = problems.tilted_draws(model, reward, 100, cd.Stream(9))
        t = torch.full((100,), problems.SIGMA_MIN, dtype=torch.float64)
        log_p = model.log_prob(x, problems.SIGMA_MIN) + weighted(model.predict(x, t))
        assert float((log_p - log_q).std()) < 1e-9

    check(reward)
    refuted(lambda: check(replace(reward, direction=1.01 * reward.direction)))


def test_a_tilt_of_a_mixture_has_the_shares_of_weighted_draws(law):
    model, reward = law.unconditional(), problems.Linear(0.7 * cd.Stream(8).normal((6,)), 0.0)
    free = model.sample(40_000, cd.Stream(10), problems.SIGMA_MIN)
    t = torch.full((40_000,), problems.SIGMA_MIN, dtype=torch.float64)
    expected = torch.softmax(reward(model.predict(free, t)), 0) @ free.flatten(1)

    def check(scale):
        x, log_q = problems.tilted_draws(
            model, replace(reward, direction=scale * reward.direction), 20_000, cd.Stream(11)
        )
        log_p = model.log_prob(x, problems.SIGMA_MIN) + scale * reward(model.predict(x, t[:20_000]))
        w = torch.softmax(log_p - log_q, 0)
        assert 1 / float(w.square().sum()) > 15_000  # the proposal is nearly the law itself
        assert_mean(20_000 * w[:, None] * x.flatten(1), expected, z=6)

    check(1.0)
    refuted(lambda: check(0.8))


def test_a_posterior_of_one_component_is_drawn_exactly(law):
    one = only(law, 0)
    operator = cd.Stream(5).normal((3, 6))
    seen, noise = torch.tensor([0.3, -0.2, 1.0]).double(), 0.4
    x, log_q = problems.conjugate_draws(one, operator, noise, seen, 200, cd.Stream(6))
    model, t = one.unconditional(), torch.full((200,), problems.SIGMA_MIN, dtype=torch.float64)

    def check(noise):
        residual = model.predict(x, t).flatten(1) @ operator.T - seen
        log_p = model.log_prob(x, problems.SIGMA_MIN) - 0.5 * residual.square().sum(1) / noise**2
        assert float((log_p - log_q).std()) < 1e-9  # the same density up to its normaliser

    check(noise)
    refuted(lambda: check(0.41))


def test_errors_vanish_on_the_truth_and_see_a_lost_mode(law):
    steps = cd.ladder.karras(9, problems.SIGMA_MIN, problems.SIGMA_MAX)
    problem = problems.guided(law, 0, 2.0, steps)
    found = problems.errors(problem, problem.truth, problem.weights)
    assert found == pytest.approx({"shares": 0, "frechet": 0, "spread": 1}, abs=1e-6)
    lost = problem.judge.responsibilities(problem.truth, problems.SIGMA_MIN)[:, 0] < 0.5
    x = problem.truth[lost]
    found = problems.errors(problem, x, torch.full((len(x),), 1 / len(x)))
    assert found["shares"] > 0.05
    assert found["frechet"] > 0.01


def test_frechet_of_gaussians():
    a = cd.Stream(7).normal((1000, 2)) * torch.tensor([2.0, 1.0]).double() + torch.tensor([1.0, 0.0]).double()
    w = torch.full((1000,), 1e-3).double()
    shift, scale = torch.tensor([3.0, 4.0]).double(), 3.0
    mean = a.mean(0)
    b = (a - mean) * scale + mean + shift
    # |shift|^2 + sum over axes of (scale sd - sd)^2, with the sample's own variances
    expected = 25 + (scale - 1) ** 2 * float((a - mean).square().mean(0).sum())
    assert problems.frechet(a, w, b, w) == pytest.approx(expected)


def test_frechet_of_few_rows_and_of_moments_agree():
    """Fewer rows than features, weighted: from factors and from covariances, which is another computation."""
    x, y = cd.Stream(14).normal((9, 12)), 2 * cd.Stream(15).normal((30, 12)) + 0.3
    w, v = cd.Stream(16).normal((9,)).exp(), cd.Stream(17).normal((30,)).exp()

    def check(w):
        expected = problems.frechet_of_moments(problems.moments_of(x, w), problems.moments_of(y, v))
        assert problems.frechet(x, cd.Stream(16).normal((9,)).exp(), y, v) == pytest.approx(expected)
        (a, cov_a), (b, cov_b) = problems.moments_of(x, w), problems.moments_of(y, v)
        values = torch.linalg.eigvals(cov_a @ cov_b).real.clamp(min=0)
        by_product = (a - b).square().sum() + cov_a.trace() + cov_b.trace() - 2 * values.sqrt().sum()
        assert expected == pytest.approx(float(by_product), rel=1e-5)

    check(w)
    refuted(lambda: check(w.square()))


def test_more_walks_cost_more_and_are_compared_with_as_many_exact_draws(law, tmp_path, monkeypatch):
    monkeypatch.setattr(known, "CASES", [known.Case("mnist", 1, "guided", "3", n_steps=32, n_states=4096)])
    monkeypatch.setattr(known, "WALKS", {"RNE-SMC": (1, 32), "particle Gibbs": (1, 32), "RNE-SMC, more": (8, 64)})
    results = Results(tmp_path)
    names = list(known.compare_walks(law, results, n_seeds=1))
    assert list(known.compare_walks(law, results, n_seeds=1)) == []
    few, sweeps, many = (results[name]["found"] for name in names)
    assert many["rows"] / few["rows"] == pytest.approx(16, rel=0.02)
    assert sweeps["rows"] <= few["rows"] * 1.02
    assert many["exact"] < few["exact"]
    assert many["shares"] < 0.1, many


def test_idx_files_are_read_and_others_refused(tmp_path):
    x = np.arange(3 * 28 * 28).reshape(3, 28, 28).astype(np.uint8)
    y = np.array([1, 0, 2], np.uint8)

    def write(stem, array):
        header = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
        (tmp_path / f"{stem}-idx-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))

    for part in ("train", "t10k"):
        write(f"{part}-images", x)
        write(f"{part}-labels", y)
    data.import_images("mnist", tmp_path, tmp_path / "kept")
    training, test = data.load_images("mnist", tmp_path / "kept")
    assert training.label.tolist() == [1, 0, 2]
    torch.testing.assert_close(test.x[:, 0], torch.tensor(x) / 127.5 - 1)
    (tmp_path / "train-images-idx-ubyte.gz").write_bytes(gzip.compress(b"PNG and more"))
    with pytest.raises(cd.InputError, match="no IDX file"):
        data.import_images("mnist", tmp_path, tmp_path / "kept")
    with pytest.raises(cd.InputError, match="no images 'fashion'"):
        data.load_images("fashion", tmp_path / "kept")


@pytest.mark.slow
def test_tiny_methods_come_near_the_truth():
    found = known.tiny()
    for name in ("RNE-SMC", "particle Gibbs", "CREPE"):
        assert found[name] < 0.15, found
