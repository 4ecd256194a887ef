"""Tests of the modules that an import loads."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

MOST_BYTES = 20 * 2**20

_SCRIPT = """
import gc, json, sys
import torch, timm

def resident():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * 4096 if sys.platform == "linux" else 0

before, bytes_before = set(sys.modules), resident()
from efficient_ft.methods import LBPWHT, BSRMoE, LoRA
bytes_after = resident()
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}

messages = {}
for library in ("lightning", "transformers"):
    sys.modules[library] = None
    try:
        __import__(f"efficient_ft.integrations.{library}")
    except ImportError as error:
        messages[library] = str(error)
print(json.dumps({"loaded": sorted(loaded), "bytes": bytes_after - bytes_before, "messages": messages}))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Return the modules that importing a method loads in addition to torch and timm, in a separate process."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_method_loads_nothing_heavy(found: dict[str, Any]) -> None:
    """Importing a method loads no package beyond those that torch and timm import."""
    assert found["loaded"] == ["efficient_ft"]


@pytest.mark.slow
def test_a_method_takes_little_memory(found: dict[str, Any]) -> None:
    assert found["bytes"] < MOST_BYTES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "install"),
    [("lightning", "pip install 'lightning>="), ("transformers", "'efficient-ft[transformers]'")],
)
def test_a_missing_library_is_named_with_what_to_install(library: str, install: str, found: dict[str, Any]) -> None:
    message = found["messages"][library]
    assert message.startswith(f"efficient_ft.integrations.{library} requires the package")
    assert install in message


@pytest.mark.parametrize(("library", "other"), [("lightning", "transformers"), ("transformers", "lightning")])
def test_a_callback_loads_its_own_library_alone(library: str, other: str) -> None:
    """A callback's source imports only its own library. Importing Lightning itself loads parts of transformers."""
    folder = ROOT / "efficient_ft" / "integrations"
    imported = set()
    for file in (f"{library}.py", "session.py", "__init__.py"):
        for node in ast.walk(ast.parse((folder / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module or "")
    packages = {name.partition(".")[0] for name in imported}
    assert library in packages
    assert other not in packages
    assert f"efficient_ft.integrations.{other}" not in imported
