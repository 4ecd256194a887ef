"""Tests of the deferred import of torchmetrics, which loads the complete package on the first use of another name."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

PROGRAM = """
import json, sys
from efficient_ft.core.deferred_imports import defer_torchmetrics
defer_torchmetrics()
import lightning.pytorch, torchmetrics
import efficient_ft.task.metrics
assert torchmetrics.__version__ and not hasattr(torchmetrics, "__wrapped__")
first = "torchmetrics.functional" in sys.modules
same = torchmetrics.Metric is sys.modules["torchmetrics.metric"].Metric
from torchmetrics import Accuracy
print(json.dumps([first, same, "torchmetrics.functional" in sys.modules, issubclass(Accuracy, torchmetrics.Metric)]))
"""


@pytest.mark.slow
def test_lightning_imports_only_two_classes_of_torchmetrics() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [False, True, True, True]
