"""Tests of results.json, config.yaml and the environment: they are read back unchanged, or rejected."""

from __future__ import annotations

import copy
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from efficient_ft.config import check
from efficient_ft.core.errors import UserError
from efficient_ft.record import environment as module
from efficient_ft.record.config_file import read_config, write_config
from efficient_ft.record.environment import environment
from efficient_ft.record.formats import FORMAT, USE_ITS_VERSION, OtherVersionError
from efficient_ft.record.results import are_correct, correct_samples, flatten, read_results, write_results
from tests.record.some import some_results
from tests.training.runs import plain_config


def test_results_are_read_as_written(tmp_path: Path) -> None:
    results = some_results()
    write_results(tmp_path, results)
    assert read_results(tmp_path) == results


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r.pop("format"), "another version of efficient-ft (it has no format number"),
        (lambda r: r.update(format=FORMAT - 1), f"another version of efficient-ft (it has format {FORMAT - 1}"),
        (lambda r: r.update(format="new"), "another version"),
        (lambda r: r.update(format=FORMAT + 1), f"another version of efficient-ft (it has format {FORMAT + 1}"),
    ],
)
def test_results_of_another_version_are_refused(tmp_path: Path, change: Any, said: str) -> None:
    results = some_results()
    change(results)
    write_results(tmp_path, results)
    with pytest.raises(OtherVersionError) as caught:
        read_results(tmp_path)
    assert said in str(caught.value)
    assert "resume=never" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "contains no results.json: the run has not finished. DO"),
        ('{"format": 1, "acc', "not valid JSON. DO"),
        ("[1]", "does not contain a JSON object. DO"),
        ("[" * 100_000, "not valid JSON. DO"),
        (json.dumps(some_results()).replace("0.25", "NaN", 1), "not valid JSON. DO"),
        (json.dumps({**some_results(), "accuracy": {"best": 1}}), "accuracy.last is invalid: "),
        (json.dumps({**some_results(), "trainable_parameters": "many"}), "trainable_parameters is invalid: "),
        (json.dumps({**some_results(), "trainable_parameters": "12"}), "trainable_parameters is invalid: "),
        (json.dumps({**some_results(), "trainable_parameters": True}), "trainable_parameters is invalid: "),
        (json.dumps(some_results()).replace("0.25", "1e999", 1), "not valid JSON. DO"),
    ],
)
def test_damaged_results_are_refused(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "results.json").write_text(text)
    with pytest.raises(UserError) as caught:
        read_results(tmp_path, "DO")
    assert said in str(caught.value)


def results_of_classes() -> Any:
    """Return results of a classifier of three classes and of a multi-label classifier of two labels."""
    results = some_results()
    calibration = {"samples": [0, 6], "accuracy": [0.0, 0.5], "confidence": [0.0, 0.75]}
    classes = {"support": [3, 2, 1], "predicted": [2, 3, 1], "correct": [1, 1, 1], "confusions": "0>1:2 1>0:1",
               "calibration": calibration}  # fmt: skip
    labels = {"support": [3, 0], "predicted": [2, 1], "correct": [2, 0], "average_precision": [0.5, None]}
    data = {"splits": {"val": 6}, "skipped": 0, "accuracy": {"val": 0.5}}
    results["data"]["summary"] = {"a": {"class_names": ["x", "y", "z"]}, "b": {"class_names": ["x", "y"]}}
    results["data"]["tasks"] = {
        "a": {**data, "scores": {"val": {"accuracy": 0.5, "calibration_error": 0.25}}, "classes": {"val": classes}},
        "b": {**data, "scores": {"val": {"mean_average_precision": 0.5}}, "labels": {"val": labels}},
    }
    return results


@pytest.mark.parametrize(
    ("task", "change", "said"),
    [
        ("a", {"support": [3, 2]}, "support has 2 values, but class_names has 3"),
        ("a", {"correct": [1, 1, 1, 1]}, "correct has 4 values, but class_names has 3"),
        ("a", {"support": [0, 0, 0], "correct": [0, 0, 0], "confusions": ""}, "the support of all classes is 0"),
        ("a", {"support": [3, 0, 1]}, "correct is negative, or exceeds support or predicted"),
        ("a", {"correct": [-1, 1, 1]}, "correct is negative, or exceeds support or predicted"),
        ("a", {"confusions": "x"}, "confusions is not a list of entries such as 3>7:2"),
        ("a", {"confusions": "0>1:-2"}, "confusions is not a list of entries such as 3>7:2"),
        ("a", {"confusions": "0>1:1 1>0:1"}, "the sums of correct and confusions differ from support"),
        ("a", {"confusions": "0>7:2 1>0:1"}, "the sums of correct and confusions differ from predicted"),
        ("a", {"confusions": "7>1:2 1>0:1"}, "the sums of correct and confusions differ from support"),
        ("a", {"calibration": {"samples": [6], "accuracy": [], "confidence": [1.0]}}, "the lists in calibration"),
        ("b", {"average_precision": [0.5]}, "average_precision has 1 values, but class_names has 2"),
        ("b", {"support": [1, 0]}, "correct is negative, or exceeds support or predicted"),
    ],
)
def test_results_of_classes_that_contradict_each_other_are_rejected(
    tmp_path: Path, task: str, change: dict[str, Any], said: str
) -> None:
    results = results_of_classes()
    write_results(tmp_path, results)
    assert read_results(tmp_path) == results
    kind = "classes" if task == "a" else "labels"
    results["data"]["tasks"][task][kind]["val"].update(change)
    write_results(tmp_path, results)
    with pytest.raises(UserError) as caught:
        read_results(tmp_path, USE_ITS_VERSION)
    assert f"results.json is damaged: the entry data.tasks.{task}.{kind}.val is invalid: {said}" in str(caught.value)
    assert str(caught.value).endswith(". Repeat the run.")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.pop("summary"), "data.tasks.a.classes requires the class names in data.summary"),
        (lambda d: d.update(summary={"a": 1}), "data.tasks.a.classes requires the class names in data.summary"),
        (lambda d: d["summary"]["b"].update(class_names=[1, 2]), "data.tasks.b.labels requires the class names"),
        (lambda d: d["tasks"]["a"].pop("scores"), "requires the metrics in data.tasks.a.scores.val"),
        (lambda d: d["tasks"]["b"]["scores"].update(val={"f1_macro": "x"}), "requires the metrics in data.tasks.b"),
        (lambda d: d["tasks"]["a"]["scores"]["val"].pop("calibration_error"), "scores.val has no calibration_error"),
    ],
)
def test_results_of_classes_require_names_and_metrics(tmp_path: Path, change: Any, said: str) -> None:
    results = results_of_classes()
    change(results["data"])
    write_results(tmp_path, results)
    with pytest.raises(UserError, match=r"results\.json is damaged: ") as caught:
        read_results(tmp_path)
    assert said in str(caught.value)


def test_the_configuration_is_read_as_written(tmp_path: Path) -> None:
    config = check(plain_config())
    write_config(tmp_path, config)
    assert read_config(tmp_path) == config


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c["data"].update(workers=2), "has the setting data.workers, which is unknown to this version"),
        (lambda c: c["optim"].update(removed=2), "has the setting optim.removed, which is unknown to this version"),
    ],
)
def test_unknown_settings_show_another_version(tmp_path: Path, change: Any, said: str) -> None:
    import yaml

    plain = copy.deepcopy(plain_config())
    change(plain)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(plain))
    with pytest.raises(OtherVersionError) as caught:
        read_config(tmp_path)
    assert said in str(caught.value)
    assert "version of efficient-ft (it " in str(caught.value)
    assert "Choose another hydra.run.dir, or set resume=never" in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 5000, "a: &a [*a]", "seed: 2001-99-99", "a: !!int ''"])
def test_a_damaged_configuration_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"config\.yaml cannot be read: it is not valid YAML\. DO"):
        read_config(tmp_path, "DO")


def test_no_configuration_at_all(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"contains no config\.yaml"):
        read_config(tmp_path)
    with pytest.raises(UserError, match="is not a folder"):
        read_config(tmp_path / "nowhere")


@given(st.lists(st.booleans(), max_size=70))
def test_correct_samples_are_read_as_written(correct: list[bool]) -> None:
    record = correct_samples(correct)
    assert are_correct(record) == correct
    assert len(record["bits"]) == 2 * math.ceil(len(correct) / 8)


def test_the_first_sample_is_the_most_significant_bit() -> None:
    assert correct_samples([True, False, False, False, False, True]) == {"samples": 6, "bits": "84"}


def test_the_commit_of_a_checkout_is_recorded(tmp_path: Path) -> None:
    package = tmp_path / "efficient_ft" / "record"
    package.mkdir(parents=True)
    source = Path(module.__file__)
    copied = Path(shutil.copy(source, package / "environment.py"))
    read = f"import runpy; print(runpy.run_path({str(copied)!r})['commit']())"

    def shown() -> str:
        return subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=True).stdout.strip()

    def git(*arguments: str) -> str:
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *author, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert shown() == "None", "not a checkout"
    git("init", "-q")
    git("add", "efficient_ft")
    (tmp_path / "conf").mkdir()
    git("commit", "-q", "-m", "One file")
    assert shown() == git("rev-parse", "HEAD")
    copied.write_text(source.read_text(encoding="utf-8") + "# changed\n", encoding="utf-8")
    assert shown() == git("rev-parse", "HEAD") + "+"


def test_flatten() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": [2]}) == {"a.b": 1, "a.c": {}, "d": [2]}


def test_the_environment_names_versions_and_the_device() -> None:
    found = environment("cpu", allocator="system")
    assert torch.__version__.startswith(found["torch"])  # the local version may be omitted
    assert found["threads"] == torch.get_num_threads()
    assert found["allocator"] == "system"
    assert found["device"]
    assert json.loads(json.dumps(found)) == found


def test_reading_a_run_loads_no_torch() -> None:
    code = "import sys, efficient_ft.record.results, efficient_ft.record.config_file, efficient_ft.record.step_stats\n"
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True)
