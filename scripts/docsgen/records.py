"""Read benchmarks/*.json: the numbers of a recipe, ratios to the baseline of the same file, and conditions."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from docsgen import ROOT, markdown
from efficient_ft.record.environment import BUSY_LOAD as BUSY

MIB = 2**20

#: For each table, a dict from recipe names to labels.
LABELS: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("labels.yaml").read_text(encoding="utf-8"))

#: Dict from short names to the names of files in benchmarks/.
FILES = LABELS["files"]


def path(file: str) -> str:
    """Return the path of a record, relative to the repository."""
    return f"benchmarks/{FILES[file]}.json"


@cache
def load(file: str) -> Any:
    """Return the contents of a record."""
    return json.loads((ROOT / path(file)).read_text(encoding="utf-8"))


def recipe(file: str, name: str) -> Any:
    """Return one recipe of a record. In the record `counted`, the name is MODEL/RECIPE."""
    if file == "counted":
        model, _, name = name.partition("/")
        return load(file)["models"][model]["recipes"][name]
    return load(file)["recipes"][name]


def saved(file: str, name: str) -> float:
    """Return the memory that autograd stores for the backward pass, in MiB per image."""
    return recipe(file, name)["executed"]["saved_bytes"] / MIB


def adapters_saved(name: str, statistics: str) -> float:
    """Return the memory stored for a batch of ResNet-50 in MiB, with frozen or batch statistics of BatchNorm."""
    data = load("adapters")
    return data["recipes"][name][statistics]["saved_bytes"] * data["batch"] / MIB


def peak(file: str, name: str) -> float:
    """Return the peak memory of the batch in MiB, as reported by the allocator (GPU) or counted (CPU)."""
    of = recipe(file, name)
    return of.get("peak_bytes", of["executed"]["peak_bytes"]) / MIB


def growth(file: str, name: str) -> float:
    """Return by how many MiB the process of a recipe grows during its steps."""
    return recipe(file, name)["process"]["memory"]["growth_bytes"] / MIB


def above_interpreter(file: str, name: str) -> float:
    """Return the peak memory of the process of a recipe in MiB, without the interpreter and its libraries."""
    process = recipe(file, name)["process"]
    return (process["memory"]["peak_bytes"] - process["interpreter_bytes"]) / MIB


def seconds(file: str, name: str, part: str = "step") -> float:
    """Return the median time of a part of the step, in seconds."""
    return recipe(file, name)["measured"][part]["median"]


def rounds(file: str) -> int:
    """Return the number of timed rounds of a record."""
    data = load(file)
    if data["kind"] == "loop":
        return len(data["jobs"]["default"]["bare loop"]["seconds"])
    if data["kind"] == "layer":
        return len(next(iter(data["shapes"].values()))["exact"]["measured"]["backward"]["seconds"])
    rows = data["recipes"] if "recipes" in data else data["optimizers"]
    part = "both" if data["kind"] == "overhead" else "step"
    return len(next(iter(rows.values()))["measured"][part]["seconds"])


def in_bf16(file: str, name: str) -> str | None:
    """Return the name of the same recipe in bf16, or None if the record contains only one precision."""
    other = f"{name} bf16"
    return other if file != "counted" and other in load(file)["recipes"] else None


def time(file: str, name: str, part: str = "step", baseline: str | None = None) -> float:
    """Return the median ratio of the time to the time of the baseline in the same round. Values below 1 are faster.

    By default, the baseline has the same precision as the recipe.
    """
    of = load(file)["recipes"]
    base = of[baseline or of[name].get("baseline") or load(file)["baseline"]]["measured"][part]["seconds"]
    own = of[name]["measured"][part]["seconds"]
    return statistics.median([a / b for a, b in zip(own, base, strict=True)])


def faster(file: str, name: str, part: str = "step") -> float:
    """Return the median ratio of the time of the baseline to the time of the recipe."""
    return recipe(file, name)["measured"][part]["times_faster"]["median"]


def conditions(file: str) -> str:
    """Return the conditions of a measurement as sentences."""
    data, how = load(file), LABELS["how"].get(file)
    environment = data["environment"]
    device, torch = environment["device"], environment["torch"].partition("+")[0]
    on_cpu = "NVIDIA" not in device
    threads = f" with {environment['threads']} thread{'s' * (environment['threads'] != 1)}" if on_cpu else ""
    facts = [f"torch {torch}"]
    facts += [data["dtype"]] if "dtype" in data else []
    facts += [f"batch size {data['batch']}"] if "batch" in data else []
    text = (
        f"The values were measured on {environment['date'][:10]} on an {device}{threads},"
        f" using {markdown.listed(facts)}."
    )
    text += f" {how or f'Times are medians of {rounds(file)} rounds, and each round measures all variants in turn.'}"
    if " and " in data.get("dtype", ""):
        text += " Each ratio compares two recipes in the same precision."
    allocator = environment.get("allocator", "system")
    if on_cpu and allocator != "system":
        kept = allocator.startswith("keeping")
        text += " The allocator is glibc, which keeps freed memory." if kept else f" The allocator is {allocator}."
    if not how and environment.get("load", 0) > BUSY:
        text += (
            f" The load average of the machine was {environment['load']:.2f} at the start, which is above the limit"
            f" for idle machines ({BUSY}). The times are therefore less reliable than their ratios."
        )
    return f"{text} Record: `{path(file)}`."


def cosine(file: str, name: str) -> str:
    """Return the cosine between the gradient of all blocks and the exact gradient, as the mean over the batches."""
    return markdown.cosine(recipe(file, name)["cosine"]["blocks"]["mean"])


def command(arguments: Sequence[str]) -> str:
    """Return command-line arguments in a short form: the methods, and the settings without the method names."""
    methods, *settings = arguments
    short = [f"`{re.sub('^method.[a-z_]+.', '', setting)}`" for setting in settings]
    return ", ".join([f"`{methods.removeprefix('method=')}`", *short])
