"""The tables and figures of results.md, from what the other commands kept; its prose is written by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from studies.molecules.convergence import BASINS
from studies.molecules.peptides import PEPTIDES
from studies.molecules.report import Measured, measured, population_table, table
from studies.shared.pages import fill, markdown, merged, places
from studies.shared.results import Results
from studies.shared.training import load_weights

__all__ = ["checks", "exchanges", "fill_page", "speeds", "weights"]

FIGURES = ("ramachandran", "tica", "energy")
VARIANTS = ("relaxed", "long", "springs")
"""Other runs of a peptide, in `runs/PEPTIDE-VARIANT`."""
CHECKS = ("ratio", "anisotropy", "torsions", "hands", "descents", "relaxation", "steps")
"""What the commands of these names, and `relax`, keep beside draws."""


def fill_page(page: Path, runs: Path, data: Path, shipped: Path, only: tuple[str, ...] = ()) -> list[str]:
    """Fill in what `runs/PEPTIDE`, its variants, `data/PEPTIDE` and the weights hold; the names of the filled tables.

    A table for which nothing is kept stays as it is, and so does a figure; so do the rows of others in a table of
    all peptides. Of runs, only tables that the page has a place for are filled. `only` these tables, and no figure,
    where others are kept from longer runs.
    """
    found: dict[str, str] = {}
    for name, peptide in PEPTIDES.items():
        for variant in ("", *VARIANTS):
            folder, label = runs / f"{name}-{variant}".rstrip("-"), f"{name} {variant}".rstrip()
            if methods := measured(folder):
                found |= {label: table(methods, peptide), f"{label} populations": population_table(methods)}
            kept = {kind: Results(folder).get(kind) for kind in CHECKS}
            found |= {f"{label} {kind}": record["table"] for kind, record in kept.items() if record}
    tables = {name: text for name, text in found.items() if name in (only or places(page))}
    shared = {"exchange": exchanges({name: measured(runs / name) for name in PEPTIDES}), "speed": speeds(data)}
    shared |= {"dynamics": checks(data), "weights": weights(shipped, data)}
    tables |= {name: merged(page, name, text, list(PEPTIDES)) for name, text in shared.items() if text}
    tables = {name: text for name, text in tables.items() if not only or name in only}
    fill(page, tables)
    for name in () if only else PEPTIDES:
        for figure in FIGURES:
            if (runs / name / f"{figure}.png").exists():
                (page.parent / "figures").mkdir(exist_ok=True)
                shutil.copyfile(runs / name / f"{figure}.png", page.parent / "figures" / f"{name}-{figure}.png")
    return list(tables)


def exchanges(methods: dict[str, list[Measured]]) -> str | None:
    """How often swaps were accepted and how many round trips there were, means over seeds."""
    rows = []
    for peptide, found in methods.items():
        for m in found:
            runs = [a for a in m.about if "acceptance" in a]
            if runs:
                accepted = np.mean([np.mean(a["acceptance"]) for a in runs])  # not finite: a pair that never met
                moved = [f"{accepted:.2f}", f"{np.mean([a['round_trips'] for a in runs]):,.0f}"]
                moved = moved if np.isfinite(accepted) else ["too few iterations", "too few iterations"]
                rows.append([peptide, m.method, len(runs[0]["acceptance"]) + 1, *moved])
    return markdown(["peptide", "method", "levels", "mean acceptance", "round trips"], rows) if rows else None


def speeds(data: Path) -> str | None:
    """How fast dynamics were, walker by walker, as `md` last measured it."""
    rows = []
    for name in PEPTIDES:
        for folder in sorted((data / name).glob("walker-*")):
            s = Results(folder).get("speed")
            if s:
                rate, hours = f"{s['ns_per_hour']:,.0f}", f"{s['hours']:.1f}"
                rows.append([name, folder.name, s["engine"], s["n_rungs"], rate, hours])
    return markdown(["peptide", "walker", "engine", "rungs", "ns/h in all rungs", "hours"], rows) if rows else None


def checks(data: Path) -> str | None:
    """Shares of basins and whether they agree, as `check` found them."""
    head = ["peptide", "K", "walkers", "trajectories", "ns", *(f"{basin.name} (%)" for basin in BASINS)]
    head += ["z of halves", "z of walkers", "changes of sign", "verdict of `check`"]
    rows = []
    for name in PEPTIDES:
        for c in Results(data / name).get("check") or []:
            inside = [c["basins"][basin.name] for basin in BASINS]
            cells = [name, f"{c['temperature']:g}", c["n_walkers"], c["n_trajectories"], f"{c['ns']:,.1f}"]
            cells += [f"{100 * basin['share']:.2f} +- {100 * basin['error']:.2f}" for basin in inside]
            cells += [_largest([basin[key] for basin in inside]) for key in ("z_halves", "z_walkers")]
            rows.append([*cells, f"{c['crossings']:,}", c["verdict"]])
    return markdown(head, rows) if rows else None


def _largest(z: list[float | None]) -> str:
    known = [abs(value) for value in z if value is not None]
    return f"{max(known):.1f}" if known else "-"


def weights(shipped: Path, data: Path) -> str | None:
    """How the shipped weights were trained, and those that `join` or `train` left for peptides without shipped ones."""
    rows = []
    for name in PEPTIDES:
        file = f"{name}.safetensors"
        local = [path for path in (data / name / file, data / name / "training-all" / file) if path.exists()]
        if (shipped / file).exists():
            rows += _trained(name, load_weights(shipped / file)[1])
        elif local:
            rows += _trained(f"{name} (not shipped)", load_weights(local[0])[1])
    head = ["weights", "network", "frames", "steps x batch", "minutes of one core"]
    return markdown([*head, "held-out loss (1: the best linear denoiser)"], rows) if rows else None


def _trained(name: str, about: dict[str, str]) -> list[list[Any]]:
    """One row for a whole model, or one for each of the two that `join` put together."""
    network = json.loads(about["network"])
    parts = [("", name, network)]
    if network["kind"] == "split":
        sides = (("low", "below"), ("high", "above"))
        parts = [(f"{p} ", f"{name}, noise {side} {network['split']:g} nm", network[p]) for p, side in sides]
    rows = []
    for prefix, title, sizes in parts:
        settings, last = (json.loads(about[f"{prefix}{key}"]) for key in ("settings", "last"))
        steps, minutes = f"{last['step']:,}", about.get(f"{prefix}minutes", "-")
        if f"{prefix}before" in about:  # started from other weights
            before = json.loads(about[f"{prefix}before"])
            steps, minutes = f"{before['step']:,} + {steps}", f"{before['minutes']} + {minutes}"
        size = f"{sizes['kind']}, {sizes['n_layers']} x {sizes['width']}"
        n_frames = about.get(f"{prefix}n_frames") or about.get("n_frames")
        frames = f"{int(n_frames):,}" if n_frames else "different"
        trained_on = f"{frames} at {float(about['temperature']):g} K"
        rows.append([title, size, trained_on, f"{steps} x {settings['batch']}", minutes, f"{last['validation']:.4f}"])
    return rows
