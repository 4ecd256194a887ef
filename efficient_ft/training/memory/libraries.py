"""Libraries that only some recipes load, and the memory that they add to a process on a CPU.

A library is loaded when a method is applied or in the first step, after the memory before the model is measured. Its
size does not depend on the batch. A prediction adds it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from importlib import import_module

from efficient_ft.core.process_memory import release_freed_memory, resident_bytes
from efficient_ft.methods.base import Method
from efficient_ft.ops.storage.kernels import cpu

#: The library that the CPU kernels load on first use.
_KERNELS = "numba"


def libraries(state_bits: int, methods: Iterable[Method]) -> tuple[str, ...]:
    """Return the names of the modules that steps on a CPU load in addition to those of every run."""
    of_optimizer = (_KERNELS,) if state_bits < 32 else ()
    return tuple(dict.fromkeys([*of_optimizer, *(name for method in methods for name in method.libraries)]))


class LibrarySizes:
    """Measure the bytes that libraries add to this process. Each library is loaded and measured on first use."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}

    def __call__(self, names: Collection[str]) -> int:
        """Return the total bytes of these libraries. A library that was loaded before counts as 0 bytes."""
        for name in names:
            if name not in self._bytes:
                release_freed_memory()
                before = resident_bytes()
                load(name)
                release_freed_memory()
                self._bytes[name] = max(resident_bytes() - before, 0)
        return sum(self._bytes[name] for name in names)


def load(name: str) -> None:
    """Load a library that `libraries` returned."""
    if name == _KERNELS:
        cpu.load()
    else:
        import_module(name)
