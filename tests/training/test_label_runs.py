"""Tests of runs with label files: several labels and numbers, from training to predictions."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from efficient_ft.cli.commands import predict
from efficient_ft.config import Config, check, fingerprint
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.models import factory
from efficient_ft.training import costs
from efficient_ft.training.evaluate import evaluate
from efficient_ft.training.kinds.base import only
from efficient_ft.training.kinds.registry import kind_of
from efficient_ft.training.lr_test import range_test
from efficient_ft.training.output import export
from efficient_ft.training.run import run
from tests.training.runs import assert_same_run, interrupted_at, plain_config
from tests.training.test_features import assert_same_training


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images whose red and green channels are bright if the image has this label. The target is the blue channel."""
    folder = tmp_path_factory.mktemp("labels")
    random = np.random.default_rng(0)
    rows = []
    for i in range(80):
        red, green, blue = random.random() < 0.5, random.random() < 0.4, float(random.uniform())
        pixels = random.integers(0, 40, (32, 32, 3)) + np.array([red, green, blue]) * 200
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
        tags = "|".join(name for name, flag in (("red", red), ("green", green)) if flag)
        rows.append([f"{i}.png", tags, 1000 + 50 * blue, -blue, "test" if i % 4 == 0 else "train"])
    with open(folder / "labels.csv", "w", newline="") as file:
        csv.writer(file).writerows([["file", "tags", "price", "loss", "split"], *rows])
    return folder


def config_of(root: Path, task: str, label: Any, **changes: Any) -> Config:
    plain = plain_config(trainer__epochs=4, optim__warmup_steps=0, **changes)
    plain["task"] = task
    plain["data"] |= {"name": "labels", "root": str(root), "batch_size": 16, "keep_decoded": "off"}
    plain["data"]["labels"] = {"file": "labels.csv", "label": label}
    return check(plain)


def predicted(folder: Path, image: Path, capsys: pytest.CaptureFixture[str], form: str) -> Any:
    capsys.readouterr()
    predict.main([str(folder), str(image), form, "--device", "cpu"])
    out = capsys.readouterr().out
    return json.loads(out) if form == "--json" else list(csv.DictReader(out.splitlines()))


@pytest.mark.slow
@pytest.mark.usefixtures("without_cost")
def test_several_labels(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, folder = config_of(root, "multilabel", "tags"), tmp_path / "run"
    results = run(config, folder)
    printed = " ".join(capsys.readouterr().out.split())  # lines are wrapped
    assert "multilabel, 2 classes: green, red" in printed
    assert "test macro F1" in printed
    assert results["accuracy"]["metric"] == "mean_average_precision"
    assert results["accuracy"]["test"] > 0.8
    scores = results["data"]["scores"]["test"]
    assert scores["mean_average_precision"] == results["accuracy"]["test"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all({"val_mean_average_precision", "val_f1_macro"} <= set(row) for row in rows if "val_loss" in row)
    assert evaluate(folder)["scores"]["test"] == scores
    thresholds = json.loads(export.load(folder).notes["thresholds"])
    assert len(thresholds) == 2
    (record,) = predicted(folder, root / "0.png", capsys, "--json")
    found = {one["class"]: one["probability"] for one in record["top"]}
    assert record["labels"] == [
        one["class"] for one in record["top"] if found[one["class"]] >= thresholds[["green", "red"].index(one["class"])]
    ]
    assert {one["class"]: one["threshold"] for one in record["top"]} == dict(
        zip(["green", "red"], thresholds, strict=True)
    )
    (row,) = predicted(folder, root / "0.png", capsys, "--csv")
    assert row["labels"] == "|".join(record["labels"])
    assert float(row["probability_1"]) == pytest.approx(record["top"][0]["probability"])


def test_thresholds_on_few_images_have_one_warning(root: Path) -> None:
    def warnings(**changes: Any) -> list[str]:
        config = config_of(root, "multilabel", "tags", **changes)
        data = only(kind_of(config).open(config, factory.input_of(config.model)))
        return [one for one in data.summary().warnings if "Thresholds" in one]

    (warning,) = warnings(data__val_fraction=0.05)
    assert warning.startswith("Fewer than 5 val images have these labels: green (")
    assert "red (" in warning
    assert warnings(data__val_fraction=0.05, multilabel={"thresholds": 0.5}) == []
    assert warnings(data__val_fraction=0.5) == []


@pytest.mark.slow
@pytest.mark.usefixtures("without_cost")
def test_numbers(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, folder = config_of(root, "regression", ["price", "loss"], optim__lr=3e-3), tmp_path / "run"
    results = run(config, folder)
    printed = " ".join(capsys.readouterr().out.split())  # lines are wrapped
    assert "regression, 2 targets: price, loss" in printed
    assert "targets in 'price': 10" in printed
    # The learning rate test has the loss of the run, on targets with mean 0 and standard deviation 1.
    assert range_test(config, 4, 1e-6, 1e-5).losses[0] < 3
    capsys.readouterr()
    assert "test MAE price" in printed
    assert "optim.label_smoothing" not in printed  # the default is not mentioned
    assert results["accuracy"]["metric"] == "r2"
    assert f"test            {results['accuracy']['test']:.4f}" in printed or "R²" in printed
    scores = results["data"]["scores"]["test"]
    assert 0 < scores["mae_price"] <= scores["rmse_price"] < 50
    assert evaluate(folder)["scores"]["test"] == scores
    (record,) = predicted(folder, root / "0.png", capsys, "--json")
    assert 950 < record["values"]["price"] < 1100
    (row,) = predicted(folder, root / "0.png", capsys, "--csv")
    assert float(row["price"]) == pytest.approx(record["values"]["price"])
    trained = export.load(folder)
    part = config.data
    assert part.labels is not None
    assert json.loads(trained.notes["target_std"])[0] == pytest.approx(14.4, abs=4)


@pytest.mark.slow
@pytest.mark.usefixtures("without_cost")
@pytest.mark.parametrize(("task", "label"), [("multilabel", "tags"), ("regression", "price")])
def test_a_resumed_run_is_the_same(root: Path, tmp_path: Path, task: str, label: str) -> None:
    config = config_of(root, task, label)
    run(config, tmp_path / "whole")
    interrupted_at(5, config, tmp_path / "resumed")
    run(config, tmp_path / "resumed")
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")


@pytest.mark.slow
@pytest.mark.usefixtures("without_cost")
@pytest.mark.parametrize(("task", "label"), [("multilabel", "tags"), ("regression", ["price", "loss"])])
def test_stored_features_give_the_same_run(root: Path, tmp_path: Path, task: str, label: Any) -> None:
    """Images are augmented, and each epoch has its own view. One run with stored features is interrupted."""
    settings: dict[str, Any] = {"method": {"blocks": {"blocks": [-1]}}, "trainer__prefix": "fp32"}
    settings |= {"model__drop_rate": 0.0, "model__drop_path_rate": 0.0, "model__frozen_bn": True}
    plain = run(config_of(root, task, label, **settings), tmp_path / "plain")
    stored = {"cache_features": "on", "views": 4, "cache_dtype": "fp32", "cache_folder": str(tmp_path / "features")}
    config = config_of(root, task, label, **settings, **{f"trainer__{key}": value for key, value in stored.items()})
    interrupted_at(6, config, tmp_path / "cached")
    cached = run(config, tmp_path / "cached")
    again = run(config, tmp_path / "again")
    assert cached["features"]["end"] == "blocks.0"
    assert again["features"]["computed"] == 0
    for name, results in (("cached", cached), ("again", again)):
        assert_same_training(tmp_path / "plain", tmp_path / name)
        assert results["accuracy"] == plain["accuracy"]
        assert results["data"]["scores"] == plain["data"]["scores"]
        weights = [export.load(tmp_path / folder).model.state_dict() for folder in ("plain", name)]
        assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.mark.slow
@pytest.mark.parametrize(("task", "label"), [("multilabel", "tags"), ("regression", ["price", "loss"])])
def test_costs_are_counted_without_training(root: Path, task: str, label: Any) -> None:
    found = costs.cost_only(config_of(root, task, label))
    assert found["executed"]["backward_flops"] > 0
    plain = plain_config(task=task)
    plain["data"] |= {"name": "labels", "root": "nowhere", "labels": {"file": "labels.csv", "label": label}}
    assert costs.cost_only(check(plain))["executed"]["backward_flops"] > 0


def test_settings_that_cannot_be_used(root: Path, configuration: Callable[..., Config]) -> None:
    with pytest.raises(SettingError, match=r"data\.name must be a data set with a label file with task=multilabel"):
        configuration(task="multilabel")
    with pytest.raises(SettingError, match=r"data\.labels must be null with data=digits"):
        configuration(data__labels={"file": "labels.csv"})
    message = r"multilabel\.margin must be 0\.05 with multilabel\.loss=bce, got 0\.2\. Only the asymmetric loss"
    with pytest.raises(SettingError, match=message):
        config_of(root, "multilabel", "tags", multilabel__margin=0.2)
    assert config_of(root, "multilabel", "tags", multilabel__margin=0.2, multilabel__loss="asymmetric")
    with pytest.raises(SettingError, match=r"multilabel\.loss must be left out with task=classification, got"):
        configuration(multilabel={"loss": "asymmetric"})
    for value in (0, 1, 1.5, "best"):
        with pytest.raises(SettingError, match=rf"multilabel\.thresholds must be .*, got \"?{value}"):
            configuration(multilabel={"thresholds": value})
    plain = config_of(root, "multilabel", "tags")
    assert fingerprint(plain) != fingerprint(plain.model_copy(update={"task": "regression"}))
    assert "multilabel" not in configuration().model_dump()
    assert "labels" not in json.dumps(configuration().changed())


@pytest.mark.usefixtures("without_cost")
def test_fixed_thresholds_and_damaged_metadata(root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fixed = {"thresholds": 0.25, "loss": "asymmetric"}
    config = config_of(root, "multilabel", "tags", multilabel=fixed)
    run(config, folder)
    trained = export.load(folder)
    assert json.loads(trained.notes["thresholds"]) == [0.25, 0.25]
    for wrong, message in (([0.25], "one number per class"), ([0.25, 1.5], "must be > 0 and < 1")):
        shutil.copytree(folder, tmp_path / message.replace(" ", "_"))
        copy = tmp_path / message.replace(" ", "_")
        notes = {"task": "multilabel", "thresholds": wrong, "epoch": 1}
        state = trained.model.state_dict()
        export.save(copy / export.NAME, state, config.model, trained.class_names, trained.input, notes)
        with pytest.raises(UserError, match=message):
            export.load(copy)


def test_constant_targets_are_rejected(root: Path, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("file,price\n" + "".join(f"{root}/{i}.png,7\n" for i in range(9)))
    plain = config_of(root, "regression", "price").model_dump(mode="json")
    plain["data"]["labels"] = {"file": str(tmp_path / "labels.csv")}
    with pytest.raises(UserError, match=r"All training images have the same target 'price'"):
        run(check(plain), tmp_path / "run")
    assert not (tmp_path / "run" / "config.yaml").exists()
