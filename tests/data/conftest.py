"""Configurations of the data part, and folders of small real images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pictures import save

from efficient_ft.config import DataConfig


@pytest.fixture
def data_config() -> Callable[..., DataConfig]:
    def make(name: str, **settings: Any) -> DataConfig:
        return DataConfig(**{"name": name, "num_workers": 0, "batch_size": 4, "download": False, **settings})

    return make


@pytest.fixture
def folders(tmp_path: Path) -> Callable[..., Path]:
    """folders(train={"a": 5, "b": 4}, test={...}) or folders(a=5, b=4): class folders with that many JPEGs."""

    def make(**layout: Any) -> Path:
        root = tmp_path / "images"
        seed = 0
        parts = layout.items() if isinstance(next(iter(layout.values())), dict) else [("", layout)]
        for part, classes in parts:
            for name, count in classes.items():
                (root / part / name).mkdir(parents=True, exist_ok=True)
                for i in range(count):
                    seed += 1
                    save(root / part / name / f"{i}.jpg", seed)
        return root

    return make
