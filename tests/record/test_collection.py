"""Tests of the table of many runs: means over seeds, differing settings and omitted runs."""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from efficient_ft.cli.commands import collect as command
from efficient_ft.config import check
from efficient_ft.core.errors import UserError
from efficient_ft.record.collection import (
    collect,
    group_rows,
    groups,
    missing_seeds,
    notes,
    repeated,
    run_rows,
    varying,
    write_tables,
)
from efficient_ft.record.config_file import write_config
from tests.record.some import some_results
from tests.training.runs import plain_config


def write(folder: Path, test: float | None = 0.5, **changes: Any) -> None:
    """Write a finished run with a test accuracy."""
    config = check(plain_config(**changes))
    results = {**some_results(), "config": config.model_dump(mode="json"), "seed": config.seed}
    results["accuracy"] = {"best": 0.6, "last": 0.55, "split": "val", "test": test}
    folder.mkdir(parents=True)
    write_config(folder, config)
    (folder / "results.json").write_text(json.dumps(results))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for seed, test in ((0, 0.70), (1, 0.72), (2, 0.74)):
        write(tmp_path / f"full/{seed}", test, seed=seed)
    write(tmp_path / "other/0", 0.40, seed=0, optim__lr=0.5)
    write(tmp_path / "lora/0", 0.80, seed=0, method={"lora": {"rank": 4}})
    return tmp_path


def test_means_are_over_seeds_and_never_over_settings(runs: Path) -> None:
    header, rows = group_rows(collect(runs))
    table = [dict(zip(header, row, strict=True)) for row in rows]
    found = {(row["method"], row["optim.lr"]): row for row in table}
    assert len(table) == 3
    full = found["full", "0.01"]
    assert full["seeds"] == "0 1 2"
    assert full["test accuracy %"] == pytest.approx(72)
    assert full["test accuracy % ±"] == pytest.approx(2)
    assert found["full", "0.5"]["test accuracy %"] == pytest.approx(40)
    assert found["lora", "0.01"]["seeds"] == "0"
    assert found["lora", "0.01"]["test accuracy % ±"] is None


def test_runs_on_other_images_of_the_same_data_set_are_not_averaged(runs: Path) -> None:
    """Flowers-102 at 64 pixels and Flowers-102 at full size both have data=flowers102."""
    assert len(groups(collect(runs).runs)) == 3
    for seed, digest in ((0, "aa"), (1, "bb"), (2, "bb")):
        file = runs / f"full/{seed}/results.json"
        results = json.loads(file.read_text())
        results["data"]["digest"] = digest
        file.write_text(json.dumps(results))
    found = collect(runs)
    assert {tuple(run.folder for run in group) for group in groups(found.runs)} == {
        ("full/0",), ("full/1", "full/2"), ("other/0",), ("lora/0",)}  # fmt: skip
    assert any("full/1 and full/0 have the same settings but different images" in note for note in notes(found, True))


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root reads every file")
def test_results_that_may_not_be_read_are_not_called_unfinished(runs: Path) -> None:
    (runs / "full/0/results.json").chmod(0)
    assert "Permission denied" in collect(runs).ignored["full/0"]


def test_a_row_for_every_run_has_the_settings_that_differ_and_numbers(runs: Path) -> None:
    found = collect(runs)
    header, rows = run_rows(found)
    assert len(rows) == 5
    assert varying(found.runs) == ["optim.lr"]
    first = dict(zip(header, rows[0], strict=True))
    assert (first["run"], first["method"], first["model"], first["seed"]) == ("full/0", "full", "vit_digits", 0)
    assert (first["best accuracy %"], first["TFLOPs of the run"], first["seconds"]) == (60.0, 24e-12, 2.5)
    assert first["joules"] is None


@pytest.mark.usefixtures("wide")
def test_columns_are_named_after_the_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, metric in enumerate(("r2", "mean_average_precision", "mean_average_precision")):
        write(tmp_path / f"{metric}{seed}", -0.25, seed=seed, optim__lr=0.5 if metric == "r2" else 0.1)
        file = tmp_path / f"{metric}{seed}/results.json"
        results = json.loads(file.read_text())
        results["accuracy"]["metric"] = metric
        file.write_text(json.dumps(results))
    header, rows = run_rows(collect(tmp_path))
    table = [dict(zip(header, row, strict=True)) for row in rows]
    assert [row["test R²"] for row in table] == [None, None, -0.25]
    assert [row["last mAP %"] for row in table] == [55, 55, None]
    assert not any("accuracy" in name for name in header if not name.startswith("published"))
    assert {"test mAP % ±", "test R² ±"} <= set(group_rows(collect(tmp_path))[0])
    command.main([str(tmp_path), "--columns", "test R²,best mAP,best R²"])
    shown = capsys.readouterr().out
    assert "-0.2500" in shown
    assert "60.00 %" in shown
    assert "0.6000" in shown


def test_missing_seeds_are_named(runs: Path) -> None:
    said = missing_seeds(collect(runs))
    assert said == ["These runs were not repeated with seed 1, 2: lora/0 (lora), other/0 (full)."]


def test_of_a_repeated_seed_the_later_run_counts_and_the_other_is_named(runs: Path) -> None:
    for name, date, test in (("full/2", "2026-02-01", 0.74), ("full/again", "2026-01-01", 0.1)):
        if name == "full/again":
            write(runs / name, test, seed=2)
        file = runs / name / "results.json"
        results = json.loads(file.read_text())
        results["environment"]["date"] = date
        file.write_text(json.dumps(results))
    found = collect(runs)
    full = next(group for group in groups(found.runs) if len(group) == 3)
    assert [run.folder for run in full] == ["full/0", "full/1", "full/2"]
    (said,) = repeated(found)
    assert said == "Runs are excluded if a later run has the same settings and seed: full/again (replaced by full/2)."


def test_a_copy_of_a_run_counts_once_and_is_named(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = len(collect(runs).runs)
    shutil.copytree(runs / "full/1", runs / "zcopy")
    command.main([str(runs), "--runs", "--form", "csv"])
    shown = capsys.readouterr()
    assert len(list(csv.reader(shown.out.splitlines()))) == 1 + before
    assert "Copies of other runs are not included: zcopy (of full/1)." in shown.err


def test_accuracies_on_a_part_of_the_images_are_named(runs: Path) -> None:
    assert "limit_eval_batches" not in " ".join(notes(collect(runs), means=True))
    write(runs / "part/0", 0.5, trainer__limit_eval_batches=2)
    said = "Only some images were used for evaluation (trainer.limit_eval_batches): part/0."
    assert said in notes(collect(runs), means=True)
    *_, markdown = write_tables(collect(runs), runs / "table")
    assert said in markdown.read_text()


def test_settings_that_were_given_tell_runs_apart_where_only_one_has_the_method(runs: Path) -> None:
    write(runs / "wht/0", 0.5, method={"lbp_wht": {"order": 2, "bases": "l1"}})
    file = runs / "wht/0/results.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "arguments": ["method.lbp_wht.order=2"]}))
    assert "method.lbp_wht.order" in varying(collect(runs).runs)
    assert "method.lbp_wht.bases" not in varying(collect(runs).runs)


def test_runs_from_other_weights_can_be_told_apart(runs: Path) -> None:
    write(runs / "weights/0", 0.5, model__weights="other.safetensors")
    assert "model.weights" in varying(collect(runs).runs)


@pytest.mark.usefixtures("wide")
def test_what_cannot_be_read_is_left_out_and_named(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "full/0/results.json").write_text('{"format": 1, "accur')
    old = json.loads((runs / "full/1/results.json").read_text())
    (runs / "full/1/results.json").write_text(json.dumps({**old, "format": 2}))
    (runs / "full/2/results.json").unlink()
    command.main([str(runs)])
    shown = capsys.readouterr()
    assert "full/0 is excluded: The file results.json is damaged" in shown.err, "without an absolute path"
    assert "not valid JSON" in shown.err
    assert "full/1 is excluded: " in shown.err
    assert "it has format 2, but this version reads format 1" in shown.err
    assert "Running, interrupted and failed runs are not included: full/2." in shown.err
    assert "full  " in shown.out
    for form in ("csv", "json", "markdown", "latex"):
        command.main([str(runs), "--form", form, "--runs"])
        assert "other/0" in capsys.readouterr().out


@pytest.mark.parametrize(("make", "said"), [(False, "does not exist"), (True, "contains no finished run")])
def test_a_folder_without_runs_is_refused(tmp_path: Path, make: bool, said: str) -> None:
    folder = tmp_path / "runs"
    if make:
        folder.mkdir()
    with pytest.raises(UserError, match=said):
        collect(folder)
