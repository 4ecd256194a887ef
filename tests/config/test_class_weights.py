"""Tests of the setting ``optim.class_weights``: its values, its files and its messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from efficient_ft.config import check, fingerprint
from efficient_ft.config.class_weights import class_weights
from efficient_ft.core.errors import SettingError, UserError
from tests.config.settings import with_settings

NAMES, SIZES = ["ant", "bee", "cat"], [40, 10, 20]


def test_auto_is_the_inverse_frequency_with_mean_one() -> None:
    found = class_weights("auto", NAMES, SIZES)
    assert sum(found) / 3 == pytest.approx(1)
    assert [w * n for w, n in zip(found, SIZES, strict=True)] == pytest.approx([found[0] * 40] * 3)
    assert class_weights("auto", NAMES, [7, 7, 7]) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("w.csv", "class,weight\nbee,2.5\nant,1\n", [1.0, 2.5, 1.0]),
        ("w.tsv", "class\tweight\ncat\t3\n", [1.0, 1.0, 3.0]),
        ("w.json", '{"cat": 0.5}', [1.0, 1.0, 0.5]),
        ("w.yaml", "[1, 2, 3]", [1.0, 2.0, 3.0]),
    ],
)
def test_weights_from_files(tmp_path: Path, name: str, text: str, expected: list[float]) -> None:
    (tmp_path / name).write_text(text)
    assert class_weights(str(tmp_path / name), NAMES, SIZES) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0, 2.0], "optim.class_weights must be a list of 3 weights, one for each class, got 2 weights."),
        ({"dog": 2.0}, "keys are classes of the data (ant, bee, cat), got the class 'dog'."),
        ({"beee": 2.0}, "Did you mean 'bee'?"),
        ([1.0, 0.0, 2.0], "optim.class_weights[1] must be a finite number > 0, got 0.0."),
        ({"ant": float("nan")}, "optim.class_weights.ant must be a finite number > 0, got nan."),
        ({}, "optim.class_weights must be a weight for each class, got no weights."),
    ],
)
def test_invalid_weights_have_one_message(value: Any, message: str) -> None:
    with pytest.raises(SettingError) as caught:
        class_weights(value, NAMES, SIZES)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("w.csv", "class,weight\nbee,-1\n", "w.csv).bee must be a finite number > 0, got -1.0."),
        ("w.csv", "class,weight\nbee,\n", "w.csv).bee must be a finite number > 0, got an empty cell."),
        ("w.csv", "class,weight\nbee,two\n", "w.csv).bee must be a finite number > 0, got two."),
        ("w.csv", "class,weight\nbee,1\nbee,2\n", "line 3: the class bee occurs twice"),
        ("w.csv", "bee,1\n", "the first line must contain the column names class and weight"),
        ("w.json", "{", "cannot be read"),
        ("w.json", "3", "contains neither a list nor a mapping"),
        ("w.yaml", "[1, .inf, 2]", "must be a finite number > 0, got inf"),
        ("none.csv", None, "none.csv. There is no such file. The file must be a .csv"),
    ],
)
def test_invalid_files_have_one_message(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as caught:
        class_weights(str(tmp_path / name), NAMES, SIZES)
    assert message in str(caught.value)


def test_auto_needs_samples_of_each_class() -> None:
    with pytest.raises(SettingError, match=r"These classes have none: bee\. Add samples, or specify the weights\."):
        class_weights("auto", NAMES, [3, 0, 4])
    with pytest.raises(SettingError, match="would require reading all masks"):
        class_weights("auto", NAMES, None)


def test_invalid_weights_are_rejected_before_data_are_read() -> None:
    with pytest.raises(SettingError, match=r"optim.class_weights.3 must be a finite number > 0, got -2.0"):
        check(with_settings(optim__class_weights={"3": -2}))
    with pytest.raises(SettingError, match=r"data.sampler must be one of shuffle, balanced, sqrt, got even"):
        check(with_settings(data__sampler="even"))


def test_the_settings_change_the_identity_only_if_they_are_used() -> None:
    plain = fingerprint(check(with_settings()))
    assert fingerprint(check(with_settings(optim__class_weights=None, data__sampler="shuffle"))) == plain
    others = [{"optim__class_weights": "auto"}, {"data__sampler": "sqrt"}, {"optim__class_weights": [1.0] * 10}]
    found = {fingerprint(check(with_settings(**one))) for one in others}
    assert len(found | {plain}) == 4
