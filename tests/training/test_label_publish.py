"""Tests of efficient-ft export, predict, report and study for several labels and numbers per image."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from efficient_ft.cli.commands import report
from efficient_ft.record.study import Records
from efficient_ft.training.publish.folder import ExportOptions, export_run
from efficient_ft.training.run import run
from tests.cli.program import REPOSITORY
from tests.training.test_label_runs import config_of, predicted, root

__all__ = ["root"]

KINDS = [("multilabel", "tags"), ("regression", ["price", "loss"])]


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """Return the probability of each label, or the value of each target."""
    if "values" in record:
        return dict(record["values"])
    return {one["class"]: one["probability"] for one in record["top"]}


@pytest.mark.slow
@pytest.mark.usefixtures("without_cost")
@pytest.mark.parametrize(("task", "label"), KINDS)
def test_an_exported_file_predicts_the_same(
    root: Path, tmp_path: Path, task: str, label: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    run(config_of(root, task, label), folder)
    (expected,) = predicted(folder, root / "0.png", capsys, "--json")
    for to in ("onnx", "pt2"):
        out, printed = export_run(ExportOptions(folder, to))
        assert "the logits differ by at most" in printed[1]
        (found,) = predicted(out, root / "0.png", capsys, "--json")
        assert found.get("labels") == expected.get("labels")
        assert numbers(found) == pytest.approx(numbers(expected), rel=1e-4)
    report.main([str(folder)])
    assert list((folder / "report").glob("*.html"))


@pytest.mark.slow
@pytest.mark.parametrize(("task", "label"), KINDS)
def test_a_study(root: Path, tmp_path: Path, task: str, label: Any) -> None:
    settings = [f"task={task}", "data=labels", f"data.root={root}", "data.labels.file=labels.csv"]
    settings += [f"data.labels.label={json.dumps(label)}", "model=vit_digits", "data.batch_size=16"]
    settings += ["optim.warmup_steps=1", "trainer.epochs=1", "cost.baseline=none", "cost.steps=1"]
    about: dict[str, Any] = {"title": "tiny", "about": "A tiny study.", "settings": settings, "seeds": [0]}
    about |= {"tune": {"setting": "optim.lr", "values": [1e-3], "seed": 0}, "rows": {"head": ["method=head"]}}
    (tmp_path / "study").mkdir()
    (tmp_path / "study/study.yaml").write_text(yaml.safe_dump(about))
    # A narrow terminal breaks the header of a column into several lines.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, REPOSITORY / "train.py", "study", "study"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    records = Records(tmp_path / "study")
    (only,) = records.seed_runs(["head"])
    assert records.find(only) is not None
    metric = {"multilabel": "mAP", "regression": "R²"}[task]
    assert f"test {metric}" in done.stdout
