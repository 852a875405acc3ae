"""The model of hot molecules: how it is trained, kept and loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crepe_diffusion import InputError
from crepe_diffusion.models import EDM, Denoiser
from crepe_diffusion.processes import Gaussian
from studies.molecules.geometry import fragments, windows
from studies.molecules.network import EGNN, Folded, Fragments, PairForces, Split
from studies.shared.training import Settings, load_weights, loss, save_tensors, save_weights, train

__all__ = ["NETWORKS", "NOISE", "SETTINGS", "SPLIT", "by_noise", "join", "load_model", "parts", "train_model"]

NETWORKS: dict[str, dict[str, Any]] = {
    "pairs": {"kind": "pairs", "n_layers": 4, "width": 384},
    "pairs-large": {"kind": "pairs", "n_layers": 4, "width": 384, "rank": 128, "volumes": "wide"},
    "pairs-deep": {"kind": "pairs", "n_layers": 10, "width": 384, "rank": 128, "volumes": "wide"},
    "pairs-lengths": {"kind": "pairs", "n_layers": 4, "width": 384, "rank": 128, "squares": False},
    "pairs-small": {"kind": "pairs", "n_layers": 4, "width": 256, "rank": 64},
    "pairs-tiny": {"kind": "pairs", "n_layers": 3, "width": 128},
    "egnn": {"kind": "egnn", "n_layers": 4, "width": 64},
}
AROUND = torch.tensor([[0, 1, 2, 3], [4, 0, 5, 6]])
"""The volumes that networks of fragments see: at the carbon of a methyl group, and at the atom that it hangs on."""
# Bonds matter at sigma near their own 0.003 nm and the shape of the whole near 0.2 nm: the noise is centred between.
SETTINGS = Settings(n_steps=56_000, batch=256, rate=1e-3, noise_mean=-3.6, noise_std=1.8, average=0.9995)
# Stiff and local below `SPLIT`, loose and global above it: two networks, each for its own noise, learn side by side and
# cost no more to evaluate than one.
SPLIT = 0.03
NOISE = {"all": (-3.6, 1.8), "low": (-5.0, 1.2), "high": (-2.2, 1.05), "highest": (-1.7, 0.8)}
"""Mean and standard deviation of log sigma in training: of a whole model, or of the parts that `join` puts together.

`highest` is for going on with the high part: near 0.18 nm hands and basins are decided.
"""


def build(network: dict[str, Any], n_atoms: int, sigma_data: float, *centres: Tensor | None) -> EDM:
    """The untrained denoiser; `centres` (centre and three neighbours) show it left from right, one for each part."""
    return EDM(_bare(network, n_atoms, sigma_data, *centres), sigma_data)


def _bare(network: dict[str, Any], n_atoms: int, sigma_data: float, *centres: Tensor | None) -> nn.Module:
    if network["kind"] == "split":
        parts = zip(("low", "high"), centres, strict=True)
        low, high = (_bare(network[part], n_atoms, sigma_data, of) for part, of in parts)
        return Split(low, high, network["split"])
    sizes = {"n_layers": network["n_layers"], "width": network["width"]}
    if network["kind"] == "egnn":
        return EGNN(n_atoms, **sizes)
    if network["kind"] == "pairs":
        options = {"rank": network.get("rank"), "squares": network.get("squares", True)}
        whole = PairForces(n_atoms, sigma_data, centres=centres[0] if centres else None, **options, **sizes)
        pairs: nn.Module = whole
        small = [(torch.tensor(atoms), AROUND, 192) for atoms in network.get("fragments", [])]
        if "windows" in network:
            small.append((torch.tensor(network["windows"]), torch.tensor(network["window volumes"]), 256))
        if small:
            of_parts = [PairForces(at.shape[1], sigma_data, 3, width, centres=of) for at, of, width in small]
            pairs = Fragments(whole, of_parts, [at for at, _, _ in small])
        fold = {name: torch.tensor(rows) for name, rows in network.get("fold", {}).items()}
        return Folded(pairs, **fold) if fold else pairs
    raise InputError(f'the kind of a network must be "pairs", "egnn" or "split", got {network["kind"]!r}')


def parts(pairs: np.ndarray, methyls: bool, residues: bool) -> dict[str, Any]:
    """What describes networks of fragments, by bonds: of methyl groups, and of residues.

    A methyl group that is inside of a residue needs no network of its own beside that of residues.
    """
    rows, centres = windows(pairs)
    kinds = [atoms.tolist() for atoms in fragments(pairs)] if methyls else []
    if not residues:
        return {"fragments": kinds} if kinds else {}
    inside = [{*row} for row in rows.tolist()]
    kinds = [of for of in kinds if not any({*of[0]} <= row for row in inside)]
    return {"fragments": kinds, "windows": rows.tolist(), "window volumes": centres.tolist()}


def join(low: Path, high: Path, out: Path, split: float = SPLIT, half: bool = False) -> None:
    """One model from two that were trained on low and on high noise; `load_model` reads it.

    Of a file that is joined already, its low or high part is taken. With `half`, matrices are kept in 16 bits, which
    halves it; scales of distances, which need more, are not.
    """
    (low_weights, low_about), (high_weights, high_about) = _part(low, "low"), _part(high, "high")
    for key in ("n_atoms", "sigma_data"):
        if low_about[key] != high_about[key]:
            raise InputError(f"{low} and {high} disagree on {key}: {low_about[key]} and {high_about[key]}")
    network = {"kind": "split", "split": split}
    network |= {"low": json.loads(low_about["network"]), "high": json.loads(high_about["network"])}
    about = {k: v for k, v in low_about.items() if v == high_about.get(k) and k not in OF_PARTS}
    about |= {"network": json.dumps(network)}
    for part, of in (("low", low_about), ("high", high_about)):
        about |= {f"{part} {name}": of[name] for name in OF_PARTS if name in of}
    centres = *_centres(low_weights), *_centres(high_weights)
    model = build(network, int(about["n_atoms"]), float(about["sigma_data"]), *centres)
    weights = {"scales": low_weights.pop("scales")}
    high_weights.pop("scales")
    for part, tensors in (("low", low_weights), ("high", high_weights)):
        weights |= {f"network.{part}.{name.removeprefix('network.')}": v for name, v in tensors.items()}
    model.load_state_dict(weights)
    if half:
        weights = {name: v.half() if v.ndim == 2 and v.is_floating_point() else v for name, v in weights.items()}
    save_tensors(out, weights, about)


OF_PARTS = ("settings", "last", "minutes", "before", "n_frames")
"""What a joined file remembers of the training of each part."""


def _part(path: Path, part: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights and description of a model that was trained as a whole, or of one part of a joined file."""
    weights, about = load_weights(path)
    if not any(name.startswith("network.low.") for name in weights):
        if "last" not in about:  # the average of a training that was stopped
            about["last"] = (path.parent / "log.jsonl").read_text().splitlines()[-1]
        return weights, about | {"minutes": _minutes(path.parent)}
    if part == "all":
        raise InputError(f"{path} is joined from two parts: begin with one of them, noise low or high, not all")
    prefix = f"network.{part}."
    kept = {name.replace(prefix, "network."): v for name, v in weights.items() if name.startswith(prefix)}
    described = {k: v for k, v in about.items() if not k.startswith(("low ", "high "))}
    described |= {name: about[f"{part} {name}"] for name in OF_PARTS if f"{part} {name}" in about}
    network = json.dumps(json.loads(about["network"])[part])
    return {"scales": weights["scales"]} | kept, described | {"network": network}


def train_model(
    frames: tuple[np.ndarray, np.ndarray],
    folder: Path,
    name: str,
    network: dict[str, Any],
    settings: Settings = SETTINGS,
    centres: np.ndarray | None = None,
    groups: np.ndarray | None = None,
    about: dict[str, str] | None = None,
    every: int = 500,
    start: Path | None = None,
    part: str = "all",
    coarse: bool = False,
) -> Iterator[dict[str, float]]:
    """Train on frames (training, validation); yields the log. `folder/NAME.safetensors` is the model when it ends.

    `groups` are methyl groups (carbon and hydrogens) whose hydrogens are renamed at random in every batch. `start`
    holds weights to begin from, of the same network with or without its fold: a model, the `part` (low or high) of a
    joined one, or `average.safetensors` of a training that was stopped. `coarse` trains `PairForces` in bfloat16, with
    weights, their average and validation in float32.
    """
    training, validation = (torch.from_numpy(f).float() for f in frames)
    begin = None if start is None else _part(start, "high" if part == "highest" else part)
    sigma_data = float(training.std()) if begin is None else float(begin[1].get("sigma_data", training.std()))
    torch.manual_seed(settings.seed)  # the network's first weights
    model = build(network, training.shape[1], sigma_data, None if centres is None else torch.from_numpy(centres))
    for module in model.modules():
        if isinstance(module, PairForces):
            module.coarse = coarse
    bare = model.network.inner if isinstance(model.network, Folded) else model.network
    if isinstance(bare, (PairForces, Fragments)):
        bare.fit(training)
    before = {} if begin is None else _begin(model, *begin)

    def batches(n: int, generator: torch.Generator) -> Tensor:
        return renamed(training[torch.randint(len(training), (n,), generator=generator)], groups, generator)

    fixed = torch.Generator().manual_seed(1)
    held_out = renamed(validation[torch.randint(len(validation), (4096,), generator=fixed)], groups, fixed)

    @torch.no_grad()
    def validate(average: EDM) -> float:
        return float(loss(average, held_out, settings, torch.Generator().manual_seed(2)))

    description = {"network": json.dumps(network), "sigma_data": repr(sigma_data), "n_atoms": str(training.shape[1])}
    description |= {"settings": json.dumps(asdict(settings)), "coarse": str(coarse), **(about or {})}
    for line in train(model, batches, settings, folder, validate=validate, every=every):
        yield line
    description |= {"last": json.dumps(line), "minutes": _minutes(folder), **before}
    save_weights(folder / f"{name}.safetensors", model, description)


def _begin(model: EDM, weights: dict[str, Tensor], about: dict[str, str]) -> dict[str, str]:
    """Load the weights; what is to be remembered of the training behind them."""
    if isinstance(model.network, Folded) and not any(name.startswith("network.inner.") for name in weights):
        weights = {name.replace("network.", "network.inner."): value for name, value in weights.items()}
    if any(".whole." in name for name in model.state_dict()) and not any(".whole." in name for name in weights):
        # Fragments join a network that was trained without them; they begin with no force.
        inner = "network.inner." if isinstance(model.network, Folded) else "network."
        weights = {name.replace(inner, f"{inner}whole."): v for name, v in weights.items()}
        weights = {name: v for name, v in model.state_dict().items() if ".parts." in name} | weights
    model.load_state_dict(_deeper(weights, model.state_dict()))
    return {"before": json.dumps({"step": json.loads(about["last"])["step"], "minutes": about["minutes"]})}


def _deeper(weights: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the same function with as many layers as wanted: those that join add nothing to what they get."""
    out = dict(weights)
    for name, like in wanted.items():
        if ".hidden." in name and name not in out:
            out[name] = torch.zeros_like(like)
        elif ".shifts." in name and out[name].shape != like.shape:
            width = wanted[name.rsplit("shifts.", 1)[0] + "first.bias"].shape[0]
            before, after = (v.unflatten(0, (2, -1, width)) for v in (out[name], torch.zeros_like(like)))
            after[:, : before.shape[1]] = before
            out[name] = after.flatten(0, 2)
    return out


def _minutes(folder: Path) -> str:
    """How long a training took, by its log."""
    log = folder / "log.jsonl"
    if not log.exists():
        return "unknown"
    return f"{sum(json.loads(line)['seconds'] for line in log.read_text().splitlines()) / 60:.0f}"


def renamed(x: Tensor, groups: np.ndarray | None, generator: torch.Generator) -> Tensor:
    """Two hydrogens of each methyl group trade names in half of the rows.

    Distances do not show in which sense hydrogens are named, so a network draws both. It has to learn both, or half of
    its samples are unlike anything it has seen.
    """
    x = x.clone()
    for _, _, b, c in () if groups is None else groups.tolist():
        rows = torch.rand(len(x), generator=generator) < 0.5
        x[rows, b], x[rows, c] = x[rows, c], x[rows, b]
    return x


def load_model(name: str | Path) -> Denoiser:
    """The model of molecules (atoms, 3) by the name of a shipped one or from a file, with isotropic Fisher variance."""
    path = Path(name)
    if path.suffix != ".safetensors":
        path = Path(str(files("studies.molecules") / "weights")) / f"{name}.safetensors"
    weights, about = load_weights(path)
    n_atoms = int(about["n_atoms"])
    model = build(json.loads(about["network"]), n_atoms, float(about["sigma_data"]), *_centres(weights))
    model.load_state_dict(weights)
    return denoiser(model, n_atoms)


def _centres(weights: dict[str, Tensor]) -> list[Tensor | None]:
    """Of each part, low noise first; None for a network that is given distances only."""
    names = ("network.low.", "network.high.") if any(n.startswith("network.low.") for n in weights) else ("network.",)
    found = [
        [v for n, v in weights.items() if n.startswith(name) and n.endswith(".centres") and ".parts." not in n]
        for name in names
    ]
    return [of[0] if of else None for of in found]


def denoiser(model: EDM, n_atoms: int) -> Denoiser:
    """Turning a molecule turns every direction into every other, so no fixed basis can be better than isotropy."""
    return Denoiser(model.eval().requires_grad_(False), (n_atoms, 3), process=Gaussian(zero_mean=0))


@torch.no_grad()
def by_noise(model: EDM, x: Tensor, sigmas: Tensor, seed: int = 0) -> Tensor:
    """The weighted loss at each noise level: 1 for the best linear denoiser, less where the model is better."""
    out, n = [], x.shape[1]
    for i, sigma in enumerate(sigmas):
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed + i))
        y = x + sigma * (noise - noise.mean(1, keepdim=True))
        error = (model(y, sigma.expand(len(x))) - x).square().mean() * (n / (n - 1))  # one atom's worth is not free
        out.append(model.weight(sigma[None])[0] * error)
    return torch.stack(out)
