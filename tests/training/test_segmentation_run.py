"""Tests of runs with task=segmentation, from folders of images and masks to predicted masks."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from efficient_ft.cli.commands import predict
from efficient_ft.config import Config, check
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.record.results import read_results
from efficient_ft.record.rows import MetricsFile
from efficient_ft.report.runs import write_runs_page
from efficient_ft.task import Segmentation
from efficient_ft.training.evaluate import evaluate
from efficient_ft.training.output import export
from efficient_ft.training.output.predict_masks import EXAMPLES
from efficient_ft.training.run import run
from tests.data.mask_pictures import BACKGROUND, DISK, SQUARE, write_folder
from tests.training.runs import assert_same_run, interrupted_at, plain_config

UNET = {
    "name": "unet",
    "encoder": "mobilenetv3_small_050",
    "pretrained": False,
    "image_size": 64,
    "frozen_bn": False,
    "kwargs": {"decoder_channels": [16, 16, 16, 16, 16]},
}


def plain_segmentation(images: Path, **changes: Any) -> dict[str, Any]:
    """Return the configuration of a run on a folder of images and masks, as plain containers."""
    data = {
        "name": "mask_folder",
        "root": str(images),
        "batch_size": 6,
        "num_workers": 0,
        "masks": {"zoom": [0.8, 1.25]},
    }
    model = UNET | changes.pop("model", {})
    plain = plain_config(**changes)
    return {**plain, "task": "segmentation", "model": model, "data": data | changes.get("data", {})}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("segmentation") / "shapes", {"train": 24, "val": 6, "test": 6})


@pytest.fixture(scope="module")
def segmentation(images: Path) -> Callable[..., Config]:
    def make(**changes: Any) -> Config:
        return check(plain_segmentation(images, **changes))

    return make


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, segmentation: Callable[..., Config]
) -> tuple[Path, Config, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trained") / "run"
    config = segmentation(trainer__epochs=12, optim__lr=5e-3, optim__warmup_steps=0)
    return folder, config, run(config, folder)


@pytest.mark.slow
def test_a_run_learns_and_records_its_scores(trained: tuple[Path, Config, dict[str, Any]]) -> None:
    folder, _, results = trained
    accuracy = results["accuracy"]
    assert accuracy["metric"] == Segmentation.metric
    assert accuracy["best"] > 0.55, "a network that gives every pixel the background has a third"
    scores = results["data"]["scores"]["test"]
    assert scores["mean_iou"] == accuracy["test"]
    assert set(scores["iou"]) == {"background", "square", "disk"}
    assert scores["pixel_accuracy"] > 0.9
    assert results["data"]["splits"] == {"train": 24, "val": 6, "test": 6}
    assert results["cost"]["executed"]["backward_flops"] > 0
    rows = MetricsFile(folder).read()
    assert [row["val_mean_iou"] for row in rows if "val_mean_iou" in row][-1] == accuracy["last"]
    assert all("val_accuracy" not in row for row in rows)


@pytest.mark.slow
def test_the_best_weights_are_evaluated_as_in_the_training(trained: tuple[Path, Config, dict[str, Any]]) -> None:
    folder, _, results = trained
    found = evaluate(folder)
    assert found["accuracy"]["val"] == pytest.approx(results["accuracy"]["best"], abs=1e-6)
    assert found["scores"]["test"]["iou"].keys() == {"background", "square", "disk"}


@pytest.mark.slow
def test_a_finished_run_is_shown_and_not_repeated(
    trained: tuple[Path, Config, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, config, results = trained
    assert run(config, folder)["accuracy"] == results["accuracy"]
    text = capsys.readouterr().out
    assert "mean IoU" in text
    assert "unet on mask_folder" in text


@pytest.mark.slow
def test_masks_of_new_images_have_the_ids_of_the_training_masks(
    trained: tuple[Path, Config, dict[str, Any]], images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, *_ = trained
    predict.main([str(folder), str(images / "test" / "images"), "--out", str(tmp_path / "out"), "--overlay"])
    both, union = np.zeros(4), np.zeros(4)
    for path in sorted((images / "test" / "masks").iterdir()):
        true = np.asarray(Image.open(path))
        with Image.open(tmp_path / "out" / path.name) as opened:
            assert opened.mode == "P"
            found = np.asarray(opened)
        assert found.shape == true.shape
        assert set(np.unique(found)) <= {BACKGROUND, SQUARE, DISK}
        for c in (BACKGROUND, SQUARE, DISK):
            both[c] += ((found == c) & (true == c)).sum()
            union[c] += (((found == c) | (true == c)) & (true != 2)).sum()
        assert Image.open(tmp_path / "out" / f"{path.stem}_overlay.png").size == (64, 48)
    assert (both / np.maximum(union, 1))[[SQUARE, DISK]].mean() > 0.3
    printed = capsys.readouterr().out
    assert "background" in printed
    predict.main([str(folder), str(images / "test" / "images"), "--out", str(tmp_path / "again"), "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [set(row) for row in rows] == [{"path", "mask", "shares"}] * 6
    for row in rows:
        found = np.asarray(Image.open(row["mask"]))
        assert row["shares"]["square"] == pytest.approx((found == SQUARE).mean())
    predict.main([str(folder), str(images / "test" / "images"), "--out", str(tmp_path / "again"), "--csv"])
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [float(row["share of disk"]) for row in table] == [row["shares"]["disk"] for row in rows]
    assert f"{tmp_path / 'out' / '000.png'}" in printed


_COLORS = np.array([[0, 0, 0], [255, 0, 0], [9, 9, 9], [0, 0, 255]], dtype=np.uint8)


@pytest.mark.slow
@pytest.mark.first(1, "slow")
@pytest.mark.parametrize(
    ("values", "masks", "mode"),
    [
        (
            np.array([0, 255, 7, 100], np.uint8),
            {"values": {0: "background", 255: "square", 7: "void", 100: "disk"}},
            "P",
        ),
        (
            _COLORS,
            {"colors": {"background": [0, 0, 0], "square": "#ff0000", "void": [9, 9, 9], "disk": [0, 0, 255]}},
            "RGB",
        ),
    ],
)
def test_predictions_have_the_values_and_colors_of_the_training_masks(
    segmentation: Callable[..., Config],
    tmp_path: Path,
    without_cost: None,
    values: np.ndarray,
    masks: dict[str, Any],
    mode: str,
) -> None:
    folder = write_folder(tmp_path / "shapes", {"train": 24, "val": 6})
    for path in folder.glob("*/masks/*.png"):
        Image.fromarray(values[np.asarray(Image.open(path))]).save(path)
    config = segmentation(
        data={"root": str(folder), "masks": {"zoom": [0.8, 1.25], **masks}},
        trainer__epochs=8,
        optim__lr=5e-3,
        optim__warmup_steps=0,
    )
    results = run(config, tmp_path / "run")
    assert set(results["data"]["scores"]["val"]["iou"]) == {"background", "square", "disk"}
    assert evaluate(tmp_path / "run")["accuracy"]["val"] == pytest.approx(results["accuracy"]["best"], abs=1e-6)
    predict.main([str(tmp_path / "run"), str(folder / "val" / "images"), "--out", str(tmp_path / "out")])
    agreement = []
    for path in sorted((folder / "val" / "masks").iterdir()):
        true = np.asarray(Image.open(path))
        with Image.open(tmp_path / "out" / path.name) as opened:
            assert opened.mode == mode
            found = np.asarray(opened)
        assert found.shape == true.shape
        known = {tuple(np.atleast_1d(value).tolist()) for value in values[[0, 1, 3]]}
        assert {
            tuple(np.atleast_1d(value).tolist()) for value in np.unique(found.reshape(-1, *found.shape[2:]), axis=0)
        } <= known
        agreement.append((found == true).mean())
    assert np.mean(agreement) > 0.7


def test_the_page_of_runs_shows_predictions_and_the_curve(
    trained: tuple[Path, Config, dict[str, Any]], tmp_path: Path
) -> None:
    folder, *_ = trained
    page = write_runs_page([folder], tmp_path).read_text(encoding="utf-8")
    (source,) = re.findall(r'<img src="data:image/png;base64,([^"]+)"', page)
    assert base64.b64decode(source) == (folder / EXAMPLES).read_bytes()
    (held,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    (shown,) = json.loads(held)["runs"]
    curve = [row["mean IoU %"] for row in shown["rows"] if "mean IoU %" in row]
    assert len(curve) == 12
    assert max(curve) == pytest.approx(100 * read_results(folder)["accuracy"]["best"], rel=1e-3)


def test_masks_are_not_written_over_images(
    trained: tuple[Path, Config, dict[str, Any]], images: Path, tmp_path: Path
) -> None:
    folder, *_ = trained
    place = images / "test" / "images"
    with pytest.raises(UserError, match=r"--out .* contains the image"):
        predict.main([str(folder), str(place), "--out", str(place)])
    other = tmp_path / "other"
    other.mkdir()
    (other / "000.jpg").write_bytes((place / "000.jpg").read_bytes())
    with pytest.raises(UserError, match="2 images are named 000"):
        predict.main([str(folder), str(place), str(other), "--out", str(tmp_path / "out")])


def test_weights_are_those_of_the_plain_network(trained: tuple[Path, Config, dict[str, Any]]) -> None:
    import segmentation_models_pytorch as smp
    from safetensors.torch import load_file

    folder, *_ = trained
    plain = smp.Unet("tu-mobilenetv3_small_050", encoder_weights=None, classes=3, decoder_channels=(16,) * 5)
    plain.load_state_dict(load_file(folder / export.NAME))
    loaded = export.load(folder)
    assert json.loads(loaded.notes["class_ids"]) == [0, 1, 3]
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(plain.eval()(x), loaded.model(x))


@pytest.mark.slow
def test_an_interrupted_run_continues_as_if_it_had_not_stopped(
    segmentation: Callable[..., Config], tmp_path: Path, without_cost: None
) -> None:
    config = segmentation(method={"lbp_wht": {"select": "all"}}, trainer__epochs=2)
    run(config, tmp_path / "straight")
    interrupted_at(5, config, tmp_path / "stopped")
    run(config, tmp_path / "stopped")
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")


@pytest.mark.first(1, "exhaustive")
@pytest.mark.slow
@pytest.mark.parametrize("method", ["lbp_wht", "back_razor", "low_bit", "checkpointing", "lora", "bitfit"])
def test_methods_train_a_segmentation_network(
    segmentation: Callable[..., Config], tmp_path: Path, method: str, without_cost: None
) -> None:
    chosen = (
        {"last_stage": {}, method: {}}
        if method in ("lbp_wht", "back_razor", "low_bit", "checkpointing")
        else {method: {}}
    )
    if method == "lora":
        chosen = {"lora": {"targets": "all"}}
    config = segmentation(method=chosen, trainer__epochs=1, trainer__max_steps=2)
    if method in ("lora", "bitfit"):
        assert run(config, tmp_path / "run")["trainable_parameters"] > 0
        return
    results = run(config, tmp_path / "run")
    assert results["methods"][method]["touched"]


def test_methods_that_drop_tokens_are_refused(segmentation: Callable[..., Config], tmp_path: Path) -> None:
    for method in ("tome", "evit", "bsr"):
        with pytest.raises(UserError, match=f"method {method}"):
            run(segmentation(method={method: {}}), tmp_path / method)


def test_windows_evaluate_too(trained: tuple[Path, Config, dict[str, Any]]) -> None:
    folder, config, _ = trained
    masks = {"zoom": [0.8, 1.25], "evaluation": "windows"}
    changed = check(
        {**config.model_dump(mode="json"), "data": {**config.model_dump(mode="json")["data"], "masks": masks}}
    )
    found = evaluate(folder, changed)["accuracy"]["test"]
    assert 0.3 < found < 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": {"name": "vit_digits", "pretrained": False}}, "model.name must be a segmentation network"),
        ({"data": {"name": "digits"}}, "data.name must be a data set with masks with task=segmentation"),
        ({"task": "classification"}, "task must be segmentation with data=mask_folder"),
        ({"trainer": {"prefix": "folded"}}, "trainer.prefix must be fp32 or auto with task=segmentation"),
        (
            {"data": {"name": "camvid", "masks": {"ignored": [3]}}},
            r"data.masks.ignored must be left out, got .* data=camvid defines this setting",
        ),
        ({"data": {"masks": {"zoom": [2.0, 1.0]}}}, r"data.masks.zoom must be \[smallest, largest\]"),
    ],
)
def test_settings_of_another_task_are_refused(
    segmentation: Callable[..., Config], changes: dict[str, Any], expected: str
) -> None:
    plain = segmentation().model_dump(mode="json")
    for key, value in changes.items():
        inside = isinstance(value, dict) and "name" not in value
        plain[key] = {**plain[key], **value} if inside else value
    with pytest.raises(SettingError, match=expected):
        check(plain)
