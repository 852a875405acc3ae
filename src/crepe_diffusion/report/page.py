"""HTML by hand: one self-contained document, light or dark, one column on a phone. Text is escaped where it enters."""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from crepe_diffusion.diagnostics.verdict import Verdict
from crepe_diffusion.errors import InputError
from crepe_diffusion.report.figures import Picture

__all__ = ["Html", "box", "document", "figures", "number", "publish", "section", "table"]

DOCTYPE = "<!doctype html>"
# Colour is never alone: a sign and a word mean the same.
SIGNS = {"ok": "&#10003;", "look": "!", "do not trust": "&#10007;"}
WORDS = {
    "ok": "OK: no rule found a problem",
    "look": "Look before you use this",
    "do not trust": "Do not trust this",
}
CSS = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #5b6168; --paper: #fff; --card: #f5f6f8; --line: #d9dce1;
  --ok: #00694d; --ok-bg: #e3f4ee; --look: #7a5200; --look-bg: #fdf1d8; --bad: #a33a00; --bad-bg: #fde7dc; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --soft: #a4abb3; --paper: #000; --card: #16191d;
  --line: #343a41; --ok: #5fd3ae; --ok-bg: #06281e; --look: #f2c14e; --look-bg: #2e2205; --bad: #ff9a66;
  --bad-bg: #351503; } img.ink { filter: invert(1) hue-rotate(180deg); } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 75rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: .2rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem;
  border-bottom: 1px solid var(--line); padding-bottom: .2rem; }
p { margin: .4rem 0; max-width: 48rem; } .soft { color: var(--soft); font-size: .9rem; }
.verdict { border: 2px solid; border-left-width: .6rem; border-radius: .5rem; padding: .7rem 1rem; margin: 1rem 0; }
.verdict h2 { border: 0; margin: 0; padding: 0; display: flex; gap: .6rem; align-items: center; color: inherit; }
.verdict .sign { display: inline-flex; width: 1.9rem; height: 1.9rem; flex: none; border: 2px solid; border-radius: 50%;
  align-items: center; justify-content: center; font-weight: 700; }
.verdict h3 { font-size: .95rem; margin: .6rem 0 .1rem; color: var(--ink); }
.verdict ul, .verdict ol { margin: 0; padding-left: 1.3rem; color: var(--ink); }
.verdict.ok { color: var(--ok); background: var(--ok-bg); } .verdict.look { color: var(--look);
  background: var(--look-bg); } .verdict.bad { color: var(--bad); background: var(--bad-bg); }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .6rem; margin: 1rem 0; }
.cards div { background: var(--card); border-radius: .5rem; padding: .5rem .7rem; }
.cards b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
.cards span { color: var(--soft); font-size: .85rem; }
.figures { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; align-items: start; }
figure { margin: 0; } figure img { width: 100%; height: auto; display: block; border-radius: .4rem; }
figcaption { color: var(--soft); font-size: .85rem; padding: .2rem .3rem; }
.wide { overflow-x: auto; margin: .6rem 0; } table { border-collapse: collapse; font-size: .92rem; }
th, td { padding: .3rem .7rem .3rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th { color: var(--soft); font-weight: 600; } td.text { overflow-wrap: anywhere; min-width: 8rem; }
pre { background: var(--card); padding: .7rem; border-radius: .5rem; overflow-x: auto; font-size: .85rem; }
summary { cursor: pointer; padding: .3rem 0; }
@media (max-width: 700px) { .figures { grid-template-columns: 1fr; } body { padding: .7rem; }
  .cards { grid-template-columns: 1fr 1fr; } }
"""


class Html(str):
    """Text that is HTML already; everything else is escaped on its way into a page."""


def html(value: object) -> str:
    return value if isinstance(value, Html) else escape(str(value)).replace("+-", "&plusmn;")


def number(value: float, digits: int = 4) -> str:
    """A number as people write it; what is not known is a dash."""
    if not math.isfinite(value):
        return "-" if math.isnan(value) else str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return (
        f"{value:,.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"
        if 1e-3 <= abs(value) < 1e6
        else f"{value:.{digits}g}"
    )


def table(header: Sequence[object], rows: Iterable[Sequence[object]], name: str = "") -> Html:
    """Each cell of a named table has the id `name-row-column`."""
    head = "".join(f"<th>{html(h)}</th>" for h in header)
    body = "".join(
        "<tr>" + "".join(f"<td{_identity(name, i, j)}{_kind(c)}>{html(c)}</td>" for j, c in enumerate(row)) + "</tr>"
        for i, row in enumerate(rows)
    )
    return Html(f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>')


def _identity(name: str, i: int, j: int) -> str:
    return f' id="{escape(name)}-{i}-{j}"' if name else ""


def _kind(cell: object) -> str:
    return ' class="text"' if len(str(cell)) > 40 else ""


def cards(values: Iterable[tuple[str, object, str]]) -> Html:
    """Big numbers: (id, value, what it is)."""
    inner = "".join(
        f'<div><b id="{key}">{html(value)}</b><span>{html(label)}</span></div>' for key, value, label in values
    )
    return Html(f'<div class="cards">{inner}</div>')


def figures(pictures: Iterable[Picture | None]) -> Html:
    inner = "".join(
        f'<figure><img class="{"photo" if p.photo else "ink"}" alt="{escape(p.alt)}" '
        f'src="data:image/png;base64,{base64.b64encode(p.png).decode()}"><figcaption>{html(p.alt)}</figcaption></figure>'
        for p in pictures
        if p is not None
    )
    return Html(f'<div class="figures">{inner}</div>') if inner else Html("")


def section(title: str, *parts: Html | str) -> Html:
    """Plain strings become paragraphs."""
    inner = "".join(p if isinstance(p, Html) else f"<p>{escape(p)}</p>" for p in parts if p)
    return Html(f"<section><h2>{escape(title)}</h2>{inner}</section>")


def box(verdict: Verdict, so_far: bool = False) -> Html:
    """The verdict with its reasons and advice."""
    kind = {"do not trust": "bad"}.get(verdict.level, verdict.level)
    words = WORDS[verdict.level] + (" (so far: it is still running)" if so_far else "")
    reasons = "".join(f"<li>{html(r)}</li>" for r in verdict.reasons)
    advice = "".join(f"<li>{html(a)}</li>" for a in verdict.advice)
    return Html(
        f'<section class="verdict {kind}" id="verdict" data-level="{verdict.level}">'
        f'<h2><span class="sign" aria-hidden="true">{SIGNS[verdict.level]}</span>{escape(words)}</h2>'
        + (f"<h3>Why</h3><ul>{reasons}</ul>" if reasons else "")
        + (f"<h3>What to do</h3><ol>{advice}</ol>" if advice else "")
        + "</section>"
    )


def document(title: str, subtitle: str, *parts: Html) -> str:
    return (
        f'{DOCTYPE}\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head><body>"
        f'<header><h1>{escape(title)}</h1><p class="soft">{escape(subtitle)}</p></header>'
        + "\n".join(parts)
        + "</body></html>\n"
    )


def publish(path: Path, text: str, pictures: Iterable[Picture | None]) -> Path:
    """Figures first, then the page in one rename: a reader never sees half of it."""
    folder = path.parent / "figures"
    check_page(path)
    if folder.is_symlink():
        raise InputError(
            f"{folder} is a link: figures would be written somewhere else; remove it, or choose another --out"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        if picture is not None:
            _replace(folder / f"{picture.name}.png", picture.png)
    _replace(path, text.encode("utf-8", errors="backslashreplace"))  # names of files may be of any bytes
    return path


def check_page(path: Path) -> None:
    """Refuse to put a page where something else is: a device, or a file that is no page, such as a configuration."""
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is not a file: a report cannot take its place; give the name of a file or a folder")
    if path.is_file() and not path.is_symlink():  # a link is replaced, and what it leads to stays
        with open(path, "rb") as file:
            if file.read(len(DOCTYPE)) not in (b"", DOCTYPE.encode()):
                raise InputError(f"{path} is no page: a report does not take its place; choose another name")


def _replace(path: Path, content: bytes) -> None:
    """In one rename, which replaces a link rather than follow it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(content)
    draft.replace(path)
