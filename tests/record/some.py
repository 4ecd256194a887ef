"""Small, complete contents of the files of a finished run. This module does not import torch."""

from __future__ import annotations

from typing import Any

from efficient_ft.record.formats import FORMAT
from efficient_ft.record.results import Results


def some_results() -> Any:
    """Return the contents of a results.json."""
    step = {
        "executed": {"forward_flops": 1.0, "backward_flops": 2.0, "saved_bytes": 3},
        "measured": {"step_seconds": None, "peak_bytes": 4},
    }
    results: Results = {
        "format": FORMAT,
        "accuracy": {"best": 0.5, "last": 0.25, "split": "val", "test": None},
        "cost": {**step, "baseline": None},  # type: ignore[typeddict-item]
        "totals": {
            "steps": 4,
            "images": 8,
            "flops": 24.0,
            "batches": 4,
            "counted_batches": 1,
            "seconds": 2.5,
            "step_seconds": 0.5,
            "joules": None,
            "energy_source": None,
        },
        "trainable_parameters": 1,
        "total_parameters": 2,
        "methods": {"full": {"touched": ["a"], "skipped": {}, "notes": []}},
        "data": {"splits": {"train": 1}, "skipped": 0, "accuracy": {"val": 0.5}},
        "seed": 1,
        "arguments": ["method=full"],
        "config": {"seed": 1},
        "environment": {"torch": "2"},
    }
    return results


#: Contents of study.yaml.
STUDY = """
title: Digits
vary: [optim.warmup_steps]
settings: [model=vit_digits, data=digits, trainer.max_steps=2, trainer.limit_eval_batches=1, cost.baseline=none]
tune: {setting: optim.lr, values: [1.0e-3, 1.0e-2], seed: 0}
seeds: [0, 1]
rows:
  full: [method=full]
  head: [method=head, optim.warmup_steps=0]
"""
