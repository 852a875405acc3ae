"""Mazes from data to plans: `python -m studies.mazes --help`."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import crepe_diffusion as cd
from studies.mazes import agents, changes, credit, data, model, pictures, study
from studies.mazes.evaluate import ends, looks_like_data
from studies.mazes.preset import record_preset
from studies.mazes.tables import fill_page
from studies.shared.results import Results

DATA, RESULTS = Path("data/mazes"), Path("results/mazes")
PAGE = Path(__file__).parent / "page.md"


def _bars(options: argparse.Namespace) -> Any:
    from rich.progress import Progress

    return Progress(disable=options.quiet)


def make_data(options: argparse.Namespace) -> None:
    folder = Results(options.data)
    with _bars(options) as bars:
        task = bars.add_task(f"{options.maze}: episodes", total=data.N_TRAIN + data.N_VALIDATION)
        for done in data.make_episodes(options.maze, folder, n_workers=options.workers, seed=options.seed):
            bars.update(task, completed=done)
    print(f"Wrote {folder.path(options.maze)}")


def train(options: argparse.Namespace) -> None:
    with _bars(options) as bars:
        task = bars.add_task(f"{options.maze}: steps", total=model.SETTINGS[options.maze].n_steps)
        for line in model.train_model(options.maze, options.data):
            bars.update(task, completed=line["step"])
            bars.console.print("  ".join(f"{k} {v:.4g}" for k, v in line.items()), highlight=False)
    print(f"Wrote {options.data / options.maze / options.maze}.safetensors")


def quality(options: argparse.Namespace) -> None:
    """Plain samples of the shipped models beside held-out data; needs the episodes of `data`."""
    episodes, results = Results(options.data), Results(options.out)
    for name in model.shipped():
        settings = {"maze": name, "samples": options.samples, "seed": options.seed}
        if name not in episodes:
            print(f"no episodes of maze {name!r} in {options.data}: left out")
        elif not study.measured(results, f"quality {name}", settings):
            _, _, validation = data.load_episodes(name, episodes)
            one, two = (data.windows(validation, options.samples, torch.Generator().manual_seed(k)) for k in (3, 4))
            maze, denoiser = model.load_maze_model(name)
            steps = cd.ladder.karras(151, 0.003, 20.0, n_finish=2)
            chain = cd.ReplicaExchange(denoiser, steps, n_chains=options.samples, seed=options.seed)
            x = maze.unnormalise(chain.output())
            found = looks_like_data(maze, x, one)
            found |= {f"{k}, data": v for k, v in looks_like_data(maze, two, one).items() if k.startswith("TV")}
            shown = {"data": one[:100].numpy(), "model": x[:100].numpy()}
            results.save(f"quality {name}", {"settings": settings, "found": found}, **shown)
            print(name, {k: round(v, 3) for k, v in found.items()})


def run_study(options: argparse.Namespace) -> None:
    jobs = study.comparison(options.maze, options.rows, options.chains)
    jobs += study.ablation(options.maze, options.rows)
    with _bars(options) as bars:
        task = bars.add_task(f"{options.maze}: jobs", total=len(jobs))
        for name in study.run_all(jobs, Results(options.out), options.workers):
            bars.advance(task)
            bars.console.print(name, highlight=False)


def run_credit(options: argparse.Namespace) -> None:
    maze, _ = model.load_maze_model(options.maze)
    tables = credit.cases(maze, options.other, options.rows, options.maze, options.seed)
    chosen = [
        partial(credit.run_case, case) for name, found in tables.items() if options.only in ("", name) for case in found
    ]
    if options.only in ("", "agents"):
        pairs = agents.pairs(maze, options.other, options.rows, options.maze, options.seed)
        chosen += [partial(agents.run_pair, case) for case in pairs]
    with _bars(options) as bars:
        task = bars.add_task(f"{options.maze}: cases", total=len(chosen))
        for run in chosen:
            run(Results(options.out))
            bars.advance(task)


def run_changes(options: argparse.Namespace) -> None:
    seeds = range(options.seed * options.number, (options.seed + 1) * options.number)
    chosen = [changes.Change(changes.KINDS[i % 3], i, weights=options.maze) for i in seeds]
    with _bars(options) as bars:
        task = bars.add_task(f"{options.maze}: changes", total=len(chosen))
        for case in chosen:
            changes.run_change(case, Results(options.out))
            bars.advance(task)


def preset(options: argparse.Namespace) -> None:
    """What a run of `crepe-diffusion run studies/mazes/preset.toml` has reached so far."""
    print(f"Wrote {Results(options.out).path(record_preset(options.run, Results(options.out)))}")


def page(options: argparse.Namespace) -> None:
    print(f"Filled {fill_page(Results(options.out), options.page, options.maze, options.data)}")


def look(options: argparse.Namespace) -> None:
    """Pictures of the plans in a run folder of `crepe-diffusion run studies/mazes/plan.toml`."""
    folder = options.run
    chosen = tomllib.loads((folder / "config.toml").read_text("utf-8"))["options"]
    maze, _ = model.load_maze_model(chosen["maze"])
    run, task = cd.read_run(folder), ends(maze, maze.tasks[chosen["task"] - 1])
    plans, iterations = maze.unnormalise(torch.as_tensor(run.x[:, 0])), torch.as_tensor(run.iteration)
    pictures.side_by_side(maze, pictures.plans_along(plans, iterations, *task, 5)).savefig(
        folder / "plans.png", dpi=110
    )
    pictures.animate(folder / "plans.gif", maze, pictures.plans_along(plans, iterations, *task, 40))
    print(f"Plans: {folder / 'plans.png'} and {folder / 'plans.gif'}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.mazes", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument(
            "--maze", default="giant", help="medium, large or giant; or a file of weights where one is used"
        )
        sub.add_argument("--data", type=Path, default=DATA, help="where data and trainings are kept")
        sub.add_argument("--out", type=Path, default=RESULTS, help="where results are kept")
        sub.add_argument("--seed", type=int, default=0)
        sub.add_argument("--threads", type=int, default=1)
        sub.add_argument("--quiet", action="store_true", help="no progress bars")
        sub.set_defaults(function=function)
        return sub

    sub = command("data", make_data, "regenerate the stitch data set with OGBench")
    sub.add_argument("--workers", type=int, default=2)
    command("train", train, "train the model of short trajectories, or continue a training")
    sub = command("quality", quality, "compare plain samples of the shipped models with data")
    sub.add_argument("--samples", type=int, default=2048)
    sub = command("look", look, "draw the plans of a run folder")
    sub.add_argument("run", type=Path, metavar="DIR")
    sub = command(
        "study", run_study, "success against network rows for all tasks and methods; continues if it was stopped"
    )
    sub.add_argument("--rows", type=int, default=1_000_000, help="network rows per chain")
    sub.add_argument("--chains", type=int, default=3)
    sub.add_argument("--workers", type=int, default=2)
    sub = command("credit", run_credit, "all samplers with and without restitching at equal rows, on tasks and others")
    sub.add_argument("--rows", type=int, default=60_000, help="network rows per method and pair")
    sub.add_argument("--other", type=int, default=5, help="pairs of cells besides the five tasks")
    sub.add_argument(
        "--only", default="", choices=["credit", "short", "blind", "routes", "agents"], help="one table (default: all)"
    )
    sub = command("changes", run_changes, "random way-points, goals and starts off the present route")
    sub.add_argument("--number", type=int, default=20)
    sub = command("preset", preset, "where a run of the paper's preset has got to")
    sub.add_argument("run", type=Path, metavar="DIR")
    sub = command("page", page, "fill the tables of the page and draw its figures from the results")
    sub.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    options.function(options)


if __name__ == "__main__":
    main()
