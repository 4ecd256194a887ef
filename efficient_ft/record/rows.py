"""Files of one JSON object per line, appended to during training and truncated on resume."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

from efficient_ft.core.parsing import parse_json
from efficient_ft.core.text import csv_cell
from efficient_ft.record.files import json_text, open_file, write_text_atomically


class Rows:
    """A file of one JSON object per line; each has the optimizer step it belongs to under ``step``.

    Args:
        path: the file; created by the first `append`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        """All rows up to the first that is incomplete (a killed process leaves one) or no row; [] if there is no file.

        A row is an object whose ``step`` is an integer. Numbers that are not finite are left out of it.
        """
        rows: list[dict[str, Any]] = []
        if self.path.is_file():
            for line in self.path.read_bytes().splitlines():
                try:
                    row = parse_json(line.decode("utf-8"))
                except ValueError:  # not UTF-8, or not JSON
                    break
                if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                    break
                rows.append({k: v for k, v in row.items() if not isinstance(v, float) or math.isfinite(v)})
        return rows

    def rewind(self, step: int) -> None:
        """Truncate on resume: drop the rows written after optimizer step `step` of the checkpoint."""
        kept = [row for row in self.read() if row["step"] <= step]
        write_text_atomically(self.path, "".join(json_text(row) + "\n" for row in kept))

    def append(self, row: dict[str, Any]) -> None:
        """Write `row` as the last line, without numbers that are not finite."""
        finite = {k: v for k, v in row.items() if not isinstance(v, float) or math.isfinite(v)}
        with open_file(self.path, "a") as file:
            file.write(json_text(finite) + "\n")


class MetricsFile(Rows):
    """``metrics.jsonl``, the source of truth; ``metrics.csv``, the same as a table.

    A row per logged step has ``step``, ``epoch``, ``train_loss`` and ``lr``; a row per epoch ``step``, ``epoch``,
    ``train_loss_epoch``, ``<split>_accuracy`` and ``<split>_loss`` (with several tasks also ``<split>_accuracy_<task>``
    and ``<split>_loss_<task>``). Each has ``images``, ``flops``, ``seconds`` and, where the machine tells it,
    ``joules`` of training so far (`record.results.RunTotals`).

    Args:
        run: the run folder.
    """

    def __init__(self, run: Path) -> None:
        super().__init__(run / "metrics.jsonl")

    def write_csv(self) -> None:
        """Write all rows to metrics.csv, a column per key."""
        rows = self.read()
        names = list(dict.fromkeys(name for row in rows for name in row))
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(map(csv_cell, names))
        for row in rows:
            values = (row.get(name, "") for name in names)
            writer.writerow(csv_cell(value) if isinstance(value, str) else value for value in values)
        write_text_atomically(self.path.with_suffix(".csv"), text.getvalue())
