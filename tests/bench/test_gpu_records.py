"""Tests of scripts/gpu_records.py on a CPU with a very small network."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from efficient_ft.bench.tables import report_text
from tests.conftest import REPOSITORY

SCRIPT = REPOSITORY / "scripts" / "gpu_records.py"


def measure(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> None:
    words = [str(SCRIPT), "--device", "cpu", "--small", "--folder", str(folder), *options]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.mark.slow
def test_torchs_own_ways_are_measured_next_to_methods(monkeypatch, tmp_path, capsys):
    measure(monkeypatch, tmp_path, "--only", "alternatives_vit_base_bf16")
    report = json.loads((tmp_path / "alternatives_vit_base_bf16_cpu.json").read_text(encoding="utf-8"))
    recipes = report["recipes"]
    assert {"full", "checkpointing", "low_bit", "offloaded", "compiled", "budget 0.3"} <= set(recipes)
    saved = {name: record["executed"]["saved_bytes"] for name, record in recipes.items()}
    assert saved["offloaded"] == 0
    assert 0 < saved["budget 0.3"] < saved["compiled"]
    assert all(record["baseline"] == "full" and record["dtype"] == "bf16" for record in recipes.values())
    assert "budget 0.3" in report_text(report)
    measure(monkeypatch, tmp_path, "--only", "alternatives_vit_base_bf16")
    assert "alternatives_vit_base_bf16_cpu.json: exists" in capsys.readouterr().out


@pytest.mark.slow
def test_predictions_continue_where_the_time_ended(monkeypatch, tmp_path, capsys):
    measure(monkeypatch, tmp_path, "--only", "plans", "--plans", "1")
    first = json.loads((tmp_path / "plans_cpu.json").read_text(encoding="utf-8"))["cases"]
    assert len(first) == 1
    assert 0.2 < first[0]["predicted_bytes"] / first[0]["measured_bytes"] < 5
    measure(monkeypatch, tmp_path, "--only", "plans", "--plans", "2", "--budget-seconds", "0")
    assert "Missing records" in capsys.readouterr().out


def test_nothing_is_measured_after_the_time_is_over(monkeypatch, tmp_path, capsys):
    measure(monkeypatch, tmp_path, "--budget-seconds", "0")
    printed = capsys.readouterr().out
    assert "Missing records: memory_vit_base_bf16_cpu, step_efficientformer_l1_bf16_cpu" in printed
    assert list(tmp_path.iterdir()) == []
