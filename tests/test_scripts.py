"""Tests that the programs in `scripts/` can be loaded, and that they summarize the records of the repository."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
SCRIPTS = REPOSITORY / "scripts"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Execute a script without its main function, and return its names."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return runpy.run_path(str(SCRIPTS / f"{name}.py"))


@pytest.mark.parametrize("name", sorted(path.stem for path in SCRIPTS.glob("*.py")))
def test_every_script_can_be_loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(name, monkeypatch)["__doc__"]


def test_time_to_accuracy_summarizes_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    record = json.loads((REPOSITORY / "benchmarks" / "time_to_accuracy_cpu.json").read_text(encoding="utf-8"))
    recipes = record["networks"]["deit_tiny"]["recipes"]
    summary = load("time_to_accuracy", monkeypatch)["summary"]
    rows = {line.split("  ")[0].strip(): line for line in summary(recipes).splitlines()}
    last = recipes["full"]["runs"][0]["curve"][-1][1]
    assert f"seconds to {0.95 * last:.1%}" in summary(recipes).splitlines()[0]
    assert f"{last:.2%}" in rows["full"]
    assert "not reached" in rows["bsr"]
    assert "no run of full" in summary({"bsr": recipes["bsr"]})
