"""Tables in a page that a person wrote: a command replaces what stands between two markers, and nothing else.

<!-- table: success -->
| method | success |
|---|---|
<!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from crepe_diffusion.errors import InputError
from crepe_diffusion.run import publish

__all__ = ["fill", "markdown", "merged", "places"]

BLOCK = re.compile(r"<!-- table: (?P<name>[\w -]+) -->\n(?P<body>.*?)<!-- end -->", re.DOTALL)


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown.

    >>> print(markdown(["method", "error"], [["SMC", 0.1]]))
    | method | error |
    |---|---|
    | SMC | 0.1 |
    """
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in [header, *rows]]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def merged(page: str | Path, name: str, table: str, order: Sequence[str]) -> str:
    """The table with those rows of the page that are about something else, which was measured another time.

    What a row is about is its first word, one of `order`. A page with other columns has nothing to keep.
    """
    old = next((m["body"] for m in BLOCK.finditer(Path(page).read_text("utf-8")) if m["name"] == name), "").splitlines()
    head, rule, *rows = table.splitlines()

    def about(row: str) -> str:
        return row.removeprefix("| ").split()[0].rstrip(",")

    now = {about(row) for row in rows}
    rows += [row for row in old[2:] if about(row) not in now] if old[:1] == [head] else []
    return "\n".join([head, rule, *sorted(rows, key=lambda row: order.index(about(row)))])


def places(page: str | Path) -> list[str]:
    """The names of the tables that the page has a place for."""
    return [match["name"] for match in BLOCK.finditer(Path(page).read_text("utf-8"))]


def fill(page: str | Path, tables: Mapping[str, str]) -> Path:
    """Put these tables in their places; a table without a place is an error, a place without a table stays."""
    path, known = Path(page), places(page)
    for name in tables:
        if name not in known:
            raise InputError(f"{path} has no place for a table {name!r}; it has {', '.join(known) or 'none'}")

    def put(match: re.Match[str]) -> str:
        name = match["name"]
        body = tables[name].rstrip("\n") + "\n" if name in tables else match["body"]
        return f"<!-- table: {name} -->\n{body}<!-- end -->"

    publish(path, BLOCK.sub(put, path.read_text("utf-8")).encode())
    return path
