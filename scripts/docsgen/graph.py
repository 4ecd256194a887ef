"""The packages of efficient_ft and their imports: a picture, and a table for readers."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from docsgen.markdown import table
from docsgen.registry import block
from docsgen.svg import Canvas

PACKAGE = Path(__file__).resolve().parents[2] / "efficient_ft"


def doc(file: Path) -> str:
    """Return the first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("``", "`")


@cache
def imports() -> dict[str, frozenset[str]]:
    """Return by package of efficient_ft: the other packages that its modules import."""
    found: dict[str, set[str]] = {
        folder.name: set() for folder in PACKAGE.iterdir() if (folder / "__init__.py").is_file()
    }
    for name, others in found.items():
        for file in (PACKAGE / name).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                parts = [module.split(".") for module in modules if module.startswith("efficient_ft.")]
                others |= {part[1] for part in parts} & found.keys() - {name}
    return {name: frozenset(others) for name, others in found.items()}


def layers() -> list[list[str]]:
    """Return the packages from the bottom up: each imports only packages of lower layers."""
    left, done = dict(imports()), []
    while left:
        free = sorted(name for name, others in left.items() if not others & left.keys())
        assert free, f"a cycle of imports: {sorted(left)}"
        done.append(free)
        left = {name: others for name, others in left.items() if name not in free}
    return done


def _direct(name: str) -> list[str]:
    """Return the imports of a package that do not follow from its other imports."""
    own = imports()[name]
    return sorted(other for other in own if not any(other in imports()[between] for between in own - {other}))


def drawn() -> str:
    """Draw the layers. A line leads from a package down to each package that it imports directly."""
    rows, width, height, step = layers(), 104, 30, 62
    across = max(map(len, rows)) * (width + 34)
    canvas = Canvas(across + 20, step * len(rows) + 10, "The packages of efficient_ft, from the bottom up")
    at = {}
    for level, names in enumerate(reversed(rows)):
        for place, name in enumerate(names):
            at[name] = (across * (place + 0.5) / len(names) + 10 + (level % 2 * 26 - 13), level * step + 10.0)
    for name, (x, y) in at.items():
        for other in _direct(name):
            canvas.line([(x, y + height), (at[other][0], at[other][1])], "c5")
    for name, (x, y) in at.items():
        canvas.box(x - width / 2, y, width, height)
        canvas.text(x, y + 20, name, "middle")
    return str(canvas)


@block
def packages() -> str:
    """Show each package with its layer and its description."""
    rows = [
        [str(level), f"[`{name}`](../efficient_ft/{name}/__init__.py)", doc(PACKAGE / name / "__init__.py")]
        for level, names in enumerate(layers(), 1)
        for name in names
    ]
    return table(["layer", "package", "contents"], rows, left=3)
