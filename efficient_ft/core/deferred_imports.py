"""Deferred import of torchmetrics.

Lightning requires two classes of torchmetrics. However, the package imports all metrics and the libraries of these
metrics that are installed (SciPy, Matplotlib, transformers), which use about 120 MiB. `defer_torchmetrics` makes
``import torchmetrics`` import only the modules of these two classes. The first access to any other name imports the
complete package.
"""

from __future__ import annotations

import importlib
import logging
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

_PACKAGE = "torchmetrics"

#: Modules that define names of the package. `torchmetrics.utilities` must be imported before `torchmetrics.metric`,
#: because these two modules import each other.
_MODULES = {
    "Metric": ("torchmetrics.utilities", "torchmetrics.metric"),
    "MetricCollection": ("torchmetrics.utilities", "torchmetrics.collections"),
    "__version__": ("torchmetrics.__about__",),
}


def defer_torchmetrics() -> None:
    """Defer the import of torchmetrics in this process. Call this function before torchmetrics is imported.

    The function has no effect if torchmetrics is already imported or not installed.
    """
    spec = PathFinder.find_spec(_PACKAGE)
    if _PACKAGE in sys.modules or spec is None or spec.loader is None:
        return
    package = module_from_spec(spec)
    package.__class__ = _Deferred
    vars(package)["_logger"] = logging.getLogger(_PACKAGE)  # imported by `torchmetrics.utilities`
    sys.modules[_PACKAGE] = package


class _Deferred(ModuleType):
    """Package whose ``__init__`` is executed when a name is used that `_MODULES` does not contain."""

    def __getattr__(self, name: str) -> Any:
        if name in _MODULES:
            modules = [importlib.import_module(module) for module in _MODULES[name]]
            value = getattr(modules[-1], name)
            setattr(self, name, value)
            return value
        if name.startswith("__"):  # introspection, e.g. by `inspect` or by the import system
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self._execute()
        return getattr(self, name)

    def _execute(self) -> None:
        spec: ModuleSpec | None = self.__spec__
        assert spec is not None
        assert isinstance(spec.loader, Loader)
        self.__class__ = ModuleType  # type: ignore[assignment]
        spec.loader.exec_module(self)
