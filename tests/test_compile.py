"""A compiled network is compiled for few shapes: the core does not send it a new one in every call."""

from __future__ import annotations

import pytest
import torch

import crepe_diffusion as cd
from checks import refuted
from crepe_diffusion.kernels import Bounce

MOST = 4


def compiled(fresh_shapes: bool = False):
    """A compiled denoiser with the shapes that it was called with, and the graphs that were compiled for it."""
    torch._dynamo.reset()
    shapes, graphs = set(), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def network(y, sigma):
        return y / (1 + sigma[:, None] ** 2)

    fast = torch.compile(network, backend=backend, dynamic=False if fresh_shapes else None)

    def denoiser(y, sigma):
        shapes.add(tuple(y.shape))
        return fast(y, sigma)

    return cd.models.Denoiser(denoiser, (3,)), shapes, graphs


def check(fresh_shapes: bool = False) -> None:
    model, shapes, graphs = compiled(fresh_shapes)
    target = (model**1.5).tilt(lambda x: x[:, 0])
    for n_chains in (1, 2, 3):
        chain = cd.ReplicaExchange(target, cd.ladder.karras(4, 0.1, 5.0), n_chains=n_chains, explorer=Bounce())
        chain.sample(2)
    cd.SMC(target, cd.ladder.karras(4, 0.1, 5.0), n_particles=5).sample()
    cd.ReplicaExchange(target, cd.ladder.karras(4, 0.1, 5.0), n_chains=3, micro_batch=5).sample(2)
    assert len(shapes) > MOST
    assert 0 < len(graphs) <= min(len(shapes), MOST), f"{len(graphs)} graphs for {len(shapes)} shapes"


@pytest.mark.slow
def test_a_compiled_network_is_compiled_a_few_times():
    check()
    refuted(check, fresh_shapes=True)
