"""Imports of the libraries that trials use, without output. The server of child processes preloads this module.

The module also imports modules that libraries and methods import at their first use. These imports take a third of the
time of a small run.
"""

from __future__ import annotations

import contextlib
import importlib
import os

from efficient_ft.methods import METHODS

_MODULES = (
    "tests.promises.runs", "efficient_ft.cli.entry", "efficient_ft.cli.main", "efficient_ft.cli.hydra.evaluate",
    "efficient_ft.training.run", "efficient_ft.task.metrics", "timm", "omegaconf", "hydra", "hydra._internal.utils",
    "numba.typed", "peft", "torch._inductor.decomposition",
)  # fmt: skip


def _import_all() -> None:
    for module in _MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    for name in METHODS:
        METHODS[name]
    from PIL import Image

    Image.init()


_terminal = os.dup(2)
_nothing = os.open(os.devnull, os.O_WRONLY)
os.dup2(_nothing, 2)
try:
    _import_all()
finally:
    os.dup2(_terminal, 2)
    os.close(_terminal)
    os.close(_nothing)
