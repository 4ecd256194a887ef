"""Generated reference: signature, summary and file of each class and function.

On the site, `site_hooks` adds the docstrings.
"""

from __future__ import annotations

import inspect
import os
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from docsgen import cards
from docsgen.markdown import block, table
from efficient_ft.methods import METHODS


def _row(name: str, of: Any, page: Path) -> list[str]:
    """Return the signature, linked to the file, and the first sentence of the docstring."""
    function = of.fget if isinstance(of, property) else getattr(of, "__func__", of)
    shown = name
    if (isinstance(function, FunctionType) and of is function) or (isinstance(of, type) and "__init__" in vars(of)):
        parameters = inspect.signature(of).parameters.values()
        short = [str(one.replace(annotation=one.empty)) for one in parameters if one.name != "self"]
        shown = f"{name}({', '.join(one if len(one) < 40 else one.split('=')[0] + '=…' for one in short)})"
    file = Path(os.path.relpath(inspect.getsourcefile(inspect.unwrap(function)) or "", page.parent)).as_posix()
    summary = " ".join((inspect.getdoc(of) or "").partition("\n\n")[0].split())
    return [f"[`{shown}`]({file})", summary.replace("``", "`").replace("|", "\\|")]


def _members(of: Any, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the members in `names`. Without names, yield the public members, and with ``*``, also inherited members."""
    bases = of.__mro__ if names == ("*",) else (of,)
    found = {name: member for base in reversed(bases) for name, member in vars(base).items()}
    for name, member in found.items():
        kind = isinstance(member, FunctionType | property | classmethod | staticmethod | type)
        ours = str(getattr(member, "__module__", "efficient_ft")).startswith("efficient_ft")
        if isinstance(of, ModuleType):
            ours = getattr(member, "__module__", "") == of.__name__ or name in getattr(of, "__all__", ())
        if name in names or (names in ((), ("*",)) and kind and ours and not name.startswith("_")):
            yield name, member


@block
def api(target: str, *members: str, page: Path) -> str:
    """Show a module or class: ``api MODULE[.CLASS] [MEMBER...]``. The member ``-`` hides all members."""
    of = pkgutil.resolve_name(target)
    own = [] if isinstance(of, ModuleType) else [_row(of.__name__, of, page)]
    if members != ("-",) and not isinstance(of, FunctionType):
        dot = "" if isinstance(of, ModuleType) else "."
        own += [_row(dot + name, member, page) for name, member in _members(of, members)]
    assert own, f"the module or class {target} has no public members"
    return f"{table(['name', 'summary'], own, left=2)}\n\n<!-- api: {' '.join((target, *members))} -->"


@block
def reference(page: Path) -> str:
    """Show the classes of all methods by axis."""
    parts = []
    for heading, of in cards.by_axis().items():
        classes = [METHODS[one.name] for one in of]
        rows = [_row(one.__name__, one, page) for one in classes]
        comments = [f"<!-- api: {one.__module__}.{one.__name__} -->" for one in classes]
        parts.append("\n\n".join([f"## {heading}", table(["name", "summary"], rows, left=2), *comments]))
    return "\n\n".join(parts)
