"""Whether a model's error over torsions is found, and undone, on laws that are known."""

from __future__ import annotations

import numpy as np
import pytest

from checks import refuted
from studies.molecules import torsions

BETA = 2.5
CENTRES = np.array([[60.0, 0.0], [-120.0, 140.0], [-70.0, -40.0]])  # of phi > 0, beta, alpha
HOT, COLD = np.array([0.1, 0.6, 0.3]), np.array([0.02, 0.84, 0.14])
ERROR = np.array([0.9, 0.97, 1.1])  # of the model, by basin


def drawn(shares, n, rng, relatives=1):
    """A sample with these shares of basins, of which `relatives` at a time are the same."""
    basin = rng.choice(3, size=n // relatives, p=shares / shares.sum()).repeat(relatives)
    return torsions.Sample(CENTRES[basin] + 12 * rng.normal(size=(n, 2)), basin, np.arange(n) // relatives)


@pytest.fixture(scope="module")
def found():
    rng = np.random.default_rng(0)
    model, hot, cold = drawn(HOT * ERROR, 40_000, rng), drawn(HOT, 80_000, rng), drawn(COLD, 80_000, rng)
    tempered = {"right": drawn(COLD * ERROR**BETA, 20_000, rng, 4), "blind": drawn(COLD, 20_000, rng, 4)}
    return {s.name: s for s in torsions.check(model, hot, cold, tempered, BETA)}


def check(shares, wanted):
    z = (np.array(shares.values) - wanted / wanted.sum()) / np.array(shares.errors)
    assert (np.abs(z) < 4).all()  # false alarm: 1 in 5,000


def test_the_error_of_the_model_predicts_cold_basins(found):
    for width in torsions.WIDTHS:
        name = f"predicted by r, squares of {width} degrees"
        check(found[name], COLD * ERROR**BETA)
        refuted(check, found[name], COLD)
        refuted(check, found[name], COLD * ERROR)


def test_weights_undo_it_for_a_sampler_of_the_model_alone(found):
    check(found["right"], COLD * ERROR**BETA)
    check(found["right, weighted by r^-beta"], COLD)
    check(found["blind"], COLD)
    refuted(check, found["blind, weighted by r^-beta"], COLD)


def test_relatives_count_once():
    """Four copies of each draw have twice the error of as many independent ones."""
    rng = np.random.default_rng(1)
    model = hot = cold = drawn(HOT, 4000, rng)
    methods = {"alone": drawn(COLD, 8000, rng), "four": drawn(COLD, 8000, rng, 4)}
    errors = {s.name: s.errors[2] for s in torsions.check(model, hot, cold, methods, BETA)}
    assert 1.7 < errors["four"] / errors["alone"] < 2.3


def test_angles_wrap():
    s = torsions.Sample(np.array([[180.0, -180.0], [-180.0, 180.0], [179.9, 0.0]]), np.zeros(3, int), np.arange(3))
    first, second, third = s.cells(30)
    assert first == second == 0
    assert third == 11 * 12 + 6
