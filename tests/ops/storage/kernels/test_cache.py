"""Tests of the disk cache of the CPU kernels: cached code is correct in every process, and the cache does not grow."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

pytest.importorskip("numba")

#: A program that packs with all kernels of the given widths and compares the results with plain torch. With the word
#: "load", numba cannot compile.
PROGRAM = """
import sys
import numba.core.compiler
import torch
from efficient_ft.ops.storage import groups, sparse
from efficient_ft.ops.storage.kernels import cpu

def refuse(*arguments, **options):
    raise AssertionError(f"compiles {arguments[2]}")

x, seed = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)), torch.tensor(12345)
for word in sys.argv[1:]:
    if word == "load":
        numba.core.compiler.compile_extra = refuse
        continue
    kind, number = word.split(":")
    if kind == "bits":
        for group, dtype in ((64, torch.float32), (1000, torch.float32), (64, torch.bfloat16)):
            for chosen in (None, seed):
                y = x.view(1, -1).to(dtype)
                found = cpu.group_pack(y, int(number), group, chosen)
                expected = groups.group_pack_reference(y, int(number), group, chosen)
                assert all(map(torch.equal, found, expected)), word
                back = cpu.group_unpack(*found, x.numel(), int(number), dtype)
                plain = groups.group_unpack_reference(*found, x.numel(), int(number)).to(dtype)
                assert torch.equal(back, plain), word
    else:
        y = x.to({"2": torch.float16, "4": torch.float32, "8": torch.float64}[number])
        found = cpu.sparse_pack(y[:, None], 1000, None, sparse.SUBSAMPLE, 1)
        assert all(map(torch.equal, found, sparse.sparse_pack_reference(y, 1000, True))), word
        back = cpu.sparse_unpack(*found, 5000, y.dtype)
        assert torch.equal(back, sparse.sparse_unpack_reference(*found, 5000)), word
"""

#: A program that prints whether a kernel gives the same results as plain torch.
ROUNDING = """
import torch
from efficient_ft.ops import rounding

assert rounding._kernels() is not None
x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
found, expected = x.bfloat16(), x.bfloat16()
rounding.round_to_bf16(x, found, 3)
rounding.round_reference(x, expected, 3)
print(torch.equal(found, expected))
"""

PACKAGE = REPOSITORY / "efficient_ft"
KERNELS = sorted(PACKAGE.rglob("numba_*.py"))


def run(folder: Path, *words: str, program: str = PROGRAM, source: Path = REPOSITORY) -> str:
    """Run a program in a separate process with the cache in `folder`, and return its output."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder), "PYTHONPATH": str(source)}
    command = [sys.executable, "-c", program, *words]
    ended = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    run(tmp_path, "bits:4", "bytes:4")
    before = sorted(tmp_path.rglob("*"))
    run(tmp_path, "load", "bytes:4", "bits:4")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["nbi", "nbc"])
def test_damaged_files_are_replaced(ending: str, tmp_path: Path) -> None:
    run(tmp_path, "bits:4")
    files = list(tmp_path.rglob(f"*pack*.{ending}"))
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[:20])
    run(tmp_path, "bits:4")
    run(tmp_path, "load", "bits:4")


@pytest.mark.slow
def test_a_kernel_that_cannot_be_stored_runs_and_is_reported_once(tmp_path: Path) -> None:
    refusing = "from numba.core.caching import IndexDataCacheFile\n\n\ndef full(*arguments):\n"
    refusing += "    raise OSError(28, 'No space left on device')\n\n\nIndexDataCacheFile.save = full\n"
    refusing += "import logging\nlogging.basicConfig(stream=sys.stdout, format='%(message)s')\n"
    printed = run(tmp_path, "bits:4", program=f"import sys\n{refusing}{PROGRAM}")
    assert printed.count("cannot be stored") == 1


@pytest.mark.slow
def test_code_is_compiled_again_after_a_function_in_another_file_has_changed(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "source/efficient_ft", ignore=shutil.ignore_patterns("__pycache__"))

    def equal() -> str:
        return run(tmp_path / "cache", program=ROUNDING, source=tmp_path / "source").strip()

    assert equal() == "True"
    shared = tmp_path / "source/efficient_ft/ops/storage/kernels/numba_job.py"
    text = shared.read_text(encoding="utf-8")
    shared.write_text(text.replace("0x846CA68B", "0x846CA68D"), encoding="utf-8")  # a factor of the random numbers
    assert equal() == "False"


def test_the_hash_depends_on_all_files_next_to_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from efficient_ft import ops
    from efficient_ft.ops.storage.kernels.compiler import sources_hash

    monkeypatch.setattr(ops, "__path__", [str(tmp_path)])
    found = []
    for file in ("with/numba_kernels.py", "without/__init__.py", "with/__init__.py", "other/numba_job.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("x = 1\n", encoding="utf-8")
        found.append(sources_hash.__wrapped__())
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_kernels_import_only_from_files_that_the_hash_includes() -> None:
    hashed, allowed = {file.parent for file in KERNELS}, {PACKAGE / "core/process_memory.py"}
    for file in KERNELS:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("efficient_ft"):
                place = REPOSITORY / node.module.replace(".", "/")
                place = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
                assert place.parent in hashed or place in allowed, f"{file}: {node.module}"


def variants(factory: ast.FunctionDef) -> Iterator[tuple[int, set[str]]]:
    """Yield the line and the names of the arguments of each call of `as_job` or `variant_of`."""
    for node in ast.walk(factory):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("as_job", "variant_of"):
            yield node.lineno, {argument.id for argument in node.args if isinstance(argument, ast.Name)}


def test_names_identify_the_variant() -> None:
    """The name of a job, or of a function that a job calls, contains the parameters of the surrounding function."""
    jobs = 0
    for file in KERNELS:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        factories = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        for factory in factories if file.name != "numba_job.py" else []:
            parameters = {argument.arg for argument in factory.args.args}
            for line, names in variants(factory):
                assert parameters <= names, f"{file}, line {line}: {parameters - names}"
                jobs += 1
            for inner in ast.walk(factory):
                if isinstance(inner, ast.FunctionDef) and inner is not factory and inner.decorator_list:
                    named = [ast.unparse(each) for each in inner.decorator_list]
                    assert any(each.startswith(("as_job(", "variant")) for each in named), f"{file}: {inner.name}"
    assert jobs > 20


@pytest.mark.exhaustive
def test_code_cached_by_several_processes_is_right_in_one(tmp_path: Path) -> None:
    # Each process numbers its compiled functions, so different variants can have the same symbols.
    for words in (["bits:8"], ["bits:4"], ["bits:3", "bits:2"], ["bytes:2"], ["bytes:8"], ["bytes:4"]):
        run(tmp_path, *words)
    every = ["bits:2", "bits:8", "bits:3", "bits:4", "bytes:8", "bytes:4", "bytes:2"]
    before = sorted(tmp_path.rglob("*"))
    run(tmp_path, "load", *every)
    run(tmp_path, "load", *reversed(every))
    assert sorted(tmp_path.rglob("*")) == before, "each start leaves further files"
