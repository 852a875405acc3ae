"""Noised frames taken down again by a model whose law is known: Gaussian atoms, as in the tests of tempering."""

from __future__ import annotations

import pytest
import torch

from checks import refuted
from crepe_diffusion.models import EDM
from studies.molecules import descents, model

SCALE, N_FREE = 0.2, 9


class Nothing(torch.nn.Module):
    def forward(self, y, c_noise):
        return torch.zeros_like(y)


@pytest.mark.parametrize("top", [0.03, 0.3])
def test_a_right_model_gives_back_the_law(top):
    """Noise grows the variance to `SCALE^2 + top^2`, and steps with the exact denoiser take it back to `SCALE^2`.

    Each step takes a little too much: of 80 steps from 0.3 nm that shows.
    """
    generator = torch.Generator().manual_seed(0)
    x = SCALE * torch.randn(4000, 4, 3, generator=generator)
    x = x - x.mean(1, keepdim=True)

    def check(scale):
        y = descents.descend(model.denoiser(EDM(Nothing(), scale), 4), x, top, generator, n_steps=400)
        y = y - y.mean(1, keepdim=True)
        assert abs(float(y.square().sum((1, 2)).mean()) / N_FREE / SCALE**2 - 1) < 0.05

    check(SCALE)
    if top > SCALE:
        refuted(check, 0.8 * SCALE)  # a model of another law shows from much noise
