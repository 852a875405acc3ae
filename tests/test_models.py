"""Models with known truth tell the truth, wrappers pass on exactly what they wrap, and targets obey their algebra.

D(y, t) = E[x_0 | y] = y + t^2 grad log p_t(y)        (Tweedie)
"""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

import crepe_diffusion as cd
from checks import assert_mean, f64, refuted
from crepe_diffusion.models.edm import EDM
from crepe_diffusion.processes import Coefficients, Evaluation, FisherTable, Gaussian
from crepe_diffusion.random import Stream

STREAM = Stream(21)
N = 3
WEIGHTS = f64([0.5, 0.2, 0.3])
MEANS = 2 * STREAM.at("means").normal((3, N))
ROOT = STREAM.at("root").normal((3, N, N))
COVARIANCES = ROOT @ ROOT.mT / N + 0.05 * torch.eye(N, dtype=torch.float64)
STDS = 0.3 + STREAM.at("stds").uniform((3, N))
CASES = {
    "full": (cd.models.GaussianMixture(WEIGHTS, MEANS, covariances=COVARIANCES), COVARIANCES),
    "diagonal": (cd.models.GaussianMixture(WEIGHTS, MEANS, STDS), torch.diag_embed(STDS**2)),
    "isotropic": (
        cd.models.GaussianMixture(10 * WEIGHTS, MEANS, STDS[:, 0]),  # weights are normalised
        STDS[:, :1, None] ** 2 * torch.eye(N, dtype=torch.float64),
    ),
}


def reference(covariances, t):
    """The same mixture by torch.distributions."""
    noised = covariances + t**2 * torch.eye(N, dtype=torch.float64)
    return MixtureSameFamily(Categorical(WEIGHTS), MultivariateNormal(MEANS, noised))


@pytest.mark.parametrize("t", [0.0, 0.3, 4.0])
@pytest.mark.parametrize("case", CASES)
def test_the_mixtures_density_is_that_of_torch(case, t):
    model, covariances = CASES[case]
    x = 3 * STREAM.at("x").normal((50, N))
    torch.testing.assert_close(model.log_prob(x, t), reference(covariances, t).log_prob(x), atol=1e-10, rtol=1e-10)
    refuted(torch.testing.assert_close, model.log_prob(x, t + 0.1), reference(covariances, t).log_prob(x))


@pytest.mark.parametrize("case", CASES)
def test_the_mixtures_denoiser_is_tweedies(case):
    model, covariances = CASES[case]
    t = f64([0.1, 0.5, 2.0, 9.0]).repeat(10)
    x = (t[:, None] * STREAM.at("y").normal((40, N))).requires_grad_()
    log_p = torch.stack([reference(covariances, float(s)).log_prob(y) for s, y in zip(t, x, strict=True)])
    score = torch.autograd.grad(log_p.sum(), x)[0]
    torch.testing.assert_close(model.predict(x.detach(), t), x.detach() + t[:, None] ** 2 * score, atol=1e-9, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_the_mixtures_samples_have_its_moments(case):
    model, covariances = CASES[case]

    def check(t):
        x = model.sample(20_000, STREAM.at("sample"), t=t)
        mean = WEIGHTS @ MEANS
        noised = covariances + 1.3**2 * torch.eye(N, dtype=torch.float64)
        second = (WEIGHTS[:, None, None] * (noised + MEANS[:, :, None] * MEANS[:, None])).sum(0)
        assert_mean(x, mean)
        assert_mean(x[:, :, None] * x[:, None], second)
        assert_mean(model.responsibilities(x, 1.3), WEIGHTS)

    check(1.3)
    refuted(check, 1.2)


def test_a_mixture_takes_events_of_any_shape():
    flat = CASES["full"][0]
    shaped = cd.models.GaussianMixture(WEIGHTS, MEANS.reshape(3, 1, N, 1), covariances=COVARIANCES)
    x, t = STREAM.at("shape").normal((7, N)), torch.full((7,), 0.4, dtype=torch.float64)
    assert shaped.event_shape == (1, N, 1)
    assert torch.equal(shaped.predict(x.reshape(7, 1, N, 1), t), flat.predict(x, t).reshape(7, 1, N, 1))
    assert torch.equal(shaped.sample(4, STREAM), flat.sample(4, STREAM).reshape(4, 1, N, 1))


# -- wrappers ------------------------------------------------------------------------------------------------


def test_models_that_share_a_function_are_evaluated_together_as_they_would_be_alone():
    def function(y, t, label):
        return y * 0.3 + t[:, None] + label

    models = [cd.models.Denoiser(function, (2,), condition=f64([i, -i]), dtype=torch.float64) for i in (0.5, 2.0, -1.0)]
    y, t = STREAM.at("w").normal((5, 2)), STREAM.at("t").uniform((5,))
    together = models[0].predict_together(models, y, t)
    for model, found in zip(models, together, strict=True):
        torch.testing.assert_close(found, function(y, t, model.condition))
        torch.testing.assert_close(model.predict(y, t), found)
    other = cd.models.Denoiser(lambda y, t, c: y, (2,), condition=f64([0.0, 0.0]))
    assert len({m.network for m in models}) == 1
    assert other.network != models[0].network


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_denoiser_sees_states_and_times_of_its_dtype(dtype):
    seen = []

    def function(y, t):
        seen.append((y.dtype, t.dtype))
        return y / (1 + t[:, None] ** 2)

    model = cd.models.Denoiser(function, (2,), dtype=dtype)
    chain = cd.ReplicaExchange(model**1.3, cd.ladder.karras(4, 0.1, 5.0), fit_samples=16, explorer=cd.Bounce())
    assert chain.sample(2).x.dtype == dtype
    assert set(seen) == {(dtype, dtype)}
    assert chain.state.seen.reward.dtype == torch.float64  # log-quantities are double whatever the state is


def test_single_and_double_precision_agree():
    """The work of the same step in both: they differ by rounding and not by more."""
    ends = CASES["diagonal"][0].sample(200, STREAM.at("ends")) + 0.5 * STREAM.at("spread").normal((200, N))
    s, t = (torch.full((100,), v, dtype=torch.float64) for v in (0.5, 0.9))
    coefficients = Coefficients((1.5,), (1.5,), 1 / 6, 5 / 6)

    def work(dtype):
        process, (x_s, x_t) = Gaussian(variance=0.7), ends.to(dtype).chunk(2)
        model = cd.models.GaussianMixture(WEIGHTS, MEANS, STDS, dtype=dtype)
        evaluations = []
        for x, u in ((x_s, s), (x_t, t)):
            prediction = model.predict(x, u.to(dtype))
            evaluations.append(
                Evaluation((prediction,), process.drift(x, u, (prediction,), None, coefficients), torch.zeros(100))
            )
        l, q = process.log_ratios(x_s, x_t, *evaluations, s, t, coefficients)
        assert l.dtype == q.dtype == torch.float64
        return 1.5 * l[0] - q

    double, single = work(torch.float64), work(torch.float32)
    assert double.abs().max() > 10
    assert (single - double).abs().max() < 1e-5 * double.abs().max()


# -- segments ------------------------------------------------------------------------------------------------


def centred(process):
    """Data of four atoms in the plane whose mean is zero."""
    return cd.models.Denoiser(
        lambda y, t: (y - y.mean(1, keepdim=True)) / (1 + t[:, None, None] ** 2),
        (4, 2),
        dtype=torch.float64,
        process=process,
    )


BASIS = torch.linalg.qr(STREAM.at("basis").normal((8, 8)))[0][:5]
TIMES = f64([0.1, 0.4, 1.1, 6.0])
TABLE = FisherTable(TIMES, STREAM.at("table").uniform((1, 4, 5)), STREAM.at("mean").normal((1, 5)))
MEASURED = Gaussian(variance="fisher-diagonal", basis=BASIS, information=TABLE)
ISOTROPIC = Gaussian(basis=BASIS, information=FisherTable(TIMES, TABLE.values[..., :1], TABLE.mean))


@pytest.mark.parametrize(
    "process",
    [
        Gaussian(variance=1.0),
        Gaussian(variance=1.0, zero_mean=0),
        Gaussian(variance=1.0, basis=BASIS),
        MEASURED,
        ISOTROPIC,
    ],
    ids=["plain", "zero mean", "basis", "measured", "measured for all directions"],
)
def test_segments_are_independent_copies(process):
    """Predictions segment by segment, and log-ratios that sum over the segments."""
    single, n = centred(process), 3
    model = cd.stitching.Segments(single, n)
    assert model.event_shape == (3, 4, 2)
    x_s, x_t = (single.process().project(STREAM.at(end).normal((6 * n, 4, 2))) for end in "st")
    s, t = (torch.full((6,), v, dtype=torch.float64) for v in (0.4, 1.1))
    coefficients = Coefficients((1.3,), (0.9,), 0.1, 0.8)

    def ratios(model, x_s, x_t, s, t):
        process, zero = model.process(), torch.zeros(len(s))
        at = []
        for x, u in ((x_s, s), (x_t, t)):
            prediction = model.predict(x, u)
            at.append(Evaluation((prediction,), process.drift(x, u, (prediction,), None, coefficients), zero))
        return process.log_ratios(x_s, x_t, *at, s, t, coefficients)

    alone = ratios(single, x_s, x_t, s.repeat_interleave(n), t.repeat_interleave(n))
    together = ratios(model, x_s.reshape(6, n, 4, 2), x_t.reshape(6, n, 4, 2), s, t)
    torch.testing.assert_close(together[0][0], alone[0][0].reshape(6, n).sum(1), atol=1e-10, rtol=0)
    torch.testing.assert_close(together[1], alone[1].reshape(6, n).sum(1), atol=1e-10, rtol=0)


def test_segments_of_a_centred_model_stay_centred():
    model = cd.stitching.Segments(centred(Gaussian(variance=1.0, zero_mean=0)), 3)
    chain = cd.ReplicaExchange(model**1.2, cd.ladder.karras(4, 0.1, 5.0), n_chains=2)
    x = chain.sample(3).x
    torch.testing.assert_close(x.mean(-2), torch.zeros_like(x.mean(-2)), atol=1e-12, rtol=0)
    assert x.mean(1).abs().max() > 0.01  # over segments nothing has to cancel


@pytest.mark.parametrize("process", [MEASURED, ISOTROPIC], ids=["measured", "measured for all directions"])
def test_every_segment_gets_what_was_measured_of_the_model(process):
    """Noise, its mean and the posterior variance of a plan are those of each segment."""
    n, single, many = 3, process, cd.stitching.Segments(centred(process), 3).process()
    coefficients, like = Coefficients((1.0,), (1.0,), 0.0, 1.0), torch.zeros(20_000, n, 4, 2, dtype=torch.float64)
    x = many.noise(STREAM.at("top"), like, 6.0, coefficients).flatten(0, 1)

    def check(mean, scaled):
        z = (x.flatten(1) @ BASIS.T - mean) / (36.0 / scaled).sqrt()
        assert_mean(z, 0.0)
        assert_mean(z[:, :, None] * z[:, None], torch.eye(5, dtype=torch.float64))

    mean, scaled = TABLE.mean[0], single.information.values[0, -1]
    check(mean, scaled)
    refuted(check, 0 * mean, scaled)
    refuted(check, mean, scaled.flip(0) * 1.1)
    torch.testing.assert_close(
        many.posterior_variance(TIMES, (n, 4, 2)), single.posterior_variance(TIMES, (4, 2))[:, None].expand(4, n, 4, 2)
    )
    assert not torch.allclose(x.reshape(-1, n, 8)[:, 0], x.reshape(-1, n, 8)[:, 1])  # not the same noise for all


# -- preconditioning -------------------------------------------------------------------------------------------

SIGMA = torch.tensor([0.02, 0.5, 1.3, 20.0])


def network(z, c_noise):
    return torch.sin(z * 1.7) + c_noise[:, None, None] * z.flip(1)


def test_scalar_preconditioning_is_that_of_karras():
    """Table 1 of Karras et al. (2022), EDM's column, and the weight of section 5."""
    sigma_data, y, seen = 0.5, STREAM.at("edm").normal((4, 3, 2), dtype=torch.float32), []

    def spy(z, c_noise):
        seen.append(c_noise)
        return network(z, c_noise)

    model, s = EDM(spy, sigma_data), SIGMA[:, None, None]

    def check(power):
        c_skip = sigma_data**2 / (s**2 + sigma_data**2)
        c_out = s * sigma_data / (sigma_data**2 + s**2) ** power
        c_in, c_noise = 1 / (s**2 + sigma_data**2) ** 0.5, SIGMA.log() / 4
        torch.testing.assert_close(model(y, SIGMA), c_skip * y + c_out * network(c_in * y, c_noise))
        torch.testing.assert_close(seen[-1], c_noise)

    check(0.5)
    refuted(check, 1.0)
    lam = (SIGMA**2 + sigma_data**2) / (SIGMA * sigma_data) ** 2
    torch.testing.assert_close(model.weight(SIGMA), lam)


SCALES = torch.tensor([3.0, 1.0, 0.7, 0.2, 0.1, 0.01])
TURN = torch.linalg.qr(STREAM.at("turn").normal((6, 6)))[0].float()


def test_with_nothing_learned_it_is_the_best_linear_denoiser_of_its_scales():
    """E[x_0 | y] of Gaussian data with covariance B' diag(scales^2) B; scales in another order are another one."""
    y = STREAM.at("linear").normal((4, 3, 2))
    basis, double = TURN.double(), SIGMA.double()
    covariance = basis.T @ torch.diag(SCALES.double() ** 2) @ basis
    eye = torch.eye(6, dtype=torch.float64)
    gain = torch.stack([covariance @ torch.linalg.inv(covariance + t**2 * eye) for t in double])
    exact = torch.einsum("nij,nj->ni", gain, y.flatten(1)).reshape(y.shape)

    def check(scales):
        model = EDM(lambda z, c: torch.zeros_like(z), scales, TURN)
        torch.testing.assert_close(model(y.float(), SIGMA).double(), exact, atol=1e-5, rtol=1e-4)

    check(SCALES)
    refuted(check, SCALES.flip(0))


def test_inputs_and_targets_of_the_network_have_unit_variance_in_every_direction():
    """What the network sees of noisy data, and what it would have to say; the weight makes up for the error's size."""
    n, sigma = 40_000, 0.5
    x = (STREAM.at("clean").normal((n, 6), dtype=torch.float32) * SCALES) @ TURN
    y = x + sigma * STREAM.at("noise").normal((n, 6), dtype=torch.float32)
    seen = []

    def spy(z, c_noise):
        seen.append(z)
        return torch.zeros_like(z)

    def check(scales):
        model = EDM(spy, scales, TURN)
        error = x - model(y, torch.full((n,), sigma))
        c_out = sigma * SCALES / (sigma**2 + SCALES**2).sqrt()
        assert_mean(seen[-1].square(), 1.0)
        assert_mean(((error @ TURN.T) / c_out).square(), 1.0)
        assert_mean(model.weight(torch.full((n,), sigma)) * error.square().mean(1), 1.0)

    check(SCALES)
    refuted(check, SCALES.flip(0))
    refuted(check, 1.1 * SCALES)


@pytest.mark.parametrize(
    ("scales", "basis", "message"),
    [
        (0.0, None, "standard deviation of the data, got 0.0"),
        (torch.tensor([1.0, -1.0]), torch.eye(2), "standard deviation of the data"),
        (SCALES, None, "each row of the basis, got 6"),
        (SCALES, TURN[:4], "each row of the basis, got 6"),
        (SCALES[:4], TURN[:4], "square"),
    ],
)
def test_scales_that_do_not_fit_are_refused(scales, basis, message):
    with pytest.raises(cd.InputError, match=message):
        EDM(network, scales, basis)


def test_preconditioning_in_a_basis_works_in_double_precision_and_can_be_saved():
    single, double = (EDM(lambda z, c: torch.zeros_like(z), SCALES, TURN.T) for _ in range(2))
    y = STREAM.at("linear").normal((4, 3, 2))
    torch.testing.assert_close(double(y, SIGMA.double()).float(), single(y.float(), SIGMA), atol=1e-5, rtol=1e-4)
    assert all(v.is_contiguous() for v in single.state_dict().values())  # safetensors wants that


# -- the algebra of targets ------------------------------------------------------------------------------------


def test_powers_and_products_are_exponents():
    p, q = CASES["full"][0], CASES["diagonal"][0]
    assert (p**2.0 * q * p).exponents == (3.0, 1.0)
    assert ((p * q) ** 0.5).exponents == (0.5, 0.5)
    assert cd.guided(conditional=q, unconditional=p, scale=3.0).factors == ((p, -2.0), (q, 3.0))
    assert cd.guided(p, p, 3.0).exponents == (1.0,)


def test_a_power_scales_rewards_and_names_find_them():
    p = CASES["full"][0]
    target = p.tilt(lambda x: x[:, 0], name="a", scale=2.0).tilt(lambda x: x[:, 1]) ** 1.5
    assert [(r.name, r.scale) for r in target.rewards] == [("a", 3.0), ("reward2", 1.5)]
    assert [r.name for r in target.without("a").rewards] == ["reward2"]
    assert target.exponents == (1.5,)


def test_rewards_add_up():
    p = cd.models.GaussianMixture(WEIGHTS, MEANS, STDS, process=Gaussian(variance=0.7))
    steps = cd.ladder.karras(4, 0.1, 5.0)
    anneal = cd.anneal.linear()
    parts = [{"scale": 0.7, "on": "state"}, {"scale": -1.2, "on": "prediction"}]
    functions = [lambda x: x[:, 0], lambda x: x[:, 1] ** 2]

    def rewards(target):
        chain = cd.ReplicaExchange(target, steps, seed=1)
        x = STREAM.at("r").normal((4, N))
        return chain.evaluate(x, chain.ladder.levels).reward

    both = p.tilt(functions[0], anneal=anneal, **parts[0]).tilt(functions[1], anneal=anneal, **parts[1])
    apart = [p.tilt(f, anneal=anneal, **options) for f, options in zip(functions, parts, strict=True)]
    torch.testing.assert_close(rewards(both), rewards(apart[0]) + rewards(apart[1]), atol=1e-12, rtol=0)
    x = STREAM.at("r").normal((4, N))
    u = f64([1, 2 / 3, 1 / 3, 0])
    torch.testing.assert_close(rewards(apart[0]), 0.7 * u * x[:, 0], atol=1e-12, rtol=0)
    seen = p.predict(x, steps.levels)
    torch.testing.assert_close(rewards(apart[1]), -1.2 * u * seen[:, 1] ** 2, atol=1e-12, rtol=0)
