"""Shared fixtures: one thread per test process, no network, and the optional folder of real images."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

# Before torch is imported, and inherited by every subprocess that a test starts.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest
import torch
from hypothesis import settings

# The same examples every time, so that a failure comes from a change. --hypothesis-profile=random draws new ones.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("random", derandomize=False, deadline=None)
settings.load_profile("same")

torch.set_num_threads(1)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # GPU kernels run as Python; to be set before Triton is imported

REPOSITORY = Path(__file__).resolve().parent.parent


def unwrapped(text: str) -> str:
    """Join the lines into which `core.terminal.show` broke a message: those that begin with spaces."""
    return re.sub(r"\n +(?=\S)", " ", text)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each process of ``pytest -n`` one long piece of the suite, so that what is made for a file is made once."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the parameters of `vary_one` and `first` that the default run leaves out."""
    for item in items:
        indices = getattr(getattr(item, "callspec", None), "indices", {})
        if (vary := item.get_closest_marker("vary_one")) is not None:
            axes = [mark.args[0] for mark in item.iter_markers("parametrize")]
            names = [axis.partition(",")[0].strip() if isinstance(axis, str) else axis[0] for axis in axes]
            varied = sum(indices[name] > 0 for name in names)
            if varied > 1:
                item.add_marker("exhaustive")
            elif varied == 1 and vary.kwargs.get("slow"):
                item.add_marker("slow")
        for mark in item.iter_markers("first"):
            count, others = mark.args
            name = mark.kwargs.get("of")
            if (indices[name] if name else max(indices.values())) >= count:
                item.add_marker(others)


@pytest.fixture(autouse=True)
def without_the_seed_of_earlier_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run leaves its seed in the environment, and Lightning seeds the processes that a later test starts with it."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that is wide enough for every table in one line per row."""
    monkeypatch.setenv("COLUMNS", "1000")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The optional folder of real images next to the checkout; tests that need it are skipped without it."""
    folder = Path(os.environ.get("EFFICIENT_FT_SHARED", REPOSITORY.parent / "shared")) / "data"
    if not folder.is_dir():
        pytest.skip(f"needs the optional folder of real images ({folder})")
    return folder
