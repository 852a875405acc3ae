"""Whether a run goes on with what it began with: its configuration, and what models and rewards give at some points."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import google_crc32c
import numpy as np
import torch
from torch import Tensor

from crepe_diffusion.errors import InputError
from crepe_diffusion.evaluate import Counts, Evaluator
from crepe_diffusion.models.networks import modules, saved_tensors
from crepe_diffusion.processes import Discrete, Masked
from crepe_diffusion.processes.asked import Steps
from crepe_diffusion.random import Stream
from crepe_diffusion.run.checkpoint import SCHEMA
from crepe_diffusion.run.config import Config, read_toml
from crepe_diffusion.run.experiment import Experiment
from crepe_diffusion.run.files import DamagedError, digest, publish, read_json, write_json
from crepe_diffusion.run.trust import check_trust, named_code, signature
from crepe_diffusion.sharing import alone
from crepe_diffusion.targets import Target

__all__ = [
    "check_probe",
    "check_schema",
    "check_unchanged",
    "import_path",
    "probe",
    "write_changed",
    "write_config",
    "write_information",
]

Probe = dict[str, list[float]]
ASKED = 8
"""Where predictions are too large to be kept, so many tokens are asked for."""


def write_information(folder: Path, run: str, config: Config, experiment: Experiment, import_path: str) -> None:
    information = {
        "schema": SCHEMA,
        "run": run,
        "versions": _versions(),
        "seed": config.sampler.get("seed"),
        "config_hash": config.identity(),
        "config_text": text_digest(config),
        "fingerprint": experiment.fingerprint,
        "weights": weights(experiment.target),
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "import_path": import_path,
        "trust": signature(run, import_path, named_code(config.to_dict())),
    }
    write_json(folder / "run.json", information)


def check_schema(folder: Path) -> None:
    """Refuse the folder of another version by name, rather than fail on its parts."""
    try:
        schema = read_json(folder / "run.json").get("schema")
    except (OSError, DamagedError):
        return  # `check_unchanged` deals with that
    if schema != SCHEMA:
        raise InputError(
            f"{folder} was written in schema {schema}; this version reads {SCHEMA} only. Its samples are plain Zarr and"
            " still readable; to go on with the run, use the version that began it"
        )


def import_path(folder: Path, trust: bool) -> str:
    """Where modules that the run names are looked for; code that somebody else named is refused unless trusted."""
    code, run, path, signed = named_code(read_toml(folder / "config.toml")), "", "", ""
    try:
        information = read_json(folder / "run.json")
        run, path, signed = (str(information.get(name, "")) for name in ("run", "import_path", "trust"))
    except (OSError, DamagedError):
        information = {}
    if trust and information:
        write_json(folder / "run.json", {**information, "trust": signature(run, path, code)})
    elif not trust:
        check_trust(folder, signed, run, path, code)
    return path


def write_config(folder: Path, config: Config) -> None:
    publish(folder / "config.toml", config.to_toml().encode())


def text_digest(config: Config) -> str:
    return digest(config.to_toml().encode())


def write_changed(folder: Path, config: Config) -> None:
    """A configuration that was changed only where it may be."""
    write_config(folder, config)
    write_json(folder / "run.json", {**read_json(folder / "run.json"), "config_text": text_digest(config)})


def weights(target: Target) -> str:
    """A checksum of all parameters and buffers that the models' networks would save, "" if there are none.

    A probe compares with a tolerance and at a few points; a small change of the weights shows here.
    """
    seals = {
        (id(tensor), str(tensor.dtype), tuple(tensor.shape), _checksum(tensor))
        for model in target.models
        for _, module in modules(model)
        for tensor in saved_tensors(module)
    }
    # Neither the order in which networks are found nor their names matter.
    return digest(repr(sorted(seal[1:] for seal in seals)).encode()) if seals else ""


def _checksum(tensor: Tensor) -> int:
    """Of a tensor that is split over processes, of the part that is here."""
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # to import DTensor would take seconds
    flat = tensor.detach().cpu().contiguous().flatten()
    return int(google_crc32c.value(flat.view(torch.uint8).numpy().tobytes())) if len(flat) else 0


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("crepe-diffusion", "torch", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "unknown"
    return versions


def probe(e: Evaluator, target: Target | None = None) -> Probe:
    """Values of models, rewards and kernels at two points at three times: they change when those do.

    Of another target, if one is given. Everything is evaluated twice: what then differs could not be compared later,
    and is no law that could be sampled.
    """
    with alone():  # other processes may have something else to do
        first, second = (_probe(e, target or e.target) for _ in range(2))
    for part, what in (("models", "a model"), ("rewards", "a reward"), ("kernels", "the process")):
        if not _agree(first[part], second[part]):
            raise InputError(
                f"{what} gives other values when it is called again with the same input: is there dropout or a random"
                " generator inside? Repeated calls must give equal results"
            )
    return first


def _probe(e: Evaluator, target: Target) -> Probe:
    evaluate = Evaluator(
        target,
        e.ladder,
        e.process,
        e.proposal,
        micro_batch=e.micro_batch,
        nonfinite="reject",
        counts=Counts(),
    )
    n = 2 * evaluate.n_groups
    x = evaluate.noise(Stream(0).at("probe"), n)
    s, t = e.ladder.times[0].expand(n), e.ladder.times[-1].expand(n)
    # Levels may be moved during a run, but not their ends: the middle is taken from these.
    middle = torch.where(s > 0, (s * t).sqrt(), t / 2)
    at_s, at_t = evaluate(x, s), evaluate(x, t)
    evaluations = at_s, evaluate(x, middle), at_t
    if evaluate.keeps_predictions:
        models = [p for seen in evaluations for p in seen.predictions]
        ratios = list(e.process.log_ratios(x, x, at_s, at_t, s, t, evaluate.coefficients))
    else:
        assert isinstance(e.process, Discrete)
        free = e.process.free(x).flatten(1)
        first = (free & (free.cumsum(1) <= ASKED)).long()
        down = torch.zeros(n, dtype=torch.bool, device=x.device)
        branch, ratios = Stream(0).at("tokens"), []
        if isinstance(e.process, Masked) and e.process.takes_turns:
            models = list(evaluate.ask(x, t, e.process.asked(x, first, 1, down, branch)))
            ratios = [e.process.coin_ratio(x, x, s, t)]
        else:
            models = list(evaluate.ask(x, t, Steps.between(e.process, x, s.to(x.device), down, branch)))
    parts = {
        "models": models,
        "rewards": [z for seen in evaluations for z in (seen.drift, seen.reward)],
        "kernels": ratios,
    }
    return {part: [v for z in tensors for v in _digest_numbers(z)] for part, tensors in parts.items()}


def _digest_numbers(z: Tensor) -> list[float]:
    """A few numbers that change with any entry of a tensor."""
    flat = z.detach().to(torch.float64).flatten()
    finite = flat[flat.isfinite()]
    moments = [float(finite.sum()), float(finite.square().sum()), float(len(finite))]
    return [*moments, *(float(v) if math.isfinite(v) else 0.0 for v in flat[:6].tolist())]


def _agree(a: list[float], b: list[float]) -> bool:
    """Equal up to what another machine or batch makes of the same network."""
    return len(a) == len(b) and np.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)


def check_probe(folder: Path, now: Probe, before: Probe, allow_changed: bool, notify: Callable[[str], None]) -> None:
    for part, what in (
        ("models", "the model or its process gives"),
        ("rewards", "the rewards or the proposal give"),
        ("kernels", "the process has kernels of"),
    ):
        if not _agree(now[part], before[part]):
            text = f"{what} other values than when the run began"
            if not allow_changed:
                raise InputError(f"{folder}: {text}; --allow-changed goes on anyway")
            notify(text)
            return


def check_unchanged(
    folder: Path, run: str, config: Config, experiment: Experiment, allow_changed: bool, notify: Callable[[str], None]
) -> None:
    """Compare configuration and fingerprint with those that the run began with."""
    try:
        information = read_json(folder / "run.json")
    except (OSError, DamagedError) as error:
        text = f"damaged: {error}; it is not known whether configuration and model are those that the run began with"
        if not allow_changed:
            raise DamagedError(folder / "run.json", f"{text}; --allow-changed goes on anyway") from None
        notify(text)
        write_information(folder, run, config, experiment, "")
        return
    changes = []
    if information["config_hash"] != config.identity():
        changes.append("config.toml was changed since the run began")
    elif information["config_text"] != digest((folder / "config.toml").read_bytes()):
        notify("config.toml was changed only where it may be ([stop], cadences)")
    if information["fingerprint"] != experiment.fingerprint:
        changes.append("the model is not the one that the run began with (its fingerprint differs)")
    if information.get("weights") != weights(experiment.target):
        changes.append("the weights of a network are not those that the run began with")
    for change in changes:
        if not allow_changed:
            raise InputError(f"{folder}: {change}; --allow-changed goes on anyway")
        notify(change)
    if changes:
        write_config(folder, config)
        new = {"config_hash": config.identity(), "config_text": text_digest(config)}
        model = {"fingerprint": experiment.fingerprint, "weights": weights(experiment.target)}
        write_json(folder / "run.json", {**information, **new, **model})
