"""Positive controls: bugs that people really write, each planted into the shipped code and caught by a named check.

Every check below passes on the code as it is (`test_checks_pass`), and each row of `BUGS` makes one of them fail.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion import paths
from crepe_diffusion.kernels import State, explore
from crepe_diffusion.kernels import swap as swap_function
from crepe_diffusion.processes import Discrete, Masked, Uniform, gaussian
from crepe_diffusion.processes.gaussian import Gaussian, GaussianProcess
from crepe_diffusion.processes.information import Spectrum
from crepe_diffusion.samplers import replica_exchange, weights
from crepe_diffusion.schedules import Ladder
from enumeration import violation
from finite import line, tokens

swap_module = importlib.import_module("crepe_diffusion.kernels.swap")  # the package exports a function of that name

# -- the checks: each raises AssertionError when the law is broken -----------------------------------------


def invariant(toy: object) -> None:
    assert max(violation(toy.chain, toy.states, toy.log_pi, n) for n in (1, 2)) <= 1e-12


def masked_tempering() -> None:
    invariant(tokens("masked", "tempering", n_levels=4))  # with survival 1/2 the constants would agree by chance


def masked_everything() -> None:
    invariant(tokens("masked", "everything"))


def masked_tilting() -> None:
    invariant(tokens("masked", "tilting"))


def two_positions() -> None:
    invariant(tokens("masked", "guidance", vocab=2, length=2))


def uniform_guidance() -> None:
    invariant(tokens("uniform", "guidance"))


def line_everything() -> None:
    invariant(line("everything"))


def bounce() -> None:
    invariant(tokens("masked", "everything", explorer=cd.Bounce()))


def metropolis() -> None:
    invariant(tokens("masked", "everything", explorer=cd.SingleToken()))


def mixture(dim: int = 3) -> cd.models.GaussianMixture:
    means = torch.stack([torch.full((dim,), -1.0), torch.linspace(0.5, 2.0, dim)]).double()
    return cd.models.GaussianMixture([0.3, 0.7], means, [0.6, 0.4])


def control_off() -> None:
    """Target, model and proposal agree: every path has a work of zero, K steps up or down, any variance."""
    for variance in ("fisher", 0.5, 0.0, float("inf")):
        chain = cd.ReplicaExchange(
            mixture(),
            cd.ladder.karras(6, 0.05, 5.0, substeps=2),
            n_chains=3,
            seed=1,
            process=Gaussian(variance=variance),
        )
        for _ in range(4):
            work = chain.step().swaps.log_work
            assert work.nan_to_num().abs().max() <= 1e-10


def gaussian_ratio() -> None:
    """Gaussian data with the matching information: L_j is log p_s - log p_t at any step size."""
    rho, dim = 0.7, 4
    model = cd.models.GaussianMixture([1.0], torch.zeros(1, dim), [rho], process=Gaussian(variance=rho))
    evaluate = cd.ReplicaExchange(model**1.3, cd.ladder.of([0.1, 3.0])).evaluate
    s, t = torch.full((8,), 0.4, dtype=torch.float64), torch.full((8,), 2.5, dtype=torch.float64)
    x_s, x_t = cd.Stream(0).normal((8, dim)), 3 * cd.Stream(1).normal((8, dim))
    models, _ = evaluate.process.log_ratios(x_s, x_t, evaluate(x_s, s), evaluate(x_t, t), s, t, evaluate.coefficients)
    exact = model.log_prob(x_s, s) - model.log_prob(x_t, t)
    assert (models[0] - exact).abs().max() <= 1e-10


def noise_end() -> None:
    """The noise end of p**4 has a quarter of the variance: chi-square with 40,000 degrees of freedom, |z| < 4."""
    evaluate = cd.ReplicaExchange(
        mixture() ** 4.0, cd.ladder.karras(4, 0.1, 50.0), process=Gaussian(variance=0.0)
    ).evaluate
    x = evaluate.noise(cd.Stream(5), 40_000)[:, 0]
    z = (x.square().sum() / (50.0**2 / 4) - len(x)) / (2 * len(x)) ** 0.5
    assert abs(z) < 4


def cache_is_fresh() -> None:
    """What a replica remembers is what its point would be told now."""
    for explorer in (None, cd.Bounce()):
        chain = cd.ReplicaExchange(
            mixture() ** 1.5, cd.ladder.karras(6, 0.05, 5.0), n_chains=4, seed=2, explorer=explorer
        )
        for _ in range(6):
            chain.step()
            fresh = chain.evaluate(chain.state.x, chain.ladder.levels[chain.state.level.flatten()])
            assert (fresh.drift - chain.state.seen.drift).abs().max() <= 1e-12


def round_trips() -> None:
    """With every swap accepted a replica's trip up and down takes 2 (M + 1) iterations, so all do it in step."""
    for n_levels in (2, 3, 6):
        chain = cd.ReplicaExchange(
            mixture(1),
            cd.ladder.karras(n_levels, 0.1, 5.0),
            accept=lambda a, s: torch.ones_like(a, dtype=torch.bool),
        )
        chain.sample(2 * n_levels * 5)
        trips = chain.diagnostics.trips.n_trips
        assert trips.min() >= 4
        assert trips.max() <= 5


def smc_log_z() -> None:
    """log Z of a tempered Gaussian, where the ratio is exact: |z| < 4 over 512 batches."""
    rho, beta, t0, t1 = 0.7, 2.0, 0.1, 5.0
    model = cd.models.GaussianMixture([1.0], [[0.0]], [rho], process=Gaussian(variance=rho))

    def log_z(t: float) -> float:
        v = torch.tensor(t * t + rho * rho).double()
        return float((1 - beta) / 2 * torch.log(2 * torch.pi * v) - 0.5 * torch.log(torch.tensor(beta)))

    levels = cd.ladder.karras(9, t0, t1)
    top = Gaussian(variance=rho)
    noise = lambda self, stream, like, t, coefficients: (  # noqa: E731
        stream.normal(tuple(like.shape)) * ((t * t + rho * rho) / coefficients.total) ** 0.5
    )
    process = dataclasses.replace(top)
    object.__setattr__(process, "noise", noise.__get__(process))
    out = cd.SMC(model**beta, levels, n_particles=8, n_batches=512, process=process, ess_threshold=1.0, seed=3).sample()
    z_hat = (out.batch_log_z - (log_z(t0) - log_z(t1))).exp()
    assert abs(z_hat.mean() - 1) < 4 * z_hat.std() / len(z_hat) ** 0.5


CHECKS = [
    masked_tempering, masked_everything, masked_tilting, two_positions, uniform_guidance, line_everything, bounce,
    metropolis, control_off, gaussian_ratio, noise_end, cache_is_fresh, round_trips, smc_log_z,
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_checks_pass(check):
    check()


# -- the bugs ---------------------------------------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch], None]


def with_log_work(broken: Callable[[paths.Path, object], Tensor]) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        for module in (swap_module, explore, weights):
            patch.setattr(module, "log_work", broken)

    return plant


def terms(path: paths.Path, coefficients: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    c = torch.tensor(coefficients.target, dtype=torch.float64)
    return path.reward_s, path.reward_t, c @ path.models, path.proposal


def sign_of_reward(path, coefficients):
    r_s, r_t, models, proposal = terms(path, coefficients)
    return r_s + r_t + models - proposal


def sign_of_proposal(path, coefficients):
    r_s, r_t, models, proposal = terms(path, coefficients)
    return r_s - r_t + models + proposal


def missing_exponent(path, coefficients):
    return path.reward_s - path.reward_t + path.models.sum(0) - path.proposal


def constants_dropped(patch):
    def log_ratio(self, x_s, x_t, log_p, s, t):
        revealed = (x_t == self.mask) & (x_s != self.mask)
        token = log_p.gather(-1, x_s.clamp(max=self.vocab_size - 1)[..., None])[..., 0]
        return torch.where(revealed, token, 0.0)

    patch.setattr(Masked, "log_ratio", log_ratio)


def stale_cache(patch):
    def take(self, chosen, x, seen):
        new, _ = original(self, chosen, x, seen)
        return new, self.seen

    original = State.take
    patch.setattr(State, "take", take)


def explore_accepted_only(patch):
    def step(self):
        before = self.state.level
        state, _ = swap_function(self.state, self.evaluate, self.iteration + 1, self.stream, self.accept)
        moved, _ = self.explorer(state, self.evaluate, self.stream)
        swapped = (state.level != before).flatten()
        x, seen = state.take(swapped, moved.x, moved.seen)
        self.state, self.iteration = State(x, seen, state.level), self.iteration + 1

    patch.setattr(cd.ReplicaExchange, "step", step)


def parity_off_by_one(patch):
    original = swap_module.directions
    patch.setattr(swap_module, "directions", lambda level, n, n_levels: original(level, n + 1, n_levels))


def parity_never_alternates(patch):
    patch.setattr(replica_exchange, "swap", lambda state, evaluate, n, *rest: swap_function(state, evaluate, 1, *rest))


def wrong_time_for_the_upper(patch):
    original = Masked.log_ratio

    def log_ratio(self, x_s, x_t, log_p, s, t):
        late = torch.where(torch.arange(len(t)) % 3 == 1, (s + t) / 2, t)
        return original(self, x_s, x_t, log_p, s, late)

    patch.setattr(Masked, "log_ratio", log_ratio)


def mean_over_positions(patch):
    original = Discrete.kernel_ratios

    def kernel_ratios(self, x_s, *rest):
        models, proposal = original(self, x_s, *rest)
        return models / x_s[0].numel(), proposal / x_s[0].numel()

    patch.setattr(Discrete, "kernel_ratios", kernel_ratios)


def mean_over_coordinates(patch):
    original = gaussian._quadratic
    patch.setattr(gaussian, "_quadratic", lambda z, v: original(z, v) / z.shape[1])


def noise_without_total(patch):
    patch.setattr(GaussianProcess, "_top", lambda self, t, coefficients: (Spectrum(1 / (t * t)[:, None]), None))


def reward_at_the_wrong_level(patch):
    original = Ladder.progress
    patch.setattr(Ladder, "progress", lambda self, t: original(self, (t + 0.5).clamp(max=float(self.times[-1]))))


def last_pair_forced(patch):
    original = swap_module.metropolis

    def accept(log_alpha, stream):
        return original(torch.cat([torch.full_like(log_alpha[:, :1], 0.0), log_alpha[:, 1:]], 1), stream)

    patch.setattr(replica_exchange, "metropolis", accept)
    patch.setattr(
        cd.ReplicaExchange.__init__,
        "__kwdefaults__",
        {**cd.ReplicaExchange.__init__.__kwdefaults__, "accept": accept},
    )


def token_blind(patch):
    original = Masked.log_ratio
    patch.setattr(
        Masked,
        "log_ratio",
        lambda self, x_s, x_t, log_p, s, t: original(self, x_s, x_t, log_p.logsumexp(-1, True).expand_as(log_p), s, t),
    )


def upward_drift_forgotten(patch):
    original = line.__globals__["Line"].kernel_ratios

    def kernel_ratios(self, x_s, x_t, at_s, at_t, s, t, coefficients):
        return original(self, x_s, x_t, at_s, at_t, s, t, dataclasses.replace(coefficients, k_up=0.0))

    patch.setattr(line.__globals__["Line"], "kernel_ratios", kernel_ratios)


def views_of_the_wrong_end(patch):
    original = line.__globals__["Line"].kernel_ratios

    def kernel_ratios(self, x_s, x_t, at_s, at_t, s, t, coefficients):
        return original(self, x_s, x_t, at_t, at_t, s, t, coefficients)

    patch.setattr(line.__globals__["Line"], "kernel_ratios", kernel_ratios)


def bounce_forgets_the_way_up(patch):
    original = paths.log_work
    calls = iter(range(10**6))
    patch.setattr(explore, "log_work", lambda path, coefficients: original(path, coefficients) * (next(calls) % 2 == 0))


def metropolis_without_proposal_ratio(patch):
    patch.setattr(Masked, "local_log_q", lambda self, x, *others: torch.zeros(len(x), dtype=torch.float64))


def noise_end_from_the_wrong_law(patch):
    patch.setattr(Uniform, "noise", lambda self, stream, like, t, coefficients: torch.zeros_like(like))


def swapped_rows_keep_their_points(patch):
    original = State.take

    def take(self, chosen, x, seen):
        return self.x, original(self, chosen, x, seen)[1]

    patch.setattr(State, "take", take)


def variance_of_the_wrong_sign(patch):
    def model_variance(self, model, s, t):
        d, share = self.noising_variance(s, t), ((t - s) * (t + s) / (t * t))[:, None]
        return Spectrum(d * (1 + share * self.information.of(model, t).values))

    patch.setattr(Gaussian, "model_variance", model_variance)


def weights_kept_after_resampling(patch):
    original = cd.SMC._resampled

    def resampled(self, log_w, stream):
        index, _, chosen = original(self, log_w, stream)
        return index, log_w, chosen

    patch.setattr(cd.SMC, "_resampled", resampled)


BUGS: dict[str, tuple[Plant, Callable[[], None]]] = {
    "swapped sign of the reward": (with_log_work(sign_of_reward), masked_tilting),
    "swapped sign of the proposal": (with_log_work(sign_of_proposal), masked_everything),
    "missing exponent": (with_log_work(missing_exponent), masked_tempering),
    "constants dropped though exponents do not sum to 1": (constants_dropped, masked_tempering),
    "stale cache after a swap": (stale_cache, cache_is_fresh),
    "stale cache after a swap, seen by the explorer": (stale_cache, bounce),
    "exploration on accepted rows only": (explore_accepted_only, bounce),
    "parity off by one": (parity_off_by_one, round_trips),
    "parity that never alternates": (parity_never_alternates, round_trips),
    "wrong time for one member of a pair": (wrong_time_for_the_upper, masked_everything),
    "averaged instead of summed over positions": (mean_over_positions, two_positions),
    "averaged instead of summed over coordinates": (mean_over_coordinates, gaussian_ratio),
    "noise-end variance without 1/C": (noise_without_total, noise_end),
    "reward at the wrong level": (reward_at_the_wrong_level, masked_tilting),
    "forced acceptance of the last pair": (last_pair_forced, masked_everything),
    "token-blind discrete ratio": (token_blind, masked_everything),
    "upward drift left out of the ratio": (upward_drift_forgotten, line_everything),
    "prediction of the wrong end of a step": (views_of_the_wrong_end, line_everything),
    "bounce without the work of its way up": (bounce_forgets_the_way_up, bounce),
    "SingleToken without the proposal's ratio": (metropolis_without_proposal_ratio, metropolis),
    "noise end drawn from another law": (noise_end_from_the_wrong_law, uniform_guidance),
    "levels traded but points kept": (swapped_rows_keep_their_points, masked_everything),
    "denoising variance with the wrong sign": (variance_of_the_wrong_sign, control_off),
    "weights kept after resampling": (weights_kept_after_resampling, smc_log_z),
}


@pytest.mark.parametrize("name", BUGS)
def test_bug_is_caught(name, monkeypatch):
    plant, check = BUGS[name]
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check()


def test_harmless_patch_is_not_caught(monkeypatch):
    """Another proposal is legal, so the checks must not fail at just any change."""
    original = Discrete.drift
    monkeypatch.setattr(Discrete, "drift", lambda self, *a: torch.log_softmax(original(self, *a) * 0.5, -1))
    masked_everything()
