"""Fixtures for data configurations, folders of small images, label files, and published data sets with small files."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from efficient_ft.config import DataConfig
from efficient_ft.data.published import PUBLISHED
from tests.data.label_files import Write
from tests.data.pictures import save


@pytest.fixture
def data_config() -> Callable[..., DataConfig]:
    def make(name: str, **settings: Any) -> DataConfig:
        return DataConfig(**{"name": name, "num_workers": 0, "batch_size": 4, "download": False, **settings})

    return make


@pytest.fixture
def folders(tmp_path: Path) -> Callable[..., Path]:
    """Write class folders with the given numbers of JPEG files.

    Examples: ``folders(train={"a": 5, "b": 4}, test={...})``, or ``folders(a=5, b=4)`` without splits.
    """

    def make(**layout: Any) -> Path:
        root = tmp_path / "images"
        seed = 0
        parts = layout.items() if isinstance(next(iter(layout.values())), dict) else [("", layout)]
        for part, classes in parts:
            for name, count in classes.items():
                (root / part / name).mkdir(parents=True, exist_ok=True)
                for i in range(count):
                    seed += 1
                    save(root / part / name / f"{i}.jpg", seed)
        return root

    return make


@pytest.fixture
def change_archives(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Change fields of every archive of a data set, e.g. the checksums: ``change_archives("food101", **fields)``."""

    def change(name: str, **fields: object) -> None:
        archives = tuple(replace(a, **fields) for a in PUBLISHED[name].archives)  # type: ignore[arg-type]
        monkeypatch.setitem(PUBLISHED, name, replace(PUBLISHED[name], archives=archives))

    return change


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write the images of the column `file` and a label file, and return the folder."""

    def make(rows: Sequence[Sequence[Any]], name: str = "labels.csv", header: Sequence[str] = (), **also: Any) -> Path:
        header = list(header) or ["file", "label"]
        at = header.index(also.get("image", header[0]))
        for seed, row in enumerate(rows):
            path = tmp_path / also.get("folder", "") / f"{row[at]}{also.get('extension', '')}"
            if str(row[at]) and not path.exists():
                save(path, seed)
        with open(tmp_path / name, "w", newline="", encoding="utf-8") as file:
            if name.endswith(".jsonl"):
                file.writelines(json.dumps(dict(zip(header, row, strict=True))) + "\n" for row in rows)
            else:
                delimiter = "\t" if name.endswith(".tsv") else also.get("delimiter", ",")
                csv.writer(file, delimiter=delimiter).writerows([header, *rows])
        return tmp_path

    return make
