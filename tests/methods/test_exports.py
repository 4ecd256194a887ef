"""Names that `efficient_ft.methods` exports: all classes, and with the types that editors show."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from efficient_ft import methods
from efficient_ft.methods.registry import own_classes
from tests.conftest import REPOSITORY


def test_every_class_is_exported_from_its_module() -> None:
    tree = ast.parse(Path(str(methods.__file__)).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    imported = {name.name: node.module for node in imports for name in node.names}
    assert imported == {name: method.__module__ for name, method in own_classes().items()}
    assert set(imported) <= set(methods.__all__)
    assert all(getattr(methods, name) is method for name, method in own_classes().items())


def test_every_name_can_be_imported_at_once() -> None:
    found: dict[str, object] = {}
    exec("from efficient_ft.methods import *", found)
    assert set(methods.__all__) <= found.keys()


@pytest.mark.slow
def test_type_checkers_see_the_arguments_of_every_method(tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_text(
        "from efficient_ft.methods import LBPWHT, LastStage, apply_methods\n"
        "LBPWHT(order=4)\n"
        "LBPWHT(ordr=4)\n"
        'LBPWHT(order="four")\n'
        f"from efficient_ft.methods import {', '.join(methods.__all__)}\n"
        f"reveal_type([{', '.join(own_classes())}])\n"
    )
    words = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--ignore-missing-imports"]
    words += ["--follow-imports=silent", f"--cache-dir={tmp_path}", str(file)]
    environment = {**os.environ, "MYPYPATH": str(REPOSITORY)}
    said = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
    errors = [line for line in said.splitlines() if "error:" in line]
    assert len(errors) == 2, said
    assert 'user.py:3: error: Unexpected keyword argument "ordr" for "LBPWHT"; did you mean "order"?' in errors[0]
    assert 'incompatible type "str"; expected "int"' in errors[1]
    (revealed,) = [line for line in said.splitlines() if "Revealed type" in line]
    assert "Any" not in revealed
