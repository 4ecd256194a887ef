"""Accuracies and speedups that the papers report, from the package's tables (`efficient_ft.papers`)."""

from __future__ import annotations

import re

from efficient_ft.papers.published import DATA, PAPERS, Row, published_table

_DATA = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "flowers": "Flowers", "food": "Food", "pets": "Pets",
         "cars": "Cars", "aircraft": "Aircraft", "cub": "CUB",
         "cityscapes": "Cityscapes", "voc12a": "VOC12A", "voc": "VOC", "rte": "RTE"}  # fmt: skip
assert _DATA.keys() == DATA.keys()

_MODELS = {"deit_t": "DeiT-T", "deit_s": "DeiT-S", "vit_b": "ViT-B/16", "resnet50": "ResNet-50"}


def rows(table: str, group: str = "") -> list[Row]:
    """Return the rows of a table whose names begin with `group`."""
    return [row for row in published_table(table).rows if row.name.startswith(group)]


def _paper(table: str) -> str:
    return PAPERS[table.partition("/")[0]].partition(" (")[0]


def _label(table: str, row: Row) -> str:
    """Return the paper's label of a row, without reference numbers, and with the name of the method for "Ours"."""
    return re.sub(r"\bOurs$", _paper(table), re.sub(r" (\[\d+\]|\(ours\))$", "", row.label))


def accuracies(table: str, group: str = "") -> tuple[list[str], list[list[str]]]:
    """Return the columns, and the rows: a label and accuracies by data set, or by network if labels repeat."""
    of = rows(table, group)
    labels = [_label(table, row) for row in of]
    names = list(dict.fromkeys(labels))
    if len(names) == len(of):
        data = [name for name in _DATA if any(f"acc_{name}" in row.cells for row in of)]
        found = {name: [row.cells[f"acc_{one}"].printed for one in data] for name, row in zip(labels, of, strict=True)}
        columns = [_DATA[name] for name in data]
    else:
        networks = list(dict.fromkeys(row.columns["model"] for row in of))
        cells = {
            (name, row.columns["model"]): next(iter(row.cells.values())).printed
            for name, row in zip(labels, of, strict=True)
        }
        found = {name: [cells.get((name, network), "") for network in networks] for name in names}
        columns = [_MODELS[network] for network in networks]
    return columns, [[name, *found[name]] for name in names]


def source(table: str, group: str = "") -> str:
    """Return the paper, the number of the table, its subject and its conditions."""
    of = published_table(table)
    part = f", rows `{group}*`" if group else ""
    return f"{_paper(table)}, Table {table.partition('/')[2]}{part}: {of.title}; {of.conditions}."


def layer_speedup(shape: str, order: str) -> str:
    """Return the CPU speedup of a layer in LBP-WHT's Table 5: ``layer_speedup("448,1792,7x7", "order 4")``."""
    wanted = (*shape.split(",")[:2], order)
    return next(
        row.costs["speedup_cpu"]
        for row in rows("lbp_wht/5")
        if (row.columns["c_x"], row.columns["c_y"], f"order {row.columns['order']}") == wanted
    )
