"""The libraries that trials use, imported without a word: the server of child processes preloads this module."""

from __future__ import annotations

import contextlib
import importlib
import os

#: peft and the modules after it are imported by methods, at their first use.
_MODULES = (
    "efficient_ft.selftest.runs", "efficient_ft.training.run", "sklearn.datasets", "timm", "numba.typed", "peft",
    "torch._inductor.decomposition",
)  # fmt: skip

_terminal = os.dup(2)
_nothing = os.open(os.devnull, os.O_WRONLY)
os.dup2(_nothing, 2)
try:
    for _module in _MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(_module)
finally:
    os.dup2(_terminal, 2)
    os.close(_terminal)
    os.close(_nothing)
