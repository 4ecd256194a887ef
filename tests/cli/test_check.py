"""Tests of ``efficient-ft check``: the report of a data set, the contact sheet and the exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from efficient_ft.cli.commands.check import main, with_task
from efficient_ft.core.errors import UserError
from efficient_ft.data import ImageData
from tests.data.conftest import folders  # noqa: F401  (a fixture)


def test_a_good_folder_has_status_0_a_sheet_and_a_record(
    folders: Callable[..., Path],  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root, out = folders(train={"cat": 6, "dog": 6}, test={"cat": 2, "dog": 2}), tmp_path / "out"
    before = sorted(tmp_path.rglob("*"))
    assert main(["data=folder", f"data.root={root}", "data.num_workers=0", "--html", f"--out={out}"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "2 classes: cat, dog" in printed
    assert "No model is given. Samples are prepared for deit_tiny." in printed
    assert sorted(path.name for path in out.iterdir()) == ["check.json", "samples.html", "samples.png"]
    assert [path for path in sorted(tmp_path.rglob("*")) if out not in (path, *path.parents)] == before
    assert json.loads((out / "check.json").read_text())[""]["splits"]["test"]["samples"] == 4
    with Image.open(out / "samples.png") as sheet:
        assert sheet.width > 1000


@pytest.mark.parametrize("layout", [{"cat": 3}, {"train": {"cat": 2, "dog": 2}, "test": {"bird": 1}}])
def test_a_folder_that_training_rejects_has_status_1_and_writes_nothing(
    folders: Callable[..., Path],  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    layout: dict,
) -> None:
    assert main(["data=folder", f"data.root={folders(**layout)}", f"--out={tmp_path / 'out'}"]) == 1
    assert "Training would reject this data set." in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_unusable_files_are_grouped_by_reason(
    folders: Callable[..., Path],  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root, out = folders(train={"cat": 30, "dog": 30}, test={"cat": 2, "dog": 2}), tmp_path / "out"
    for i, path in enumerate(sorted((root / "train").rglob("*.jpg"))):
        path.write_bytes((b"", b"{}")[i % 2])
    (root / "test/cat/0.jpg").write_bytes(b"%PDF")
    assert main(["data=folder", f"data.root={root}", "data.num_workers=0", f"--out={out}"]) == 1
    printed = capsys.readouterr().out
    text = " ".join(printed.split())
    assert "61 samples cannot be used." in text
    assert "30 × the file is not readable as an image (the file is empty)." in text
    assert "30 × the file is not readable as an image (the file contains JSON" in text
    assert text.count("… and 27 more") == 2
    assert f"{root}/test/cat/0.jpg: the file is not readable as an image (the file contains PDF" in text
    assert printed.count(str(root / "train")) <= 7  # three files of each problem, and the contact sheet
    assert len(json.loads((out / "check.json").read_text())[""]["problems"]) == 61


def test_the_task_and_a_model_are_those_of_the_data() -> None:
    assert with_task(["data=digits"]) == (["data=digits"], "")
    assert with_task(["data=mask_folder"])[0] == [
        "data=mask_folder",
        "task=segmentation",
        "model=deeplabv3_mobilenetv2",
    ]
    assert with_task(["data=text_folder", "model=bert_base"])[0] == ["data=text_folder", "model=bert_base", "task=text"]
    with pytest.raises(UserError, match=r"requires a model with a tokenizer\. Add model=bert_base"):
        with_task(["data=rte"])


def test_rows_of_a_label_file_are_skipped_as_in_training(
    folders: Callable[..., Path],  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = folders(train={"cat": 4, "dog": 4})
    files = sorted(path.relative_to(root) for path in root.rglob("*.jpg"))
    lines = [f"{path},{'' if i == 0 else path.parent.name}" for i, path in enumerate(files)]
    (root / "labels.csv").write_text("\n".join(["file,label", *lines]))
    (root / files[1]).write_bytes(b"")
    words = ["data=labels", f"data.root={root}", "data.labels.file=labels.csv", f"--out={tmp_path / 'out'}"]
    assert main(words) == 1
    assert "skip such rows with data.on_corrupt=skip" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr(ImageData, "_read", None)  # the inspection decodes each image once
    assert main([*words, "data.on_corrupt=skip"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 row is left out: no label in column 'label'." in printed
    assert "1 sample cannot be used. These samples are skipped." in printed
    assert "Correct" not in printed


def test_mistakes_in_settings_are_errors_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Did you mean 'root'"):
        main(["data=folder", "data.rooot=x"])
    with pytest.raises(UserError, match="does not exist"):
        main(["data=folder", f"data.root={tmp_path / 'nowhere'}"])
    with pytest.raises(UserError, match="evaluate must be left out with check"):
        main(["data=digits", f"evaluate={tmp_path}"])
