"""The shared fixture of the tests of plans."""

from __future__ import annotations

import pytest

from efficient_ft.planning import planner
from tests.planning.common import few


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "candidates", few(["full", "full+low_bit", "full+checkpointing, steps in backward"]))
    monkeypatch.setattr(planner, "resident_bytes", lambda: 10**9)  # other tests increase the process memory
    monkeypatch.setattr(planner, "memory_limit_bytes", lambda: 10**15)
