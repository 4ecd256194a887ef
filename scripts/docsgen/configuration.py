"""Generated tables of the options and recipes in conf/."""

from __future__ import annotations

from pathlib import Path

from docsgen.markdown import block, table

CONF = Path(__file__).resolve().parents[2] / "conf"


def comment(file: Path) -> str:
    """Return the comment at the top of a file, without the package directive."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            lines.append(line.lstrip("# ").strip())
    return " ".join(lines)


@block
def options(group: str) -> str:
    """Show the options of a configuration group with the comments at the top of their files."""
    rows = [[f"`{file.stem}`", comment(file)] for file in sorted((CONF / group).glob("*.yaml"))]
    return table([group, "description"], rows, left=2)


@block
def recipes() -> str:
    """Show the recipes by paper and network. Data sets with the same settings share a row."""
    found: dict[tuple[str, str], list[str]] = {}
    for file in sorted((CONF / "recipe").glob("*/*.yaml")):
        about = comment(file)
        # The text begins after the name of the data set, and ends before the sentences about splits.
        about = about[about.index(" with " if " with " in about else " as ") + 1 :]
        found.setdefault((file.parent.name, about.split(" All training images are used")[0]), []).append(file.stem)
    rows = [[f"`{folder}`", ", ".join(f"`{name}`" for name in data), text] for (folder, text), data in found.items()]
    return table(["folder", "data sets", "settings"], rows, left=3)
