"""`examples/adapter.py`: a stranger's network in one file, exact, and with one call for a guided pair."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import crepe_diffusion as cd
from checks import assert_mean, f64, refuted
from crepe_diffusion.random import Stream

FILE = Path(__file__).parents[1] / "examples" / "adapter.py"
spec = importlib.util.spec_from_file_location("examples_adapter", FILE)
adapter = importlib.util.module_from_spec(spec)
spec.loader.exec_module(adapter)


@pytest.mark.parametrize("label", [0, 1, 2])
def test_the_adapter_is_the_denoiser_of_its_class(label):
    """Gaussian data: D = (rho^2 y + sigma^2 mu) / (rho^2 + sigma^2), at any noise of the ladder."""
    y, sigma = 3 * Stream(1).normal((50, 2)), 0.02 + 20 * Stream(2).uniform((50,))
    mu, rho, s = adapter.MEANS[label].double(), adapter.STDS[label].double(), sigma[:, None]

    def check(mu):
        expected = (rho**2 * y + s**2 * mu) / (rho**2 + s**2)
        torch.testing.assert_close(adapter.denoiser(adapter.Network(), label).predict(y, sigma), expected)

    check(mu)
    refuted(check, mu + 0.1)


def test_a_guided_pair_of_it_costs_half_the_calls():
    network, other = adapter.Network().eval(), adapter.Network().eval()
    ladder, calls = cd.ladder.karras(4, 0.1, 20.0, substeps=2), {}
    for name, second in (("shared", network), ("apart", other)):
        pair = adapter.denoiser(network, 1), adapter.denoiser(second, 0)
        chain = cd.ReplicaExchange(cd.guided(*pair, 1.5), ladder, seed=1)
        before = network.calls + other.calls
        for _ in range(5):
            chain.step()
        calls[name] = network.calls + other.calls - before, chain.state.x
    assert calls["shared"][0] == 5 * ladder.substeps == calls["apart"][0] / 2
    torch.testing.assert_close(calls["shared"][1], calls["apart"][1])


def test_its_guided_law_has_the_mean_of_the_product_of_powers():
    """p^(-1/2) p(.|1)^(3/2) of Gaussians: precision 3/2 / 0.5^2 - 1/2 / 2^2, mean 6 mu_1 / 5.875."""
    network = adapter.Network().eval()
    target = cd.guided(adapter.denoiser(network, 1), adapter.denoiser(network, 0), 1.5)
    ladder = cd.ladder.karras(9, 0.02, 20.0, substeps=2)
    chain = cd.ReplicaExchange(target, ladder, n_chains=64, seed=0, explorer=cd.Bounce())
    means = chain.sample(30, burn_in=10).chains.mean(0)  # chains are independent
    assert_mean(means, 6 / 5.875 * f64([2.0, -1.0]))
    refuted(assert_mean, means, 2 / 2.125 * f64([2.0, -1.0]))  # of strength 1/2


def test_it_runs_as_it_is(capsys):
    adapter.main(n_draws=5)
    assert "2.0 network calls per iteration, for two models" in capsys.readouterr().out
