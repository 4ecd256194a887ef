"""Atomic writing."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from efficient_ft.record.files import json_text, write_atomically, write_text_atomically


def test_a_text_is_written_with_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "new" / "text"
    write_text_atomically(file, "ü")
    assert file.read_bytes() == "ü".encode()
    assert [f.name for f in file.parent.iterdir()] == ["text"]


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("old")
    (tmp_path / "text.tmp").write_text("left by a killed process")

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_atomically(file, fail)
    assert file.read_text() == "old"
    assert [f.name for f in tmp_path.iterdir()] == ["text"]


def test_json_has_no_number_that_is_not_finite() -> None:
    text = json_text({"a": [1.5, math.nan, (math.inf,)], "b": {"c": -math.inf, "d": True, "e": None}}, indent=1)
    assert json.loads(text, parse_constant=pytest.fail) == {
        "a": [1.5, None, [None]],
        "b": {"c": None, "d": True, "e": None},
    }
