"""Pages with markers, between which text is generated from the records."""

from __future__ import annotations

import difflib
import inspect
import posixpath
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from docsgen import (
    ROOT,
    backbones,
    blocks,
    cards,
    claims,
    curves,
    figure,
    graph,
    memory,
    others,
    reference,
    searches,
    studies,
    values,
)
from docsgen.markdown import BLOCKS

#: Modules that register their blocks in BLOCKS when they are imported.
_WITH_BLOCKS = (backbones, blocks, cards, claims, curves, graph, memory, others, reference, searches, studies)

#: Markers in backticks are not replaced.
BLOCK = re.compile(r"^<!-- generated: (?P<call>.+?) -->\n(?P<old>.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)
VALUE = re.compile(r"(?<!`)(?P<open><!-- = (?P<call>.+?) -->)(?P<old>[^<]*)<!-- / -->")
NAVIGATION = re.compile(r"(?P<open> *# generated: methods\n).*?(?P<end> *# end\n)", re.DOTALL)
MARKER = re.compile(r"<!-- (?:generated: |= |end -->|/ -->)")
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")


def pages() -> list[Path]:
    """Return README.md and the pages of docs/ that are not completely generated."""
    own = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page != ROOT / "docs" / "index.md"]
    return [ROOT / "README.md", *own]


def filled(page: Path, text: str) -> str:
    """Return `text` with newly generated text between its markers.

    Raises:
        ValueError: If a marker has no end, begins a line, or has an unknown name.
    """
    where = page.relative_to(ROOT).as_posix()
    if VALUE.search(text) and re.search(r"^ {0,3}<!-- = ", text, re.MULTILINE):
        raise ValueError(f"{where}: a number's marker must not begin a line, because Markdown ends the paragraph there")
    left = re.sub(r"`[^`\n]*`", "", VALUE.sub("", BLOCK.sub("", text)))
    if lonely := MARKER.search(left):
        raise ValueError(f"{where}: the marker {left[lonely.start() :].splitlines()[0]} has no partner")

    def block(match: re.Match[str]) -> str:
        name, *arguments = shlex.split(match["call"])
        if name not in BLOCKS:
            raise ValueError(f"{where}: the block {name} does not exist. The blocks are {', '.join(BLOCKS)}.")
        of_page = {"page": page} if "page" in inspect.signature(BLOCKS[name]).parameters else {}
        new = BLOCKS[name](*arguments, **of_page)
        return f"<!-- generated: {match['call']} -->\n\n{new.strip()}\n\n<!-- end -->"

    def value(match: re.Match[str]) -> str:
        name, *arguments = shlex.split(match["call"])
        if name not in values.VALUES:
            raise ValueError(f"{where}: the value {name} does not exist. The values are {', '.join(values.VALUES)}.")
        return f"{match['open']}{values.VALUES[name](*arguments)}<!-- / -->"

    return VALUE.sub(value, BLOCK.sub(block, text))


def index(readme: str) -> str:
    """Return docs/index.md: the README without its markers, with links that start from docs/."""

    def moved(match: re.Match[str]) -> str:
        target = posixpath.relpath(match[1], "docs")
        outside = {"../CONTRIBUTING.md": "contributing.md", "../CHANGELOG.md": "changelog.md"}
        return f"]({outside.get(target, target)}"

    note = "<!-- Generated from README.md by scripts/docs.py. -->"
    plain = re.sub(
        r"^<!-- (?:generated: .+|end) -->\n\n?", "", VALUE.sub(lambda m: m["old"], readme), flags=re.MULTILINE
    )
    # The site does not contain the examples.
    plain = re.sub(r"\[([^]]+)\]\((examples/[^)]+)\)", r"\1 (`\2`)", plain)
    return f"{note}\n{LINK.sub(moved, plain)}"


def _wanted() -> Iterator[tuple[Path, str]]:
    """Yield each file and the text that it should contain."""
    for page in pages():
        text = filled(page, page.read_text(encoding="utf-8"))
        yield page, text
        if page == ROOT / "README.md":
            yield ROOT / "docs" / "index.md", index(text)
    site = ROOT / "mkdocs.yml"
    text = site.read_text(encoding="utf-8")
    yield site, NAVIGATION.sub(lambda match: match["open"] + cards.navigation() + match["end"], text)
    yield from figure.wanted()


def write() -> list[Path]:
    """Generate all pages and figures, and return the files that changed."""
    changed = []
    for file, wanted in _wanted():
        if not file.is_file() or file.read_text(encoding="utf-8") != wanted:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(wanted, encoding="utf-8")
            changed.append(file)
    return changed


def stale() -> list[str]:
    """Return the lines of a diff from the files to the generated text. The list is empty if all files are current."""
    lines = []
    for file, wanted in _wanted():
        name, old = file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8") if file.is_file() else ""
        if file.suffix == ".svg":
            lines += [] if old == wanted else [f"{name}: the figure is not current"]
            continue
        lines += difflib.unified_diff(
            old.splitlines(), wanted.splitlines(), name, f"{name} (generated)", lineterm="", n=1
        )
    return lines
