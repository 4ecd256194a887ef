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
    """By optimizer: the data sets for which conf/recipe has one, and what the optimizer is."""
    optimizers = options("optim")
    found: dict[str, tuple[list[str], str]] = {}
    for optim in optimizers:
        data = [
            file.stem.removeprefix(f"{optim}_")
            for file in sorted((CONF / "recipe").glob(f"{optim}_*.yaml"))
            if max((o for o in optimizers if file.stem.startswith(f"{o}_")), key=len) == optim
        ]
        if data:
            found[optim] = data, optimizers[optim]
    return found
