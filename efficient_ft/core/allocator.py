"""Selection of the memory allocator of the process.

By default, glibc returns the memory of large activations to the system when they are freed. Therefore, every step
causes page faults. Steps are faster if glibc is set to keep freed memory. However, small tensors that live until the
backward pass then fragment the heap. As a result, a process can use up to four times the size of its live tensors. The
allocators tcmalloc and mimalloc also keep freed memory for reuse. tcmalloc wastes the least memory
(`benchmarks/allocators_*.json`), but no Python package contains tcmalloc. tcmalloc and mimalloc must be loaded before
the first allocation. Therefore, the program restarts with the library in ``LD_PRELOAD``.

The functions of this module modify or restart the process. Therefore, only the command-line programs call these
functions, and the library does not. Imports do not change the allocator.
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

# Constants from glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4

#: Values of the setting ``allocator``.
CHOICES = ("auto", "mimalloc", "tcmalloc", "keep", "system")

#: Value that `allocator_in_use` returns after glibc was set to keep freed memory.
KEEPING = "keeping freed memory (glibc)"

#: File names and installation hints of the allocators, in the order in which ``auto`` tries them.
_PRELOADED = {
    "tcmalloc": (
        ("libtcmalloc_minimal.so.4*", "libtcmalloc.so.4*", "libtcmalloc_minimal.so", "libtcmalloc.so"),
        "apt install libtcmalloc-minimal4, or install gperftools from conda-forge",
    ),
    "mimalloc": (("libmimalloc.so", "libmimalloc.so.[23]*"), "pip install cmeel-mimalloc"),
}

#: Environment variable that is set in the restarted process, so that the process does not restart again.
_RESTARTED = "EFFICIENT_FT_RESTARTED"

#: Environment variables that are set for the allocators, unless the user has set them. Huge pages (THP_MEM_ALLOC_ENABLE
#: in torch, MIMALLOC_ALLOW_THP) are not enabled: they do not make steps faster. With huge pages, the gaps between
#: tensors are resident too.
_TUNING = {
    # Freed memory is kept, which avoids page faults. With a delay of ten hours, mimalloc returns memory only if
    # `release_freed_memory` is called. With -1, this call has no effect.
    "MIMALLOC_PURGE_DELAY": "36000000",
    "MIMALLOC_ALLOW_THP": "0",
    "TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD": "0",
}

#: File names of this package's programs that may restart.
_PROGRAMS = ("efficient-ft", "train.py", "bench.py")

_kept = False


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory. Call this function before the first tensor is created.

    Returns:
        True if the settings took effect. The settings require glibc, which macOS, Windows and musl systems do not have.
    """
    global _kept
    if not _glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    _kept = mallopt(_M_MMAP_MAX, 0) == 1 and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1) == 1
    return _kept


def restart_with(choice: str, setting: str = "allocator") -> None:
    """Restart this program with the allocator `choice` preloaded, or return if a restart is not needed or possible.

    The process keeps its id and its terminal, and child processes inherit the allocator. `use_allocator` logs the
    restart. The program does not restart if:

    * the process is not one of this package's programs (a notebook, a test, another script);
    * the process runs under a debugger or profiler;
    * torch is already loaded, or an allocator is already preloaded.

    Args:
        choice: one of `CHOICES`. ``auto`` selects the first allocator that loads, or no allocator if none loads.
        setting: name of the setting, for error messages.

    Raises:
        SettingError: If the allocator `choice` is not installed or does not load.
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
    """Set up the allocator `choice` in this process. Call this function before the first tensor is created.

    Args:
        choice: one of `CHOICES`. ``auto`` sets glibc to keep freed memory, unless another allocator is preloaded.
        setting: name of the setting, for error messages.

    Returns:
        The allocator in use (see `allocator_in_use`).

    Raises:
        SettingError: If `choice` is not one of `CHOICES`, or is not available in this process.
    """
    if choice not in CHOICES:
        raise SettingError(setting, choice, CHOICES)
    loaded = _preloaded()
    if choice in ("auto", "keep"):
        kept = loaded is None and keep_freed_memory()
        if choice == "keep" and not kept:
            why = f"{loaded} is preloaded" if loaded else "the system does not use glibc"
            raise SettingError(setting, choice, "auto or system in this process", f"{why[0].upper()}{why[1:]}.")
    elif choice != "system" and loaded != choice:
        raise _missing(choice, setting)
    used = allocator_in_use()
    if _RESTARTED in os.environ:
        log.debug("The program restarted with the allocator %s (LD_PRELOAD=%s). Use %s=system to prevent the restart.",
                  used, os.environ.get("LD_PRELOAD"), setting)  # fmt: skip
    else:
        log.debug("Allocator: %s.", used)
    return used


def allocator_in_use() -> str:
    """Return the name of the allocator of this process (``mimalloc``, ``tcmalloc``, `KEEPING` or ``system``)."""
    return _preloaded() or (KEEPING if _kept else "system")


def _glibc() -> bool:
    return sys.platform == "linux" and platform.libc_ver()[0] == "glibc"


def _preloaded() -> str | None:
    """Return the name of the allocator that was preloaded into this process, or None if there is none."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return None
    return _mapped(maps)


def _mapped(maps: str) -> str | None:
    files = {line.rpartition("/")[2] for line in maps.splitlines()}
    return next((name for name in _PRELOADED if any(file.startswith(f"lib{name}") for file in files)), None)


def _may_restart() -> bool:
    """Return True if this process is a program of this package that can be restarted (see `restart_with`)."""
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
    """Yield shared libraries of an allocator from Python packages, the environment and the system, in this order."""
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
    """Return the environment of the restarted process."""
    before = os.environ.get("LD_PRELOAD")
    preload = f"{library}:{before}" if before else str(library)
    return {**_TUNING, **os.environ, "LD_PRELOAD": preload, _RESTARTED: "1"}


def _loads(name: str, environment: dict[str, str]) -> bool:
    """Return True if a Python process with this environment starts and uses the allocator `name`."""
    code = "print(open('/proc/self/maps').read())"
    try:
        trial = subprocess.run(
            [sys.executable, "-I", "-S", "-c", code], env=environment, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return trial.returncode == 0 and _mapped(trial.stdout) == name


def _missing(name: str, setting: str) -> SettingError:
    """Return the error for a requested allocator that is not available in this process."""
    found = next(_libraries(name), None) if _glibc() else None
    if not _glibc():
        do = "Allocators can be preloaded only on Linux with glibc."
    elif found is None:
        do = f"{name} is not installed. To install it, run: {_PRELOADED[name][1]}."
    elif _may_restart():
        do = f"The library {found} does not load. To install a different library, run: {_PRELOADED[name][1]}."
    else:
        do = f"This process cannot restart. Set LD_PRELOAD={found} in the environment of the process."
    return SettingError(setting, name, "an allocator that is available in this process", do)
