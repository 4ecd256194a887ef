"""Files with one JSON object per line. Training appends rows, and a resumed run removes rows after its checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from efficient_ft.core.parsing import parse_json
from efficient_ft.core.text import csv_text
from efficient_ft.record.files import json_text, open_file, write_text_atomically


class Rows:
    """A file with one JSON object (row) per line. The key ``step`` contains the optimizer step of the row."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        """Return all complete rows, or [] if the file does not exist.

        A row is an object with an integer ``step``. Reading stops at the first line that is not a row, for example a
        line that a killed process wrote only partially. Numbers that are not finite are omitted.
        """
        return self._complete()

    def _complete(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        if self.path.is_file():
            for line in self.path.read_bytes().splitlines():
                try:
                    row = parse_json(line.decode("utf-8"))
                except ValueError:  # the line is not valid UTF-8 or JSON
                    break
                if not isinstance(row, dict) or not isinstance(row.get("step"), int) or not _is_finite(row["step"]):
                    break
                rows.append(_finite(row))
        return rows

    def rewind(self, step: int) -> None:
        """Remove the rows after optimizer step `step`. A resumed run continues after this step."""
        kept = [row for row in self._complete() if row["step"] <= step]
        write_text_atomically(self.path, "".join(json_text(row) + "\n" for row in kept))

    def append(self, row: dict[str, Any]) -> None:
        """Append `row` to the file. Numbers that are not finite are omitted."""
        with open_file(self.path, "a") as file:
            file.write(json_text(_finite(row)) + "\n")


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not isinstance(value, int | float) or _is_finite(value)}


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that is larger than every float
        return False


class MetricsFile(Rows):
    """The file ``metrics.jsonl``. The table ``metrics.csv`` contains the same rows.

    The row of a logged step has the keys ``step``, ``epoch``, ``train_loss`` and ``lr``. The row of an epoch has the
    keys ``step``, ``epoch``, ``train_loss_epoch``, ``<split>_accuracy`` and ``<split>_loss``. With several tasks, the
    row of an epoch also has ``<split>_accuracy_<task>`` and ``<split>_loss_<task>``. Every row also contains the totals
    since the start of training (`record.results.RunTotals`): ``images``, ``flops``, ``seconds`` and, if the machine
    measures energy, ``joules``. ``memory_bytes`` is the memory in use when the row is written: the resident memory of
    the first process, or the memory that PyTorch has reserved on its CUDA device.
    """

    def __init__(self, run: Path) -> None:
        super().__init__(run / "metrics.jsonl")

    def read(self) -> list[dict[str, Any]]:
        """Return all complete rows (see `Rows.read`). Values that are not numbers are omitted."""
        rows = super().read()
        return [{key: value for key, value in row.items() if isinstance(value, int | float)} for row in rows]

    def write_csv(self) -> None:
        """Write all rows to metrics.csv, with one column per key."""
        rows = self.read()
        names = list(dict.fromkeys(name for row in rows for name in row))
        text = csv_text([names, *([row.get(name) for name in names] for row in rows)])
        write_text_atomically(self.path.with_suffix(".csv"), text)
