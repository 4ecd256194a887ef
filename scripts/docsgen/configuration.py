"""Options and settings as conf/ documents them."""

from __future__ import annotations

from pathlib import Path

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


def recipes() -> dict[str, tuple[list[str], str]]:
    """By folder of conf/recipe: its data sets, and the source and the printed values of the first of them."""
    found: dict[str, tuple[list[str], str]] = {}
    for folder in sorted(path for path in (CONF / "recipe").iterdir() if path.is_dir()):
        files = sorted(folder.glob("*.yaml"))
        about = comment(files[0])
        # After the name of the data set; the test split is the same for all.
        about = about[about.index(" with " if " with " in about else " as ") + 1 :]
        found[folder.name] = [file.stem for file in files], about.split(" All training images train")[0]
    return found
