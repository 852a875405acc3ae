"""A painter of the studies' own classes, too small to have learned anything."""

from __future__ import annotations

import pytest
import torch

from studies.images import data, model
from studies.shared import networks
from studies.shared.results import Results
from studies.shared.training import Settings, save_weights

TINY = {"size": 14, "width": 8, "depth": 1, "n_classes": 10}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Invented images: a bright bar in a place that depends on the class, and a network trained for three steps."""
    root = tmp_path_factory.mktemp("images")
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(200) % 10
    x = torch.randint(0, 40, (200, 28, 28), generator=generator)
    for i, c in enumerate(label.tolist()):
        x[i, 2 * c + 2 : 2 * c + 7, 6:22] += 200
    arrays = {}
    for part in ("train", "test"):
        arrays |= {f"x_{part}": x.to(torch.uint8).numpy(), f"y_{part}": label.to(torch.uint8).numpy()}
    Results(root / "data").save("mnist", {}, **arrays)
    settings = Settings(n_steps=3, batch=8, warm_up=1)
    list(model.train_model("mnist", root / "data", root / "trained", TINY, settings))
    torch.manual_seed(1)
    judge = networks.Classifier(width=4, n_features=6, size=14)
    save_weights(root / "trained" / "mnist-14-classifier.safetensors", judge, {})
    assert data.load_images("mnist", root / "data")[0].x.shape == (200, 1, 28, 28)
    return root


@pytest.fixture(scope="session")
def painter(folder):
    return model.load_painter(
        model.ship("mnist", folder / "data", folder / "trained", folder, size=14, n=16, n_times=5)
    )
