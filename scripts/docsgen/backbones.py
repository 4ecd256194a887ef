"""Tables of the networks in ``scripts/backbones.yaml``: supported methods, costs, and reasons for rejections."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from docsgen import records
from docsgen.markdown import block, table
from efficient_ft.core.format import format_ratio

#: The recipes of each table of costs. `full` is the baseline.
GROUPS: dict[str, tuple[str, ...]] = {
    "selections": ("last_stage", "blocks", "head", "bitfit", "norm_last", "uniform_layers", "lisa"),
    "adapters": ("lora", "lora_all", "lora_fa", "tinytl", "repnet", "moe"),
    "backprop": ("last_stage+lbp_wht", "lbp_wht", "lbp_dct", "swat"),
    "memory": ("back_razor", "mesa", "low_bit", "compact", "checkpointing"),
    "tokens": ("bsr", "alast", "evit", "tome", "patch_dropout"),
}


def _networks(file: str = "backbones") -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the library, the name and the record of each network."""
    for name, entry in records.load(file)["networks"].items():
        library, _, short = name.partition(" ")
        yield library, short, entry


@block
def backbones() -> str:
    """Show the number of supported recipes and the unsupported recipes of each network."""
    rows = []
    for library, name, entry in _networks():
        rejected = [f"`{recipe}`" for recipe, cost in entry["recipes"].items() if "reason" in cost]
        count = len(entry["recipes"])
        size = "×".join(map(str, dict.fromkeys(entry["size"])))
        rows.append([f"`{name}`", library, size, f"{count - len(rejected)} of {count}", ", ".join(rejected)])
    return table(["network", "library", "px", "supported", "not supported"], rows, left=2, text_last=True)


@block
def backbone_costs(group: str) -> str:
    """Show the saved bytes and the FLOPs of a group of recipes relative to full fine-tuning."""
    names = GROUPS[group]
    rows = []
    for _, name, entry in _networks():
        full = entry["recipes"]["full"]
        cells = [_ratios(entry["recipes"][recipe], full) for recipe in names]
        rows.append([f"`{name}`", *cells])
    return table(["network", *(f"`{name}`" for name in names)], rows)


def _ratios(cost: dict[str, Any], full: dict[str, Any]) -> str:
    if "reason" in cost or "reason" in full:
        return "–"
    return f"{cost['saved_bytes'] / full['saved_bytes']:.2f} / {_flops(cost) / _flops(full):.2f}"


def _flops(cost: dict[str, Any]) -> float:
    total: float = cost["forward_flops"] + cost["backward_flops"]
    return total


@block
def backbone_reasons() -> str:
    """List the reasons for all rejections. Each item contains the networks that have this reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for _, name, entry in _networks():
        for recipe, cost in entry["recipes"].items():
            if "reason" in cost:
                found.setdefault((recipe, _general(cost["reason"], entry["name"])), []).append(f"`{name}`")
    parts = []
    for recipe in dict.fromkeys(recipe for recipe, _ in found):
        items = [f"- {reason} ({', '.join(names)})" for (other, reason), names in found.items() if other == recipe]
        parts.append(f"**`{recipe}`**\n\n" + "\n".join(items))
    return "\n\n".join(parts)


def _general(reason: str, name: str) -> str:
    """Return a reason without the names of the method, the network, and the classes of its parts."""
    text = re.sub(r"^(method )?\w+: ", "", reason)
    text = re.sub(rf"\b(the model )?{name}\b(?!, [A-Z]|\))|\bthe model \w+(?= can be changed)", "the network", text)
    text = re.sub(r"\bthe block \S+ of the network", "a block of the network", text)
    text = re.sub(r" \(\w+\)(?=: attention|: the layers|: nn)|(?<=unsupported type) \(\w+\)", "", text)
    text = re.sub(r" ?The blocks of the network are [^.]*\.", "", text)
    return text[:1].upper() + text[1:]


@block
def rotary_steps() -> str:
    """Show the FLOPs and the time of a step relative to full fine-tuning, with and without rotary embeddings."""
    files = ("tokens_plain", "tokens_rotary")
    rows = []
    for recipe in records.load(files[0])["recipes"]:
        if recipe == "full":
            continue
        counts = [[records.recipe(file, name)["executed"] for name in (recipe, "full")] for file in files]
        flops = [format_ratio(_flops(own) / _flops(full)) for own, full in counts]
        rows.append([f"`{recipe}`", *flops, *(format_ratio(records.time(file, recipe)) for file in files)])
    head = ["recipe", "FLOPs, plain", "FLOPs, rotary", "time, plain", "time, rotary"]
    return table(head, rows)


@block
def encoders() -> str:
    """Show the costs of large encoders by recipe, with one table per network."""
    record = records.load("encoders")
    batch, parts = record["batch"], []
    for _, name, entry in _networks("encoders"):
        full, rows, reasons = entry["recipes"]["full"], [], []
        for recipe, cost in entry["recipes"].items():
            if "reason" in cost:
                reasons.append(f"`{recipe}` is not supported: {_general(cost['reason'], entry['name'])}")
                continue
            peak = cost["peak_bytes"] + cost["optimizer_bytes"]
            rows.append([
                f"`{recipe}`",
                f"{cost['saved_bytes'] / records.MIB:.1f}",
                f"{cost['optimizer_bytes'] / 2**30:.2f}",
                f"{peak / 2**30:.1f}",
                format_ratio(_flops(cost) / _flops(full)),
            ])  # fmt: skip
        head = ["recipe", "saved MiB / image", "AdamW state, GiB", f"peak of a step with {batch} images, GiB", "FLOPs"]
        parts += [f"### {name}, {entry['size'][0]} px", table(head, rows), *reasons]
    return "\n\n".join(parts)
