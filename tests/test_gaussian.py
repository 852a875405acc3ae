"""Gaussian diffusions: kernels are drawn from the laws that their log-ratios assume, and Gaussian data are exact.

L_j = log B_j(y_s | y_t) - log F(y_t | y_s)  =  log p_s(y_s) - log p_t(y_t)     for Gaussian data, at any step
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import MultivariateNormal

import crepe_diffusion as cd
from checks import assert_mean, f64, refuted
from crepe_diffusion.paths import log_work, walk
from crepe_diffusion.processes import (
    Adaptive,
    Coefficients,
    EulerMaruyama,
    Evaluation,
    FisherTable,
    Gaussian,
    Isotropic,
)
from crepe_diffusion.processes.gaussian import PIECE, _sum_squares, score_of
from crepe_diffusion.random import Stream
from crepe_diffusion.samplers.information import fit_information

STREAM = Stream(11)
PLAIN = Coefficients(target=(1.0,), proposal=(1.0,), k_up=0.0, k_down=1.0)
TIMES = f64([0.03, 0.1, 0.7, 1.9, 8.0, 40.0])


def orthogonal(n: int) -> torch.Tensor:
    return torch.linalg.qr(STREAM.at("basis").normal((n, n)))[0]


def steps(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs s < t out of TIMES: neighbours and far apart."""
    i, j = torch.triu_indices(len(TIMES), len(TIMES), offset=1)
    repeat = -(-n // len(i))
    return TIMES[i].repeat(repeat)[:n], TIMES[j].repeat(repeat)[:n]


def view(process, models, x, t, coefficients, guidance=None) -> Evaluation:
    predictions = tuple(model.predict(x, t) for model in models)
    return Evaluation(
        predictions, process.drift(x, t, predictions, guidance, coefficients), torch.zeros(len(x), dtype=torch.float64)
    )


def evaluator(target, ladder=None, process=None, k="balanced", **options):
    """What a sampler of this target would use."""
    ladder, process = ladder or cd.ladder.karras(5, 0.1, 10.0), process or Gaussian(variance=0.9)
    return cd.Plain(target, ladder, process=process, proposal=cd.Proposal(k, **options), fit_samples=512).evaluate


def log_ratios(process, models, x_s, x_t, s, t, coefficients=PLAIN):
    at_s, at_t = (view(process, models, x, u, coefficients) for x, u in ((x_s, s), (x_t, t)))
    return process.log_ratios(x_s, x_t, at_s, at_t, s, t, coefficients)


# -- Gaussian data ---------------------------------------------------------------------------------------


class Data:
    """N(mean, B' diag(rho^2) B) on the span of orthonormal rows B, with a process that should be exact for it."""

    def __init__(self, rho, basis, event, process, mean=0.4):
        self.rho, self.basis, self.event, self.process = f64(rho), basis, event, process
        self.mean = mean * torch.arange(1, len(basis) + 1, dtype=torch.float64)
        self.model = cd.models.Denoiser(self.denoise, event, dtype=torch.float64)

    def inside(self, x):
        return x.flatten(1) @ self.basis.T

    def outside(self, z):
        return (z @ self.basis).reshape(len(z), *self.event)

    def denoise(self, y, t):
        share = self.rho**2 / (self.rho**2 + t[:, None] ** 2)
        return self.outside(self.mean + share * (self.inside(y) - self.mean))

    def log_prob(self, x, t):
        variance = (self.rho**2 + t[:, None] ** 2).expand(-1, len(self.basis))
        offset = self.inside(x) - self.mean
        return -0.5 * (offset**2 / variance + (2 * math.pi * variance).log()).sum(1)


def table(rho, mean) -> FisherTable:
    """The exact information of Gaussian data with these scales."""
    rho = f64(rho).reshape(1, 1, -1)
    t2 = TIMES[None, :, None] ** 2
    return FisherTable(TIMES, t2 / (t2 + rho**2), mean[None])


def diagonal(rho, basis=None) -> Gaussian:
    return Gaussian(variance="fisher-diagonal", basis=basis, information=table(rho, torch.zeros(len(rho))))


def centred(n: int) -> torch.Tensor:
    """An orthonormal basis of the vectors of n entries with zero mean."""
    return torch.linalg.qr(torch.cat([torch.ones(n, 1), torch.eye(n)[:, 1:]], dim=1).to(torch.float64))[0].T[1:]


def pieces(basis, n: int = 2) -> torch.Tensor:
    """The basis of n pieces side by side."""
    return torch.block_diag(*[basis] * n)


RHO = [0.2, 0.6, 2.5]
EYE = torch.eye(6, dtype=torch.float64)
TURNED = orthogonal(3)
ATOMS = torch.kron(centred(4), torch.eye(2, dtype=torch.float64))  # four atoms in the plane, no centre of mass
TILED = table(RHO, torch.zeros(3)).repeated(2)
INTERLEAVED = FisherTable(TIMES, TILED.values[..., [0, 3, 1, 4, 2, 5]], TILED.mean)
CASES = {
    "one dimension": (Data(0.7, EYE[:1, :1], (1,), Gaussian(variance=0.7)), Gaussian(variance=0.71)),
    "six dimensions": (Data(1.3, EYE, (2, 3), Gaussian(variance=1.3)), Gaussian(variance=1.31)),
    "isotropic table": (
        Data(0.9, EYE, (6,), Gaussian(information=table(0.9, torch.zeros(6)))),
        Gaussian(variance=0.89),
    ),
    "diagonal": (Data(RHO, EYE[:3, :3], (3,), diagonal(RHO)), diagonal(RHO[::-1])),
    "diagonal in a basis": (Data(RHO, TURNED, (3,), diagonal(RHO, TURNED)), diagonal(RHO)),
    "two of three directions": (Data(RHO[:2], TURNED[:2], (3,), diagonal(RHO[:2], TURNED[:2])), diagonal(RHO, TURNED)),
    "two pieces in a basis": (
        Data(RHO * 2, pieces(TURNED), (2, 3), Gaussian(TURNED, None, "fisher-diagonal", TILED)),
        Gaussian(variance="fisher-diagonal", information=INTERLEAVED, basis=TURNED),
    ),
    "two of three directions of two pieces": (
        Data(0.9, pieces(TURNED[:2]), (2, 3), Gaussian(variance=0.9, basis=TURNED[:2])),
        Gaussian(variance=0.9, basis=TURNED),
    ),
    "zero mean": (Data(0.8, ATOMS, (4, 2), Gaussian(variance=0.8, zero_mean=0)), Gaussian(variance=0.8)),
    "zero mean, Euler": (
        Data(0.8, ATOMS, (4, 2), EulerMaruyama(reference=0.8, zero_mean=0), mean=0.0),
        EulerMaruyama(zero_mean=0),
    ),
    "Euler with reference": (
        Data(0.8, EYE, (6,), EulerMaruyama(reference=0.8), mean=0.0),
        EulerMaruyama(reference=0.81),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_log_ratios_of_gaussian_data_are_exact_at_any_step_size(case):
    data, broken = CASES[case]
    s, t = steps(300)
    x_s, x_t = (
        data.outside(2 * (u[:, None] ** 2 + data.rho**2).sqrt() * STREAM.at(end).normal((300, len(data.basis))))
        for end, u in (("s", s), ("t", t))
    )

    def check(process):
        models, proposal = log_ratios(process, [data.model], x_s, x_t, s, t)
        truth = data.log_prob(x_s, s) - data.log_prob(x_t, t)
        assert (models[0] - truth).abs().max() <= 1e-10
        assert (models[0] - proposal).abs().max() <= 1e-10  # target = proposal

    check(data.process)
    refuted(check, broken)


def test_the_subspace_counts_its_own_dimensions():
    assert Gaussian(variance=1.0, zero_mean=0).dimension(torch.Size([4, 2])) == 6
    assert Gaussian(variance=1.0, zero_mean=1).dimension(torch.Size([4, 2])) == 4
    assert Gaussian(variance=1.0, basis=TURNED[:2]).dimension(torch.Size([3])) == 2
    assert Gaussian(variance=1.0).dimension(torch.Size([4, 2])) == 8


def test_a_reference_adds_the_same_number_to_every_ratio():
    """So it changes no work where the exponents sum to one."""
    s, t = steps(40)
    x_s, x_t = (STREAM.at(end).normal((40, 2)) for end in "st")
    coefficients = Coefficients((-0.5, 1.5), (0.2, 0.9), k_up=0.1, k_down=0.8)
    plain, models = EulerMaruyama(), [MIXTURES[2], OTHERS[2]]
    with_, q_with = log_ratios(EulerMaruyama(reference=0.7), models, x_s, x_t, s, t, coefficients)
    without, q_without = log_ratios(plain, models, x_s, x_t, s, t, coefficients)
    added = q_with - q_without
    assert added.abs().min() > 1e-3
    torch.testing.assert_close(with_ - without, added.expand(2, -1), atol=1e-9, rtol=1e-12)


# -- control off -----------------------------------------------------------------------------------------

MIXTURES = {
    n: cd.models.GaussianMixture([0.3, 0.5, 0.2], 2 * STREAM.at("means", n).normal((3, n)), [0.3, 0.8, 0.5])
    for n in (1, 2, 5)
}
OTHERS = {n: cd.models.GaussianMixture([0.6, 0.4], STREAM.at("other", n).normal((2, n)), [0.9, 0.4]) for n in (1, 2, 5)}
KERNELS = {
    "fisher": Gaussian(variance="fisher"),
    "auto": Gaussian(),
    "fisher-diagonal": Gaussian(variance="fisher-diagonal"),
    "rho": Gaussian(variance=0.9),
    "ddpm": Gaussian(variance=0.0),
    "inf": Gaussian(variance=math.inf),
    "euler": EulerMaruyama(),
    "euler with reference": EulerMaruyama(reference=1.0),
}


@pytest.mark.parametrize("substeps", [1, 4])
@pytest.mark.parametrize("n", MIXTURES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_without_control_no_path_has_any_work(kernel, n, substeps):
    def check(target, **options):
        ladder = cd.ladder.karras(5, 0.05, 20.0, substeps=substeps)
        chain = cd.ReplicaExchange(
            target, ladder, n_chains=8, process=KERNELS[kernel], fit_samples=32, seed=1, **options
        )
        for _ in range(2):
            work = chain.step().swaps.log_work
            assert work[~work.isnan()].abs().max() <= 1e-10

    check(MIXTURES[n])
    refuted(check, MIXTURES[n] ** 1.001)
    refuted(check, MIXTURES[n], proposal=cd.Proposal("paper", exponents=(0.999,)))


def test_with_equal_variances_the_work_of_a_step_is_that_of_feynman_kac_correctors():
    """(d/2)(|S|^2 - sum_j c_j |score_j|^2), at the noisy end, whatever the other end is."""
    models, c = [MIXTURES[2], OTHERS[2]], (-0.7, 1.9)
    coefficients = Coefficients(c, c, k_up=0.0, k_down=1.0)
    s, t = steps(60)
    x_s, x_t = (2 * STREAM.at(end).normal((60, 2)) for end in "st")

    def check(variance):
        l, q = log_ratios(Gaussian(variance=variance), models, x_s, x_t, s, t, coefficients)
        work = c[0] * l[0] + c[1] * l[1] - q
        scores = [score_of(model.predict(x_t, t), x_t, t) for model in models]
        total = c[0] * scores[0] + c[1] * scores[1]
        squares = (total**2).sum(1) - sum(cj * (sj**2).sum(1) for cj, sj in zip(c, scores, strict=True))
        torch.testing.assert_close(work, (t**2 - s**2) / 2 * squares, atol=1e-9, rtol=1e-10)

    check(math.inf)
    refuted(check, 50.0)


@pytest.mark.parametrize("kernel", ["fisher", "inf", "euler", "euler with reference"])
def test_the_error_of_log_ratios_falls_with_the_square_root_of_the_number_of_steps(kernel):
    """On a mixture, along the noising of exact samples: RMS ~ (M K)^(-1/2), so 9 times the steps give a third."""
    model, errors = MIXTURES[1], []
    for n_steps in (25, 225):
        ladder = cd.ladder.karras(2, 0.2, 8.0, substeps=n_steps)
        evaluate = evaluator(model, ladder, KERNELS[kernel], "paper")
        x = model.sample(500, STREAM.at("clean"), t=0.2)
        start = evaluate(x, ladder.times[:1].expand(500))
        path = walk(
            evaluate,
            x,
            start,
            torch.zeros(500, dtype=torch.long),
            torch.ones(500, dtype=torch.long),
            n_steps,
            STREAM,
        )
        truth = model.log_prob(x, 0.2) - model.log_prob(path.x, 8.0)
        errors.append(float((path.models[0] - truth).square().mean().sqrt()))
    order = math.log(errors[0] / errors[1]) / math.log(9)
    assert 0.35 < order < 0.75, (errors, order)


# -- proposals are drawn from the laws that their ratios assume -------------------------------------------

C = (-0.4, 1.7)
LAW = Coefficients(target=C, proposal=(-0.1, 1.2), k_up=0.15, k_down=0.8)
TWO = FisherTable(
    TIMES,
    torch.cat([table(rho, torch.zeros(3)).values for rho in (RHO, [0.3, 0.2, 1.0])]),
    torch.zeros(2, 3),
)
PROPOSALS = {
    "rho": (Gaussian(variance=0.8), (3,)),
    "inf": (Gaussian(variance=math.inf), (3,)),
    "diagonal": (Gaussian(variance="fisher-diagonal", information=TWO), (3,)),
    "basis": (Gaussian(variance="fisher-diagonal", information=TWO, basis=TURNED), (3,)),
    "part of a basis": (Gaussian(variance=0.8, basis=TURNED[:2]), (3,)),
    "pieces": (Gaussian(variance="fisher-diagonal", information=TWO.repeated(2), basis=TURNED), (2, 3)),
    "pieces of part of a basis": (Gaussian(variance=0.8, basis=TURNED[:2]), (2, 3)),
    "zero mean": (Gaussian(variance=0.8, zero_mean=0), (4, 2)),
    "euler": (EulerMaruyama(), (3,)),
    "euler with reference": (EulerMaruyama(reference=1.0), (3,)),
}


def kernel_law(process, s, t, rises, coefficients=LAW):
    """Gain and variance of the proposal's step, by the formulas of the design, and the rows it lives on."""
    if isinstance(process, EulerMaruyama):
        d = 2 * (s if rises else t) * (t - s)
        return (coefficients.k_up if rises else coefficients.k_down) * d, f64([d])
    d = t**2 - s**2
    if rises:
        return coefficients.k_up * d, f64([d])
    if isinstance(process.variance, float):
        information = f64([coefficients.total / (t**2 + process.variance**2)])
    else:
        information = sum(
            c * v[t == TIMES][0] / t**2 for c, v in zip(coefficients.target, process.information.values, strict=True)
        )
    curvature = ((1 - 2 * coefficients.k_up) * information).clamp(0, 1 / t**2)
    return coefficients.k_down * d, d - d**2 * curvature


def rows_of(process, event):
    if process.zero_mean is not None:
        return ATOMS
    if process.basis is None:
        return torch.eye(math.prod(event), dtype=torch.float64)
    return pieces(process.basis, math.prod(event) // process.basis.shape[1])


@pytest.mark.parametrize("rises", [True, False], ids=["up", "down"])
@pytest.mark.parametrize("name", PROPOSALS)
def test_walks_have_the_mean_and_covariance_of_the_formulas(name, rises):
    process, event = PROPOSALS[name]
    basis, n, s, t = rows_of(process, event), 20_000, 0.7, 1.9
    x = process.project(STREAM.at("x").normal((1, *event)))
    drift = STREAM.at("drift").normal((1, *event))
    at_x = Evaluation((), drift.expand(n, *event), torch.zeros(n))
    s_, t_ = (torch.full((n,), u, dtype=torch.float64) for u in (s, t))
    drawn = process.step(x.expand(n, *event), at_x, s_, t_, torch.full((n,), rises), STREAM.at("walk"), LAW)
    torch.testing.assert_close(drawn, process.project(drawn), atol=1e-12, rtol=0)  # never leaves the subspace

    def check(gain, variance):
        z = ((drawn - x - gain * drift).flatten(1) @ basis.T) / variance.sqrt()
        assert_mean(z, 0.0)
        assert_mean(z[:, :, None] * z[:, None], torch.eye(z.shape[1], dtype=torch.float64))

    gain, variance = kernel_law(process, s, t, rises)
    check(gain, variance)
    refuted(check, gain * 1.2 + 0.1, variance)
    refuted(check, gain, variance * 1.1)


@pytest.mark.parametrize("name", PROPOSALS)
def test_log_ratios_of_the_proposal_are_those_of_its_kernels(name):
    process, event = PROPOSALS[name]
    basis, s, t = rows_of(process, event), 0.7, 1.9
    x_s, x_t, drift_s, drift_t = process.project(STREAM.at("ends").normal((4, 25, *event)).flatten(0, 1)).chunk(4)
    s_, t_ = (torch.full((25,), u, dtype=torch.float64) for u in (s, t))
    at_s, at_t = (Evaluation((x_t, x_s), drift, torch.zeros(25)) for drift in (drift_s, drift_t))
    _, found = process.log_ratios(x_s, x_t, at_s, at_t, s_, t_, LAW)
    if name == "euler with reference":
        found = found - process._correction(x_s, x_t, s_, t_)

    def log_density(end, start, drift, rises, k):
        gain, variance = kernel_law(process, s, t, rises)
        scale = torch.diag(variance.expand(len(basis)))
        mean = (start + k * gain * drift).flatten(1) @ basis.T
        return MultivariateNormal(mean, scale).log_prob(end.flatten(1) @ basis.T)

    def check(k_up=1.0, k_down=1.0):
        expected = log_density(x_s, x_t, drift_t, False, k_down) - log_density(x_t, x_s, drift_s, True, k_up)
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)

    check()
    refuted(check, k_up=0.0)
    refuted(check, k_down=0.9)


def test_balanced_and_paper_are_the_numbers_of_the_design():
    target = MIXTURES[1] ** 2.5
    balanced, paper = cd.Proposal().coefficients(target), cd.Proposal("paper").coefficients(target)
    assert (balanced.k_up, balanced.k_down) == pytest.approx((1.5 / 5, 3.5 / 5))
    assert (paper.k_up, paper.k_down) == (0.0, 1.0)
    one = cd.Proposal().coefficients(cd.guided(MIXTURES[1], OTHERS[1], 3.0))
    assert (one.k_up, one.k_down) == (0.0, 1.0)
    assert one.target == (-2.0, 3.0)


@pytest.mark.parametrize("exponents", [(-0.4, 1.4), (0.0, 1.0), (0.8, 0.2), (0.3, 0.9)], ids=str)
def test_the_proposal_has_its_own_exponents_whatever_they_sum_to(exponents):
    """Guidance of strength 3 proposed with another strength: both sum to one, and still the drift is the proposal's."""
    target = cd.guided(MIXTURES[2], OTHERS[2], 3.0)
    coefficients = cd.Proposal(exponents=exponents).coefficients(target)
    assert (coefficients.target, coefficients.proposal) == ((-2.0, 3.0), exponents)
    x, t = STREAM.normal((30, 2)), TIMES[[1, 2, 3]].repeat(10)
    scores = [score_of(m.predict(x, t), x, t) for m in (OTHERS[2], MIXTURES[2])]

    def check(c):
        found = evaluator(target, exponents=exponents)(x, t).drift
        torch.testing.assert_close(found, c[0] * scores[0] + c[1] * scores[1], atol=1e-10, rtol=1e-10)

    check(exponents)
    refuted(check, target.exponents)


# -- reward guidance --------------------------------------------------------------------------------------


def reward(x):
    return x[:, 0] ** 3 / 4 - 1.5 * x[:, 0] * x[:, 1]


@pytest.mark.parametrize("on", ["prediction", "state"])
def test_guidance_is_the_gradient_of_the_reward_at_the_point(on):
    """Central differences of r_t(x) itself, annealing and scale included."""
    target = (MIXTURES[2] ** 0.6 * OTHERS[2] ** 0.9).tilt(reward, on=on, scale=1.7, guidance="gradient")
    evaluate, plain = evaluator(target), evaluator(target, guidance="none")
    x, t, h = STREAM.normal((30, 2)), TIMES[[1, 2, 3]].repeat(10), 1e-5
    difference = torch.stack(
        [(plain(x + h * e, t).reward - plain(x - h * e, t).reward) / (2 * h) for e in EYE[:2, :2]], 1
    )

    def check(found):
        torch.testing.assert_close(found, difference, atol=1e-6, rtol=1e-6)

    guidance = evaluate(x, t).drift - plain(x, t).drift
    check(guidance)
    refuted(check, guidance * 1.001 + 0.001)
    assert torch.equal(evaluate(x, t).reward, plain(x, t).reward)


def test_jacobian_free_guidance_is_the_gradient_at_the_prediction():
    target = (MIXTURES[2] ** 0.6 * OTHERS[2] ** 0.9).tilt(reward, anneal=cd.anneal.linear())
    evaluate, plain = evaluator(target, guidance="jacobian-free"), evaluator(target)
    x, t = STREAM.normal((30, 2)), TIMES[[1, 2, 3]].repeat(10)
    seen = 0.4 * MIXTURES[2].predict(x, t) + 0.6 * OTHERS[2].predict(x, t)
    slope = torch.stack([0.75 * seen[:, 0] ** 2 - 1.5 * seen[:, 1], -1.5 * seen[:, 0]], dim=1)
    gamma, shrink = evaluate.ladder.progress(t), 0.9**2 / (0.9**2 + t**2)
    torch.testing.assert_close(
        evaluate(x, t).drift - plain(x, t).drift, (gamma * shrink)[:, None] * slope, atol=1e-12, rtol=1e-9
    )


def test_jacobian_free_guidance_of_a_reward_on_the_state_is_its_own_gradient():
    """No network stands between the state and such a reward, so there is no Jacobian to replace."""
    target = (MIXTURES[2] ** 0.6 * OTHERS[2] ** 0.9).tilt(reward, on="state", anneal=cd.anneal.linear())
    free, exact = (evaluator(target, guidance=guidance) for guidance in ("jacobian-free", "gradient"))
    x, t = STREAM.normal((30, 2)), TIMES[[1, 2, 3]].repeat(10)
    slope = torch.stack([0.75 * x[:, 0] ** 2 - 1.5 * x[:, 1], -1.5 * x[:, 0]], dim=1)
    expected = free.ladder.progress(t)[:, None] * slope
    found = free(x, t).drift - evaluator(target)(x, t).drift
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(free(x, t).drift, exact(x, t).drift, atol=1e-12, rtol=1e-9)
    shrink = 0.9**2 / (0.9**2 + t**2)
    refuted(torch.testing.assert_close, found, shrink[:, None] * expected, atol=1e-12, rtol=1e-9)


def test_clipping_bounds_the_norm_and_keeps_the_direction():
    target = MIXTURES[2].tilt(reward, on="state", guidance="gradient", anneal=cd.anneal.constant())
    x, t = 3 * STREAM.normal((30, 2)), torch.ones(30, dtype=torch.float64)
    plain = evaluator(target, guidance="none")(x, t).drift
    full, clipped = (evaluator(target, clip=clip)(x, t).drift - plain for clip in (None, 2.0))
    wanted = full * (2.0 / full.norm(dim=1, keepdim=True)).clamp(max=1)
    assert (full.norm(dim=1) > 2).any()
    torch.testing.assert_close(clipped, wanted, atol=1e-12, rtol=1e-10)


# -- Fisher information -----------------------------------------------------------------------------------


def quadrature(model, t: float):
    y = torch.linspace(-80, 80, 40_001, dtype=torch.float64)[:, None].requires_grad_()
    prediction = model.predict(y, torch.full((len(y),), t, dtype=torch.float64))
    slope = torch.autograd.grad(prediction.sum(), y)[0][:, 0]
    y, prediction = y.detach(), prediction.detach()
    weight = model.log_prob(y, t).exp() * (y[1, 0] - y[0, 0])
    assert float(weight.sum()) == pytest.approx(1.0, abs=1e-9)
    score = (prediction - y)[:, 0] / t**2
    return float((weight * score**2).sum() * t**2), float((weight * slope).sum())


def test_the_mean_jacobian_is_one_minus_the_scaled_information():
    """E[dD/dy] = 1 - t^2 I_t under the model's own marginal (Stein), combined as c_j / C."""
    models = [MIXTURES[1], OTHERS[1]]
    pairs = [[quadrature(model, t) for t in TIMES[1:5].tolist()] for model in models]
    values = f64([[[p[0]] for p in row] for row in pairs])
    process = Gaussian(information=FisherTable(TIMES[1:5], values, torch.zeros(2, 1)))
    slopes = f64([[p[1] for p in row] for row in pairs])

    def check(c):
        expected = (f64([0.4, 1.6])[:, None] * slopes).sum(0) / 2.0
        pulled = process.pull_back(torch.ones(4, 1, dtype=torch.float64), TIMES[1:5], Coefficients(c, c, 0.0, 1.0))
        torch.testing.assert_close(pulled[:, 0], expected, atol=1e-7, rtol=0)

    check((0.4, 1.6))
    refuted(check, (1.6, 0.4))


GAUSSIAN_CASES = ["six dimensions", "isotropic table", "diagonal", "diagonal in a basis", "two of three directions",
                  "two pieces in a basis", "two of three directions of two pieces"]  # fmt: skip


@pytest.mark.parametrize("case", GAUSSIAN_CASES)
def test_gradients_of_gaussian_data_are_pulled_back_by_the_true_jacobian(case):
    """The mean Jacobian is the only one there is, also where it turns the gradient."""
    data, broken = CASES[case]
    t = TIMES.repeat(5)
    x, g = (STREAM.at(name).normal((len(t), *data.event)) for name in ("at", "gradient"))
    _, exact = torch.autograd.functional.vjp(lambda y: data.model.predict(y, t), x, g)

    def check(process):
        pulled = process.project(process.pull_back(g, t, PLAIN))  # as a walk does
        torch.testing.assert_close(pulled, exact, atol=1e-12, rtol=1e-10)

    check(data.process)
    refuted(check, broken)


@pytest.mark.parametrize("case", [*GAUSSIAN_CASES, "zero mean"])
def test_the_posterior_variance_of_gaussian_data_is_exact(case):
    """diag Cov[x_0 | x_t], whatever the basis in which it was measured."""
    data, broken = CASES[case]

    def check(process):
        for t, found in zip(TIMES, process.posterior_variance(TIMES, data.event), strict=True):
            variance = (data.rho**2 * t**2 / (data.rho**2 + t**2)).expand(len(data.basis))
            covariance = data.basis.T @ torch.diag(variance) @ data.basis
            torch.testing.assert_close(found, covariance.diag().reshape(data.event))

    check(data.process)
    refuted(check, broken)


@pytest.mark.parametrize(("kind", "scales"), [("fisher", [0.6, 0.6, 0.6]), ("fisher-diagonal", RHO)])
@pytest.mark.parametrize("basis", [None, TURNED, TURNED[:2]], ids=["event", "basis", "part of a basis"])
def test_the_table_from_data_agrees_with_closed_forms(kind, scales, basis):
    """1 - E|x_0 - D|^2 / t^2 = t^2 / (t^2 + rho^2), the mean square with a relative standard error of sqrt(2 / n)."""
    n, mean = 10_000, f64([0.5, -1.0, 0.3])
    axes = EYE[:3, :3] if basis is None else basis
    rho, mean = f64(scales)[: len(axes)], mean[: len(axes)]
    data = Data(rho, axes, (3,), Gaussian(variance=kind, basis=basis))
    data.mean = mean
    x = data.outside(mean + rho * STREAM.at("data").normal((n, len(axes))))
    found = cd.information_from_data(data.model, x, TIMES, data.process, STREAM.at("noise"))

    def check(rho):
        exact = TIMES[:, None] ** 2 / (TIMES[:, None] ** 2 + f64(rho) ** 2)
        exact = exact.mean(1, keepdim=True) if kind == "fisher" else exact
        assert ((1 - found.values[0]) / (1 - exact) - 1).abs().max() < 5 * math.sqrt(2 / n)
        assert ((found.mean[0] - mean) / f64(rho)).abs().max() < 5 / math.sqrt(n)

    check(rho)
    refuted(check, 1.1 * rho)
    refuted(check, rho.flip(0) + f64([0.0, 0.1, 0.2])[: len(rho)])


@pytest.mark.parametrize(("kind", "scales"), [("fisher", [0.6, 0.6, 0.6]), ("fisher-diagonal", RHO)])
@pytest.mark.parametrize("basis", [None, TURNED], ids=["event", "basis"])
def test_the_fitted_table_agrees_with_closed_forms(kind, scales, basis):
    """Gaussian data: E[score_i^2] = 1 / (t^2 + rho_i^2), with a relative standard error of sqrt(2 / n) at most."""
    n, mean = 10_000, f64([0.5, -1.0, 0.3])
    axes = EYE[:3, :3] if basis is None else basis
    cov = axes.T @ torch.diag(f64(scales) ** 2) @ axes
    model = cd.models.GaussianMixture([1.0], (mean @ axes)[None], covariances=cov[None])
    ladder = cd.ladder.geometric(20, 0.02, 100.0)
    process = Gaussian(variance=kind, basis=basis)
    fitted = fit_information(model.as_target(), ladder, process, n, STREAM.at("fit"))

    def check(rho):
        t2 = ladder.times[:, None] ** 2
        exact = t2 / (t2 + f64(rho) ** 2)
        exact = exact.mean(1, keepdim=True) if kind == "fisher" else exact
        assert (fitted.values[0] / exact - 1).abs().max() < 5 * math.sqrt(2 / n)
        assert (fitted.mean[0] - mean).abs().max() < 0.01

    check(scales)
    refuted(check, [1.2 * r for r in scales])
    refuted(check, [scales[0], scales[1], 1.3])


def test_a_table_is_read_linearly_in_log_t():
    times = f64([0.1, 1.0, 10.0])
    values = f64([0.2, 0.5, 0.9]).reshape(1, 3, 1)
    at = f64([0.01, 0.1, 10**-0.5, 1.0, 10**0.75, 99.0])
    read = FisherTable(times, values, torch.zeros(1, 1)).of(0, at)
    torch.testing.assert_close(read.values[:, 0], f64([0.2, 0.2, 0.35, 0.5, 0.8, 0.9]))


# -- the noise end ----------------------------------------------------------------------------------------


def noise_of(process, coefficients, event, n=20_000):
    return process.noise(STREAM.at("top"), torch.zeros(n, *event, dtype=torch.float64), 40.0, coefficients)


@pytest.mark.parametrize("name", ["rho", "part of a basis", "pieces of part of a basis", "zero mean", "euler"])
def test_noise_has_variance_t2_over_C_where_no_scale_is_known(name):
    process, event = PROPOSALS[name]
    basis, x = rows_of(process, event), noise_of(process, LAW, event)

    def check(total):
        z = x.flatten(1) @ basis.T / (40.0 / math.sqrt(total))
        assert_mean(z, 0.0)
        assert_mean(z[:, :, None] * z[:, None], torch.eye(z.shape[1], dtype=torch.float64))
        assert_mean(x.flatten(1).square().sum(1), 1600 / total * len(basis))

    check(LAW.total)
    refuted(check, 1.0)


def test_noise_is_the_product_of_the_models_marginals_where_their_scales_are_known():
    """For two Gaussians the noise end is exactly N(m, 1 / sum_j c_j I_j), also where t is not much larger than rho."""
    rho = f64([[30.0, 10.0], [5.0, 60.0]])
    mu = f64([[20.0, -30.0], [-10.0, 60.0]])
    t2 = TIMES[None, :, None] ** 2
    information = FisherTable(TIMES, t2 / (t2 + rho[:, None] ** 2), mu)
    x = noise_of(Gaussian(variance="fisher-diagonal", information=information), LAW, (2,))

    def check(c):
        precision = sum(cj / (1600 + rj**2) for cj, rj in zip(c, rho, strict=True))
        mean = sum(cj / (1600 + rj**2) * mj for cj, rj, mj in zip(c, rho, mu, strict=True)) / precision
        z = (x - mean) * precision.sqrt()
        assert_mean(z, 0.0)
        assert_mean(z[:, :, None] * z[:, None], torch.eye(2, dtype=torch.float64))

    check(C)
    refuted(check, (C[1], C[0]))


# -- known densities ---------------------------------------------------------------------------------------------


def test_known_densities_replace_the_models_ratios_and_nothing_else():
    models, base = [MIXTURES[2], OTHERS[2]], Gaussian(variance=0.8)
    oracle = Gaussian(variance=0.8, log_probs=tuple(model.log_prob for model in models))
    s, t = steps(40)
    x_s, x_t = (STREAM.at(end).normal((40, 2)) for end in "st")
    found, q = log_ratios(oracle, models, x_s, x_t, s, t, LAW)
    approximate, base_q = log_ratios(base, models, x_s, x_t, s, t, LAW)
    assert torch.equal(q, base_q)
    for j, model in enumerate(models):
        torch.testing.assert_close(found[j], model.log_prob(x_s, s) - model.log_prob(x_t, t), atol=1e-12, rtol=0)
    assert (found - approximate).abs().max() > 0.1


def test_log_work_has_each_term_once_with_its_sign():
    """r_s - r_t + sum_j c_j L_j - L_Q, in both directions of the same walk."""
    target = (MIXTURES[2] ** -0.4 * OTHERS[2] ** 1.7).tilt(reward, anneal=cd.anneal.linear())
    evaluate = evaluator(target)
    times = evaluate.ladder.times
    x, index = STREAM.normal((20, 2)), torch.full((20,), 2)
    for direction in (-1, 1):
        start = evaluate(x, times[2].expand(20))
        path = walk(evaluate, x, start, index, torch.full((20,), direction), 1, STREAM.at(direction))
        a, b = min(2, 2 + direction), max(2, 2 + direction)
        clean, noisy = (x, path.x) if direction > 0 else (path.x, x)
        s, t = times[a].expand(20), times[b].expand(20)
        l, q = log_ratios(evaluate.process, target.models, clean, noisy, s, t, evaluate.coefficients)
        r_s, r_t = evaluate(clean, s).reward, evaluate(noisy, t).reward
        expected = r_s - r_t - 0.4 * l[0] + 1.7 * l[1] - q
        torch.testing.assert_close(log_work(path, evaluate.coefficients), expected, atol=1e-10, rtol=1e-10)


# -- replicas anew -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0, 2, 4])
def test_a_restart_at_one_level_gives_every_level_its_marginal(level):
    """Gaussian data without a reward, from exact draws at one level: noised above and denoised below it, exactly."""
    data, n = CASES["diagonal in a basis"][0], 4000
    ladder = cd.ladder.of([TIMES[0], 0.05, TIMES[1], 0.3, TIMES[2], 1.0, TIMES[3], 4.0, TIMES[4]], substeps=2)
    t2 = ladder.times[None, :, None] ** 2
    information = FisherTable(ladder.times, t2 / (t2 + data.rho**2), data.mean[None])
    process = Gaussian(variance="fisher-diagonal", information=information, basis=data.basis)
    chain = cd.ReplicaExchange(data.model, ladder, n_chains=n, process=process, seed=3)
    chain.step()

    def check(t):
        x = data.outside(data.mean + (data.rho**2 + t**2).sqrt() * STREAM.at("start").normal((n, 3)))
        chain.restart(x, level)
        state, times = chain.state, chain.ladder.levels
        assert torch.equal(state.level, torch.arange(5).expand(n, 5))
        assert torch.equal(state.x[state.row_at(level)], x)
        fresh = chain.evaluate(state.x, times[state.level.flatten()])
        torch.testing.assert_close(state.seen.drift, fresh.drift)
        points = [data.inside(state.x[state.row_at(m)]) - data.mean for m in range(5)]
        for i in range(5):
            for j in range(i, 5):  # y_s and y_t = y_s + noise: a Markov chain in either direction
                covariance = torch.diag(data.rho**2 + times[i] ** 2)
                assert_mean(points[i][:, :, None] * points[j][:, None], covariance)
            assert_mean(points[i], 0.0)

    check(chain.ladder.levels[level])
    refuted(check, chain.ladder.levels[level] * 1.2 + 0.05)
    assert chain.diagnostics.trips.n_trips.sum() == 0


@pytest.mark.parametrize(("shape", "level"), [((2, 1), 3), ((2, 1), -1), ((3, 1), 0), ((2, 2), 0)])
def test_a_restart_from_nowhere_is_refused_and_changes_nothing(shape, level):
    chain = cd.ReplicaExchange(MIXTURES[1], cd.ladder.karras(3, 0.1, 5.0), n_chains=2, process=Gaussian(variance=1.0))
    before = chain.state
    with pytest.raises(cd.InputError, match=r"0 to 2 and points \(2, 1\)"):
        chain.restart(torch.zeros(shape, dtype=torch.float64), level)
    assert chain.state is before


def test_an_event_that_cannot_be_cut_into_pieces_is_refused():
    process = Gaussian(variance=1.0, basis=TURNED)
    model = cd.models.Denoiser(lambda y, t: y, (4,), dtype=torch.float64)
    with pytest.raises(cd.InputError, match=r"\(4,\) of 4 entries cannot be cut into pieces of 3"):
        cd.ReplicaExchange(model, cd.ladder.karras(3, 0.1, 5.0), process=process)


# -- moves within a level, and below level 0 ----------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 0.4])
@pytest.mark.parametrize("substeps", [1, 2])
def test_langevin_moves_by_its_formula(substeps, scale):
    """`x + h S + sqrt(2 h) xi` with `h = scale t (t - t_below)`, the time below being one sub-step down."""
    beta, n_chains = 1.6, 4000
    ladder = cd.ladder.karras(4, 0.1, 10.0, substeps=substeps)
    options = {"process": Gaussian(variance=0.9), "n_chains": n_chains, "explorer": cd.Langevin(scale)}
    chain = cd.ReplicaExchange(MIXTURES[2] ** beta, ladder, **options)
    before, level = chain.state.x, chain.state.level.flatten()
    after = chain.explorer(chain.state, chain.evaluate, STREAM.at("langevin"))[0].x
    below = f64([max(0.0, float(2 * ladder.times[0] - ladder.times[1])), *ladder.times])[level * substeps]
    t = ladder.levels[level]
    drift = beta * score_of(MIXTURES[2].predict(before, t), before, t)

    def check(factor):
        h = (factor * scale * t * (t - below))[:, None]
        xi = (after - before - h * drift) / (2 * h).sqrt()
        for m in range(4):
            z = xi[level == m]
            assert_mean(torch.cat([z, z.square() - 1, (z[:, 0] * z[:, 1])[:, None]], dim=1), 0.0)

    check(1.0)
    refuted(check, 2.0)
    refuted(check, 0.5)


def test_finished_samples_of_gaussian_data_have_the_law_of_the_last_time():
    """Three steps below level 0, each with its own noise: variance `rho^2 + s^2`; one noise for all would widen it."""
    rho, n = 1.0, 20_000
    model = cd.models.GaussianMixture([1.0], [[0.4]], [rho], process=Gaussian(variance=rho))
    ladder = cd.ladder.of([3.0, 300.0], finish=[2.0, 1.0, 0.5])

    def check(x):
        assert_mean(x[:, 0], 0.4)
        assert_mean((x[:, 0] - 0.4).square(), rho**2 + 0.5**2)

    def denoised(streams):
        x = model.sample(n, STREAM.at("level 0"), 3.0)
        for t, s, stream in zip((3.0, 2.0, 1.0), ladder.finish, streams, strict=True):
            d = t * t - s * s
            mean = x + d * score_of(model.predict(x, f64([t]).expand(n)), x, f64([t]).expand(n))
            x = mean + math.sqrt(d - d * d / (t * t + rho * rho)) * stream.normal((n, 1))
        return x

    check(cd.Plain(model, ladder).sample(n).x)
    check(cd.ReplicaExchange(model, ladder, n_chains=n).output())
    check(denoised([STREAM.at("own", i) for i in range(3)]))
    refuted(check, denoised([STREAM.at("shared")] * 3))


def test_a_process_that_serves_several_samplers_gives_each_what_it_would_give_it_alone():
    """What a process remembers of times and exponents belongs to the sampler that asked for it."""
    ladder, other = cd.ladder.karras(5, 0.1, 10.0), cd.ladder.karras(5, 0.2, 4.0)
    cases = [(MIXTURES[2] ** 1.6, ladder), (MIXTURES[2] ** 0.5, ladder), (MIXTURES[2] ** 1.6, other)]
    options = {"n_chains": 3, "proposal": cd.Proposal(k="paper")}  # whose variance depends on the exponents
    shared = Gaussian(variance=0.9)
    together = [cd.ReplicaExchange(target, levels, process=shared, **options) for target, levels in cases]
    for _ in range(3):
        for chain in together:
            chain.step()
    for (target, levels), chain in zip(cases, together, strict=True):
        alone = cd.ReplicaExchange(target, levels, process=Gaussian(variance=0.9), **options)
        for _ in range(3):
            alone.step()
        assert torch.equal(chain.state.x, alone.state.x)
    assert not torch.equal(together[0].state.x, together[1].state.x)


def test_squares_of_many_coordinates_are_summed_by_pieces():
    """Single precision alone would be off by more: the pieces, what is left of them, and a short row."""
    z = Stream(5).normal((2, 3 * PIECE + 7)).float()
    for part in (z, z[:, : 2 * PIECE], z[:, :9]):
        torch.testing.assert_close(_sum_squares(part, torch.float64), part.double().square().sum(1), rtol=1e-6, atol=0)


def test_the_posterior_variance_of_padded_events_is_that_of_their_own_entries():
    """Atoms 0 and 2 of three, in the plane; with a zero mean each has half of what it would have alone."""
    mask = torch.tensor([[True] * 2, [False] * 2, [True] * 2])
    diagonal = Gaussian(information=table([0.2, 0.6, 2.5, 1.0], torch.zeros(4)), mask=mask)
    found = diagonal.posterior_variance(TIMES, (3, 2))
    rho2 = f64([0.2, 0.6, 2.5, 1.0]) ** 2
    exact = TIMES[:, None] ** 2 * rho2 / (TIMES[:, None] ** 2 + rho2)
    torch.testing.assert_close(found[:, mask], exact)
    assert not found[:, ~mask].any()
    centred = Gaussian(variance=0.8, zero_mean=0, mask=mask).posterior_variance(TIMES, (3, 2))
    one = TIMES**2 * 0.64 / (TIMES**2 + 0.64)
    torch.testing.assert_close(centred[:, mask], (one / 2)[:, None].expand(-1, 4))
    assert not centred[:, ~mask].any()


def test_known_densities_of_segments_are_summed():
    process = Gaussian(variance=0.5, log_probs=(MIXTURES[1].log_prob, OTHERS[1].log_prob)).repeated(3)
    x, t = STREAM.at("segments").normal((4, 3, 1)), TIMES[:4]
    for log_prob, model in zip(process.log_probs, (MIXTURES[1], OTHERS[1]), strict=True):
        torch.testing.assert_close(log_prob(x, t), sum(model.log_prob(x[:, i], t) for i in range(3)))
    assert Gaussian(variance=0.5).repeated(3).log_probs is None


def test_information_of_segments_is_that_of_each():
    """Whatever its form: one number for all, one per coordinate, or a matrix."""
    from crepe_diffusion.processes.information import Information, Spectrum

    class Fixed(Information):
        def __init__(self, *spectra, centre=None):
            self.spectra, self.mean = spectra, centre

        def of(self, model, t):
            return self.spectra[model]

        def centre(self, model):
            return self.mean

    which, vectors = torch.tensor([0, 1, 0]), torch.stack([orthogonal(2), torch.eye(2, dtype=torch.float64)])
    values = f64([[0.1, 0.4], [0.3, 0.2], [0.1, 0.4]])
    turned, number = Spectrum(values, vectors, which), Spectrum(values[:, :1])
    repeated = Fixed(turned, number, centre=f64([1.0, 2.0])).repeated(2)
    assert torch.equal(repeated.of(1, TIMES).values, values[:, :1])
    assert torch.equal(repeated.of(0, TIMES).values, values.repeat(1, 2))
    assert repeated.centre(0).tolist() == [1.0, 2.0, 1.0, 2.0]
    assert Fixed(turned).repeated(2).centre(0) is None
    z = STREAM.at("turned").normal((3, 4))
    dense = [vectors[k] @ torch.diag(values[i]) @ vectors[k].T for i, k in enumerate(which.tolist())]
    expected = torch.stack([(z[i].reshape(2, 2) @ dense[i]).flatten() for i in range(3)])
    torch.testing.assert_close(repeated.of(0, TIMES).times(z), expected)
    # A sum of matrices with other axes, for rows that share them and for two pieces.
    other = Spectrum(values.flip(1).repeat(1, 2), vectors.flip(0), which)
    total = Spectrum.total([repeated.of(0, TIMES), other], [0.5, -2.0])
    second = [vectors[1 - k] @ torch.diag(values[i].flip(0)) @ vectors[1 - k].T for i, k in enumerate(which.tolist())]
    expected = torch.stack([(z[i].reshape(2, 2) @ (0.5 * dense[i] - 2.0 * second[i])).flatten() for i in range(3)])
    torch.testing.assert_close(total.times(z), expected)


@pytest.mark.parametrize("kind", [FisherTable, Isotropic, Adaptive])
def test_measured_information_stays_between_none_and_all(kind):
    """What is measured of few samples may be less or more; a share in between is left as it is."""
    ones = torch.ones(8, 3, dtype=torch.float64)
    for size, share in ((0.0, 0.0), (0.5, 0.25), (10.0, 1.0)):
        assert kind.of_scores(size * ones, 1.0, 3).unique().tolist() == pytest.approx([share])
        assert kind.of_scores(size / 2 * ones, 2.0, 3).unique().tolist() == pytest.approx([share])
        assert kind.of_errors(size * ones, 1.0, 3).unique().tolist() == pytest.approx([1 - share])
        assert kind.of_errors(2 * size * ones, 2.0, 3).unique().tolist() == pytest.approx([1 - share])
    assert kind.is_isotropic == (kind is Isotropic)


def test_differences_that_noise_explains_are_not_believed():
    squares = f64([[0.0, 4.0], [4.0, 1.0]])  # means of 2 and 2.5, each of which is uncertain by more than one
    assert Adaptive.of_scores(squares.sqrt(), 0.3, 2).tolist() == pytest.approx([0.09 * 2.25] * 2)


@pytest.mark.parametrize("values", [[0.9, 0.1], [0.1, 0.9]])
def test_combined_information_stays_between_none_and_all(values):
    """`-A_1 + 2 A_2` is -.7 or 1.7: a denoiser whose mean Jacobian would be above one, or negative."""
    information = FisherTable(f64([1.0]), f64(values).reshape(2, 1, 1), torch.zeros(2, 3))
    process, law = Gaussian(information=information), Coefficients((-1.0, 2.0), (-1.0, 2.0), 0.0, 1.0)
    t, s = f64([2.0]), f64([1.0])
    bound = float(values[1] > 0.5)
    assert process.pull_back(torch.ones(1, 3), t, law).tolist() == [[1 - bound] * 3]
    # d = 3 and d / t^2 = .75
    assert process.proposal_variance(s, t, law).values.tolist() == [[pytest.approx(3 * (1 - 0.75 * bound))]]
    some = Coefficients((0.5, 0.5), (0.5, 0.5), 0.3, 0.7)
    assert process.proposal_variance(s, t, some).values.tolist() == [[pytest.approx(3 * (1 - 0.75 * 0.4 * 0.5))]]


@pytest.mark.parametrize(("most", "each"), [(2**21, 0), (0, 1)])
def test_variances_are_computed_once(most, each, monkeypatch):
    """Those of a ladder before the first step if they fit into memory, else once for a step and its ratio."""
    calls, original = [], Gaussian.proposal_variance

    def counted(self, s, t, coefficients):
        calls.append(len(s))
        return original(self, s, t, coefficients)

    monkeypatch.setattr(Gaussian, "proposal_variance", counted)
    monkeypatch.setattr("crepe_diffusion.processes.gaussian.MOST_KEPT", most)
    ladder = cd.ladder.karras(5, 0.1, 10.0, substeps=2)
    chain = cd.ReplicaExchange(MIXTURES[1] ** 2.0, ladder, n_chains=2, process=Gaussian(variance=0.9))
    if most:
        assert calls == [1, 9 + 8], "one to see how many numbers it has, then steps and rows that stay"
    else:
        assert calls == [1] + [2] * 8, "two chains walk down eight steps"
    calls.clear()
    chain.step(), chain.step()
    assert calls == [10] * each * 2 * 2, "two sub-steps of ten replicas, twice"
