"""Brings studies and examples into the documentation site: their pages lie beside their code, outside of docs/.

    studies/mazes/README.md     ->  studies/mazes/index.md
    examples/mala.py, .toml     ->  examples/mala.py.md, a page that shows the file

Links between files of the repository are rewritten to where the pages stand on the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)([^)]*)\)")
SHOWN = {".md", ".png", ".gif", ".svg"}
SOURCES = {".py": "python", ".toml": "toml"}
SIDES = ("studies/", "examples/")


def on_files(files: Files, config: Any) -> Files:
    """Add every page and picture of a study, and every example."""
    for path in sorted((ROOT / "examples").rglob("*")):
        where = site_path(path.relative_to(ROOT).as_posix())
        if path.suffix in SOURCES:
            text = f"# {path.name}\n\n```{SOURCES[path.suffix]}\n{path.read_text('utf-8')}```\n"
            files.append(File.generated(config, where, content=text))
        elif path.suffix in SHOWN:
            files.append(File.generated(config, where, abs_src_path=str(path)))
    for path in sorted((ROOT / "studies").rglob("*")):
        inside = path.relative_to(ROOT)
        if path.suffix in SHOWN and "tests" not in inside.parts and "results" not in inside.parts:
            files.append(File.generated(config, site_path(inside.as_posix()), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Links as they work in the repository, changed to what works on the site."""
    here = page.file.src_uri
    source = repository_path(here)

    def moved(match: re.Match[str]) -> str:
        text, link, anchor = match.groups()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        if files.get_file_from_path(site_path(target)) is not None:
            return f"[{text}]({posixpath.relpath(site_path(target), posixpath.dirname(here) or '.')}{anchor})"
        if (ROOT / target).exists():  # in the repository only, so there is nothing to link to
            return f"`{target}`"
        return match[0]

    return LINK.sub(moved, markdown)


def site_path(path: str) -> str:
    """Where a file of the repository stands on the site."""
    if path.startswith("examples/") and posixpath.splitext(path)[1] in SOURCES:
        return f"{path}.md"
    if path.startswith(SIDES):
        return re.sub(r"README\.md$", "index.md", path)
    return path.removeprefix("docs/")


def repository_path(path: str) -> str:
    """Where a page of the site stands in the repository."""
    if path.startswith(SIDES):
        return re.sub(r"index\.md$", "README.md", path)
    return f"docs/{path}"
