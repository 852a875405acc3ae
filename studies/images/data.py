"""Grey images of 28 x 28 pixels in ten classes: MNIST and Fashion-MNIST, as `x = pixel / 127.5 - 1`."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

import crepe_diffusion as cd
from studies.shared.results import Results

__all__ = ["CLASSES", "SIZES", "Images", "import_images", "load_images"]

CLASSES = {
    "mnist": tuple("0123456789"),
    "fashion": tuple(["T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"]),
}
SIZES = (14, 28)
PARTS = {"x_train": "train-images", "y_train": "train-labels", "x_test": "t10k-images", "y_test": "t10k-labels"}


@dataclass(frozen=True)
class Images:
    """Images (n, 1, size, size) in [-1, 1] and their labels (n,)."""

    x: Tensor
    label: Tensor

    def of_class(self, label: int) -> Tensor:
        return self.x[self.label == label]


def read_idx(path: Path) -> np.ndarray:
    """The array in a file of the IDX format, gzipped or not: magic, one big-endian size per axis, bytes."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise cd.InputError(f"{path} is no IDX file of bytes: it begins with {raw[:4].hex()}, not with 000008")
    n_axes = raw[3]
    shape = np.frombuffer(raw, ">u4", n_axes, 4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * n_axes).reshape(shape)


def import_images(name: str, source: Path, folder: Path) -> Path:
    """Read `source`, a folder of four IDX files or an npz of their arrays, and keep it as `folder/NAME.npz`."""
    if name not in CLASSES:
        raise cd.InputError(f"images are {' or '.join(CLASSES)}, got {name!r}")
    if source.is_dir():
        found = {key: sorted(source.glob(f"{stem}*ubyte*")) for key, stem in PARTS.items()}
        missing = [PARTS[key] for key, paths in found.items() if not paths]
        if missing:
            raise cd.InputError(f"{source} has no IDX files {', '.join(missing)}")
        arrays = {key: read_idx(paths[0]) for key, paths in found.items()}
    else:
        with np.load(source, allow_pickle=False) as file:
            arrays = {key: file[key] for key in PARTS}
    sizes = {key: list(a.shape) for key, a in arrays.items()}
    if arrays["x_train"].shape[1:] != (28, 28) or len(arrays["x_train"]) != len(arrays["y_train"]):
        raise cd.InputError(f"images must be (n, 28, 28) with n labels, got {sizes}")
    Results(folder).save(name, sizes, **arrays)
    return Results(folder).path(name).with_suffix(".npz")


def load_images(name: str, folder: Path, size: int = 28) -> tuple[Images, Images]:
    """Training and test images of size 28, or 14: means of 2 x 2 pixels."""
    if size not in SIZES:
        raise cd.InputError(f"images have a size of {' or '.join(map(str, SIZES))}, got {size!r}")
    results = Results(folder)
    if name not in results:
        raise cd.InputError(f"no images {name!r} in {folder}: python -m studies.images data --images {name} SOURCE")
    a = results.arrays(name)

    def part(key: str) -> Images:
        x = torch.tensor(a[f"x_{key}"])[:, None] / 127.5 - 1
        return Images(x if size == 28 else avg_pool2d(x, 2), torch.tensor(a[f"y_{key}"]).long())

    return part("train"), part("test")
