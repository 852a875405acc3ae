"""Mazes from data to plans: `python -m studies.mazes --help`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from studies.mazes import data, model, pictures, study
from studies.mazes.evaluate import ends, looks_like_data
from studies.mazes.page import write_page
from studies.mazes.refinement import Refinement, refine

DATA, RESULTS = Path("data/mazes"), Path("results/mazes")


def _bars(options: argparse.Namespace):  # type: ignore[no-untyped-def]
    from rich.progress import Progress

    return Progress(disable=options.quiet)


def make_data(options: argparse.Namespace) -> None:
    path = options.data / f"{options.maze}.npz"
    with _bars(options) as bars:
        task = bars.add_task(f"{options.maze}: episodes", total=data.N_TRAIN + data.N_VALIDATION)
        for done in data.make(options.maze, path, n_workers=options.workers, seed=options.seed):
            bars.update(task, completed=done)
    print(f"Wrote {path}")


def train(options: argparse.Namespace) -> None:
    folder = options.data / options.maze
    with _bars(options) as bars:
        task = bars.add_task(f"{options.maze}: steps", total=model.SETTINGS[options.maze].n_steps)
        for line in model.train_model(options.maze, folder, options.data / f"{options.maze}.npz"):
            bars.update(task, completed=line["step"])
            bars.console.print("  ".join(f"{k} {v:.4g}" for k, v in line.items()), highlight=False)
    print(f"Wrote {folder / options.maze}.safetensors")


def quality(options: argparse.Namespace) -> None:
    """Plain samples of the shipped models beside held-out data; needs the data of `data`."""
    import crepe_diffusion as cd

    found = {}
    options.out.mkdir(parents=True, exist_ok=True)
    for name in model.shipped():
        if not (options.data / f"{name}.npz").exists():
            print(f"no data of maze {name!r} in {options.data}: left out")
            continue
        maze, denoiser = model.load(name)
        _, _, validation = data.load(options.data / f"{name}.npz")
        steps = cd.ladder.karras(151, 0.003, 20.0, n_finish=2)
        x = maze.unnormalise(cd.ReplicaExchange(denoiser, steps, n_chains=options.samples, seed=options.seed).output())
        one, two = (data.windows(validation, options.samples, torch.Generator().manual_seed(k)) for k in (3, 4))
        found[name] = looks_like_data(maze, x, one)
        found[name] |= {f"{k}, data": v for k, v in looks_like_data(maze, two, one).items() if k.startswith("TV")}
        print(name, {k: round(v, 3) for k, v in found[name].items()})
        figure = pictures.trajectories(maze, {"data": one[:100], "model": x[:100]})
        figure.savefig(options.out / f"quality-{name}.png", dpi=90)
    if found:
        (options.out / "quality.json").write_text(json.dumps(found))


def run_study(options: argparse.Namespace) -> None:
    jobs = study.comparison(options.maze, options.rows, options.chains) + study.ablation(
        options.maze, options.rows // 2
    )
    with _bars(options) as bars:
        task = bars.add_task(f"{options.maze}: jobs", total=len(jobs))
        for path in study.run_all(jobs, options.out, options.workers):
            bars.advance(task)
            bars.console.print(path.stem, highlight=False)


def run_refinement(options: argparse.Namespace) -> None:
    case = Refinement(weights=options.maze, seed=options.seed)
    with _bars(options) as bars:
        task = bars.add_task("refinement: iterations", total=case.n_before + case.n_after)
        for _ in refine(case, options.out):
            bars.advance(task)


def page(options: argparse.Namespace) -> None:
    print(f"Wrote {write_page(options.out, Path('docs'), 'make mazes', options.data)}")


def look(options: argparse.Namespace) -> None:
    """Pictures of the plans in a run folder of `crepe-diffusion run maze-plan`."""
    import tomllib

    import crepe_diffusion as cd

    folder = options.run
    chosen = tomllib.loads((folder / "config.toml").read_text("utf-8"))["options"]
    maze, _ = model.load(chosen["maze"])
    start, goal = ends(maze, maze.tasks[chosen["task"] - 1])
    run = cd.read_run(folder)
    plans, iterations = maze.unnormalise(torch.as_tensor(run.x[:, 0])), torch.as_tensor(run.iteration)
    row = pictures.plans_along(plans, iterations, 5)
    pictures.side_by_side(maze, row, start, goal).savefig(folder / "plans.png", dpi=110)
    frames = [(title, x, None) for title, x in pictures.plans_along(plans, iterations, 40)]
    pictures.animate(folder / "plans.gif", maze, frames, start, goal)
    print(f"Plans: {folder / 'plans.png'} and {folder / 'plans.gif'}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.mazes", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function, text: str) -> argparse.ArgumentParser:  # type: ignore[no-untyped-def]
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument(
            "--maze", default="giant", help="medium, large or giant; or a file of weights where one is used"
        )
        sub.add_argument("--data", type=Path, default=DATA, help="where data and trainings are kept")
        sub.add_argument("--out", type=Path, default=RESULTS, help="where results go")
        sub.add_argument("--seed", type=int, default=0)
        sub.add_argument("--threads", type=int, default=1)
        sub.add_argument("--quiet", action="store_true", help="no progress bars")
        sub.set_defaults(function=function)
        return sub

    sub = command("data", make_data, "regenerate the stitch data set with OGBench")
    sub.add_argument("--workers", type=int, default=2)
    command("train", train, "train the model of short trajectories, or go on with it")
    sub = command("quality", quality, "compare plain samples of the shipped models with data")
    sub.add_argument("--samples", type=int, default=2048)
    sub = command("look", look, "draw the plans of a run folder")
    sub.add_argument("run", type=Path, metavar="DIR")
    sub = command("study", run_study, "success against network rows for all tasks and methods; goes on if ended")
    sub.add_argument("--rows", type=int, default=1_000_000, help="network rows a chain")
    sub.add_argument("--chains", type=int, default=3)
    sub.add_argument("--workers", type=int, default=2)
    command("refine", run_refinement, "add a way-point while the chain runs")
    command("page", page, "write docs/mazes.md from the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    options.function(options)


if __name__ == "__main__":
    main()
