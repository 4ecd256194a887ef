"""A real run that takes seconds: a narrow vit_digits on the handwritten digits, with every source of chance on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from efficient_ft.config import Config, check


@pytest.fixture(autouse=True, scope="session")
def _quick():
    """One thread; rows and looks at the clock at a pace that fits runs of 22 steps."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("efficient_ft.training.callbacks.RECORD_EVERY", 4)
        yield
    torch.set_num_threads(before)


def plain_config(**changes: Any) -> dict[str, Any]:
    """A configuration as plain containers; `changes` are dotted keys with `__` for the dot."""
    plain: dict[str, Any] = {
        "model": {
            "name": "vit_digits",
            "pretrained": False,
            "frozen_bn": False,
            "drop_rate": 0.1,
            "drop_path_rate": 0.2,
            "kwargs": {"depth": 2, "embed_dim": 16, "num_heads": 2},
        },
        "data": {
            "name": "digits",
            "batch_size": 128,
            "num_workers": 0,
            "augment": {"scale": [0.6, 1.0], "flip": False},
        },
        "method": {"full": {}},
        "optim": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.05, "warmup_steps": 5, "grad_clip_norm": 1.0},
        "trainer": {"epochs": 2, "accelerator": "cpu", "progress": False},
        "cost": {"compare_full": False, "steps": 1},
    }
    for key, value in changes.items():
        *path, last = key.split("__")
        inner = plain
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return plain


@pytest.fixture(scope="session")
def configuration() -> Callable[..., Config]:
    return lambda **changes: check(plain_config(**changes))


@pytest.fixture(scope="session")
def finished(
    tmp_path_factory: pytest.TempPathFactory, configuration: Callable[..., Config]
) -> tuple[Path, Config, dict]:
    """One finished run: folder, configuration, results. Not to be changed; copy it."""
    from efficient_ft.training.run import run

    folder = tmp_path_factory.mktemp("run") / "finished"
    config = configuration(cost__compare_full=True)
    return folder, config, run(config, folder)
