"""The published tables of the four papers as data: the printed numbers, and the settings that reproduce each row.

``tables/PAPER/NUMBER.csv`` contains the printed numbers. ``NUMBER.yaml`` in the same folder contains the title, the
conditions, the settings of each row, the differences between our runs and the paper, and known misprints:

.. code-block:: yaml

    title: ...
    conditions: ...
    models: {vit_b: vit_base}                       # model options that differ from `MODELS`
    settings: ["model={model}", "recipe=lbp_wht/{data}"]   # settings of all rows; {column} is replaced by a cell
    rows:                                           # the first entry whose `when` matches adds its settings
      - {when: {method: lora}, settings: ["method=[{selection},lora]", "method.lora.rank={rank}"]}
      - {settings: ["method={method}"]}
    deviations:
      - {when: {model: vit_b}, data: food101, note: ...}
    baseline:                                       # row to which ratios refer (default: full fine-tuning)
      - {when: {method: back_razor}, row: "back_razor/3:ft_full"}
    costs:                                          # reasons why our count of a printed cost differs
      - {when: {model: vit_b}, columns: [train_memory_mb], reason: ...}
    rule: {unit: MiB, rows: [...]}                  # the paper's count of memory and multiply-adds (see `rules`)
    notes: [...]                                    # misprints and inconsistencies of the paper
    reason: ...                                     # reason why no row can be run, instead of settings
    counted: true                                   # costs are counted even if no row can be run
    count_at: ["model.image_size=[256,512]"]        # additional settings for counting costs
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from efficient_ft.core.errors import UserError, did_you_mean

FOLDER = Path(__file__).parent / "tables"

#: The papers, in the order in which their tables are listed.
PAPERS = {
    "lbp_wht": "LBP-WHT (Yang et al., NeurIPS 2023)",
    "back_razor": "Back Razor (Jiang et al., NeurIPS 2022)",
    "alast": "ALaST (Devoto et al., 2024)",
    "bsr": "BSR (Sarkar et al., CVPR Workshops 2024)",
}

#: Options of this package for models and data sets. The keys are the names in the papers.
MODELS = {"vit_b": "vit_base", "deit_s": "deit_small", "deit_t": "deit_tiny", "proxylessnas_mobile": "proxyless_mobile"}
DATA = {name: name for name in ("cifar10", "cifar100", "pets", "aircraft", "cars", "cityscapes", "rte")}
DATA |= {"flowers": "flowers102", "food": "food101", "cub": "cub200", "voc12a": "voc2012_aug", "voc": "voc2012_aug"}

#: Titles and units of the columns with published values other than accuracies.
COSTS = {
    "bwd_mflops": "backward MFLOPs",
    "speedup": "times fewer FLOPs",
    "speedup_cpu": "times faster, CPU",
    "speedup_gpu": "times faster, GPU",
    "latency_cpu_us": "CPU µs",
    "latency_gpu_us": "GPU µs",
    "train_memory_mb": "training memory MB",
    "train_memory_reduction": "times less training memory",
    "on_device_memory_mb": "GPU memory MB",
    "on_device_memory_reduction": "times less GPU memory",
    "activation_memory_mb": "activations MB",
    "peak_memory_mb": "peak MB",
    "fwd_gmacs": "forward GMACs",
    "fwd_gmacs_reduction": "times fewer GMACs",
    "compute_pflops": "PFLOPs of the run",
    "time_min": "minutes",
    "params_m": "parameters M",
    "acc_mean": "mean accuracy %",
}

#: Papers that print accuracies as fractions instead of percent.
_FRACTIONS = ("alast",)

_SELECTION = {"partial": "last_stage", "full": "full"}


@dataclass(frozen=True)
class Cell:
    """A published accuracy, and the command that reproduces it.

    Attributes:
        data: option of the group ``data``, or None if there is no option for the data set.
        printed: the published number as text.
        accuracy: the published number as a fraction.
        arguments: command-line arguments of the run, or an empty tuple if the cell cannot be run.
        deviations: differences between our run and the paper.
    """

    data: str | None
    printed: str
    accuracy: float
    arguments: tuple[str, ...]
    deviations: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """A row of a published table.

    Attributes:
        name: name that is unique in the table and consists of the columns that identify the row.
        label: name of the row in the paper.
        columns: settings of the row, as in the CSV file.
        costs: published costs by column (a key of `COSTS`).
        cells: published accuracies by column (``acc_cifar10``, ``miou_cityscapes``).
        arguments: command-line arguments of the first cell that can be run, or of the row in a table without
            accuracies. The tuple is empty if the row cannot be run.
        together: True if one run on several data sets reproduces all cells.
        reason: reason why the row cannot be run, or None if the row can be run.
    """

    name: str
    label: str
    columns: Mapping[str, str]
    costs: Mapping[str, str]
    cells: Mapping[str, Cell]
    arguments: tuple[str, ...]
    together: bool
    reason: str | None

    @property
    def tasks(self) -> tuple[str, ...]:
        """Return the data sets of the row if one run covers all of them, or an empty tuple otherwise."""
        return tuple(cell.data for cell in self.cells.values() if cell.data) if self.together else ()

    @property
    def runs(self) -> list[tuple[str | None, tuple[str, ...]]]:
        """Return the accuracy column and the command-line arguments of each run of the row.

        The column is None if one run on several data sets reproduces all columns. Otherwise, the arguments include the
        published accuracy.
        """
        if self.together:
            return [(None, self.arguments)] if self.arguments else []
        return [
            (column, (*cell.arguments, f"published={cell.accuracy:.6g}"))
            for column, cell in self.cells.items()
            if cell.arguments
        ]


@dataclass(frozen=True)
class Table:
    """A published table.

    Attributes:
        name: name in the format ``PAPER/NUMBER``, for example ``lbp_wht/2``. PAPER is a key of `PAPERS`.
        paper: key of `PAPERS`.
        number: number of the table in the paper.
        title: short description of the contents.
        conditions: conditions that apply to all rows.
        rows: rows in the order of the paper.
        notes: misprints and inconsistencies in the paper.
        reason: reason why no row can be run, or None if rows can be run.
        counted: True if costs are counted even if no row can be run.
        count_at: additional arguments for counting costs.
    """

    name: str
    paper: str
    number: int
    title: str
    conditions: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = field(default=())
    reason: str | None = None
    counted: bool = False
    count_at: tuple[str, ...] = ()


def reason_of(table: str, row: Row, column: str) -> str | None:
    """Return the reason why our count of the cost `column` may differ, or None if the table's file contains no reason.

    `column` is a key of `COSTS`.
    """
    for one in _about(table).get("costs", ()):
        if column in one["columns"] and _matches(one.get("when", {}), row.columns):
            return str(one["reason"])
    return None


def rule_of(table: str, row: Row) -> dict[str, Any] | None:
    """Return the entries of ``rule`` that apply to `row`, or None if the table has no cost formula. See `rules`."""
    rule = _about(table).get("rule")
    if rule is None:
        return None
    held = {key: value for key, value in rule.items() if key != "rows"}
    for one in rule.get("rows", ()):
        if _matches(one.get("when", {}), row.columns):
            held.update({key: value for key, value in one.items() if key != "when"})
    return held


def baseline_of(table: Table, row: Row) -> tuple[Table, Row]:
    """Return the baseline to which the published ratios of `row` refer, as a table and a row of this table.

    The baseline is full fine-tuning of the same model in the same kind of training, unless the table's file names
    another row (``TABLE:ROW``).
    """
    for one in _about(table.name).get("baseline", ()):
        if _matches(one.get("when", {}), row.columns):
            name, _, wanted = one["row"].partition(":")
            other = published_table(name)
            return other, chosen_rows(other, [wanted])[0]
    same = ("model", "training")
    return table, next(
        other
        for other in table.rows
        if other.columns["method"] == "full" and all(other.columns.get(k) == row.columns.get(k) for k in same)
    )


@cache
def _about(name: str) -> dict[str, Any]:
    held: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return held


@cache
def table_names() -> tuple[str, ...]:
    """Return the names of all tables (``lbp_wht/1`` …), in the order of `PAPERS`."""
    return tuple(
        f"{paper}/{number}"
        for paper in PAPERS
        for number in sorted(int(file.stem) for file in (FOLDER / paper).glob("*.yaml"))
    )


@cache
def published_table(name: str) -> Table:
    """Return the table with the given name, for example ``lbp_wht/2``. Raise a UserError if there is no such table."""
    if any(figure.name == name for figure in figures()):
        raise UserError(f"{name} is a figure. To draw it, run efficient-ft figure {name}. See also efficient-ft table.")
    if name not in table_names():
        known = ", ".join(table_names())
        raise UserError(f"table must be one of {known}, got {name}.{did_you_mean(str(name), table_names())}")
    paper, number = name.split("/")
    about = _about(name)
    with open(FOLDER / f"{name}.csv", encoding="utf-8", newline="") as file:
        printed = list(csv.DictReader(file))
    names = _row_names(printed)
    rows = tuple(_row(paper, about, columns, row) for columns, row in zip(printed, names, strict=True))
    return Table(
        name=name,
        paper=paper,
        number=int(number),
        title=about["title"],
        conditions=about["conditions"],
        rows=rows,
        notes=tuple(about.get("notes", ())),
        reason=about.get("reason"),
        counted=bool(about.get("counted")),
        count_at=tuple(about.get("count_at", ())),
    )


@dataclass(frozen=True)
class Figure:
    """A published figure, with the command that draws the figure or the reason why no command draws it."""

    name: str
    title: str
    command: str | None = None
    reason: str | None = None


@cache
def figures() -> tuple[Figure, ...]:
    """Return the figures that show results, in the order of `PAPERS`. Schematic drawings are not included."""
    held = yaml.safe_load((FOLDER / "figures.yaml").read_text(encoding="utf-8"))
    return tuple(Figure(f"{paper}/figure_{n}", **about) for paper in PAPERS for n, about in held[paper].items())


def chosen_rows(table: Table, names: Sequence[str]) -> tuple[Row, ...]:
    """Return the rows of `table` whose names are in `names`, or all rows if `names` is empty.

    Raises:
        UserError: If a name is unknown.
    """
    known = {row.name: row for row in table.rows}
    for name in names:
        if name not in known:
            raise UserError(
                f"row must be one of {', '.join(known)} ({table.name}), got {name}.{did_you_mean(name, known)}"
            )
    return tuple(row for row in table.rows if not names or row.name in names)


def _row(paper: str, about: Mapping[str, Any], columns: Mapping[str, str], name: str) -> Row:
    settings = {key: value for key, value in columns.items() if not _is_number(key)}
    models = {**MODELS, **about.get("models", {})}
    rule: Mapping[str, Any] = next((r for r in about.get("rows", ()) if _matches(r.get("when", {}), settings)), {})
    reason = about.get("reason") or rule.get("reason")
    templates = [] if reason else [*about.get("settings", ()), *rule.get("settings", ())]
    together = bool(rule.get("together"))
    cells = {}
    for key, printed in columns.items():
        if not printed or not key.startswith(("acc_", "miou_")) or key == "acc_mean" or key.endswith("_pm"):
            continue
        data = DATA.get(key.partition("_")[2])
        own = [] if together or data is None else ["data={data}"]
        runs = bool(templates) and data is not None
        cells[key] = Cell(
            data=data,
            printed=printed,
            accuracy=float(printed) if paper in _FRACTIONS else float(printed) / 100,
            arguments=_arguments([*templates, *own], settings, models, data or "") if runs else (),
            deviations=tuple(
                one["note"]
                for one in about.get("deviations", ())
                if _matches(one.get("when", {}), settings) and one.get("data") in (None, data)
            ),
        )
    costs = {key: columns[key] for key in COSTS if columns.get(key)}
    arguments = next((cell.arguments for cell in cells.values() if cell.arguments), ())
    if templates and not cells:
        data = about.get("data", "cifar100")
        arguments = _arguments([*templates, "data={data}"], settings, models, data)
    return Row(name, columns.get("label", ""), settings, costs, cells, arguments, together, reason)


def _is_number(column: str) -> bool:
    return column in COSTS or column == "stars" or column.startswith(("acc_", "miou_"))


def _matches(when: Mapping[str, str | list[str]], columns: Mapping[str, str]) -> bool:
    """Return True if the columns of a row equal the values of `when`. A value may be a list of alternatives."""
    return all(columns.get(key) in (value if isinstance(value, list) else [value]) for key, value in when.items())


def _arguments(
    templates: Sequence[str], columns: Mapping[str, str], models: Mapping[str, str], data: str
) -> tuple[str, ...]:
    """Return the arguments of a run.

    Each ``{column}`` in `templates` is replaced by a cell of the row. Models and data sets have this package's names.
    """
    words = dict(columns)
    words["data"] = data
    words["model"] = models.get(columns.get("model", ""), columns.get("model", ""))
    words["selection"] = _SELECTION.get(columns.get("training", ""), "")
    words["blocks"] = "[" + ",".join(columns.get("trainable_blocks", "").split()) + "]"
    words["drop_at"] = "[" + ",".join(columns.get("drop_blocks", "").split()) + "]"
    if columns.get("drop_rate"):
        words["keep_rate"] = f"{1 - float(columns['drop_rate']):g}"
    filled = [re.sub(r"\{(\w+)\}", lambda match: words[match[1]], template) for template in templates]
    by_key = {argument.partition("=")[0]: argument for argument in filled}  # keeps the last argument of each key
    first = ("model", "data", "tasks", "recipe", "method")
    order = {key: place for place, key in enumerate(first)}
    return tuple(by_key[key] for key in sorted(by_key, key=lambda key: order.get(key, len(first))))


def _row_names(printed: Sequence[Mapping[str, str]]) -> list[str]:
    keys = [key for key in printed[0] if not _is_number(key) and key not in ("label", "batch")]
    columns = [key for key in ("model", "training", "c_x", "dataset") if key in keys]
    varying = [key for key in columns if len({row[key] for row in printed}) > 1]
    names = [_slug([*(row[key] for key in varying), row.get("label", "")]) for row in printed]
    for key in keys:
        values: dict[str, set[str]] = {}
        for name, row in zip(names, printed, strict=True):
            values.setdefault(name, set()).add(row[key])
        names = [
            f"{name}.{_slug([key, row[key]])}" if len(values[name]) > 1 else name
            for name, row in zip(names, printed, strict=True)
        ]
    assert len(set(names)) == len(names), names
    return names


def _slug(words: Sequence[str]) -> str:
    text = [re.sub(r"\s*\[\d+\]|\s*\(ours\)", "", word, flags=re.IGNORECASE) for word in words]
    return ".".join(re.sub(r"[^a-z0-9]+", "_", word.lower()).strip("_") for word in text if word)
