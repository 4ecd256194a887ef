"""Atomic writing."""

from __future__ import annotations

from pathlib import Path

import pytest

from efficient_ft.record.files import write_atomically, write_text_atomically


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
