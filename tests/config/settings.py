"""Plain settings of a configuration, and changes to the settings."""

from __future__ import annotations

import copy
from typing import Any

PLAIN: dict[str, Any] = {
    "model": {"name": "resnet18"},
    "data": {"name": "cifar10", "root": "./data"},
    "method": {"full": None},
    "optim": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.0, "grad_clip_norm": None},
    "trainer": {"epochs": 2, "precision": "fp32"},
}


def with_settings(**changes: Any) -> dict[str, Any]:
    """Return a copy of PLAIN with the given changes, written as ``group__key=value``."""
    plain = copy.deepcopy(PLAIN)
    for name, value in changes.items():
        *groups, key = name.split("__")
        node = plain
        for group in groups:
            node = node.setdefault(group, {})
        node[key] = value
    return plain


def two_tasks(**changes: Any) -> dict[str, Any]:
    return with_settings(tasks={"a": {"name": "cifar10"}, "b": {"name": "pets"}}, **changes)
