"""The pages and their markers: what stands between them, and what should."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from docsgen import blocks, cards, figure, values

ROOT = Path(__file__).resolve().parents[2]

#: A marker in backticks is shown, not filled in.
BLOCK = re.compile(r"^<!-- generated: (?P<call>.+?) -->\n(?P<old>.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)
VALUE = re.compile(r"(?<!`)(?P<open><!-- = (?P<call>.+?) -->)(?P<old>[^<]*)<!-- / -->")
NAVIGATION = re.compile(r"(?P<open> *# generated: methods\n).*?(?P<end> *# end\n)", re.DOTALL)
MARKER = re.compile(r"<!-- (?:generated: |= |end -->|/ -->)")


def pages() -> list[Path]:
    """README.md and the pages of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(page: Path, text: str) -> str:
    """`text` with everything between its markers generated.

    Raises:
        ValueError: a marker without its end, at the start of a line, or of a name that nothing has.
    """
    where = page.relative_to(ROOT).as_posix()
    if VALUE.search(text) and re.search(r"^ {0,3}<!-- = ", text, re.MULTILINE):
        raise ValueError(f"{where}: a number's marker must not begin a line (Markdown would end the paragraph there)")
    left = re.sub(r"`[^`\n]*`", "", VALUE.sub("", BLOCK.sub("", text)))
    if lonely := MARKER.search(left):
        raise ValueError(f"{where}: a marker without its partner: {left[lonely.start() :].splitlines()[0]}")

    def block(match: re.Match[str]) -> str:
        name, *arguments = shlex.split(match["call"])
        if name not in blocks.BLOCKS:
            raise ValueError(f"{where}: no block is called {name}; there are {', '.join(blocks.BLOCKS)}")
        new = blocks.BLOCKS[name](*arguments, page=page)
        return f"<!-- generated: {match['call']} -->\n\n{new.strip()}\n\n<!-- end -->"

    def value(match: re.Match[str]) -> str:
        name, *arguments = shlex.split(match["call"])
        if name not in values.VALUES:
            raise ValueError(f"{where}: no value is called {name}; there are {', '.join(values.VALUES)}")
        return f"{match['open']}{values.VALUES[name](*arguments)}<!-- / -->"

    return VALUE.sub(value, BLOCK.sub(block, text))


def navigation(text: str) -> str:
    """mkdocs.yml with the cards of all methods between its two comments."""
    return NAVIGATION.sub(lambda match: match["open"] + cards.navigation() + match["end"], text)


def _wanted() -> Iterator[tuple[Path, str]]:
    """Each file and what it should hold."""
    for page in pages():
        yield page, filled(page, page.read_text(encoding="utf-8"))
    site = ROOT / "mkdocs.yml"
    yield site, navigation(site.read_text(encoding="utf-8"))


def write() -> list[Path]:
    """Generate everything; returns the files that changed."""
    changed = []
    for file, wanted in _wanted():
        if file.read_text(encoding="utf-8") != wanted:
            file.write_text(wanted, encoding="utf-8")
            changed.append(file)
    return [*changed, *figure.write()]


def stale() -> list[str]:
    """The lines of a diff from what the files hold to what they should; empty if nothing is stale."""
    lines = []
    for file, wanted in _wanted():
        name, old = file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")
        lines += difflib.unified_diff(
            old.splitlines(), wanted.splitlines(), name, f"{name} (generated)", lineterm="", n=1
        )
    return [*lines, *figure.stale()]
