"""Tests of the package structure: permitted imports, no import cycles, and the size and documentation of files.

All imports count, including imports inside a function and under ``TYPE_CHECKING``.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "efficient_ft"

#: Subpackages from the bottom up. A subpackage imports only from itself and from earlier subpackages. `record` is the
#: format of run folders. Training writes this format and every tool that reads runs imports it, so it precedes
#: training.
ROOMS = (
    "core", "config", "task", "ops", "optim", "models", "methods", "cost", "testing", "integrations", "data", "record",
    "training", "papers", "bench", "planning", "search", "report", "cli",
)  # fmt: skip
#: Subpackages that may import only from some of the earlier subpackages.
ONLY: dict[str, tuple[str, ...]] = {
    "task": ("core",),
    "ops": ("core",),
    "optim": ("core", "ops"),
    "models": ("core", "config", "ops"),
    "cost": ("core", "task", "ops", "optim", "models"),  # observes steps, independent of methods
    "testing": ("core", "models", "methods", "cost"),
    "integrations": ("core", "optim", "models", "methods", "cost"),
    "data": ("core", "config"),
    "record": ("core", "config"),
}
#: Modules that import no other module of the package.
LEAVES = ("efficient_ft.config.sections", "efficient_ft.core.errors")
#: Maximum number of lines of a file.
MOST_LINES = 500
#: Maximum numbers of lines (without the docstring) and of parameters of a function. A function may exceed them if its
#: docstring, or the docstring of its class or module, contains a reason with the word "parameters" or "lines".
MOST_BODY, MOST_PARAMETERS = 80, 8


@cache
def _modules() -> dict[str, ast.Module]:
    """Return every module of the package by full name."""
    found = {}
    for file in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(file.read_text(encoding="utf-8"))
    return found


def _is_package(module: str) -> bool:
    return (ROOT / module.replace(".", "/")).is_dir()


@cache
def _imports() -> dict[str, tuple[str, ...]]:
    """Return the imported modules of the package for each module."""
    modules = _modules()
    found: dict[str, tuple[str, ...]] = {}
    for name, tree in modules.items():
        imported: dict[str, None] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                wanted = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    up = name.split(".")[: len(name.split(".")) - node.level + _is_package(name)]
                    base = ".".join([*up, *([base] if base else [])])
                # The name is a module of a package or a name in a module.
                inside = [f"{base}.{alias.name}" for alias in node.names]
                wanted = [whole if whole in modules else base for whole in inside]
            else:
                continue
            imported.update(dict.fromkeys(w for w in wanted if w in modules and w != name))
        found[name] = tuple(imported)
    return found


def _room(module: str) -> str:
    """Return the subpackage of a module, or "" for the package."""
    return module.split(".")[1] if "." in module else ""


def _wrong_arrows(imports: dict[str, tuple[str, ...]]) -> list[str]:
    wrong = []
    for module, wanted in imports.items():
        room = _room(module)
        for other in wanted:
            below = _room(other)
            if below in (room, ""):
                continue
            allowed = ONLY.get(room, ROOMS[: ROOMS.index(room)] if room in ROOMS else ())
            if below not in allowed:
                wrong.append(f"{module} -> {other}")
    return wrong


def _circle(imports: dict[str, tuple[str, ...]]) -> list[str]:
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


# ------------------------------------------------------------------------------------------------ imports
def test_every_room_has_its_place() -> None:
    rooms = {_room(module) for module in _modules()} - {""}
    outside = {"__main__"}  # entry point of python -m efficient_ft
    assert rooms - set(ROOMS) <= outside, "a new room: say in ROOMS what it may import"
    assert all(set(below) <= set(ROOMS[: ROOMS.index(room)]) for room, below in ONLY.items())


def test_no_import_goes_up() -> None:
    imports = {module: wanted for module, wanted in _imports().items() if _room(module) != "__main__"}
    assert _wrong_arrows(imports) == []


def test_the_package_itself_imports_nothing_of_ours() -> None:
    imports = _imports()
    assert imports[PACKAGE] == ()
    assert {module: imports[module] for module in LEAVES} == dict.fromkeys(LEAVES, ())


def test_no_imports_form_a_circle() -> None:
    assert _circle(_imports()) == []


def test_the_checks_see_what_is_wrong() -> None:
    upward = {"efficient_ft.ops.a": ("efficient_ft.methods.b", "efficient_ft.core.c"), "efficient_ft.methods.b": ()}
    assert _wrong_arrows(upward) == ["efficient_ft.ops.a -> efficient_ft.methods.b"]
    narrow = {"efficient_ft.data.a": ("efficient_ft.models.b", "efficient_ft.data.c", "efficient_ft")}
    assert _wrong_arrows(narrow) == ["efficient_ft.data.a -> efficient_ft.models.b"]
    circle = {"a": ("b",), "b": ("c",), "c": ("a",)}
    assert set(_circle(circle)) == {"a", "b", "c"}
    imports = _imports()
    assert "efficient_ft.integrations.session" in imports["efficient_ft.integrations.lightning"]
    assert "efficient_ft.models.factory" in imports["efficient_ft.training.run"], "inside a function or not"
    assert len(imports) > 60


# ------------------------------------------------------------------------------------------------ kinds of task
def _forks(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield expressions that branch on the kind of task: checks of data or task classes, and comparisons of a name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            checked = called in ("isinstance", "issubclass") and _OF_KIND.search(ast.unparse(node.args[1]))
            if checked or re.fullmatch(r"is_(text|segment\w*|mask\w*|classif\w*|several\w*)", called):
                yield node
        if isinstance(node, ast.Compare):
            sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
            if any(_NAME.search(side) for side in sides) and any(_VALUE.search(side) for side in sides):
                yield node


_KINDS = "classification|segmentation|text|multilabel|regression"
#: Data, listing, task and kind classes that belong to one kind of task.
_OF_KIND = re.compile(
    r"\b((RoundRobin|Segmentation|Text|Image)(Data|Dataset)|(Mask|Text)Listing|(Mask|)Samples|Segmentation|Classification"
    r"|TextClassification|(Text|Class|Classification|Segmentation)Kind|SeveralDataSets)\b"
)
_NAME = re.compile(r"""(\b|_)(task|kind|family)(\b|_)|\[['"]task['"]\]|get\(['"]task['"]""")
_VALUE = re.compile(rf"""['"]({_KINDS})['"]""")


def test_almost_nothing_branches_on_the_kind_of_task() -> None:
    """Each kind of task is one object (`training.kinds`), so a new kind requires no changes in other files."""
    found = [f"{module}: {ast.unparse(one)}" for module, tree in _modules().items() for one in _forks(tree)]
    assert len(found) <= 6, found


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("config.task == 'text'", 1),
        ("isinstance(images, SegmentationData | TextData)", 1),
        ("trained.notes.get('task') == 'segmentation'", 1),
        ("config.task in ('text', 'segmentation')", 1),
        ("is_text(config) or is_segmenter(config)", 2),
        ("isinstance(x, Tensor) and form == 'text'", 0),
        ("TASKS[config.task]", 0),
    ],
)
def test_forks_are_counted(text: str, count: int) -> None:
    assert len(list(_forks(ast.parse(text)))) == count


# ------------------------------------------------------------------------------------------------ files
def test_no_file_is_long() -> None:
    lines = {
        str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines())
        for file in (ROOT / PACKAGE).rglob("*.py")
    }
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_every_imported_distribution_is_declared() -> None:
    """Every imported distribution is a dependency or part of an extra in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {
        re.split(r"[\[<>=!~ ]", one, maxsplit=1)[0].lower().replace("_", "-") for group in groups for one in group
    }
    imported = set()
    for tree in _modules().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add((node.module or "").partition(".")[0])
    own = {PACKAGE, "hydra_plugins", "triton", "llvmlite"}  # torch installs Triton, and numba requires llvmlite
    distributions = packages_distributions()
    undeclared = {
        name: distributions.get(name, [])
        for name in imported - own - sys.stdlib_module_names
        if not {d.lower().replace("_", "-") for d in distributions.get(name, [name])} & declared
    }
    assert undeclared == {}


def _long_functions() -> Iterator[str]:
    """Yield the functions that exceed `MOST_BODY` lines or `MOST_PARAMETERS` without a reason."""
    for module, tree in _modules().items():
        parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            texts, of = [ast.get_docstring(node) or ""], parents.get(node)
            lines = (node.end_lineno or 0) - node.lineno + 1 - len(texts[0].splitlines())
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = len([one for one in arguments if one.arg not in ("self", "cls")])
            while of is not None:
                if isinstance(of, ast.ClassDef | ast.Module):
                    texts.append(ast.get_docstring(of) or "")
                of = parents.get(of)
            reason = any(re.search(r"\b(parameters|lines|arguments?|pointer)\b", text) for text in texts)
            if (lines > MOST_BODY or count > MOST_PARAMETERS) and not reason:
                yield f"{module}.{node.name}: {lines} lines, {count} parameters"


def test_long_functions_have_a_reason() -> None:
    assert list(_long_functions()) == []
