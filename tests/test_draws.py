"""A seed gives the draws that it gave in earlier versions: stored runs can be continued and results repeated.

Change the numbers only together with a note in CHANGELOG.md that draws have changed. The oldest were written before
states could leave the CPU.
"""

from __future__ import annotations

import hashlib

import pytest
import torch

import crepe_diffusion as cd
from checks import refuted
from crepe_diffusion.processes import Euler, EulerMaruyama, Masked

LEVELS = cd.ladder.karras(5, 0.05, 10.0, substeps=2)
FINISH = cd.ladder.karras(4, 0.05, 10.0, n_finish=1)
TIMES = cd.ladder.of([0.02, 0.3, 0.5, 0.7, 0.98], substeps=2)
TABLE = torch.tensor([[0.3, 0.05, 0.1], [0.02, 0.2, 0.03], [0.1, 0.15, 0.05]], dtype=torch.float64)


def mixture(dtype: torch.dtype = torch.float64) -> cd.models.GaussianMixture:
    return cd.models.GaussianMixture([0.3, 0.7], [[-2.0, 1.0], [1.5, -1.0]], [[0.5, 0.3], [0.4, 0.6]], dtype=dtype)


def exchange(seed: int) -> torch.Tensor:
    chain = cd.ReplicaExchange(mixture() ** 2.0, LEVELS, n_chains=2, seed=seed, fit_samples=16, explorer=cd.Bounce())
    return chain.sample(2).x


def particles(seed: int) -> torch.Tensor:
    return cd.SMC(mixture(torch.float32) ** 2.0, LEVELS, n_particles=4, seed=seed, fit_samples=16).sample().x


def tokens(seed: int) -> torch.Tensor:
    return cd.ReplicaExchange(cd.models.TokenTable(TABLE) ** 1.5, TIMES, n_chains=4, seed=seed).sample(3).x


def sweeps(seed: int) -> torch.Tensor:
    chain = cd.ParticleGibbs(mixture() ** 2.0, FINISH, n_particles=3, n_chains=2, seed=seed, fit_samples=16)
    return chain.sample(2).x[::3]


def plain(seed: int) -> torch.Tensor:
    return cd.Plain(mixture() ** 2.0, FINISH, seed=seed, fit_samples=16).sample(2).x


def piloted(seed: int) -> torch.Tensor:
    target = mixture() ** 2.0
    found = cd.pilot(target, LEVELS, n=4, seed=seed, fit_samples=16)
    return torch.cat([found.end[:2], cd.ReplicaExchange(target, pilot=found, seed=seed).sample(2).x])


def langevin(seed: int) -> torch.Tensor:
    target, process = mixture().tilt(lambda x: x[:, 0], guidance="gradient"), EulerMaruyama(reference=1.0)
    chain = cd.ReplicaExchange(target, LEVELS, n_chains=2, seed=seed, process=process, explorer=cd.Langevin())
    return chain.sample(2).x


def uniform(seed: int) -> torch.Tensor:
    model = cd.models.TokenTable(TABLE, "uniform")
    return cd.ReplicaExchange(model**1.5, TIMES, n_chains=4, seed=seed, explorer=cd.SingleToken()).sample(3).x


def euler(seed: int) -> torch.Tensor:
    process = Euler(base=Masked(3))
    return cd.SMC(cd.models.TokenTable(TABLE) ** 1.5, TIMES, n_particles=12, seed=seed, process=process).sample().x


def chosen(seed: int) -> torch.Tensor:
    return cd.sample(mixture() ** 2.0, LEVELS, n_effective=5, budget=4000, seed=seed).x[::9]


DRAWS = {
    exchange: [
        [1.701111706468, -1.037820199001],
        [1.087075223247, -0.734953734754],
        [1.584648116146, -0.984298558699],
        [1.29386094077, -0.974312803164],
    ],
    particles: [[1.683012, -0.321878], [-1.836414, 1.048134], [1.380633, -1.262441], [1.666071, -0.611464]],
    sweeps: [
        [1.959648539455, -1.017788171054],
        [1.421975509165, -0.840892831104],
        [1.430609309375, -1.171420148826],
        [1.552701492058, -1.38038391296],
    ],
    plain: [[-1.784984037728, 1.26504683992], [1.448473956057, -1.049930559626]],
    piloted: [
        [1.601006350149, -1.104130043317],
        [1.200654691897, -1.69317963639],
        [2.228693800455, -1.839662150963],
        [2.228693800455, -1.839662150963],
    ],
    langevin: [
        [-1.140605799099, 1.040031440223],
        [-1.775036191483, 1.392755066277],
        [-1.111850904773, 1.10133286183],
        [-1.847566671764, 1.320640323536],
    ],
    uniform: [[1, 1], [0, 0], [0, 2], [1, 1], [1, 1], [0, 0], [0, 0], [1, 1], [1, 1], [0, 0], [0, 2], [1, 1]],
    euler: [[2, 2], [3, 1], [0, 1], [2, 0], [0, 0], [2, 0], [3, 0], [2, 1], [0, 1], [3, 1], [1, 0], [0, 2]],
    chosen: [
        [1.865942931264, -0.429066914213],
        [1.608962422231, -1.017037092966],
        [1.546280498439, -0.352315183894],
        [1.014654620518, -0.840576634278],
        [-1.747055690364, 0.685308296901],
    ],
    tokens: [[2, 0], [0, 0], [2, 1], [0, 1], [2, 0], [0, 0], [2, 1], [0, 1], [2, 1], [2, 1], [1, 1], [0, 0]],
}


@pytest.mark.parametrize("run", DRAWS, ids=lambda run: run.__name__)
def test_a_seed_gives_the_draws_of_earlier_versions(run):
    def check(seed: int) -> None:
        x = run(seed)
        assert x.tolist() == [pytest.approx(row, rel=1e-4 if x.dtype == torch.float32 else 1e-9) for row in DRAWS[run]]

    check(1)
    refuted(check, 2)


def test_random_words_are_those_of_earlier_versions():
    """Integers, so these bits are the same on every machine."""
    words = cd.Stream(5).at(1, "a").uniform((7, 3)).numpy().tobytes()
    assert hashlib.sha256(words).hexdigest()[:16] == "b1c824d10700c68e"


@pytest.mark.parametrize(("constant", "value"), [("MOST_KEPT", 0), ("MOST_PICKED", 0)])
def test_how_variances_are_kept_changes_no_bit(monkeypatch, constant, value):
    kept = exchange(1)
    monkeypatch.setattr(f"crepe_diffusion.processes.gaussian.{constant}", value)
    monkeypatch.setattr("crepe_diffusion.processes.base.blocks", lambda x: [slice(0, 4), slice(4, len(x))])
    monkeypatch.setattr("crepe_diffusion.processes.gaussian.blocks", lambda x: [slice(0, 4), slice(4, len(x))])
    torch.testing.assert_close(exchange(1), kept, rtol=1e-12, atol=0)
