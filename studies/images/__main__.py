"""Images from data to pictures: `python -m studies.images --help`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch

from studies.images import data, inception, known, model, problems, restoring, tables, tails, trained
from studies.images.gallery import gallery
from studies.shared.results import Results

DATA, RESULTS = Path("data/images"), Path("results/images")
PAGE = Path(__file__).parent / "README.md"


def _follow(names: Iterable[str], options: argparse.Namespace, text: str, total: int | None = None) -> None:
    from rich.progress import Progress

    with Progress(disable=options.quiet) as bars:
        task = bars.add_task(text, total=total)
        for name in names:
            bars.advance(task)
            bars.console.print(name, highlight=False)


def make_data(options: argparse.Namespace) -> None:
    print(f"Wrote {data.import_images(options.images, options.source, options.data)}")


def train(options: argparse.Namespace) -> None:
    settings = model.SETTINGS[options.size]
    if options.steps is not None:
        settings = replace(settings, n_steps=options.steps)
    network = model.NETWORKS[options.size]
    if options.width is not None:
        network = network | {"width": options.width}
    lines = model.train_model(options.images, options.data, options.out, network, settings)
    texts = ("  ".join(f"{k} {v:.5g}" for k, v in line.items()) for line in lines)
    _follow(texts, options, f"{options.images}: checkpoints", settings.n_steps // model.EVERY)


def classifier(options: argparse.Namespace) -> None:
    print(model.train_classifier(options.images, options.data, options.out, options.size))


def ship(options: argparse.Namespace) -> None:
    print(f"Wrote {model.ship(options.images, options.data, options.out, options.to, options.size)}")


def fit(options: argparse.Namespace) -> None:
    print(f"Wrote {problems.keep_law(options.images, 14, options.data)}")


def run_known(options: argparse.Namespace) -> None:
    results = Results(options.out)
    names = known.run_all(
        options.data, results, options.seeds, lambda case: case.size <= options.size and options.only in case.name
    )
    _follow(names, options, "known truth: problems and seeds")


def run_settings(options: argparse.Namespace) -> None:
    print(known.compare_settings(problems.known_law("mnist", 14, options.data), Results(options.out)))


def run_walks(options: argparse.Namespace) -> None:
    law = problems.known_law("mnist", 14, options.data)
    _follow(known.compare_walks(law, Results(options.out), options.seeds), options, "more walks")


def run_tails(options: argparse.Namespace) -> None:
    law = problems.known_law("mnist", 14, options.data)
    _follow(tails.compare_tails(law, Results(options.out)), options, "tails of weights")


def run_trained(options: argparse.Namespace) -> None:
    painter, results = model.load_painter(options.weights), Results(options.out)
    sizes = trained.SIZES[painter.size]
    if options.seeds is not None:
        sizes = replace(sizes, n_seeds=options.seeds)
    if "wishes" in options.parts:
        _follow(trained.wish_curves(painter, results, sizes), options, "wishes")
    if "long" in options.parts:
        _follow(trained.long_chains(painter, results, sizes), options, "long chains")
    if "refinement" in options.parts and f"refinement {painter.name}" not in results:
        print(trained.refine(painter, results, sizes))
    if "restored" in options.parts and painter.examples is not None:
        _follow(restoring.restore(painter, results), options, "restored images")
    if "guidance" in options.parts:
        _follow(trained.guidance_table(painter, results, sizes), options, "guidance")


def run_inception(options: argparse.Namespace) -> None:
    painter = model.load_painter(options.weights)
    test = data.load_images(painter.images, options.data, painter.size)[1]
    results, network = Results(options.out), inception.load_inception()
    names = [f"guidance {painter.name} class {options.label} samples 512 seed {seed}" for seed in range(options.seeds)]
    _follow(inception.compare(network, test, results, names, options.draws, options.real), options, "seeds")


def make_gallery(options: argparse.Namespace) -> None:
    painters = [model.load_painter(name) for name in options.weights or model.shipped()]
    print(f"Drew {gallery(painters, options.picture)}")


def cost(options: argparse.Namespace) -> None:
    print(tables.cost_table())


def page(options: argparse.Namespace) -> None:
    print("Made", *tables.fill_page(Results(options.out), options.page), sep="\n  ")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.images", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("--images", choices=tuple(data.CLASSES), default="mnist")
        sub.add_argument("--size", type=int, default=14, choices=data.SIZES, help="of images, in pixels")
        sub.add_argument("--data", type=Path, default=DATA, help="where images are kept")
        sub.add_argument("--out", type=Path, default=RESULTS, help="where results and trainings are kept")
        sub.add_argument("--threads", type=int, default=1)
        sub.add_argument("--quiet", action="store_true", help="no progress bars")
        sub.set_defaults(function=function)
        return sub

    sub = command("data", make_data, "keep the images of a folder with IDX files, or of an npz")
    sub.add_argument("source", type=Path)
    sub = command("train", train, "train the denoiser, or continue a training")
    sub.add_argument(
        "--steps", type=int, help="until the rate of learning is zero; by default as many as were measured"
    )
    sub.add_argument("--width", type=int, help="channels at the first level; by default those of what is shipped")
    command("classifier", classifier, "train the classifier")
    sub = command("ship", ship, "measure a trained network and write one file that the study needs")
    sub.add_argument("--to", type=Path, default=model.WEIGHTS)
    command("fit", fit, "fit the known law to the images and keep it")
    sub = command("known", run_known, "every method against a known truth, up to this size; continues")
    sub.add_argument("--seeds", type=int, default=4)
    sub.add_argument("--only", default="", help='problems whose name has this in it, such as "mnist 4 14 guided 4"')
    command("settings", run_settings, "what the settings of particles do to guidance by 4, with a known truth")
    sub = command("walks", run_walks, "what more walks do to guidance by 4, with a known truth; continues")
    sub.add_argument("--seeds", type=int, default=2)
    command("tails", run_tails, "where heavy weights at guidance by 4 come from, with a known truth; continues")
    sub = command("trained", run_trained, "what is measured with a trained network; continues")
    sub.add_argument("--weights", default="mnist-14", help="a shipped network, or a file that `ship` wrote")
    sub.add_argument("--seeds", type=int, help="of the table of guidance")
    parts = ("wishes", "refinement", "restored", "guidance")
    sub.add_argument("--parts", nargs="+", choices=(*parts, "long"), default=parts)
    sub = command("inception", run_inception, "FID of the runs of 512 samples; needs the data and a wheel")
    sub.add_argument("--weights", default="mnist-14", help="the network of the runs")
    sub.add_argument("--draws", type=int, default=128, help="of each method")
    sub.add_argument("--real", type=int, default=256, help="test images")
    sub.add_argument("--label", type=int, default=4, help="the class of the runs")
    sub.add_argument("--seeds", type=int, default=3)
    sub = command("gallery", make_gallery, "one picture of guidance and wishes")
    sub.add_argument("--weights", nargs="+", help="shipped networks, or files; by default the largest of each")
    sub.add_argument("--picture", type=Path, default=Path("results/gallery.png"))
    command("cost", cost, "what the paper's presets cost on one card")
    sub = command("page", page, "fill the tables of the page and draw its figures from the results")
    sub.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    options.function(options)


if __name__ == "__main__":
    main()
