"""Tests of the folder that Hydra creates for a run or a sweep."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from efficient_ft.cli.hydra.output_folder import output_folder_faults
from efficient_ft.core.errors import UserError
from tests.cli.program import REPOSITORY, call, composed, runs_of, write_program


@pytest.mark.parametrize("key", ["hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "got an empty string. Omit the setting to use the default folder."),
        ("null", "got null. Omit the setting to use the default folder."),
        ("${nope}", "got ${nope}. A reference is invalid: Interpolation key 'nope' not found."),
        ("a/${oc.env:NOT_THERE}", "got a/${oc.env:NOT_THERE}. A reference is invalid: "),
        ("${nothing:1}", "got ${nothing:1}. A reference is invalid: Unsupported interpolation type nothing."),
    ],
)
def test_a_folder_that_is_none_is_refused(key: str, value: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        composed(f"{key}={value}")
    assert str(caught.value).startswith(f"{key} must be a folder, {said}")


@pytest.mark.parametrize("key", ["hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir"])
def test_a_reference_that_is_escaped_is_refused(key: str) -> None:
    """Hydra would create the folder ``r_${seed}`` but open the log in the folder ``r_233``."""
    with pytest.raises(UserError, match=r"must be a folder without \\\$\{, got .* Remove the backslash"):
        composed(rf"{key}=r_\${{seed}}")


@pytest.mark.slow
def test_the_number_of_a_job_names_its_folder(program: Path) -> None:
    done = call(program, "-m", "method.lbp_wht.order=2,3", "hydra.sweep.subdir=runs/${hydra.job.num}_${hydra.job.id}")
    assert done.returncode == 0, done.stderr
    assert runs_of(program) == {Path("outputs/runs/0_0"), Path("outputs/runs/1_1")}


def test_a_folder_may_refer_to_settings() -> None:
    composed("hydra.run.dir=runs/${seed}", "hydra.sweep.subdir=${hydra.job.num}")


def _a_file(place: Path) -> Path:
    (place / "file").touch()
    return place / "file"


def _below_a_file(place: Path) -> Path:
    return _a_file(place) / "run"


def _too_long(place: Path) -> Path:
    return place / ("a" * 300)


def _not_for_folders(place: Path) -> Path:
    if not Path("/proc/self").exists():
        pytest.skip("no /proc")
    return Path("/proc/nowhere")


@pytest.mark.parametrize("folder", [_a_file, _below_a_file, _too_long, _not_for_folders])
def test_what_cannot_be_made_is_one_message(
    folder: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # Hydra prints errors itself and exits with status 1
    write_program(tmp_path)
    place = folder(tmp_path)
    done = call(tmp_path, f"hydra.run.dir={place}")
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"hydra.run.dir: the folder {place} cannot be created or written to (")
    assert last.endswith(
        "Choose another folder, or correct the error, and repeat the command. Existing files are kept."
    )
    assert "Traceback" not in done.stderr


def test_a_message_passes() -> None:
    said = UserError("said")
    said.__cause__ = OSError(errno.EROFS, os.strerror(errno.EROFS), "/run")
    with pytest.raises(UserError) as caught, output_folder_faults(["hydra.run.dir=/run"]):
        raise said
    assert caught.value is said


@pytest.mark.slow
def test_a_log_that_cannot_be_opened_is_one_message(tmp_path: Path) -> None:
    """A log file that cannot be opened gives the same message as a read-only file system."""
    write_program(tmp_path)
    log = tmp_path / "run" / "train.log"
    log.mkdir(parents=True)
    done = call(tmp_path, "hydra.run.dir=run")
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        f"hydra.run.dir: the folder {log} cannot be created or written to (is a directory). Choose another"
    )
    assert "Traceback" not in done.stderr


def test_a_full_disk_is_named_with_what_is_free(tmp_path: Path) -> None:
    """An error without a file name is attributed to the folder of the sweep."""
    with (
        pytest.raises(
            UserError, match=r"^hydra\.sweep\.dir: .*sweep cannot be .*\(no space left on device; .*B are free"
        ),
        output_folder_faults([f"hydra.sweep.dir={tmp_path}/sweep"]),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("name", ["/elsewhere/image.jpg", "run/not/there"])
def test_errors_at_other_files_pass(name: str) -> None:
    error = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    with pytest.raises(FileNotFoundError) as caught, output_folder_faults(["hydra.run.dir=run"]):
        raise error
    assert caught.value is error


def test_bytes_that_are_not_text_are_named() -> None:
    with pytest.raises(UserError) as caught:
        composed("model.weights=/a/\udcff.pth")
    assert str(caught.value).startswith(
        "model.weights=/a/\N{REPLACEMENT CHARACTER}.pth: the argument is not valid UTF-8"
    )


@pytest.mark.parametrize(
    ("link", "arguments"),
    [
        ("run/.hydra", ["hydra.run.dir=run"]),
        ("run/.hydra/config.yaml", ["hydra.run.dir=run"]),
        ("run/.hydra/overrides.yaml", ["hydra.run.dir=${hydra.job.name}", "hydra.job.name=run"]),
        ("run/train.log", ["hydra.run.dir=run"]),
        ("run/other.log", ["hydra.run.dir=run", "hydra.job.name=other"]),
        ("outputs/multirun.yaml", ["seed=1,2", "-m"]),
    ],
)
def test_nothing_is_written_through_a_link_in_place_of_a_file_of_hydra(
    link: str, arguments: list[str], program: Path
) -> None:
    victim = program / "victim"
    (program / link).parent.mkdir(parents=True)
    if link == "run/.hydra":
        victim.mkdir()
    else:
        victim.write_text("kept")
    (program / link).symlink_to(victim)
    done = call(program, "method.lbp_wht.order=2", *arguments)
    assert done.returncode == 2, done.stderr
    assert f"{link} is a link to victim. The target would be overwritten." in done.stderr
    assert list(victim.iterdir()) == [] if victim.is_dir() else victim.read_text() == "kept"


def test_a_run_that_is_refused_leaves_no_folder(program: Path) -> None:
    done = call(program, "method.lbp_wht.order=5")
    assert done.returncode == 2, done.stderr
    assert "out of luck" in done.stderr
    assert not (program / "outputs").exists()


def test_a_refused_run_keeps_the_files_of_an_earlier_command(program: Path) -> None:
    (program / "run").mkdir()
    (program / "run" / "notes.txt").write_text("mine")
    done = call(program, "method.lbp_wht.order=5", "hydra.run.dir=run")
    assert done.returncode == 2
    assert (program / "run" / "notes.txt").read_text() == "mine"
    assert not (program / "run" / "train.log").exists()


#: A program whose run is rejected after Hydra has created the folder.
_REJECTING = """
import sys
sys.path.insert(0, {repository!r})
import logging, types
from efficient_ft.cli import main
from efficient_ft.core.errors import UserError
def run(config, folder, arguments=(), begun=None):
    logging.getLogger("efficient_ft").warning("said before it is rejected")
    raise UserError("rejected")
main.prepare = lambda config: None
sys.modules["efficient_ft.training.run"] = types.SimpleNamespace(run=run)
sys.modules["efficient_ft.training"] = types.SimpleNamespace()
main.main()
"""


@pytest.mark.slow
def test_a_rejected_command_changes_nothing_in_the_folder_of_a_run(program: Path) -> None:
    assert call(program, "method.lbp_wht.order=2", "hydra.run.dir=run").returncode == 0
    assert (program / "run" / ".hydra" / "overrides.yaml").is_file()

    def files() -> dict[Path, tuple[bytes, int]]:
        every = (file for file in (program / "run").rglob("*") if file.is_file())
        return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in every}

    before = files()
    (program / "program.py").write_text(_REJECTING.format(repository=str(REPOSITORY)))
    done = call(program, "method.lbp_wht.order=3", "hydra.run.dir=run")
    assert done.returncode == 2, done.stderr
    assert done.stderr.endswith("rejected\n")
    assert files() == before


def test_an_empty_current_folder_is_not_removed(program: Path, tmp_path: Path) -> None:
    """A command with cost_only=true runs in the current folder, which is kept."""
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        [sys.executable, str(program / "program.py"), "cost_only=true", "method.lbp_wht.order=5"],
        cwd=tmp_path / "empty", capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert (tmp_path / "empty").is_dir()
