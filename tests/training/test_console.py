"""Tests of printed numbers and tables."""

from __future__ import annotations

import copy

import pytest

from efficient_ft.core.text import table
from efficient_ft.training.output.console import cost_rows, results_text


def test_columns_are_aligned():
    assert table([["a", "b"], ["long", "1"]]).splitlines() == ["a     b", "───────", "long  1"]


@pytest.mark.slow
def test_costs_that_were_not_probed_have_no_column(finished):
    cost = finished[2]["cost"]
    assert cost_rows(cost, "full", 4)[0] == ["cost", "full"], "not compared with itself"
    cost = {**cost, "executed": {**cost["executed"], "backward_flops": 1e6}}
    assert cost_rows(cost, "head", 4)[0] == ["cost", "head", "full", "ratio"]
    counted = {**cost, "baseline": None, "measured": {**cost["measured"], "step_seconds": None}}
    header, *rows = cost_rows(counted, "head", 4)
    assert header == ["cost", "head"]
    assert not any("step time" in row[0] for row in rows)


@pytest.mark.slow
def test_the_text_at_the_end_says_what_is_unusual(finished, tmp_path):
    results = copy.deepcopy(finished[2])
    shown = results_text(results, tmp_path)
    assert "vit_digits on digits with full" in shown
    assert "started from random weights" in shown
    assert "corrupt" not in shown
    assert "test  " in shown
    assert "limit_eval_batches" not in shown
    results["config"]["trainer"]["limit_eval_batches"] = 1
    limited = results_text(results, tmp_path)
    count = results["data"]["splits"]["test"]
    assert f"128 of {count} test images: trainer.limit_eval_batches=1)" in limited
    results["accuracy"]["split"] = "test"
    results["data"]["skipped"] = 3
    shown = results_text(results, tmp_path)
    assert "chosen on the test split" in shown
    assert "3 unusable samples were left out" in shown
