"""Denoisers of molecules: their symmetry, what they can represent, and that training is resumable."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.checks import refuted

from crepe_diffusion.errors import InputError
from crepe_diffusion.experiments.molecules import model
from crepe_diffusion.experiments.molecules.network import EGNN, PairForces
from crepe_diffusion.experiments.training import Settings

N = 6


def networks():
    torch.manual_seed(0)
    centres = torch.tensor([[0, 1, 2, 3], [4, 2, 5, 0]])
    made = [
        PairForces(N, 0.2, n_layers=3, width=32),
        EGNN(N, n_layers=2, width=16),
        PairForces(N, 0.2, n_layers=3, width=32, centres=centres),
    ]
    for network in made:
        for p in network.parameters():  # last layers begin at zero, where every symmetry holds
            p.data += 0.1 * torch.randn_like(p)
    return [n.double() for n in made]


def check_symmetric(network, mirrored):
    generator = torch.Generator().manual_seed(1)
    y = torch.randn(5, N, 3, generator=generator, dtype=torch.float64)
    y = y - y.mean(1, keepdim=True)
    c_noise = torch.linspace(-1.5, 0.5, 5, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))[0]
    if (torch.det(turn) < 0) != mirrored:
        turn = turn * torch.tensor([1.0, 1.0, -1.0])
    out = network(y, c_noise)
    assert (network(y @ turn, c_noise) - out @ turn).abs().max() < 1e-10 * out.abs().max()
    assert (network(y + 0.3, c_noise) - out).abs().max() < 1e-10 * out.abs().max()
    assert out.mean(1).abs().max() < 1e-12 * out.abs().max()


@pytest.mark.parametrize("network", networks(), ids=["pairs", "egnn", "pairs with volumes"])
def test_turning_and_moving(network):
    check_symmetric(network, mirrored=False)


def test_only_volumes_tell_mirror_images_apart():
    pairs, egnn, handed = networks()
    check_symmetric(pairs, mirrored=True)
    check_symmetric(egnn, mirrored=True)
    refuted(check_symmetric, handed, True)


def test_a_network_on_coordinates_fails_the_same_check():
    dense = torch.nn.Linear(3 * N, 3 * N).double()
    refuted(check_symmetric, lambda y, c: dense(y.flatten(1)).reshape(y.shape), False)


def test_pair_forces_turn_nothing():
    """The score of a law that is invariant under rotation has no torque; a field may be equivariant and have one."""
    y = torch.randn(5, N, 3, dtype=torch.float64)
    y, c = y - y.mean(1, keepdim=True), torch.zeros(5, dtype=torch.float64)
    pairs, egnn, handed = networks()

    def torque(network):
        return torch.linalg.cross(y, network(y, c)).sum(1).abs().max().item()

    assert max(torque(pairs), torque(handed)) < 1e-11
    assert torque(egnn) > 1e-6


def test_distances_are_seen_in_their_own_scale():
    """A bond of spread 0.003 nm and a shape of 0.1 nm both come in with unit spread, at any noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 3, 3, generator=generator) * 0.1
    x[:, 1] = x[:, 0] + torch.tensor([0.15, 0.0, 0.0]) + 0.003 * torch.randn(4000, 3, generator=generator)
    network = PairForces(3, 0.1, n_layers=1, width=8)
    network.fit(x)
    seen = []
    network.first.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    for sigma in (1e-4, 1e-2, 1.0):
        y = x + sigma * torch.randn(x.shape, generator=generator)
        network(y / (sigma**2 + 0.01) ** 0.5, torch.full((4000,), sigma).log() / 4)
    spread = torch.stack([s.std(0) for s in seen])
    assert (spread > 0.5).all()
    assert (spread < 1.5).all()
    assert torch.stack([s.mean(0).abs() for s in seen]).max() < 0.6


def rods(n, seed):
    """Two atoms at 0.15 +- 0.01 nm and a third that swings about them."""
    rng = np.random.default_rng(seed)
    x = np.zeros((n, 3, 3), dtype=np.float32)
    x[:, 1, 0] = 0.15 + 0.01 * rng.standard_normal(n)
    x[:, 2] = x[:, 1] + 0.1 * rng.standard_normal((n, 3))
    return x - x.mean(1, keepdims=True)


def trained(folder, steps, stop=None):
    settings = Settings(n_steps=steps, batch=64, warm_up=10, noise_mean=-3.6, noise_std=1.8)
    network = {"kind": "pairs", "n_layers": 2, "width": 32}
    lines = model.train_model((rods(4000, 0), rods(500, 1)), folder, "rod", network, settings, every=50)
    for line in lines:
        if line["step"] == stop:
            lines.close()
            return None
    return model.load(folder / "rod.safetensors")


def test_training_resumes_and_learns_the_bond(tmp_path):
    whole = trained(tmp_path / "whole", 300)
    assert trained(tmp_path / "part", 300, stop=150) is None
    part = trained(tmp_path / "part", 300)
    x = torch.from_numpy(rods(2000, 2))
    t = torch.full((2000,), 0.01)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    y = x + 0.01 * (noise - noise.mean(1, keepdim=True))
    assert torch.equal(whole.predict(y, t), part.predict(y, t))
    # Of six free coordinates the bond's length alone has the noise's own scale: the gap of two atoms has the variance
    # 2 sigma^2 of noise and sigma^2 of data, so a third of the error is left, and 5 1/3 sixths in all.
    loss = model.by_noise(whole.function, x, torch.tensor([0.01]))[0]
    assert 0.87 < loss < 0.94
    untrained = model.build({"kind": "pairs", "n_layers": 2, "width": 32}, 3, float(x.std()))
    assert model.by_noise(untrained, x, torch.tensor([0.01]))[0] > 0.97


def test_hydrogens_are_renamed_in_half_of_the_rows_and_nothing_else():
    x = torch.arange(4000 * 6 * 3, dtype=torch.float32).reshape(4000, 6, 3)
    y = model.renamed(x, np.array([[0, 1, 2, 3]]), torch.Generator().manual_seed(0))
    swapped = (y[:, 2] == x[:, 3]).all(1)
    assert abs(swapped.float().mean() - 0.5) < 5 * 0.5 / 4000**0.5
    assert torch.equal(y[swapped][:, [0, 1, 3, 2, 4, 5]], x[swapped])
    assert torch.equal(y[~swapped], x[~swapped])


def test_unknown_networks_are_refused():
    with pytest.raises(InputError, match='"pairs" or "egnn", got \'mlp\''):
        model.build({"kind": "mlp", "n_layers": 2, "width": 8}, 3, 0.1)
