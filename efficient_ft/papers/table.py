"""A published table of costs as data, and our count of its rows by the paper's own rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import timm
import torch
from torch import nn

import efficient_ft.models.proxyless  # noqa: F401  registers proxyless_mobile
from efficient_ft.core import text
from efficient_ft.cost.published import DENSE, TINYTL_RULE, Keeping, Operation, Rule, operations, parameter_bytes, peak
from efficient_ft.methods.base import make_trainable
from efficient_ft.methods.selection.static import Selection
from efficient_ft.models.marks import marks_of
from efficient_ft.models.view import is_norm, view


@dataclass(frozen=True)
class Row:
    """A row of a published table.

    Attributes:
        label: as published.
        published: memory, in the table's unit.
        methods: applied one after the other.
        keeping: how activations are kept.
        frozen_norms: scales and shifts do not train, as in Back Razor's CNNs.
        size: of the square images, in pixels.
        gmacs: published multiply-adds of the batch's forward pass, in 10⁹.
        by_name: indices of blocks of which the published count unfroze `named_alike`.
        note: printed after the numbers.
    """

    label: str
    published: float
    methods: tuple[Callable[[], Any], ...] = ()
    keeping: Keeping = DENSE
    frozen_norms: bool = False
    size: int = 224
    gmacs: float | None = None
    by_name: tuple[int, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Count:
    """Our numbers for a row.

    Attributes:
        memory: in the table's unit.
        gmacs: 10⁹ multiply-adds of the batch.
        as_listed: memory if only the listed blocks had been unfrozen.
    """

    memory: float
    gmacs: float
    as_listed: float


@dataclass(frozen=True)
class Table:
    """A published table.

    Attributes:
        title: the paper, the table's number and its units.
        architecture: timm's name of the model.
        batch_size: images.
        unit: bytes in the table's unit of memory.
        rows: of the table.
        rule: by which the paper counts.
        classes: of the model.
        parameters: True if the table's memory includes them.
        parameter_value: bytes of every parameter, whether it trains or not; None: by the rule.
    """

    title: str
    architecture: str
    batch_size: int
    unit: int
    rows: tuple[Row, ...]
    rule: Rule = TINYTL_RULE
    classes: int = 100
    parameters: bool = True
    parameter_value: int | None = None

    def count(self, row: Row) -> Count:
        """Count `row` by the table's rule."""
        size = (row.size, row.size)
        plain = _counted(self.architecture, self.classes, row.methods, row.frozen_norms, size, self.rule)
        memory = as_listed = self._memory(plain.operations, row, plain.parameter_bytes)
        if alike := named_alike(plain.frozen, row.by_name):
            model = self.model(row)
            for name in alike:
                model.get_parameter(name).requires_grad_(True)
            # The published count goes by each weight if a layer is linear or a normalization, but lets no gradient pass
            # through attention and GELU before the first block listed, even if something trains there.
            trains = operations(model, size, rule=self.rule, blocks=_blocks(self.architecture, size))
            both = [t if t.kind in ("product", "norm") else p for t, p in zip(trains, plain.operations, strict=True)]
            memory = self._memory(both, row, parameter_bytes(model))
        return Count(memory, sum(op.macs for op in plain.operations) * self.batch_size / 1e9, as_listed)

    def model(self, row: Row) -> nn.Module:
        """Make what is counted in `row`, on the meta device."""
        return _model(self.architecture, self.classes, row.methods, row.frozen_norms)

    def _memory(self, running: Sequence[Operation], row: Row, of_parameters: int) -> float:
        if self.parameter_value is not None:
            of_parameters = self.parameter_value * sum(p.numel() for p in self.model(row).parameters())
        parameters = of_parameters if self.parameters else 0
        return (peak(running, row.keeping)[0] * self.batch_size + parameters) / self.unit


def _model(architecture: str, classes: int, methods: Sequence[Callable[[], Any]], frozen_norms: bool) -> nn.Module:
    with torch.device("meta"):
        model = timm.create_model(architecture, num_classes=classes)
        for method in (make() for make in methods):
            if isinstance(method, Selection) and marks_of(model):
                # The papers compare selections on a network that contains TinyTL's modules, frozen.
                chosen = method.chosen(view(model))
                make_trainable(model, {name: name in chosen for name, _ in model.named_parameters()})
            else:
                method.apply(model)
        if frozen_norms:
            for module in filter(is_norm, model.modules()):
                module.requires_grad_(False)
    return model


@dataclass(frozen=True)
class _Counted:
    """A model as the rule counts it: operations on one image, bytes of parameters, names of the frozen ones."""

    operations: tuple[Operation, ...]
    parameter_bytes: int
    frozen: tuple[str, ...]


@cache  # rows that differ only in how activations are kept share their operations
def _counted(
    architecture: str,
    classes: int,
    methods: tuple[Callable[[], Any], ...],
    frozen_norms: bool,
    size: tuple[int, int],
    rule: Rule,
) -> _Counted:
    model = _model(architecture, classes, methods, frozen_norms)
    frozen = tuple(name for name, p in model.named_parameters() if not p.requires_grad)
    found = operations(model, size, rule=rule, blocks=_blocks(architecture, size))
    return _Counted(tuple(found), parameter_bytes(model), frozen)


@cache
def _blocks(architecture: str, size: tuple[int, int]) -> tuple[str, ...]:
    """Names of the plain model's blocks, which methods do not change."""
    return view(_model(architecture, 2, (), False), size).blocks


def named_alike(names: Iterable[str], blocks: Sequence[int]) -> list[str]:
    """The parameters that BSR's Table 7 takes for part of `blocks`: an index occurs anywhere in their names.

    For 2 these are block 2 and each block's ``norm2`` and ``fc2``; for 0, blocks 0 and 10.
    """
    return [name for name in names if any(str(block) in name for block in blocks)]


def comparison(table: Table) -> str:
    """The table as text: published numbers next to ours, with the columns that it has."""
    has_macs = any(row.gmacs is not None for row in table.rows)
    listed = any(row.by_name for row in table.rows)
    rows = [["", "published", "ours", *["as listed"] * listed, *["published", "ours"] * has_macs, ""]]
    for row in table.rows:
        count = table.count(row)
        cells = [row.label, f"{row.published}", f"{count.memory:.1f}", *[f"{count.as_listed:.1f}"] * listed]
        macs = [f"{row.gmacs}", f"{count.gmacs:.1f}"] if has_macs else []
        rows.append([*cells, *macs, f"  {row.note}"])
    return f"{table.title}\n{columns(rows)}"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of a label, numbers and a note, aligned alike in all tables."""
    last = max(map(len, rows)) - 1
    return text.table(rows, left=(0, last), widths=(34, *[10] * (last - 1)), gap="", rule="")
