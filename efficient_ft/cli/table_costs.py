"""The cost columns of a published table, row by row: as printed, by the paper's own rule, and as executed here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from efficient_ft import papers
from efficient_ft.cli.compose import configurations
from efficient_ft.cli.groups import CONF, register
from efficient_ft.config import Config
from efficient_ft.core.errors import UserError
from efficient_ft.core.sheet import Cell, render
from efficient_ft.cost import Executed, executed
from efficient_ft.methods.build import build_methods
from efficient_ft.models import factory
from efficient_ft.papers.published import FIGURES, MODELS, Row, Table, baseline_of, reasons
from efficient_ft.papers.table import Row as RuleRow
from efficient_ft.papers.table import Table as RuleTable

#: Relative difference from the printed figure above which a reason is given.
TOLERANCE = 0.02

#: Figures that only a rule of the paper gives.
_BY_RULE = ("train_memory_mb", "activation_memory_mb", "train_memory_reduction")

#: Training images of the data sets in ALaST's tables: its Flowers runs have those of the train split alone.
IMAGES = {"flowers102": 1020, "cifar100": 50_000, "food101": 75_750}


@dataclass(frozen=True)
class CostCell:
    """One printed cost.

    Attributes:
        figure: its column (`papers.published.FIGURES`).
        printed: as in the paper.
        rule: by the paper's own rule; None: it has none that is known, or it was measured.
        executed: counted here by executing the step; None: there is no such count.
        reason: why the nearest of the two differs by more than `TOLERANCE`, or why there is none; None: it does not.
    """

    figure: str
    printed: float
    rule: float | None
    executed: float | None
    reason: str | None

    @property
    def deviation(self) -> float | None:
        """Relative difference of our number from the printed one: by the rule, or of FLOPs the executed one.

        Bytes that a step keeps are no rule of the papers': theirs have parameters and temporary buffers.
        """
        ours = self.executed if self.rule is None and self.figure not in _BY_RULE else self.rule
        return None if ours is None else ours / self.printed - 1


def cost_cells(table: Table, row: Row) -> list[CostCell]:
    """The printed costs of a row, with our counts.

    Raises:
        UserError: a setting of the row cannot be used.
    """
    found = []
    for figure, printed in row.figures.items():
        if figure not in _COUNTED:
            continue
        by_rule, by_execution = _COUNTED[figure](table, row)
        cell = CostCell(figure, float(printed), by_rule, by_execution, None)
        if cell.deviation is None or abs(cell.deviation) > TOLERANCE:
            reason = reasons(table.name, row, figure) or ("measured, not counted" if cell.deviation is None else None)
            cell = CostCell(figure, float(printed), by_rule, by_execution, reason)
        found.append(cell)
    return found


def cost_sheet(table: Table, rows: Sequence[Row], form: str) -> str:
    """The cost columns of `rows` as a text in one of the forms of `core.sheet`.

    Raises:
        UserError: the table prints no costs that are counted here.
    """
    cells = {row.name: {cell.figure: cell for cell in cost_cells(table, row)} for row in rows}
    figures = [figure for figure in FIGURES if any(figure in of for of in cells.values())]
    if not figures:
        raise UserError(f"{table.name} prints no costs that are counted. {table.reason or ''}".rstrip())
    header = [
        "row",
        *(word for f in figures for word in (FIGURES[f], "by its rule", "executed", "deviation")),
        "reason",
    ]
    lines: list[list[Cell]] = []
    for row in rows:
        line: list[Cell] = [row.name]
        for figure in figures:
            cell = cells[row.name].get(figure)
            if cell is None:
                line += [None] * 4
                continue
            deviation = None if cell.deviation is None else f"{100 * cell.deviation:+.1f} %"
            line += [row.figures[figure], _short(cell.rule), _short(cell.executed), deviation]
        why = dict.fromkeys(cell.reason for cell in cells[row.name].values() if cell.reason)
        lines.append([*line, "; ".join(why) or None])
    # A figure without any rule or execution has no column for it.
    used = [i for i in range(len(header)) if i == 0 or any(line[i] is not None for line in lines)]
    return render([header[i] for i in used], [[line[i] for i in used] for line in lines], form)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


# ---------------------------------------------------------------------------------------------- how figures are counted
Counts = tuple[float | None, float | None]


def _backward(table: Table, row: Row) -> Counts:
    return None, None if not row.arguments else _executed(row.arguments).backward_flops / 1e6


def _speedup(table: Table, row: Row) -> Counts:
    if not row.arguments:
        return None, None
    _, baseline = baseline_of(table, row)
    return None, _executed(baseline.arguments).backward_flops / _executed(row.arguments).backward_flops


#: BSR's Table 1: MiB of activations in fp32 for 196 patches and the class token, 384 channels, 6 heads, expansion 4.
_ACTIVATIONS = {
    "self_attention": 4 * 3 * 197 * 384 / 2**20,
    "softmax": 4 * 6 * 197**2 / 2**20,
    "gelu": 4 * 197 * 384 * 4 / 2**20,
}


def _memory(table: Table, row: Row) -> Counts:
    if table.name == "bsr/1":
        return _ACTIVATIONS[row.columns["module"]], None
    found = rule_row(table, row)
    rule = None if found is None else found[0].count(found[1]).memory
    return rule, None if not row.arguments else _kept(row, 2**20 if found is None else found[0].unit)


def _reduction(table: Table, row: Row) -> Counts:
    whole, own = _memory(*baseline_of(table, row)), _memory(table, row)
    by_rule, executed_too = (None if a is None or b is None else a / b for a, b in zip(whole, own, strict=True))
    return by_rule, executed_too


def _kept(row: Row, unit: int) -> float:
    """Kept activations of the printed batch, without parameters."""
    return _executed(row.arguments).saved_bytes * int(row.columns.get("batch") or 1) / unit


def _gmacs(table: Table, row: Row) -> Counts:
    found = rule_row(table, row)
    rule = None if found is None else found[0].count(found[1]).gmacs
    if not row.arguments:
        return rule, None
    return rule, _executed(row.arguments).forward_flops / 2e9 * int(row.columns.get("batch") or 1)


def _compute(table: Table, row: Row) -> Counts:
    """PFLOPs of a run: executed FLOPs of an image times images times epochs."""
    if not row.arguments:
        return None, None
    config = _configuration(row.arguments)
    return None, _executed(row.arguments).flops * IMAGES[config.data.name] * config.trainer.epochs / 1e15


def _parameters(table: Table, row: Row) -> Counts:
    config = _configuration((f"model={MODELS[row.columns['model']]}",))
    return None, sum(p.numel() for p in factory.random_model(config.model, 1000).parameters()) / 1e6


def _measured(table: Table, row: Row) -> Counts:
    return None, None


_COUNTED: dict[str, Callable[[Table, Row], Counts]] = {
    "bwd_mflops": _backward,
    "speedup": _speedup,
    "train_memory_mb": _memory,
    "activation_memory_mb": _memory,
    "train_memory_reduction": _reduction,
    "fwd_gmacs": _gmacs,
    "compute_pflops": _compute,
    "params_m": _parameters,
    "on_device_memory_mb": _measured,
    "peak_memory_mb": _measured,
    "time_min": _measured,
}


def rule_row(table: Table, row: Row) -> tuple[RuleTable, RuleRow] | None:
    """The row of `papers.TABLES` that holds the rule for `row`: of its network, with the number that it prints.

    If two papers print the same number (BSR repeats some of Back Razor's), it is the one whose rule comes nearest.
    """
    printed = row.figures.get("train_memory_mb") or row.figures.get("activation_memory_mb")
    if printed is None or table.paper not in ("back_razor", "bsr"):
        return None
    size = float(row.columns.get("resolution") or 224)
    found = [
        (rules, one)
        for rules in papers.TABLES
        for one in rules.rows
        if one.published == float(printed) and one.size == size and _architecture(row) == rules.architecture
    ]
    return min(found, key=lambda of: abs(of[0].count(of[1]).memory - float(printed)), default=None)


def _architecture(row: Row) -> str:
    models = {
        "vit_b": "vit_base_patch16_224",
        "deit_s": "deit_small_patch16_224",
        "proxylessnas_mobile": "proxyless_mobile",
    }
    return models.get(row.columns.get("model", ""), row.columns.get("model", ""))


@cache
def _executed(arguments: tuple[str, ...]) -> Executed:
    config = _configuration(arguments)
    model = factory.random_model(config.model, 100)
    spec = factory.input_of(config.model)
    # FLOPs and kept bytes of an image do not depend on the batch.
    return executed(
        model,
        2,
        spec.size,
        methods=build_methods(config),
        precision=config.trainer.precision,
        label_smoothing=config.optim.label_smoothing,
        frozen_bn=config.model.frozen_bn,
    )


@cache
def _configuration(arguments: tuple[str, ...]) -> Config:
    register()
    (config,) = configurations(CONF, "train", arguments, sweep=False)
    return config
