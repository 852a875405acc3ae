"""Sentences with a sentiment: `python -m studies.sentences --help`."""

from __future__ import annotations

import argparse
from pathlib import Path

from studies.sentences import model, text
from studies.shared.results import Results


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
    for command in commands.choices.values():
        command.add_argument("--data", type=Path, default=Path("data/sentences"), help="working folder")
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
