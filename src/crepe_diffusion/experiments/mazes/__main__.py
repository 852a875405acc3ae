"""Mazes from data to plans: `python -m crepe_diffusion.experiments.mazes --help`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from crepe_diffusion.experiments.mazes import data, model

DATA = Path("data/mazes")


def make_data(options: argparse.Namespace) -> None:
    from rich.progress import Progress

    path = options.data / f"{options.maze}.npz"
    with Progress(disable=options.quiet) as bars:
        task = bars.add_task(f"{options.maze}: episodes", total=data.N_TRAIN + data.N_VALIDATION)
        for done in data.make(options.maze, path, n_workers=options.workers, seed=options.seed):
            bars.update(task, completed=done)
    print(f"Wrote {path}")


def train(options: argparse.Namespace) -> None:
    from rich.progress import Progress

    folder = options.data / options.maze
    with Progress(disable=options.quiet) as bars:
        task = bars.add_task(f"{options.maze}: steps", total=model.SETTINGS[options.maze].n_steps)
        for line in model.train_model(options.maze, folder, options.data / f"{options.maze}.npz"):
            bars.update(task, completed=line["step"])
            bars.console.print("  ".join(f"{k} {v:.4g}" for k, v in line.items()), highlight=False)
    print(f"Wrote {folder / options.maze}.safetensors")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m crepe_diffusion.experiments.mazes", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function, text: str) -> argparse.ArgumentParser:  # type: ignore[no-untyped-def]
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("--maze", choices=data.MAZES, default="giant")
        sub.add_argument("--data", type=Path, default=DATA, help="where data and trainings are kept")
        sub.add_argument("--seed", type=int, default=0)
        sub.add_argument("--threads", type=int, default=None, help="of each process")
        sub.add_argument("--quiet", action="store_true", help="no progress bars")
        sub.set_defaults(function=function)
        return sub

    sub = command("data", make_data, "regenerate the stitch data set with OGBench")
    sub.add_argument("--workers", type=int, default=2)
    command("train", train, "train the model of short trajectories, or go on with it")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    options.function(options)


if __name__ == "__main__":
    main()
