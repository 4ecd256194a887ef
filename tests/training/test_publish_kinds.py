"""Tests of efficient-ft export for texts, networks of transformers, several data sets and segmentation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from efficient_ft.cli.commands import predict
from efficient_ft.core.errors import UserError
from efficient_ft.training.output import export
from efficient_ft.training.publish.folder import ExportOptions, export_run, load
from efficient_ft.training.run import run
from tests.models.image_folders import write_network
from tests.training.test_segmentation_run import plain_segmentation
from tests.training.test_tasks import config_of
from tests.training.test_text_run import plain_text, write_place
from tests.training.test_transformers_run import configured


def exported(folder: Path, to: str = "onnx", **options: Any) -> tuple[Path, list[str]]:
    return export_run(ExportOptions(folder, to, **options))


@pytest.mark.slow
@pytest.mark.usefixtures("without_cost")
@pytest.mark.parametrize("to", ["onnx", "pt2"])
def test_texts_of_every_length(to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from efficient_ft.config import check

    place = write_place(tmp_path)
    run(check(plain_text(place, method={"full": {}}, trainer__epochs=1)), tmp_path / "run")
    lines = tmp_path / "lines.txt"
    lines.write_text("the old apple\niron\nwe took the pear and the plum and then the grape of the old house\n")
    capsys.readouterr()
    out, printed = exported(tmp_path / "run", to, check=[lines])
    assert "the predicted classes agree for all 3 texts" in printed[1]
    assert Tokenizer.from_file(str(out / "tokenizer.json")).encode("iron").tokens == ["[CLS]", "iron", "[SEP]"]
    predict.main([str(tmp_path / "run"), str(lines), "--json", "--device", "cpu"])
    expected = json.loads(capsys.readouterr().out)
    predict.main([str(out), str(lines), "--json", "--batch-size", "1"])
    found = json.loads(capsys.readouterr().out)
    assert [one["text"] for one in found] == [one["text"] for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one["class"] == other["class"]
        assert one["probability"] == pytest.approx(other["probability"], abs=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("without_cost")
@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_a_network_of_transformers(kind: str, tmp_path: Path) -> None:
    run(configured(write_network(tmp_path / "net", kind), trainer__max_steps=2), tmp_path / "run")
    out, lines = exported(tmp_path / "run")
    assert "64 test images of the run" in lines[1]
    auto: Any = transformers.AutoModelForImageClassification
    model, trained = auto.from_pretrained(str(out)).eval(), load(out)
    x = torch.randn(3, 3, *trained.input.size)
    with torch.no_grad():
        torch.testing.assert_close(trained.model(x), model(x).logits, rtol=1e-3, atol=1e-4)
    processor = transformers.AutoImageProcessor.from_pretrained(str(out))
    assert list(processor.image_mean) == list(trained.input.mean)


@pytest.mark.slow
@pytest.mark.usefixtures("without_cost")
def test_one_of_several_data_sets(tmp_path: Path, folders: Path) -> None:
    config = config_of(folders, method={"full": {}}, trainer__epochs=1)
    run(config, tmp_path / "run")
    with pytest.raises(UserError, match=r"trained on several data sets\. Pass --task colours or planes"):
        exported(tmp_path / "run")
    out, lines = exported(tmp_path / "run", task="planes")
    assert "images of the run" in lines[1]
    found, expected = load(out), export.load(tmp_path / "run", "planes")
    assert found.class_names == expected.class_names == ["left", "middle", "right"]
    x = torch.randn(2, 3, *expected.input.size)
    torch.testing.assert_close(found.model(x), expected.model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_segmentation_is_rejected_with_the_reason(tmp_path: Path) -> None:
    from efficient_ft.config import check
    from efficient_ft.training.kinds.registry import kind_of

    assert not kind_of(check(plain_segmentation(tmp_path))).supports("export")
