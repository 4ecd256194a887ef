"""Tests of files with one JSON object per line."""

from __future__ import annotations

from pathlib import Path

import pytest

from efficient_ft.record.rows import MetricsFile, Rows


def test_rows_are_appended_and_truncated_on_resume(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl")
    assert rows.read() == []
    for step in range(1, 5):
        rows.append({"step": step})
    rows.rewind(2)
    assert [row["step"] for row in rows.read()] == [1, 2]
    rows.append({"step": 3, "more": "ü"})
    assert rows.read()[-1] == {"step": 3, "more": "ü"}


def test_a_line_cut_short_ends_the_file(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl")
    rows.append({"step": 1})
    with open(rows.path, "a") as file:
        file.write('{"step": 2, "lo')
    assert rows.read() == [{"step": 1}]
    rows.rewind(1)
    assert rows.path.read_text() == '{"step": 1}\n'


@pytest.mark.parametrize(
    "line",
    [
        b"null",
        b"3",
        b"[1]",
        b'{"loss": 1}',
        b'{"step": "2"}',
        b"\xff\xfe",
        b'{"step": 1%s}' % (b"0" * 400),
        b"\x00\x00",
    ],
)
def test_a_line_that_is_no_row_ends_the_file(tmp_path: Path, line: bytes) -> None:
    rows = Rows(tmp_path / "rows.jsonl")
    rows.append({"step": 1, "loss": float("nan"), "lr": 0.5})
    with open(rows.path, "ab") as file:
        file.write(line + b"\n")
    assert rows.read() == [{"step": 1, "lr": 0.5}], "NaN is not a valid JSON number"


def test_integers_that_are_larger_than_every_float_are_omitted(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl")
    rows.path.write_text(f'{{"step": 1, "loss": {10**400}, "lr": 0.5}}\n')
    assert rows.read() == [{"step": 1, "lr": 0.5}]


def test_metrics_are_numbers(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    row = {"step": 1, "loss": "x", "train_loss_epoch": None, "val_accuracy": [1], "lr": 0.5}
    metrics.append(row)
    assert metrics.read() == [{"step": 1, "lr": 0.5}]
    metrics.append({"step": 2})
    metrics.rewind(1)
    assert Rows(metrics.path).read() == [row], "A resumed run does not change the rows that it keeps."


def test_the_table_has_a_column_per_key(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    metrics.append({"step": 1, "lr": 0.5})
    metrics.append({"step": 2, "val_accuracy": 0.25})
    metrics.write_csv()
    assert (tmp_path / "metrics.csv").read_text() == "step,lr,val_accuracy\n1,0.5,\n2,,0.25\n"
