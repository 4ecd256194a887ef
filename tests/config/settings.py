"""A configuration as plain settings, and changes to it."""

from __future__ import annotations

import copy
from typing import Any

PLAIN: dict[str, Any] = {
    "model": {"name": "resnet18"},
    "data": {"name": "cifar10", "root": "./data"},
    "method": {"full": None},
    "optim": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.0, "grad_clip_norm": None},
    "trainer": {"epochs": 2},
}


def with_settings(**changes: Any) -> dict[str, Any]:
    """PLAIN with ``group__key=value`` put in."""
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
