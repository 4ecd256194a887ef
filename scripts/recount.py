"""Count entries of the records in benchmarks/ and results/ again, and list the entries whose counts have changed.

    python scripts/recount.py [--sample N] [--write] [FILE ...]

FLOPs and bytes are counted from operations on fake tensors, so the counts of a commit are the same on every machine.
Continuous integration counts a random sample of the records that tests/test_scripts.py lists. If an entry has changed,
repeat the command of the record, which the record contains. For a record of `efficient-ft bench step`, --write replaces
only the counts, and adds the commit of the counts to the record. Measured values do not change. Entries of records from
a GPU can differ on a machine without a GPU, because the attention kernels differ.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import recording

from efficient_ft.cli.commands import bench
from efficient_ft.cli.hydra.groups import CONF, register
from efficient_ft.papers.published import published_table
from efficient_ft.record.environment import commit
from efficient_ft.record.files import json_text

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
#: Number of classes of the data sets of studies. One word of the name of a study's folder names the data set.
CLASSES = {"caltech101": 101, "camvid": 11, "cars49": 49, "cifar10": 10, "digits": 10, "flowers102": 102}


class Entry(NamedTuple):
    """Name and counts of one entry of a record, and functions that count the entry again and store new counts."""

    name: str
    recorded: Any
    count: Callable[[], Any]
    store: Callable[[Any], None] | None = None


def entries(record: dict[str, Any]) -> list[Entry]:
    """Return the entries of a record, or an empty list for a record whose counts need weights or data."""
    kinds: dict[str | None, Callable[[dict[str, Any]], Iterator[Entry]]] = {
        "step": _of_step,
        "counted": _of_counted if "models" in record else _of_adapters,
        "printed costs": _of_costs,
        "published rule": _of_published,
        "backbones": _of_backbones,
    }
    of_kind = kinds.get(record.get("kind"))
    return [] if of_kind is None else list(of_kind(record))


def _of_step(record: dict[str, Any]) -> Iterator[Entry]:
    from efficient_ft.bench.recipes import in_both_precisions, parse_recipes
    from efficient_ft.bench.step import count_step

    _, *arguments = shlex.split(record["command"].removeprefix("efficient-ft "))
    options = bench.parser().parse_args(arguments)
    recipes = parse_recipes(options.recipes, CONF)
    recipes = in_both_precisions(recipes) if options.dtype == bench.BOTH else recipes
    network = bench.network_of(options)
    for recipe in recipes:
        of = record["recipes"].get(recipe.name)
        if of is None:
            continue

        def count(overrides: tuple[str, ...] = recipe.overrides) -> Any:
            config = bench.configure(network.model, [*network.overrides, *overrides])
            return _counts(count_step(config, network))

        yield Entry(recipe.name, _counts(of), count, partial(_store, of))


def _counts(of: dict[str, Any]) -> dict[str, Any]:
    return {"trainable_parameters": of["trainable_parameters"], **of["executed"]}


def _store(of: dict[str, Any], counts: dict[str, Any]) -> None:
    if of.get("peak_bytes") == of["executed"]["peak_bytes"]:  # The peak was counted, not measured.
        of["peak_bytes"] = counts["peak_bytes"]
    of["trainable_parameters"] = counts["trainable_parameters"]
    of["executed"] = {key: value for key, value in counts.items() if key != "trainable_parameters"}


def study_entries(folder: Path) -> list[Entry]:
    """Return an entry for each finished row of a study, except rows whose counts depend on weights or on training."""
    from efficient_ft.record.study import Records

    of = Records(folder)
    if of.study.sample == "text":  # The configuration of the text model is in the folder of its weights.
        return []
    (classes,) = (CLASSES[word] for word in folder.name.split("_") if word in CLASSES)
    entries = []
    for row in of.study.rows:
        for run in of.finished(row)[:1]:
            arguments = tuple(run["settings"])
            if any("alast" in one for one in arguments if one.startswith("method")):
                continue  # The budgets after training determine the counts.
            entries.append(Entry(row, run["executed"], partial(_count_run, arguments, classes, tuple(run["executed"]))))
    return entries


def _count_run(arguments: tuple[str, ...], classes: int, keys: tuple[str, ...]) -> dict[str, Any]:
    import torch

    from efficient_ft.cli.hydra.compose import configured
    from efficient_ft.cli.hydra.rows import merged
    from efficient_ft.methods.build import build_methods
    from efficient_ft.training.costs import cost_report
    from efficient_ft.training.kinds.registry import kind_of

    config = configured(merged(*arguments, "data.root=none", "model.pretrained=false"))
    network = kind_of(config).random_network(config.model, classes)
    counted = cost_report(config, network, build_methods(config), classes, torch.device("cpu"))["executed"]
    return {key: counted[key] for key in keys}  # type: ignore[literal-required]


def _of_counted(record: dict[str, Any]) -> Iterator[Entry]:
    for model, of in record["models"].items():
        for name, recipe in of["recipes"].items():
            again = partial(recording.count_recipe, model, of["batch"], recipe["arguments"])
            yield Entry(f"{model} {name}", recipe, again)


def _of_adapters(record: dict[str, Any]) -> Iterator[Entry]:
    for name, row in record["recipes"].items():
        yield Entry(name, row, partial(recording.count_adapters, name))


def _of_costs(record: dict[str, Any]) -> Iterator[Entry]:
    recorded: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for cell in record["cells"]:
        recorded.setdefault((cell["table"], cell["row"]), []).append(cell)
    for (name, row), cells in recorded.items():
        yield Entry(f"{name} {row}", cells, partial(_row, recording.count_cells, name, row))


def _of_published(record: dict[str, Any]) -> Iterator[Entry]:
    for table in record["tables"]:
        for of in table["rows"]:
            name, row = table["table"], of["row"]
            yield Entry(f"{name} {row}", of, partial(_row, recording.count_by_rule, name, row))


def _of_backbones(record: dict[str, Any]) -> Iterator[Entry]:
    import backbones

    for name, entry in record["networks"].items():
        for recipe, counts in entry["recipes"].items():
            count = partial(backbones.count, record["list"], name, recipe)
            yield Entry(f"{name} {recipe}", counts, count, partial(entry["recipes"].__setitem__, recipe))


def _row(count: Callable[[Any, Any], Any], table: str, name: str) -> Any:
    of = published_table(table)
    (row,) = (one for one in of.rows if one.name == name)
    return count(of, row)


def changed(file: Path, sample: int | None, chance: random.Random, write: bool = False) -> list[str]:
    """Count a random sample of the entries of a record (None: all), and return a line for each entry that differs.

    If `file` is named records.json, it is the record of a study. If `write` is True, new counts are written to `file`.
    """
    record = json.loads(file.read_text(encoding="utf-8"))
    of_study = file.name == "records.json"
    of = study_entries(file.parent) if of_study else entries(record)
    chosen = of if sample is None else chance.sample(of, min(sample, len(of)))
    lines, stored = [], False
    for entry in chosen:
        found = json.loads(json.dumps(entry.count()))  # tuples become lists, as in the record
        if found != entry.recorded:
            name = f"{file.parent.name}/{file.name}" if of_study else file.name
            lines.append(f"{name}: {entry.name}: {_difference(entry.recorded, found)}")
            if write and entry.store is not None:
                entry.store(found)
                stored = True
    if stored:
        record["counted"] = {"commit": commit(), "command": "python scripts/recount.py --write"}
        file.write_text(json_text(record, indent=2) + "\n", encoding="utf-8")
    return lines


def _difference(recorded: Any, found: Any) -> str:
    if isinstance(recorded, dict) and isinstance(found, dict):
        keys = [key for key in {**recorded, **found} if recorded.get(key) != found.get(key)]
        recorded, found = ({key: of.get(key) for key in keys} for of in (recorded, found))
    return f"recorded {recorded}, counted {found}"


def main() -> int:
    """Return the exit status: 1 if an entry differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="records (default: all)")
    parser.add_argument("--write", action="store_true", help="replace the counts in records of bench step")
    parser.add_argument("--sample", type=int, metavar="N", help="number of random entries per record (default: all)")
    options = parser.parse_args()
    register()
    found = False
    for file in options.files or [*sorted(BENCHMARKS.glob("*.json")), *sorted(ROOT.glob("results/*/records.json"))]:
        lines = changed(file, options.sample, random.Random(), options.write)
        print("\n".join([f"counted: {file.resolve().relative_to(ROOT)}", *lines]), flush=True)
        found = found or bool(lines)
    return found


if __name__ == "__main__":
    sys.exit(main())
