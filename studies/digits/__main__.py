"""Digits with a known truth: `python -m studies.digits --help`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from crepe_diffusion.errors import InputError
from studies.digits import grey, laws, network, pictures, study, tables
from studies.images.inception import load_inception
from studies.shared.results import Results
from studies.shared.training import save_tensors

PAGE = Path(__file__).parent / "README.md"


def fit(options: argparse.Namespace) -> None:
    for side in laws.SIDES:
        x, labels = laws.binary_digits(options.mnist, side)
        tensors = laws.fit_trees(x, labels)
        about = {"data": "MNIST, 60,000 training images, ink above one half", "side": str(side)}
        save_tensors(options.out / f"trees-{side}.safetensors", tensors, about)
        print(f"Wrote {options.out / f'trees-{side}.safetensors'}")


def train(options: argparse.Namespace) -> None:
    for line in network.train_network(options.mnist, options.out, options.preset):
        print(" ".join(f"{name} {value:.4g}" for name, value in line.items()), flush=True)


def measure(options: argparse.Namespace) -> None:
    """Every method on every case; what is measured already is not measured again."""
    results = Results(options.out)
    for case in study.cases() if options.case is None else [study.cases()[options.case]]:
        missing = [
            (method, seed)
            for seed in range(options.seeds)
            for method in options.method or study.methods(case)
            if f"{case.name} {method} {seed}" not in results
        ]
        problem = case.problem()
        if case.kind == "masked" and case.at_once > 1 and f"{case.name} turns" not in results:
            log_z, error = study.turned(case, problem, n=200_000 // case.side**2)
            results.save(f"{case.name} turns", {"log_z": log_z, "error": error})
        if not missing:
            continue
        known = study.truth_of(case, problem)
        results.save(
            f"{case.name} truth",
            {
                "share": known.share,
                "log_z": known.log_z,
                "floors": study.floors(case, known),
                "floors of turns": study.floors(case, known, case.turns),
            },
            pixels=known.means["pixels"].numpy(),
        )
        for method, seed in missing:
            began = time.process_time()
            found = study.measure(case, method, seed, known, problem)
            found["seconds"] = time.process_time() - began
            results.save(f"{case.name} {method} {seed}", found)
            errors = {name: round(value, 4) for name, value in found["errors"].items()}
            print(
                f"{case.name}: {method}, seed {seed}, {found['rows']} rows, {errors}, {found['log_z']:.3f}", flush=True
            )


def paint(options: argparse.Namespace) -> None:
    """Guided digits of the trained network by every method, judged; what is there already is not drawn again."""
    results, plan, kind = Results(options.out), grey.PLANS[options.plan], options.plan
    trained = network.load_network(options.weights)
    judge = grey.Judge.load(options.mnist, trained.sizes.levels)
    for digit in options.digit or range(laws.N_CLASSES):
        if f"{kind} real {digit}" not in results:
            real = judge.real(digit, plan.n_draws)
            found = judge(real, torch.full((len(real),), 1 / len(real)), digit)
            results.save(f"{kind} real {digit}", found, shown=real[:16].numpy())
        for method in grey.METHODS:
            for seed in range(options.seeds):
                if f"{kind} {method} {digit} {seed}" not in results:
                    found, shown = grey.run(trained, judge, method, digit, plan, seed)
                    results.save(f"{kind} {method} {digit} {seed}", found, shown=shown.numpy())
                    numbers = {name: round(value, 3) for name, value in found.items()}
                    print(f"{digit}: {method}, seed {seed}, {numbers}", flush=True)
    if kind == "grey" and "grey path" not in results:
        path = grey.path_of(trained, 7, plan, n_iterations=29)
        results.save("grey path", {"digit": 7}, path=path.numpy())


def judge_by_inception(options: argparse.Namespace) -> None:
    """FID of what `paint` has drawn, digit by digit."""
    results, seen = Results(options.out), load_inception()
    judge = grey.Judge.load(options.mnist, network.load_network(options.weights).sizes.levels, n_test=100)
    for digit in options.digit or range(laws.N_CLASSES):
        for seed in range(options.seeds):
            name = f"inception {digit} {seed}"
            there = {m: f"grey {m} {digit} {seed}" for m in grey.METHODS if f"grey {m} {digit} {seed}" in results}
            if there and name not in results:
                drawn = {m: torch.from_numpy(results.arrays(key)["shown"]) for m, key in there.items()}
                results.save(name, grey.fid(seen, judge, digit, drawn))
                print(name, {m: round(v, 1) for m, v in results[name].items()}, flush=True)


def page(options: argparse.Namespace) -> None:
    print(tables.fill_page(PAGE, Results(options.out)))
    for path in pictures.draw_all(Path(__file__).parent, Results(options.out)):
        print(path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.digits", description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("fit", help="fit the trees that are shipped (six seconds)")
    command.add_argument("--mnist", type=Path, default=Path("data/mnist.npz"))
    command.add_argument("--out", type=Path, default=laws.WEIGHTS)
    command.set_defaults(run=fit)
    command = commands.add_parser("train", help="train the network of grey levels; goes on where it was stopped")
    command.add_argument("--mnist", type=Path, default=Path("data/mnist.npz"))
    command.add_argument("--preset", choices=list(network.PRESETS), default="small")
    command.add_argument("--out", type=Path, default=Path("runs/digits"))
    command.set_defaults(run=train)
    command = commands.add_parser("measure", help="errors of all methods against the truth")
    command.add_argument("--case", type=int, choices=range(len(study.cases())), help="one case only")
    command.add_argument("--method", action="append", choices=list(study.METHODS), help="these methods only")
    command.add_argument("--seeds", type=int, default=4)
    command.add_argument("--out", type=Path, default=Path("results/digits"))
    command.set_defaults(run=measure)
    for name, function, text in (
        ("paint", paint, "guided digits of the trained network, by every method"),
        ("inception", judge_by_inception, "FID of what was painted; needs a wheel (two minutes a digit)"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--mnist", type=Path, default=Path("data/mnist.npz"))
        command.add_argument("--weights", type=Path, default=network.FILE)
        command.add_argument("--digit", type=int, action="append", choices=range(laws.N_CLASSES), help="these only")
        command.add_argument("--seeds", type=int, default=1)
        command.add_argument("--out", type=Path, default=Path("results/digits"))
        command.set_defaults(run=function)
        if function is paint:
            command.add_argument("--plan", choices=list(grey.PLANS), default="grey", help="steps and draws")
    command = commands.add_parser("page", help="put the measurements into the page, and draw its picture")
    command.add_argument("--out", type=Path, default=Path("results/digits"))
    command.set_defaults(run=page)
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        options.run(options)
    except InputError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
