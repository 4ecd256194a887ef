"""Tests of the definition of a study: mistakes in study.yaml, and selected rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from efficient_ft.core.errors import UserError
from efficient_ft.record.study_definition import chosen_rows, read_study
from tests.record.some import STUDY


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "study.yaml").write_text(STUDY)
    return tmp_path


@pytest.mark.parametrize(
    "argument", ["+hydra.callbacks.a._target_=builtins.open", "hydra/launcher=x", "--config-dir=/x", "~hydra.job"]
)
@pytest.mark.parametrize(
    ("old", "new"),
    [("settings: [", "settings: ['{}', "), ("full: [", "full: ['{}', "), ("setting: optim.lr", "setting: '{}'")],
)
def test_a_study_that_somebody_sends_calls_no_function(folder: Path, argument: str, old: str, new: str) -> None:
    """Settings of Hydra are rejected, because Hydra would call their targets."""
    assert STUDY.count(old) == 1
    (folder / "study.yaml").write_text(STUDY.replace(old, new.format(argument)))
    with pytest.raises(UserError, match="a study may contain only settings of runs"):
        read_study(folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "contains no study.yaml"),
        ("title: [", "cannot be read"),
        ("", "cannot be used: it must be a mapping"),
        (STUDY + "title: again", "cannot be read: .*title occurs twice"),
        (STUDY + "  full: [method=bitfit]", "cannot be read: .*full occurs twice"),
        (STUDY.replace("seed: 0}", "seed: 0, ignore: [seed]}"), r"tune\.ignore names seed, which the study sets"),
        (STUDY + "  b: [method=head, optim.lr=0.5]", r"row b sets optim\.lr=0\.5\. Remove this setting, because"),
        (STUDY + "  b: [method=head, seed=9]", "row b sets seed=9"),
        (STUDY + "  b: [method=full]", "rows full and b have the same settings"),
        (STUDY.replace("1.0e-2]", ".nan]"), "must be finite numbers"),
        (STUDY.replace("1.0e-2]", "yes]"), "must be numbers, got a Boolean"),
        (STUDY.replace("seeds: [0, 1]", "seeds: [0, yes]"), "seeds must be a non-empty list, each value an integer"),
        (STUDY.replace("seeds: [0, 1]", "seeds: []"), r"seeds must be a non-empty list, .*, got \[\]"),
        (STUDY.replace("seed: 0}", "seed: 0, steps: 0}"), r"tune\.steps must be an integer >= 1 or null, got 0"),
        (STUDY.replace("0}", "0, finalists: {ful: [1.0e-3, 1.0e-2]}}"), "names ful, but the rows are full, head"),
        (STUDY.replace("0}", "0, finalists: {full: [1.0e-3, 2.0e-3]}}"), r"full contains 0\.002, which is not"),
        (STUDY.replace("0}", "0, finalists: {full: []}}"), r"tune\.finalists\.full must be a"),
        ("title: a", "settings is missing"),
        (STUDY + "seed: 1", "seed is not an entry of a study. Did you mean 'seeds'"),
        (STUDY + "  1: [method=head]", "rows.1: a name must be a string\\. Put the name in quotes"),
        (STUDY + "  b: method=head", "rows.b must be a list, each value a string, got method=head"),
    ],
)
def test_a_study_that_cannot_be_read_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "study.yaml").write_text(text)
    with pytest.raises(UserError, match=said):
        read_study(tmp_path)
    with pytest.raises(UserError, match=r"contains no study\.yaml\. Pass the folder of a study"):
        read_study(tmp_path / "study.yaml")


def test_rows_that_differ_in_more_than_their_methods_are_refused(folder: Path) -> None:
    (folder / "study.yaml").write_text(STUDY.replace("vary: [optim.warmup_steps]", ""))
    with pytest.raises(
        UserError,
        match=r"row head sets optim\.warmup_steps, but the rows of a study differ only in their methods\. Set"
        r" optim\.warmup_steps for all rows in settings, or list optim\.warmup_steps in vary if",
    ):
        read_study(folder)
    options = STUDY.replace("[method=full]", '["method=[full,lora]", method.lora.rank=4]')
    (folder / "study.yaml").write_text(options)
    assert read_study(folder).rows["full"] == ["method=[full,lora]", "method.lora.rank=4"]


def test_a_start_requires_a_learning_rate(folder: Path) -> None:
    plain = STUDY.replace("seed: 0}", "seed: 0, start: lr_test}").replace("optim.lr", "optim.weight_decay")
    (folder / "study.yaml").write_text(plain)
    with pytest.raises(UserError, match=r"tune.start: lr_test requires setting: optim.lr and positive values"):
        read_study(folder)


def test_a_repeated_seed_counts_once(folder: Path) -> None:
    (folder / "study.yaml").write_text(STUDY.replace("seeds: [0, 1]", "seeds: [0, 0, 1]"))
    assert read_study(folder).seeds == [0, 1]


def test_unknown_rows_are_refused(folder: Path) -> None:
    assert chosen_rows(read_study(folder), []) == ["full", "head"]
    with pytest.raises(UserError, match=r"row must be one of full, head, got ful\. Did you mean 'full'"):
        chosen_rows(read_study(folder), ["ful"])
