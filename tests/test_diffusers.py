"""Checkpoints of diffusers: D against closed forms, against the schedulers' own predictions, and whole pipelines."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import stand_ins
import torch
from torch import nn

import crepe_diffusion as cd
from checks import assert_near, f64, refuted
from crepe_diffusion.models.networks import Networks
from crepe_diffusion.models.parametrisations import TrainingSteps
from crepe_diffusion.paths import denoise
from crepe_diffusion.processes import Gaussian
from crepe_diffusion.random import Stream
from crepe_diffusion.samplers import Plain

MU, RHO = 0.7, 0.4
EVENT = (2, 4, 4)


class Exact(nn.Module):
    """What a perfect network of this kind would return for N(MU, RHO^2) pixels, from formulas in its own coordinate."""

    def __init__(self, predict, **config):
        super().__init__()
        self.predict = predict
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.config = {"in_channels": EVENT[0], **config}
        self.config = SimpleNamespace(**self.config, get=self.config.get, sample_size=EVENT[1])

    def forward(self, x, timestep, return_dict=True):
        out = self.predict(x, timestep.to(torch.float64)[:, None, None, None])
        return (torch.cat([out, torch.full_like(out, 9.0)], 1),)  # with a learned variance


def opposite(predict, x, t):
    return -predict(x, t)


def of_steps(scheduler, kind):
    abar_of = scheduler.alphas_cumprod.to(torch.float64)

    def predict(x, step):
        abar = abar_of[step.round().long()]
        a, s = abar.sqrt(), (1 - abar).sqrt()
        clean = (RHO**2 * a * x + s**2 * MU) / (a**2 * RHO**2 + s**2)
        noise = (x - a * clean) / s
        return {"epsilon": noise, "sample": clean, "v_prediction": a * noise - s * clean}[kind]

    return predict


def of_flow(scheduler, kind):
    def predict(x, time):
        tau = time / 1000
        clean = (RHO**2 * (1 - tau) * x + tau**2 * MU) / ((1 - tau) ** 2 * RHO**2 + tau**2)
        return (x - (1 - tau) * clean) / tau - clean

    return predict


def of_edm(scheduler, kind):
    def predict(x, c_noise):  # x = y / sqrt(sigma^2 + sigma_data^2), and D = c_skip y + c_out F solved for F
        sigma, data = (4 * c_noise).exp(), scheduler.config.sigma_data
        q = (sigma**2 + data**2).sqrt()
        y = q * x
        clean = (RHO**2 * y + sigma**2 * MU) / (RHO**2 + sigma**2)
        return (clean - data**2 / q**2 * y) / (sigma * data / q) * (-1 if kind == "v_prediction" else 1)

    return predict


def cases():
    import diffusers as d

    linear = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
    return {
        "DDPM epsilon": (d.DDPMScheduler(), of_steps, "epsilon"),
        "DDPM sample": (
            d.DDPMScheduler(beta_schedule="squaredcos_cap_v2", prediction_type="sample"),
            of_steps,
            "sample",
        ),
        "DDIM v": (d.DDIMScheduler(**linear, prediction_type="v_prediction"), of_steps, "v_prediction"),
        "DDIM zero SNR": (
            d.DDIMScheduler(**linear, rescale_betas_zero_snr=True, prediction_type="v_prediction"),
            of_steps,
            "v_prediction",
        ),
        "Euler zero SNR": (
            d.EulerDiscreteScheduler(**linear, rescale_betas_zero_snr=True, prediction_type="v_prediction"),
            of_steps,
            "v_prediction",
        ),
        "DPM solver": (d.DPMSolverMultistepScheduler(**linear), of_steps, "epsilon"),
        "EDM": (d.EDMEulerScheduler(), of_edm, "epsilon"),
        "EDM v": (d.EDMDPMSolverMultistepScheduler(prediction_type="v_prediction"), of_edm, "v_prediction"),
        "flow": (d.FlowMatchEulerDiscreteScheduler(), of_flow, ""),
        "flow with shift": (d.FlowMatchEulerDiscreteScheduler(shift=3.0), of_flow, ""),
        "flow by UniPC": (
            d.UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=5.0),
            of_flow,
            "",
        ),
    }


def test_the_denoiser_is_the_closed_form_of_gaussian_data():
    """At the levels of the checkpoint's own ladder, with fractional steps and with training steps alone."""

    def check(found, y, sigma):
        s2 = sigma[:, None, None, None] ** 2
        assert_near(f"D of {name}", found, (RHO**2 * y + s2 * MU) / (RHO**2 + s2), rtol=1e-6, atol=1e-6)

    for name, (scheduler, network, kind) in cases().items():
        net = Exact(network(scheduler, kind)).eval()
        p = cd.models.from_diffusers(net, scheduler=scheduler, timesteps="nearest", dtype=torch.float64)
        sigma = p.ladder(7, substeps=2).times
        assert 0 < sigma[0] < 0.05 < 10 < sigma[-1] <= 200, name
        y = sigma[:, None, None, None] * Stream(1).normal((len(sigma), *EVENT))
        check(p.predict(y, sigma), y, sigma)
        wrong = Exact(partial(opposite, network(scheduler, kind))).eval()
        p = cd.models.from_diffusers(wrong, scheduler=scheduler, dtype=torch.float64)
        refuted(check, p.predict(y, sigma), y, sigma)


def test_every_training_step_is_found_from_its_noise_in_single_precision():
    import diffusers

    for scheduler in (diffusers.DDPMScheduler(), diffusers.DDIMScheduler(beta_schedule="scaled_linear")):
        abar = scheduler.alphas_cumprod.to(torch.float64)
        table = ((1 - abar) / abar).sqrt()
        steps = TrainingSteps(tuple(table.tolist()), nearest=True)

        def check(found):
            assert torch.equal(found, torch.arange(1000))

        check(steps.coefficients(table.to(torch.float32).to(torch.float64)).c_noise)
        refuted(check, torch.searchsorted(table, table.to(torch.float32).to(torch.float64)))
        between = (table[40] * table[41]).sqrt().reshape(1)
        fractional = TrainingSteps(tuple(table.tolist())).coefficients(between)
        assert float(fractional.c_noise) == pytest.approx(40.5)
        assert steps.coefficients(1.01 * between).c_noise.item() == 41


def test_a_ladder_stands_on_the_training_steps():
    pipe = stand_ins.ddpm()
    p = cd.models.from_diffusers(pipe, timesteps="nearest")
    abar = pipe.scheduler.alphas_cumprod.to(torch.float64)
    table = ((1 - abar) / abar).sqrt()
    ladder = p.ladder(9, substeps=3)
    assert torch.isin(ladder.times, table).all()
    assert ladder.finish == (0.0,)
    part = p.ladder(3, sigma_min=float(table[100]), sigma_max=float(table[300]), finish=False)
    assert (part.times.tolist(), part.finish) == (table[[100, 200, 300]].tolist(), ())
    with pytest.raises(cd.InputError, match=r"3000 times do not fit"):
        p.ladder(3000)


def test_plain_sampling_is_the_ddpm_sampler_with_its_variance(monkeypatch):
    """The same noise in 25 steps of DDPMScheduler.step and of ours with the DDPM variance (rho = 0)."""
    from diffusers.schedulers import scheduling_ddpm

    pipe, n, rows = stand_ins.ddpm(), 25, 3
    scheduler, unet = pipe.scheduler, pipe.unet
    scheduler.set_timesteps(n)
    steps = scheduler.timesteps
    p = cd.models.from_diffusers(pipe, process=Gaussian(variance=0.0))
    abar = scheduler.alphas_cumprod.to(torch.float64)[steps]
    sigmas = ((1 - abar) / abar).sqrt()
    stream, event = Stream(5), p.event_shape
    start = stream.at("start").normal((rows, *event), dtype=torch.float32)

    noises = (
        stream.at(i).normal((rows, math.prod(event)), dtype=torch.float32).reshape(rows, *event) for i in range(n)
    )
    monkeypatch.setattr(scheduling_ddpm, "randn_tensor", lambda *args, **options: next(noises))
    x, ours = start, {0.0: start / abar[0].sqrt().float(), 7.0: start / abar[0].sqrt().float()}
    with torch.no_grad():
        for t in steps:
            x = scheduler.step(unet(x, t).sample, t, x).prev_sample
        times = [*sigmas.tolist(), 0.0]
        for rho in ours:
            chain = Plain(p, cd.ladder.of(sigmas.flip(0)), process=Gaussian(variance=rho))
            for i in range(n):
                ours[rho] = denoise(chain.evaluate, ours[rho], times[i + 1], times[i], stream.at(i))

    def check(found):
        assert_near("25 steps of DDPMScheduler.step", found, x, rtol=1e-4, atol=1e-4)

    check(ours[0.0])
    refuted(check, ours[7.0])


def ode(p, uncond, weight, y, sigmas):
    """The probability flow down these noises by Euler steps, which DDIM and the flow samplers take."""
    with torch.no_grad():
        for t, s in pairwise(sigmas):
            d = p.predict(y, t.expand(len(y)))
            if uncond is not None:
                d = torch.lerp(uncond.predict(y, t.expand(len(y))), d, weight)
            y = d + (s / t) * (y - d)
    return y


SLOW = pytest.mark.slow


def by_steps(pipe, scale, **inputs):
    """State and noises of a variance-preserving pipeline from its first step on, and its images."""
    network, seen = getattr(pipe, "transformer", None) or pipe.unet, []
    hook = network.register_forward_pre_hook(lambda _, args, named: seen.append(args[0]), with_kwargs=True)
    options = {"guidance_scale": scale, "num_inference_steps": 4, "output_type": "pt"}
    images = pipe(**inputs, **options, generator=torch.Generator().manual_seed(4)).images
    hook.remove()
    abar = pipe.scheduler.alphas_cumprod.to(torch.float64)[pipe.scheduler.timesteps.long()]
    return seen[0][:1] / abar[0].sqrt().float(), ((1 - abar) / abar).sqrt(), images  # x = sqrt(abar) y


def by_flow(pipe, scale, **inputs):
    """The same of a flow, from the second step on: the first one starts at infinite noise."""
    states = []

    def keep(_, i, t, values):
        states.append(values["latents"])
        return values

    size = {"height": 16, "width": 16}
    options = {"guidance_scale": scale, "num_inference_steps": 5, "output_type": "pt", "callback_on_step_end": keep}
    images = pipe(**inputs, **options, **size, generator=torch.Generator().manual_seed(4)).images
    first, tau = states[0], pipe.scheduler.sigmas[1:-1].to(torch.float64)
    if first.ndim == 3:
        first = pipe._unpack_latents(first, 16, 16, pipe.vae_scale_factor)
    return first / (1 - tau[0].float()), tau / (1 - tau), images


SCALE = 3.0
PIPELINES = {  # how it runs, its input, our condition, its partner, another condition
    "stable_diffusion": (by_steps, {"prompt": "a red cat"}, "a red cat", "", "a dog"),
    "dit": (by_steps, {"class_labels": [3]}, 3, None, 4),
    "sdxl": (by_steps, {"prompt": "a red cat"}, "a red cat", "", "a dog"),
    "sd3": (by_flow, {"prompt": "a red cat"}, "a red cat", "", "a dog"),
    "flux": (by_flow, {"prompt": "a red cat"}, ("a red cat", SCALE), "distilled", ("a red cat", 1.0)),
}


@pytest.mark.parametrize(
    "name", ["stable_diffusion", "dit", *(pytest.param(n, marks=SLOW) for n in ("sdxl", "sd3", "flux"))]
)
def test_a_pipeline_is_reproduced_with_prompts_guidance_and_decoder(name):
    """Its own deterministic sampler against Euler steps with our D, to the decoded image."""
    pipe = getattr(stand_ins, name)()
    run, inputs, condition, partner, other = PIPELINES[name]
    p = cd.models.from_diffusers(pipe, condition)
    uncond = None if partner == "distilled" else p.given(partner)
    y, sigmas, images = run(pipe, SCALE, **inputs)

    def check(p):
        z = ode(p, uncond, SCALE, y, torch.cat([sigmas, f64([0.0])]))
        assert_near(f"images of {name}", p.decode(z).clamp(0, 1), images.detach(), rtol=1e-4, atol=1e-4)

    check(p)
    refuted(check, p.given(other))


def largest_log_alpha(target, model):
    """Over two iterations of replica exchange on a short ladder."""
    seen = []

    def accept(log_alpha, stream):
        seen.append(log_alpha[log_alpha.isfinite()].abs())
        return cd.kernels.metropolis(log_alpha, stream)

    chain = cd.ReplicaExchange(
        target, model.ladder(3, substeps=2), n_chains=2, accept=accept, process=Gaussian(variance=0.5)
    )
    chain.step(), chain.step()
    return torch.cat(seen).max()


def test_control_off_gives_no_work():
    pipe = stand_ins.dit()
    pipe.transformer.to(torch.float64)
    p = cd.models.from_diffusers(pipe, 3, dtype=torch.float64)

    def check(target):
        assert largest_log_alpha(target, p) < 1e-9

    check(p)
    check(cd.guided(p, p.given(3), 2.0))  # the same law twice
    refuted(check, cd.guided(p, p.given(None), 2.0))


def test_a_guided_pair_is_one_call_of_the_network_however_it_was_made():
    pipe = stand_ins.stable_diffusion()
    p, sizes = cd.models.from_diffusers(pipe, "a red cat"), []
    pipe.unet.register_forward_pre_hook(lambda _, args, named: sizes.append(len(args[0])), with_kwargs=True)
    x, t = torch.randn(3, 4, 8, 8), f64([0.1, 1.0, 5.0])
    for q in (p.given(""), cd.models.from_diffusers(pipe, "")):
        networks = Networks([p, q], False)
        assert (networks.n_calls, networks.rows) == (1, 2)
        found = networks.predict(x, t)
        assert sizes == [6]
        for model, prediction in zip((p, q), found, strict=True):
            torch.testing.assert_close(prediction, model.predict(x, t), rtol=1e-4, atol=1e-4)
        sizes.clear()
    other = stand_ins.stable_diffusion("v_prediction")
    other.unet = pipe.unet  # the same weights read in another way are another network
    assert Networks([p, cd.models.from_diffusers(other, "")], False).n_calls == 2


def test_a_network_in_half_precision_gets_and_returns_states_in_single():
    pipe = stand_ins.dit()
    y, sigma = torch.randn(4, 4, 8, 8), f64([0.1, 1.0, 5.0, 20.0])
    exact = cd.models.from_diffusers(pipe, 3).predict(y, sigma)
    pipe.transformer.to(torch.bfloat16)
    found = cd.models.from_diffusers(pipe, 3).predict(y, sigma)
    assert found.dtype == torch.float32
    error = ((found - exact).flatten(1).norm(dim=1) / (exact - y).flatten(1).norm(dim=1)).max()
    assert 1e-4 < error < 0.05


def bad(make):
    with pytest.raises(cd.InputError) as caught:
        make()
    return str(caught.value)


def test_bad_input_gets_one_sentence():
    import diffusers as d

    make, ddpm, dit, sd = cd.models.from_diffusers, stand_ins.ddpm(), stand_ins.dit(), stand_ins.stable_diffusion()
    labelled = stand_ins.ddpm(n_classes=5)
    assert "got an object of type 'dict'" in bad(lambda: make({}))
    assert "got an object of type 'Linear'" in bad(lambda: make(nn.Linear(2, 2), scheduler=ddpm.scheduler))
    assert "must be a scheduler of diffusers, got 3" in bad(lambda: make(ddpm.unet, scheduler=3))
    assert "LCMScheduler belongs to a distilled network" in bad(lambda: make(sd.unet, scheduler=d.LCMScheduler()))
    assert "neither alphas_cumprod" in bad(lambda: make(ddpm.unet, scheduler=d.ScoreSdeVeScheduler()))
    assert "'v_prediction'" in bad(lambda: make(ddpm.unet, scheduler=d.EDMEulerScheduler(prediction_type="sample")))
    silent = SimpleNamespace(config={}, alphas_cumprod=ddpm.scheduler.alphas_cumprod)
    assert "does not state its prediction_type" in bad(lambda: make(ddpm.unet, scheduler=silent))
    assert "event_shape must be a tuple of positive integers" in bad(lambda: make(ddpm, event_shape=32))
    assert "from_velocity(noise_at=0)" in bad(
        lambda: make(ddpm.unet, scheduler=d.FlowMatchEulerDiscreteScheduler(invert_sigmas=True))
    )
    assert "'interpolated', 'nearest', got 'round'" in bad(lambda: make(ddpm, timesteps="round"))
    assert "this network has no classes" in bad(lambda: make(ddpm, 3))
    assert "conditional on 5 classes" in bad(lambda: make(labelled))
    assert "got 5; classes are 0 to 4" in bad(lambda: make(labelled, 5))
    assert "got 1001; classes are 0 to 1000" in bad(lambda: make(dit, 1001))
    assert "the prompt 'a cat' needs a pipeline" in bad(lambda: make(ddpm, "a cat"))
    assert "this network needs text" in bad(lambda: make(sd.unet, scheduler=sd.scheduler))
    assert "n_levels must be an integer of at least 2" in bad(lambda: make(ddpm).ladder(1))
    assert "0 < sigma_min < sigma_max, got 5 and 2" in bad(lambda: make(ddpm).ladder(3, sigma_min=5, sigma_max=2))
    flux = stand_ins.flux()
    assert "give event_shape=" in bad(lambda: make(flux.transformer, scheduler=flux.scheduler))
    ddpm.unet.train()
    ddpm.unet.mid_block.resnets[0].dropout.p = 0.5
    assert "call .eval()" in bad(lambda: Networks([make(ddpm)], False))


def test_latents_of_edm2_are_decoded_with_their_published_scale():
    vae = stand_ins.vae()
    raw = torch.tensor([5.81, 3.25, 0.12, -2.15])[:, None, None] + torch.zeros(1, 4, 8, 8)
    with torch.no_grad():
        check = lambda x: torch.testing.assert_close(cd.models.edm2_decoder(vae)(x), vae.decode(raw).sample)  # noqa: E731
        check(torch.zeros(1, 4, 8, 8))
        refuted(check, torch.full((1, 4, 8, 8), 0.5))
