"""Table of a study, with the accuracy of each row over the seeds and the cost of each row."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from efficient_ft.core.sheet import Cell
from efficient_ft.core.text import spelled
from efficient_ft.record.collection import in_plain_numbers
from efficient_ft.record.study import Records, shown, test_accuracy
from efficient_ft.report.paired import paired_difference

#: Marker for a best value at the edge of the grid. In this case, a better value may exist outside the grid.
AT_END = "*"


#: Dict from prefixes of column names to number formats in Markdown.
_FORMATS = {"TFLOPs": ".2f", "times fewer FLOPs": ".2f", "saved KiB": ".0f", "times fewer bytes": ".1f",
            "peak MiB": ".0f", "process MiB": ".0f", "seconds": ".0f"}  # fmt: skip


def study_cells(records: Records, rows: Sequence[str]) -> tuple[list[str], list[list[Cell]]]:
    """Return the header of the table and a line for each tuned row in `rows`.

    Ratios are relative to the row ``full``, or to the first row if ``full`` does not exist. The accuracy (or the metric
    of the task) is given in percent as the mean over the seeds, with the minimum and maximum. Costs refer to one run.
    The table has a column for process memory only if process memory was recorded for all rows. The table has a column
    for the paired difference from the same row (`paired_difference`) only if the correct test images were recorded.
    """
    found = {row: runs for row in rows if (runs := records.finished(row))}
    all_of_base = records.finished("full") if "full" in records.study.rows else []
    all_of_base = all_of_base or next(iter(found.values()), [])
    base = all_of_base[0] if all_of_base else None
    values = records.study.tune.values
    ends = (values[0], values[-1]) if len(values) > 1 else ()
    metric = spelled("accuracy" if base is None else base["accuracy"].get("metric", "accuracy"))
    plain = base is not None and in_plain_numbers(base)
    header = ["row", records.study.tune.setting, f"test {metric}{'' if plain else ', %'}", "seeds", "TFLOPs",
              "times fewer FLOPs", f"saved KiB / {records.study.sample}", "times fewer bytes", "peak MiB",
              "seconds"]  # fmt: skip
    with_memory = all("growth_bytes" in runs[0] for runs in found.values()) and bool(found)
    lines = [_line(row, runs, base, ends, with_memory) for row, runs in found.items() if base is not None]
    if with_memory:
        header.insert(-1, "process MiB")
    others = {row: runs for row, runs in found.items() if base is not None and row != base["row"]}
    differences = {row: paired_difference(runs, all_of_base) for row, runs in others.items()}
    if base is not None and any(differences.values()):
        header.insert(3, f"points relative to {base['row']} [95 %]")
        for line in lines:
            difference = differences.get(str(line[0]))
            line.insert(3, None if difference is None else str(difference))
    return header, lines


def study_table(records: Records, rows: Sequence[str]) -> list[list[str]]:
    """Return the header and the lines of `study_cells`, formatted as text for Markdown."""
    header, lines = study_cells(records, rows)
    formats = [next((f for start, f in _FORMATS.items() if name.startswith(start)), "") for name in header]
    return [
        header,
        *(["–" if c is None else format(c, f) for c, f in zip(line, formats, strict=True)] for line in lines),
    ]


def _line(
    row: str, runs: Sequence[dict[str, Any]], base: dict[str, Any], ends: Sequence[float], with_memory: bool
) -> list[Cell]:
    first = runs[0]
    flops, saved = first["totals"]["flops"], first["executed"]["saved_bytes"]
    return [
        row,
        shown(first["value"]) + (AT_END if first["value"] in ends else ""),
        spread([test_accuracy(one) / 100 for one in runs], 4)
        if in_plain_numbers(first)
        else spread([test_accuracy(one) for one in runs]),
        len(runs),
        flops / 1e12,
        base["totals"]["flops"] / flops,
        saved / 1024,
        base["executed"]["saved_bytes"] / saved if saved else None,
        first["measured"]["peak_bytes"] / 2**20,
        *([statistics.median(one["growth_bytes"] for one in runs) / 2**20] if with_memory else []),
        statistics.median(one["totals"]["seconds"] for one in runs),
    ]


def spread(values: Sequence[float], decimals: int = 2) -> str:
    """Format the mean of several values with their minimum and maximum, or a single value alone."""
    mean = f"{statistics.fmean(values):.{decimals}f}"
    return mean if len(values) == 1 else f"{mean} [{min(values):.{decimals}f}…{max(values):.{decimals}f}]"


def notes(records: Records, rows: Sequence[str]) -> list[str]:
    """Return notes on marks in the table, on rows that diverged or are not tuned yet, and on missing seeds."""
    said = []
    if any(AT_END in str(line[1]) for line in study_cells(records, rows)[1]):
        said.append(f"{AT_END} marks a best value at an end of the grid.")
    if alike := records.of_the_search_alone():
        ignored = ", ".join(records.study.tune.ignore)
        said.append(f"The search also uses runs with a different {ignored} (number of runs: {alike}).")
    if other := records.of_other_settings():
        said.append(f"Runs with earlier settings of the study are not used (number of runs: {other}).")
    tune, seeds = records.study.tune, records.study.seeds
    if len(tune.values) > 1 and tune.seed in seeds:
        said.append(f"The runs with seed {tune.seed} were also used to select {tune.setting}.")
    waiting = [row for row in rows if records.tuning_runs([row])]
    if waiting:
        said.append(f"These rows have not been tuned yet: {', '.join(waiting)}.")
    diverged = [row for row in rows if row not in waiting and records.best_value(row) is None]
    if diverged:
        said.append(f"These rows diverged at every value: {', '.join(diverged)}.")
    for row in rows:
        best, runs = records.best_value(row), records.seed_runs([row])
        lost = [run.seed for run in runs if run.value == best and "diverged" in (records.find(run) or {})]
        if lost:
            said.append(f"The row {row} diverged at its best value with seed {', '.join(map(str, lost))}.")
    for row in rows:
        if len(values := records.finalists(row)) > 1:
            done = "is" if all(map(records.find, records.seed_runs([row]))) else "will be"
            listed = " and ".join(map(shown, values))
            said.append(f"The value of {row} {done} selected from {listed} by the mean accuracy over all seeds.")
    fewer = [row for row in rows if row not in (*waiting, *diverged) and len(records.finished(row)) < len(seeds)]
    if fewer:
        said.append(f"These rows have results for fewer than {len(seeds)} seeds: {', '.join(fewer)}.")
    return said
