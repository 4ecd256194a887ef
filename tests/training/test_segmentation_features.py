"""Tests of segmentation runs on stored features: results equal those of a run that decodes and computes everything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from efficient_ft.config import Config, check
from efficient_ft.training.output import checkpoint
from efficient_ft.training.run import run
from tests.data.mask_pictures import write_folder
from tests.training.test_features import (
    assert_interruptions_change_nothing,
    assert_stored_features_change_nothing,
)
from tests.training.test_segmentation_run import plain_segmentation

pytestmark = pytest.mark.usefixtures("without_cost")
TRAIN, VAL = 16, 6


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("features") / "shapes", {"train": TRAIN, "val": VAL, "test": 2})


@pytest.fixture
def small(images: Path, tmp_path: Path) -> Callable[..., Config]:
    def configured(**changes: Any) -> Config:
        settings = {
            "model": {"frozen_bn": "frozen_part"},
            "method": {"last_stage": {}},
            "trainer__epochs": 2,
            "trainer__cache_features": "on",
            "trainer__cache_folder": str(tmp_path / "store"),
            **changes,
        }
        return check(plain_segmentation(images, **settings))

    return configured


def weights(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = checkpoint.read(folder / checkpoint.NAME)["state_dict"]
    return state


@pytest.mark.slow
def test_with_a_view_for_every_epoch_in_fp32_a_run_is_the_one_without_bit_for_bit(
    tmp_path: Path, small: Callable[..., Config]
) -> None:
    """Masks are stored as well, so a run that reads all features decodes no training image."""
    assert_stored_features_change_nothing(tmp_path, small, TRAIN, VAL)


@pytest.mark.slow
def test_interrupted_it_continues_with_the_features_that_are_there(
    tmp_path: Path, small: Callable[..., Config]
) -> None:
    assert_interruptions_change_nothing(tmp_path, small, (2, 5), trainer__epochs=3, trainer__views=1)


@pytest.mark.slow
def test_evaluated_images_of_another_size_are_computed(
    tmp_path: Path, small: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "shapes", {"train": TRAIN, "val": VAL, "test": 2})
    for part in ("images", "masks"):
        path = sorted((folder / "val" / part).iterdir())[0]
        with Image.open(path) as opened:
            larger = opened.resize((160, 128), Image.Resampling.NEAREST)
        larger.save(path)
    settings: dict[str, Any] = {"data": {"root": str(folder), "eval_batch_size": 1}, "trainer__cache_dtype": "fp32"}
    plain = run(small(**settings, trainer__cache_features="off"), tmp_path / "plain")
    results = run(small(**settings, trainer__views=2), tmp_path / "stored")
    assert results["accuracy"] == plain["accuracy"]
    assert results["features"]["read"] == VAL - 1
    assert "Features of val images are stored only for the most frequent size." in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.slow
def test_live_batch_norm_in_the_frozen_part_is_named(
    tmp_path: Path, small: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    run(small(model={"frozen_bn": False}), tmp_path / "run")
    printed = " ".join(capsys.readouterr().out.split())
    assert "encoder.model.bn1 computes batch statistics, unless its statistics are frozen" in printed
    assert "(model.frozen_bn=frozen_part)" in printed


@pytest.mark.slow
def test_only_the_statistics_of_the_frozen_part_are_frozen(tmp_path: Path, small: Callable[..., Config]) -> None:
    run(small(trainer__cache_features="off"), tmp_path / "run")
    moved = {
        name: not torch.equal(value, torch.zeros_like(value))
        for name, value in weights(tmp_path / "run").items()
        if name.endswith("running_mean")
    }
    assert any(moved.values())
    frozen = {name for name, changed in moved.items() if not changed}
    assert frozen
    assert all("encoder" in name for name in frozen)
    assert all(moved[name] for name in moved if "decoder" in name)
