"""Blocks between markers: ``<!-- generated: NAME ARGUMENT... -->``. Each takes the page it stands on as well."""

from __future__ import annotations

from pathlib import Path

from docsgen import cards, configuration, curves, labels, printed, promises, records, studies
from docsgen import memory as memory  # its blocks are added to BLOCKS
from docsgen.block import BLOCKS, Block, block
from docsgen.markdown import duration, table, times
from docsgen.values import error, projector
from efficient_ft.papers.published import COSTS


@block
def conditions(*files: str, page: Path) -> str:
    """How the files were measured."""
    return "\n\n".join(records.conditions(file) for file in files)


# ---------------------------------------------------------------------------------------------- tokens and layers
@block
def tokens(page: Path) -> str:
    """DeiT-S: fewer tokens, fewer layers."""
    rows = []
    for file in ("tokens", "stacked"):
        for name in records.load(file)["recipes"]:
            if name not in labels.TOKENS or (file == "stacked" and name == "full"):
                continue
            executed = records.recipe(file, name)["executed"]
            rows.append(
                [
                    labels.TOKENS[name],
                    f"{(executed['forward_flops'] + executed['backward_flops']) / 1e9:.1f}",
                    f"{records.saved(file, name):.2f}",
                    f"{records.peak(file, name):.0f}",
                    duration(records.seconds(file, name)),
                    times(records.time(file, name)),
                ]
            )
    head = ["recipe", "forward + backward GFLOP / image", "saved MiB / image", "peak MiB, batch", "step"]
    return table([*head, "time / time of `full`"], rows)


# ---------------------------------------------------------------------------------------------- methods
@block
def methods_cost(page: Path) -> str:
    """EfficientFormer-L1: what trains, and adapters."""
    rows = []
    for name, of in records.load("methods")["recipes"].items():
        rows.append(
            [
                labels.METHODS[name],
                f"{of['trainable_parameters'] / 1e6:.2f} M",
                f"{of['executed']['backward_flops'] / 1e6:.0f}",
                f"{records.saved('methods', name):.2f}",
                f"{records.peak('methods', name):.0f}",
                duration(records.seconds("methods", name)),
                times(records.time("methods", name)),
            ]
        )
    head = ["recipe", "parameters trained", "backward MFLOPs / image", "saved MiB / image", "peak MiB, batch", "step"]
    return table([*head, "time / time of `full`"], rows)


@block
def counted(model: str, page: Path) -> str:
    """Executed counts of every recipe on one model."""
    of = records.load("counted")["models"][model]
    rows = []
    for recipe in of["recipes"].values():
        executed = recipe["executed"]
        rows.append(
            [
                labels.command(recipe["arguments"]),
                f"{recipe['trainable_parameters'] / 1e6:.2f} M",
                f"{executed['forward_flops'] / 1e9:.2f}",
                f"{executed['backward_flops'] / 1e9:.2f}",
                f"{executed['saved_bytes'] / records.MIB:.2f}",
                f"{executed['peak_bytes'] / records.MIB:.0f}",
            ]
        )
    head = ["recipe", "parameters trained", "forward GFLOP / image", "backward GFLOP / image", "saved MiB / image"]
    return table([*head, f"peak MiB, batch {of['batch']}"], rows)


@block
def adapters(page: Path) -> str:
    """ResNet-50: adapters, with frozen statistics of BatchNorm and with those of the batch."""
    data = records.load("adapters")
    rows = []
    for name, recipe in data["recipes"].items():
        reported = data["reported"].get(name)
        cells = [labels.ADAPTERS[name], f"{recipe['trainable_parameters']:,}"]
        cells.append("–" if reported is None else f"{reported:.0f}")
        cells += [f"{records.adapters_saved(name, statistics):.0f}" for statistics in ("batch", "frozen")]
        cells.append(f"{recipe['frozen']['peak_bytes'] / records.MIB:.0f}")
        rows.append(cells)
    head = [
        "recipe",
        "parameters trained",
        f"reported in {data['reported']['source']}, MiB",
        "saved MiB, batch statistics",
    ]
    return table([*head, "saved MiB, frozen statistics", "peak MiB, frozen statistics"], rows)


# ---------------------------------------------------------------------------------------------- projectors and speed
_PROJECTORS = ("WHT reflect", "WHT zero", "WHT ortho", "LHE", "DCT")
_PROJECTOR_HEAD = ["WHT `reflect` (published)", "WHT `zero`", "WHT `ortho`", "LHE (`ortho`)", "DCT"]


@block
def projectors(page: Path) -> str:
    """Relative error and cosine by projector on the trained network."""
    rows = []
    for grid in (7, 8, 14):
        for order in (4, 6):
            results = [projector("trained", grid, name, order) for name in _PROJECTORS]
            best = min(error(r) for r in results)
            dct = results[-1]
            rows.append(
                [
                    f"{grid}×{grid}, order {order}",
                    f"{dct['backward_mflops']:.0f} ({dct['exact_mflops']:.0f})",
                    *(
                        _bold(f"{error(r):.3f} ({r['batch']['network']['cosine']['mean']:.3f})", error(r) == best)
                        for r in results
                    ),
                ]
            )
    return table(["grid, order", "backward MFLOPs (exact)", *_PROJECTOR_HEAD], rows)


@block
def projectors_finetuning(page: Path) -> str:
    """Relative error at the start, middle and end of fine-tuning."""
    rows = []
    for grid in (7, 8, 14):
        for order in (4, 6):
            found = [
                [error(projector(s, grid, name, order)) for s in ("start", "middle", "end")] for name in _PROJECTORS
            ]
            best = [min(column) for column in zip(*found, strict=True)]
            cells = [
                " / ".join(_bold(f"{e:.3f}", e == b) for e, b in zip(errors, best, strict=True)) for errors in found
            ]
            rows.append([f"{grid}×{grid}, order {order}", *cells])
    return table(["grid, order", *_PROJECTOR_HEAD], rows)


@block
def projectors_layers(page: Path) -> str:
    """Relative error by kind of layer, trained network, 7×7, order 4."""
    rows = []
    for kind in ("qkv", "proj", "fc1", "fc2"):
        results = [projector("trained", 7, name, 4) for name in _PROJECTORS]
        rows.append([kind, *(f"{r['batch'][kind]['error']['mean']:.3f}" for r in results)])
    return table(["layer", *_PROJECTOR_HEAD], rows)


@block
def low_rank_step(file: str, page: Path) -> str:
    """Backward pass and whole step with low-rank backward; ratios to the exact last stage of timm's model."""
    batch = records.load(file)["batch"]
    rows = [
        [
            labels.LOW_RANK[name],
            f"{of['executed']['backward_flops'] / 1e6:.0f}",
            duration(records.seconds(file, name, "backward")),
            times(records.time(file, name, "backward")),
            duration(records.seconds(file, name)),
            times(records.time(file, name)),
            f"{records.saved(file, name) * batch:.1f}",
        ]
        for name, of in records.load(file)["recipes"].items()
    ]
    head = ["recipe", "backward MFLOPs / image", "backward", "backward / exact", "step", "step / exact"]
    return table([*head, f"saved MiB, batch of {batch}"], rows)


@block
def low_rank_layer(page: Path) -> str:
    """The backward pass of one linear layer, with the paper's speedups."""
    rows = []
    for shape, orders in records.load("layer")["shapes"].items():
        exact = orders["exact"]["measured"]["backward"]
        cells = [shape.replace(",", " → ", 1).replace(",", ", "), duration(exact["median"])]
        for order in ("order 2", "order 4", "order 6"):
            measured = orders[order]["measured"]["backward"]
            cells += [
                duration(measured["median"]),
                f"{measured['times_faster']['median']:.1f}",
                printed.layer_speedup(shape, order),
            ]
        rows.append(cells)
    parts = [
        f"{name}{what}"
        for name in ("LP-2", "LP-4", "LP-6")
        for what in ("", ", times faster", ", paper's times faster")
    ]
    return table(["layer (channels, grid)", "exact", *parts], rows)


# ---------------------------------------------------------------------------------------------- published
@block
def published_rule(name: str, page: Path) -> str:
    """A table of the papers' costs and our count by the same rule."""
    of = next(t for t in records.load("published")["tables"] if t["table"] == name)
    rows = of["rows"]
    unit = of["unit"]
    columns = [
        ("published", f"published {unit}", "g"),
        ("memory", f"our {unit}", ".1f"),
        ("as_listed", "only the blocks listed", ".1f"),
        ("published_gmacs", "published GMACs", "g"),
        ("gmacs", "our GMACs", ".1f"),
    ]
    columns = [c for c in columns if any(row[c[0]] is not None for row in rows)]
    cells = [[f"`{row['row']}`", *(_number(row[key], form) for key, _, form in columns), row["note"]] for row in rows]
    head = ["row", *(name for _, name, _ in columns), "note"]
    noted = any(row[-1] for row in cells)
    if not noted:
        cells, head = [row[:-1] for row in cells], head[:-1]
    return f"**`{name}`: {of['title']}** ({of['conditions']})\n\n{table(head, cells, text_last=noted)}"


@block
def table_costs(page: Path) -> str:
    """How many printed costs our counts agree with, by column; all of them, and the reasons: ``table NAME --cost``."""
    cells = records.load("costs")["cells"]
    rows = []
    for column, name in COSTS.items():
        of = [cell for cell in cells if cell["column"] == column]
        if not of:
            continue
        ruled, counted = ([cell for cell in of if cell["by"] == by] for by in ("rule", "executed"))
        shares = [f"{sum(c['agrees'] for c in group)} of {len(group)}" if group else "" for group in (ruled, counted)]
        tables = dict.fromkeys(f"`{cell['table']}`" for cell in of)
        rows.append([name, ", ".join(tables), *shares, str(len(of) - len(ruled) - len(counted))])
    return table(["printed cost", "tables", "by rule", "executed", "measured, or not derived"], rows, left=2)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


@block
def printed_accuracies(name: str, group: str = "", *, page: Path) -> str:
    """A table of accuracies as a paper printed it: ``printed-accuracies lbp_wht/2 efficientformer_l1``."""
    columns, rows = printed.accuracies(name, group)
    return (
        f"{table(['', *columns], rows)}\n\n*{printed.source(name, group)} As printed in the paper, not measured here.*"
    )


def _bold(text: str, yes: bool) -> str:
    return f"**{text}**" if yes else text


# ---------------------------------------------------------------------------------------------- configuration
@block
def methods(page: Path) -> str:
    """Every method with its axis and its card's summary."""
    rows = []
    for card in cards.all_cards():
        link = cards.link(card, page)
        options = ", ".join(f"`{option}`" for option in card.options if option != card.name)
        rows.append([f"[`{card.name}`]({link})" + (f" ({options})" if options else ""), card.axes, card.summary])
    return table(["method", "axis", "what it does"], rows, left=3)


@block
def reference(page: Path) -> str:
    """The classes of all methods, from their docstrings, by axis."""
    parts = []
    for heading, of in cards.by_axis().items():
        parts.append(f"## {heading}")
        parts += [f"::: {cards.classes()[one.name].__module__}.{cards.classes()[one.name].__name__}" for one in of]
    return "\n\n".join(parts)


@block
def header(method: str, page: Path) -> str:
    """Axis, options and class of a method."""
    of = cards.card(method)
    options = ", ".join(f"`method={option}`" for option in of.options)
    return f"Axis: {of.axes}. Options: {options}. Class: `efficient_ft.methods.{cards.classes()[method].__name__}`."


def _without_page(function: Block) -> Block:
    return lambda *arguments, page: function(*arguments)


#: Blocks that other modules write.
BLOCKS |= {
    name: _without_page(function)
    for name, function in {
        "options": configuration.options_table,
        "recipes": configuration.recipes_table,
        "promises": promises.promises,
        "settings": cards.settings_table,
        "cost": cards.cost_tables,
        "study-rows": studies.study_rows,
        "study": studies.study_table,
        "alast-7-compared": studies.alast_7_compared,
        "study-conditions": studies.study_conditions,
        "time-to-accuracy": curves.time_to_accuracy,
        "time-to-accuracy-conditions": curves.conditions,
    }.items()
}
