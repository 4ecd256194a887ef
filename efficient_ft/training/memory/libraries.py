"""Libraries that only some recipes load, and the memory that they add to a process on a CPU.

They are there once, however large the batch, and loaded with the first step or when a method is applied: after the
size before the model is measured. A prediction adds them.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from efficient_ft.core.process_memory import release_freed_memory, resident_bytes
from efficient_ft.methods.base import Method
from efficient_ft.ops.storage.kernels import cpu

#: With it the CPU kernels are loaded, as their first use does.
_KERNELS = "numba"


def libraries(state_bits: int, methods: Iterable[Method]) -> tuple[str, ...]:
    """Return what steps on a CPU load besides what every run has loaded, as names of modules.

    Args:
        state_bits: bits of the optimizer state.
        methods: the methods of the run.
    """
    of_optimizer = (_KERNELS,) if state_bits < 32 else ()
    return tuple(dict.fromkeys([*of_optimizer, *(name for method in methods for name in method.libraries)]))


class LibrarySizes:
    """Return the bytes that libraries add to this process. Each library is loaded and measured on first use."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}

    def __call__(self, names: Iterable[str]) -> int:
        """Return the bytes of these libraries together; 0 for one that was loaded before, by somebody else."""
        return sum(self._one(name) for name in names)

    def _one(self, name: str) -> int:
        if name not in self._bytes:
            release_freed_memory()
            before = resident_bytes()
            load(name)
            release_freed_memory()
            self._bytes[name] = max(resident_bytes() - before, 0)
        return self._bytes[name]


def load(name: str) -> None:
    """Load one of `libraries`."""
    if name == _KERNELS:
        cpu.load()
    else:
        import_module(name)
