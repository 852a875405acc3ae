"""Events that are padded: `mask=` leaves out what is no part of them, for atoms; a frozen token does it for texts."""

from __future__ import annotations

import pytest
import torch

import crepe_diffusion as cd
from checks import assert_mean, refuted
from crepe_diffusion.processes import EulerMaruyama, Gaussian

ATOMS, MOST = 3, 7
MASK = torch.zeros(MOST, 2, dtype=torch.bool)
MASK[[0, 2, 3]] = True  # padding need not be at the end
DATA = cd.models.GaussianMixture([0.4, 0.6], cd.Stream(1).normal((2, ATOMS, 2)), [0.7, 0.4])
LADDER = cd.ladder.karras(5, 0.1, 8.0, substeps=2)


def padded(function):
    """A network of the larger size that says something of the padding as well."""

    def denoise(y, t):
        out = 0.3 * y + 5.0
        out[:, MASK] = function(y[:, MASK].reshape(-1, ATOMS, 2), t).flatten(1)
        return out

    return denoise


def models(centred):
    def function(y, t):
        out = DATA.predict(y, t)
        return out - out.mean(1, keepdim=True) if centred else out

    small = cd.models.Denoiser(function, (ATOMS, 2), dtype=torch.float64)
    return small, cd.models.Denoiser(padded(function), (MOST, 2), dtype=torch.float64)


PROCESSES = {
    "auto": (Gaussian(), Gaussian(mask=MASK)),
    "one variance": (Gaussian(variance="fisher"), Gaussian(variance="fisher", mask=MASK)),
    "zero mean": (Gaussian(zero_mean=0), Gaussian(zero_mean=0, mask=MASK)),
    "paper": (EulerMaruyama(reference=1.0), EulerMaruyama(reference=1.0, mask=MASK)),
}


def samplers(target, process):
    options = {"process": process, "fit_samples": 32}
    chain = cd.ReplicaExchange(target, LADDER, n_chains=2, explorer=cd.Bounce(), **options)
    works = [chain.step().swaps.log_work.nan_to_num() for _ in range(4)]
    smc = cd.SMC(target, LADDER, n_particles=8, **options).sample()
    return chain.state.x, torch.stack(works), smc.x, smc.log_weights, smc.batch_log_z


@pytest.mark.parametrize("name", PROCESSES)
def test_a_padded_event_is_sampled_as_the_event_alone(name):
    """The same draws, works and weights, with zeros in the padding; rewards see zeros there too."""
    small, large = models(name == "zero mean")
    reward = lambda z: z.flatten(1).sin().sum(1)  # noqa: E731 - the sine of padding is zero
    alone = samplers((small**1.5).tilt(reward, guidance="jacobian-free"), PROCESSES[name][0]) if name != "paper" else ()
    alone = alone or samplers((small**1.5).tilt(reward), PROCESSES[name][0])
    options = {} if name == "paper" else {"guidance": "jacobian-free"}
    together = samplers((large**1.5).tilt(reward, **options), PROCESSES[name][1])
    for x, y in zip(alone, together, strict=True):
        if x.shape[1:] == (ATOMS, 2):
            assert (y[:, ~MASK] == 0).all()
            y = y[:, MASK].reshape(x.shape)
        torch.testing.assert_close(x, y, atol=1e-8, rtol=1e-8)


def test_padding_without_a_mask_is_wrong():
    """N(0, 1) data at noise 0.02. Padding that the network predicts as zero spoils one variance for all."""
    mask = torch.arange(6) < 2

    def zeros(y, t):
        return torch.where(mask, y / (1 + t[:, None] ** 2), 0.0)

    model = cd.models.Denoiser(zeros, (6,), dtype=torch.float64)

    def check(**options):
        plain = cd.Plain(model, cd.ladder.karras(9, 0.02, 20.0), process=Gaussian(variance="fisher", **options))
        assert_mean(plain.sample(4000).x[:, :2].square(), 1 + 0.02**2)

    check(mask=mask)
    refuted(check)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gaussian(mask=torch.ones(3)), "mask must hold booleans"),
        (lambda: Gaussian(mask=torch.zeros(3, dtype=torch.bool)), "mask must hold booleans, True for"),
        (lambda: Gaussian(mask=torch.ones(2, dtype=torch.bool), basis=torch.eye(2)), "either basis or mask"),
        (
            lambda: cd.Plain(DATA, LADDER, process=Gaussian(mask=torch.ones(3, dtype=torch.bool))),
            r"the shape of the event \(3, 2\), got \(3,\)",
        ),
    ],
)
def test_masks_that_do_not_fit_are_refused(make, message):
    with pytest.raises(cd.InputError, match=message):
        make()


def test_segments_of_padded_events_are_padded():
    _, large = models(False)
    model = cd.models.Denoiser(large.function, (MOST, 2), dtype=torch.float64, process=Gaussian(mask=MASK))
    chain = cd.ReplicaExchange(cd.stitching.Segments(model, 2), LADDER, fit_samples=16)
    x = chain.sample(2).x
    assert (x[:, :, ~MASK] == 0).all()
    assert (x[:, :, MASK] != 0).all()
