"""Brings the studies into the documentation site: their pages and figures lie beside their code, outside of docs/.

A page `studies/mazes/README.md` becomes `studies/mazes/index.md` of the site; links between pages of the repository are
rewritten to where the pages stand on the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()(?!https?:|#)([^)#\s]+)")
SHOWN = {".md", ".png", ".gif", ".svg"}


def on_files(files: Files, config: Any) -> Files:
    """Add every page and picture of a study."""
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
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        if files.get_file_from_path(site_path(target)) is None:
            return match[0]
        return match[1] + posixpath.relpath(site_path(target), posixpath.dirname(here) or ".")

    return LINK.sub(moved, markdown)


def site_path(path: str) -> str:
    """Where a file of the repository stands on the site."""
    if path.startswith("studies/"):
        return re.sub(r"README\.md$", "index.md", path)
    return path.removeprefix("docs/")


def repository_path(path: str) -> str:
    """Where a page of the site stands in the repository."""
    if path.startswith("studies/"):
        return re.sub(r"index\.md$", "README.md", path)
    return f"docs/{path}"
