"""Measurement of the resident memory of this process: the current size, and the peak while code runs.

Linux records an exact high-water mark for each process (``VmHWM``). A process can reset its mark by writing 5 to
``/proc/self/clear_refs``. If the mark cannot be reset (macOS, Windows, some containers), a thread samples the size with
psutil. `HighWaterMark.source` states which of the two methods was used.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

#: Possible values of `HighWaterMark.source`.
RESET, SAMPLED = "high-water mark of the system", "sampled every 5 ms"

_CLEAR_REFS, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
_SMAPS = Path("/proc/self/smaps")
_INTERVAL = 0.005


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes, including shared libraries."""
    return psutil.Process().memory_info().rss


def file_backed_bytes() -> int:
    """Return the part of the resident memory that consists of pages of files (libraries), or 0 if it is unknown.

    The system can remove these pages if memory is short, and processes share them.
    """
    return _status("RssFile") or 0


#: Highest value of the high-water mark before the last reset.
_earlier_peak = 0


def lifetime_peak_bytes() -> int:
    """Return the peak resident memory of this process since its start, in bytes (``VmHWM``).

    The result includes peaks that occurred before `HighWaterMark` reset the high-water mark of the process.
    """
    return max(_earlier_peak, _system_mark() or 0, resident_bytes())


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """Return the memory limit of this process in bytes: the memory of the machine, or a lower limit of a control group.

    On Linux, the limits of the control group of this process and of all parent groups apply (``memory.max`` in cgroup
    v2, ``memory.limit_in_bytes`` in cgroup v1). `root` is the root of the file system. Tests pass a different folder.
    """
    return min([psutil.virtual_memory().total, *_cgroup_limits(root)])


def room_bytes() -> int:
    """Return the size to which this process can grow, in bytes: the current size plus the available memory.

    The result does not exceed the values of `memory_limit_bytes` and `process_limit_bytes`.
    """
    free = resident_bytes() + psutil.virtual_memory().available
    return min(memory_limit_bytes(), free, process_limit_bytes() or free)


def process_limit_bytes() -> int | None:
    """Return the maximum size of this process under ``ulimit -v`` and ``-d`` in bytes, or None if there is no limit."""
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
    """Yield the memory limits of the control groups of this process, in bytes."""
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
        # In a container, `path` may be the path on the host. The mounted root is then its control group.
        groups = [own, *own.parents] if own.is_dir() and own.is_relative_to(top.resolve()) else [top]
        for group in groups:
            with suppress(OSError, ValueError):
                yield int((group / name).read_text())  # "max" (v2) means that there is no limit
            if group == top.resolve():
                break


class HighWaterMark:
    """Measurement of the peak resident memory of this process between `start` and `stop`, or in a ``with`` block.

    The system records one high-water mark per process, so only one instance can measure at a time.

    Attributes:
        before_bytes: resident memory at the start, in bytes.
        peak_bytes: peak of the resident memory since the start, in bytes. This attribute is set at the end. Memory
            freed before the start is not included.
        source: `RESET` if the mark of the system was read, or `SAMPLED` if a thread sampled the size. Sampling can miss
            peaks that are shorter than the sampling interval. However, a peak that is the highest since the start of
            the process is found if the system records a high-water mark.
    """

    def __init__(self) -> None:
        self.before_bytes = self.peak_bytes = 0
        self.source = RESET
        self._sampler: _Sampler | None = None

    @property
    def growth_bytes(self) -> int:
        """Growth of the resident memory in bytes: the peak minus the size at the start."""
        return self.peak_bytes - self.before_bytes

    def start(self) -> None:
        """Start the measurement."""
        reset = _reset_mark()
        self.before_bytes = resident_bytes()
        self._sampler = None if reset else _Sampler()
        self.source = RESET if reset else SAMPLED

    def stop(self) -> None:
        """End the measurement and set `peak_bytes`."""
        # The counters of the kernel can be wrong by a few pages, so the current size is an additional lower bound.
        peak = _system_mark() if self._sampler is None else self._sampler.stop()
        self.peak_bytes = max(peak or 0, resident_bytes(), self.before_bytes)

    def __enter__(self) -> HighWaterMark:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


class _Sampler(threading.Thread):
    """Thread that samples the resident memory until it is stopped."""

    def __init__(self) -> None:
        super().__init__(name="memory sampler", daemon=True)
        self._ended = threading.Event()
        self._lifetime = _system_mark()
        self._peak = 0
        self.start()

    def run(self) -> None:
        """Sample until stopped."""
        process = psutil.Process()
        while not self._ended.wait(_INTERVAL):
            self._peak = max(self._peak, process.memory_info().rss)

    def stop(self) -> int:
        """Stop sampling and return the highest sampled size, or the lifetime peak if the lifetime peak increased."""
        self._ended.set()
        self.join()
        now = _system_mark()
        if now is not None and self._lifetime is not None and now > self._lifetime:
            return max(self._peak, now)
        return self._peak


def _reset_mark() -> bool:
    """Reset the high-water mark to the current size, and return True if the reset succeeded."""
    global _earlier_peak
    _earlier_peak = max(_earlier_peak, _system_mark() or 0)
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    # The reset is checked, because a kernel may ignore the request (gVisor) or may not have a mark.
    mark = _system_mark()
    return mark is not None and mark - resident_bytes() < 2**22


def _system_mark() -> int | None:
    """Return the peak size of this process since its start or the last reset in bytes, or None if it is unknown."""
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS reports bytes
    return _status("VmHWM")


def _status(name: str) -> int | None:
    """Return a size of ``/proc/self/status`` in bytes, or None if the system does not provide it."""
    with suppress(OSError):
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def release_freed_memory() -> None:
    """Return freed memory to the system if the memory allocator (glibc, tcmalloc, mimalloc) supports this."""
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


#: Beginnings of the file names of libraries that a training step on a CPU does not use: the CUDA libraries of torch,
#: and the compilers of kernels.
_UNUSED = ("libcu", "libnv", "libnccl", "libtorch_cuda", "libtriton", "libllvmlite")
#: ``MADV_DONTNEED`` of Linux.
_DONTNEED = 4


def release_library_pages() -> None:
    """Remove the pages of CUDA libraries and compilers from the resident memory of this process (Linux).

    These libraries initialize themselves when torch is imported. This initialization reads about 200 MiB of their
    files, which a step on a CPU never uses. The system keeps the files in its cache. If this process uses a page
    again, the system maps the page again without reading the file.
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start, end in _unchanged_pages(_SMAPS, _UNUSED):
        madvise(start, end - start, _DONTNEED)


def _unchanged_pages(smaps: Path, names: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Yield the address ranges of files whose names begin with `names`, except ranges that differ from the file.

    A range that can be written, or that has anonymous pages (relocated addresses), would lose its contents.
    """
    try:
        lines = smaps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # some containers do not provide this file
        return
    found: tuple[int, int] | None = None
    for line in lines:
        key, *rest = line.split(maxsplit=5)
        if not key.endswith(":"):  # the first line of a range: addresses, permissions, offset, device, inode, path
            file = rest[4].rpartition("/")[2] if len(rest) == 5 else ""
            first, last = (int(address, 16) for address in key.split("-"))
            found = (first, last) if file.startswith(names) and "w" not in rest[0] else None
        elif key == "Anonymous:" and found is not None and rest[0] == "0":
            yield found
