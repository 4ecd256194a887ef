"""Small text data sets, and helpers that open and print a data set."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from efficient_ft.config.schema import DataConfig, TextConfig
from efficient_ft.core.tokenizer import Tokenizer
from efficient_ft.data import TextData, open_texts
from tests.models.text_models import sentences, tokenizer


def write_all(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write files by their paths and return the folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def table(rows: Iterable[tuple[str, str]] | int = 20, separator: str = ",", seed: int = 0) -> str:
    """Return a table with the columns text and label, from the given rows or from a number of sentences."""
    chosen = sentences(rows, seed) if isinstance(rows, int) else rows
    return "".join(f"{separator.join(row)}\n" for row in [("text", "label"), *chosen])


def json_lines(rows: Iterable[Any]) -> str:
    """Return the rows as JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def class_files(*above: str, classes: Iterable[str] = ("fruit", "metal"), count: int = 3) -> dict[str, str]:
    """Return texts in class folders, which are inside the folders `above`."""
    return {"/".join((*above, name, f"{k}.txt")): f"{name} {k} {above}" for name in classes for k in range(count)}


def open_set(root: Path, max_length: int = 32, splits: Any = None, on_corrupt: Any = "stop", **text: Any) -> TextData:
    """Open a text data set like a run."""
    config = DataConfig(
        name="text_folder", root=str(root), num_workers=0, splits=splits, on_corrupt=on_corrupt, text=TextConfig(**text)
    )
    ours = Tokenizer(tokenizer().backend_tokenizer, ("input_ids", "attention_mask"), (0, "[PAD]"))
    return open_texts(config, ours, max_length, seed=1)


def printed(data: TextData) -> str:
    """Return all text that a run prints about a data set."""
    summary = data.summary()
    return "\n".join([*summary.lines(), *summary.warnings, *summary.notes])
