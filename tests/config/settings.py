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


def with_changes(plain: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Change `plain` in place by dotted keys, with ``__`` for the dot, and return `plain`."""
    for key, value in changes.items():
        *path, last = key.split("__")
        inner = plain
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return plain


def with_settings(**changes: Any) -> dict[str, Any]:
    """Return a copy of PLAIN with the given changes, written as ``group__key=value``."""
    return with_changes(copy.deepcopy(PLAIN), **changes)


def two_tasks(**changes: Any) -> dict[str, Any]:
    return with_settings(tasks={"a": {"name": "cifar10"}, "b": {"name": "pets"}}, **changes)
