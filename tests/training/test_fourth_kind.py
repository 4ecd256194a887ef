"""Tests of a kind of task that a package adds with one module and one YAML file: regression of one number per image."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from efficient_ft.cli.hydra.compose import configured
from efficient_ft.config import Config, ModelConfig
from efficient_ft.config.kinds import RULES, KindRules
from efficient_ft.config.schema import NETWORKS
from efficient_ft.core.errors import UserError
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.models import factory
from efficient_ft.planning.counting import Counter
from efficient_ft.planning.timing import try_recipe
from efficient_ft.task import TASKS
from efficient_ft.training import costs
from efficient_ft.training.kinds import registry
from efficient_ft.training.kinds.base import Kind
from efficient_ft.training.kinds.classification import ClassificationKind
from efficient_ft.training.memory.budget import Predictor

HERE = Path(__file__).parent

#: Runs the functions behind evaluate, predict and check. Arguments: the run, the images and the data settings.
AFTERWARDS = """
import sys
from pathlib import Path
from efficient_ft.cli.commands import check, predict
from efficient_ft.training.evaluate import evaluate
run, images, *data = sys.argv[1:]
evaluate(Path(run))
predict.main([run, f"{images}/0.png", "--json", "--device", "cpu"])
check.main([*data, "model=vit_digits", "--out", "check"])
"""
COMMAND = "from efficient_ft.cli.entry import main; main()"


def _install(site: Path) -> None:
    """Write an installed distribution that contains `brightness_kind`."""
    package = site / "image_brightness"
    (package / "conf" / "data").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "kind.py").write_text((HERE / "brightness_kind.py").read_text())
    (package / "conf" / "data" / "numbers.yaml").write_text(
        "# Images with a number each: ROOT/numbers.csv.\nname: numbers\nroot: ./data\nbatch_size: 8\nnum_workers: 0\n"
        "augment: {flip: false, scale: [0.9, 1.0]}\n"
    )
    info = site / "image_brightness-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: image-brightness\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[efficient_ft.kinds]\nbrightness = image_brightness.kind:brightness\n")


def _write_images(root: Path) -> None:
    """Write 60 gray images whose brightness is the target number."""
    root.mkdir()
    random = np.random.default_rng(0)
    rows = []
    for i in range(60):
        number = float(random.uniform())
        Image.fromarray((random.uniform(0, 0.2, (32, 32, 3)) * 255 + number * 200).astype(np.uint8)).save(
            root / f"{i}.png"
        )
        rows.append([f"{i}.png", number, "test" if i % 5 == 0 else "train"])
    with open(root / "numbers.csv", "w", newline="") as file:
        csv.writer(file).writerows([["file", "number", "split"], *rows])


def _call(folder: Path, program: str, *arguments: object) -> str:
    """Run a program with the package installed, and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder / "site")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_kind_of_another_package_trains_evaluates_and_predicts(tmp_path: Path) -> None:
    _install(tmp_path / "site")
    _write_images(tmp_path / "images")
    data = ["task=brightness", "data=numbers", f"data.root={tmp_path / 'images'}"]
    model = ["model=vit_digits", "method=full", "optim.lr=0.002", "optim.warmup_steps=0", "trainer.epochs=12"]
    quick = ["trainer.progress=false", "cost.steps=1", "trainer.accelerator=cpu", "seed=1"]
    folder = tmp_path / "run"
    _call(tmp_path, COMMAND, *data, *model, *quick, f"hydra.run.dir={folder}")
    shown = _call(tmp_path, AFTERWARDS, folder, tmp_path / "images", *data)
    results = json.loads((folder / "results.json").read_text())
    assert results["accuracy"]["metric"] == "r2"
    assert results["accuracy"]["best"] > 0.5
    scores = results["data"]["scores"]["test"]
    assert scores["r2"] == results["accuracy"]["test"]
    assert 0 < scores["mean_squared_error"] < 0.1
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert any("val_r2" in row for row in rows)
    assert f"test  {scores['r2']:.4f}" in shown  # printed by `evaluate`
    with open(tmp_path / "images" / "numbers.csv", newline="") as file:
        true = float(next(csv.DictReader(file))["number"])
    predicted = json.loads(shown[shown.index("[\n") : shown.index("]\n") + 1])
    assert abs(predicted[0]["number"] - true) < 0.3
    assert (tmp_path / "check" / "samples.png").is_file()


@pytest.mark.slow
def test_a_kind_of_another_package_is_counted_and_planned(tmp_path: Path) -> None:
    _install(tmp_path / "site")
    _write_images(tmp_path / "images")
    data = ["task=brightness", "data=numbers", f"data.root={tmp_path / 'images'}"]
    counted = _call(tmp_path, COMMAND, "cost", *data, "model=vit_digits", "method=full")
    assert "vit_digits, 32×32, 1 classes" in counted
    planned = _call(
        tmp_path, COMMAND, "plan", *data, "model=vit_digits", "memory=2GB", "loss=100", "--planning-time", "1s"
    )
    assert "method=" in planned


class _Networks:
    """A family of networks with a single linear layer."""

    def input_of(self, config: ModelConfig) -> InputSpec:
        return InputSpec((4, 4), (0.0,) * 3, (1.0,) * 3, "bilinear")

    def build(self, config: ModelConfig, classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(48, classes))

    def load(self, config: ModelConfig, classes: int, random: nn.Module) -> nn.Module:
        return random

    def missing(self, config: ModelConfig) -> str | None:
        return "no weights"


class _KindWithNetworks(ClassificationKind):
    rules = KindRules("numbers", (), family="numbers", networks=("linear_48",))
    family = _Networks()


def test_a_kind_adds_a_family_of_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    added = ((registry._registered, "numbers"), (RULES, "numbers"), (TASKS, "numbers"), (factory.FAMILIES, "numbers"))
    for known, name in (*added, (NETWORKS, "linear_48")):
        monkeypatch.setitem(known, name, None)  # pytest removes the entry after the test
        del known[name]
    kind = registry.register(_KindWithNetworks())
    model = ModelConfig(name="linear_48", pretrained=False)
    assert model.family == "numbers"
    assert factory.input_of(model).size == (4, 4)
    assert factory.missing_weights(model) == "no weights"
    for network in (kind.network(model, 3), kind.random_network(model, 3)):
        assert network(torch.zeros(2, 3, 4, 4)).shape == (2, 3)


@pytest.mark.parametrize(
    ("rules", "family", "message"),
    [
        (KindRules("numbers", (), networks=("linear_48",)), _Networks(), "KindRules.family of .* must be the name"),
        (KindRules("text2", (), family="text", networks=("x",)), _Networks(), "got 'text'"),
        (
            KindRules("numbers", (), family="numbers", networks=("resnet18",)),
            _Networks(),
            "resnet18 of .* already exists",
        ),
        (KindRules("numbers", (), family="numbers", networks=("bert_tiny",)), _Networks(), "bert_tiny of .* already"),
        (KindRules("numbers", (), networks=("linear_48",)), None, "lists networks without a family"),
    ],
)
def test_a_family_replaces_no_other(rules: KindRules, family: Any, message: str) -> None:
    kind = type("Mine", (ClassificationKind,), {"rules": rules, "family": family})()
    families, networks = dict(factory.FAMILIES), dict(NETWORKS)
    with pytest.raises(UserError, match=message):
        registry.register(kind)
    assert (dict(factory.FAMILIES), dict(NETWORKS)) == (families, networks)
    assert rules.name not in RULES


class _CalledError(Exception):
    """Raised when the kind builds a network."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "count",
    [
        costs.cost_only,
        lambda config: Counter(config, 10),
        lambda config: try_recipe(config, 10, 0.0),
        lambda config: Predictor(config, None, 0, torch.device("cpu"))(config),
    ],
    ids=["cost", "plan", "trial", "budget"],
)
def test_the_kind_builds_every_counted_network(
    count: Callable[[Config], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def called(*arguments: object) -> nn.Module:
        raise _CalledError

    monkeypatch.setattr(Kind, "random_network", called)
    with pytest.raises(_CalledError):
        count(configured(["model=vit_digits", "data=digits", "method=full"]))
