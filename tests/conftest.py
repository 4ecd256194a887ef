"""Shared fixtures. Each test process uses one thread and no network, and the folder of real images is optional."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# These variables must be set before the import of torch. Subprocesses of tests inherit them.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest
import torch
from hypothesis import settings

from efficient_ft.record.environment import cpu_name

# Each run tests the same examples, so a new failure indicates a change. --hypothesis-profile=random draws new examples.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("random", derandomize=False, deadline=None)
settings.load_profile("same")

torch.set_num_threads(1)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # required before the import of Triton

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True, scope="session")
def without_measurements_of_the_processor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Store a relative time of bf16 (`training.precision`), so that neither tests nor subprocesses measure it."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "efficient_ft").mkdir()
    (folder / "efficient_ft" / "precision.json").write_text(
        json.dumps({f"{cpu_name()}, torch {torch.__version__}, 1 thread": 0.5})
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield


def unwrapped(text: str) -> str:
    """Join the lines into which `core.terminal.show` wraps a message. Continuation lines begin with spaces."""
    return re.sub(r"\n +(?=\S)", " ", text)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each process of ``pytest -n`` a contiguous part of the tests, so that module fixtures run once."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


def _positions(item: pytest.Item, seen: dict[Any, dict[Any, int]]) -> dict[str, int]:
    """Return the position of a test's values in each of its parametrizations, by the first name of the parametrization.

    Args:
        item: Test with or without parameters.
        seen: Positions of the values of each parametrization so far. The function updates the dict.
    """
    positions = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if not isinstance(mark.args[0], str) else mark.args[0].replace(" ", "").split(",")
        function = item.nodeid.partition("[")[0]
        values = seen.setdefault((function, names[0]), {})
        key = tuple(id(item.callspec.params[name]) for name in names)  # type: ignore[attr-defined]
        positions[names[0]] = values.setdefault(key, len(values))
    return positions


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the parameters of `vary_one` and `first` that the default test run omits."""
    seen: dict[Any, dict[Any, int]] = {}
    for item in items:
        vary = item.get_closest_marker("vary_one")
        firsts = list(item.iter_markers("first"))
        if vary is None and not firsts:
            continue
        positions = _positions(item, seen)
        varied = sum(position > 0 for position in positions.values())
        if vary is not None and varied > 1:
            item.add_marker("exhaustive")
        elif vary is not None and varied == 1 and vary.kwargs.get("slow"):
            item.add_marker("slow")
        for mark in firsts:
            count, others = mark.args
            position = positions[mark.kwargs["of"]] if "of" in mark.kwargs else max(positions.values())
            if position >= count:
                item.add_marker(others)


@pytest.fixture(autouse=True)
def without_the_seed_of_earlier_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the seed that an earlier run stores in the environment, because Lightning seeds new processes with it."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a terminal width at which every table row fits into one line."""
    monkeypatch.setenv("COLUMNS", "1000")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the optional folder of real images next to the checkout, or skip the test if the folder is missing."""
    folder = Path(os.environ.get("EFFICIENT_FT_SHARED", REPOSITORY.parent / "shared")) / "data"
    if not folder.is_dir():
        pytest.skip(f"needs the optional folder of real images ({folder})")
    return folder
