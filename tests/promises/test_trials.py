"""Tests that run every trial of the short form of ``efficient-ft selftest``: ``pytest -m promises``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.promises.children import prepare_environment
from tests.promises.promises import PROMISES
from tests.promises.trial import Trial

pytestmark = [
    pytest.mark.promises,
    pytest.mark.skipif(sys.platform == "win32", reason="needs signals and forked processes"),
]

TRIALS = [
    pytest.param(trial, id=f"{promise.number}: {trial.name}") for promise in PROMISES for trial in promise.trials(False)
]


@pytest.fixture(autouse=True, scope="module")
def _environment() -> None:
    prepare_environment()


@pytest.mark.parametrize("trial", TRIALS)
def test_a_promise_holds(trial: Trial, tmp_path: Path) -> None:
    trial.function(tmp_path, *trial.arguments)
