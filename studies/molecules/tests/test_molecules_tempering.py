"""Tempering methods on a molecule whose law is known: Gaussian atoms, for which EDM's skip is the exact denoiser."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from crepe_diffusion import InputError
from crepe_diffusion.models import EDM
from studies.molecules import model, tempering
from studies.molecules.network import volumes

SCALE, BETA, N_FREE = 0.2, 2.5, 9
COOLING = tempering.Cooling(BETA, bonds=((0, 1), (0, 2), (0, 3)))
BUDGET = tempering.Budget(
    rows=150_000,
    n_chains=20,
    own_chains=20,
    n_levels=41,
    substeps=2,
    own_levels=9,
    own_substeps=10,
    batch=500,
    burn_in=0.4,
    fit_samples=256,
)


class Nothing(torch.nn.Module):
    def forward(self, y, c_noise):
        return torch.zeros_like(y)


@pytest.fixture(scope="module")
def gaussian():
    return model.denoiser(EDM(Nothing(), SCALE), 4)


def variance(draws, beta):
    """The variance of the draws over that of `p^beta`, which is `SCALE^2 / beta`."""
    return float(draws.x.double().square().sum((1, 2)).mean() / N_FREE / (SCALE**2 / beta))


@pytest.mark.parametrize(
    ("method", "low", "high"),
    [
        # The Fisher variance is exact for Gaussian data, so only the draws' own error is left: of 1,500 or more
        # particles 1.2 %, of the few hundred correlated draws of 20 chains about 4 %.
        ("RNE, own", 0.94, 1.06),
        ("CREPE, own", 0.84, 1.16),
        ("CREPE, own, springs", 0.84, 1.16),
        ("RNE, own, springs, 50 steps", 0.94, 1.06),
        # Euler-Maruyama steps shrink variances: measured 0.92 to 0.97 on this ladder.
        ("FKC, annealed score", 0.85, 1.06),
        ("RNE, paper", 0.85, 1.06),
        ("CREPE, paper", 0.80, 1.06),
    ],
)
def test_corrected_methods_find_the_tempered_variance(gaussian, method, low, high):
    draws = tempering.METHODS[method](gaussian, COOLING, BUDGET, 0)
    assert low < variance(draws, BETA) < high
    assert abs(draws.about["rows"] / BUDGET.rows - 1) < 0.25


def test_the_annealed_score_alone_is_too_cold(gaussian):
    """What the paper's methods correct: the same kernels without weights fall outside all their bounds."""
    assert variance(tempering.METHODS["annealed score, paper"](gaussian, COOLING, BUDGET, 0), BETA) < 0.75


def test_the_untempered_model_is_the_model(gaussian):
    assert abs(variance(tempering.METHODS[tempering.UNTEMPERED](gaussian, COOLING, BUDGET, 0), 1.0) - 1) < 0.06


def test_what_is_there_is_not_done_again(gaussian, tmp_path, monkeypatch):
    small = tempering.Budget(rows=4000, n_levels=11, substeps=1, batch=50, fit_samples=64)
    run = lambda: list(tempering.temper(gaussian, COOLING, tmp_path, small, (0, 1), ("RNE, own",)))  # noqa: E731
    kept, names = tempering.kept_draws(tmp_path), run()
    first = [kept.arrays(name)["x"] for name in names]
    assert (first[0] != first[1]).any()
    monkeypatch.setitem(tempering.METHODS, "RNE, own", lambda *given: pytest.fail("done again"))
    assert run() == names
    assert all((kept.arrays(name)["x"] == x).all() for name, x in zip(names, first, strict=True))
    about = kept[names[1]]
    assert (about["method"], about["seed"], about["beta"]) == ("RNE, own", 1, BETA)
    other = model.denoiser(EDM(Nothing(), 2 * SCALE), 4)
    with pytest.raises(InputError, match="another model;"):
        list(tempering.temper(other, COOLING, tmp_path, small, (0,), ("RNE, own",)))
    with pytest.raises(InputError, match="another budget;"):
        list(tempering.temper(gaussian, COOLING, tmp_path, replace(small, batch=60), (0,), ("RNE, own",)))
    with pytest.raises(InputError, match="no method 'magic'"):
        list(tempering.temper(gaussian, COOLING, tmp_path, small, (0,), ("magic",)))


CENTRES = ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize(
    ("method", "most"),
    # Weights leave mixed hands a share of exp(-20), but for volumes near 0.
    [("RNE, own", 0.05), ("CREPE, own", 0.05)],
)
def test_the_tilt_leaves_molecules_of_one_hand(method, most):
    """Two groups of atoms with hands of their own; which of the two hands they have stays open."""
    two = model.denoiser(EDM(Nothing(), SCALE), 8)

    def hands(cooling):
        draws = tempering.METHODS[method](two, cooling, replace(BUDGET, rows=50_000), 0)
        return volumes(draws.x, torch.tensor(CENTRES)) > 0

    tilted, free = hands(replace(COOLING, alphas=CENTRES, bonds=())), hands(COOLING)
    mixed, without = ((of[:, 0] != of[:, 1]).double().mean() for of in (tilted, free))
    assert mixed < most < 0.25 < without < 0.75  # 20 chains
    assert 0.1 < tilted[:, 0].double().mean() < 0.9


@pytest.mark.parametrize("method", ["RNE, own", "CREPE, own"])
def test_the_tilt_leaves_whole_molecules(method):
    """No bond is too long, in a law in which more than three of ten molecules have one that is."""
    two = model.denoiser(EDM(Nothing(), SCALE), 8)

    def broken(cooling):
        x = tempering.METHODS[method](two, cooling, replace(BUDGET, rows=30_000), 0).x
        return float(((x[:, 0] - x[:, 1]).norm(dim=1) > tempering.LONGEST).double().mean())

    cooling = replace(COOLING, bonds=((0, 1),))
    assert broken(replace(cooling, alphas=CENTRES)) < 0.01 < 0.3 < broken(cooling)
