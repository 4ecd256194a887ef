"""Tests of studies: their runs, the best value of each row, records without paths and continuation."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from efficient_ft.cli.commands import run_command
from efficient_ft.cli.commands import study as command
from efficient_ft.core.errors import UserError
from efficient_ft.record import study
from efficient_ft.record.formats import OtherVersionError
from efficient_ft.record.results import are_correct, correct_samples
from efficient_ft.record.rows import MetricsFile
from efficient_ft.record.study import EpochPoint, Records
from efficient_ft.record.study_start import SearchStarts
from efficient_ft.report.studies import notes
from tests.cli.program import REPOSITORY
from tests.record.some import STUDY, some_results


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "study.yaml").write_text(STUDY)
    return tmp_path


def results(best: float, test: float | None = None) -> Any:
    found = copy.deepcopy(some_results())
    found["accuracy"] = {"best": best, "last": best, "split": "val", "test": test}
    found["environment"] = {"torch": "2", "device": "a CPU", "date": "today", "efficient_ft": "0", "threads": 1}
    return found


def test_every_row_is_tuned_over_the_same_values_and_its_best_is_run_with_every_seed(folder: Path) -> None:
    records = Records(folder)
    tuning = records.tuning_runs(["full", "head"])
    assert [(run.row, run.value, run.seed) for run in tuning] == [
        ("full", 1e-3, 0), ("full", 1e-2, 0), ("head", 1e-3, 0), ("head", 1e-2, 0)]  # fmt: skip
    assert tuning[2].arguments[-4:] == ("method=head", "optim.warmup_steps=0", "optim.lr=0.001", "seed=0")
    assert records.seed_runs(["full"]) == []
    for run, best in zip(tuning, (0.5, 0.9, 0.8, 0.7), strict=True):
        records.add(run, results(best))
    assert (records.best_value("full"), records.best_value("head")) == (1e-2, 1e-3)
    runs = records.seed_runs(["full", "head"])
    assert [(run.row, run.value, run.seed) for run in runs] == [
        ("full", 1e-2, 0), ("head", 1e-3, 0), ("full", 1e-2, 1), ("head", 1e-3, 1)]  # fmt: skip
    assert len(records.finished("full")) == 1


def test_finalists_are_compared_over_all_seeds(folder: Path) -> None:
    finalists = "seed: 0, finalists: {full: [1.0e-3, 1.0e-2]}}"
    (folder / "study.yaml").write_text(STUDY.replace("seed: 0}", finalists).replace("[0, 1]", "[1, 2]"))
    records = Records(folder)
    assert records.seed_runs(["full"]) == []
    for run, best in zip(records.tuning_runs(["full", "head"]), (0.5, 0.9, 0.8, 0.7), strict=True):
        records.add(run, results(best))
    runs = records.seed_runs(["full", "head"])
    assert [(run.row, run.value, run.seed) for run in runs] == [
        ("full", 1e-3, 1), ("full", 1e-2, 1), ("head", 1e-3, 1),
        ("full", 1e-3, 2), ("full", 1e-2, 2), ("head", 1e-3, 2)]  # fmt: skip
    for run, best in zip(runs[:4], (0.7, 0.8, 0.6, 0.9), strict=True):
        records.add(run, results(best))
    assert records.best_value("full") == 1e-2, "the value of the search, because a run is missing"
    assert [record["value"] for record in records.finished("full")] == [1e-2]
    assert any("full will be selected from 0.001 and 0.01 by" in note for note in notes(records, ["full"]))
    records.add(runs[4], results(0.75))  # means of 0.8 and 0.775
    assert records.best_value("full") == 1e-3
    assert [(record["value"], record["seed"]) for record in records.finished("full")] == [(1e-3, 1), (1e-3, 2)]
    assert any("full is selected from 0.001 and 0.01 by" in note for note in notes(records, ["full"]))
    records.add_diverged(runs[3], "The loss is nan.")
    assert records.best_value("full") == 1e-2
    records.add_diverged(runs[1], "The loss is nan.")
    assert records.best_value("full") == 1e-3, "all finalists diverged once"


def test_the_best_value_of_the_search_is_a_finalist(folder: Path) -> None:
    finalists = "seed: 0, finalists: {full: [1.0e-3, 1.0e-3]}}"
    (folder / "study.yaml").write_text(STUDY.replace("seed: 0}", finalists))
    records = Records(folder)
    assert records.finalists("full") == []
    for run, best in zip(records.tuning_runs(["full"]), (0.5, 0.9), strict=True):
        records.add(run, results(best))
    assert records.finalists("full") == [1e-3, 1e-2]
    assert [(run.value, run.seed) for run in records.seed_runs(["full"])] == [
        (1e-3, 0), (1e-2, 0), (1e-3, 1), (1e-2, 1)]  # fmt: skip


def test_a_record_contains_the_curve_of_its_run(folder: Path) -> None:
    metrics = MetricsFile(folder)
    for epoch in (1, 2):
        metrics.append({"step": 3 * epoch - 1, "epoch": epoch, "train_loss": 1.0})
        metrics.append(
            {"step": 3 * epoch, "epoch": epoch, "train_loss_epoch": 1 / epoch, "val_accuracy": epoch / 3, "val_loss": 1}
        )
    curve = study.curve_of(folder, {"split": "val"})
    assert curve == [{"epoch": 1, "loss": 1.0, "accuracy": 0.33333}, {"epoch": 2, "loss": 0.5, "accuracy": 0.66667}]
    records = Records(folder)
    run = records.tuning_runs(["full"])[0]
    records.add(run, results(0.5), curve)
    found = Records(folder).find(run)
    assert found is not None
    assert found["curve"] == curve
    assert study.curve_of(folder / "missing", {"split": "val"}) == []


def test_a_run_on_other_images_is_not_recorded(folder: Path) -> None:
    records = Records(folder)
    first, second, *_ = records.tuning_runs(["full"])
    found = results(0.5)
    found["data"]["digest"] = "aa"
    records.add(first, found)
    found["data"]["digest"] = "bb"
    with pytest.raises(UserError, match=r"full optim\.lr=0\.01 seed=0 \(data\.root\) differ from the images of 1"):
        records.add(second, found)
    stale = Records(folder)
    stale.runs = []  # the state before another process wrote its record
    with pytest.raises(UserError, match="differ from the images of 1 of the records"):
        stale.add(second, found)
    assert Records(folder).find(second) is None
    other = replace(second, arguments=(*second.arguments, "data=cifar10"))
    records.refuse_other_images(other, "bb")  # a different data set is accepted
    found["data"]["digest"] = "aa"
    records.add(second, found)
    assert records.find(second) is not None


def test_values_are_passed_on_with_all_their_digits() -> None:
    assert [study.shown(value) for value in (1e-4, 3e-5, 0.00012345678, 8.0, 1.5e6, 0.001)] == [
        "0.0001", "3e-05", "0.00012345678", "8", "1500000", "0.001"]  # fmt: skip


def test_the_search_begins_in_the_middle_and_ends_with_the_neighbors_of_the_best(folder: Path) -> None:
    four = "values: [1.0e-3, 1.0e-2]", "values: [1.0e-1, 1.0e-4, 1.0e-3, 1.0e-2, 1.0e-5]"
    (folder / "study.yaml").write_text(STUDY.replace(*four))
    records = Records(folder)

    def search(row: str, accuracies: dict[float, float | None]) -> list[list[float]]:
        rounds = []
        while runs := records.tuning_runs([row]):
            assert records.best_value(row) is None
            rounds.append([run.value for run in runs])
            for run in runs:
                found = accuracies[run.value]
                records.add(run, results(found)) if found is not None else records.add_diverged(run, "The loss is nan.")
        return rounds

    # The grid has the values 1e-5, 1e-4, 1e-3, 1e-2 and 1e-1.
    assert search("full", {1e-4: 0.6, 1e-3: 0.9, 1e-2: 0.8}) == [[1e-4, 1e-3], [1e-2]]
    assert records.best_value("full") == 1e-3
    assert search("head", {1e-5: 0.3, 1e-4: None, 1e-3: None}) == [[1e-4, 1e-3], [1e-5]]
    assert records.best_value("head") == 1e-5
    (folder / "records.json").unlink()
    records = Records(folder)
    assert search("full", {1e-4: 0.6, 1e-3: 0.7, 1e-2: 0.8, 1e-1: 0.8}) == [[1e-4, 1e-3], [1e-2], [1e-1]]
    assert records.best_value("full") == 1e-2, "the lower of equals"
    assert search("head", {1e-4: 0.805, 1e-3: 0.8, 1e-5: 0.7, 1e-2: 0.82, 1e-1: 0.6}) == [
        [1e-4, 1e-3], [1e-5, 1e-2], [1e-1]], "a value within a point of the best may be noise"  # fmt: skip
    assert records.best_value("head") == 1e-2


def test_records_go_on_on_another_machine_and_hold_no_paths(folder: Path) -> None:
    first = Records(folder)
    run = first.tuning_runs(["full"])[0]
    first.add(run, results(0.5, test=0.4))
    again = Records(folder)
    held = again.find(run)
    assert held is not None
    assert held["accuracy"]["test"] == 0.4
    assert "config" not in held
    assert str(folder) not in (folder / "records.json").read_text()
    again.add(run, results(0.6))
    assert len(Records(folder).runs) == 1, "a repeated run replaces its record"


def test_a_record_of_other_settings_does_not_count(folder: Path) -> None:
    records = Records(folder)
    run = records.tuning_runs(["full"])[0]
    records.add(run, results(0.5))
    (folder / "study.yaml").write_text(STUDY.replace("trainer.max_steps=2", "trainer.max_steps=3"))
    changed = Records(folder)
    again = changed.tuning_runs(["full"])[0]
    assert changed.find(again) is None
    assert notes(changed, ["full"])[0] == "Runs with earlier settings of the study are not used (number of runs: 1)."
    changed.add(again, results(0.6))
    assert [record["accuracy"]["best"] for record in Records(folder).runs] == [0.5, 0.6], "nothing is lost"


def test_records_that_differ_in_ignored_settings_count_in_the_search_alone(folder: Path) -> None:
    precision = STUDY.replace("data=digits,", "data=digits, trainer.precision=bf16,")
    (folder / "study.yaml").write_text(precision)
    records = Records(folder)
    for run, best in zip(records.tuning_runs(["full", "head"]), (0.5, 0.9, 0.8, 0.7), strict=True):
        records.add(run, results(best))
    records.add(records.run("full", 1e-2, 1), results(0.9))
    (folder / "study.yaml").write_text(STUDY)
    assert Records(folder).best_value("full") is None
    (folder / "study.yaml").write_text(STUDY.replace("seed: 0}", "seed: 0, ignore: [trainer.precision]}"))
    records = Records(folder)
    assert (records.best_value("full"), records.best_value("head")) == (1e-2, 1e-3)
    assert records.tuning_runs(["full", "head"]) == []
    assert records.finished("full") == []
    assert notes(records, ["full"])[:2] == [
        "The search also uses runs with a different trainer.precision (number of runs: 4).",
        "Runs with earlier settings of the study are not used (number of runs: 1).",
    ]
    low, high = (records.run("full", value, 0) for value in (1e-3, 1e-2))
    records.add(high, results(0.4))
    assert records.best_value("full") == low.value, "the study's own record comes before the other"
    assert (records.of_the_search_alone(), records.of_other_settings(), len(records.runs)) == (3, 2, 6)


def test_a_diverged_run_is_a_finding_and_never_the_best(folder: Path) -> None:
    records = Records(folder)
    low, high = records.tuning_runs(["full"])
    records.add(low, results(0.5))
    records.add_diverged(high, "The loss is nan at step 3.")
    assert records.best_value("full") == 1e-3
    for run in records.tuning_runs(["head"]):
        records.add_diverged(run, "The loss is nan at step 1.")
    assert records.best_value("head") is None
    assert Records(folder).finished("head") == []


def test_records_contain_the_samples_that_are_predicted_correctly(folder: Path) -> None:
    records, found = Records(folder), results(0.5)
    correct = [True, False, True, True, False]
    found["data"]["correct"] = {"val": correct_samples([True]), "test": correct_samples(correct)}
    records.add(records.tuning_runs(["full"])[0], found)
    assert are_correct(Records(folder).runs[0]["correct"]) == correct


def test_damaged_records_are_refused(folder: Path) -> None:
    (folder / "records.json").write_text('{"format": 1, "runs": [{}]}')
    with pytest.raises(UserError, match="is damaged"):
        Records(folder)
    (folder / "records.json").write_text(
        '{"format": 1, "runs": [{"row": "full", "value": 1, "seed": 0, "settings": [], "accuracy": {"best": 1}}]}'
    )
    with pytest.raises(UserError, match=r"runs\.0\.executed: Field required\)\. Restore the file from a backup"):
        Records(folder)
    (folder / "records.json").write_text('{"runs": [')
    with pytest.raises(UserError, match="is damaged"):
        Records(folder)
    (folder / "records.json").write_text('{"format": 2, "runs": []}')
    with pytest.raises(OtherVersionError, match="it has format 2"):
        Records(folder)


def test_the_report_has_accuracies_over_the_seeds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = Records(folder)
    for run in records.tuning_runs(["full"]):
        records.add(run, results(run.value, test=0.5))
    records.add(records.seed_runs(["full"])[1], results(0.5, test=0.7))
    run_command("study", [str(folder), "--report"])
    shown = capsys.readouterr().out
    assert "60.00 [50.00…70.00]" in shown
    assert "0.01*" in shown, "a value at the end of the grid"
    assert "These rows have not been tuned yet: head." in shown
    for run in records.tuning_runs(["head"]):
        records.add_diverged(run, "The loss is nan.")
    assert "The runs with seed 0 were also used to select optim.lr." in shown
    run_command("study", [str(folder), "--report", "--rows", "head"])
    assert "These rows diverged at every value: head." in capsys.readouterr().out


def test_the_report_compares_rows_on_the_same_test_images(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = Records(folder)
    for run in records.tuning_runs(["full", "head"]):
        found = results(run.value, test=0.5)
        found["data"]["correct"] = {"test": correct_samples([True, True, run.row == "full", False])}
        records.add(run, found)
    run_command("study", [str(folder), "--report"])
    shown = capsys.readouterr().out
    assert "full [95 %]" in shown, "the last line of the heading"
    assert "−25.0 [−75.0…+0.0]" in shown


def test_two_processes_on_one_study_keep_each_other_s_records(folder: Path) -> None:
    one, other = Records(folder), Records(folder)
    one.add(one.tuning_runs(["full"])[0], results(0.5))
    other.add(other.tuning_runs(["head"])[0], results(0.6))
    assert [run["row"] for run in Records(folder).runs] == ["full", "head"]


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_is_trained(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("efficient_ft.record.study.os.access", lambda *_: False)
    monkeypatch.setattr("efficient_ft.cli.commands.study.run_jobs", lambda *_: pytest.fail("it trained"))
    with pytest.raises(UserError, match=r"is not writable\. Copy study\.yaml to another folder"):
        command.main([str(folder)])


def test_an_ignored_setting_that_does_not_exist_is_refused(folder: Path) -> None:
    (folder / "study.yaml").write_text(STUDY.replace("seed: 0}", "seed: 0, ignore: [trainer.precison]}"))
    with pytest.raises(UserError, match=r"tune\.ignore lists trainer\.precison, .* Did you mean 'trainer\.precision'"):
        command.main([str(folder), "--report"])
    (folder / "study.yaml").write_text(STUDY.replace("seed: 0}", "seed: 0, ignore: [trainer.precision]}"))
    command.main([str(folder), "--report"])


def test_settings_that_change_the_study_are_refused_on_the_command_line(folder: Path) -> None:
    for given in ("trainer.max_steps=1", "optim.lr=1", "model=deit_tiny", "model.weights_key=teacher"):
        with pytest.raises(UserError, match=f"^The setting {given.partition('=')[0]} changes the runs of the study"):
            command.main([str(folder), given])


@pytest.mark.slow
def test_runs_that_train_nothing_or_are_the_same_have_no_place_in_a_study(folder: Path) -> None:
    (folder / "study.yaml").write_text(STUDY.replace("cost.baseline=none", "cost_only=true"))
    with pytest.raises(
        UserError, match=r"The run full optim\.lr=0\.001 seed=0 does not train with cost_only or evaluate"
    ):
        command.main([str(folder)])
    own = STUDY.replace("vary: [", "vary: [trainer.progress, ")
    (folder / "study.yaml").write_text(own + "  again: [method=full, trainer.progress=false]\n")
    with pytest.raises(UserError, match=r"again optim.* and full .* are identical\. Remove one of the rows"):
        command.main([str(folder)])
    assert not (folder / "records.json").exists()


@pytest.mark.exhaustive
def test_a_study_runs_and_is_continued(folder: Path) -> None:
    """The study trains four tuning runs, two runs of the other seed and two that diverge; repeated, it trains none."""
    high = "[method=full, optim.weight_decay=1.0e+38, optim.warmup_steps=0, optim.grad_clip_norm=null]"
    own = STUDY.replace("vary: [", "vary: [optim.weight_decay, optim.grad_clip_norm, ")
    (folder / "study.yaml").write_text(f"{own}  high: {high}\n")
    command = [sys.executable, "-m", "efficient_ft", "study", str(folder), "jobs=2", "trainer.progress=false"]
    for _ in range(2):
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert "started" not in done.stdout
    assert "These rows diverged at every value: high." in done.stdout
    runs = json.loads((folder / "records.json").read_text())["runs"]
    assert sorted((run["row"], run["seed"]) for run in runs) == [
        ("full", 0), ("full", 0), ("full", 1), ("head", 0), ("head", 0), ("head", 1), ("high", 0), ("high", 0),
    ]  # fmt: skip
    assert {run["totals"]["steps"] for run in runs if run["row"] != "high"} == {2}
    assert all(run["diverged"].startswith("The loss is") for run in runs if run["row"] == "high")


def test_the_search_pauses_its_runs_and_compares_accuracies_at_the_same_step(folder: Path) -> None:
    (folder / "study.yaml").write_text(STUDY.replace("seed: 0}", "seed: 0, steps: 10}"))
    records = Records(folder)
    low, high = records.tuning_runs(["full"])
    assert (low.steps, high.steps) == (10, 10)
    assert not any("pause_at" in argument for argument in low.arguments), "the record describes the whole run"
    records.add_paused(low, 0.5, [EpochPoint(epoch=1, loss=1.0, accuracy=0.6)])
    # A finished run of 20 steps and four epochs counts with its first two epochs.
    finished = results(0.9)
    finished["totals"]["steps"] = 20
    accuracies = (0.3, 0.55, 0.9, 0.9)
    curve = [EpochPoint(epoch=epoch, loss=1.0, accuracy=value) for epoch, value in enumerate(accuracies, 1)]
    records.add(replace(high, steps=None), finished, curve)
    records = Records(folder)
    assert records.tuning_runs(["full"]) == []
    assert records.best_value("full") == low.value
    assert records.finished("full") == [], "a paused run is not reported"
    assert [run.steps for run in records.seed_runs(["full"])] == [None, None]
    assert (records.of_the_search_alone(), records.of_other_settings()) == (0, 0)
    (folder / "study.yaml").write_text(STUDY.replace("seed: 0}", "seed: 0, steps: 12}"))
    assert [run.value for run in Records(folder).tuning_runs(["full"])] == [low.value]


@pytest.mark.slow
def test_a_paused_run_of_the_search_is_continued_with_its_seed(folder: Path) -> None:
    """The study pauses four runs after one of two steps, and continues two of them. They equal uninterrupted runs."""
    paused = STUDY.replace("seed: 0}", "seed: 0, steps: 1}").replace("seeds: [0, 1]", "seeds: [0]")
    folders = folder / "paused", folder / "whole"
    for one, text in zip(folders, (paused, STUDY.replace("seeds: [0, 1]", "seeds: [0]")), strict=True):
        one.mkdir()
        (one / "study.yaml").write_text(text)
        command = [sys.executable, "-m", "efficient_ft", "study", ".", "jobs=2", "trainer.progress=false"]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(command, cwd=one, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    first, second = (Records(one) for one in folders)
    assert sum("paused_at" in run for run in first.runs) == 4
    assert len(second.runs) == 4
    for row in ("full", "head"):
        (continued,) = first.finished(row)
        alone = second.find(second.run(row, continued["value"], 0))
        assert alone is not None
        assert continued["accuracy"] == alone["accuracy"]
        assert continued["totals"]["flops"] == alone["totals"]["flops"]


def test_a_test_accuracy_of_zero_is_one(folder: Path) -> None:
    records = Records(folder)
    run = records.tuning_runs(["full"])[0]
    for test, percent in ((0.0, 0.0), (None, 50.0)):
        records.add(run, results(0.5, test))
        held = records.find(run)
        assert held is not None
        assert study.test_accuracy(held) == percent


@pytest.mark.slow
def test_a_signal_ends_the_study_and_a_failed_job_does_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def ending(code: int) -> Any:
        def run_jobs(*args: Any) -> None:
            calls.append(code)
            raise SystemExit(code)

        return run_jobs

    monkeypatch.setattr("efficient_ft.cli.commands.study.run_jobs", ending(143))
    with pytest.raises(SystemExit) as stopped:
        run_command("study", [str(folder)])
    assert stopped.value.code == 143
    monkeypatch.setattr("efficient_ft.cli.commands.study.run_jobs", ending(1))
    run_command("study", [str(folder)])
    assert calls == [143, 1]


def _started(folder: Path, row: str, lr: float | None) -> Records:
    """Return the records of a study with four values whose search starts at the suggestion `lr`."""
    values = "values: [1.0e-4, 3.0e-4, 1.0e-3, 3.0e-3], start: lr_test"
    (folder / "study.yaml").write_text(STUDY.replace("values: [1.0e-3, 1.0e-2]", values))
    records = Records(folder)
    assert records.untested(["full", "head"]) == ["full", "head"]
    records.starts.add(row, records.tested(row), lr)
    return Records(folder)


def test_the_search_starts_at_the_suggestion_of_a_learning_rate_test(folder: Path) -> None:
    records = _started(folder, "full", 4e-3)
    assert records.untested(["full", "head"]) == ["head"], "the suggestion is stored"
    assert [run.value for run in records.tuning_runs(["full"])] == [3e-3]
    assert [run.value for run in records.tuning_runs(["head"])] == [3e-4, 1e-3], "without a test: the middle values"
    for value, best in ((3e-3, 0.5), (1e-3, 0.9), (3e-4, 0.8)):
        (run,) = records.tuning_runs(["full"])
        assert run.value == value
        records.add(run, results(best))
    assert (records.tuning_runs(["full"]), records.best_value("full")) == ([], 1e-3)
    assert records.untested(["full"]) == []


def test_a_test_with_other_settings_or_without_a_suggestion_is_not_used(folder: Path) -> None:
    records = _started(folder, "full", None)
    assert records.untested(["full"]) == []
    assert [run.value for run in records.tuning_runs(["full"])] == [3e-4, 1e-3]
    (folder / "study.yaml").write_text((folder / "study.yaml").read_text().replace("max_steps=2", "max_steps=3"))
    assert Records(folder).untested(["full"]) == ["full"]


def test_two_processes_keep_the_learning_rate_tests_of_both(tmp_path: Path) -> None:
    one, other = SearchStarts(tmp_path), SearchStarts(tmp_path)
    one.add("full", ["a"], 1e-3)
    other.add("head", ["b"], None)
    assert SearchStarts(tmp_path).has("full", ["a"])
    assert SearchStarts(tmp_path).has("head", ["b"])


@pytest.mark.parametrize(
    "text", ["[]", '{"format": 1}', '{"format": 1, "tests": {"full": {"lr": -1, "settings": []}}}']
)
def test_a_damaged_file_of_learning_rate_tests_is_rejected(folder: Path, text: str) -> None:
    (folder / "lr_tests.json").write_text(text)
    with pytest.raises(UserError, match=r"lr_tests.json is damaged .* Remove the file to run the tests again"):
        Records(folder)
