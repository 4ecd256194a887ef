"""Compilation of kernels by numba, and the cache of compiled kernels on disk. Importing this module requires numba.

numba stores the cache in the first of these folders that can be written: ``NUMBA_CACHE_DIR`` if this variable is set,
``__pycache__`` next to the source file, or the cache folder of the user. A process that finds all its kernels in the
cache compiles nothing.
"""
# mypy: ignore-errors
# mypy cannot check code that numba compiles.

from __future__ import annotations

import functools
import hashlib
import logging
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numba
from numba import carray, int64, types

from efficient_ft import ops
from efficient_ft.core.errors import first_line

try:  # these modules are not part of numba's documented interface
    from numba.core.caching import FunctionCache, IndexDataCacheFile
    from numba.core.ccallback import CFunc
    from numba.core.runtime import rtsys
except ImportError as error:
    warnings.warn(
        f"The CPU kernels do not support numba {numba.__version__} ({first_line(error)}). Plain PyTorch operations are"
        " used instead, which are slower.",
        stacklevel=2,
    )
    raise

log = logging.getLogger(__name__)

#: Types of the arguments and of the result of a kernel: the kernel receives a pointer to an array of integers.
_SIGNATURE = (types.CPointer(int64),), types.void


@functools.cache
def sources_hash() -> str:
    """Return a hash of numba's version and of the source files in all folders that contain kernels."""
    root, digest = Path(ops.__path__[0]), hashlib.sha256()
    folders = {file.parent for file in root.rglob("numba_*.py")}
    for file in sorted(file for folder in folders for file in folder.glob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    digest.update(numba.__version__.encode())
    return digest.hexdigest()


class _KernelCache(FunctionCache):
    """Cache of the compiled code of one kernel, which is identified by its name and by the hash of all source files.

    numba's own class checks only the source file of the kernel itself, and would use old code after another file has
    changed. Furthermore, it never finds the code of a kernel that closes over compiled functions, because the contents
    of these functions are a part of the key and differ between processes.
    """

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        # numba writes the index before the code. If the files had the same names for all sources, another process could
        # therefore read a new index and old code.
        name = f"{self._impl.filename_base}-{sources_hash()[:16]}"
        self._cache_file = IndexDataCacheFile(self.cache_path, name, self._impl.locator.get_source_stamp())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        # numba's own method prepares numba for compilation, which requires 20 MiB and more than half a second. Loading
        # only requires numba's run-time library. If no code is found, the compiler makes the same preparations.
        rtsys.initialize(target_context)
        try:
            return self._load_overload(sig, target_context)
        except Exception:  # numba raises many classes of errors if a file is damaged
            with suppress(Exception):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _report_unsaved(first_line(error))

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return sig, codegen.magic_tuple()


@functools.cache
def _report_unsaved(reason: str) -> None:
    log.warning("A compiled CPU kernel cannot be stored (%s). Each process compiles the kernel again.", reason)


class Kernel(CFunc):
    """A C function with one pointer argument, which is loaded from the cache, or compiled and stored in the cache.

    The qualified name of `function` must identify all values on which the function depends, except constants of the
    source files.

    Attributes:
        address: Address of the C function.
        cache_hits: 1 if the kernel has been loaded from the cache, or 0 if it has been compiled.
        compiler_used: True if this process has compiled a kernel.

    Args:
        function: Function to compile.
        options: Options of ``numba.cfunc``.
    """

    compiler_used: ClassVar[bool] = False

    def __init__(self, function: Any, **options: Any) -> None:
        super().__init__(function, _SIGNATURE, locals={}, options=options)
        self._cache = _KernelCache(function)
        self.compile()
        Kernel.compiler_used = Kernel.compiler_used or not self.cache_hits


@functools.cache
def compiler_works() -> bool:
    """Load a small kernel from the cache, or compile and store it. If this fails, log a warning once and return False.

    Compilation can fail although numba is installed, for example if no folder for numba's cache can be written, or if
    the system does not allow executable memory.
    """

    def probe_job(pointer):
        carray(pointer, 1)[0] = 0

    try:
        Kernel(probe_job)
    except Exception as error:  # numba and LLVM raise many classes of errors
        log.warning(
            "numba cannot compile the CPU kernels (%s). Plain PyTorch operations are used instead, which are slower.",
            first_line(error),
        )
        return False
    return True
