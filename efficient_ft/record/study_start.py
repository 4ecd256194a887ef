"""The learning rates at which a study starts its search (``start: lr_test``), in lr_tests.json of the study."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from efficient_ft.core.errors import UserError
from efficient_ft.core.parsing import parse_json
from efficient_ft.record.files import json_text, write_text_atomically
from efficient_ft.record.formats import FORMAT, check_format

NAME = "lr_tests.json"


class SearchStarts:
    """The suggestions of learning rate range tests for the rows of the study in `folder`.

    A `UserError` is raised if the file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._tests = self._read()

    def _read(self) -> dict[str, dict[str, Any]]:
        if not self.path.is_file():
            return {}
        do = "Remove the file to run the tests again."
        try:
            held = parse_json(self.path.read_text(encoding="utf-8"))
            version, tests = held.get("format"), held.get("tests")
            if not isinstance(tests, Mapping) or not all(map(_is_test, tests.values())):
                raise ValueError("it does not contain the tests of a study")
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(f"The file {self.path} is damaged ({error}). {do}") from error
        check_format(self.path, version, do)
        return dict(tests)

    def has(self, row: str, settings: Sequence[str]) -> bool:
        """Return True if the row was tested with exactly these settings."""
        return row in self._tests and self._tests[row]["settings"] == list(settings)

    def index(self, row: str, settings: Sequence[str], values: Sequence[float]) -> int | None:
        """Return the index of the value that is closest to the suggestion for a row, or None without a suggestion."""
        lr = self._tests[row]["lr"] if self.has(row, settings) else None
        if lr is None:
            return None
        return min(range(len(values)), key=lambda i: abs(math.log(values[i] / lr)))

    def add(self, row: str, settings: Sequence[str], lr: float | None) -> None:
        """Store the suggestion for a row, which is None if the test suggests no learning rate."""
        # The file is locked, because another process may test other rows of the same study.
        with FileLock(self.path.with_name(f".{NAME}.lock")):
            self._tests = {**self._read(), row: {"settings": list(settings), "lr": lr}}
            write_text_atomically(self.path, json_text({"format": FORMAT, "tests": self._tests}, indent=1) + "\n")


def _is_test(held: Any) -> bool:
    lr = held.get("lr") if isinstance(held, dict) else ""
    number = isinstance(lr, int | float) and not isinstance(lr, bool) and math.isfinite(lr) and lr > 0
    return (lr is None or number) and isinstance(held.get("settings"), list)
