"""Configurations at random: each starts a run, or is refused in one sentence that names what is wrong."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest

import crepe_diffusion as cd
from crepe_diffusion.run import Run, files
from test_run import small

VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 3.5, -2.0, float("nan"), float("inf"), "", "x", "bounce", "none", [], [1], ["a"]),
    *({}, {"kind": "none"}, {"kind": "bounce"}, {"kind": "os:getcwd"}, {"kind": 3}, {"python": "x"}, [[]], [{}], "1"),
]
EXTRA = [
    "kind",
    "seed",
    "n_chains",
    "explorer",
    "proposal",
    "nonfinite",
    "micro_batch",
    "substeps",
    "rho",
    "scale",
    "on",
]


def places(table: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of nested tables and lists."""
    keys = list(table) if isinstance(table, dict) else range(len(table)) if isinstance(table, list) else []
    return [place for key in keys for place in [(table, key), *places(table[key])]]


def fuzzed(dice: random.Random) -> dict[str, Any]:
    """A valid configuration with one to three values changed, added or taken away."""
    reward = {"name": "a", "function": {"kind": "near", "centre": 1.0}, "anneal": {"kind": "power", "exponent": 2.0}}
    config = small(
        reward=[reward],
        options={"means": [-4.0, 0.0, 3.0]},
        sampler={"explorer": {"kind": "bounce", "n_steps": 1}, "seed": 1, "proposal": {"k": "balanced"}},
        output={"thin": 1, "adapt_at": [3], "scalars": ["x"]},
    )
    for _ in range(dice.randint(1, 3)):
        container, key = dice.choice(places(config))
        value = copy.deepcopy(dice.choice(VALUES))
        action = dice.random()
        if action < 0.7:
            container[key] = value
        elif action < 0.85 and isinstance(container, dict):
            del container[key]
        elif isinstance(container, dict):
            container[dice.choice(EXTRA)] = value
    return config


def fuzz(tmp_path: Path, n: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_sync", lambda path: None)
    dice, refused = random.Random(seed), 0
    for i in range(n):
        config = fuzzed(dice)
        folder = tmp_path / f"run{i}"
        try:
            with Run.start(folder, config) as run:
                run.run(iterations=2)
            with Run.resume(folder) as run:
                run.run(iterations=3)
        except (cd.InputError, cd.NonFiniteError):
            refused += 1
        except Exception:
            print(config)
            raise
    print(f"{n} configurations, {refused} refused")


@pytest.mark.slow
def test_fuzzed_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fuzz(tmp_path, 400, 1, monkeypatch)
