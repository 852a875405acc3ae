"""A maze on a grid: where its walls are, how its coordinates are scaled, and its start-goal tasks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import crepe_diffusion as cd

__all__ = ["Maze"]

Cell = tuple[int, int]


@dataclass(frozen=True)
class Maze:
    """A grid of cells, `#` for a wall; rows run along y, columns along x, and the middle of cell (1, 1) is (0, 0).

    Models see coordinates scaled by one factor for both axes, so that the free cells fill at most [-1, 1].

    >>> maze = Maze("corridor", ("#####", "#...#", "#####"))
    >>> maze.distance((1, 1), (1, 3))
    2
    >>> maze.in_wall(torch.tensor([[0.0, 0.0], [0.0, 2.5]])).tolist()
    [False, True]
    """

    name: str
    rows: tuple[str, ...]
    unit: float = 4.0
    tasks: tuple[tuple[Cell, Cell], ...] = ()

    def __post_init__(self) -> None:
        if len({len(row) for row in self.rows}) != 1 or set("".join(self.rows)) - set("#."):
            raise cd.InputError(f"a maze is a rectangle of '#' and '.', got {self.rows!r}")
        if "." in "".join([self.rows[0], self.rows[-1], *(row[0] + row[-1] for row in self.rows)]):
            raise cd.InputError(f"a maze needs a wall around it, got {self.rows!r}")

    @property
    def walls(self) -> Tensor:
        return torch.tensor([[c == "#" for c in row] for row in self.rows])

    @property
    def free(self) -> list[Cell]:
        return [(i, j) for i, row in enumerate(self.rows) for j, c in enumerate(row) if c == "."]

    def xy(self, cell: Cell) -> Tensor:
        """The middle of a cell."""
        i, j = cell
        if not (0 <= i < len(self.rows) and 0 <= j < len(self.rows[0])) or self.rows[i][j] == "#":
            raise cd.InputError(f"cell {cell} of maze {self.name!r} is a wall or outside; free cells: {self.free}")
        return torch.tensor([(j - 1) * self.unit, (i - 1) * self.unit])

    def cells(self, xy: Tensor) -> tuple[Tensor, Tensor]:
        """Row and column of each point; points outside belong to the wall around the maze."""
        column, row = (torch.floor(xy / self.unit + 1.5)).long().unbind(-1)
        return row.clamp(0, len(self.rows) - 1), column.clamp(0, len(self.rows[0]) - 1)

    def in_wall(self, xy: Tensor) -> Tensor:
        return self.walls.to(xy.device)[self.cells(xy)]

    @property
    def centre(self) -> Tensor:
        return torch.tensor([len(self.rows[0]) - 3.0, len(self.rows) - 3.0]) * self.unit / 2

    @property
    def scale(self) -> float:
        """Half the longer side of the free rectangle."""
        return (max(len(self.rows), len(self.rows[0])) - 2) * self.unit / 2

    def normalise(self, xy: Tensor) -> Tensor:
        return (xy - self.centre.to(xy)) / self.scale

    def unnormalise(self, z: Tensor) -> Tensor:
        return z * self.scale + self.centre.to(z)

    def distances(self, to: Cell) -> np.ndarray:
        """Steps from every cell to that one; -1 where there is no way."""
        steps = np.full((len(self.rows), len(self.rows[0])), -1)
        steps[to] = 0
        queue = deque([to])
        while queue:
            i, j = queue.popleft()
            for cell in ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)):
                if self.rows[cell[0]][cell[1]] == "." and steps[cell] < 0:
                    steps[cell] = steps[i, j] + 1
                    queue.append(cell)
        return steps

    def distance(self, start: Cell, goal: Cell) -> int:
        return int(self.distances(goal)[start])

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Maze:
        """A maze from its fields as JSON stores them, with lists for tuples."""
        tasks = tuple((tuple(a), tuple(b)) for a, b in fields["tasks"])
        return cls(fields["name"], tuple(fields["rows"]), fields["unit"], tasks)
