"""Tests of file writes, which are atomic and never follow links."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from efficient_ft.core.errors import UserError
from efficient_ft.core.files import open_file, remove_temporary, write_atomically, write_text_atomically


def test_a_text_is_written_with_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "new" / "text"
    write_text_atomically(file, "ü")
    assert file.read_bytes() == "ü".encode()
    assert [f.name for f in file.parent.iterdir()] == ["text"]


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("old")

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_atomically(file, fail)
    assert file.read_text() == "old"
    assert [f.name for f in tmp_path.iterdir()] == ["text"]


def test_a_link_is_replaced_and_its_target_kept(tmp_path: Path) -> None:
    victim, file = tmp_path / "victim", tmp_path / "file"
    victim.write_text("kept")
    file.symlink_to(victim)
    for name in ("file.tmp", ".file.tmp", f"file.{os.getpid()}"):
        (tmp_path / name).symlink_to(victim)
    write_text_atomically(file, "new")
    assert victim.read_text() == "kept"
    assert file.read_text() == "new"
    assert not file.is_symlink()


def test_the_temporary_file_has_a_name_that_cannot_be_foreseen(tmp_path: Path) -> None:
    seen = []

    def write(temporary: Path) -> None:
        seen.append(temporary)
        assert not temporary.exists()
        assert temporary.name == "file"
        assert stat.S_IMODE(temporary.parent.stat().st_mode) == 0o700
        temporary.touch()

    for _ in range(3):
        write_atomically(tmp_path / "file", write)
    assert len(set(seen)) == 3
    assert [f.name for f in tmp_path.iterdir()] == ["file"]


def test_a_name_may_be_as_long_as_the_system_allows(tmp_path: Path) -> None:
    write_text_atomically(tmp_path / ("a" * 251 + ".png"), "x")
    assert (tmp_path / ("a" * 251 + ".png")).read_text() == "x"


def test_a_folder_that_is_removed_meanwhile_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def write(temporary: Path) -> None:
        shutil.rmtree(folder)
        temporary.write_text("x")

    with pytest.raises(FileNotFoundError) as caught:
        write_atomically(folder / "file", write)
    assert str(folder) in str(caught.value)
    assert Path(caught.value.filename).name == "file"  # the error of the write, and not an error of the cleanup


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_files_have_the_permissions_of_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_text_atomically(tmp_path / "file", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~umask


def test_a_pipe_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(temporary: Path, path: Path) -> None:
        raise AssertionError(f"{path} would be replaced")  # root could replace the device file

    monkeypatch.setattr(os, "replace", replace)
    write_text_atomically(Path("/dev/null"), "x")
    reader, writer = os.pipe()
    write_text_atomically(Path(f"/dev/fd/{writer}"), "text")
    os.close(writer)
    assert os.read(reader, 10) == b"text"
    os.mkfifo(tmp_path / "named")
    reader = os.open(tmp_path / "named", os.O_RDONLY | os.O_NONBLOCK)
    write_text_atomically(tmp_path / "named", "text")
    assert os.read(reader, 10) == b"text"


def test_temporary_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("kept")
    names = (".efficient_ft.abcd1234.tmp", ".file.tmp", ".efficient_ft.abcd1235.tmp")
    left, own, other = (tmp_path / name for name in names)
    for folder in (left, own, other):
        folder.mkdir()
        (folder / "file").write_text("half")
    (other / "further").mkdir()
    (left / "link").symlink_to(victim / "file")
    (tmp_path / ".efficient_ft.zzzz1234.tmp").symlink_to(victim)
    remove_temporary(tmp_path)
    assert not left.exists()
    assert (own / "file").exists()
    assert (other / "further").exists()
    assert (victim / "file").read_text() == "kept"
    assert (tmp_path / ".efficient_ft.zzzz1234.tmp").is_symlink()


@pytest.mark.parametrize("mode", ["a", "ab", "w", "rb+"])
def test_a_file_is_not_opened_through_a_link(mode: str, tmp_path: Path) -> None:
    victim, file = tmp_path / "victim", tmp_path / "file"
    victim.write_text("kept")
    file.symlink_to(victim)
    with pytest.raises(UserError, match=r"is a link to .*victim\. The target would be overwritten"):
        open_file(file, mode)
    assert victim.read_text() == "kept"
    file.unlink()
    file.touch()
    with open_file(file, mode) as opened:
        opened.write("x" if mode in "aw" else b"x")
    assert file.read_text() == "x"
