"""Tests of the load measurements at a small scale. Each measurement runs the real command and removes its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from efficient_ft.config import check
from efficient_ft.core.errors import UserError
from tests.promises import load
from tests.record.some import some_results
from tests.training.runs import REPOSITORY, plain_config


@pytest.fixture(autouse=True)
def this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


def test_every_copy_of_a_run_is_collected(tmp_path: Path) -> None:
    run = tmp_path / "original"
    run.mkdir()
    config = check(plain_config()).model_dump(mode="json")
    (run / "results.json").write_text(json.dumps({**some_results(), "config": config}))
    (run / "config.yaml").write_text(json.dumps(config))
    assert load.collect_many(tmp_path, run, runs=30)["seconds"] > 0
    assert not (tmp_path / "runs").exists()
    (run / "results.json").write_text("{}")
    with pytest.raises((UserError, KeyError)):
        load.collect_many(tmp_path, run, runs=2)


def test_images_are_spread_over_classes(tmp_path: Path) -> None:
    load._write_images(tmp_path, 7)
    assert sorted(file.relative_to(tmp_path).parts[0] for file in tmp_path.rglob("*.png")) == (
        ["class_0000"] * 4 + ["class_0001"] * 3
    )


def test_a_run_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"ended with status 2: .*optim\.lr must be"):
        load.many_steps(tmp_path, 1000, ["method=full", "optim.lr=no"])
