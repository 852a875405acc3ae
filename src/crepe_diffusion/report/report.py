"""A run on one page, the verdict first; several runs side by side at equal network evaluations.

All numbers come from `Evidence`, which the verdict is based on too.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crepe_diffusion.diagnostics import Estimate
from crepe_diffusion.diagnostics.data import RunData
from crepe_diffusion.diagnostics.evidence import Evidence, ScalarSummary
from crepe_diffusion.diagnostics.verdict import judge, percent
from crepe_diffusion.errors import InputError
from crepe_diffusion.report import figures, page
from crepe_diffusion.report.page import Html, number, section, table

__all__ = ["write_comparison", "write_report"]

# More scalars than this are in the table, but have no figure of their own: a page is to be read.
MAX_SCALAR_FIGURES = 6
MAX_TEXTS = 12
MAX_IMAGES = 24
"""Draws that are decoded for a page."""


Decode = Callable[[Tensor], Tensor | Sequence[str]]
"""From draws (n, *event) to what a person looks at: n images (n, channels, height, width), or n texts."""


def write_report(data: RunData, path: str | Path, *, decode: Decode | None = None) -> Path:
    """One HTML file that needs nothing else; its figures are also beside it in `figures/`.

    `decode` makes images or texts of the draws that are shown, such as `model.decode` of a checkpoint.
    """
    path = _page_path(path, "report.html")
    e = Evidence(data)
    shown: list[figures.Picture | None] = []

    def draw(*pictures: figures.Picture | None) -> Html:
        shown.extend(pictures)
        return page.figures(pictures)

    shown_draws = _judged_or_all(e)
    texts = decode is not None and not np.issubdtype(shown_draws.dtype, np.floating)
    images = decode is not None and not texts and shown_draws.size > 0
    picture = figures.samples(_decoded_images(shown_draws, decode) if decode and images else shown_draws, images)
    samples = _samples(e, draw(picture), decode if texts else None)
    # Images are looked at first, whatever the numbers say; of other events the numbers come first.
    first, last = (samples, Html("")) if picture is not None and picture.photo else (Html(""), samples)
    subtitle = f"{data.status}; {len(data.x):,} draws of {data.x.shape[1]} chains, {len(data.levels)} levels"
    text = page.document(
        data.name,
        subtitle,
        page.box(judge(e), data.status == "running"),
        first,
        _notes(data),
        _glance(e),
        _communication(e, draw) if e.exchanges else Html(""),
        _scalars(e, draw(*_scalar_figures(e))),
        _free_energy(e, draw(figures.log_z(e))) if e.exchanges else Html(""),
        _cost(e),
        last,
        _history(data),
        _configuration(data),
    )
    return page.publish(path, text, shown)


def _page_path(path: str | Path, name: str) -> Path:
    path = Path(path)
    if path.is_dir():
        path = path / name
    page.check_page(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _pm(estimate: Estimate) -> str:
    if math.isnan(estimate.value):
        return "-"
    return f"{number(estimate.value)} +- {number(estimate.error, 2)}"


def _notes(data: RunData) -> Html:
    return section("Notes", *data.notes) if data.notes else Html("")


def _least_ess(e: Evidence) -> float:
    return min((s.ess for s in e.scalars if s.can_be_judged), default=math.nan)


def _glance(e: Evidence) -> Html:
    shown: list[tuple[str, object, str]] = [
        ("draws", f"{e.n_draws:,} x {e.data.x.shape[1]}", "draws judged x chains"),
        ("ess", number(round(_least_ess(e), 0)), "effective draws of the slowest scalar"),
        ("rows", f"{e.data.counts.rows:,}", "network rows"),
    ]
    if e.exchanges:
        shown[2:2] = [
            ("restarts", number(e.diagnostics.restarts()), "fresh arrivals at the data end"),
            ("acceptance", percent(float(e.acceptance.mean())), "mean acceptance"),
            ("lambda", f"{e.barrier.value:.4g}", f"barrier Lambda, +- {e.barrier.error:.2g}"),
            ("log_z", f"{e.stated_log_z.value:.4g}", f"log Z (BAR), +- {e.stated_log_z.error:.2g}"),
        ]
    return page.cards(shown)


def _communication(e: Evidence, draw: Callable[..., Html]) -> Html:
    d = e.diagnostics
    pictures = draw(figures.acceptance(e), figures.barrier(e), figures.index_process(e), figures.round_trips(e))
    slowest = int(e.acceptance.argmin())
    rows: list[tuple[object, object]] = [
        ("levels, sub-steps between them", f"{d.n_levels}, {e.data.substeps}"),
        ("suggested levels (2 Lambda + 1)", e.suggested_levels),
        ("barrier Lambda", str(e.barrier)),
        ("least acceptance", f"{percent(e.acceptance[slowest])} between levels {slowest} and {slowest + 1}"),
        ("round trips counted", d.round_trips()),
        ("round trips predicted", f"{e.predicted_round_trips:.1f}"),
        ("fresh arrivals at the data end", d.restarts()),
        ("iterations recorded", f"{d.n_iterations:,}"),
    ]
    if len(e.explored):
        inner = e.explored[:-1] if len(e.explored) > 1 else e.explored
        rows.append(("explorer's acceptance (least, median)", f"{percent(inner.min())}, {percent(np.median(inner))}"))
    what = (
        "Replicas travel between the noise end and the data end by swapping levels. Pairs that accept about half of"
        " their swaps or more are fine; one that accepts almost none cuts the ladder in two."
    )
    return section("Communication", what, table(("", ""), rows, "communication"), pictures)


def _scalar_figures(e: Evidence) -> list[figures.Picture]:
    summaries: dict[str, ScalarSummary] = {s.name: s for s in e.scalars}
    chosen = list(e.data.scalars.items())[:MAX_SCALAR_FIGURES]
    return [figures.scalar(e, i, name, np.asarray(v), summaries.get(name)) for i, (name, v) in enumerate(chosen)]


def _scalars(e: Evidence, pictures: Html) -> Html:
    rows = [
        (
            s.name,
            f"{s.stated.value:.4g}",
            "constant" if s.is_constant else f"{s.stated.error:.2g}",
            f"{s.ess:.0f}" if s.can_be_judged else "-",
            f"{min(s.rhat, 99.0):.3f}" if s.can_be_judged else "-",
            f"{s.drift:+.1f}" if s.can_be_judged else "-",
        )
        for s in e.scalars
    ]
    burnt = (
        f"{len(e.data.x) - e.n_draws:,} of {len(e.data.x):,} draws per chain are not judged: burn-in, and targets no"
        " longer in force (grey in the traces; a dashed line marks a change of target). Drift is the mean of the second"
        " half of the others minus that of the first, in standard errors: beyond 3, burn-in is not over."
    )
    return section(
        "Scalars and burn-in", burnt, table(("scalar", "mean", "+-", "ESS", "R-hat", "drift"), rows, "scalar"), pictures
    )


def _free_energy(e: Evidence, pictures: Html) -> Html:
    names = {"down": "paths down", "up": "paths up", "bar": "both (Bennett)"}
    rows = [(names[k], f"{z.value:.4g}", f"{z.error:.2g}") for k, z in e.log_z.items()]
    what = "log Z_0 / Z_M, which is log E[exp(r)] for a tilted model. Paths down and paths up should agree."
    start = e.data.started_from
    if start is not None:
        z, size = start.log_z["bar"], start.discretisation["bar"]
        rows.append((f"starting pass of {len(start.x)} particles", f"{z.value:.4g}", f"{z.error:.2g}"))
        rows.append(("due to the size of the steps, about", f"{size.value:.2g}", f"{size.error:.2g}"))
    if e.log_z_stride > 1:
        what += f" From every {e.log_z_stride}-th recorded meeting."
    return section("Free energy", what, table(("", "log Z", "+-"), rows, "log_z"), pictures)


def _cost(e: Evidence) -> Html:
    counts, least = e.data.counts, _least_ess(e)
    seconds = e.data.trace.get("seconds")
    rows: list[tuple[object, object]] = [
        ("network rows", f"{counts.rows:,}"),
        ("network calls", f"{counts.calls:,}"),
        ("rows with a gradient", f"{counts.gradient_rows:,}"),
        ("rewards", f"{counts.rewards:,}"),
        ("rows that were not finite", f"{sum(counts.nonfinite.values()):,}"),
        ("seconds", number(float(seconds[-1]), 3) if seconds is not None and len(seconds) else "-"),
        ("network rows per effective draw", f"{counts.rows / least:,.0f}" if least > 0 else "-"),
    ]
    return section("Cost", "Of the whole run, burn-in included.", table(("", ""), rows, "cost"))


def _judged_or_all(e: Evidence) -> np.ndarray:
    return e.data.x[e.judged] if e.n_draws else e.data.x


def _decoded_images(x: np.ndarray, decode: Decode) -> np.ndarray:
    """Some of the draws as images, (n, 1, channels, height, width)."""
    flat = x.reshape(-1, *x.shape[2:])
    chosen = flat[np.linspace(0, len(flat) - 1, min(len(flat), MAX_IMAGES)).round().astype(int)]
    with torch.no_grad():  # a few at once, since decoders are large
        parts = [decode(z) for z in torch.from_numpy(np.ascontiguousarray(chosen)).split(4)]
    if not all(isinstance(z, Tensor) and z.ndim == 4 for z in parts) or sum(map(len, parts)) != len(chosen):
        raise InputError(f"decode must return one image per draw, (n, channels, height, width), got {type(parts[0])!r}")
    return torch.cat([z.to(torch.float32).cpu() for z in parts if isinstance(z, Tensor)]).numpy()[:, None]


def _texts(tokens: np.ndarray, decode: Decode | None) -> list[str]:
    """Tokens (n, length) as texts, or as their ids."""
    if decode is None or not len(tokens):
        return [" ".join(map(str, row)) for row in tokens.reshape(len(tokens), -1).tolist()]
    texts = decode(torch.from_numpy(np.ascontiguousarray(tokens)))
    if isinstance(texts, (str, Tensor)) or len(texts) != len(tokens) or not all(isinstance(t, str) for t in texts):
        raise InputError(f"decode must return one text per draw of tokens, got {texts!r} for {len(tokens)} draws")
    return list(texts)


def _samples(e: Evidence, pictures: Html, decode: Decode | None) -> Html:
    x = _judged_or_all(e)
    if pictures or not x.size or np.issubdtype(x.dtype, np.floating):
        return section("Samples", pictures or ("None of them is finite." if x.size else "None yet."))
    flat = x.reshape(-1, math.prod(x.shape[2:]))
    common = [(tokens, n) for tokens, n in Counter(map(tuple, flat.tolist())).most_common(MAX_TEXTS) if n > 1]
    frequent = _texts(np.array([tokens for tokens, _ in common]).reshape(-1, *x.shape[2:]), decode)
    rows = [(text, percent(n / len(flat))) for text, (_, n) in zip(frequent, common, strict=True)]
    last = [(text, "") for text in _texts(flat[-MAX_TEXTS:].reshape(-1, *x.shape[2:]), decode)]
    return section(
        "Samples",
        table(("most frequent", "share"), rows, "frequent") if rows else "",
        table(("last draws", ""), last, "last"),
    )


def _history(data: RunData) -> Html:
    n = np.bincount(np.asarray(data.target, dtype=int), minlength=len(data.targets))
    rows = [
        (i, f"{t['from_iteration']:,}", f"{n[i]:,}", "; ".join(map(_reward, t["rewards"])) or "no reward")
        for i, t in enumerate(data.targets)
    ]
    return section("Targets", table(("", "from iteration", "draws", "reward terms"), rows, "target"))


def _reward(term: Any) -> str:
    if not isinstance(term, dict):
        return str(term)
    options = ", ".join(f"{k} = {v}" for k, v in term.items() if k != "name")
    return f"{term.get('name', '?')} ({options})" if options else str(term.get("name", "?"))


def _configuration(data: RunData) -> Html:
    blocks = [("configuration", data.config)]
    if data.path is not None:
        with suppress(OSError, ValueError):
            blocks.append(("versions and seed", json.loads((data.path / "run.json").read_text())))
    parts = [
        Html(f"<details><summary>{name}</summary><pre>{page.html(_pretty(value))}</pre></details>")
        for name, value in blocks
        if value
    ]
    return section("Configuration", *parts) if parts else Html("")


def _pretty(value: object) -> str:
    return json.dumps(value, indent=2, default=str)


# -- comparison ----------------------------------------------------------------------------------------------


def write_comparison(runs: Sequence[RunData], path: str | Path) -> Path:
    """Several runs on one page, at as many network rows as the shortest of them has."""
    if not runs:
        raise InputError("nothing to compare: give at least one run")
    path = _page_path(path, "comparison.html")
    names = _distinct([r.name for r in runs])
    budget = min(r.counts.rows for r in runs)
    cut = [Evidence(_within(r, budget)) for r in runs]
    whole = [Evidence(r) for r in runs]
    per_million = [1e6 * _least_ess(e) / max(1.0, _rows(e.data)[-1]) if e.n_draws else math.nan for e in cut]
    verdicts = [judge(e) for e in whole]
    pictures: list[figures.Picture | None] = [figures.efficiency(list(zip(names, per_million, strict=True)))]
    exchanged = [(name, e.acceptance) for name, e in zip(names, whole, strict=True) if e.exchanges]
    if exchanged:
        pictures.append(figures.acceptances(exchanged))
    scalars = list(dict.fromkeys(s.name for e in whole for s in e.scalars))
    for i, scalar in enumerate(scalars[:MAX_SCALAR_FIGURES]):
        curves = [(n, *_running(e, scalar)) for n, e in zip(names, whole, strict=True)]
        pictures.append(figures.running_means(i, scalar, curves, budget))

    summary = [
        (
            name,
            Html(f'<b class="{v.level}">{page.SIGNS[v.level]}</b> {page.html(v.level)}'),
            f"{e.data.counts.rows:,}",
            f"{_least_ess(c):.0f}" if not math.isnan(_least_ess(c)) else "-",
            number(p, 3),
            percent(float(e.acceptance.mean())) if e.exchanges else "-",
            len(e.data.levels),
            str(e.barrier) if e.exchanges else "-",
            str(e.stated_log_z) if e.exchanges else "-",
            e.diagnostics.restarts() if e.exchanges else "-",
        )
        for name, v, e, c, p in zip(names, verdicts, whole, cut, per_million, strict=True)
    ]
    header = ("run", "verdict", "rows", "ESS", "ESS / 10^6 rows", "acceptance", "levels", "Lambda", "log Z", "arrivals")
    means = [(scalar, *(_mean_of(e, scalar) for e in cut)) for scalar in scalars]
    reasons = [
        (n, "; ".join(v.reasons) or "nothing", "; ".join(v.advice)) for n, v in zip(names, verdicts, strict=True)
    ]
    text = page.document(
        "Comparison",
        f"{len(runs)} runs; ESS and means at {budget:,} network rows, which all of them have",
        section("Summary", table(header, summary, "run")),
        section(f"Means at {budget:,} network rows", table(("scalar", *names), means, "mean")),
        section("Figures", page.figures(pictures)),
        section("Verdicts", table(("run", "why", "what to do"), reasons, "verdict")),
    )
    return page.publish(path, text, pictures)


def _rows(data: RunData) -> np.ndarray:
    """Network rows spent by the time of each draw; in proportion to iterations where no trace was kept."""
    if len(data.trace.get("rows", ())):
        return np.interp(data.iteration, data.trace["iteration"], data.trace["rows"])
    return data.counts.rows * data.iteration / max(1, data.iteration.max(initial=1))


def _within(data: RunData, budget: float) -> RunData:
    """The same run as it was when it had spent so many rows."""
    n = max(1, int((_rows(data) <= budget).sum()))
    front: dict[str, Any] = {k: getattr(data, k)[:n] for k in ("x", "iteration", "target")}
    front |= {k: {name: v[:n] for name, v in getattr(data, k).items()} for k in ("columns", "scalars")}
    return replace(data, **front, targets=data.targets[: int(front["target"].max(initial=0)) + 1])


def _running(e: Evidence, scalar: str) -> tuple[np.ndarray, np.ndarray]:
    values = next((s.values.mean(1) for s in e.scalars if s.name == scalar), np.zeros(0))
    return _rows(e.data)[e.judged][: len(values)], values.cumsum() / np.arange(1, len(values) + 1)


def _mean_of(e: Evidence, scalar: str) -> str:
    return next((_pm(s.stated) for s in e.scalars if s.name == scalar), "-")


def _distinct(names: Sequence[str]) -> list[str]:
    """Runs of equal names get a number."""
    n, seen = Counter(names), Counter[str]()
    for_each = []
    for name in names:
        seen[name] += 1
        for_each.append(name if n[name] == 1 else f"{name} ({seen[name]})")
    return for_each
