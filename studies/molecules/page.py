"""docs/molecules.md and its figures, from what the commands wrote."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from studies.molecules.convergence import BASINS
from studies.molecules.dynamics import BLOCK, INTERVAL
from studies.molecules.metrics import METRICS
from studies.molecules.peptides import PEPTIDES, Peptide
from studies.molecules.report import HALVES, PAPER, Result, results, score, table
from studies.molecules.tempering import UNTEMPERED
from studies.shared.training import load_weights

__all__ = ["write_page"]

JUDGED = METRICS[:4]
"""The paper's metrics: distances, of which less is better."""
FIGURES = {"ramachandran": "Ramachandran plane", "tica": "slow coordinates", "energy": "energies"}
RIVALS = {
    "CREPE, own": ("RNE, own",),
    "CREPE, paper": ("RNE, paper", "FKC, annealed score", "FKC, annealed noise"),
}
"""Replica exchange beside the particle methods that share its ladder and kernels."""
ERRORS = 2
"""Differences of less than so many standard errors are not told apart."""
UNEQUAL = 0.1  # whole batches and the Fisher fit take a few per cent more or less than the budget

Score = tuple[float, float]


def write_page(runs: Path, data: Path, weights: Path, docs: Path) -> Path:
    """The page and its figures, from `runs/PEPTIDE` and `data/PEPTIDE`, and the files in `weights`."""
    (docs / "figures").mkdir(parents=True, exist_ok=True)
    checks = {name: _read(data / name / "check.json") or [] for name in PEPTIDES}
    parts = [
        HEAD,
        *(
            _results(
                p, runs / name, checks[name], docs, [] if _shipped(weights, name).exists() else [_start(data, name)]
            )
            for name, p in PEPTIDES.items()
        ),
        RUN,
        DATA.format(block=f"{BLOCK * INTERVAL:g}", frame=BLOCK, rungs=_rungs()),
        *_speeds(data),
        _checks(checks),
        MODEL,
        _weights(weights, data),
        METRICS_TEXT,
        ANNEALED,
    ]
    path = docs / "molecules.md"
    path.write_text("\n".join(parts))
    return path


HEAD = """# Molecules: sample cold from a model trained hot

Written by `python -m studies.molecules page` from what the commands below left on disk; every result
comes from there. `make molecules` runs all of them but `train` and `join` for the dipeptide, from the weights that ship.

The paper's first experiment. A diffusion model learns alanine peptides at 800 K; raised to the power
`beta = T_hot / T_cold` it should be the same peptide at 300, 500 or 600 K. Methods called `paper` use the paper's ladder,
kernels and proposal, and so do the Feynman-Kac correctors (FKC). Those called `own` use the Fisher variance, the balanced
proposal, Metropolised local moves, a ladder of equal ratios of noise with few levels and many steps between them, moved
until all pairs reject equally, and end in the model's prediction; the noise in which `paper` methods end shows in
their bonds to hydrogen, and so in the distances. Rows are network evaluations of one seed; the paper spends 10 million.
The paper's numbers are for its own model, data and choices of metrics.
"""

RUN = """## Run it

    pip install -c constraints.txt -e '.[molecules]'
    M="python -m studies.molecules"
    $M md --walker 0        # one process per walker; goes on where it was left
    $M md --walker 1
    $M check                # populations of basins: between halves and between walkers
    D=data/molecules/dipeptide
    for noise in low high; do    # each goes on where it was left, as all of these do
        $M train --noise $noise --walker 0 --ps 70000 --unfolded
        $M train --noise $noise --walker 0 --ps 70000 --steps 11000 --rate 5e-4 \\
            --start $D/training-$noise/dipeptide.safetensors --out $D/folded-$noise
    done
    $M join $D/folded-low/dipeptide.safetensors $D/folded-high/dipeptide.safetensors --out dipeptide.safetensors
    $M temper --weights dipeptide.safetensors    # or without, for those that ship
    $M report               # runs/molecules/dipeptide: table.md, figures, METHOD.xtc with topology.pdb
    $M page                 # this page

`--peptide tetrapeptide` and `--peptide hexapeptide` do the same for the others (`train --network pairs-large`). `$M tiny`
runs everything after dynamics in small from what ships, as the tests do; its weights (`train --network pairs-tiny --steps
4000 --walker 0 --ps 1500 --unfolded`) exercise the pipeline and are no model of a peptide.
"""

DATA = """## Data

ACE-ALA_n-NME with AMBER ff96 and the OBC2 implicit solvent (`amber96.xml` + `amber96_obc.xml`, for dynamics and for
energies), bonds to hydrogen fixed, Langevin-middle dynamics with 1/ps and 2 fs, a frame every ps. Sixteen copies run
at once, one in each place of a vector (`lanes.c`, compiled on first use), with the system and the parameters of OpenMM;
`md --engine openmm` is OpenMM itself. Temperatures run together, and exchange replicas every {block} ps:
{rungs}.
Files are sorted by temperature; every {frame} successive frames are continuous, and the time-lagged analysis stays within
them. So does the count of changes of sign of phi, which is a lower bound: what happens from one piece to the next is not
counted. Trajectories of one walker share its replicas; errors come from their average as it goes in time, and walkers are
independent.

OpenMM places the hydrogens of a methyl group at random when it builds a peptide. Frames are renamed to one sense of
rotation when they are read: the energy is the same, distances between molecules are not.
"""

MODEL = """## Model

The score of a law that is invariant under rigid motions is a sum of gradients of invariants. One dense network, with a
linear path beside it, maps all distances and their squares (each in its own standard deviation, that of data and noise
together) and the signed volumes at all stereocentres (alpha carbons and methyl groups) to the strengths of these forces.
It needs no permutation symmetry, since the atoms of one molecule have names. Low and high noise may have a network each,
trained side by side and joined.

Which hand a sample will have, and in which sense the hydrogens of a methyl group are named, is decided under so much
noise that no network can tell: one that was trained on the hand of the dynamics draws the other as often, and badly, for
it has never seen it. So the network is folded: it is shown one hand and one naming, and its answer is turned back. The
energy depends on neither, and the report turns samples to the hand of the dynamics: about half of them, as the column
`turned` says. Samples with alpha carbons of both hands cannot be turned, and are counted as `mixed hands`.

The paper's EGNN is there too (`train --network egnn`). It sees distances only; hydrogens are renamed at random in its
training instead.
"""

METRICS_TEXT = """## Metrics

As in the paper: total variation of energies and of interatomic distances (200 bins), W2 after superposition, and the
maximum mean discrepancy in the plane of the two slowest torsional coordinates; by default of 5,000 frames against as
many samples of each seed. Where the paper does not say, we chose: the kernel is one Gaussian as wide as the median
distance in the truth, and the root of the squared discrepancy is reported. Samples outside the histogram of the truth
count as wrong instead of being left out. Added are the error of the free-energy difference between the signs of phi
(dF), bond lengths, and the same metrics between two halves of the dynamics, below which nothing can be expected to come.
W2 between finite samples is an exception: it favours laws that are too narrow, whose samples lie nearer to the middle of
the truth than another sample of the truth does. Read it beside the spread of bonds and the energies.
"""

ANNEALED = """## Annealed noise needs many particles

For Gaussian data of variance `T = sigma^2 + scale^2`, the weighted variance of Feynman-Kac correctors with annealed
noise obeys `d(error)/dT = (3 - beta) error / T`, so the error relative to the law grows as `T^(2 - beta)` while T falls.
Above `beta = 2` the sampling error of the noise end is magnified on the way down: fifty times for `beta = 2.5` from 10 nm
to data of 0.2 nm. With the annealed score instead it shrinks in proportion to T.
"""


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def _shipped(weights: Path, name: str) -> Path:
    return weights / f"{name}.safetensors"


def _local(data: Path, name: str) -> Path:
    """Where `train` leaves a whole model."""
    return data / name / "training-all" / f"{name}.safetensors"


def _start(data: Path, name: str) -> str:
    """That the results of this peptide are no more than a start, and how little its model has learned."""
    said = f"**No more than a start.** No weights are shipped for the {name}."
    if _local(data, name).exists():
        about = load_weights(_local(data, name))[1]
        settings, last = json.loads(about["settings"]), json.loads(about["last"])
        said += (
            f" Its model was trained for {last['step']:,} steps of {settings['batch']} frames, in {about['minutes']} min of"
            " one core that had other work."
        )
    return said + " The same commands run from end to end; the numbers judge so short a training, not the methods."


def _results(peptide: Peptide, folder: Path, check: list[dict[str, Any]], docs: Path, caveats: list[str]) -> str:
    lines = [f"## {peptide.name.capitalize()}: {peptide.hot:g} to {peptide.cold:g} K", ""]
    if not (folder / "results.json").exists():
        return "\n".join([*lines, f"There are no results for the {peptide.name}.", ""])
    rows = results(folder)
    lines += [table(rows, peptide), *(f"- {said}" for said in [*caveats, *_reading(peptide, rows, check)]), ""]
    pictures = []
    for name, title in FIGURES.items():
        if (folder / f"{name}.png").exists():
            shutil.copyfile(folder / f"{name}.png", docs / "figures" / f"molecules-{peptide.name}-{name}.png")
            pictures.append(f"![{peptide.name}: {title}](figures/molecules-{peptide.name}-{name}.png)")
    return "\n".join([*lines, *pictures, *([""] if pictures else [])])


def _reading(peptide: Peptide, rows: list[Result], check: list[dict[str, Any]]) -> list[str]:
    """What the table says, in sentences."""
    scores = {row.name: {m: score(row, m) for m in JUDGED} for row in rows}
    tempered = {name: s for name, s in scores.items() if name not in (HALVES, UNTEMPERED)}
    out = [*_truth(peptide, check), _seeds(rows)]
    if tempered:
        best = {m: _least(tempered, m) for m in JUDGED}
        out.append("**Best of ours.** " + "; ".join(_best(tempered, m, best[m]) for m in JUDGED) + ".")
    floor = "; ".join(f"{m} {_number(scores[HALVES][m])}" for m in JUDGED)
    out.append(f"**Floor.** Two halves of the dynamics at {peptide.cold:g} K differ by {floor}.")
    if tempered:
        out[-1] += f" The best of ours is {_multiples({m: tempered[best[m]][m] for m in JUDGED}, scores[HALVES])} that."
    ours = [name for name in RIVALS if name in tempered]
    out.append(_model(peptide, scores, ours))
    paper: dict[str, Score] = dict(zip(JUDGED, ((v, np.nan) for v in PAPER[peptide.name]["CREPE"]), strict=True))
    for name in ours:
        reached = sum(round(scores[name][m][0], 3) <= paper[m][0] for m in JUDGED)
        out.append(
            f"**`{name}` and the paper's CREPE.** Our mean reaches it on {reached} of {len(JUDGED)} metrics:"
            f" {_against(scores[name], paper)}."
        )
    spent = {row.name: float(np.mean([a["rows"] for a in row.about])) for row in rows if row.about}
    for name in ours:
        found = [
            f"Beside `{rival}` at {_at_rows(spent[name], spent[rival])}: {_sides(scores[name], scores[rival])}."
            for rival in RIVALS[name]
            if rival in tempered
        ]
        if found:
            out.append(" ".join([f"**`{name}` and SMC.**", *found]))
    return out + _exchanges(rows)


def _exchanges(rows: list[Result]) -> list[str]:
    """How well replicas moved: the reason for some of the differences."""
    said = []
    for row in rows:
        runs = [a for a in row.about if "acceptance" in a]
        if runs:
            accepted = np.mean([np.mean(a["acceptance"]) for a in runs])
            trips = np.mean([a["round_trips"] for a in runs])
            levels = len(runs[0]["acceptance"]) + 1
            told = f"{accepted:.2f}, {trips:.0f}" if np.isfinite(accepted) else "too few iterations to tell"
            said.append(f"`{row.name}` ({levels} levels) {told}")
    return (
        [f"**Exchange.** Mean acceptance of swaps, and round trips of a seed's chains: {'; '.join(said)}."]
        if said
        else []
    )


def _truth(peptide: Peptide, check: list[dict[str, Any]]) -> list[str]:
    """A warning if the dynamics that samples are measured against are not to be trusted."""
    verdicts = {c["temperature"]: c["verdict"] for c in check}
    doubts = [
        f"{t:g} K {'are not converged' if t in verdicts else 'were not checked'}"
        for t in (peptide.cold, peptide.hot)
        if verdicts.get(t) != "converged"
    ]
    return [f"**Beware.** The dynamics at {' and those at '.join(doubts)} (see Data)."] if doubts else []


def _seeds(rows: list[Result]) -> str:
    counts = sorted({len(row.metrics) for row in rows if row.name != HALVES})
    if counts == [1]:
        return "One seed each: there are no standard errors, and differences are taken at face value."
    number = " to ".join(str(n) for n in sorted({counts[0], counts[-1]})) if counts else "no"
    return (
        f"Means and standard errors over {number} seeds; differences of less than {ERRORS} standard errors are not told"
        " apart below."
    )


def _number(s: Score) -> str:
    return f"{s[0]:.3f}" if np.isfinite(s[0]) else "not finite"


def _compare(a: Score, b: Score) -> int:
    """-1 if a is less than b, 1 if it is more, 0 if they are not told apart; by the digits that the tables show."""
    (x, y), error = (round(s[0], 3) for s in (a, b)), float(np.hypot(*np.nan_to_num([a[1], b[1]])))
    return 0 if x == y or abs(x - y) < ERRORS * error else (-1 if x < y else 1)


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _against(ours: dict[str, Score], theirs: dict[str, Score]) -> str:
    """On which metrics we are better, worse or neither, with their values."""
    return _sides(ours, theirs, {m: f"{m} ({_number(ours[m])} against {_number(theirs[m])})" for m in JUDGED})


def _sides(ours: dict[str, Score], theirs: dict[str, Score], shown: dict[str, str] | None = None) -> str:
    """On which metrics we are better, worse or neither; each by its name, unless it is to be shown otherwise."""
    shown = shown or {m: m for m in JUDGED}
    said = {-1: "better on", 1: "worse on", 0: "not told apart on"}
    signs = {m: _compare(ours[m], theirs[m]) for m in JUDGED}
    groups = {words: [shown[m] for m in JUDGED if signs[m] == sign] for sign, words in said.items()}
    return "; ".join(f"{words} {_listed(names)}" for words, names in groups.items() if names)


def _least(tempered: dict[str, dict[str, Score]], metric: str) -> str:
    return min(tempered, key=lambda name: tempered[name][metric][0])


def _best(tempered: dict[str, dict[str, Score]], metric: str, name: str) -> str:
    near = [o for o in tempered if o != name and _compare(tempered[o][metric], tempered[name][metric]) == 0]
    beside = f" (not told apart: {', '.join(f'`{o}`' for o in near)})" if near else ""
    return f"{metric} `{name}` {_number(tempered[name][metric])}{beside}"


def _multiples(values: dict[str, Score], floor: dict[str, Score]) -> str:
    return _listed([f"{values[m][0] / floor[m][0] if floor[m][0] else np.inf:.1f}" for m in JUDGED]) + " times"


def _model(peptide: Peptide, scores: dict[str, dict[str, Score]], ours: list[str]) -> str:
    if UNTEMPERED not in scores:
        return "**Model.** It was not sampled untempered, so what it gets wrong by itself is not known."
    bound = scores[UNTEMPERED]
    out = (
        f"**Model.** Untempered, it is away from dynamics at {peptide.hot:g} K by"
        f" {'; '.join(f'{m} {_number(bound[m])}' for m in JUDGED)} ({_multiples(bound, scores[HALVES])} the floor at {peptide.cold:g} K)."
        " What it gets wrong hot, tempering starts from."
    )
    if ours:
        out += f" Beside this, `{ours[0]}` at {peptide.cold:g} K: {_against(scores[ours[0]], bound)}."
    return out


def _at_rows(ours: float, theirs: float) -> str:
    if abs(ours / theirs - 1) <= UNEQUAL:
        return f"equal rows ({ours:,.0f} and {theirs:,.0f})"
    return f"unequal rows ({ours:,.0f} against {theirs:,.0f})"


def _rungs() -> str:
    parts = []
    for p in PEPTIDES.values():
        counts = Counter(p.temperatures)
        parts.append(f"{p.name} " + ", ".join(f"{n} at {t:g} K" for t, n in sorted(counts.items())))
    return "; ".join(parts)


def _speeds(data: Path) -> list[str]:
    """How fast dynamics were, by walker, as far as `md` wrote it down."""
    found = [
        (name, path.parent.name, _read(path))
        for name in PEPTIDES
        for path in sorted(data.glob(f"{name}/walker-*/speed.json"))
    ]
    if not found:
        return []
    said = [
        f"{name} {walker}, {s['engine']}: {s['ns_per_hour']:,.0f} ns/h in all {s['n_rungs']} rungs over {s['hours']:.1f} h"
        for name, walker, s in found
    ]
    return ["Speed as `md` last measured it, on a core that may have had other work: " + "; ".join(said) + ".\n"]


def _checks(checks: dict[str, list[dict[str, Any]]]) -> str:
    head = [
        "peptide",
        "K",
        "walkers",
        "trajectories",
        "ns",
        *(f"{b.name} (%)" for b in BASINS),
        "z of halves",
        "z of walkers",
    ]
    head += ["changes of sign", "verdict of `check`"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, temperatures in checks.items():
        for c in temperatures:
            inside = c["basins"]
            cells = [name, f"{c['temperature']:g}", str(c["n_walkers"]), str(c["n_trajectories"]), f"{c['ns']:,.1f}"]
            cells += [f"{100 * inside[b.name]['share']:.2f} +- {100 * inside[b.name]['error']:.2f}" for b in BASINS]
            cells += [_largest(inside, key) for key in ("z_halves", "z_walkers")]
            lines.append("| " + " | ".join([*cells, f"{c['crossings']:,}", c["verdict"]]) + " |")
    missing = [name for name, temperatures in checks.items() if not temperatures]
    said = [f"No dynamics of the {' and the '.join(missing)} have been checked.", ""] if missing else []
    if len(missing) == len(checks):
        return "\n".join(said)
    text = "Shares of basins (of residues; `cis`: of peptide bonds), and the largest |z| over basins between halves and between walkers:"
    return "\n".join([text, "", *lines, "", *said])


def _largest(inside: dict[str, dict[str, Any]], key: str) -> str:
    values = [b[key] for b in inside.values()]
    return "-" if None in values else f"{max(map(abs, values)):.1f}"


def _weights(folder: Path, data: Path) -> str:
    """How the shipped weights came about, and those that `train` left."""
    missing = [name for name in PEPTIDES if not _shipped(folder, name).exists()]
    found = {name: _shipped(folder, name) for name in PEPTIDES if name not in missing}
    found |= {f"{name} (not shipped)": _local(data, name) for name in missing if _local(data, name).exists()}
    lines = [line for name, path in found.items() for line in _training(name, load_weights(path)[1])]
    said = [f"No weights are shipped for the {' and the '.join(missing)}.", ""] if missing else []
    head = [
        "| weights | network | frames | steps x batch | minutes of one core | held-out loss (1: the best linear denoiser) |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*([*head, *lines, ""] if lines else []), *said])


def _training(name: str, about: dict[str, str]) -> list[str]:
    """A line for a whole model, or one for each of the two that `join` put together, by what the file says of them."""
    network = json.loads(about["network"])
    parts = [("", "", network)]
    if network["kind"] == "split":
        split = f"{network['split']:g} nm"
        parts = [
            ("low ", f", noise below {split}", network["low"]),
            ("high ", f", noise above {split}", network["high"]),
        ]
    frames = f"{int(about['n_frames']):,}" if "n_frames" in about else "different"
    lines = []
    for prefix, which, sizes in parts:
        settings, last = (json.loads(about[f"{prefix}{key}"]) for key in ("settings", "last"))
        steps, minutes = f"{last['step']:,}", about.get(f"{prefix}minutes", "-")
        if f"{prefix}before" in about:  # begun from other weights
            before = json.loads(about[f"{prefix}before"])
            steps, minutes = f"{before['step']:,} + {steps}", f"{before['minutes']} + {minutes}"
        lines.append(
            f"| {name}{which} | {sizes['kind']}, {sizes['n_layers']} x {sizes['width']} | {frames} at"
            f" {float(about['temperature']):g} K | {steps} x {settings['batch']} |"
            f" {minutes} | {last['validation']:.4f} |"
        )
    return lines
