"""scripts/predict.py on a trained run and real image files."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from efficient_ft.data import Transform, read_image
from efficient_ft.training import export

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "predict.py"


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """Two digits as image files in a folder, one below the other, and a text file."""
    images = load_digits().images
    for i, name in enumerate(("a.png", "deeper/b.jpg")):
        file = tmp_path / "digits" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((images[i] * 15).astype(np.uint8)).convert("RGB").save(file)
    (tmp_path / "digits" / "notes.txt").write_text("no image")
    return tmp_path / "digits"


def predict(*arguments: object) -> int:
    """The script's exit status."""
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
    assert names == [str(one), str(one), str(digits / "deeper" / "b.jpg")]
    assert len(lines) == 3 + 3 * 3
    trained = export.load(folder)
    expected = export.probabilities(trained.model, Transform(trained.input)(read_image(one))[None])[0]
    label, shown = lines[1].split()
    assert int(label) == int(expected.argmax())
    assert float(shown.rstrip("%")) == pytest.approx(100 * float(expected.max()), abs=0.01)


@pytest.mark.parametrize(
    ("given", "message"),
    [("missing.png", "no such file"), ("notes.txt", "not readable as an image"), ("empty", "no images in this folder")],
)
def test_mistakes_end_with_one_line_and_status_2(finished, digits, capsys, given, message):
    (digits / "empty").mkdir()
    assert predict(finished[0], digits / given) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert given in error
    assert "\n" not in error


def test_a_folder_without_a_result_is_refused(tmp_path, digits, capsys):
    assert predict(tmp_path, digits) == 2
    assert "model.safetensors" in capsys.readouterr().err
    assert predict(tmp_path / "nowhere", digits) == 2
    assert "no such folder" in capsys.readouterr().err
