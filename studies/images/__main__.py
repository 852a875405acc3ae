"""Images from data to pictures: `python -m studies.images --help`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from studies.images import data, known, model
from studies.shared.results import Results

DATA, RESULTS = Path("data/images"), Path("results/images")


def make_data(options: argparse.Namespace) -> None:
    print(f"Wrote {data.import_images(options.images, options.source, options.data)}")


def train(options: argparse.Namespace) -> None:
    for line in model.train_model(options.images, options.data, options.out):
        print("  ".join(f"{k} {v:.5g}" for k, v in line.items()), flush=True)


def classifier(options: argparse.Namespace) -> None:
    print(model.train_classifier(options.images, options.data, options.out))


def run_known(options: argparse.Namespace) -> None:
    for name in known.run_all(options.data, Results(options.out), options.seeds):
        print(name, flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.images", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("--images", choices=tuple(data.CLASSES), default="mnist")
        sub.add_argument("--data", type=Path, default=DATA, help="where images are kept")
        sub.add_argument("--out", type=Path, default=RESULTS, help="where results are kept")
        sub.add_argument("--seed", type=int, default=0)
        sub.add_argument("--threads", type=int, default=1)
        sub.set_defaults(function=function)
        return sub

    sub = command("data", make_data, "keep the images of a folder with IDX files, or of an npz")
    sub.add_argument("source", type=Path)
    command("train", train, "train the denoiser, or continue a training")
    command("classifier", classifier, "train the classifier")
    sub = command("known", run_known, "every method against a known truth; continues if it was stopped")
    sub.add_argument("--seeds", type=int, default=4)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    options.function(options)


if __name__ == "__main__":
    main()
