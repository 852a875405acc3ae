"""A report says what the diagnostics say, needs nothing but itself, and survives runs that have hardly begun."""

from __future__ import annotations

import base64
import io
import re
import time
from dataclasses import replace
from html.parser import HTMLParser

import matplotlib.image
import numpy as np
import pytest
import torch

import crepe_diffusion as cd
from checks import refuted
from crepe_diffusion import ess, ladder, rhat
from crepe_diffusion.diagnostics import Diagnostics
from crepe_diffusion.diagnostics.data import RunData
from crepe_diffusion.diagnostics.estimates import mean_of, tours_of
from crepe_diffusion.diagnostics.evidence import Evidence
from crepe_diffusion.diagnostics.verdict import percent, verdict
from crepe_diffusion.errors import InputError
from crepe_diffusion.models import GaussianMixture, TokenTable
from crepe_diffusion.report.figures import samples
from crepe_diffusion.report.report import write_comparison, write_report

PLANE = GaussianMixture(weights=[0.3, 0.7], means=[[-3.0, 0.0], [2.0, 1.0]], stds=[0.5, 0.6])
SCALARS = {"first": lambda x: x[:, 0], "right": lambda x: (x[:, 0] > 0).double()}


class Page(HTMLParser):
    """Text by id, text in order, and every attribute."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str | None] = []
        self.text: dict[str, str] = {}
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, k, v or "") for k, v in attrs]
        if tag not in ("img", "meta"):
            self.open.append(dict(attrs).get("id"))

    def handle_endtag(self, tag):
        self.open.pop()

    def handle_data(self, data):
        for key in filter(None, self.open):
            self.text[key] = self.text.get(key, "") + data

    def table(self, name: str) -> list[list[str]]:
        rows: dict[int, dict[int, str]] = {}
        for key, value in self.text.items():
            if found := re.fullmatch(rf"{name}-(\d+)-(\d+)", key):
                rows.setdefault(int(found[1]), {})[int(found[2])] = value
        return [[row[j] for j in sorted(row)] for _, row in sorted(rows.items())]


def traced(target, levels, n: int, n_chains: int = 3, scalars=None, name: str = "chain", **options) -> RunData:
    """A chain in memory with the trace that a run would have kept."""
    chain = cd.ReplicaExchange(target, levels, n_chains=n_chains, seed=7, fit_samples=64, **options)
    infos, step = [], chain.step
    rows: list[int] = []

    def spy():
        infos.append(step())
        rows.append(infos[-1].rows)
        return infos[-1]

    chain.step = spy
    data = RunData.of(chain.sample(n), chain, scalars, name)
    trace = {
        "iteration": np.array([i.iteration for i in infos]),
        "seconds": np.linspace(0.1, 7.5, n),
        "rows": np.array(rows),
        "level": np.stack([i.level.numpy() for i in infos]),
    }
    return replace(data, trace=trace, config={"sampler": {"seed": 7}})


@pytest.fixture(scope="module")
def data() -> RunData:
    return replace(
        traced(PLANE**1.5, ladder.karras(9, 0.02, 20.0), 150, scalars=SCALARS, explorer=cd.Bounce()), n_burnt=30
    )


@pytest.fixture(scope="module")
def report(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    assert write_report(data, path) == path
    return path


@pytest.fixture(scope="module")
def page(report) -> Page:
    return Page(report.read_text())


def test_communication_is_what_the_diagnostics_say(data, page):
    d, said = data.diagnostics, {row[0]: row[1] for row in page.table("communication")}
    assert page.text["lambda"] == f"{d.barrier().value:.4g}"
    assert said["barrier Lambda"] == str(d.barrier()).replace("+-", "\u00b1")
    assert said["round trips counted"] == str(d.round_trips())
    assert said["round trips predicted"] == f"{d.predicted_round_trips():.1f}"
    assert said["fresh arrivals at the data end"] == page.text["restarts"] == str(d.restarts())
    assert said["suggested levels (2 Lambda + 1)"] == str(d.suggested_levels())
    assert said["levels, sub-steps between them"] == "9, 1"
    m = int(d.acceptance().argmin())
    assert said["least acceptance"] == f"{percent(float(d.acceptance()[m]))} between levels {m} and {m + 1}"
    assert page.text["acceptance"] == percent(float(d.acceptance().mean()))


def tours_from(data: RunData, first: int, last: int | None = None) -> torch.Tensor:
    """The tours of some of the draws."""
    found = tours_of({name: v[first:last] for name, v in data.columns.items()})
    assert found is not None
    return found


def test_scalars_are_those_of_the_judged_draws(data, page):
    assert [row[0] for row in page.table("scalar")] == list(SCALARS)
    for row, values in zip(page.table("scalar"), data.scalars.values(), strict=True):
        judged, tours = torch.as_tensor(values[30:]), tours_from(data, 30)
        m = mean_of(judged, tours)
        assert row[1:5] == [f"{m.value:.4g}", f"{m.error:.2g}", f"{ess(judged, tours):.0f}", f"{rhat(judged):.3f}"]
        assert row[1] != f"{values.mean():.4g}", "burn-in would show"


def test_free_energy_and_cost(data, page):
    for method, row in zip(("down", "up", "bar"), page.table("log_z"), strict=True):
        z = data.diagnostics.log_z(method)
        assert row[1:] == [f"{z.value:.4g}", f"{z.error:.2g}"]
    said = {row[0]: row[1] for row in page.table("cost")}
    least = min(ess(torch.as_tensor(v[30:]), tours_from(data, 30)) for v in data.scalars.values())
    assert said["network rows"] == f"{data.counts.rows:,}"
    assert said["network calls"] == f"{data.counts.calls:,}"
    assert said["seconds"] == "7.50"
    assert said["network rows per effective draw"] == f"{data.counts.rows / least:,.0f}"


def test_numbers_follow_the_run(data, page, tmp_path):
    """The same page for another chain has other numbers: none of them is painted on."""
    other = traced(PLANE**1.5, ladder.karras(6, 0.02, 20.0), 100, scalars=SCALARS)
    second = Page(write_report(other, tmp_path / "r.html").read_text())
    for key in ("lambda", "acceptance", "restarts", "rows", "log_z", "ess", "scalar-0-1", "log_z-0-1", "cost-1-1"):
        assert second.text[key] != page.text[key], key


def test_the_verdict_comes_first_in_words(data, tmp_path):
    short = Page(write_report(replace(data, n_burnt=140, status="running"), tmp_path / "r.html").read_text())
    said = verdict(replace(data, n_burnt=140))
    assert ("section", "data-level", said.level) in short.attributes
    assert said.level == "do not trust"
    assert next(iter(short.text)) == "verdict"
    assert "Do not trust" in short.text["verdict"]
    assert "still running" in short.text["verdict"]
    for sentence in (*said.reasons, *said.advice):
        assert sentence.replace("+-", "\u00b1") in short.text["verdict"]


def test_a_page_needs_nothing_else(report, page):
    text = report.read_text()
    assert not re.search(r"https?:|url\(|@import|<script|<link", text)
    links = [v for _, k, v in page.attributes if k in ("src", "href", "srcset")]
    assert len(links) >= 7
    assert all(v.startswith("data:image/png;base64,") for v in links)
    assert ("meta", "name", "viewport") in page.attributes
    assert "prefers-color-scheme: dark" in text
    assert "max-width: 700px" in text


def test_figures_are_files_too(report, page):
    files = sorted((report.parent / "figures").iterdir())
    names = {f.stem for f in files}
    assert {"acceptance", "barrier", "index_process", "round_trips", "log_z", "samples", "scalar_0_first"} <= names
    inline = {base64.b64decode(v.split(",", 1)[1]) for _, k, v in page.attributes if k == "src"}
    assert inline == {f.read_bytes() for f in files}
    for file in files:
        assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        pixels = matplotlib.image.imread(file)
        assert pixels.shape[0] > 100
        assert pixels.shape[1] > 400
        assert pixels[..., :3].std() > 0.01, f"{file.name} is blank"
    assert all(v for _, k, v in page.attributes if k == "alt"), "every figure has words"


def test_names_are_text_and_never_markup(data, tmp_path):
    evil = '<script>alert("1")</script> & $x^2'
    spoilt = replace(
        data,
        name=evil,
        scalars={evil: data.scalars["first"]},
        config={evil: evil},
        notes=[evil],
        targets=[{"from_iteration": 1, "rewards": [{"name": evil, "scale": 2.0}]}],
    )
    text = write_report(spoilt, tmp_path / "report.html").read_text()
    assert "<script" not in text
    assert text.count("&lt;script&gt;") >= 6
    assert Page(text).table("target")[0][3] == f"{evil} (scale = 2.0)"
    assert Page(text).table("scalar")[0][0] == evil
    both = write_comparison([spoilt, replace(spoilt, name="b")], tmp_path / "c.html").read_text()
    assert "<script" not in both


def cut(data: RunData, n: int) -> RunData:
    front = {k: getattr(data, k)[:n] for k in ("x", "iteration", "target")}
    parts = {k: {name: v[:n] for name, v in getattr(data, k).items()} for k in ("trace", "scalars", "columns")}
    return replace(data, **front, **parts)


def nothing_recorded(data: RunData) -> Diagnostics:
    return Diagnostics(torch.arange(len(data.levels)).expand(data.x.shape[1], -1).clone())


def with_minus_infinity(data: RunData) -> RunData:
    return replace(data, scalars={"reward": np.where(data.scalars["first"] > 0, -np.inf, 0.0)})


PARTIAL = {
    "no scalars": lambda d: replace(d, scalars={}),
    "no trace": lambda d: replace(d, trace={}),
    "no configuration": lambda d: replace(d, config={}),
    "running": lambda d: replace(d, status="running"),
    "one draw": lambda d: cut(d, 1),
    "no draw": lambda d: cut(d, 0),
    "nothing recorded": lambda d: replace(cut(d, 1), diagnostics=nothing_recorded(d)),
    "all burnt": lambda d: replace(d, n_burnt=len(d.x)),
    "not finite": with_minus_infinity,
    "constant": lambda d: replace(d, scalars={"one": np.ones_like(d.scalars["first"])}),
    "target just changed": lambda d: replace(d, targets=[*d.targets, {"from_iteration": 151, "rewards": []}]),
    "x not finite": lambda d: replace(d, x=np.full_like(d.x, np.nan)),
}


@pytest.mark.parametrize("part", PARTIAL)
def test_runs_with_missing_parts(data, part, tmp_path):
    partial = PARTIAL[part](data)
    page = Page(write_report(partial, tmp_path).read_text())
    assert (tmp_path / "report.html").exists()
    assert page.text["verdict"]
    assert ("section", "data-level", verdict(partial).level) in page.attributes
    if part in ("no scalars", "no trace", "no draw", "nothing recorded", "all burnt"):
        write_comparison([partial, data], tmp_path)


def test_one_chain_and_two_levels(tmp_path):
    small = traced(PLANE, ladder.karras(2, 0.5, 20.0), 30, 1)
    assert Page(write_report(small, tmp_path / "r.html").read_text()).text["draws"] == "30 x 1"


EVENTS = {
    "line": (1,),
    "plane": (2,),
    "vector": (5,),
    "trajectory": (12, 2),
    "segments": (3, 12, 2),
    "grey image": (8, 8),
    "image": (3, 8, 8),
    "latents": (4, 8, 8),
    "odd": (2, 3, 4),
}


@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)
def test_samples_of_any_shape_have_a_figure(event):
    picture = samples(np.random.default_rng(0).normal(size=(40, 3, *event)).astype(np.float32))
    assert matplotlib.image.imread(io.BytesIO(picture.png))[..., :3].std() > 0.01


def test_images_are_shown_first_and_other_samples_last(tmp_path):
    def text(event):
        model = cd.models.GaussianMixture([1.0], torch.zeros(1, *event), [1.0])
        chain = cd.ReplicaExchange(model, cd.ladder.karras(3, 0.1, 5.0), n_chains=2, seed=0)
        return write_report(RunData.of(chain.sample(8)), tmp_path / "report.html").read_text("utf-8")

    pixels, plane = text((1, 4, 4)), text((2,))
    assert pixels.index("<h2>Samples") < pixels.index("<h2>Cost")
    assert plane.index("<h2>Samples") > plane.index("<h2>Cost")


def test_latents_are_shown_as_images_and_decoded_ones_as_they_are():
    x = np.random.default_rng(0).normal(size=(30, 2, 4, 8, 8)).astype(np.float32)
    assert "channels 0 to 2 of 4, not decoded" in samples(x).alt
    assert samples(x).photo
    flat = np.full((2, 1, 3, 8, 8), 0.5, dtype=np.float32)
    flat[1] += 0.002
    gray, stretched = (matplotlib.image.imread(io.BytesIO(samples(flat, d).png))[..., 0] for d in (True, False))
    inside = gray[gray.shape[0] // 2]
    assert inside[(inside > 0.4) & (inside < 0.6)].size > 0.3 * inside.size  # two equal squares of middle gray
    assert stretched[gray.shape[0] // 2].min() < 0.1


def test_draws_are_decoded_to_texts_and_images(tmp_path):
    model = cd.models.from_masked_lm(
        lambda ids: torch.zeros(*ids.shape, 4),
        mask_id=1,
        prompt=[0, 1],
        forbidden=[0],
        vocab_size=4,
        decode=lambda batch: [" ".join(["one", "mask", "cat", "dog"][v] for v in ids) for ids in batch],
    )
    out = cd.ReplicaExchange(model, cd.ladder.linear(3), n_chains=2).sample(20)
    assert set(model.decode(out.x)) == {"one cat", "one dog"}
    data = RunData.of(out)

    def named(**options):
        text = write_report(data, tmp_path / "report.html", **options).read_text("utf-8")
        assert "one cat" in text
        assert "one dog" in text

    named(decode=model.decode)
    refuted(named)
    for bad in (lambda x: "one cat", lambda x: ["one cat"], lambda x: x):
        with pytest.raises(cd.InputError, match="one text per draw"):
            write_report(data, tmp_path / "report.html", decode=bad)
    flat = cd.models.GaussianMixture([1.0], [[0.0] * 4], [1.0])
    data = RunData.of(cd.ReplicaExchange(flat, cd.ladder.karras(3, 0.1, 5.0), n_chains=2, fit_samples=16).sample(4))
    shapes = []

    def decode(z):
        shapes.append(tuple(z.shape))
        return z.reshape(-1, 1, 2, 2).repeat(1, 3, 4, 4).double()

    text = write_report(data, tmp_path / "report.html", decode=decode).read_text("utf-8")
    assert shapes == [(4, 4), (4, 4)]  # a few at once
    assert text.index("<h2>Samples") < text.index("<h2>Communication")  # images come first


def test_tokens_are_text(tmp_path):
    table = torch.ones(2, 2)
    table[1, 0] = 97
    tokens = traced(TokenTable(table), ladder.linear(4), 60)
    page = Page(write_report(tokens, tmp_path / "report.html").read_text())
    share = (tokens.x == [1, 0]).all(-1).mean()
    assert page.table("frequent")[0] == ["1 0", percent(float(share))]
    assert page.table("last")[-1][0] == " ".join(map(str, tokens.x[-1, -1]))
    assert not (tmp_path / "figures" / "samples.png").exists()


def test_history_of_targets(data, tmp_path):
    targets = [data.targets[0], {"from_iteration": 101, "rewards": [{"name": "wall", "scale": 3.0}, {"name": "goal"}]}]
    refined = replace(data, targets=targets, target=np.repeat([0, 1], [100, 50]))
    rows = Page(write_report(refined, tmp_path / "report.html").read_text()).table("target")
    assert [r[1:] for r in rows] == [["1", "100", "no reward"], ["101", "50", "wall (scale = 3.0); goal"]]


def test_comparison_is_at_equal_network_rows(data, tmp_path):
    longer = traced(PLANE**1.5, ladder.karras(15, 0.02, 20.0), 400, scalars=SCALARS, name="longer")
    path = write_comparison([data, longer, replace(longer, name=data.name)], tmp_path / "comparison.html")
    page = Page(path.read_text())
    budget = min(data.counts.rows, longer.counts.rows)
    n = int((longer.trace["rows"] <= budget).sum())
    assert 100 < n < 400
    rows = page.table("run")
    assert [r[0] for r in rows] == ["chain (1)", "longer", "chain (2)"]
    least = min(ess(torch.as_tensor(v[:n]), tours_from(longer, 0, n)) for v in longer.scalars.values())
    assert rows[1][3] == f"{least:.0f}"
    assert float(rows[1][4].replace(",", "")) == pytest.approx(1e6 * least / longer.trace["rows"][n - 1], rel=0.01)
    assert rows[1][7] == str(longer.diagnostics.barrier()).replace("+-", "\u00b1")
    assert rows[1][8] == str(longer.diagnostics.log_z()).replace("+-", "\u00b1")
    assert rows[1][1].endswith(verdict(longer).level)
    mean = longer.scalars["first"][:n].mean()
    assert float(page.table("mean")[0][2].split()[0]) == pytest.approx(mean, abs=1e-3 * abs(mean) + 1e-3)
    assert not re.search(r"https?:|url\(|@import|<script|<link", path.read_text())
    assert {"efficiency.png", "acceptances.png", "running_0_first.png"} <= {
        f.name for f in (tmp_path / "figures").iterdir()
    }


def test_nothing_to_compare_is_refused(tmp_path):
    with pytest.raises(InputError, match="nothing to compare"):
        write_comparison([], tmp_path)


@pytest.mark.slow
def test_a_long_run_is_reported_in_seconds(data, tmp_path):
    """Full buffers of 51 levels and 4 chains, 10,000 draws of 1,000 numbers: processor time, as machines are shared."""
    rng, level = np.random.default_rng(0), torch.arange(51).expand(4, -1).clone()
    d = Diagnostics(level)
    d._down = torch.as_tensor(rng.normal(size=(4096, 4, 50)), dtype=torch.float32)
    d._up = torch.as_tensor(rng.normal(-0.5, size=(4096, 4, 50)), dtype=torch.float32)
    d.n_iterations = 8192
    n = 10_000
    long = replace(
        data,
        x=rng.normal(size=(n, 4, 1000)).astype(np.float32),
        iteration=np.arange(1, n + 1),
        target=np.zeros(n, dtype=int),
        scalars={f"s{i}": rng.normal(size=(n, 4)) for i in range(6)},
        trace={"iteration": np.arange(n), "rows": np.arange(n), "level": np.zeros((n, 4, 51), dtype=int)},
        levels=np.geomspace(0.01, 10, 51),
        diagnostics=d,
    )
    assert Evidence(long).log_z_stride > 1
    begun = time.process_time()
    write_report(long, tmp_path / "report.html")
    assert time.process_time() - begun < 15
