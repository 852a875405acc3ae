"""Sentences with a sentiment: `python -m studies.sentences --help`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from studies.sentences import markov, model, sweep, tables, text
from studies.shared.results import Results

PAGE = Path(__file__).parent / "README.md"


def make_data(options: argparse.Namespace) -> None:
    corpus = text.read_corpus(options.rotten, options.sst2)
    tokenizer = text.make_tokenizer(sentence for sentence, _ in corpus["train"])
    options.data.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(options.data / "tokenizer.json"))
    rows = {name: text.make_rows(tokenizer, corpus[name]).numpy().astype("int16") for name in corpus}
    counts = {name: {"sentences": len(corpus[name]), "rows": len(rows[name])} for name in corpus}
    Results(options.data).save("rows", counts, train=rows["train"], held_out=rows["held out"])
    print(f"Wrote {options.data}: {counts}, {tokenizer.get_vocab_size()} tokens")


def train(options: argparse.Namespace) -> None:
    for line in model.train_network(options.data, options.preset):
        print("  ".join(f"{k} {v:.4g}" for k, v in line.items()), flush=True)


def fit_twin(options: argparse.Namespace) -> None:
    """Fit the hidden Markov models to the sentences that are not held out."""
    corpus = text.read_corpus(options.rotten, None)["train"]
    print(markov.make_twin(corpus, options.weights))


def run_twin(options: argparse.Namespace) -> None:
    """Every method on every cell, against the truth; what is measured already is not measured again."""
    results, (bank, _) = Results(options.out), markov.load_twin(options.weights)
    for cell in sweep.cells():
        missing = [m for m in sweep.METHODS if f"twin {cell.name} {m}" not in results]
        if not missing:
            continue
        problem = cell.problem(bank)
        truth = sweep.known(problem)
        about = {name: float(mean) for name, mean in truth.means.items() if mean.numel() == 1}
        floors = sweep.floors(truth, sweep.ROWS, problem.length)
        results.save(f"twin {cell.name} truth", {**about, "share": truth.share, "log_z": truth.log_z, "floors": floors})
        for method in missing:
            found = sweep.measure(bank, cell, method, truth)
            results.save(f"twin {cell.name} {method}", found)
            print(f"{cell.name}: {method}, accuracy {found['accuracy']}, words {found['words']}", flush=True)
    for cell in sweep.PAPER:
        if f"paper {cell.name}" not in results:
            found = sweep.paper(bank, cell)
            results.save(f"paper {cell.name}", found)
            print(
                f"{cell.name}, as in the paper: accuracy {found['accuracy']}, verdicts {found['verdicts']}", flush=True
            )


def page(options: argparse.Namespace) -> None:
    print(tables.fill_page(PAGE, Results(options.out)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.sentences", description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("data", help="read the corpus, make the tokenizer and the rows")
    command.add_argument("--rotten", type=Path, default=Path("data/rotten_tomatoes_8530.csv"))
    command.add_argument("--sst2", type=Path, help="train.tsv of SST-2, for its phrases")
    command.set_defaults(run=make_data)
    command = commands.add_parser("train", help="train, or go on with a training that was ended")
    command.add_argument("--preset", choices=list(model.PRESETS), default="small")
    command.set_defaults(run=train)
    command = commands.add_parser("fit-twin", help="fit the shipped twin, whose truth is known (a minute)")
    command.add_argument("--rotten", type=Path, default=Path("data/rotten_tomatoes_8530.csv"))
    command.set_defaults(run=fit_twin)
    command = commands.add_parser("twin", help="target times proposal strengths on the twin, against the truth")
    command.set_defaults(run=run_twin)
    command = commands.add_parser("page", help="put the measurements into the page")
    command.set_defaults(run=page)
    for command in commands.choices.values():
        command.add_argument("--data", type=Path, default=Path("data/sentences"), help="working folder")
        command.add_argument("--weights", type=Path, default=markov.TWIN, help="the twin")
        command.add_argument("--out", type=Path, default=Path("results/sentences"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.run(options)


if __name__ == "__main__":
    main()
