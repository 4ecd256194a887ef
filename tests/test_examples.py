"""Tests that the programs in `examples/` run and give the expected results."""

from __future__ import annotations

import logging
import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import timm

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def main_of(name: str, **arguments: Any) -> Any:
    """Run the `main` function of an example and return its result."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](**arguments)


@pytest.mark.slow
def test_own_loop(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_of("own_loop") > 0.5, "it learns"
    shown = capsys.readouterr().out
    assert "alast: 3 of 4 blocks are trained in each step" in shown
    assert "step 20: loss" in shown


def test_lightning_module(capsys: pytest.CaptureFixture[str]) -> None:
    losses = main_of("lightning_module")
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    assert "moe: 4 experts replace" in capsys.readouterr().out


@pytest.mark.slow
def test_lightning_module_in_two_processes() -> None:
    command = [sys.executable, EXAMPLES / "lightning_module.py", "--devices", "2"]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("moe: 4 experts replace") == 1, "one process reports"
    assert "2 process(es), 2 steps" in done.stdout


@pytest.mark.slow
def test_huggingface_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    weights = main_of("huggingface_trainer", steps=2)
    plain = timm.create_model("resnet10t", channels=(16, 32, 64, 128), num_classes=10)
    plain.load_state_dict(weights)
    shown = capsys.readouterr().out
    assert "4 steps" in shown
    assert "BatchNorm statistics are unchanged" in shown
    assert shown.index("bsr: ") < shown.index("back_razor: "), "the order of application, not that of the list"


@pytest.mark.slow
def test_count_cost(capsys: pytest.CaptureFixture[str]) -> None:
    counts = main_of("count_cost", batch_size=2)
    full, smallest = counts["full"], counts["BSR, Back Razor"]
    assert smallest.saved_bytes < full.saved_bytes / 10
    assert counts["last stage, LBP-WHT"].backward_flops < counts["last stage"].backward_flops
    assert "BSR, Back Razor" in capsys.readouterr().out


def test_every_example_is_run() -> None:
    programs = {file.stem for file in EXAMPLES.glob("*.py")}
    tests = [name.removeprefix("test_") for name in globals() if name.startswith("test_")]
    assert all(any(test.startswith(program) for test in tests) for program in programs)
