"""EDM networks and their pickles, and flows along any affine path."""

from __future__ import annotations

import io
import math
import pickle
import sys
import types
from collections import OrderedDict

import numpy as np
import pytest
import stand_ins
import torch
from torch import nn

import crepe_diffusion as cd
from checks import assert_mean, assert_near, f64, refuted
from crepe_diffusion.models.networks import Networks
from crepe_diffusion.models.parametrisations import AffinePath, TrainingSteps
from crepe_diffusion.models.pretrained import Network, Pretrained
from crepe_diffusion.processes import Gaussian
from crepe_diffusion.random import Stream
from crepe_diffusion.samplers import Plain

MU, RHO = 0.7, 0.4


def closed_form(y, sigma):
    s2 = sigma.reshape(-1, *[1] * (y.ndim - 1)) ** 2
    return (RHO**2 * y + s2 * MU) / (RHO**2 + s2)


def bad(make):
    with pytest.raises(cd.InputError) as caught:
        make()
    return str(caught.value)


# -- EDM -------------------------------------------------------------------------------------------------------------


class ExactEDM(nn.Module):
    """The denoiser of N(MU + label, RHO^2) data behind EDM's interface, where a class is a row of ones and zeros."""

    label_dim, img_resolution, img_channels, sigma_min, sigma_max = 3, 4, 1, 0.0, math.inf

    def forward(self, x, sigma, class_labels=None):
        labels = torch.zeros(len(x), 3) if class_labels is None else class_labels
        shift = (labels.to(x) @ torch.arange(3.0).to(x)).reshape(-1, 1, 1, 1)
        return closed_form(x - shift, sigma.to(x)) + shift


def test_an_edm_network_is_the_denoiser_at_the_levels_of_its_own_sampler():
    y, p = 5 * Stream(1).normal((9, 1, 4, 4)), cd.models.from_edm(ExactEDM(), 2, dtype=torch.float64)
    ladder = p.ladder(9)
    i = torch.arange(9, dtype=torch.float64) / 8
    torch.testing.assert_close(ladder.times, (0.002 ** (1 / 7) + i * (80 ** (1 / 7) - 0.002 ** (1 / 7))) ** 7)
    check = lambda found: assert_near("D of EDM", found, closed_form(y - 2, ladder.times) + 2)  # noqa: E731
    check(p.predict(y, ladder.times.to(torch.float32).to(torch.float64)))
    refuted(check, p.given(1).predict(y, ladder.times))


def test_edm_classes_share_one_call_and_an_unconditional_network_is_another():
    net, alone = stand_ins.edm(), stand_ins.edm(label_dim=0)
    p, sizes = cd.models.from_edm(net, 3), []
    net.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    x, t = torch.randn(2, 3, 8, 8), f64([0.1, 3.0])
    pair = Networks([p, p.given(4)], False)
    found = pair.predict(x, t)
    assert (pair.n_calls, sizes) == (1, [4])
    torch.testing.assert_close(found[0], net(x, t, torch.eye(10)[[3, 3]]))
    torch.testing.assert_close(found[1], net(x, t, torch.eye(10)[[4, 4]]))
    assert Networks([p, cd.models.from_edm(alone)], False).n_calls == 2
    torch.testing.assert_close(p.decode(torch.full((1, 3, 8, 8), -1.0)), torch.zeros(1, 3, 8, 8))


def test_an_edm_network_without_its_label_warns_unless_it_was_trained_with_label_dropout():
    net = stand_ins.edm()
    with pytest.warns(UserWarning, match="a vector of zeros, whose predictions are of no trained law") as caught:
        p = cd.models.from_edm(net)
    assert caught[0].filename == __file__
    assert torch.equal(p.condition, torch.zeros(10))
    net.model = types.SimpleNamespace(label_dropout=0.1)
    cd.models.from_edm(net)
    cd.models.from_edm(stand_ins.edm(label_dim=0))


def test_bad_edm_input_gets_one_sentence():
    net = stand_ins.edm()
    assert "got an object of type 'dict'" in bad(lambda: cd.models.from_edm({"ema": net}))
    assert "from 0 to 9 or a vector of 10 entries, got 10" in bad(lambda: cd.models.from_edm(net, 10))
    assert "has no labels (label_dim is 0), got 1" in bad(lambda: cd.models.from_edm(stand_ins.edm(0), 1))
    assert "give event_shape" in bad(lambda: cd.models.from_edm(lambda x, sigma: x))
    assert "takes an AutoencoderKL" in bad(lambda: cd.models.edm2_decoder(3))


# -- pickles ---------------------------------------------------------------------------------------------------------


class EasyDict(dict):
    """The name is that of the pickles; it is not needed to read them."""


@pytest.fixture
def nvidia(monkeypatch):
    """Modules of the names that those pickles refer to, whose objects carry their source, as the original's do."""
    persistence, util = types.ModuleType("torch_utils.persistence"), types.ModuleType("dnnlib.util")
    ran = []

    def _reconstruct_persistent_obj(meta):
        ran.append(meta["class_name"])
        raise AssertionError("this would have executed the source in the pickle")

    _reconstruct_persistent_obj.__module__ = persistence.__name__
    _reconstruct_persistent_obj.__qualname__ = "_reconstruct_persistent_obj"
    persistence._reconstruct_persistent_obj = _reconstruct_persistent_obj
    monkeypatch.setattr(EasyDict, "__module__", util.__name__)
    util.EasyDict = EasyDict
    for name, module in (
        ("torch_utils", None),
        ("dnnlib", None),
        (util.__name__, util),
        (persistence.__name__, persistence),
    ):
        monkeypatch.setitem(sys.modules, name, module or types.ModuleType(name))

    class Persistent(stand_ins.EDMNet):
        def __reduce__(self):
            state = dict(self.__dict__, _init_args=(), _init_kwargs=EasyDict(label_dim=10, sigma_data=np.float32(0.5)))
            source = "import os; os.system('touch /tmp/ran')"
            meta = {"type": "class", "version": 6, "module_src": source, "class_name": "Precond", "state": state}
            return _reconstruct_persistent_obj, (meta,), None

    torch.manual_seed(0)
    net = Persistent().eval()
    net.register_buffer("freqs", torch.randn(5).to(torch.float16))
    net.register_buffer("shown", torch.ones(2), persistent=False)
    net.blocks = nn.ModuleDict({"8x8": nn.ModuleList([nn.SiLU(), nn.Linear(2, 3)])})
    net.blocks["8x8"][1].weight.data = torch.arange(12.0).reshape(4, 3)[:3, :2]  # a view of a larger storage
    return net, ran


def test_weights_of_an_edm_pickle_come_out_without_running_it(nvidia, tmp_path):
    net, ran = nvidia
    content = EasyDict(
        ema=net, dataset_kwargs=EasyDict(path="x"), encoder=np.ones(3), dtype=torch.float16, size=torch.Size([2])
    )
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        source, to = tmp_path / f"{protocol}.pkl", tmp_path / f"{protocol}.safetensors"
        source.write_bytes(pickle.dumps(content, protocol))
        settings = cd.models.convert_edm(source, to)
        assert settings == {
            "class_name": "Precond",
            "init_args": [],
            "init_kwargs": {"label_dim": 10, "sigma_data": None},
        }
        assert not ran
        from safetensors.torch import load_file

        found = load_file(to)
        assert found.keys() == net.state_dict().keys()
        for name, value in net.state_dict().items():
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value), name

    class Plain(stand_ins.EDMNet):
        pass

    again = Plain()
    again.freqs, again.blocks = torch.zeros(5), nn.ModuleDict({"8x8": nn.ModuleList([nn.SiLU(), nn.Linear(2, 3)])})
    again.load_state_dict({k: v for k, v in found.items() if k != "freqs"})
    y, sigma = torch.randn(3, 3, 8, 8), f64([0.1, 1.0, 10.0])
    before, after = (cd.models.from_edm(n.eval(), 3).predict(y, sigma) for n in (net, again))
    assert torch.equal(before, after)
    with pytest.raises(AssertionError, match="would have executed"):
        pickle.loads(source.read_bytes())


class Command:
    def __init__(self, function, *arguments):
        self.parts = function, arguments

    def __reduce__(self):
        return self.parts


def test_a_pickle_that_asks_for_anything_else_is_refused_and_not_run(nvidia, tmp_path):
    net, _ = nvidia
    trace, source = tmp_path / "ran", tmp_path / "bad.pkl"
    import os

    convert = lambda: cd.models.convert_edm(source, tmp_path / "out.safetensors")  # noqa: E731
    for evil, name in (
        (Command(os.system, f"touch {trace}"), "system"),
        (Command(eval, f"open({str(trace)!r}, 'w')"), "builtins.eval"),
        (Command(getattr, [], "append"), "builtins.getattr"),
        (Command(open, str(trace), "w"), "open"),
        (Command(torch.load, str(trace)), "torch.serialization.load"),
    ):
        source.write_bytes(pickle.dumps({"ema": net, "evil": evil}))
        assert name in bad(convert)
        assert "nothing of it was run" in bad(convert)
        # Hidden in the state of the network, and inside of a storage.
        object.__setattr__(net, "hidden", evil)
        source.write_bytes(pickle.dumps({"ema": net}))
        assert name in bad(convert)
        del net.hidden
    inner = pickle.dumps(Command(os.system, f"touch {trace}"))
    source.write_bytes(pickle.dumps({"ema": Command(torch.storage._load_from_bytes, inner)}))
    assert "is no pickle of EDM or EDM2" in bad(convert)
    # A name that begins like a container of torch does not reach what lies behind it.
    source.write_bytes(b"\x80\x04\x8c\x1atorch.nn.modules.container\x8c\x18ModuleDict.__init__.eval\x93.")
    assert "ModuleDict.__init__.eval" in bad(convert)
    assert not trace.exists()
    assert not (tmp_path / "out.safetensors").exists()
    source.write_bytes(pickle.dumps({"net": 3}))
    assert "holds no network under 'ema'; it holds ['net']" in bad(convert)
    source.write_bytes(pickle.dumps(OrderedDict(ema=Command(dict))))
    assert "builtins.dict" in bad(convert)
    source.write_bytes(b"not a pickle")
    assert "is no pickle of EDM or EDM2" in bad(convert)
    assert "does not exist" in bad(lambda: cd.models.convert_edm(tmp_path / "none.pkl", tmp_path / "out"))
    torch.save(net.state_dict(), buffer := io.BytesIO())
    source.write_bytes(buffer.getvalue())
    assert "is no pickle of EDM or EDM2" in bad(convert)


# -- flows -----------------------------------------------------------------------------------------------------------


def gaussian_velocity(path, coupled=0.0):
    """E[alpha' x_0 + s' eps | x_t] of N(MU, RHO^2) data, by the regression of one Gaussian on another."""

    def velocity(x, t):
        alpha, s, d_alpha, d_s = (z.reshape(-1, *[1] * (x.ndim - 1)) for z in path(t))
        mean, variance = alpha * MU, alpha**2 * RHO**2 + s**2
        return d_alpha * MU + (alpha * d_alpha * RHO**2 + s * d_s) / variance * (x - mean)

    return velocity


def to_data(t):
    return t, 1 - t, torch.ones_like(t), -torch.ones_like(t)


def to_noise(t):
    return 1 - t, t, -torch.ones_like(t), torch.ones_like(t)


def trigonometric(t):
    a = t * math.pi / 2
    return a.sin(), a.cos(), a.cos() * math.pi / 2, -a.sin() * math.pi / 2


def blurred(t, width=0.1):
    """torchcfm's ConditionalFlowMatcher(sigma=0.1): noise of that width on top of the line."""
    s = ((1 - t) ** 2 + width**2).sqrt()
    return t, s, torch.ones_like(t), -(1 - t) / s


FLOWS = {  # the path, the time of noise, what is given, and a wrong path
    "line from noise": (to_data, 0, None, trigonometric),
    "line from data": (to_noise, 1, None, lambda t: trigonometric(1 - t)),
    "line by bisection": (to_data, 0, to_data, trigonometric),
    "trigonometric": (trigonometric, 0, trigonometric, to_data),
    "with noise on top": (blurred, 0, blurred, to_data),
}


@pytest.mark.parametrize("name", FLOWS)
def test_a_flow_is_the_closed_form_of_gaussian_data(name):
    path, noise_at, given, wrong = FLOWS[name]

    def check(given):
        p = cd.models.from_velocity(gaussian_velocity(path), (3,), noise_at=noise_at, path=given, dtype=torch.float64)
        sigma = p.ladder(9).times
        y = sigma[:, None] * Stream(2).normal((9, 3))
        assert_near(f"D of a flow, {name}", p.predict(y, sigma), closed_form(y, sigma), rtol=1e-7, atol=1e-7)

    check(given)
    refuted(check, wrong)


def test_paths_of_flow_matching_are_read_as_they_are():
    """D against the library's own velocity_to_target, for each of its schedulers and any velocity."""
    scheduler = pytest.importorskip("flow_matching.path.scheduler")
    from flow_matching.path import AffineProbPath

    velocity = stand_ins.velocity().to(torch.float64)
    kinds = (scheduler.CondOTScheduler(), scheduler.CosineScheduler(), scheduler.PolynomialConvexScheduler(2))
    for kind in (*kinds, scheduler.VPScheduler(), scheduler.LinearVPScheduler()):
        p = cd.models.from_velocity(velocity, (2,), noise_at=0, path=kind, dtype=torch.float64)
        t = torch.linspace(0.1, 0.9, 7, dtype=torch.float64)
        out = kind(t)
        x = Stream(3).normal((7, 2))
        theirs = torch.stack(
            [AffineProbPath(kind).velocity_to_target(u, z, s) for u, z, s in zip(velocity(x, t), x, t, strict=True)]
        )

        def check(sigma, p=p, x=x, out=out, theirs=theirs):
            found, name = p.predict(x / out.alpha_t[:, None], sigma), type(p.shared.parametrisation.path).__name__
            assert_near(f"velocity_to_target of {name}", found, theirs, rtol=1e-6, atol=1e-6)

        check(out.sigma_t / out.alpha_t)
        refuted(check, 1.1 * out.sigma_t / out.alpha_t)


@pytest.mark.slow
def test_our_plain_draws_have_the_law_of_the_solver_of_flow_matching():
    """Two modes, weights .3 and .7, by its ODESolver and by ours; both to five standard errors of the truth."""
    solver = pytest.importorskip("flow_matching.solver")
    mixture = cd.models.GaussianMixture([0.3, 0.7], [[-2.0], [1.5]], [0.4, 0.3])

    def velocity(x, t):
        alpha, s = t.expand(len(x))[:, None], 1 - t.expand(len(x))[:, None]
        clean = mixture.predict(x / alpha, (s / alpha)[:, 0])
        return clean - (x - alpha * clean) / s

    p = cd.models.from_velocity(velocity, (1,), noise_at=0, dtype=torch.float64)
    ours = Plain(p, p.ladder(65), seed=1).sample(2000).x[:, 0]
    start = Stream(4).normal((2000, 1))
    grid = torch.linspace(1e-3, 1 - 1e-3, 65)
    ode = solver.ODESolver(velocity_model=velocity)
    theirs = ode.sample(start, step_size=None, method="midpoint", time_grid=grid)[:, 0]
    assert_mean((ours < -0.2).double(), 0.3)
    assert_mean((theirs < -0.2).double(), 0.3)
    assert_mean(ours, 0.3 * -2 + 0.7 * 1.5)
    refuted(assert_mean, 1.1 * ours, 0.3 * -2 + 0.7 * 1.5, z=1.0)


@pytest.mark.slow
def test_torchcfm_trains_what_is_read():
    """The regression of its own targets on its own states is the velocity whose D is the closed form."""
    torchcfm = pytest.importorskip("torchcfm")
    torch.manual_seed(0)
    n, t = 400_000, 0.6
    x1 = MU + RHO * torch.randn(n, 1)
    matchers = (
        (torchcfm.ConditionalFlowMatcher(0.1), blurred),
        (torchcfm.VariancePreservingConditionalFlowMatcher(0.0), trigonometric),
    )
    for matcher, path in matchers:
        _, x, u = matcher.sample_location_and_conditional_flow(torch.randn(n, 1), x1, t=torch.full((n,), t))
        exact = gaussian_velocity(path)(x, torch.full((n,), t))
        assert_mean((u - exact) * torch.cat([torch.ones_like(x), x, x**2], 1), 0.0)
        refuted(assert_mean, (u - gaussian_velocity(to_data)(x, torch.full((n,), t))) * x, 0.0)


def test_control_off_gives_no_work_for_flows_and_edm():
    flow = cd.models.from_velocity(gaussian_velocity(to_data), (3,), noise_at=0, dtype=torch.float64)
    for p in (flow, cd.models.from_edm(ExactEDM(), 2, dtype=torch.float64)):
        chain = cd.ReplicaExchange(p, p.ladder(4, substeps=2), n_chains=3, process=Gaussian(variance=1.5))

        def check(chain):
            swaps = chain.step().swaps
            assert swaps.log_work.nan_to_num(0.0).abs().max() < 1e-9

        check(chain)
        chain.target = p**1.1
        refuted(check, chain)


def test_bad_flows_get_one_sentence():
    make, u = cd.models.from_velocity, gaussian_velocity(to_data)
    assert "0 (flow_matching, torchcfm) or 1 (diffusers, SiT), got 0.5" in bad(lambda: make(u, (3,), noise_at=0.5))
    assert "it should grow: is the noise at the other end" in bad(lambda: make(u, (3,), noise_at=1, path=to_data))
    assert "a flow is a function velocity(x, t), got 3" in bad(lambda: make(3, (3,), noise_at=0))
    assert "(alpha, s, alpha', s'), got 'line'" in bad(lambda: make(u, (3,), noise_at=0, path="line"))
    assert "a path returns (alpha, s, alpha', s')" in bad(lambda: make(u, (3,), noise_at=0, path=lambda t: t))
    assert "has no text encoder, got the prompt 'cat'" in bad(lambda: make(u, (3,), noise_at=0, condition="cat"))
    wide = make(lambda x, t: torch.cat([x, x], 1), (3,), noise_at=0)
    assert "returned shape (2, 6) for states (2, 3)" in bad(lambda: wide.predict(torch.ones(2, 3), torch.ones(2)))
    assert "return its attribute .sample" in bad(
        lambda: make(lambda x, t: types.SimpleNamespace(sample=x), (3,), noise_at=0).predict(
            torch.ones(2, 3), torch.ones(2)
        )
    )


def test_the_time_of_a_noise_is_found_to_rounding():
    path, t = AffinePath(trigonometric, 0.0, 1.0), torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    alpha, s, _, _ = trigonometric(t)
    torch.testing.assert_close(path.coefficients(s / alpha).c_noise, t, rtol=1e-12, atol=1e-12)


# -- devices and pictures --------------------------------------------------------------------------------------------


class Steps(nn.Module):
    """A small network of noise at training steps, called as those of diffusers are."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x, step):
        return self.layer(x) + (step / 100).sin()[:, None, None, None]


@pytest.mark.slow
def test_checkpoints_run_on_another_device_with_the_same_bits():
    from pretend import DEVICE, Pretend

    table = torch.linspace(math.log(0.02), math.log(80.0), 1000, dtype=torch.float64).exp()

    def steps(device):
        network = Network(
            Steps().eval().to(device), lambda net, x, t, c: net(x, t), TrainingSteps(tuple(table.tolist()))
        )
        return Pretrained(network, (3, 8, 8), decode=lambda x: x / 2 + 0.5)

    makes = {
        "steps": steps,
        "EDM": lambda device: cd.models.from_edm(stand_ins.edm().to(device), 3),
        "flow": lambda device: cd.models.from_velocity(
            stand_ins.velocity().to(device), (2,), noise_at=0, path=trigonometric
        ),
    }
    with Pretend():
        for name, make in makes.items():
            out = {}
            for place in (torch.device("cpu"), DEVICE):
                p = make(place)
                chain = cd.ReplicaExchange(p, p.ladder(3, substeps=2), process=Gaussian(variance=1.0), seed=1)
                chain.step(), chain.step()
                out[place] = chain.state.x.cpu()
            assert torch.equal(out[torch.device("cpu")], out[DEVICE]), name


def test_draws_become_pictures():
    p = cd.models.from_edm(stand_ins.edm(), 3)
    x = torch.linspace(-1.2, 1.2, 7)[:, None, None, None].expand(7, 3, 8, 8)
    images = p.images(x, batch_size=3)
    assert [image.size for image in images] == [(8, 8)] * 7
    assert [image.getpixel((0, 0))[0] for image in images] == [0, 25, 76, 128, 179, 230, 255]
    gray = cd.models.from_edm(ExactEDM(), 2).images(torch.zeros(1, 1, 4, 4))
    assert (gray[0].mode, gray[0].getpixel((1, 1))) == ("L", 128)
    flow = cd.models.from_velocity(stand_ins.velocity(), (2,), noise_at=0)
    assert "this model has no decoder" in bad(lambda: flow.images(torch.zeros(1, 2)))
