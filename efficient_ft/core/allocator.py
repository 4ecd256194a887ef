"""Keep freed memory in the process instead of returning it to the system after every training step.

glibc unmaps each large activation when it is freed and faults it in again one step later, which costs about a sixth of
a CPU training step. Only programs call this, never the library on import: it changes the whole process, and resident
memory then never falls.
"""

from __future__ import annotations

import ctypes
import platform
import sys

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory in the process. Call it before the first tensor is created.

    Returns:
        True if it took effect; False without glibc (macOS, Windows, musl), where nothing changes.
    """
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    # mallopt returns 1 on success.
    return mallopt(_M_MMAP_MAX, 0) == 1 and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1) == 1
