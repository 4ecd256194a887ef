"""Test whether numba can compile kernels in this process. Importing this module requires numba."""
# mypy: ignore-errors
# mypy cannot check code that numba compiles.

from __future__ import annotations

import functools
import logging

from numba import carray, cfunc, int64, types

from efficient_ft.core.errors import first_line

log = logging.getLogger(__name__)


@functools.cache
def compiler_works() -> bool:
    """Compile a small function and store it in numba's cache. If this fails, log a warning once and return False.

    Compilation can fail although numba is installed, for example if no folder for numba's cache can be written, or if
    the system does not allow executable memory.
    """

    def probe_job(pointer):
        carray(pointer, 1)[0] = 0

    try:
        cfunc(types.void(types.CPointer(int64)), cache=True)(probe_job)
    except Exception as error:  # numba and LLVM raise many classes of errors
        log.warning(
            "numba cannot compile the CPU kernels (%s). Plain PyTorch operations are used instead, which are slower.",
            first_line(error),
        )
        return False
    return True
