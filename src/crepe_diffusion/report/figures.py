"""The figures of a report: evidence in, PNG out.

They are narrow, so that a phone shows them with letters of readable size, and drawn on white with the colours of Okabe
and Ito, which differ for colour-blind eyes too; what matters also differs in shape or line style.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from crepe_diffusion.diagnostics.data import RunData
from crepe_diffusion.diagnostics.evidence import Evidence, ScalarSummary
from crepe_diffusion.diagnostics.verdict import STUCK_ACCEPTANCE

__all__ = [
    "Picture",
    "acceptance",
    "acceptances",
    "barrier",
    "efficiency",
    "index_process",
    "log_z",
    "round_trips",
    "running_means",
    "samples",
    "scalar",
]

BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
CYCLE = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)
DASHES = ("-", "--", "-.", ":")
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.formatter.limits": (-4, 5),
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.1,
}
MAX_POINTS, MAX_ITERATIONS = 1200, 400


@dataclass(frozen=True)
class Picture:
    """A PNG with its file name and a sentence for those who cannot see it; a photo keeps its colours in the dark."""

    name: str
    png: bytes
    alt: str
    photo: bool = False


@contextmanager
def _axes(rows: int = 1, columns: int = 1, height: float = 2.7, **options: Any) -> Iterator[tuple[Figure, list[Axes]]]:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.6, height), layout="constrained")
        yield figure, list(np.atleast_1d(figure.subplots(rows, columns, **options)).flat)


def _picture(figure: Figure, name: str, alt: str, photo: bool = False) -> Picture:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, facecolor="white")
    return Picture(name, buffer.getvalue(), alt, photo)


def _line(i: int) -> dict[str, Any]:
    return {"color": CYCLE[i % len(CYCLE)], "linestyle": DASHES[i // len(CYCLE) % len(DASHES)]}


# -- communication -------------------------------------------------------------------------------------------


def acceptance(e: Evidence) -> Picture:
    """Acceptance of each pair with its interval; stuck pairs are crosses."""
    with _axes() as (figure, (ax,)):
        m, rate = np.arange(len(e.acceptance)), e.acceptance
        low, high = rate - e.interval[:, 0], e.interval[:, 1] - rate
        stuck = e.interval[:, 1] < STUCK_ACCEPTANCE
        bars = np.clip([low, high], 0, None)
        for chosen, marker, colour, label in ((~stuck, "o", BLUE, None), (stuck, "X", RED, "stuck")):
            if chosen.any():
                ax.errorbar(m[chosen], rate[chosen], bars[:, chosen], fmt=marker, color=colour, ms=4, lw=1, label=label)
        ax.axhline(0.5, color="0.4", lw=0.8, ls="--", label="1/2: 2 Lambda + 1 levels")
        ax.set(ylim=(-0.03, 1.03), xlabel="pair of levels m and m + 1 (0: data end)", ylabel="acceptance")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.legend(loc="outside lower center", ncols=2)
        return _picture(figure, "acceptance", f"acceptance by pair, from {rate.min():.2f} to {rate.max():.2f}")


def barrier(e: Evidence) -> Picture:
    """Rejection of each pair, and their sum from the data end."""
    with _axes(2, height=3.3, sharex=True) as (figure, (top, bottom)):
        m, rejection = np.arange(len(e.acceptance)), 1 - e.acceptance
        top.bar(m + 0.5, rejection, width=0.9, color=SKY)
        top.set(ylabel="rejection", title="local barrier: rejection between m and m + 1", ylim=(0, None))
        bottom.plot(np.arange(len(m) + 1), np.concatenate([[0], rejection.cumsum()]), "o-", color=BLUE, ms=2.5)
        total, error = e.barrier.value, e.barrier.error
        bottom.errorbar([len(m)], [total], [error if math.isfinite(error) else 0], color=RED, fmt="D", ms=4, capsize=3)
        bottom.set(
            xlabel="level m",
            ylabel="sum",
            title=f"barrier: Lambda = {e.barrier}".replace("+-", "\u00b1"),
            ylim=(0, None),
        )
        bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
        return _picture(figure, "barrier", f"rejection by pair and its sum, Lambda = {e.barrier}")


def index_process(e: Evidence) -> Picture | None:
    """The levels of the first chain's replicas over the last iterations; three of them stand out."""
    level = e.data.trace.get("level")
    if level is None or not len(level) or level.ndim != 3:
        return None
    level, iteration = level[-MAX_ITERATIONS:, 0], e.data.trace["iteration"][-MAX_ITERATIONS:]
    with _axes() as (figure, (ax,)):
        ax.plot(iteration, level, color="0.6", lw=0.4, alpha=0.6)
        for i, replica in enumerate(np.unique(np.linspace(0, level.shape[1] - 1, 3).astype(int))):
            ax.plot(iteration, level[:, replica], label=f"replica {replica}", **_line(i))
        ax.set(xlabel="iteration", ylabel="level (0: data end)", title="index process, chain 0")
        ax.set_ylim(-0.5, level.shape[1] - 0.5)
        figure.legend(loc="outside lower center", ncols=3)
        return _picture(figure, "index_process", "the level of each replica of chain 0 over the last iterations")


def round_trips(e: Evidence) -> Picture:
    """Round trips and fresh arrivals of each chain, against the prediction."""
    d = e.diagnostics
    with _axes(height=2.3) as (figure, (ax,)):
        chains = np.arange(d.n_chains)
        ax.bar(chains - 0.2, d.trips.n_trips.sum(1).numpy(), 0.38, color=BLUE, label="round trips")
        ax.bar(
            chains + 0.2,
            d.trips.n_restarts.sum(1).numpy(),
            0.38,
            color=SKY,
            hatch="//",
            ec="white",
            label="fresh arrivals",
        )
        ax.axhline(e.predicted_round_trips / d.n_chains, color=RED, ls="--", label="predicted")
        ax.set(xlabel="chain", ylabel="number", ylim=(0, None if d.restarts() or e.predicted_round_trips > 0.5 else 1))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.legend(loc="outside lower center", ncols=3)
        return _picture(
            figure, "round_trips", f"{d.round_trips()} round trips, {e.predicted_round_trips:.0f} predicted"
        )


def log_z(e: Evidence) -> Picture | None:
    """The three estimates of log Z, which should agree."""
    if not all(math.isfinite(z.value) for z in e.log_z.values()):
        return None
    with _axes(height=1.5) as (figure, (ax,)):
        for i, (label, z) in enumerate(zip(("paths down", "paths up", "both (BAR)"), e.log_z.values(), strict=True)):
            ax.errorbar([z.value], [-i], xerr=[1.96 * z.error], fmt="osD"[i], color=CYCLE[i], capsize=3, label=label)
        ax.set(yticks=[0, -1, -2], yticklabels=["paths down", "paths up", "both (BAR)"], ylim=(-2.6, 0.6))
        ax.set_xlabel("log Z, with 95 % intervals")
        return _picture(figure, "log_z", "log Z by paths down, paths up and both")


# -- scalars -------------------------------------------------------------------------------------------------


def scalar(e: Evidence, number: int, name: str, values: np.ndarray, summary: ScalarSummary | None) -> Picture:
    """The trace of all draws with burn-in and changes of the target, and the running mean of the judged ones."""
    data = e.data
    thin = slice(None, None, math.ceil(len(values) / MAX_POINTS) or 1)
    with _axes(2, height=3.5, sharex=True) as (figure, (top, bottom)):
        shown = np.where(np.isfinite(values), values, np.nan)
        dots = "," if len(values) > 50 else "."
        for c in range(min(values.shape[1], len(CYCLE))):
            top.plot(data.iteration[thin], shown[thin, c], color=CYCLE[c], lw=0.6, alpha=0.8, marker=dots)
        more = f", first {len(CYCLE)} of {values.shape[1]} chains" if values.shape[1] > len(CYCLE) else ""
        top.set_title(f"{_short(name)}: trace{more}")
        _mark_history(top, data)
        if summary is not None and len(summary.values):
            iteration, n = data.iteration[e.judged], np.arange(1, len(summary.values) + 1)
            running = np.nancumsum(summary.values.clip(-1e300, 1e300), 0) / n[:, None]
            for c in range(running.shape[1]):
                bottom.plot(iteration[thin], running[thin, c], alpha=0.8, **_line(c))
            bottom.plot(iteration[thin], running.mean(1)[thin], color="black", lw=1.8)
            if math.isfinite(summary.stated.error):
                low, high = (summary.stated.value + z * summary.stated.error for z in (-1.96, 1.96))
                bottom.axhspan(low, high, color="0.5", alpha=0.25, lw=0)
            late = running[len(running) // 20 :]
            _zoom(bottom, late)
        bottom.set(xlabel="iteration", title="running means (thick: all chains; band: 95 % of the mean)")
        return _picture(figure, f"scalar_{number}_{_slug(name)}", f"trace and running mean of {name}")


def _zoom(ax: Axes, late: np.ndarray) -> None:
    """Leaves the wild first steps of a running mean out of sight."""
    low, high = float(late.min()), float(late.max())
    if math.isfinite(high - low) and high > low:
        ax.set_ylim(low - 0.2 * (high - low), high + 0.2 * (high - low))


def _mark_history(ax: Axes, data: RunData) -> None:
    if data.n_burnt and len(data.iteration):
        last = data.iteration[min(data.n_burnt, len(data.iteration)) - 1]
        ax.axvspan(data.iteration[0], last, color="0.5", alpha=0.2, lw=0)
    for change in data.targets[1:]:
        ax.axvline(change["from_iteration"], color=RED, ls="--", lw=1)


# -- samples -------------------------------------------------------------------------------------------------


def samples(x: np.ndarray, decoded: bool = False) -> Picture | None:
    """Draws (draws, chains, *event) as their shape suggests; tokens are text and have no figure.

    Images that were decoded have values from 0 to 1 and are drawn as they are; others are stretched to the full range.
    """
    event = x.shape[2:]
    flat = x.reshape(-1, *event)
    if not len(flat) or not np.issubdtype(x.dtype, np.floating):
        return None
    flat = flat[np.isfinite(flat.reshape(len(flat), -1)).all(1)]
    if not len(flat):
        return None
    size = math.prod(event)
    if len(event) >= 2 and event[-1] == 2 and event[-2] >= 3:
        return _trajectories(flat)
    if len(event) in (2, 3) and min(event[-2:]) >= 4 and (len(event) == 2 or event[0] in (1, 3)):
        return _images(flat, decoded)
    if len(event) == 3 and min(event[-2:]) >= 8 and event[0] > 3:
        return _images(flat[:, :3], note=f": channels 0 to 2 of {event[0]}, not decoded (write_report(decode=...))")
    if size <= 2:
        return _histogram(flat.reshape(len(flat), size))
    return _coordinates(flat.reshape(len(flat), size))


def _spread(n: int, most: int) -> np.ndarray:
    return np.unique(np.linspace(0, n - 1, min(n, most)).astype(int))


def _histogram(x: np.ndarray) -> Picture:
    with _axes(height=2.7 if x.shape[1] == 1 else 3.6) as (figure, (ax,)):
        if x.shape[1] == 1:
            ax.hist(x[:, 0], bins=min(80, max(10, int(math.sqrt(len(x))))), density=True, color=BLUE)
            ax.set(xlabel="x", ylabel="density")
        else:
            _scatter(ax, x)
        return _picture(figure, "samples", f"{len(x)} draws")


def _scatter(ax: Axes, x: np.ndarray) -> None:
    shown = x[_spread(len(x), 4000)]
    ax.scatter(shown[:, 0], shown[:, 1], s=4, alpha=max(0.15, min(1.0, 300 / len(shown))), color=BLUE, lw=0)
    ax.set(xlabel="x[0]", ylabel="x[1]")
    ax.set_aspect("equal", adjustable="datalim")


def _coordinates(x: np.ndarray) -> Picture:
    with _axes(2, height=4.6, height_ratios=(3, 2)) as (figure, (top, bottom)):
        _scatter(top, x)
        shown = x[:, _spread(x.shape[1], 128)]
        bottom.errorbar(_spread(x.shape[1], 128), shown.mean(0), shown.std(0), fmt="o", color=BLUE, ms=2.5, lw=0.8)
        bottom.set(xlabel="coordinate", ylabel="mean, sd")
        return _picture(figure, "samples", f"{len(x)} draws: two coordinates, and the mean and sd of each")


def _trajectories(x: np.ndarray) -> Picture:
    with _axes(height=3.6) as (figure, (ax,)):
        for i, row in enumerate(_spread(len(x), 12)):
            for segment in x[row].reshape(-1, *x.shape[-2:]):
                ax.plot(segment[:, 0], segment[:, 1], color=CYCLE[i % len(CYCLE)], lw=0.9, alpha=0.7)
            ax.plot(*x[row].reshape(-1, 2)[0], "o", color=CYCLE[i % len(CYCLE)], ms=4)
        ax.set(xlabel="x[..., 0]", ylabel="x[..., 1]", title="trajectories; dots: where they begin")
        ax.set_aspect("equal", adjustable="datalim")
        return _picture(figure, "samples", "trajectories of a dozen draws")


def _images(x: np.ndarray, decoded: bool = False, note: str = ", spread over the run") -> Picture:
    shown = x[_spread(len(x), 24)]
    low, high = (0.0, 1.0) if decoded else np.quantile(shown, [0.01, 0.99])
    shown = np.clip((shown - low) / max(high - low, 1e-12), 0, 1)
    columns = min(6, len(shown))
    with _axes(math.ceil(len(shown) / columns), columns, height=0.78 * math.ceil(len(shown) / columns)) as (
        figure,
        axes,
    ):
        for ax in axes:
            ax.axis("off")
        for ax, image in zip(axes, shown, strict=False):
            image = image if image.ndim == 2 else image[0] if image.shape[0] == 1 else np.moveaxis(image, 0, -1)
            ax.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        return _picture(figure, "samples", f"{len(shown)} draws as images{note}", photo=True)


# -- comparison ----------------------------------------------------------------------------------------------


def running_means(
    number: int, name: str, curves: Sequence[tuple[str, np.ndarray, np.ndarray]], budget: float
) -> Picture:
    """Running means of a scalar against network rows, one `(run, rows, mean)` each; the line is the common budget."""
    with _axes() as (figure, (ax,)):
        for i, (run, rows, mean) in enumerate(curves):
            thin = slice(None, None, math.ceil(len(rows) / MAX_POINTS) or 1)
            ax.plot(rows[thin], mean[thin], label=_short(run), **_line(i))
        late = [mean[len(mean) // 20 :] for _, _, mean in curves if len(mean)]
        if late:
            _zoom(ax, np.concatenate(late))
        ax.axvline(budget, color="0.4", ls=":", lw=1)
        ax.set(xlabel="network rows", title=f"running mean of {_short(name)}")
        figure.legend(loc="outside lower center", ncols=2)
        return _picture(figure, f"running_{number}_{_slug(name)}", f"running means of {name} against network rows")


def acceptances(runs: Sequence[tuple[str, np.ndarray]]) -> Picture:
    """Acceptance along the ladder; ladders of different lengths share the axis."""
    with _axes() as (figure, (ax,)):
        for i, (run, rate) in enumerate(runs):
            ax.plot(
                (np.arange(len(rate)) + 0.5) / max(1, len(rate)),
                rate,
                marker="os^Dv"[i % 5],
                ms=3,
                label=_short(run),
                **_line(i),
            )
        ax.set(xlabel="position on the ladder (0: data end, 1: noise end)", ylabel="acceptance", ylim=(-0.03, 1.03))
        figure.legend(loc="outside lower center", ncols=2)
        return _picture(figure, "acceptances", "acceptance along the ladder of each run")


def efficiency(runs: Sequence[tuple[str, float]]) -> Picture:
    """The least effective sample size per million network rows."""
    with _axes(height=0.9 + 0.32 * len(runs)) as (figure, (ax,)):
        value = [v if math.isfinite(v) else 0.0 for _, v in runs]
        ax.barh(range(len(runs)), value, color=[CYCLE[i % len(CYCLE)] for i in range(len(runs))])
        ax.set_yticks(range(len(runs)), [_short(run, 24) for run, _ in runs])
        ax.invert_yaxis()
        ax.set_xlabel("effective draws per million network rows")
        return _picture(figure, "efficiency", "effective draws per million network rows of each run")


def _short(text: str, n: int = 32) -> str:
    """Fits a legend; a dollar sign would start mathematics."""
    return (text if len(text) <= n else text[: n - 3] + "...").replace("$", r"\$")


def _slug(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else "_" for c in text)[:40]
