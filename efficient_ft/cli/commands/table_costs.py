"""Print the published costs of a table next to two counts: by the paper's rule, and from an executed step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import get_context

from efficient_ft.cli.hydra.compose import configured
from efficient_ft.cli.hydra.rows import merged
from efficient_ft.cli.terminal import quiet_libraries, status
from efficient_ft.core.errors import UserError
from efficient_ft.core.format import format_digits, format_percent
from efficient_ft.core.sheet import DATA, Cell, Column, Lines, render
from efficient_ft.core.text import paragraph
from efficient_ft.cost import Executed, executed
from efficient_ft.data import class_count
from efficient_ft.methods.build import build_methods
from efficient_ft.models import factory
from efficient_ft.models.weight_dtype import store_weights
from efficient_ft.papers.published import COSTS, MODELS, Row, Table, baseline_of, reason_of
from efficient_ft.papers.rules import batch_and_unit, count_cost, count_settings
from efficient_ft.training.kinds.registry import kind_of

#: If a count differs from the published number by more than this relative difference, the reason is printed.
TOLERANCE = 0.02

#: Columns that only the paper's rule can count.
_BY_RULE = ("train_memory_mb", "activation_memory_mb", "train_memory_reduction")

#: Number of training images of each data set in ALaST's tables. Flowers-102 excludes validation images
#: (``data.train_on_val=false`` in its recipes).
IMAGES = {"flowers102": 1020, "cifar100": 50_000, "food101": 75_750}


@dataclass(frozen=True)
class CostCell:
    """A published cost, our count by the paper's rule, and our count from an executed step.

    `reason` explains why our count differs by more than `TOLERANCE` and half a printed digit, or why there is no count.
    """

    column: str
    printed: float
    rule: float | None
    executed: float | None
    decimals: int = 0
    reason: str | None = None

    @property
    def deviation(self) -> float | None:
        """Relative difference of our count from the published number. The count by the paper's rule is preferred."""
        return None if self._ours is None else self._ours / self.printed - 1

    @property
    def agrees(self) -> bool:
        """Return True if our count is within `TOLERANCE` of the published number, or rounds to it."""
        if self._ours is None:
            return False
        distance = abs(self._ours - self.printed)
        return distance <= max(TOLERANCE * self.printed, 0.5 * 10**-self.decimals)

    @property
    def _ours(self) -> float | None:
        return self.executed if self.rule is None and self.column not in _BY_RULE else self.rule


#: Function that counts the costs of a step, given the arguments of a run.
Step = Callable[[tuple[str, ...]], Executed]
Counts = tuple[float | None, float | None]


def cost_cells(table: Table, row: Row, step: Step | None = None) -> list[CostCell]:
    """Return the published costs of a row with our counts.

    `step` is a function that counts a step. By default, steps are counted in this process.
    """
    found = []
    for column, printed in row.costs.items():
        if column not in _COUNTED:
            continue
        rule, as_executed = _COUNTED[column](table, row, step or _executed)
        cell = CostCell(column, float(printed), rule, as_executed, len(printed.partition(".")[2]))
        if not cell.agrees:
            reason = reason_of(table.name, row, column)
            if reason is None and cell.deviation is None:
                measured = _COUNTED[column] is _measured
                reason = "measured, not counted" if measured else row.reason or "not derived"
            cell = replace(cell, reason=reason)
        found.append(cell)
    return found


def print_costs(table: Table, rows: Sequence[Row], form: str, chosen: Sequence[str] = (), processes: int = 1) -> None:
    """Print the cost columns of `rows` in the format `form` of `core.sheet`.

    In text format with the default columns, each row is printed as soon as it is counted.
    """
    columns = [column for column in COSTS if column in _COUNTED and any(column in row.costs for row in rows)]
    if not columns:
        raise UserError(f"The table {table.name} contains no costs that can be counted. {table.reason or ''}".rstrip())
    data = form in DATA
    numbers: dict[str, int] = {}  # Maps each reason to its number, starting at 1.
    counted = count_rows(table, rows, processes, lambda done, of: status(f"counted {done} of {of} steps"))
    lines = (_line(row, columns, cost_cells(table, row), data, numbers) for row in counted)
    shown = _columns(columns)
    header = list(shown)
    if form == "text" and not chosen:
        samples = [_line(row, columns, cost_cells(table, row, _typical), data, None) for row in rows]
        sheet = Lines(header, samples, columns=shown)
        print(sheet.head(), flush=True)
        for line in lines:
            status("")
            print(sheet.row(line), flush=True)
        text = "\n".join(sheet.foot())
    else:
        found = list(lines)
        # Columns without values are omitted.
        used = [i for i in range(len(header)) if i == 0 or any(line[i] is not None for line in found)]
        kept = [[line[i] for i in used] for line in found]
        names = [header[i] for i in used]
        text = render(names, kept, form, columns={name: shown[name] for name in names}, chosen=chosen)
    status("")
    if text:
        print(text)
    noted: dict[str, list[str]] = {}
    for row in rows:
        settings = count_settings(table, row)
        if settings is not None and settings.note:
            noted.setdefault(settings.note, []).append(row.name)
    rules = [f"Rule of the rows {', '.join(names)}: {text}." for text, names in noted.items()]
    below = [] if data else [*(f"{number}: {why}." for why, number in numbers.items()), *rules]
    if form == "latex" and below:
        print("\n".join(f"% {line}" for line in below))
    elif below:
        print("\n" + "\n".join(paragraph(f"- {line}", "  ") if form == "text" else f"- {line}" for line in below))


def _columns(columns: Sequence[str]) -> dict[str, Column]:
    """Return the columns of the table with their formats.

    The published number and the deviation of our count have the highest priority.
    """
    found = {"row": Column(words=True)}
    for column in columns:
        name, kept = COSTS[column], column in _BY_RULE
        executed = "executed (kept)" if kept else "executed"
        found[name] = Column()
        found[f"{name}, by its rule"] = Column(2, format_digits, "by its rule")
        found[f"{name}, {'kept, ' * kept}executed"] = Column(2, format_digits, executed)
        found[f"{name}, deviation"] = Column(1, format_digits, "deviation")
    return {**found, "reason": Column(words=True)}


def _line(
    row: Row, columns: Sequence[str], cells: Sequence[CostCell], data: bool, numbers: dict[str, int] | None
) -> list[Cell]:
    """Return the cells of a row, and add the reasons for the differences to `numbers`.

    If `numbers` is None, return sample cells of maximum width.
    """
    of = {cell.column: cell for cell in cells}
    line: list[Cell] = [row.name]
    for column in columns:
        cell = of.get(column)
        if cell is None:
            line += [None] * 4
            continue
        deviation: Cell = cell.deviation
        if cell.deviation is not None and not data:
            deviation = "+100.00 %" if numbers is None else format_percent(cell.deviation, sign=True)
        line += [cell.printed if data else row.costs[column], cell.rule, cell.executed, deviation]
    if numbers is None:
        return [*line, "1, 2, 3"]
    columns_of: dict[str, list[str]] = {}
    for column, cell in of.items():
        if cell.reason:
            columns_of.setdefault(cell.reason, []).append(COSTS[column])
    reasons = [f"{', '.join(names)}: {reason}" for reason, names in columns_of.items()]
    if not data:
        reasons = [str(numbers.setdefault(reason, len(numbers) + 1)) for reason in reasons]
    return [*line, ("; " if data else ", ").join(reasons) or None]


# ---------------------------------------------------------------------------------------------- how costs are counted
def _backward(table: Table, row: Row, step: Step) -> Counts:
    return None, None if not row.arguments else step(_to_count(table, row)).backward_flops / 1e6


def _to_count(table: Table, row: Row) -> tuple[str, ...]:
    return row.arguments and (*row.arguments, *table.count_at)


#: Sizes in MiB of the fp32 activations in BSR's Table 1. The network has 197 tokens, 384 channels, 6 heads and an
#: expansion ratio of 4.
_ACTIVATIONS = {
    "self_attention": 4 * 3 * 197 * 384 / 2**20,
    "softmax": 4 * 6 * 197**2 / 2**20,
    "gelu": 4 * 197 * 384 * 4 / 2**20,
}


def _memory(table: Table, row: Row, step: Step) -> Counts:
    if table.name == "bsr/1":
        return _ACTIVATIONS[row.columns["module"]], None
    found = count_settings(table, row)
    rule = None if found is None else count_cost(found).memory
    if not row.arguments:
        return rule, None
    # The executed count contains the saved activations and the casts of weights to bf16, but not the parameters. The
    # count is made at the batch size of the run and scaled to the batch size of the table.
    batch, unit = batch_and_unit(table, row)
    return rule, step(_to_count(table, row)).saved_bytes * batch / unit


def _reduction(of: Callable[[Table, Row, Step], Counts], table: Table, row: Row, step: Step) -> Counts:
    """Return the cost of the baseline divided by the cost of the row."""
    baseline, own = of(*baseline_of(table, row), step), of(table, row, step)
    by_rule, as_executed = (None if a is None or b is None else a / b for a, b in zip(baseline, own, strict=True))
    return by_rule, as_executed


def _gmacs(table: Table, row: Row, step: Step) -> Counts:
    found = count_settings(table, row)
    rule = None if found is None else count_cost(found).gmacs
    if not row.arguments:
        return rule, None
    return rule, step(_to_count(table, row)).forward_flops / 2e9 * int(row.columns.get("batch") or 1)


def _compute(table: Table, row: Row, step: Step) -> Counts:
    """Return the PFLOPs of a run: executed FLOPs per image × images × epochs."""
    if not row.arguments:
        return None, None
    config = _configured(row.arguments)
    return None, step(_to_count(table, row)).flops * IMAGES[config.data.name] * config.trainer.epochs / 1e15


def _parameters(table: Table, row: Row, step: Step) -> Counts:
    return None, _parameter_count(MODELS[row.columns["model"]]) / 1e6


@cache
def _parameter_count(model: str) -> int:
    config = _configured((f"model={model}",))
    return sum(p.numel() for p in factory.random_model(config.model, 1000).parameters())


def _measured(table: Table, row: Row, step: Step) -> Counts:
    return None, None


_COUNTED: dict[str, Callable[[Table, Row, Step], Counts]] = {
    "bwd_mflops": _backward,
    "speedup": partial(_reduction, _backward),
    "train_memory_mb": _memory,
    "activation_memory_mb": _memory,
    "train_memory_reduction": partial(_reduction, _memory),
    "fwd_gmacs": _gmacs,
    "fwd_gmacs_reduction": partial(_reduction, _gmacs),
    "compute_pflops": _compute,
    "params_m": _parameters,
}
_COUNTED |= dict.fromkeys(
    ("on_device_memory_mb", "on_device_memory_reduction", "latency_cpu_us", "latency_gpu_us", "speedup_cpu",
     "speedup_gpu", "peak_memory_mb", "time_min"), _measured
)  # fmt: skip


#: Cached function that returns the configuration of a run.
_configured = cache(configured)

#: Counts of steps, keyed by the arguments of the run.
_known: dict[tuple[str, ...], Executed] = {}


def count_rows(
    table: Table, rows: Sequence[Row], processes: int, counted: Callable[[int, int], None] = lambda done, of: None
) -> Iterator[Row]:
    """Count the steps that are required for the costs of `rows`, using up to `processes` processes.

    Yield each row as soon as its steps are counted.

    `counted` is called with the number of counted steps and the total number of steps.
    """
    needed = {row.name: _needed(table, row) for row in rows}
    todo = [step for step in dict.fromkeys(one for steps in needed.values() for one in steps) if step not in _known]
    parallel = min(processes, len(todo))
    # Each process starts a new interpreter, because torch's threads do not survive a fork.
    pool = ProcessPoolExecutor(parallel, get_context("spawn"), quiet_libraries) if parallel > 1 else None
    futures = {step: pool.submit(_counted, step) for step in todo} if pool else {}
    done = 0
    try:
        for row in rows:
            for step in needed[row.name]:
                if step in _known:
                    continue
                counted(done, len(todo))
                _known[step] = futures[step].result() if pool else _counted(step)
                done += 1
                counted(done, len(todo))
            yield row
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)


def _needed(table: Table, row: Row) -> list[tuple[str, ...]]:
    """Return the command-line arguments of all steps that must be counted for the costs of a row."""
    found = []
    if any(_COUNTED.get(column) not in (None, _measured, _parameters) for column in row.costs):
        found.append(_to_count(table, row))
        if any(isinstance(_COUNTED.get(column), partial) for column in row.costs):  # A ratio requires the baseline.
            found.append(_to_count(*baseline_of(table, row)))
    return [arguments for arguments in found if arguments]


def _typical(arguments: tuple[str, ...]) -> Executed:
    """Return placeholder costs of a step that is not counted yet. The costs have the maximum number of digits."""
    return Executed(12.345e9, 12.345e9, 12.345e6, 0, 0, 0, 1)


def _executed(arguments: tuple[str, ...]) -> Executed:
    if arguments not in _known:
        _known[arguments] = _counted(arguments)
    return _known[arguments]


def _counted(arguments: tuple[str, ...]) -> Executed:
    # One step is enough for a profile, because neither weights nor images change before the counted step.
    config = _configured(arguments)
    profiles = [f"method.{name}.profile_steps=1" for name, own in config.method.items() if "profile_steps" in own]
    config = _configured(merged(*arguments, *profiles))
    kind = kind_of(config)
    classes = kind.table_classes or class_count(config.data)
    assert classes is not None
    model = store_weights(kind.random_network(config.model, classes), config.trainer.weight_dtype)
    spec = factory.input_of(config.model)
    # Casts of the weights to bf16 are saved once per batch, so the saved bytes per image depend on the batch size.
    return executed(
        model, config.data.batch_size, spec.size, methods=build_methods(config), precision=config.trainer.precision,
        label_smoothing=config.optim.label_smoothing, frozen_bn=config.model.frozen_bn, task=kind.task,
    )  # fmt: skip
