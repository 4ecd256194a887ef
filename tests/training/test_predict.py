"""Tests of scripts/predict.py with a trained run and image files."""

from __future__ import annotations

import csv
import io
import json
import runpy
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from efficient_ft.cli.commands import predict as command
from efficient_ft.core.errors import UserError
from efficient_ft.core.format import format_percent
from efficient_ft.core.text import display_width
from efficient_ft.data import Transform, read_image
from efficient_ft.data.digits import load_digits
from efficient_ft.task import TASKS
from efficient_ft.training.kinds.base import Prediction, Predictions
from efficient_ft.training.kinds.classes import confusion_lines
from efficient_ft.training.kinds.files import image_files
from efficient_ft.training.output import export
from tests.conftest import unwrapped

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "predict.py"


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """A folder with two image files, one of them in a subfolder, and a text file."""
    images, _ = load_digits()
    for i, name in enumerate(("a.png", "deeper/b.jpg")):
        file = tmp_path / "digits" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((images[i] * 15).astype(np.uint8)).convert("RGB").save(file)
    (tmp_path / "digits" / "notes.txt").write_text("no image")
    return tmp_path / "digits"


def predict(*arguments: object) -> int:
    """Run the script and return its exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["predict.py", *map(str, arguments)])
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def test_classes_and_probabilities_of_files_and_folders(finished, digits, capsys):
    folder, _, _ = finished
    one = digits / "a.png"
    assert predict(folder, one, digits, "--top", 3, "--batch-size", 2, "--device", "cpu") == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line for line in lines if not line.startswith(" ")]
    assert names == [str(one), "digits/a.png", "digits/deeper/b.jpg"]
    assert len(lines) == 3 + 3 * 3
    trained = export.load(folder)
    inputs = Transform(trained.input)(read_image(one))[None]
    expected = TASKS["classification"].logits(trained.model, inputs)[0].softmax(-1)
    label, shown, percent = lines[1].split()
    assert (int(label), percent) == (int(expected.argmax()), "%")
    assert float(shown) == pytest.approx(100 * float(expected.max()), abs=0.1)


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    """Sixty digits in folders named after their classes, and one digit in another folder."""
    images, labels = load_digits()
    for i in range(61):
        file = tmp_path / "labelled" / (str(labels[i]) if i < 60 else "other") / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((images[i] * 15).astype(np.uint8)).convert("RGB").save(file)
    return tmp_path / "labelled"


def test_folders_named_after_classes_give_an_accuracy_and_confusions(finished, labelled, capsys):
    assert predict(finished[0], labelled, "--json") == 0
    shown = capsys.readouterr()
    rows = json.loads(shown.out)
    assert all(set(row) == {"path", "class", "probability", "label", "top"} for row in rows)
    assert all(row["top"][0] == {"class": row["class"], "probability": row["probability"]} for row in rows)
    known = [row for row in rows if row["label"] is not None]
    assert [Path(row["path"]).parent.name for row in known] == [row["label"] for row in known]
    right = sum(row["class"] == row["label"] for row in known)
    assert f"accuracy over 60 images (of 61) in class folders: {format_percent(right / 60)}" in shown.err
    assert predict(finished[0], labelled, "--top", 2, "--csv") == 0
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert list(table[0]) == ["path", "class", "probability", "label", "class_2", "probability_2"]
    assert [row["class"] for row in table] == [row["class"] for row in rows]
    assert [float(row["probability"]) for row in table] == [row["probability"] for row in rows]


def test_the_five_most_frequent_confusions_are_shown(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    pairs = Counter({("f", "f"): 5})
    for times, (label, predicted) in enumerate(
        [("a", "b"), ("b", "c"), ("c", "猫" * 60), ("d", "a"), ("e", "a"), ("f", "a")]
    ):
        pairs[label, predicted] = times + 1
    lines = confusion_lines(pairs, 40)
    assert lines[1] == "accuracy over 26 images (of 40) in class folders: 19.23 %"
    assert lines[2] == "  f → a: 6 of 11"
    assert len(lines) == 7
    assert max(map(display_width, lines)) <= 80
    assert confusion_lines(Counter(), 3) == []


def test_a_label_is_the_nearest_folder_in_any_case_and_any_form_of_accents(tmp_path):
    for name in ("Cat/deeper/x.png", "cafe\u0301/x.png", "DOG/x.png", "x.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    found = image_files([tmp_path], ["cat", "caf\u00e9", "dog", "Dog"])
    labels = {item.value.relative_to(tmp_path).parts[0]: item.label for item in found}
    assert labels == {"Cat": "cat", "cafe\u0301": "caf\u00e9", "DOG": None, "x.png": None}, "DOG may be either"


def test_wide_names_are_aligned_and_long_ones_shortened(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    names = ["猫", "e\u0301tude", "very long " * 20]

    class Found(Predictions):
        total, header = 1, ()

        def __iter__(self):
            yield Prediction("a.png", [(name, "50.00 %") for name in names], {}, [])

    command._print(Found(), names, None)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert {display_width(line) for line in lines} == {2 + 60 + 2 + 7}
    assert all(line.endswith("50.00 %") for line in lines)


def test_without_a_run_the_finished_ones_are_listed(finished, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert predict() == 0
    assert "There are no finished runs in outputs" in capsys.readouterr().out
    (tmp_path / "outputs").mkdir()
    shutil.copytree(finished[0], tmp_path / "outputs" / "mine")
    assert predict() == 0
    assert "  outputs/mine\n" in capsys.readouterr().out
    assert predict("outputs/mine") == 2
    assert "Pass image files" in unwrapped(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("missing.png", "there is no such file or folder. Pass image files"),
        ("notes.txt", "not readable as an image"),
        ("empty", "contains no images"),
    ],
)
def test_mistakes_end_with_one_line_and_status_2(finished, digits, capsys, given, message):
    (digits / "empty").mkdir()
    assert predict(finished[0], digits / given) == 2
    error = unwrapped(capsys.readouterr().err).strip()
    assert message in error
    assert given in error
    assert "\n" not in error


def test_files_in_a_folder_that_cannot_be_read_are_reported(tmp_path, capsys):
    for name in ("scan.dcm", "photo.NEF", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match=r"contains no images\. For \.nef files: convert .* For \.dcm files: convert"):
        list(image_files([tmp_path], []))
    Image.new("RGB", (8, 8)).save(tmp_path / "photo.png")
    assert [item.value for item in image_files([tmp_path], [])] == [tmp_path / "photo.png"]
    assert "1 .dcm file has no prediction: convert the files to PNG or TIFF." in unwrapped(capsys.readouterr().err)


def test_a_folder_without_a_result_is_refused(tmp_path, digits, capsys):
    assert predict(tmp_path, digits) == 2
    assert "model.safetensors" in unwrapped(capsys.readouterr().err)
    assert predict(tmp_path / "nowhere", digits) == 2
    assert "the folder does not exist" in unwrapped(capsys.readouterr().err)
