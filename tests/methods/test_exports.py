"""Tests of the names exported by `efficient_ft.methods`, and of their types in editors."""

from __future__ import annotations

import ast
import inspect
import os
import re
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


def test_the_session_is_exported_with_its_types() -> None:
    import efficient_ft
    from efficient_ft.integrations.session import MethodSession

    assert efficient_ft.MethodSession is MethodSession
    stub = ast.parse(Path(str(efficient_ft.__file__)).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = {name.name: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert imports == efficient_ft._LAZY
    assert {"MethodSession", "plan", "__version__"} <= set(dir(efficient_ft))


def mypy(folder: Path, text: str) -> list[str]:
    """Return the output lines of ``mypy --strict`` for a user's file."""
    (folder / "user.py").write_text(text)
    words = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--ignore-missing-imports"]
    words += ["--follow-imports=silent", f"--cache-dir={folder}", "user.py"]
    environment = {**os.environ, "MYPYPATH": str(REPOSITORY)}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True).stdout.splitlines()


#: The example program of the documentation.
RIGHT = """
import timm
import torch

from efficient_ft import MethodSession
from efficient_ft.methods import LBPWHT, LastStage, LoRA


def train(loader: list[tuple[torch.Tensor, torch.Tensor]]) -> MethodSession:
    model: torch.nn.Module = timm.create_model("vit_tiny_patch16_224", num_classes=10)
    with MethodSession(model, [LastStage(), LBPWHT(bases="l1", order=4)], frozen_bn=False) as session:
        optimizer = torch.optim.AdamW(session.parameters(), 1e-4)
        for step, (x, y) in enumerate(loader):
            with session.step(step):
                loss = session.loss(torch.nn.functional.cross_entropy(model(x), y))
                loss.backward()  # type: ignore[no-untyped-call]  # of torch
                optimizer.step()
                optimizer.zero_grad()
        flops: float = session.cost(batch_size=8).flops
    session.save("part.safetensors", whole=flops > 0)
    session.remove()
    other = MethodSession(model, LoRA(rank=8)).apply()
    other.load("part.safetensors")
    return other
"""


@pytest.mark.slow
def test_type_checkers_see_the_arguments_of_every_method(tmp_path: Path) -> None:
    """Type checkers see the names, types and defaults of all arguments."""
    classes = own_classes()
    names = [name for name in methods.__all__ if name not in ("LBPWHT", "LastStage", "LoRA")]
    text = f"{RIGHT}\n\nfrom efficient_ft.methods import {', '.join(names)}\n"
    assert mypy(tmp_path, text)[-1] == "Success: no issues found in 1 source file"

    wrong = text + (
        "LBPWHT(ordr=4)\n"
        'LBPWHT(order="four")\n'
        "MethodSession(LoRA(), LoRA())\n"
        "MethodSession(torch.nn.Linear(1, 1), LoRA()).step()\n"
    )
    lines = mypy(tmp_path, wrong + "".join(f"reveal_type({name})\n" for name in [*classes, "MethodSession"]))
    errors = [line for line in lines if "error:" in line]
    assert len(errors) == 4, lines
    assert 'error: Unexpected keyword argument "ordr" for "LBPWHT"; did you mean "order"?' in errors[0]
    assert 'incompatible type "str"; expected "int"' in errors[1]
    assert 'Argument 1 to "MethodSession" has incompatible type "LoRA"' in errors[2]
    assert 'Missing positional argument "number" in call to "step"' in errors[3]
    revealed = [line for line in lines if "Revealed type" in line]
    assert len(revealed) == len(classes) + 1
    for name, line in zip(classes, revealed, strict=False):
        shown = line.partition('"')[2]
        for argument, parameter in inspect.signature(classes[name]).parameters.items():
            optional = " =" if parameter.default is not parameter.empty else ""
            assert re.search(rf"\b{argument}: [^,]*.*{optional}", shown), (name, argument, shown)
        assert "Any" not in shown, shown
    assert "model: torch.nn.modules.module.Module, methods: " in revealed[-1]
