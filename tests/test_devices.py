"""The core on a second device: the same bits as on the CPU, and the CPU hardly ever waits for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import crepe_diffusion as cd
from checks import refuted
from crepe_diffusion.devices import real
from crepe_diffusion.evaluate import Evaluator
from crepe_diffusion.kernels import Bounce, Langevin, SingleToken
from crepe_diffusion.processes import Euler, EulerMaruyama, Gaussian, Masked, Uniform
from crepe_diffusion.random import Stream, _philox
from pretend import DEVICE, Pretend, Wrapped

LEVELS = cd.ladder.karras(3, 0.05, 10.0, substeps=2)
TIMES = cd.ladder.of([0.02, 0.3, 0.5, 0.7, 0.98], substeps=2)
TABLE = Stream(5).normal((16,), dtype=torch.float32).softmax(0).reshape(2, 2, 2, 2)
BASIS = torch.linalg.qr(Stream(3).normal((3, 3)))[0]


def near(z):
    return -(z.flatten(1) - 1).square().sum(1)


def bare(y, sigma):
    return y / (1 + sigma[:, None] ** 2)


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
    "exchange, reward": lambda d: exchange(mixture(d).tilt(near), micro_batch=4),
    "SMC, reward": lambda d: smc(mixture(d).tilt(near)),
    "SMC, jacobian-free": lambda d: smc((mixture(d) * mixture(d, -1.0)).tilt(near, guidance="jacobian-free")),
    "SMC, Feynman-Kac": lambda d: smc(mixture(d).tilt(near, guidance="gradient"), weight=cd.FeynmanKac()),
    "particle Gibbs": lambda d: gibbs(mixture(d).tilt(near)),
    "particle Gibbs, guidance": lambda d: gibbs(guided(d)),
    "plain": lambda d: cd.Plain(guided(d), LEVELS, n_chains=3, seed=1, fit_samples=16),
    "masked tokens in turn": lambda d: exchange(tokens(d), TIMES, explorer=SingleToken(2)),
    "masked tokens at once": lambda d: exchange(tokens(d), TIMES, process=Masked(2, at_once=None), explorer=Bounce()),
    "masked tokens, prompt": lambda d: smc(tokens(d, prompt=torch.tensor([-1, 1, -1, -1])), TIMES),
    "masked tokens, Gibbs": lambda d: gibbs(tokens(d), TIMES),
    "uniform tokens": lambda d: exchange(tokens(d, "uniform"), TIMES, explorer=SingleToken()),
    "uniform tokens at once": lambda d: smc(tokens(d, "uniform"), TIMES, process=Uniform(2, at_once=None)),
    "Euler kernels": lambda d: exchange(tokens(d), TIMES, process=Euler(base=Masked(2))),
    "plain tokens": lambda d: cd.Plain(tokens(d), TIMES, n_chains=3, seed=1),
}


def after(sampler, n=2):
    """The draws of n iterations, and all that the next ones depend on."""
    for _ in range(n):
        sampler.step()
    return sampler.output(), *(v for _, v in sorted(sampler.snapshot().items()))


@pytest.fixture(scope="module")
def device():
    with Pretend() as on:
        yield on


DEFAULT = ("exchange, power", "exchange, guidance", "SMC, reward", "particle Gibbs", "masked tokens in turn")


@pytest.mark.parametrize("name", [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_runs_have_the_same_bits_on_every_device_and_hardly_wait(device, name):
    here = after(CASES[name](torch.device("cpu")))
    sampler = CASES[name](DEVICE)
    check_waits(device, sampler)
    there = after(sampler, 0)
    assert len(here) == len(there)
    for i, (a, b) in enumerate(zip(here, there, strict=True)):
        assert i == 0 or not isinstance(b, Wrapped)  # a snapshot is on the CPU
        assert torch.equal(a.nan_to_num(), b.cpu().nan_to_num())


def test_results_are_on_the_cpu(device):
    for sampler in (exchange(mixture(DEVICE)), smc(mixture(DEVICE)), gibbs(mixture(DEVICE))):
        out = sampler.sample(1)
        assert out.x.device == out.weights.device == torch.device("cpu")


# -- waiting ---------------------------------------------------------------------------------------------


def evaluations_of(sampler, n):
    """How many batches n iterations evaluate."""
    evaluations = []

    def counting(method):
        def call(self, *args, **options):
            evaluations.append(method)
            return method(self, *args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("__call__", "ask"):
            patch.setattr(Evaluator, name, counting(getattr(Evaluator, name)))
        for _ in range(n):
            sampler.step()
    return len(evaluations)


def check_waits(device, sampler, n=2):
    device.reset()
    evaluations = evaluations_of(sampler, n)
    assert evaluations > 0
    assert device.waits <= 2 * evaluations, dict(device.reasons)


def test_a_look_at_every_row_is_counted_as_waiting(device, monkeypatch):
    sampler = CASES["exchange, power"](DEVICE)
    check_waits(device, sampler)
    finite = Evaluator._not_finite

    def looking(self, *args):
        return torch.tensor([bool(bad) for bad in finite(self, *args)], device=DEVICE)

    monkeypatch.setattr(Evaluator, "_not_finite", looking)
    refuted(check_waits, device, sampler)


def test_tensors_of_two_devices_do_not_meet(device):
    with pytest.raises(RuntimeError, match="on pretend:0 and on the CPU"):
        torch.ones(2, device=DEVICE) + torch.ones(2)


# -- random numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_row", [0, 5])
def test_random_numbers_are_the_same_on_every_device(device, first_row):
    stream, more = Stream(11).at("any", 3), {"first_row": first_row}
    for shape in ((4,), (3, 1), (3, 7), (2, 3, 4)):
        here, there = stream.uniform(shape, **more), stream.uniform(shape, device=DEVICE, **more)
        assert torch.equal(here, there.cpu())
        for dtype in (torch.float32, torch.float64):
            here, there = (stream.normal(shape, dtype=dtype, device=d, **more) for d in ("cpu", DEVICE))
            assert torch.equal(here, there.cpu())
    log_p = Stream(1).normal((50, 4))
    assert torch.equal(stream.categorical(log_p), stream.categorical(log_p.to(DEVICE)).cpu())


def test_philox_in_tensors_is_that_of_numpy():
    key = np.array([2**64 - 3, 12345], dtype=np.uint64)
    words = np.random.Philox(key=key, counter=2**40 - 2).random_raw(4 * 5).view(np.int64)
    found = _philox(torch.arange(2**40 - 1, 2**40 + 4), (int(key[0]), int(key[1])))
    assert torch.equal(found.flatten(), torch.from_numpy(words))


def test_a_draw_without_a_category_is_an_error_of_the_next_evaluation(device):
    drawn = Stream(0).categorical(torch.tensor([[0.0, 0.0], [-torch.inf, -torch.inf]], device=DEVICE))
    assert drawn[1].item() == -1
    model = tokens(DEVICE)
    evaluate = Evaluator(model, TIMES, Masked(2), cd.Proposal())
    x = torch.tensor([[0, 1, 2, 2], [-1, 1, 2, 2]], device=DEVICE)
    with pytest.raises(cd.NonFiniteError, match="1 of 2 rows"):
        evaluate(x, TIMES.times[:2])


# -- devices without float64 -----------------------------------------------------------------------------

COARSE = ("exchange, power", "SMC, reward", "masked tokens in turn")


@pytest.mark.parametrize("name", [COARSE[0], *(pytest.param(n, marks=pytest.mark.slow) for n in COARSE[1:])])
def test_a_device_without_float64_runs_in_float32(name):
    """Works, times and uniforms have 24 bits there: the same draws up to rounding, unless a decision was that close."""
    fine, *_ = after(CASES[name](torch.device("cpu")))
    real.cache_clear()
    try:
        with Pretend(float64=False):
            with pytest.raises(TypeError, match="no float64"):
                torch.zeros(1, dtype=torch.float64, device=DEVICE)
            coarse = after(CASES[name](DEVICE))[0].cpu()
    finally:
        real.cache_clear()
    torch.testing.assert_close(coarse, fine, rtol=0, atol=0 if name.startswith("masked") else 1e-4)


# -- where a model lives ---------------------------------------------------------------------------------


def test_a_model_lives_where_its_parameters_are(device):
    net = Net()
    model = cd.models.Denoiser(lambda y, sigma: net(y, sigma, y[:, :1]), (3,))
    assert model.device == torch.device("cpu")
    net.to(DEVICE)
    assert model.device == DEVICE
    assert cd.models.Denoiser(bare, (3,)).device == torch.device("cpu")
    assert cd.models.Denoiser(bare, (3,), device=DEVICE).device == DEVICE
    assert cd.stitching.Segments(mixture(DEVICE), 2).device == DEVICE


def test_devices_that_differ_are_refused_by_name(device):
    with pytest.raises(cd.InputError, match=r"must be on one device, got \['cpu', 'pretend:0'\]"):
        exchange(mixture("cpu") * mixture(DEVICE))
    net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1).to(DEVICE))
    with pytest.raises(cd.InputError, match=r"parameters on \['cpu', 'pretend:0'\]: give the model device="):
        exchange(cd.models.Denoiser(net, (1,)))


def test_a_run_moves_between_devices(device):
    """A snapshot of one device goes on at the other, bit for bit."""
    target = CASES["exchange, power"]
    here, there = target(torch.device("cpu")), target(DEVICE)
    for _ in range(2):
        here.step()
        there.step()
    moved = exchange(mixture("cpu") ** 2.0, explorer=Bounce(), start=there.snapshot())
    back = exchange(mixture(DEVICE) ** 2.0, explorer=Bounce(), start=here.snapshot())
    for sampler in (here, moved, back):
        sampler.step()
    assert torch.equal(here.state.x, moved.state.x)
    assert torch.equal(here.state.x, back.state.x.cpu())


# -- precision -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_network_may_answer_in_half_precision(dtype):
    def half(y, sigma):
        return (y / (1 + sigma[:, None] ** 2)).to(dtype)

    evaluate = Evaluator(cd.models.Denoiser(half, (3,)).as_target(), LEVELS, Gaussian(variance=1.0), cd.Proposal())
    x, t = Stream(0).normal((4, 3), dtype=torch.float32), LEVELS.times[:4]
    seen = evaluate(x, t)
    assert seen.predictions[0].dtype == seen.drift.dtype == torch.float32
    assert torch.equal(seen.predictions[0], half(x, t.float()).float())

    def tokens(x, t):
        return torch.zeros(*x.shape, 3, dtype=dtype).log_softmax(-1)

    chain = cd.ReplicaExchange(cd.models.TokenModel(tokens, (2,), 3) ** 2.0, TIMES)
    assert chain.state.seen.predictions[0].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_states_in_half_precision_are_refused(dtype):
    with pytest.raises(cd.InputError, match=r"dtype must be torch\.float32 or torch\.float64"):
        cd.models.Denoiser(bare, (3,), dtype=dtype)

    class Half(cd.models.Denoiser):
        pass

    model = Half(bare, (3,))
    model.dtype = dtype
    with pytest.raises(cd.InputError, match=f"model 0 has states of {dtype}, too coarse for log-ratios"):
        cd.ReplicaExchange(model, LEVELS)


def largest_log_alpha(ladder):
    """Of swaps between two equal models with guidance 7.5, on images: it should be 0."""

    def denoiser(shift):
        return lambda y, sigma: 0.5 + shift + (y - 0.5) * (0.25 / (0.25 + sigma[:, None, None, None] ** 2))

    p, q = (cd.models.Denoiser(denoiser(shift), (3, 512, 512)) for shift in (0, 0.0))
    swaps = cd.ReplicaExchange(cd.guided(p, q, 7.5), ladder, process=Gaussian(variance=0.5)).step().swaps
    log_alpha = (swaps.log_work[:, 1:] - swaps.log_work[:, :-1])[:, swaps.active]
    return float(log_alpha.abs().max())


def test_equal_models_agree_on_large_images(monkeypatch):
    def check():
        assert largest_log_alpha(cd.ladder.karras(4, 0.002, 80.0)) < 0.02

    check()
    monkeypatch.setattr("crepe_diffusion.processes.gaussian.PIECE", 10**9)  # all in float32
    refuted(check)
