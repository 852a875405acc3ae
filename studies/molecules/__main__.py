"""python -m studies.molecules COMMAND"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from crepe_diffusion import InputError
from studies.shared.results import Results

if TYPE_CHECKING:
    from studies.molecules.peptides import Peptide
    from studies.molecules.tempering import Cooling

DATA = Path("data/molecules")
RUNS = Path("runs/molecules")
HERE = Path(str(files("studies.molecules")))


def main(argv: list[str] | None = None) -> int:
    try:
        given = _parser().parse_args(argv)
        return given.command(given)
    except InputError as error:
        print(f"molecules: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"molecules: {error.name} is missing: pip install -e 'studies[molecules]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    from studies.molecules.peptides import PEPTIDES, peptide

    parser = argparse.ArgumentParser(prog="python -m studies.molecules", description=__doc__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--peptide", type=peptide, default="dipeptide", metavar="NAME", help=f"one of {', '.join(PEPTIDES)}"
    )
    shared.add_argument("--data", type=Path, default=DATA, metavar="DIR", help="where trajectories are kept")
    shared.add_argument(
        "--equilibration", type=float, default=500.0, metavar="PS", help="left out at the start of each trajectory"
    )

    sub = commands.add_parser("md", parents=[shared], help="molecular dynamics; goes on where it was left")
    sub.add_argument("--temperature", type=float, nargs="+", metavar="K", help="rungs (default: the peptide's own)")
    sub.add_argument("--walker", type=int, default=0, metavar="I", help="one process, one folder, one start")
    sub.add_argument("--engine", default="lanes", help="lanes (sixteen replicas at once) or openmm (one by one)")
    sub.add_argument("--ns", type=float, default=80.0, help="length of each rung's trajectory, since the beginning")
    sub.add_argument("--seed", type=int, default=0)
    sub.set_defaults(command=_md)

    sub = commands.add_parser("check", parents=[shared], help="whether dynamics have converged")
    sub.set_defaults(command=_check)

    sub = commands.add_parser("train", parents=[shared], help="train on hot frames; goes on where it was left")
    sub.add_argument("--out", type=Path, metavar="DIR", help="default: DATA/PEPTIDE/training-NOISE")
    sub.add_argument(
        "--network",
        default="pairs",
        help="pairs, pairs-large or -deep (tetra- and hexapeptide), pairs-lengths (low noise), -small, -tiny or egnn",
    )
    sub.add_argument("--noise", default="all", help="all; low or high, two parts for `join`; highest goes on with high")
    sub.add_argument("--walker", type=int, metavar="I", help="only frames of this walker (default: of all)")
    sub.add_argument("--steps", type=int, default=56_000)
    sub.add_argument("--batch", type=int, default=256)
    sub.add_argument("--rate", type=float, default=1e-3)
    sub.add_argument("--unfolded", action="store_true", help="show the network whichever hand there is")
    sub.add_argument("--wide", action="store_true", help="tell hands by wide volumes, under more noise")
    sub.add_argument("--rotors", action="store_true", help="show it one of the three turns of each methyl group")
    sub.add_argument("--fragments", action="store_true", help="add small networks of methyl groups and what is around")
    sub.add_argument("--windows", action="store_true", help="add one network for all residues with what is around them")
    sub.add_argument(
        "--start", type=Path, metavar="FILE", help="weights to begin from; of a joined file, those of --noise"
    )
    sub.add_argument("--bfloat16", action="store_true", help="multiply in bfloat16: faster where the processor can")
    sub.add_argument("--ps", type=float, help="read no more than this of each trajectory")
    sub.add_argument("--threads", type=int, default=1)
    sub.set_defaults(command=_train)

    sub = commands.add_parser("join", help="one model from the parts trained with --noise low and --noise high")
    sub.add_argument("low", type=Path)
    sub.add_argument("high", type=Path)
    sub.add_argument("--out", type=Path, required=True, metavar="FILE")
    sub.add_argument("--half", action="store_true", help="keep matrices in 16 bits: half the file")
    sub.set_defaults(command=_join)

    sub = commands.add_parser("temper", parents=[shared], help="sample cold by every method; goes on where it was left")
    sub.add_argument("--weights", help="a file (default: the shipped weights of the peptide)")
    sub.add_argument("--out", type=Path, metavar="DIR", help="default: runs/molecules/PEPTIDE")
    sub.add_argument("--rows", type=int, default=1_500_000, help="network evaluations of each method and seed")
    sub.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    sub.add_argument("--methods", nargs="+", metavar="NAME", help="default: all but those with springs")
    sub.add_argument("--one-hand", action="store_true", help="tilt every method to alpha carbons of one hand")
    sub.add_argument("--threads", type=int, default=1)
    sub.set_defaults(command=_temper)

    sub = commands.add_parser("ratio", parents=[shared], help="the ratio that swaps compare, against the known energy")
    sub.add_argument("--weights", help="a file (default: the shipped weights of the peptide)")
    sub.add_argument("--out", type=Path, metavar="DIR", help="default: runs/molecules/PEPTIDE")
    sub.add_argument("--frames", type=int, default=300, metavar="N", help="of each basin and temperature")
    sub.add_argument("--walks", type=int, default=16, metavar="N", help="up from each frame")
    sub.add_argument("--steps", type=int, nargs="+", default=[200], metavar="N", help="of a walk, a multiple of 10")
    sub.set_defaults(command=_ratio)

    sub = commands.add_parser(
        "anisotropy", parents=[shared], help="what one variance for all directions does to cold basins"
    )
    sub.add_argument("--weights", help="a file (default: the shipped weights of the peptide)")
    sub.add_argument("--out", type=Path, metavar="DIR", help="default: runs/molecules/PEPTIDE")
    sub.add_argument("--frames", type=int, default=2000, metavar="N", help="of each basin")
    sub.add_argument("--steps", type=int, nargs="+", default=[200, 400, 800], metavar="N", help="of the ladder")
    sub.set_defaults(command=_anisotropy)

    sub = commands.add_parser("steps", parents=[shared], help="log Z by the number of steps, with and without springs")
    sub.add_argument("--weights", help="a file (default: the shipped weights of the peptide)")
    sub.add_argument("--out", type=Path, metavar="DIR", help="default: runs/molecules/PEPTIDE")
    sub.add_argument("--particles", type=int, default=500, metavar="N", help="in each of two batches")
    sub.add_argument("--steps", type=int, nargs="+", default=[25, 50, 100, 200, 400], metavar="N")
    sub.add_argument("--one-hand", action="store_true", help="tilt to alpha carbons of one hand")
    sub.set_defaults(command=_steps)

    sub = commands.add_parser("torsions", parents=[shared], help="whether the model's hot error explains cold basins")
    sub.add_argument("--out", type=Path, metavar="DIR", help="where draws are kept (default: runs/molecules/PEPTIDE)")
    sub.add_argument(
        "--methods", nargs="+", default=["RNE, own", "CREPE, own"], metavar="NAME", help="besides the model"
    )
    sub.set_defaults(command=_torsions)

    sub = commands.add_parser(
        "hands", parents=[shared], help="under how much noise volumes show the hand of a molecule"
    )
    sub.add_argument("--out", type=Path, metavar="DIR", help="default: runs/molecules/PEPTIDE")
    sub.add_argument("--every", type=int, default=20, metavar="N", help="take one of so many hot frames")
    sub.set_defaults(command=_hands)

    sub = commands.add_parser("descents", parents=[shared], help="at which noise a model errs, from noised hot frames")
    sub.add_argument("--weights", help="a file (default: the shipped weights of the peptide)")
    sub.add_argument("--out", type=Path, metavar="DIR", help="default: runs/molecules/PEPTIDE")
    sub.add_argument("--frames", type=int, default=300, metavar="N")
    sub.set_defaults(command=_descents)

    sub = commands.add_parser("relax", parents=[shared], help="move what was sampled on by some ps of dynamics")
    sub.add_argument("--runs", type=Path, metavar="DIR", help="what was sampled (default: runs/molecules/PEPTIDE)")
    sub.add_argument("--out", type=Path, metavar="DIR", help="for `report` (default: the same with -relaxed)")
    sub.add_argument("--ps", type=int, default=5, help="of dynamics at the temperature that was sampled")
    sub.add_argument("--draws", type=int, default=2000, metavar="N", help="of each method and seed")
    sub.set_defaults(command=_relax)

    sub = commands.add_parser("report", parents=[shared], help="table, figures and trajectories of what was sampled")
    sub.add_argument("--out", type=Path, metavar="DIR", help="default: runs/molecules/PEPTIDE")
    sub.add_argument("--samples", type=int, default=5000, help="frames and samples that metrics compare")
    sub.set_defaults(command=_report)

    sub = commands.add_parser("page", help="fill the tables and figures of results.md with what the others kept")
    sub.add_argument("--data", type=Path, default=DATA, metavar="DIR", help="where `check` and `md` wrote")
    sub.add_argument("--runs", type=Path, default=RUNS, metavar="DIR", help="where `report` wrote")
    sub.add_argument("--page", type=Path, default=HERE / "results.md", metavar="FILE")
    sub.add_argument("--only", nargs="+", default=[], metavar="TABLE", help="such as 'dipeptide populations'")
    sub.set_defaults(command=_page)

    sub = commands.add_parser("subset", parents=[shared], help="a few blocks of frames, as shipped for the tiny preset")
    sub.add_argument("--out", type=Path, required=True, metavar="DIR")
    sub.add_argument("--blocks", type=int, default=25, help="of 20 frames, at each temperature")
    sub.set_defaults(command=_subset)

    sub = commands.add_parser("tiny", help="everything after dynamics in small, from what is shipped: under a minute")
    sub.add_argument("--out", type=Path, default=RUNS / "tiny", metavar="DIR")
    sub.set_defaults(command=_tiny)

    return parser


def _md(given: argparse.Namespace) -> int:
    from studies.molecules.dynamics import BLOCK, INTERVAL, Walker

    chosen = given.peptide
    temperatures = tuple(given.temperature or chosen.temperatures)
    folder = given.data / chosen.name / f"walker-{given.walker}"
    walker = Walker(folder, chosen, temperatures, given.walker, given.seed, given.engine)
    start = walker.open()
    wanted = round(given.ns * 1000 / (BLOCK * INTERVAL))
    first, began, printed = start.n_blocks, time.monotonic(), 0.0
    for state in walker.run(start) if first < wanted else ():
        done, spent = state.n_blocks, time.monotonic() - began
        if spent - printed > 60 or done == wanted:
            printed = spent
            length = done * BLOCK * INTERVAL / 1000
            speed = (done - first) * BLOCK * INTERVAL / 1000 * len(temperatures) / spent * 3600
            share = state.n_accepted / max(1, state.n_attempted)
            print(
                f"{chosen.name} walker {given.walker}: {length:.2f} of {given.ns:g} ns at each of {len(temperatures)} "
                f"rungs, {speed:.0f} ns/h in all, neighbours accept {share:.3f}",
                flush=True,
            )
            facts = {"engine": given.engine, "n_rungs": len(temperatures), "hours": spent / 3600, "ns_per_hour": speed}
            Results(folder).save("speed", facts)
        if done >= wanted:
            break
    return 0


def _check(given: argparse.Namespace) -> int:
    from studies.molecules import convergence, data

    chosen, found = given.peptide, []
    for temperature in sorted({chosen.cold, chosen.hot}):
        walkers = data.read_walkers(given.data, chosen, temperature, given.equilibration)
        facts = convergence.examine(walkers, chosen)
        found.append({"temperature": temperature, **facts})
        size = f"{facts['n_trajectories']} trajectories of {facts['n_walkers']} walkers, {facts['ns']:.1f} ns"
        print(f"{chosen.name} at {temperature:g} K: {size}")
        for name, basin in facts["basins"].items():
            line = f"  {name:8s} {basin['share']:.4f} +- {basin['error']:.4f}   halves z = {basin['z_halves']:+.1f}"
            if basin["z_walkers"] is not None:
                line += f"   walkers |z| <= {basin['z_walkers']:.1f}"
            print(line)
        print(f"  changes of sign of phi, within blocks: {facts['crossings']}")
        print(f"  {facts['verdict']}")
    Results(given.data / chosen.name).save("check", found)
    return 0


def _train(given: argparse.Namespace) -> int:
    import numpy as np
    import torch

    from studies.molecules import data, model
    from studies.molecules.geometry import alphas, anchors, bonds, methyls, stereocentres, wide_centres
    from studies.molecules.hands import N_READ, read_out

    torch.set_num_threads(given.threads)
    chosen = given.peptide
    if given.network not in model.NETWORKS:
        raise InputError(f"network must be one of {', '.join(model.NETWORKS)}, got {given.network!r}")
    frames = data.split(
        data.read_trajectories(given.data, chosen, chosen.hot, given.equilibration, given.ps, given.walker)
    )
    if given.noise not in model.NOISE:
        raise InputError(f"noise must be one of {', '.join(model.NOISE)}, got {given.noise!r}")
    mean, std = model.NOISE[given.noise]
    settings = replace(model.SETTINGS, n_steps=given.steps, batch=given.batch, rate=given.rate)
    settings = replace(settings, noise_mean=mean, noise_std=std)
    folder = given.out or given.data / chosen.name / f"training-{given.noise}"
    about = {"peptide": chosen.name, "temperature": str(chosen.hot), "n_frames": str(len(frames[0]))}
    pairs, network = bonds(chosen), model.NETWORKS[given.network]
    # Volumes show a network which hand is which; one that sees distances only has to learn both.
    handed = network["kind"] == "pairs"
    centres, groups = (stereocentres(pairs), None) if handed else (None, methyls(pairs))
    if network.get("volumes") == "wide":
        centres = np.concatenate([stereocentres(pairs), wide_centres(pairs)])
    network = network | model.parts(pairs, given.fragments, given.windows)
    if handed and not given.unfolded:
        fold = {"alphas": alphas(pairs).tolist(), "methyls": methyls(pairs).tolist()}
        if given.wide:
            some = frames[0][:: max(1, len(frames[0]) // N_READ)]
            fold |= dict(zip(("alphas", "weights"), (v.tolist() for v in read_out(some, chosen)), strict=True))
        network = network | {"fold": fold | ({"anchors": anchors(pairs).tolist()} if given.rotors else {})}
    for line in model.train_model(
        frames, folder, chosen.name, network, settings, centres, groups, about, start=given.start, part=given.noise,
        coarse=given.bfloat16,
    ):  # fmt: skip
        print("  ".join(f"{k} {v:.5g}" for k, v in line.items()), flush=True)
    return 0


def _join(given: argparse.Namespace) -> int:
    from studies.molecules import model

    model.join(given.low, given.high, given.out, half=given.half)
    print(given.out)
    return 0


def _temper(given: argparse.Namespace) -> int:
    import torch

    from studies.molecules import model, tempering

    torch.set_num_threads(given.threads)
    chosen = given.peptide
    folder = given.out or RUNS / chosen.name
    methods = tuple(given.methods or tempering.USUAL)
    budget = tempering.Budget(rows=given.rows)
    began = time.monotonic()
    trained = model.load_model(given.weights or chosen.name)
    cooling = _cooling(chosen, given.one_hand)
    for name in tempering.temper(trained, cooling, folder, budget, tuple(given.seeds), methods):
        print(f"{time.monotonic() - began:8.0f} s  {name}", flush=True)
    return 0


def _cooling(chosen: Peptide, one_hand: bool) -> Cooling:
    from studies.molecules import tempering
    from studies.molecules.geometry import alphas, bonds

    pairs = bonds(chosen)
    centres = alphas(pairs).tolist() if one_hand else []
    return tempering.Cooling(chosen.beta, tuple(map(tuple, centres)), bonds=tuple(map(tuple, pairs.tolist())))


def _ratio(given: argparse.Namespace) -> int:
    from dataclasses import asdict

    import numpy as np

    from crepe_diffusion import ladder
    from crepe_diffusion.processes import Gaussian
    from studies.molecules import data, model, ratio
    from studies.molecules.tempering import ENDS

    chosen, found = given.peptide, {}
    trained = model.load_model(given.weights or chosen.name)
    for temperature in (chosen.cold, chosen.hot):
        frames = np.concatenate(data.read_trajectories(given.data, chosen, temperature, given.equilibration))
        for n_steps in given.steps:
            levels = ladder.geometric(11, *ENDS, substeps=n_steps // 10)
            name = f"{temperature:g} K, {n_steps} steps"
            found[name] = ratio.check(
                trained, chosen, frames, temperature, levels, Gaussian(zero_mean=0, variance="fisher"),
                per_basin=given.frames, n_walks=given.walks,
            )  # fmt: skip
            print(ratio.table({name: found[name]}), flush=True)
    record = {"table": ratio.table(found), "checks": {name: asdict(c) for name, c in found.items()}}
    Results(given.out or RUNS / chosen.name).save("ratio", record)
    return 0


def _of_one_residue(chosen: Peptide) -> Peptide:
    if chosen.n_residues != 1:
        raise InputError(f"basins are those of the dipeptide, which has one residue; the {chosen.name} has more")
    return chosen


def _anisotropy(given: argparse.Namespace) -> int:
    from dataclasses import asdict

    import numpy as np

    from studies.molecules import anisotropy, data, model
    from studies.molecules.tempering import ENDS

    chosen, found = _of_one_residue(given.peptide), {}
    trained = model.load_model(given.weights or chosen.name)
    cold = np.concatenate(data.read_trajectories(given.data, chosen, chosen.cold, given.equilibration))
    for n_steps in given.steps:
        times = np.geomspace(*ENDS, n_steps + 1)
        found[str(n_steps)] = anisotropy.check(trained, chosen, cold, times, per_basin=given.frames)
    print(anisotropy.table(found))
    record = {"table": anisotropy.table(found), "checks": {name: asdict(c) for name, c in found.items()}}
    Results(given.out or RUNS / chosen.name).save("anisotropy", record)
    return 0


def _steps(given: argparse.Namespace) -> int:
    from dataclasses import asdict

    import torch

    from studies.molecules import model, steps

    torch.set_num_threads(1)
    chosen = given.peptide
    trained = model.load_model(given.weights or chosen.name)
    found = steps.compare(trained, _cooling(chosen, given.one_hand), tuple(given.steps), given.particles, 2)
    print(steps.table(found))
    record = {"table": steps.table(found), "found": [asdict(f) for f in found]}
    Results(given.out or RUNS / chosen.name).save("steps", record)
    return 0


def _torsions(given: argparse.Namespace) -> int:
    from dataclasses import asdict

    import numpy as np

    from studies.molecules import data, torsions
    from studies.molecules.geometry import bonds, same_hand
    from studies.molecules.report import N_LONG
    from studies.molecules.tempering import METHODS, UNTEMPERED, drawn

    unknown = [name for name in given.methods if name not in METHODS]
    if unknown:
        raise InputError(f"no method {unknown[0]!r}; there are {', '.join(METHODS)}")
    chosen, folder = _of_one_residue(given.peptide), given.out or RUNS / given.peptide.name
    frames = [
        np.concatenate(data.read_trajectories(given.data, chosen, t, given.equilibration))
        for t in (chosen.hot, chosen.cold)
    ]
    hot, cold = (torsions.sample(x, np.arange(len(x)) // N_LONG, chosen) for x in frames)
    by_method = {}
    for method in (UNTEMPERED, *given.methods):
        if found := drawn(folder, method):
            x, family = found
            by_method[method] = torsions.sample(same_hand(x, bonds(chosen), frames[0][0])[0], family, chosen)
    if UNTEMPERED not in by_method:
        raise InputError(f"no untempered samples in {folder}: temper --methods {UNTEMPERED!r}")
    shares = torsions.check(by_method.pop(UNTEMPERED), hot, cold, by_method, chosen.beta)
    print(torsions.table(shares))
    record = {"table": torsions.table(shares), "shares": [asdict(s) for s in shares]}
    Results(folder).save("torsions", record)
    return 0


def _hands(given: argparse.Namespace) -> int:
    import numpy as np

    from studies.molecules import data, hands

    chosen = given.peptide
    hot = data.read_trajectories(given.data, chosen, chosen.hot, given.equilibration)
    found = hands.legible(np.concatenate([t[:: given.every] for t in hot]), chosen)
    print(hands.table(found))
    Results(given.out or RUNS / chosen.name).save("hands", {"table": hands.table(found)})
    return 0


def _descents(given: argparse.Namespace) -> int:
    import numpy as np

    from studies.molecules import data, descents, model

    chosen = given.peptide
    hot = np.concatenate(data.read_trajectories(given.data, chosen, chosen.hot, given.equilibration))
    some = hot[np.linspace(0, len(hot) - 1, given.frames).astype(int)]
    found = descents.examine(model.load_model(given.weights or chosen.name), some, chosen)
    print(descents.table(found))
    Results(given.out or RUNS / chosen.name).save("descents", {"table": descents.table(found)})
    return 0


def _relax(given: argparse.Namespace) -> int:
    from studies.molecules import relaxing
    from studies.molecules.tempering import kept_draws

    folder = given.runs or RUNS / given.peptide.name
    out = given.out or folder.with_name(f"{folder.name}-relaxed")
    for name in relaxing.relax(given.peptide, folder, out, given.ps, given.draws):
        print(name, flush=True)
    kept = kept_draws(out)
    text = relaxing.table([kept[name] for name in kept.names()])
    print(text)
    Results(out).save("relaxation", {"table": text})
    return 0


def _report(given: argparse.Namespace) -> int:
    from studies.molecules import data, report
    from studies.molecules.metrics import Truth

    chosen = given.peptide
    folder = given.out or RUNS / chosen.name
    cold, hot = (
        Truth(chosen, t, data.read_trajectories(given.data, chosen, t, given.equilibration))
        for t in (chosen.cold, chosen.hot)
    )
    rows = report.rows_of(cold, hot, folder, given.samples, lambda name: print(f"measuring: {name}", flush=True))
    report.write(rows, cold, folder)
    print(report.table([row.measured for row in rows], chosen))
    return 0


def _page(given: argparse.Namespace) -> int:
    from studies.molecules.page import fill_page

    filled = fill_page(given.page, given.runs, given.data, HERE / "weights", tuple(given.only))
    print(f"{given.page}: {', '.join(filled)}")
    return 0


def _subset(given: argparse.Namespace) -> int:
    from studies.molecules import data

    chosen = given.peptide
    for path in data.subset(given.data, chosen, given.out, given.blocks, given.equilibration):
        print(path)
    return 0


def _tiny(given: argparse.Namespace) -> int:
    import torch

    from studies.molecules import tiny

    torch.set_num_threads(1)
    print(tiny.run(given.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
