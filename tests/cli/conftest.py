"""A program in a working folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.program import write_program


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A working folder, whose name has a space, with a program whose run trains nothing."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    write_program(folder)
    return folder
