"""The base of contract tests: the table of rows, and how pytest runs a contract on each of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from efficient_ft.methods.base import Method
from efficient_ft.methods.declarations import Axis
from efficient_ft.testing.models import model_of
from efficient_ft.testing.rows import Row

_Test = TypeVar("_Test", bound=Callable[..., None])

#: Axes whose methods set `requires_grad`.
SETS_REQUIRES_GRAD = (Axis.SELECTION, Axis.ADAPTERS)


def on_models(models_of: Callable[[Row], Iterable[str]]) -> Callable[[_Test], _Test]:
    """Run a contract on the models that `models_of` names for each row."""

    def mark(test: _Test) -> _Test:
        test.models_of = models_of  # type: ignore[attr-defined]
        return test

    return mark


class ContractTests:
    """Base of the contracts; `MethodContracts` has all of them.

    Attributes:
        rows: the table of settings, by a name of each row.
        conf: the folder of the methods' YAML files; None: they are not tested.
    """

    rows: ClassVar[Mapping[str, Row]] = {}
    conf: ClassVar[Path | None] = None

    #: Applied once for each row and model, and copied for each contract.
    _prototypes: ClassVar[dict[Any, tuple[nn.Module, Method]]] = {}

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Let pytest run each contract on the rows and models it is about."""
        test, names = metafunc.function, metafunc.fixturenames
        if "name" in names:
            models_of = getattr(test, "models_of", lambda row: row.models)
            cases = [(row, name) for row, r in self.rows.items() for name in models_of(r)]
            metafunc.parametrize(("row", "name"), cases)
        elif "row" in names:
            metafunc.parametrize("row", list(self.rows))
        elif "file" in names:
            files = sorted(self.conf.glob("*.yaml")) if self.conf is not None else []
            metafunc.parametrize("file", files, ids=[file.stem for file in files])

    # ------------------------------------------------------------------ helpers
    def applied(self, row: str, name: str) -> tuple[nn.Module, Method]:
        """Return a copy of the small model `name` with the method of a row applied, and the method."""
        key = self._key(row, name)
        if key not in self._prototypes:
            model, method = model_of(name), self.rows[row].create()
            torch.manual_seed(1)
            method.apply(model)
            self._prototypes[key] = model, method
        return copy.deepcopy(self._prototypes[key])

    def precisions(self, row: str, name: str) -> tuple[str, ...]:
        """Return the precisions in which the meter is checked."""
        return ("fp32", "bf16")

    def _key(self, row: str, name: str) -> Any:
        return type(self), row, name
