"""Tests of text labels: missing labels, different spellings of a label, and columns without classes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from efficient_ft.config.schema import TextConfig
from efficient_ft.core.errors import UserError
from efficient_ft.data.texts import read_texts
from tests.data.text_sets import class_files, json_lines, open_set, printed, table, write_all
from tests.models.text_models import sentences

PLAIN = table(20)
MISSING = "".join(f"apple,{label}\n" for label in ("nan", "NaN", "", "NA", "null", "  "))


def test_missing_labels_are_no_class(tmp_path: Path) -> None:
    write_all(tmp_path, {"a.csv": PLAIN + MISSING})
    with pytest.raises(UserError, match=r"6 of 26 texts cannot be used: no label ×2, .*\('NA'; data\.text\.missing\)"):
        open_set(tmp_path)
    data = open_set(tmp_path, on_corrupt="skip")
    assert (data.class_names, sum(data.splits.values())) == (["fruit", "metal"], 20)
    assert "6 of 26 texts cannot be used" in printed(data)


def test_missing_labels_in_json(tmp_path: Path) -> None:
    rows = json_lines({"text": text, "label": label} for text, label in sentences(10))
    lines = (
        '{"text": "a", "label": NaN}\n{"text": "b", "label": null}\n{"text": "c"}\n{"text": NaN, "label": "fruit"}\n'
    )
    write_all(tmp_path, {"a.jsonl": rows + lines})
    reasons = (
        "no label ('nan') ×1, no label ×1, no label (the key 'label' is missing; keys: text) ×1, an empty text ×1."
    )
    with pytest.raises(UserError, match=f"4 of 14 texts cannot be used: {re.escape(reasons)} .*line 11"):
        open_set(tmp_path)
    assert open_set(tmp_path, on_corrupt="skip").class_names == ["fruit", "metal"]


def test_keys_that_rows_lack_are_named(tmp_path: Path) -> None:
    rows = json_lines({"text": text, "label": label} for text, label in sentences(10))
    write_all(tmp_path, {"a.jsonl": rows + '{"txt": "a", "label": "fruit"}\n{}\n{"text": "b", "lable": "fruit"}\n'})
    listing = read_texts(tmp_path, TextConfig())
    assert [why.partition("a.jsonl, ")[2] for why in listing.skipped.values()] == [
        "line 11: the key 'text' is missing (keys: txt, label).",
        "line 12: the key 'text' is missing (no keys).",
        "line 13: no label (the key 'label' is missing; keys: text, lable).",
    ]


def test_the_names_of_columns_within_a_table_are_no_row(tmp_path: Path) -> None:
    write_all(tmp_path, {"a.csv": PLAIN + table(10, seed=1) + table(10, seed=2)})
    with pytest.raises(UserError, match=r"2 of 42 texts cannot be used: a repeated header line ×2"):
        open_set(tmp_path)


def test_the_spellings_of_a_missing_label_are_a_setting(tmp_path: Path) -> None:
    write_all(tmp_path, {"a.csv": PLAIN + "zinc,NA\nlead,NA\nlead,-1\nzinc,-1\n"})
    assert open_set(tmp_path, missing=[]).class_names == ["-1", "NA", "fruit", "metal"]
    assert open_set(tmp_path, missing=["NA", -1], on_corrupt="skip").class_names == ["fruit", "metal"]


@pytest.mark.parametrize("test", ["text,label\na,-1\nb,-1\n", "text,label\na,\nb,\n", "text,label\na,nan\n"])
def test_an_unlabeled_split_is_refused(tmp_path: Path, test: str) -> None:
    write_all(tmp_path, {"train.csv": PLAIN, "dev.csv": table(4, seed=1), "test.csv": test})
    message = r"test\.csv .* is unlabeled: .*'data\.splits=\{train: train\.csv, val: dev\.csv\}'"
    with pytest.raises(UserError, match=message):
        open_set(tmp_path, on_corrupt="skip")


def test_a_class_that_marks_missing_labels_is_warned_of(tmp_path: Path) -> None:
    for name in ("-1", "None", "?", "unknown"):
        write_all(tmp_path, {"a.csv": PLAIN + f"zinc,{name}\nlead,{name}\n"})
        assert f"the label '{name}', which is trained as a class" in printed(open_set(tmp_path))
    write_all(tmp_path, {"a.csv": table((f"t{k}", str(k % 2 * 2 - 1)) for k in range(12))})
    assert "trained as a class" not in printed(open_set(tmp_path)), "-1 and 1 are two classes"


def test_equal_numbers_are_one_class(tmp_path: Path) -> None:
    labels = [1, 1.0, "1", "01", 0, "0.0"]
    rows = [{"text": f"t{k}", "label": labels[k % 6]} for k in range(24)]
    data = open_set(write_all(tmp_path, {"a.jsonl": json_lines(rows)}))
    assert data.class_names == ["0", "1"]
    assert "Labels that are equal numbers form one class: '1' (8) and '1.0' (4) and '01' (4); '0'" in printed(data)
    big = 12345678901234567890
    write_all(tmp_path, {"a.jsonl": json_lines({"text": f"t{k}", "label": big + k % 2} for k in range(12))})
    assert open_set(tmp_path).class_names == [str(big), str(big + 1)], "not equal as floats"


def test_numbers_in_one_spelling_keep_it(tmp_path: Path) -> None:
    write_all(tmp_path, {"a.csv": table((f"t{k}", f"0{k % 3}") for k in range(12))})
    assert open_set(tmp_path).class_names == ["00", "01", "02"]


@pytest.mark.parametrize("labels", [("Spam", "spam"), ("true", "TRUE"), ('"spam"', "spam"), ("\uff33pam", "spam")])
def test_labels_that_differ_in_case_are_refused_merged_or_kept(tmp_path: Path, labels: tuple[str, str]) -> None:
    rows = [(f"t{k}", (*labels, "ham", labels[1])[k % 4]) for k in range(20)]
    write_all(tmp_path, {"a.tsv": table(rows, "\t")})
    with pytest.raises(UserError, match=r"\(5\) and .* \(10\)|\(10\) and .* \(5\).*ignore_case=true\. .*=false"):
        open_set(tmp_path)
    merged = open_set(tmp_path, ignore_case=True)
    assert merged.class_names == sorted(["ham", labels[1]])
    assert "form one class (data.text.ignore_case)" in printed(merged)
    assert sorted(open_set(tmp_path, ignore_case=False).class_names) == sorted([*labels, "ham"])


def test_case_is_compared_over_splits_and_folders(tmp_path: Path) -> None:
    write_all(tmp_path / "files", {"train.csv": PLAIN, "test.csv": table(4, seed=1).replace("fruit", "Fruit")})
    with pytest.raises(UserError, match=r"'fruit' \(10\) and 'Fruit' \(2\)"):
        open_set(tmp_path / "files")
    write_all(tmp_path / "folders", class_files() | class_files(classes=["Fruit"]))
    with pytest.raises(UserError, match=r"'Fruit' \(3\) and 'fruit' \(3\)"):
        open_set(tmp_path / "folders")


def test_forms_of_unicode_and_spaces_are_one_class(tmp_path: Path) -> None:
    labels = ["caf\u00e9", "cafe\u0301", " caf\u00e9\u00a0", "caf\u00e9\u200b", "iced  tea", "iced tea"]
    write_all(tmp_path, {"a.tsv": table([(f"t{k}", labels[k % 6]) for k in range(24)], "\t")})
    assert open_set(tmp_path).class_names == ["caf\u00e9", "iced tea"]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([f"a free text {k}" for k in range(20)], r"20 rows have 20 different labels in column 'label'.*text\.label"),
        ([str(1000 + k) for k in range(20)], r"free text or identifiers.*The columns are text, label"),
        (["3.14", "2.71", "1.41"], r"3 different decimal numbers in 3 rows, .* look like a quantity"),
        ([f"{k * 0.37:.2f}" for k in range(40)] * 3, r"40 different decimal numbers in 120 rows"),
        (["a"] * 9, r"only one class, 'a' \(9 texts\)"),
        (["a"] * 4 + ["b"] * 4 + ["c"], r"1 class has a single training text: 'c' \(.*a\.csv, line 10\)"),
        (["-1"] * 9, r"is unlabeled: all 9 labels are -1"),
    ],
)  # fmt: skip
def test_labels_that_are_no_classes_are_refused(tmp_path: Path, labels: list[str], message: str) -> None:
    write_all(tmp_path, {"a.csv": table((f"t{k}", label) for k, label in enumerate(labels))})
    with pytest.raises(UserError, match=message):
        open_set(tmp_path)


def test_missing_labels_are_named_with_the_classes_that_they_leave(tmp_path: Path) -> None:
    write_all(tmp_path, {"a.csv": table([*((f"t{k}", "") for k in range(9)), ("a", "x"), ("b", "y")])})
    with pytest.raises(UserError, match=r"2 classes have a single training text.* 9 texts cannot be used: no label ×9"):
        open_set(tmp_path)


def test_half_stars_are_classes_and_many_numbers_are_warned_of(tmp_path: Path) -> None:
    write_all(tmp_path, {"a.csv": table((f"t{k}", str(k % 9 / 2)) for k in range(90))})
    assert open_set(tmp_path).num_classes == 9
    write_all(tmp_path, {"a.csv": table((f"t{k}", str(1950 + k % 30)) for k in range(120))})
    assert "The 30 classes are numbers from 1950 to 1979" in printed(open_set(tmp_path))
    write_all(tmp_path, {"a.csv": table((f"t{k}", str(k % 30)) for k in range(120))})
    assert "classes are numbers" not in printed(open_set(tmp_path)), "numbered classes"


def test_classes_of_another_kind_in_the_test_split(tmp_path: Path) -> None:
    numbered = PLAIN.replace("fruit", "0").replace("metal", "1")
    write_all(tmp_path, {"train.csv": numbered, "test.csv": table(6, seed=1)})
    with pytest.raises(
        UserError, match=r"'fruit' \(3 test texts\) is unknown.* classes are 0, 1\. 2 classes .*data\.splits"
    ):
        open_set(tmp_path)
    write_all(tmp_path, {"train.csv": PLAIN, "test.csv": "text,label\napple,fruit\n"})
    assert "1 of 2 classes has no test texts: metal." in printed(open_set(tmp_path))


def test_errors_of_spreadsheets_are_no_labels(tmp_path: Path) -> None:
    labels = ["x", "y"] * 6 + ["#N/A", "#REF!", r"\N"]
    write_all(tmp_path, {"a.csv": table((f"t{k}", label) for k, label in enumerate(labels))})
    with pytest.raises(UserError, match=r"3 of 15 texts cannot be used: no label \('#N/A'\) ×1"):
        open_set(tmp_path)
    assert open_set(tmp_path, on_corrupt="skip").class_names == ["x", "y"]
