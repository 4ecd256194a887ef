"""Resident memory of this process: its size now, and the highest size that a piece of code brings it to.

Linux keeps a high-water mark of each process (``VmHWM``) that the process can reset (a 5 written to
``/proc/self/clear_refs``): exact, and free of cost. Where it cannot be reset (macOS, Windows, some containers), a
thread samples the size through psutil; the result names the way it was measured.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

#: Values of `HighWaterMark.source`.
RESET, SAMPLED = "high-water mark of the system", "sampled every 5 ms"

_CLEAR_REFS, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
_INTERVAL = 0.005


def resident_bytes() -> int:
    """The resident memory of this process now: its pages in physical memory, shared libraries included."""
    return psutil.Process().memory_info().rss


#: The highest mark before it was last reset.
_earlier_peak = 0


def lifetime_peak_bytes() -> int:
    """The highest resident memory of this process since it started, as the system keeps it (``VmHWM``).

    Measurements of pieces of code reset the system's mark (`HighWaterMark`); their earlier marks count here.
    """
    return max(_earlier_peak, _system_mark() or 0, resident_bytes())


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """The memory that this process and those of its container may take: the machine's, or a lower limit of a cgroup.

    On Linux the limits of the process's control group and of all groups above it count (cgroup v2 ``memory.max``, v1
    ``memory.limit_in_bytes``).

    Args:
        root: of the file system, for tests.
    """
    return min([psutil.virtual_memory().total, *_cgroup_limits(root)])


def room_bytes() -> int:
    """The memory that this process may take in all: its size, and the memory that is free within all limits.

    These are the limits of `memory_limit_bytes` and `process_limit_bytes`, and the free memory of the machine.
    """
    free = resident_bytes() + psutil.virtual_memory().available
    return min(memory_limit_bytes(), free, process_limit_bytes() or free)


def process_limit_bytes() -> int | None:
    """The size up to which the limits of this process let it grow (``ulimit -v`` and ``-d``); None: it has none."""
    if sys.platform == "win32":
        return None
    import resource

    process, sizes = psutil.Process().memory_info(), []
    for limit, used in ((resource.RLIMIT_AS, process.vms), (resource.RLIMIT_DATA, getattr(process, "data", 0))):
        allowed, _ = resource.getrlimit(limit)
        if allowed != resource.RLIM_INFINITY:
            sizes.append(process.rss + max(0, allowed - used))
    return min(sizes, default=None)


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Yield the limits in bytes of this process's control groups."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    mounted = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = mounted / "memory" if controllers else mounted
        own = (top / path.lstrip("/")).resolve()
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        # Inside a container the path may be the host's, which is not mounted: its root is then the container's group.
        groups = [own, *own.parents] if own.is_dir() and own.is_relative_to(top.resolve()) else [top]
        for group in groups:
            with suppress(OSError, ValueError):
                yield int((group / name).read_text())  # v2 writes "max" where there is no limit
            if group == top.resolve():
                break


class HighWaterMark:
    """Measure the highest resident memory of this process between `start` and `stop`, or within a ``with`` block.

    The system has one mark per process, so only one object measures at a time.

    Attributes:
        before_bytes: resident memory at the start.
        peak_bytes: the highest resident memory since the start, set at the end; memory freed before it does not count.
        source: ``RESET`` if the system's own mark was read, ``SAMPLED`` if a thread sampled the size. Sampling can miss
            a peak shorter than its interval, unless this was the highest of the process's life, which is read where the
            system keeps it.
    """

    def __init__(self) -> None:
        self.before_bytes = self.peak_bytes = 0
        self.source = RESET
        self._sampler: _Sampler | None = None

    @property
    def growth_bytes(self) -> int:
        """The peak above the size at the start."""
        return self.peak_bytes - self.before_bytes

    def start(self) -> None:
        """Begin to measure."""
        reset = _reset_mark()
        self.before_bytes = resident_bytes()
        self._sampler = None if reset else _Sampler()
        self.source = RESET if reset else SAMPLED

    def stop(self) -> None:
        """End and set `peak_bytes`."""
        # The kernel's counters are exact to a few pages only: the size now is one more lower bound.
        peak = _system_mark() if self._sampler is None else self._sampler.stop()
        self.peak_bytes = max(peak or 0, resident_bytes(), self.before_bytes)

    def __enter__(self) -> HighWaterMark:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


class _Sampler(threading.Thread):
    """Sample the resident memory until it is stopped."""

    def __init__(self) -> None:
        super().__init__(name="memory sampler", daemon=True)
        self._ended = threading.Event()
        self._lifetime = _system_mark()
        self._peak = 0
        self.start()

    def run(self) -> None:
        """Sample until the end."""
        process = psutil.Process()
        while not self._ended.wait(_INTERVAL):
            self._peak = max(self._peak, process.memory_info().rss)

    def stop(self) -> int:
        """End, and return the highest size seen; the process's lifetime peak if that rose meanwhile."""
        self._ended.set()
        self.join()
        now = _system_mark()
        if now is not None and self._lifetime is not None and now > self._lifetime:
            return max(self._peak, now)
        return self._peak


def _reset_mark() -> bool:
    """Reset the system's high-water mark to the present size; False where this cannot be done."""
    global _earlier_peak
    _earlier_peak = max(_earlier_peak, _system_mark() or 0)
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    # A kernel that ignores the request (gVisor) would leave an older, higher peak, or has no mark at all.
    mark = _system_mark()
    return mark is not None and mark - resident_bytes() < 2**22


def _system_mark() -> int | None:
    """The highest size of this process since it started or since a reset; None if the system keeps none."""
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes there
    with suppress(OSError):
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def release_freed_memory() -> None:
    """Return what the memory allocator holds of freed memory to the system, as far as the allocator can.

    Known are glibc, and tcmalloc and mimalloc if they are preloaded. Otherwise nothing happens.
    """
    if sys.platform == "win32":
        return
    calls: dict[str, Callable[[Any], object]] = {
        "malloc_trim": lambda call: call(ctypes.c_size_t(0)),
        "MallocExtension_ReleaseFreeMemory": lambda call: call(),
        "mi_collect": lambda call: call(ctypes.c_bool(True)),
    }
    program = ctypes.CDLL(None)
    for name, use in calls.items():
        if hasattr(program, name):
            use(getattr(program, name))


#: mimalloc's option `mi_option_purge_delay`, and a delay in milliseconds within which freed memory is rarely returned.
_PURGE_DELAY, _RARELY = 15, 60_000


@contextmanager
def return_freed_memory_on_request() -> Iterator[None]:
    """Let `release_freed_memory` return what is freed in the block to the system, with every known allocator.

    mimalloc as this package starts it keeps freed memory for good. In the block it keeps it for a minute, or until it
    is asked.
    """
    program = None if sys.platform == "win32" else ctypes.CDLL(None)
    if program is None or not hasattr(program, "mi_option_set"):
        yield
        return
    program.mi_option_get.restype = ctypes.c_long
    before = program.mi_option_get(ctypes.c_int(_PURGE_DELAY))
    program.mi_option_set(ctypes.c_int(_PURGE_DELAY), ctypes.c_long(_RARELY))
    try:
        yield
    finally:
        program.mi_option_set(ctypes.c_int(_PURGE_DELAY), ctypes.c_long(before))
