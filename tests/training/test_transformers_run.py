"""Tests of runs with a network of `transformers` in a local folder, through the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from efficient_ft.cli.commands import predict
from efficient_ft.config import Config, check
from efficient_ft.models import factory
from efficient_ft.training.evaluate import evaluate
from efficient_ft.training.output import export
from efficient_ft.training.run import run
from tests.cli.program import REPOSITORY
from tests.models.image_folders import write_network
from tests.training.runs import assert_same_run, interrupted_at, plain_config

_SHORT = ["trainer.accelerator=cpu", "trainer.progress=false", "data.num_workers=0", "data.batch_size=8",
          "cost.baseline=none", "cost.steps=1", "allocator=keep"]  # fmt: skip


def configured(folder: Path, **changes: Any) -> Config:
    model = {"library": "transformers", "weights": str(folder), **changes.pop("model", {})}
    return check({**plain_config(**changes), "model": model})


def same_logits(run_folder: Path) -> None:
    """Compare the logits of `transformers` and of `export.load` for the files of a run."""
    auto: Any = transformers.AutoModelForImageClassification
    own, trained = auto.from_pretrained(str(run_folder)), export.load(run_folder)
    images = torch.randn(2, 3, *trained.input.size)
    with torch.no_grad():
        torch.testing.assert_close(own.eval()(images).logits, trained.model(images).logits, rtol=0, atol=0)
    assert list(own.config.id2label.values()) == trained.class_names


def command(tmp_path: Path, *arguments: str) -> str:
    line = [sys.executable, str(REPOSITORY / "train.py"), "model=hf", *arguments, "hydra.run.dir=run"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return " ".join((done.stdout + done.stderr).split())


@pytest.mark.slow
def test_the_command_line_trains_and_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_network(tmp_path / "net", "dinov2", size=None)
    settings = ["model.weights=net", "model.image_size=24", "method=lora", "trainer.max_steps=4", *_SHORT]
    text = command(tmp_path, *settings)
    assert "net has no preprocessor_config.json. Assumed: the mean and standard deviation of ImageNet" in text
    assert "classifier newly initialized for 10 classes (absent from the file)" in text
    sizes = "images of 32×32 to 24×24 pixels (model.image_size)"
    assert f"position embeddings were resized from 65 to 37 positions, for {sizes}" in text
    assert "dinov2 on digits with lora" in text
    same_logits(tmp_path / "run")
    Image.new("L", (8, 8)).save(tmp_path / "digit.png")
    capsys.readouterr()
    predict.main([str(tmp_path / "run"), str(tmp_path / "digit.png"), "--top", "1"])
    assert "digit.png" in capsys.readouterr().out


@pytest.mark.slow
def test_random_weights_need_no_files(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "num_hidden_layers": 2,
             "patch_size": 8}  # fmt: skip
    kwargs = [f"+model.kwargs.{name}={value}" for name, value in sizes.items()]
    model = ["model.name=vit", "model.pretrained=false", "model.image_size=32", *kwargs]
    text = command(tmp_path, *model, "method=full", "trainer.max_steps=2", *_SHORT)
    assert "vit starts from RANDOM weights" in text
    same_logits(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.usefixtures("without_cost")
@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_an_interrupted_run_continues(tmp_path: Path, kind: str) -> None:
    folder = write_network(tmp_path / "net", kind)
    config = configured(folder, method={"lbp_wht": {}}, trainer__epochs=2)
    run(config, tmp_path / "whole")
    interrupted_at(3, config, tmp_path / "parts")
    run(config, tmp_path / "parts")
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    same_logits(tmp_path / "whole")
    assert set(evaluate(tmp_path / "whole")["accuracy"]) == {"val", "test"}
    again = factory.create_model(configured(tmp_path / "whole").model, 10)
    for name, value in export.load(tmp_path / "whole").model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.usefixtures("without_cost")
def test_methods_that_stay_in_the_network_write_no_files_of_transformers(tmp_path: Path) -> None:
    folder = write_network(tmp_path / "net")
    config = configured(folder, method={"evit": {"drop_at": [0]}})
    run(config, tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()
    trained = export.load(tmp_path / "run")
    assert trained.model(torch.randn(1, 3, 32, 32)).logits.shape == (1, 10)
    weights = config.model.model_copy(update={"weights": str(tmp_path / "run" / "model.safetensors")})
    assert factory.input_of(weights).mean == (0.5, 0.5, 0.5), "the run has stored the normalization"
