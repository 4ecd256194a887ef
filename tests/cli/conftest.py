"""A fixture of the command line tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.program import write_program


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A working folder with a space in its name and a program whose run trains nothing."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    write_program(folder)
    return folder
