"""Tests of runs with class weights or a balanced sampler, and of the results of the classes, on images in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from efficient_ft.config import check
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.data.digits import load_digits
from efficient_ft.record.class_results import confusion_matrix
from efficient_ft.record.results import read_results
from efficient_ft.training.evaluate import evaluate
from efficient_ft.training.output import export
from efficient_ft.training.output.class_table import matrix_picture, matrix_rows
from efficient_ft.training.run import run
from tests.data.mask_pictures import write_folder
from tests.training.runs import (
    assert_same_run,
    interrupted_at,
    plain_config,
    rows_of,
    run_in_processes,
)
from tests.training.test_segmentation_run import plain_segmentation
from tests.training.test_tasks import plain_tasks
from tests.training.test_text_run import plain_text, write_place

pytestmark = pytest.mark.usefixtures("without_cost")

#: Number of training images of each digit.
SIZES = (48, 20, 9, 4, 3, 3, 2)


@pytest.fixture(scope="session")
def tail(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of digits with a long tail of small classes. The validation images are balanced."""
    root, (images, labels) = tmp_path_factory.mktemp("tail"), load_digits()
    for digit, size in enumerate(SIZES):
        pixels = (images[labels == digit] * (255 / 16)).round().astype("uint8")
        for split, part in (("train", pixels[:size]), ("val", pixels[60:66])):
            folder = root / split / f"digit {digit}"
            folder.mkdir(parents=True)
            for number, one in enumerate(part):
                Image.fromarray(one).convert("RGB").save(folder / f"{number:02}.png")
    return root


def plain(root: Path, **changes: Any) -> dict[str, Any]:
    data = {"name": "folder", "root": str(root), "batch_size": 16, "num_workers": 0, "keep_decoded": "off"}
    data["augment"] = {"scale": [0.6, 1.0], "flip": False}
    return plain_config(**{"data": data, **changes})


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / export.NAME)


@pytest.mark.slow
def test_weights_of_one_give_the_same_bits(tmp_path: Path, tail: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(check(plain(tail)), tmp_path / "plain")
    run(check(plain(tail, optim__class_weights=[1.0] * len(SIZES))), tmp_path / "ones")
    assert_same_run(tmp_path / "ones", tmp_path / "plain")
    assert "all classes have the same weight, so the loss is not weighted." in " ".join(capsys.readouterr().out.split())
    changed = {f"digit {n}": 2.0 for n in (5, 6)}
    run(check(plain(tail, optim__class_weights=changed)), tmp_path / "changed")
    first, second = (weights_of(tmp_path / name) for name in ("plain", "changed"))
    assert any(not torch.equal(first[key], second[key]) for key in first)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"data__sampler": "balanced"}, {"optim__class_weights": "auto"}])
def test_a_resumed_run_has_the_same_bits(
    tmp_path: Path, tail: Path, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    config = check(plain(tail, **changes))
    results = run(config, tmp_path / "whole")
    said = " ".join(capsys.readouterr().out.split())
    if "data__sampler" in changes:
        text = "data.sampler=balanced draws each class equally often: in an epoch, digit 6 with 2 images is drawn"
        assert f"{text} about 13 times, and digit 0 with 48 images is drawn about 13 times." in said
        assert results["totals"]["images"] == 2 * sum(SIZES[:7])
    else:
        low, high = (7 / n / sum(1 / size for size in SIZES) for n in (48, 2))
        assert (
            f"optim.class_weights: the weights in the loss range from {low:.3g} for digit 0 (48 training images) to"
            f" {high:.3g} for digit 6 (2 training images)." in said
        )
    interrupted_at(8, config, tmp_path / "broken")
    run(config, tmp_path / "broken")
    assert_same_run(tmp_path / "broken", tmp_path / "whole")


@pytest.mark.slow
def test_stored_features_give_the_same_losses(tmp_path: Path, tail: Path) -> None:
    """The draws of an image use the views in turn, so the features of a view are the same with and without a store."""
    changes = {
        "data__sampler": "balanced",
        "method": {"head": {}},
        "model__frozen_bn": True,
        "model__drop_rate": 0.0,
        "model__drop_path_rate": 0.0,
        "trainer__cache_folder": str(tmp_path / "features"),
        "trainer__views": 50,
        "trainer__cache_dtype": "fp32",
        "trainer__epochs": 3,
    }
    for store in ("off", "on"):
        run(check(plain(tail, **changes, trainer__cache_features=store)), tmp_path / store)
    losses = [[v for row in rows_of(tmp_path / name) for k, v in row.items() if "loss" in k] for name in ("off", "on")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    again = run(check(plain(tail, **changes, trainer__cache_features="on")), tmp_path / "again")
    assert again["features"]["computed"] == 0
    assert again["features"]["read"] > 0


def test_results_contain_the_metrics_of_the_classes(
    tmp_path: Path, tail: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = run(check(plain(tail, trainer__epochs=1)), tmp_path)
    said = capsys.readouterr().out
    stored = read_results(tmp_path)["data"]
    scores, classes = stored["scores"]["val"], stored["classes"]["val"]
    matrix = confusion_matrix(classes)
    assert matrix.sum(1).tolist() == [6] * 7
    assert scores["accuracy"] == results["accuracy"]["best"] == pytest.approx(matrix.trace() / 42)
    assert scores["balanced_accuracy"] == pytest.approx(float((matrix.diagonal() / 6).mean()))
    assert 0 <= scores["calibration_error"] < 1
    assert matrix.trace() / 42 < scores["top5_accuracy"] <= 1
    assert sum(classes["calibration"]["samples"]) == 42
    row = rows_of(tmp_path)[-1]
    assert row["val_balanced_accuracy"] == pytest.approx(scores["balanced_accuracy"])
    assert row["val_macro_f1"] == pytest.approx(scores["macro_f1"])
    assert "val: balanced accuracy" in said
    assert "worst classes, val" in said
    largest = int((matrix - np.diag(matrix.diagonal())).max())
    assert "largest confusions, val" in said
    assert f"{largest} of 6" in said
    assert sum(row[2] for row in matrix_rows(classes, [str(n) for n in range(7)])) == 42
    assert matrix_picture(classes).size == (518, 518)
    again = evaluate(tmp_path)
    assert again["classes"]["val"] == classes
    assert "worst classes, val" in capsys.readouterr().out


@pytest.mark.slow
def test_each_task_has_its_own_weights_and_results(tmp_path: Path, folders: Path) -> None:
    changes: dict[str, Any] = {"optim__class_weights": "auto", "tasks": {"planes": {"sampler": "sqrt"}}}
    simple = {"method": {"full": {}}, "trainer__epochs": 1}
    results = run(check(plain_tasks(folders, **changes, **simple)), tmp_path / "run")
    each = results["data"]["tasks"]
    assert {task: len(one["classes"]["val"]["support"]) for task, one in each.items()} == {"colours": 2, "planes": 3}
    assert all("balanced_accuracy" in one["scores"]["val"] for one in each.values())
    with pytest.raises(SettingError, match=r"optim\.class_weights must be null or auto with several tasks"):
        run(check(plain_tasks(folders, optim__class_weights=[1.0, 2.0], **simple)), tmp_path / "refused")


def test_texts_support_both_settings(tmp_path: Path) -> None:
    both: dict[str, Any] = {"optim__class_weights": "auto", "data": {"sampler": "balanced"}, "trainer__epochs": 1}
    results = run(check(plain_text(write_place(tmp_path), **both)), tmp_path / "run")
    assert "balanced_accuracy" in results["data"]["scores"]["val"]


@pytest.mark.slow
def test_masks_support_weights_per_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = write_folder(tmp_path / "shapes", {"train": 12, "val": 6})
    one: dict[str, Any] = {"trainer__epochs": 1, "optim__class_weights": {"disk": 4.0}}
    results = run(check(plain_segmentation(images, **one)), tmp_path / "run")
    assert "classes" not in results["data"]
    said = " ".join(capsys.readouterr().out.split())
    assert "optim.class_weights: the weights in the loss range from 1 for background to 4 for disk." in said
    for changes, message in (
        ({"optim__class_weights": "auto"}, "would require reading all masks"),
        ({"data": {"sampler": "balanced"}}, "data.sampler must be shuffle with task=segmentation, got balanced"),
    ):
        with pytest.raises(SettingError) as caught:
            run(check(plain_segmentation(images, **changes)), tmp_path / "refused")
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim__class_weights": {"digit 9": 2.0}}, "got the class 'digit 9'"),
        ({"optim__class_weights": [1.0, 2.0]}, "a list of 7 weights, one for each class, got 2 weights"),
        ({"optim__class_weights": "nowhere.csv"}, "or a file, got nowhere.csv. There is no such file"),
    ],
)
def test_invalid_weights_leave_nothing_behind(
    tmp_path: Path, tail: Path, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("efficient_ft.training.train.summaries", None)  # the images are not inspected
    with pytest.raises(UserError) as caught:
        run(check(plain(tail, **changes)), tmp_path / "run")
    assert message in str(caught.value)
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"data__sampler": "balanced"}, {"optim__class_weights": "auto"}])
def test_two_processes_train_and_evaluate_like_one(tmp_path: Path, tail: Path, changes: dict[str, Any]) -> None:
    quiet: dict[str, Any] = {"model__drop_rate": 0.0, "model__drop_path_rate": 0.0, "model__frozen_bn": True}
    for name, devices, batch in (("one", 1, 16), ("two", 2, 8)):
        settings = plain(tail, **quiet, **changes, trainer__devices=devices)
        settings["data"]["batch_size"] = batch
        run_in_processes(settings, tmp_path / name)
    one, two = (rows_of(tmp_path / name) for name in ("one", "two"))
    for first, second in zip(one, two, strict=True):
        keys = [key for key in first if "loss" in key or key.startswith("val_")]
        assert [second[key] for key in keys] == pytest.approx([first[key] for key in keys], abs=2e-4)
    classes = [json.loads((tmp_path / n / "results.json").read_text())["data"]["classes"] for n in ("one", "two")]
    assert classes[0]["val"]["support"] == classes[1]["val"]["support"]
