"""Count entries of the records in benchmarks/ again, and list the entries whose counts have changed.

    python scripts/recount.py [--sample N] [FILE ...]

FLOPs and bytes are counted from operations on fake tensors, so the counts of a commit are the same on every machine.
Continuous integration counts a random sample of the records that tests/test_scripts.py lists. If an entry has changed,
repeat the command of the record, which the record contains. Entries of records from a GPU can differ on a machine
without a GPU, because the attention kernels differ.
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

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


class Entry(NamedTuple):
    """Name and counts of one entry of a record, and a function that counts the entry again."""

    name: str
    recorded: Any
    count: Callable[[], Any]


def entries(record: dict[str, Any]) -> list[Entry]:
    """Return the entries of a record, or an empty list for a record whose counts need weights or data."""
    kinds: dict[str | None, Callable[[dict[str, Any]], Iterator[Entry]]] = {
        "step": _of_step,
        "counted": _of_counted if "models" in record else _of_adapters,
        "printed costs": _of_costs,
        "published rule": _of_published,
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

        yield Entry(recipe.name, _counts(of), count)


def _counts(of: dict[str, Any]) -> dict[str, Any]:
    return {"trainable_parameters": of["trainable_parameters"], **of["executed"]}


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


def _row(count: Callable[[Any, Any], Any], table: str, name: str) -> Any:
    of = published_table(table)
    (row,) = (one for one in of.rows if one.name == name)
    return count(of, row)


def changed(file: Path, sample: int | None, chance: random.Random) -> list[str]:
    """Count a random sample of the entries of a record (None: all), and return a line for each entry that differs."""
    of = entries(json.loads(file.read_text(encoding="utf-8")))
    chosen = of if sample is None else chance.sample(of, min(sample, len(of)))
    lines = []
    for entry in chosen:
        found = json.loads(json.dumps(entry.count()))  # tuples become lists, as in the record
        if found != entry.recorded:
            lines.append(f"{file.name}: {entry.name}: recorded {entry.recorded}, counted {found}")
    return lines


def main() -> int:
    """Return the exit status: 1 if an entry differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="records (default: all in benchmarks/)")
    parser.add_argument("--sample", type=int, metavar="N", help="number of random entries per record (default: all)")
    options = parser.parse_args()
    register()
    lines = []
    for file in options.files or sorted(BENCHMARKS.glob("*.json")):
        lines += changed(file, options.sample, random.Random())
        print(f"counted: {file.name}", flush=True)
    print("\n".join(lines))
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
