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
from crepe_diffusion.processes import Euler, EulerMaruyama, Masked, Uniform

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


def first(x: torch.Tensor) -> torch.Tensor:
    return x[:, 0].double()


def passed(seed: int) -> torch.Tensor:
    """What pilots estimate and plan: log Z by three ways each, what the steps do to it, the cuts of plans."""
    target = (mixture() ** 2.0).tilt(lambda x: 0.3 * x[:, 1], on="state", anneal=cd.anneal.constant())
    one = cd.pilot(target, LEVELS, n=12, seed=seed, fit_samples=16)
    model = cd.models.TokenTable(TABLE, "uniform")
    two = cd.pilot(model**1.5, TIMES, n=6, seed=seed, process=Uniform(3, at_once=2))
    found = [p.log_z(way) for p in (one, two) for way in ("down", "up", "bar")]
    found += [*one.discretisation.values(), *two.discretisation.values(), one.mean(first), one.particles.log_z]
    cuts = [[c.arrivals, c.effective] for p in (one, two) for c in p.plan().cuts]
    return torch.tensor([*([e.value, e.error] for e in found), *cuts], dtype=torch.float64)


def estimated(seed: int) -> torch.Tensor:
    """log Z and a mean of each sampler, then effective sizes and rows."""
    target, options = mixture() ** 2.0, {"seed": seed, "fit_samples": 16}
    often = {"ess_threshold": 0.9, **options}
    results = [
        cd.ReplicaExchange(target, LEVELS, n_chains=2, **options).sample(12, burn_in=2, thin=2),
        cd.SMC(target, LEVELS, n_particles=6, n_batches=3, resampling=cd.Partial(), **often).sample(2),
        cd.SMC(target, LEVELS, n_particles=16, resampling=cd.Residual(), **often).sample(),
        cd.ParticleGibbs(target, LEVELS, n_particles=4, n_chains=2, **often).sample(8, burn_in=1),
    ]
    found = [[e.value, e.error] for out in results for e in (out.log_z, out.mean(first))]
    return torch.tensor([*found, *([out.ess(first), out.evaluations.rows] for out in results)], dtype=torch.float64)


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
    passed: [
        [6.78981767325, 0.788253289519],
        [4.07049803639, 0.470154863529],
        [4.00390560069, 0.710524403517],
        [-0.391711504669, 0.278549489889],
        [-0.247114104429, 0.51622452037],
        [-0.290591516373, 0.286082907387],
        [-2.70088672587, 2.01157234371],
        [-7.07504214784, 2.26942024455],
        [-4.88796443685, 1.46655413105],
        [0.0333151382155, 0.060065041681],
        [0.0345807729262, 0.1211431087],
        [0.0339479555709, 0.0750469225978],
        [-1.51678280676, 1.15118611987],
        [8.01486971732, 2.94739056513],
        [9.3428259638, 6.42469735342],
        [11.4001389754, 3.6263393609],
        [6.4115192777, 3.59653255073],
        [4.02776057839, 2.69567981801],
        [15.2156078248, 9.19317973202],
        [16.5970106769, 9.17455034043],
        [17.7126964925, 9.65795199967],
    ],
    estimated: [
        [5.66140841423, 0.192900706787],
        [0.579053472155, 0.48519319623],
        [9.09098345235, 0.604735988331],
        [-0.147632923322, 1.20254586837],
        [6.46100881373, 0.68415506659],
        [1.22619884732, 0.413327934892],
        [6.05873250455, 0.18705380011],
        [0.995875952678, 0.200129622295],
        [10.2857142857, 684.0],
        [1.57535568666, 470.0],
        [4.39764896183, 290.0],
        [33.8596854087, 848.0],
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
