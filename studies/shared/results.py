"""What a study measured: one JSON file per result, with its arrays beside it.

A result that is there need not be measured again, so a study that was stopped goes on where it was.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from crepe_diffusion.run import publish

__all__ = ["Results"]


class Results:
    """The results in a folder, by name.

    >>> import tempfile
    >>> results = Results(tempfile.mkdtemp())
    >>> results.save("smc seed 0", {"rows": 100}, x=np.zeros(3))
    >>> "smc seed 0" in results, results["smc seed 0"], results.arrays("smc seed 0")["x"].shape
    (True, {'rows': 100}, (3,))
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def path(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '-')}.json"

    def __contains__(self, name: str) -> bool:
        return self.path(name).exists()

    def __getitem__(self, name: str) -> Any:
        return json.loads(self.path(name).read_text(encoding="utf-8"))

    def get(self, name: str) -> Any:
        """The result of this name, or None."""
        path = self.path(name)
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def names(self, pattern: str = "*") -> list[str]:
        """Names of the results that match, as their files are called."""
        return sorted(path.stem for path in self.folder.glob(f"{pattern}.json"))

    def save(self, name: str, record: Mapping[str, Any] | list[Any], **arrays: np.ndarray) -> None:
        """Arrays first: a result whose JSON is there is complete."""
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if arrays:
            file = io.BytesIO()
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # numpy takes any name
            publish(path.with_suffix(".npz"), file.getvalue())
        publish(path, json.dumps(record, indent=1).encode())

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        with np.load(self.path(name).with_suffix(".npz"), allow_pickle=False) as file:
            return dict(file)
