"""The trained storey on a network that has learned nothing: what is measured is what is written down."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import crepe_diffusion as cd
from checks import refuted
from crepe_diffusion.run import read_run
from crepe_diffusion.samplers import Independent
from studies.images import data, inception, methods, model, painting, problems, restoring, tables, trained, wishes
from studies.images.methods import Setting
from studies.shared.results import Results
from studies.shared.training import Settings, loss

SIZES = trained.Sizes(n_steps=8, n_samples=(2, 4), n_images=8, classes=(3,), n_iterations=3, n_chains=2, n_seeds=1)


def test_the_label_reaches_the_network_and_rows_do_not_mix():
    torch.manual_seed(0)
    network = model.build({"size": 28, "width": 8, "depth": 1, "n_classes": 3})
    for p in network.parameters():
        torch.nn.init.normal_(p, std=0.2)  # layers that begin at zero would hide the label
    y, sigma, label = torch.randn(4, 1, 28, 28), torch.tensor([0.1, 0.5, 1.0, 3.0]), torch.tensor([0, 1, 2, 3])
    with torch.no_grad():
        out = network(y, sigma, label)

        def check(order):
            torch.testing.assert_close(network(y[order], sigma[order], label[order]), out[order], rtol=1e-4, atol=1e-5)

        check(torch.tensor([2, 0, 3, 1]))
        other = network(y, sigma, label.flip(0))
    assert float((other - out).flatten(1).norm(dim=1).min()) > 1e-3


def test_blocks_of_rows_are_the_whole():
    network = model.build({"size": 28, "width": 8, "depth": 1, "n_classes": 3})
    torch.nn.init.normal_(network.network.last.weight, std=0.2)  # a network that begins at zero would hide its input
    y, sigma, label = torch.randn(5, 1, 28, 28), torch.tensor([0.1, 0.5, 1.0, 3.0, 9.0]), torch.tensor([0, 1, 2, 3, 1])

    def check(n, order):
        found = model.InBlocks(network, n)(y, sigma, label)
        torch.testing.assert_close(found[order], network(y, sigma, label), rtol=1e-4, atol=1e-5)

    for n in (1, 2, 5, 9):
        check(n, torch.arange(5))
    refuted(lambda: check(2, torch.tensor([2, 3, 0, 1, 4])))


def test_labels_are_hidden_at_the_stated_rate(folder):
    images = model.load_images("mnist", folder / "data")[0]
    x, label = model.labelled(images, 4000, torch.Generator().manual_seed(0), none=10)
    share = float((label == 10).double().mean())
    assert abs(share - model.DROPPED) < 5 * math.sqrt(model.DROPPED * (1 - model.DROPPED) / 4000)
    rows = label < 10  # the bar of class c begins at line 2 c + 2
    assert bool((x[rows, 0].mean(2).diff(dim=1).argmax(1) == 2 * label[rows] + 1).all())


def test_the_loss_depends_on_labels():
    class Labelled(torch.nn.Module):
        def forward(self, y, c_noise, label):
            return label[:, None].expand_as(y).to(y)

    settings = Settings(n_steps=1)
    x = torch.zeros(64, 2)
    values = [
        float(
            loss(
                cd.models.EDM(Labelled(), 1.0),
                (x, torch.full((64,), c)),
                settings,
                torch.Generator().manual_seed(0),
            )
        )
        for c in (0, 1)
    ]
    assert values[0] != values[1]


def test_cosines_are_orthonormal_and_begin_with_the_mean():
    basis = model.cosines(6)
    torch.testing.assert_close(basis @ basis.T, torch.eye(36).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(basis[0], torch.full((36,), 1 / 6).double())


def test_a_painter_is_loaded_as_it_was_shipped(folder, painter):
    x, t = torch.randn(3, 1, 14, 14), torch.tensor([0.1, 1.0, 5.0])
    network = model.build({"size": 14, "width": 8, "depth": 1, "n_classes": 10})
    network.load_state_dict(model.load_weights(folder / "trained" / "mnist-14.safetensors")[0])
    for label in (3, 10):
        torch.testing.assert_close(painter.models[label].predict(x, t), network.eval()(x, t, torch.full((3,), label)))
    target = painter.guided(4, 1.5)
    process = painter.process(target)
    assert target.exponents == (-0.5, 1.5)
    torch.testing.assert_close(process.information.values, painter.table.values[[10, 4]])
    assert painter.about["images"] == "mnist"
    assert model.shipped(folder) == ["mnist-14"]
    with pytest.raises(cd.InputError, match="no weights"):
        model.load_painter("nothing")


def bar(lean=0.0, half_width=2, size=28):
    """A bright bar of 20 lines whose top is shifted to the left by `lean` pixels per line."""
    x = -torch.ones(1, 1, size, size)
    for line in range(4, 24):
        middle = 14 + round(lean * (line - 14))
        x[0, 0, line, middle - half_width : middle + half_width] = 1.0
    return x


def test_measures_mean_what_they_are_called():
    def check(sign):
        m = wishes.MEASURES
        assert sign * float(m["left"](bar(0.3))) > 0.2  # the top is to the left of the bottom
        assert abs(float(m["left"](bar()))) < 0.02
        assert float(m["thick"](bar(half_width=4))) > 1.5 * float(m["thick"](bar()))
        assert float(m["wide"](bar(half_width=6))) > 2 * float(m["wide"](bar()))
        assert float(m["ink"](bar())) == pytest.approx(20 * 4 / 28**2)

    check(1)
    refuted(lambda: check(-1))


def test_a_wish_is_measured_in_standard_deviations_of_its_class(folder, painter):
    wish = wishes.Wish("wide", 4, {"wide": 1.0}, strength=2.0)
    x = model.load_images("mnist", folder / "data", 14)[0].of_class(4)
    value = wish.reward(painter)(x) / 2
    assert float(value.mean()) == pytest.approx(0, abs=1e-3)
    assert float(value.std()) == pytest.approx(1, abs=1e-3)
    like = wishes.Wish("like", 4, like=7).reward(painter)(x)
    torch.testing.assert_close(like, 3 * painter.classifier(x)[:, 7])


def test_finishing_goes_on_below_level_zero():
    steps = Setting(0.1, 20.0, 8, 0, n_finish=3).ladder(4)
    assert steps.n_levels == 3
    assert float(steps.times[0]) == pytest.approx(0.1)
    assert steps.finish[-1] == pytest.approx(0.02)
    assert all(a > b for a, b in zip((0.1, *steps.finish), steps.finish, strict=False))


def test_all_of_it_runs_and_is_not_repeated(painter, tmp_path):
    results = Results(tmp_path)
    names = list(trained.guidance_table(painter, results, SIZES))
    assert list(trained.guidance_table(painter, results, SIZES)) == []
    assert names == [f"guidance mnist-14 class 3 samples {n} seed 0" for n in (4, 2)]
    corrected = {"FKC", "RNE-SMC", "particle Gibbs", "CREPE", "CREPE, burn-in dropped"}
    assert set(results[names[1]]["found"]) == corrected
    record = results[names[0]]
    assert set(record["found"]) == corrected | {"no guidance", "plain CFG"}
    most = 8 * (8 + 1 + trained.N_FINISH)  # images, and the states of a walk
    for name, found in record["found"].items():
        networks = 1 if name == "no guidance" else 2
        short = {"particle Gibbs", "CREPE", "CREPE, burn-in dropped"}  # which go on for two iterations at the least
        assert found["rows"] <= networks * (most if name not in short else 2 * most), name
        assert 0 <= found["accuracy"] <= 1, name
    json.dumps(record, allow_nan=False)
    trained.refine(painter, results, SIZES)
    found = results["refinement mnist-14"]
    assert len(found["along"]) == 6
    wish, chains = trained.run_wish(painter, painter.conditional(4), wishes.WISHES["mnist"][4], SIZES, seed=0)
    assert chains.shape == (3, 2, 1, 14, 14)
    assert len(wish["along"]) == 3
    names = list(trained.long_chains(painter, results, SIZES, n_times=2))
    assert names == [f"long wish mnist-14 a {what}" for what in ("one that looks like an eight", "left-leaning one")]
    assert results[names[0]]["iterations"] == 6
    assert tables.long_table(results, "mnist-14").count("do not trust") >= 1


def test_rows_are_equal_where_runs_are_long_enough():
    """Every method spends what it was given, but for less than one more iteration; finishing steps are paid too."""
    p, q = (cd.models.GaussianMixture([1.0], [[mean]], [0.5]) for mean in (0.5, 0.0))
    target = cd.guided(p, q, 1.5)
    setting = Setting(0.1, 20.0, 8, 2400, cd.processes.Gaussian(variance=1.0), trained.N_FINISH)

    def check(setting, given):
        for method, iteration in (
            (methods.plain, 14),
            (methods.smc(cd.PathWork(), 4, n_batches=2), 2 * 15),
            (methods.gibbs(4, 4, n_chains=2), 2 * 59),
            (methods.crepe(4, n_chains=2), 2 * 18),
        ):
            spent = method(target, setting, 0).evaluations.rows / 2
            assert given - 2 * iteration < spent <= given

    check(setting, 2400)
    refuted(lambda: check(replace(setting, n_states=2 * setting.n_states), 2400))


def test_variety_is_that_of_one_run_and_not_of_all():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 3, generator=g, dtype=torch.float64)
    equal, run = torch.full((4000,), 1 / 4000).double(), torch.arange(4000) // 4

    def check(x, weights):
        assert trained.variety(x, weights, run) == pytest.approx(3, rel=0.1)  # unbiased for runs of four draws

    check(x, equal)
    refuted(lambda: check(x[4 * run], equal))  # copies of one draw in every run, though all runs together vary as much
    heavy = equal.where(torch.arange(4000) % 4 == 0, 1e-9)
    refuted(lambda: check(x, heavy))


@pytest.mark.parametrize(("what", "n_seen"), [("inpainting", 98), ("deblurring", 49)])
def test_an_observation_is_as_likely_as_its_noise(painter, what, n_seen):
    target, hidden, operator, seen = restoring.observation(painter, 5, what)
    assert operator.shape == (n_seen, 196)
    residual = (seen - operator @ hidden.flatten()) / restoring.NOISE
    assert abs(float(residual.square().mean()) - 1) < 5 * math.sqrt(2 / n_seen)

    def check(x):
        expected = -0.5 * float(residual.square().sum())
        assert float(target.rewards[0].function(x[None])) == pytest.approx(expected, rel=1e-4)

    check(hidden)
    refuted(lambda: check(hidden + 0.1))
    assert restoring.as_image(seen, what, 14).shape == (1, 14, 14)
    with pytest.raises(cd.InputError, match="has no test images"):
        restoring.observation(replace(painter, examples=None), 5, what)


def test_draws_are_compared_with_the_hidden_image(painter, tmp_path, monkeypatch):
    """Independent draws whose mean is the hidden image, and whose variance is known."""
    _, hidden, operator, seen = restoring.observation(painter, 2, "inpainting")
    x = hidden + 0.2 * torch.randn(4000, 1, 14, 14, generator=torch.Generator().manual_seed(0))
    scale = float(hidden.var(correction=0))

    def check(x):
        out = Independent(x, cd.samplers.Plain(painter.conditional(2), cd.ladder.karras(3, 0.1, 5.0)).evaluate.counts)
        found = restoring.judged(out, hidden, operator, seen)
        assert found["variance"] == pytest.approx(0.04 / scale, rel=0.02)
        assert found["error"] < 1e-3
        expected = float((operator @ hidden.flatten() - seen).square().mean() + 0.04) / restoring.NOISE**2
        assert found["misfit"] == pytest.approx(expected, rel=0.02)

    check(x)
    refuted(lambda: check(x + 0.1))
    results = Results(tmp_path)
    monkeypatch.setattr(restoring, "CLASSES", {"mnist": (2,)})
    names = list(restoring.restore(painter, results, n_steps=4, n_walks=8, n=2))
    assert len(names) == 2
    assert list(restoring.restore(painter, results, n_steps=4, n_walks=8, n=2)) == []
    assert set(results[names[0]]["found"]) == set(restoring.METHODS)


@pytest.mark.slow
def test_the_page_is_filled_from_results(painter, tmp_path, monkeypatch):
    """Tables, grids of chains, curves and both storeys, from a tiny study; places without results stay as they are."""
    results = Results(tmp_path / "results")
    assert len(list(trained.wish_curves(painter, results, SIZES))) == 12
    list(trained.guidance_table(painter, results, SIZES))
    list(restoring.restore(painter, results, n_steps=4, n_walks=8))
    trained.refine(painter, results, SIZES)
    monkeypatch.setattr(tables, "FIGURES", tmp_path / "figures")
    page = tmp_path / "README.md"
    page.write_text((Path(tables.__file__).parent / "README.md").read_text("utf-8"), "utf-8")
    before = page.read_text("utf-8")
    tables.fill_page(results, page)
    text = page.read_text("utf-8")
    for wish in (*wishes.WISHES["mnist"], wishes.IMPOSSIBLE["mnist"]):
        assert text.count(f"| {wish.text} |") == 2
    made = {path.name for path in (tmp_path / "figures").iterdir()}
    assert made == {f"{what}-mnist-14.png" for what in ("guided", "wishes", "along", "refinement", "restored")}
    assert all(f"(figures/{name})" in text for name in made)
    known = before[before.index("<!-- table: guidance shares") : before.index("## 2 With")]
    assert known in text


class Corners(torch.nn.Module):
    """Nine pixels of an enlarged image in the place of Inception's features."""

    def forward(self, x):
        assert x.shape[1:] == (3, 299, 299)
        assert -1 <= float(x.min()) <= float(x.max()) < 1
        return x[:, 1, ::100, ::100].flatten(1)


def test_fid_is_small_for_the_same_images_and_large_for_others(folder, tmp_path):
    test = data.load_images("mnist", folder / "data", 14)[1]
    own, other = (trained.pixels(test.of_class(c)[:5]) for c in (8, 0))
    results = Results(tmp_path)
    names = ["guidance mnist class 8 seed 0", "guidance mnist class 8 seed 1"]
    for name in names:
        results.save(name, {"class": 8, "samples": 5}, same=own, other=other)
    first, second = (results[name] for name in inception.compare(Corners(), test, results, names, 5, 5))
    assert first["fid"]["same"] == pytest.approx(0, abs=1e-6)
    assert first["fid"]["other"] > 10 * first["fid"]["other real images"] > 0
    assert first["fid"]["same"] == second["fid"]["same"]
    assert first["fid"]["other real images"] != second["fid"]["other real images"]
    halves = problems.frechet(*sides(own[:2]), *sides(own[2:]))
    assert first["halves"]["same"] == pytest.approx(halves)
    table = tables.inception_table(results, "mnist")
    assert f"| other | {first['fid']['other']:.1f} ± 0.0 |" in table
    with pytest.raises(cd.InputError, match=r"16 \+ 5 test images of a class are needed, got 20"):
        next(inception.compare(Corners(), test, results, names, 5, 16))


def sides(images):
    seen = inception.features(Corners(), torch.tensor(images))
    return seen, torch.full((len(seen),), 1 / len(seen)).double()


def test_networks_have_the_stated_sizes():
    for size, n in ((14, 308_260), (28, 308_260)):
        network = model.build(model.NETWORKS[size])
        assert sum(p.numel() for p in network.parameters()) == n
        x = torch.zeros(2, 1, size, size)
        assert network(x, torch.ones(2), torch.zeros(2, dtype=torch.long)).shape == x.shape


def test_a_run_from_a_file_reports_images_first(folder, painter, tmp_path):
    config = tomllib.loads((Path(painting.__file__).parent / "seven.toml").read_text())
    config["options"]["weights"] = str(folder / "mnist-14.safetensors")
    config["sampler"]["n_chains"], config["stop"]["iterations"] = 2, 2
    with cd.Run.start(tmp_path / "seven", config) as run:
        run.run()
        wanted = run.sampler.target.rewards[0].function
        x = torch.rand(3, 1, 14, 14)
        torch.testing.assert_close(wanted(x), wishes.WISHES["mnist"][0].reward(painter)(x))
        decode = run.history.experiment.decode
    page = cd.write_report(read_run(tmp_path / "seven"), tmp_path / "report.html", decode=decode)
    text = page.read_text()
    assert text.index("4 draws as images") < text.index("network rows")
    with pytest.raises(cd.InputError, match="label must be between 0 and 9, got 10"):
        painting.painting(weights=str(folder / "mnist-14.safetensors"), label=10)
