"""Tests of the allocator of a program: its restart with a preload, kept memory, errors and unaffected processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from efficient_ft.core import allocator
from efficient_ft.core.allocator import CHOICES, allocator_in_use, keep_freed_memory, restart_with, use_allocator
from efficient_ft.core.errors import SettingError
from tests.conftest import REPOSITORY, unwrapped

glibc = pytest.mark.skipif(not allocator._glibc(), reason="glibc only")
mimalloc = pytest.mark.skipif(
    not allocator._glibc() or next(allocator._libraries("mimalloc"), None) is None, reason="needs mimalloc"
)

#: The allocator that `auto` selects on this machine.
FIRST = next((name for name in allocator._PRELOADED if next(allocator._libraries(name), None)), None)

#: A program that prints each start and its arguments. Its file name marks it as a program of the package.
PROGRAM = """
import json, os, subprocess, sys
from efficient_ft.core import allocator
print("start", flush=True)
choice = sys.argv[1]
{before}
try:
    allocator.restart_with(choice)
    used = allocator.use_allocator(choice)
except ValueError as error:
    sys.exit(str(error))
print(json.dumps({{"used": used, "arguments": sys.argv[1:], "flags": sys.flags.dev_mode, "pid": os.getpid()}}))
"""


def start(
    folder: Path, *arguments: str, name: str = "train.py", before: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the program in a separate process, without this process's preload."""
    (folder / name).write_text(PROGRAM.format(before=before))
    clean = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", allocator._RESTARTED)}
    return subprocess.run(
        [sys.executable, "-X", "dev", str(folder / name), *arguments],
        env={**clean, "PYTHONPATH": str(REPOSITORY), **environment},
        capture_output=True,
        text=True,
    )


def last(process: subprocess.CompletedProcess[str]) -> dict[str, object]:
    """Return the last line that the program printed."""
    assert process.returncode == 0, process.stderr
    found: dict[str, object] = json.loads(process.stdout.splitlines()[-1])
    return found


@glibc
def test_freed_memory_is_kept() -> None:
    # Measure resident pages in a separate process after a large block is freed.
    code = (
        "import sys, pathlib\n"
        "from efficient_ft.core.allocator import keep_freed_memory\n"
        "kept = keep_freed_memory() if sys.argv[1] == 'keep' else None\n"
        "resident = lambda: int(pathlib.Path('/proc/self/statm').read_text().split()[1])\n"
        "before = resident(); block = bytearray(b'x') * (64 << 20); held = resident(); del block\n"
        "print(kept, round((resident() - before) / (held - before)))\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    said = [
        subprocess.run(
            [sys.executable, "-c", code, mode],
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for mode in ("keep", "leave")
    ]
    assert said == ["True 1", "None 0"]


@mimalloc
@pytest.mark.parametrize("choice", ["mimalloc", "auto"])
def test_a_program_starts_again_once_with_the_same_arguments(tmp_path: Path, choice: str) -> None:
    process = start(tmp_path, choice, "a b", "c=[1,2]")
    found = last(process)
    name = "mimalloc" if choice == "mimalloc" else FIRST
    assert found["used"] == name
    assert found["arguments"] == [choice, "a b", "c=[1,2]"]
    assert found["flags"] is True  # the flag -X dev is kept
    assert process.stdout.count("start\n") == 2
    assert process.stderr == "", "the note is in the log"


@mimalloc
def test_auto_takes_tcmalloc_first_and_mimalloc_without_it(tmp_path: Path) -> None:
    assert list(allocator._PRELOADED) == ["tcmalloc", "mimalloc"]
    without = (
        "found = allocator._libraries\n"
        "allocator._libraries = lambda name: found(name) if name == 'mimalloc' else iter(())"
    )
    process = start(tmp_path, "auto", before=without)
    assert last(process)["used"] == "mimalloc"


@mimalloc
def test_what_a_program_starts_inherits_the_allocator(tmp_path: Path) -> None:
    inside = f"LD_PRELOAD={next(allocator._libraries('mimalloc'))}".partition("=")[2]
    process = start(tmp_path, "auto", LD_PRELOAD=inside)
    assert last(process)["used"] == "mimalloc"
    assert process.stdout.count("start\n") == 1
    assert "note" not in unwrapped(process.stderr)


@glibc
@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("my_own.py", ""),
        ("train.py", "sys.modules['torch'] = None"),
        ("train.py", "sys.settrace(lambda *_: None)"),
        ("train.py", "os.environ[allocator._RESTARTED] = '1'"),
        ("train.py", "allocator._libraries = lambda name: iter(())"),
        ("train.py", "from pathlib import Path; allocator._libraries = lambda name: iter([Path(__file__)])"),
    ],
    ids=["somebody's script", "torch is loaded", "debugger", "second time", "nothing installed", "does not load"],
)
def test_auto_never_fails_and_falls_back_to_keeping(tmp_path: Path, name: str, before: str) -> None:
    process = start(tmp_path, "auto", name=name, before=before)
    assert last(process)["used"] == allocator.KEEPING
    assert process.stdout.count("start\n") == 1


@glibc
@pytest.mark.parametrize("choice", ["keep", "system"])
def test_no_new_start_without_a_preload(tmp_path: Path, choice: str) -> None:
    process = start(tmp_path, choice)
    assert last(process)["used"] == {"keep": allocator.KEEPING, "system": "system"}[choice]
    assert process.stdout.count("start\n") == 1


@glibc
@pytest.mark.parametrize(
    ("before", "do"),
    [
        (
            "allocator._libraries = lambda name: iter(())",
            "tcmalloc is not installed. To install it, run: apt install libtcmalloc-minimal4",
        ),
        (
            "from pathlib import Path; allocator._libraries = lambda name: iter([Path(__file__)])",
            "train.py does not load. To install a different library, run: apt install",
        ),
        (
            "from pathlib import Path; sys.modules['torch'] = None\n"
            "allocator._libraries = lambda name: iter([Path('/lib/x.so')])",
            "This process cannot restart. Set LD_PRELOAD=/lib/x.so in the environment of the process.",
        ),
    ],
)
def test_an_allocator_that_cannot_be_had_is_an_error(tmp_path: Path, before: str, do: str) -> None:
    process = start(tmp_path, "tcmalloc", before=before)
    assert process.returncode == 1
    assert "allocator must be an allocator that is available in this process, got tcmalloc." in unwrapped(
        process.stderr
    )
    assert do in unwrapped(process.stderr)


def test_elsewhere_the_allocator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(allocator, "_preloaded", lambda: None)
    monkeypatch.setattr(allocator, "_kept", False)
    assert keep_freed_memory() is False
    for choice in ("auto", "system"):
        restart_with(choice)
        assert use_allocator(choice) == allocator_in_use() == "system"
    for choice in ("keep", "mimalloc", "tcmalloc"):
        with pytest.raises(SettingError, match=f"got {choice}"):
            use_allocator(choice)


def test_the_choices_are_the_setting_s() -> None:
    from efficient_ft.config.schema import Config

    assert Config.model_fields["allocator"].annotation.__args__ == CHOICES  # type: ignore[union-attr]
    with pytest.raises(SettingError, match=r"allocator must be one of .*, got mimaloc\. Did you mean 'mimalloc'\?"):
        use_allocator("mimaloc")
