"""The memory allocator of the process: one that is fast and does not split its heap, where it can be had.

glibc unmaps each large activation when it is freed and faults it in again one step later. With settings that keep freed
memory it is faster, but small tensors that live until the backward pass split its heap: a process then takes up to four
times the bytes that are live. tcmalloc and mimalloc keep freed memory and reuse it; tcmalloc, which no Python package
brings, wastes least (`benchmarks/allocators_*.json`). Both have to be loaded before the first allocation, so the
program starts again, once, with the library in ``LD_PRELOAD``.

Only programs call this, never the library on import: it changes the whole process.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from efficient_ft.core.errors import SettingError

log = logging.getLogger(__name__)

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4

#: Values of the setting ``allocator``.
CHOICES = ("auto", "mimalloc", "tcmalloc", "keep", "system")

#: What `allocator_in_use` calls glibc with `keep_freed_memory`.
KEEPING = "keeping freed memory (glibc)"

#: In the order in which ``auto`` looks for them: file names, and how to install one.
_PRELOADED = {
    "tcmalloc": (
        ("libtcmalloc_minimal.so.4*", "libtcmalloc.so.4*", "libtcmalloc_minimal.so", "libtcmalloc.so"),
        "apt install libtcmalloc-minimal4, or gperftools from conda-forge",
    ),
    "mimalloc": (("libmimalloc.so", "libmimalloc.so.[23]*"), "pip install cmeel-mimalloc"),
}

#: Set in the process that was started again, so that it never starts a third time.
_RESTARTED = "EFFICIENT_FT_RESTARTED"

#: Settings of the allocators; those of the user's environment are kept. Huge pages (torch's THP_MEM_ALLOC_ENABLE) are
#: left out: with either allocator a step is no faster, and with mimalloc some recipes take more memory.
_TUNING = {
    "MIMALLOC_PURGE_DELAY": "-1",  # freed memory stays: returning it costs the page faults that glibc pays
    "TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD": "0",
}

#: Programs of this package that may start again, by the name of their file.
_PROGRAMS = ("efficient-ft", "train.py", "bench.py")

_kept = False


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory in the process. Call it before the first tensor is created.

    Returns:
        True if it took effect; False without glibc (macOS, Windows, musl), where nothing changes.
    """
    global _kept
    if not _glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    # mallopt returns 1 on success.
    _kept = mallopt(_M_MMAP_MAX, 0) == 1 and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1) == 1
    return _kept


def restart_with(choice: str, setting: str = "allocator") -> None:
    """Start this program again with the allocator `choice` preloaded; return if that is not needed or not possible.

    Replaces the process (same id, same terminal); `use_allocator` then notes it in the log. Does nothing in a process
    that is not a program of this package (a notebook, a test, somebody's script), under a debugger or profiler, once
    torch is loaded, or if an allocator is preloaded already. Processes started by this one inherit the allocator.

    Args:
        choice: one of `CHOICES`; ``auto``: the first allocator found that loads, or none.
        setting: its name, for errors.

    Raises:
        SettingError: the allocator named by `choice` is not installed or does not load.
    """
    if choice in ("keep", "system") or _preloaded() is not None or not _may_restart():
        return
    for name in _PRELOADED if choice == "auto" else (choice,):
        for library in _libraries(name):
            environment = _environment(library)
            if not _loads(name, environment):
                continue
            sys.stdout.flush()
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    if choice != "auto":
        raise _missing(choice, setting)


def use_allocator(choice: str, setting: str = "allocator") -> str:
    """Set up the allocator `choice` in this process, before the first tensor is created.

    Args:
        choice: one of `CHOICES`; ``auto`` keeps freed memory unless an allocator is preloaded.
        setting: its name, for errors.

    Returns:
        What is in use, see `allocator_in_use`.

    Raises:
        SettingError: the allocator is not one of `CHOICES`, or the one named cannot be had in this process.
    """
    if choice not in CHOICES:
        raise SettingError(setting, choice, CHOICES)
    loaded = _preloaded()
    if choice in ("auto", "keep"):
        kept = loaded is None and keep_freed_memory()
        if choice == "keep" and not kept:
            why = f"{loaded} is preloaded" if loaded else "there is no glibc on this system"
            raise SettingError(setting, choice, "auto or system here", f"{why[0].upper()}{why[1:]}.")
    elif choice != "system" and loaded != choice:
        raise _missing(choice, setting)
    used = allocator_in_use()
    if _RESTARTED in os.environ:
        log.debug("The program started again with %s (LD_PRELOAD=%s). %s=system leaves the allocator as it is.",
                  used, os.environ.get("LD_PRELOAD"), setting)  # fmt: skip
    else:
        log.debug("Allocator: %s.", used)
    return used


def allocator_in_use() -> str:
    """Return the allocator of this process: ``mimalloc``, ``tcmalloc``, `KEEPING`, or ``system``."""
    return _preloaded() or (KEEPING if _kept else "system")


def _glibc() -> bool:
    return sys.platform == "linux" and platform.libc_ver()[0] == "glibc"


def _preloaded() -> str | None:
    """The allocator of `CHOICES` that is mapped into this process; None: no such library."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return None
    return _mapped(maps)


def _mapped(maps: str) -> str | None:
    files = {line.rpartition("/")[2] for line in maps.splitlines()}
    return next((name for name in _PRELOADED if any(file.startswith(f"lib{name}") for file in files)), None)


def _may_restart() -> bool:
    """True in a program of this package that has done nothing yet which a new start would repeat or lose."""
    main = sys.modules.get("__main__")
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    module = spec is not None and spec.name == "efficient_ft.__main__"
    script = spec is None and file is not None and Path(file).name in _PROGRAMS
    watched = sys.gettrace() is not None or sys.getprofile() is not None or {"pydevd", "debugpy"} & sys.modules.keys()
    return (
        _glibc()
        and (module or script)
        and not watched
        and not sys.flags.interactive
        and "torch" not in sys.modules
        and _RESTARTED not in os.environ
    )


def _libraries(name: str) -> Iterator[Path]:
    """Shared libraries of an allocator: from Python packages, then of the environment, then of the system."""
    patterns, _ = _PRELOADED[name]
    if name == "mimalloc":
        try:
            for file in distribution("cmeel-mimalloc").files or ():
                if file.name == "libmimalloc.so":
                    yield Path(str(file.locate())).resolve()
        except PackageNotFoundError:
            pass
    multiarch = str(sysconfig.get_config_var("MULTIARCH") or f"{platform.machine()}-linux-gnu")
    for folder in (f"{sys.prefix}/lib", "/usr/local/lib", f"/usr/lib/{multiarch}", "/usr/lib64", "/usr/lib"):
        for pattern in patterns:
            yield from sorted(Path(folder).glob(pattern))


def _environment(library: Path) -> dict[str, str]:
    """The environment of the new start."""
    before = os.environ.get("LD_PRELOAD")
    preload = f"{library}:{before}" if before else str(library)
    return {**_TUNING, **os.environ, "LD_PRELOAD": preload, _RESTARTED: "1"}


def _loads(name: str, environment: dict[str, str]) -> bool:
    """True if a Python process with this environment starts and has the allocator."""
    code = "print(open('/proc/self/maps').read())"
    try:
        trial = subprocess.run(
            [sys.executable, "-I", "-S", "-c", code], env=environment, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return trial.returncode == 0 and _mapped(trial.stdout) == name


def _missing(name: str, setting: str) -> SettingError:
    """The error for an allocator named by the user that this process does not have."""
    found = next(_libraries(name), None) if _glibc() else None
    if not _glibc():
        do = "Allocators are preloaded on Linux with glibc only."
    elif found is None:
        do = f"{name} is not installed: {_PRELOADED[name][1]}."
    elif _may_restart():
        do = f"{found} does not load. Install another: {_PRELOADED[name][1]}."
    else:
        do = f"This process cannot start again. Set LD_PRELOAD={found} in its environment."
    return SettingError(setting, name, "an allocator that this process can have", do)
