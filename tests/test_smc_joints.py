"""A stranger's weight and resampling rule, in one file of examples/, are unbiased; broken twins are not."""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import crepe_diffusion as cd
from checks import assert_mean, f64, refuted
from crepe_diffusion.processes import FisherTable, Gaussian

FILE = Path(__file__).parents[1] / "examples" / "smc_weight.py"
EXAMPLE = runpy.run_path(str(FILE))
Cautious, Killing = EXAMPLE["Cautious"], EXAMPLE["Killing"]
LADDER = cd.ladder.karras(5, 0.3, 12.0, rho=3, substeps=2)
RHO, B = 0.9, 0.7


@dataclass(frozen=True)
class Forgetful(Cautious):
    """Counts only a share of the reward at level 0 too."""

    def factor(self, level):
        return self.share


class Favouring(Killing):
    """Replaces every particle that does not stay by the first."""

    def __call__(self, log_weights, stream):
        index, equal = super().__call__(log_weights, stream)
        return index.where(index == torch.arange(index.shape[1]), 0), equal


def check_unbiased(weight, rule):
    """N(0, RHO^2) tilted by exp(B x) on the state, with exact kernels: E[Z_hat] = Z and E[Z_hat x_hat] = Z E[x]."""
    t2 = LADDER.times[None, :, None] ** 2
    process = Gaussian(information=FisherTable(LADDER.times, t2 / (t2 + RHO**2), f64([[0.0]])))
    p = cd.models.GaussianMixture([1.0], [[0.0]], [RHO])
    target = p.tilt(lambda x: B * x[:, 0], on="state", anneal=cd.anneal.power(2, floor=0.1))
    out = cd.SMC(
        target,
        LADDER,
        n_particles=6,
        n_batches=4000,
        weight=weight,
        resampling=rule,
        ess_threshold=1.0,
        process=process,
        seed=1,
    ).sample()
    assert out.n_resamplings.sum() > 0
    variance = RHO**2 + 0.3**2
    z_hat = (out.batch_log_z - B**2 * variance / 2).exp()
    assert_mean(z_hat, 1.0)
    own = (out.log_weights.exp() * out.by_batch(out.x[:, 0])).sum(1)
    assert_mean(z_hat * (own - B * variance), 0.0)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_the_weight_and_the_rule_are_unbiased(share):
    check_unbiased(Cautious(share), Killing())


def test_broken_twins_are_not():
    refuted(check_unbiased, Forgetful(0.4), Killing())
    refuted(check_unbiased, Cautious(0.4), Favouring())


def test_without_caution_it_is_the_work_of_the_path():
    ladder, p = LADDER, cd.models.GaussianMixture([1.0], [[0.0]], [RHO])
    options = {"process": Gaussian(variance=RHO), "n_particles": 8, "seed": 2}
    one, other = (
        cd.SMC(p.tilt(lambda x: x[:, 0]), ladder, weight=w, **options).sample() for w in (Cautious(1.0), None)
    )
    assert torch.equal(one.x, other.x)
    assert torch.equal(one.batch_log_z, other.batch_log_z)


def test_the_example_runs(capsys):
    EXAMPLE["main"]()
    assert "log Z" in capsys.readouterr().out
