"""A package adds a kind of task with one module and one YAML: regression of one number for each image."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

HERE = Path(__file__).parent

#: Evaluates, predicts and checks as the commands do, given the run, the images and the settings of the data.
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
    """Write an installed distribution with the kind of `regression_kind`."""
    package = site / "image_regression"
    (package / "conf" / "data").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "kind.py").write_text((HERE / "regression_kind.py").read_text())
    (package / "conf" / "data" / "numbers.yaml").write_text(
        "# Images with a number each: ROOT/numbers.csv.\nname: numbers\nroot: ./data\nbatch_size: 8\nnum_workers: 0\n"
        "augment: {flip: false, scale: [0.9, 1.0]}\n"
    )
    info = site / "image_regression-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: image-regression\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[efficient_ft.kinds]\nregression = image_regression.kind:regression\n")


def _write_images(root: Path) -> None:
    """Write 60 gray images whose brightness is the number."""
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


def test_a_kind_of_another_package_trains_evaluates_and_predicts(tmp_path: Path) -> None:
    _install(tmp_path / "site")
    _write_images(tmp_path / "images")
    data = ["task=regression", "data=numbers", f"data.root={tmp_path / 'images'}"]
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
    assert f"test  {100 * scores['r2']:.2f} %" in shown  # of `evaluate`
    with open(tmp_path / "images" / "numbers.csv", newline="") as file:
        true = float(next(csv.DictReader(file))["number"])
    predicted = json.loads(shown[shown.index("[\n") : shown.index("]\n") + 1])
    assert abs(predicted[0]["number"] - true) < 0.3
    assert (tmp_path / "check" / "samples.png").is_file()
