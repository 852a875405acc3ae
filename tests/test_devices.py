"""The core on a second device: the same bits as on the CPU, and the CPU hardly ever waits for it."""

from __future__ import annotations

import pytest
import torch

import crepe_diffusion as cd
from crepe_diffusion.kernels import Bounce, Langevin, SingleToken
from crepe_diffusion.processes import Euler, EulerMaruyama, Gaussian, Masked, Uniform
from crepe_diffusion.random import Stream
from pretend import DEVICE, Pretend, Wrapped

LEVELS = cd.ladder.karras(3, 0.05, 10.0, substeps=2)
TIMES = cd.ladder.of([0.02, 0.3, 0.5, 0.7, 0.98], substeps=2)
TABLE = torch.tensor([[0.3, 0.05, 0.1], [0.02, 0.2, 0.03], [0.1, 0.15, 0.05]])
BASIS = torch.linalg.qr(Stream(3).normal((3, 3)))[0]


def near(z):
    return -(z.flatten(1) - 1).square().sum(1)


def mixture(device, flip=1.0, dtype=torch.float32):
    means = torch.tensor([[-2.0, 1.0, 0.5], [1.5, -1.0, 0.0]], device=device) * flip
    return cd.models.GaussianMixture([0.3, 0.7], means, [[0.5, 0.3, 0.6], [0.4, 0.6, 0.2]], dtype=dtype)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.SiLU(), torch.nn.Linear(8, 3))
        self.requires_grad_(False)

    def forward(self, y, sigma, condition):
        inputs = torch.cat([y / (1 + sigma[:, None]), sigma.log()[:, None], condition], 1)
        return (y + sigma[:, None] ** 2 * self.layers(inputs)) / (1 + sigma[:, None] ** 2)


def guided(device):
    net = Net().to(device)
    p, q = (cd.models.Denoiser(net, (3,), condition=torch.tensor([c])) for c in (0.0, 1.0))
    return cd.guided(p, q, 2.5)


def tokens(device, kind="masked", prompt=None):
    return cd.models.TokenTable(TABLE.to(device), kind, prompt=prompt) ** 1.5


def exchange(target, ladder=LEVELS, **options):
    return cd.ReplicaExchange(target, ladder, n_chains=2, seed=1, fit_samples=16, **options)


def smc(target, ladder=LEVELS, **options):
    return cd.SMC(target, ladder, n_particles=4, n_batches=2, seed=1, fit_samples=16, **options)


def gibbs(target, ladder=LEVELS, **options):
    return cd.ParticleGibbs(target, ladder, n_particles=4, n_chains=2, seed=1, fit_samples=16, **options)


def planned(target):
    return exchange(target, None, pilot=cd.pilot(target, LEVELS, n=8, fit_samples=16))


CASES = {
    "exchange, power": lambda d: exchange(mixture(d) ** 2.0, explorer=Bounce()),
    "exchange, float64": lambda d: exchange(mixture(d, dtype=torch.float64) ** 2.0),
    "exchange, guidance": lambda d: exchange(guided(d), micro_batch=7),
    "exchange, product": lambda d: exchange(mixture(d) * mixture(d, -1.0), explorer=Bounce(2)),
    "exchange, Euler-Maruyama": lambda d: exchange(mixture(d) ** 2.0, process=EulerMaruyama(reference=1.0)),
    "exchange, basis": lambda d: exchange(mixture(d), process=Gaussian(basis=BASIS[:2].contiguous())),
    "exchange, zero mean": lambda d: exchange(mixture(d), process=Gaussian(variance="fisher", zero_mean=0)),
    "exchange, Langevin": lambda d: exchange(mixture(d).tilt(near, guidance="gradient"), explorer=Langevin()),
    "exchange, finish": lambda d: exchange(mixture(d) ** 2.0, cd.ladder.karras(4, 0.01, 10.0, n_finish=2)),
    "exchange, pilot": lambda d: planned(mixture(d) ** 2.0),
    "SMC, reward": lambda d: smc(mixture(d).tilt(near)),
    "SMC, jacobian-free": lambda d: smc((mixture(d) * mixture(d, -1.0)).tilt(near, guidance="jacobian-free")),
    "SMC, Feynman-Kac": lambda d: smc(mixture(d).tilt(near, guidance="gradient"), weight=cd.FeynmanKac()),
    "particle Gibbs": lambda d: gibbs(mixture(d).tilt(near)),
    "particle Gibbs, guidance": lambda d: gibbs(guided(d)),
    "plain": lambda d: cd.Plain(guided(d), LEVELS, n_chains=3, seed=1, fit_samples=16),
    "masked tokens in turn": lambda d: exchange(tokens(d), TIMES, explorer=SingleToken(2)),
    "masked tokens at once": lambda d: exchange(tokens(d), TIMES, process=Masked(3, at_once=None), explorer=Bounce()),
    "masked tokens, prompt": lambda d: smc(tokens(d, prompt=torch.tensor([-1, 2])), TIMES),
    "masked tokens, Gibbs": lambda d: gibbs(tokens(d), TIMES),
    "uniform tokens": lambda d: exchange(tokens(d, "uniform"), TIMES, explorer=SingleToken()),
    "uniform tokens at once": lambda d: smc(tokens(d, "uniform"), TIMES, process=Uniform(3, at_once=None)),
    "Euler kernels": lambda d: exchange(tokens(d), TIMES, process=Euler(base=Masked(3))),
    "plain tokens": lambda d: cd.Plain(tokens(d), TIMES, n_chains=3, seed=1),
}


def drawn(sampler, n=2):
    out = sampler.sample(n)
    return out.x, out.weights, *(v for _, v in sorted(sampler.snapshot().items()))


@pytest.fixture(scope="module")
def device():
    with Pretend() as on:
        yield on


DEFAULT = ("exchange, power", "exchange, guidance", "SMC, reward", "particle Gibbs", "masked tokens in turn")


@pytest.mark.parametrize("name", [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_runs_have_the_same_bits_on_every_device(device, name):
    here, there = drawn(CASES[name](torch.device("cpu"))), drawn(CASES[name](DEVICE))
    assert len(here) == len(there)
    for a, b in zip(here, there, strict=True):
        assert not isinstance(b, Wrapped)  # results and snapshots are on the CPU
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
