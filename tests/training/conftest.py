"""Fixtures of the training tests: short runs of a narrow vit_digits with all sources of randomness enabled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from efficient_ft.config import Config, check
from tests.training.runs import plain_config

__all__ = ["plain_config"]


@pytest.fixture(autouse=True, scope="session")
def _often():
    """Record the training loss every 4 steps, because the runs have 22 steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("efficient_ft.training.callbacks.recorder.RECORD_EVERY", 4)
        patch.setattr("efficient_ft.training.finish.COST_SECONDS", 120.0)
        yield


@pytest.fixture(scope="session")
def configuration() -> Callable[..., Config]:
    return lambda **changes: check(plain_config(**changes))


@pytest.fixture(scope="session")
def finished(
    tmp_path_factory: pytest.TempPathFactory, configuration: Callable[..., Config]
) -> tuple[Path, Config, dict[str, Any]]:
    """A finished run: folder, configuration and results. Tests must copy the folder before they change it."""
    from efficient_ft.training.run import run

    folder = tmp_path_factory.mktemp("run") / "finished"
    config = configuration(cost__baseline="full")
    return folder, config, run(config, folder)


@pytest.fixture
def without_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the cost report of a run with constants."""
    step = {
        "executed": {"forward_flops": 1.0, "backward_flops": 2.0, "saved_bytes": 3.0, "step_peak_bytes": 6},
        "measured": {"step_seconds": 4.0, "peak_bytes": 5.0},
    }
    monkeypatch.setattr("efficient_ft.training.finish.cost_report", lambda *args: {**step, "baseline": None})


PLANES = {"left": 0, "middle": 1, "right": 2}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two image folders: `colours` has 2 classes; `planes` has 3, given by the position of a bright stripe."""
    root = tmp_path_factory.mktemp("tasks")
    chance = np.random.default_rng(0)

    def save(path: Path, pixels: np.ndarray) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        noisy = pixels + chance.integers(0, 60, pixels.shape)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path)

    for split, count in (("train", 12), ("val", 4)):
        for i in range(count):
            for channel, name in enumerate(("red", "green")):
                pixels = np.zeros((32, 32, 3))
                pixels[:, :, channel] = 180
                save(root / "colours" / split / name / f"{i}.png", pixels)
            for name, third in PLANES.items() if i < 5 else ():
                pixels = np.zeros((32, 32, 3))
                pixels[:, third * 10 : third * 10 + 10] = 180
                save(root / "planes" / split / name / f"{i}.png", pixels)
    return root
