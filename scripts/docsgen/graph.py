"""Packages of efficient_ft and their imports, shown as a figure and a table."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from docsgen import ROOT
from docsgen.markdown import block, table

PACKAGE = ROOT / "efficient_ft"


def doc(file: Path) -> str:
    """Return the first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("``", "`")


@cache
def imports() -> dict[str, frozenset[str]]:
    """Return, for each package of efficient_ft, the other packages that its modules import."""
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
    """Return the layers of packages from the lowest to the highest.

    Each package imports only packages of lower layers.
    """
    left, done = dict(imports()), []
    while left:
        free = sorted(name for name, others in left.items() if not others & left.keys())
        assert free, f"these packages import each other in a cycle: {sorted(left)}"
        done.append(free)
        left = {name: others for name, others in left.items() if name not in free}
    return done


def direct(name: str) -> list[str]:
    """Return the imports of a package, except for the imports that another import implies."""
    own = imports()[name]
    return sorted(other for other in own if not any(other in imports()[between] for between in own - {other}))


@block
def packages() -> str:
    """Show the layer and the description of each package."""
    rows = [
        [str(level), f"[`{name}`](../efficient_ft/{name}/__init__.py)", doc(PACKAGE / name / "__init__.py")]
        for level, names in enumerate(layers(), 1)
        for name in names
    ]
    return table(["layer", "package", "contents"], rows, left=3)
