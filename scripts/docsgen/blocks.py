"""Generated blocks of the pages: conditions, projectors, published tables, methods, configuration and promises."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

from docsgen import cards, records
from docsgen.markdown import BLOCKS, block, duration, table
from efficient_ft.cli.commands import table as table_command
from efficient_ft.config.augment import PRESETS
from efficient_ft.methods import METHODS
from efficient_ft.papers.published import COSTS, published_table


@block
def conditions(*files: str) -> str:
    """Return the conditions under which the records were measured, as sentences."""
    return "\n\n".join(records.conditions(file) for file in files)


@block
def rotary_tokens() -> str:
    """Show the accuracy of a network with rotary embeddings for each choice of the embedding of new tokens."""
    data = records.load("rotary_tokens")
    plain, *others = data["rows"]
    rows = [[row["method"], row["embedding"], f"{100 * row['accuracy']:.1f}"] for row in others]
    return (
        "The network is a vision transformer with 6 blocks, 64 patch tokens and the rotary embeddings of DINOv3. It was"
        " trained on 10,000 images of CIFAR-10. Without token reduction, its accuracy on"
        f" {data['images']:,} test images is {100 * plain['accuracy']:.1f} %. In the table, token reduction is applied"
        " after training:\n\n"
        f"{table(['method', 'embedding of a merged or fused token', 'accuracy, %'], rows, left=2)}\n\n"
        "Record: `benchmarks/rotary_tokens.json`."
    )


# ---------------------------------------------------------------------------------------------- projectors and speed
_PROJECTORS = {
    "WHT reflect": "WHT `reflect` (published)",
    "WHT zero": "WHT `zero`",
    "WHT ortho": "WHT `ortho`",
    "LHE": "LHE (`ortho`)",
    "DCT": "DCT",
}


def _projector(state: str, grid: int, method: str, order: int) -> dict:
    """Return the recorded result of one projector."""
    wanted = (state, [grid, grid], method, order)
    of = records.load("projectors")["results"]
    return next(r for r in of if (r["state"], r["grid"], r["method"], r["order"]) == wanted)


def _mean(result: dict, what: str = "error", layer: str = "network") -> str:
    """Return the relative error or the cosine of a gradient as the mean over the batches."""
    return f"{result['batch'][layer][what]['mean']:.3f}"


BLOCKS["projectors"] = lambda: _projectors("trained")
BLOCKS["projectors-finetuning"] = lambda: _projectors("start", "middle", "end")


def _projectors(*states: str) -> str:
    """Return a table of relative errors by projector.

    With one state of the network, cells also contain the cosine. With several states, slashes separate the errors.
    """
    rows = []
    for grid in (7, 8, 14):
        for order in (4, 6):
            by_state = []
            for state in states:
                of = [_projector(state, grid, name, order) for name in _PROJECTORS]
                best = min(map(_mean, of))
                texts = [f"**{_mean(r)}**" if _mean(r) == best else _mean(r) for r in of]
                if len(states) == 1:
                    texts = [f"{text} ({_mean(r, 'cosine')})" for text, r in zip(texts, of, strict=True)]
                by_state.append(texts)
            cost = [f"{of[-1]['backward_mflops']:.0f} ({of[-1]['exact_mflops']:.0f})"] if len(states) == 1 else []
            rows.append([f"{grid}×{grid}, order {order}", *cost, *map(" / ".join, zip(*by_state, strict=True))])
    cost = ["backward MFLOPs (exact)"] if len(states) == 1 else []
    return table(["grid, order", *cost, *_PROJECTORS.values()], rows)


@block
def projectors_layers() -> str:
    """Show the relative error for each kind of layer in the trained network with 7×7 tokens at order 4."""
    of = [_projector("trained", 7, name, 4) for name in _PROJECTORS]
    rows = [[layer, *(_mean(r, layer=layer) for r in of)] for layer in ("qkv", "proj", "fc1", "fc2")]
    return table(["layer", *_PROJECTORS.values()], rows)


@block
def low_rank_layer() -> str:
    """Show the time of the backward pass of one linear layer, and the published speedups."""
    speedups = {
        (row.columns["c_x"], row.columns["c_y"], f"order {row.columns['order']}"): row.costs.get("speedup_cpu", "")
        for row in published_table("lbp_wht/5").rows
    }
    rows = []
    for shape, orders in records.load("layer")["shapes"].items():
        exact = orders["exact"]["measured"]["backward"]
        cells = [shape.replace(",", " → ", 1).replace(",", ", "), duration(exact["median"])]
        for order in ("order 2", "order 4", "order 6"):
            measured = orders[order]["measured"]["backward"]
            faster = f"{measured['times_faster']['median']:.1f}"
            printed = speedups.get((*shape.split(",")[:2], order), "–") if "bf16" not in shape else "–"
            cells += [duration(measured["median"]), faster, printed]
        rows.append(cells)
    parts = [f"LP-{order}{what}" for order in (2, 4, 6) for what in ("", ", times faster", ", paper's times faster")]
    return table(["layer (channels, grid)", "exact", *parts], rows)


# ---------------------------------------------------------------------------------------------- published
@block
def published_rule(name: str) -> str:
    """Show the published costs of a table next to our counts by the rule of the paper."""
    of = next(t for t in records.load("published")["tables"] if t["table"] == name)
    rows, unit = of["rows"], of["unit"]
    columns = [
        ("published", f"published {unit}", "g"),
        ("memory", f"our {unit}", ".1f"),
        ("as_listed", f"our {unit} (listed blocks only)", ".1f"),
        ("published_gmacs", "published GMACs", "g"),
        ("gmacs", "our GMACs", ".1f"),
    ]
    columns = [c for c in columns if any(row[c[0]] is not None for row in rows)]
    cells = []
    for row in rows:
        numbers = ["" if row[key] is None else format(row[key], form) for key, _, form in columns]
        cells.append([f"`{row['row']}`", *numbers, row["note"]])
    head = ["row", *(name for _, name, _ in columns), "note"]
    noted = any(row[-1] for row in cells)
    if not noted:
        cells, head = [row[:-1] for row in cells], head[:-1]
    return f"**`{name}`: {of['title']}** ({of['conditions']})\n\n{table(head, cells, text_last=noted)}"


@block
def table_costs() -> str:
    """Show how many of the published costs in each column agree with our counts. Ratios of 1 are not counted."""
    cells = records.load("costs")["cells"]
    rows = []
    for column, name in COSTS.items():
        of = [c for c in cells if c["column"] == column and not (name.startswith("times") and c["printed"] == 1)]
        if not of:
            continue
        ruled, counted = ([cell for cell in of if cell["by"] == by] for by in ("rule", "executed"))
        shares = [f"{sum(c['agrees'] for c in group)} of {len(group)}" if group else "" for group in (ruled, counted)]
        tables = dict.fromkeys(f"`{cell['table']}`" for cell in of)
        rows.append([name, ", ".join(tables), *shares, str(len(of) - len(ruled) - len(counted))])
    return table(["reported cost", "tables", "by rule", "executed", "measured, or not derived"], rows, left=2)


@block
def printed_accuracies(name: str, group: str = "") -> str:
    """Show a table of published accuracies in the same format as ``efficient-ft table``."""
    rows = ",".join(row.name for row in published_table(name).rows if row.name.startswith(group))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        table_command.main([name, "--rows", rows, "--form", "markdown", "--columns", "accuracy"])
    shown = out.getvalue().replace("\n", "; ", 1).replace(":\n- ", ":\n\n- ")
    return (
        f"{shown}\nThese accuracies are copied from the paper and were not measured in this project. To print the"
        f" complete table, run `efficient-ft table {name}`."
    )


# ---------------------------------------------------------------------------------------------- methods
@block
def methods(page: Path) -> str:
    """Show every method with its axis and the first paragraph of its card."""
    rows = []
    for card in cards.all_cards():
        options = ", ".join(f"`{option}`" for option in card.options if option != card.name)
        link = f"[`{card.name}`]({cards.link(card, page)})"
        rows.append([f"{link} ({options})" if options else link, card.axes, card.summary])
    return table(["method", "axis", "description"], rows, left=3)


@block
def header(method: str) -> str:
    """Return the axes, options and class of a method as sentences."""
    of = cards.card(method)
    options = ", ".join(f"`method={option}`" for option in of.options)
    return f"Axis: {of.axes}. Options: {options}. Class: `efficient_ft.methods.{METHODS[method].__name__}`."


# ---------------------------------------------------------------------------------------------- configuration
def comment(file: Path) -> str:
    """Return the comment at the top of a file, without the package directive."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            lines.append(line.lstrip("# ").strip())
    return " ".join(lines)


@block
def options(group: str) -> str:
    """Show the options of a configuration group with the comments at the top of their files."""
    rows = [[f"`{file.stem}`", comment(file)] for file in sorted((cards.CONF / group).glob("*.yaml"))]
    return table([group, "description"], rows, left=2)


@block
def augment_presets() -> str:
    """Show the settings of each preset of ``data.augment.name``."""
    names = list(dict.fromkeys(name for preset in PRESETS.values() for name in preset))
    rows = [[f"`{preset}`", *(str(own.get(name, "–")) for name in names)] for preset, own in PRESETS.items()]
    return table(["`data.augment.name`", *(f"`{name}`" for name in names)], rows)


@block
def recipes() -> str:
    """Show the recipes by paper and network. Data sets with the same settings share a table row."""
    found: dict[tuple[str, str], list[str]] = {}
    for file in sorted((cards.CONF / "recipe").glob("*/*.yaml")):
        about = comment(file)
        # The text begins after the name of the data set, and ends before the sentences about splits.
        about = about[about.index(" with " if " with " in about else " as ") + 1 :]
        found.setdefault((file.parent.name, about.split(" All training images are used")[0]), []).append(file.stem)
    rows = [[f"`{folder}`", ", ".join(f"`{name}`" for name in data), text] for (folder, text), data in found.items()]
    return table(["folder", "data sets", "settings"], rows, left=3)


# ---------------------------------------------------------------------------------------------- promises
@block
def promises() -> str:
    """Show each promise, its trials, and the last results of the trials in both forms."""
    from tests.promises.promises import PROMISES

    last = {form: records.load(f"selftest_{form}")["promises"] for form in ("short", "long")}
    parts = []
    for promise in PROMISES:
        parts.append(f"## {promise.number}. {promise.title}\n\n{promise.text}\n\nTrials: {promise.tried}")
        if promise.not_covered:
            parts.append(f"Limitations: {promise.not_covered}")
        lines = [_result(form, held.get(str(promise.number))) for form, held in last.items()]
        parts.append("\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts)


def _result(form: str, held: dict[str, Any] | None) -> str:
    """Return one line about the last run of the short or long form."""
    if held is None:
        return f"The {form} form has not been run yet."
    here, passed = held["environment"], held["trials"] - len(held["failed"])
    outcome = f"{passed} of {held['trials']} trials passed. The trials took {held['seconds']:.0f} s."
    failed = f" Failed: {'; '.join(one['name'] for one in held['failed'])}." if held["failed"] else ""
    return f"Last {form} run ({str(here['date'])[:10]}, {here['device']}, torch {here['torch']}): {outcome}{failed}"
