"""Tests of runs with ``trainer.compile=true``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from efficient_ft.config import check
from efficient_ft.methods.compiled import compile_blocks
from efficient_ft.training.callbacks import compilation
from efficient_ft.training.run import run
from tests.training.runs import assert_same_run, interrupted_at, plain_config, rows_of


class Backend:
    """Backend that records the batch sizes of the calls of compiled blocks."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        def called(*args: Any) -> Any:
            self.batches.append(next(len(x) for x in args if x.dim() == 3))
            return graph(*args)

        return called


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Replace the compiler by a backend that runs the traced operations."""
    torch.compiler.reset()
    backend: Any = Backend()
    monkeypatch.setattr(compilation, "compile_blocks", partial(compile_blocks, backend=backend))
    return backend


@pytest.mark.slow
def test_a_compiled_run_has_the_same_results(
    backend: Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = run(check(plain_config()), tmp_path / "plain")
    assert not backend.batches
    compiled = run(check(plain_config(trainer__compile=True)), tmp_path / "compiled")
    printed = capsys.readouterr().out
    assert "torch.compile (trainer.compile=true): 2 of 2 blocks compiled. The first steps" in " ".join(printed.split())
    assert compiled["compiled"] == {"blocks": ["blocks.0", "blocks.1"], "eager": {}}
    assert "compiled" not in plain
    assert compiled["accuracy"] == plain["accuracy"]
    assert rows_of(tmp_path / "compiled") == rows_of(tmp_path / "plain")
    assert compiled["totals"]["flops"] == plain["totals"]["flops"]
    assert compiled["cost"]["executed"] == plain["cost"]["executed"]
    assert set(backend.batches) == {128}  # the last batch of an epoch is smaller


@pytest.mark.slow
def test_a_resumed_compiled_run_equals_an_uninterrupted_one(backend: Backend, tmp_path: Path) -> None:
    config = check(plain_config(trainer__compile=True))
    run(config, tmp_path / "whole")
    interrupted_at(14, config, tmp_path / "resumed")
    run(config, tmp_path / "resumed")
    assert_same_run(tmp_path / "resumed", tmp_path / "whole")
    assert backend.batches


@pytest.mark.slow
def test_a_run_resumed_before_a_smaller_batch_compiles_the_same_batches(backend: Backend, tmp_path: Path) -> None:
    config = check(plain_config(trainer__compile=True))
    steps = run(config, tmp_path / "whole")["totals"]["steps"]
    whole, backend.batches = backend.batches, []
    interrupted_at(steps - 1, config, tmp_path / "resumed")  # before the last batch, which is smaller
    run(config, tmp_path / "resumed")
    assert backend.batches == whole
    assert_same_run(tmp_path / "resumed", tmp_path / "whole")


@pytest.mark.slow
def test_a_run_without_compilable_blocks_prints_the_reason(
    backend: Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes: dict[str, Any] = {"method": {"compact": {}}, "trainer__max_steps": 2}
    results = run(check(plain_config(**changes, trainer__compile=True)), tmp_path)
    assert results["compiled"] == {"blocks": [], "eager": {"packed activations": ["blocks.0", "blocks.1"]}}
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "torch.compile (trainer.compile=true): 0 of 2 blocks compiled. Not compiled: blocks 0–1 (packed activations)."
        in printed
    )


@pytest.mark.slow
def test_a_run_whose_batches_are_all_counted_is_not_compiled(
    backend: Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lisa = {"lisa": {"num_layers": 1, "interval": 1, "train_embeddings": False}}
    results = run(check(plain_config(method=lisa, trainer__max_steps=2, trainer__compile=True)), tmp_path)
    reason = "the FLOPs of every batch are counted"
    assert results["compiled"] == {"blocks": [], "eager": {reason: ["blocks.0", "blocks.1"]}}
    assert f"Not compiled: blocks 0–1 ({reason})." in " ".join(capsys.readouterr().out.split())
    assert not backend.batches
