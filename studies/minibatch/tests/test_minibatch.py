"""The demonstration: small batches of SMC have the wrong mode weights, and one run of CREPE has the right ones.

The seed is fixed. For exact samplers the largest of four z-scores would exceed 4 once in 4,000 seeds.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import Tensor

import crepe_diffusion as cd
from studies.minibatch import study as minibatch
from studies.minibatch.__main__ import HERE, write
from studies.minibatch.tables import cells
from studies.shared.pages import BLOCK
from studies.shared.results import Results

N_SAMPLES = 12_000
pytestmark = pytest.mark.slow  # half a minute; make demo runs the same study


@pytest.fixture(scope="module")
def study() -> minibatch.Study:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minibatch, "ENOUGH", 100)
        return minibatch.run(N_SAMPLES, seed=3)


def largest_z(x: Tensor, n_blocks: int, truth: minibatch.Truth) -> float:
    """Of the mode weights of samples in independent blocks, by the spread between blocks."""
    shares = minibatch.tally(x, torch.ones_like(x), truth.borders, n_blocks) * n_blocks / len(x)
    error = shares.std(0) / n_blocks**0.5
    return float(((shares.mean(0) - truth.modes) / error).abs().max())


def test_crepe_has_the_right_mode_weights(study: minibatch.Study) -> None:
    assert largest_z(study.crepe.x, minibatch.N_CHAINS, study.truth) < 4


def test_small_batches_of_smc_do_not(study: minibatch.Study) -> None:
    four, ten, hundred = study.smc
    assert largest_z(four.x, N_SAMPLES // 100, study.truth) > 20
    assert largest_z(ten.x, N_SAMPLES // 100, study.truth) > 10
    assert four.tv_modes.value > 1.5 * ten.tv_modes.value > 3 * hundred.tv_modes.value


def test_the_same_particles_weighted_by_z_are_right(study: minibatch.Study) -> None:
    for method in study.pooled:
        z = [(e.value - float(w)) / e.error for e, w in zip(method.modes, study.truth.modes, strict=True)]
        assert max(map(abs, z)) < 4, method.name


def test_particle_gibbs_and_the_chosen_method_are_right(study: minibatch.Study) -> None:
    z = [(e.value - float(w)) / e.error for e, w in zip(study.chosen.modes, study.truth.modes, strict=True)]
    assert max(map(abs, z)) < 4
    # Eleven sweeps are too few for an error of their own, but they have no bias like that of batches of ten.
    assert study.gibbs.tv_modes.value < 0.4 * study.smc[1].tv_modes.value
    assert "was chosen" in study.choice
    assert study.chosen.rows < N_SAMPLES * minibatch.N_LEVELS


def test_costs_are_what_the_formulas_say(study: minibatch.Study) -> None:
    assert {m.rows for m in study.smc} == {N_SAMPLES * minibatch.N_LEVELS}
    iterations = N_SAMPLES // minibatch.N_CHAINS + minibatch.BURN_IN
    descent = 1  # the replicas' first positions: one pass down the ladder
    assert study.crepe.rows == minibatch.N_CHAINS * (minibatch.N_LEVELS - minibatch.SHORTER) * (iterations + descent)


def test_costs_are_equal_at_the_default_size() -> None:
    n, chains, levels = 150_000, minibatch.N_CHAINS, minibatch.N_LEVELS
    crepe = (levels - minibatch.SHORTER) * (n + chains * (minibatch.BURN_IN + 1))
    assert abs(crepe / (n * levels) - 1) < 0.01


def test_errors_of_exact_draws_are_binomial(study: minibatch.Study) -> None:
    for estimate, w in zip(study.floor.modes, study.truth.modes.tolist(), strict=True):
        assert estimate.error == pytest.approx((w * (1 - w) / N_SAMPLES) ** 0.5, rel=0.25)


def test_truth_agrees_with_the_closed_form() -> None:
    # exp(x^2 / 12) makes of each Gaussian another: 1 / s'^2 = 1 / s^2 - 1 / 6 and m' = m s'^2 / s^2.
    p, truth = minibatch.mixture(), minibatch.Truth()
    s2 = p.eigenvalues[:, 0]
    t2 = 1 / (1 / s2 - 1 / 6)
    m = p.means[:, 0]
    log_w = p.weights.log() + 0.5 * (t2 / s2).log() + 0.5 * (m * m * t2 / s2**2 - m * m / s2)
    tilted = cd.models.GaussianMixture(log_w.softmax(0), (m * t2 / s2)[:, None], t2.sqrt())
    expected = tilted.log_prob(truth.grid[:, None]).exp()
    torch.testing.assert_close(truth.density, expected, rtol=1e-6, atol=1e-9)


def test_the_shipped_results_make_the_shipped_tables(tmp_path: Path) -> None:
    shipped = (HERE / "README.md").read_text()
    page = tmp_path / "README.md"
    page.write_text(BLOCK.sub(r"<!-- table: \g<name> -->\n<!-- end -->", shipped))
    record = Results(HERE)["results"]
    write(record, tmp_path)
    assert page.read_text() == shipped
    assert (tmp_path / "minibatch.png").stat().st_size > 10_000
    record["methods"][1]["modes"][0]["value"] += 0.001
    write(record, tmp_path)
    assert page.read_text() != shipped


def test_a_record_has_every_number_of_a_study(study: minibatch.Study, tmp_path: Path) -> None:
    Results(tmp_path).save("results", study.record())
    record = Results(tmp_path)["results"]
    _, lines = cells(record, study.truth)["weights"]
    assert [line[0] for line in lines[1:]] == [m["name"] for m in record["methods"]]
    assert record["methods"][-1]["tv_bins"] == asdict(study.pooled[-1].tv_bins)
    for m in record["methods"]:
        assert sum(m["bins"]) == pytest.approx(1)
