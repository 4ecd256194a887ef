"""Libraries that only some recipes load, and the memory that these libraries add to a process on a CPU.

A library is loaded when a method is applied or during the first step. The process memory that is measured before the
model is built does not include the library. Therefore, a prediction adds the size of the library.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from importlib import import_module

from efficient_ft.core.process_memory import release_freed_memory, release_library_pages, resident_bytes
from efficient_ft.methods.base import Method
from efficient_ft.ops.storage.kernels import cpu

#: The library that the CPU kernels load on first use.
_KERNELS = "numba"
#: Memory that numba's compiler needs when a step compiles a kernel that is not in the cache.
_COMPILER = 80 * 2**20


def libraries(state_bits: int, methods: Iterable[Method]) -> tuple[str, ...]:
    """Return the names of the libraries that training on a CPU loads, except for libraries that every run loads."""
    of_optimizer = (_KERNELS,) if state_bits < 32 else ()
    return tuple(dict.fromkeys([*of_optimizer, *(name for method in methods for name in method.libraries)]))


class LibrarySizes:
    """Callable that loads libraries and measures their memory in this process. Each library is measured once."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}

    def __call__(self, names: Collection[str]) -> int:
        """Return the total size of the libraries in bytes. If other code has loaded a library, its size is 0.

        The size includes `compiler_bytes`.
        """
        for name in names:
            if name not in self._bytes:
                release_freed_memory()
                release_library_pages()
                before = resident_bytes()
                load(name)
                release_freed_memory()
                self._bytes[name] = max(resident_bytes() - before, 0)
        return sum(self._bytes[name] for name in names) + compiler_bytes(names)


def compiler_bytes(names: Collection[str]) -> int:
    """Return the memory that compiling kernels can add in the first steps, after the libraries `names` were loaded.

    Which kernels are in the cache is known only after the first step.
    """
    return _COMPILER if _KERNELS in names and not cpu.compiler_used() else 0


def load(name: str) -> None:
    """Load the library `name`, which must be a result of `libraries`."""
    if name == _KERNELS:
        cpu.load()
        release_library_pages()
    else:
        import_module(name)
