"""Options and settings as conf/ documents them."""

from __future__ import annotations

from pathlib import Path

from docsgen.markdown import table

CONF = Path(__file__).resolve().parents[2] / "conf"


def comment(file: Path) -> str:
    """The comment at the top of a file, without its package line."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            lines.append(line.lstrip("# ").strip())
    return " ".join(lines)


def options(group: str) -> dict[str, str]:
    """Options of a group and what they are."""
    return {file.stem: comment(file) for file in sorted((CONF / group).glob("*.yaml"))}


def recipes() -> list[tuple[str, list[str], str]]:
    """Folders of conf/recipe, data sets whose files say the same, and their source and printed values."""
    found: dict[tuple[str, str], list[str]] = {}
    for folder in sorted(path for path in (CONF / "recipe").iterdir() if path.is_dir()):
        for file in sorted(folder.glob("*.yaml")):
            about = comment(file)
            # After the name of the data set; the test split is the same for all.
            about = about[about.index(" with " if " with " in about else " as ") + 1 :]
            found.setdefault((folder.name, about.split(" All training images train")[0]), []).append(file.stem)
    return [(folder, data, about) for (folder, about), data in found.items()]


def options_table(group: str) -> str:
    """The options of a configuration group, with the first lines of their files."""
    return table([group, ""], [[f"`{name}`", text] for name, text in options(group).items()], left=2)


def recipes_table() -> str:
    """The published settings, by paper and network."""
    rows = [[f"`{folder}`", ", ".join(f"`{name}`" for name in data), text] for folder, data, text in recipes()]
    return table(["folder", "data sets", "settings"], rows, left=3)
