"""Functions that read label files in tests. The fixture `write` in conftest.py writes these files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from efficient_ft.config import DataConfig
from efficient_ft.config.schema import LabelsConfig
from efficient_ft.data import read_data
from efficient_ft.data.listing import Listing

Write = Callable[..., Path]


def config_of(root: Path, task: str = "classification", file: Any = "labels.csv", **settings: Any) -> DataConfig:
    of_data = {key: settings.pop(key) for key in ("splits", "on_corrupt", "follow_links") if key in settings}
    labels = LabelsConfig(file=file, **settings)
    labels._task = task
    return DataConfig(name="labels", root=str(root), labels=labels, num_workers=0, batch_size=4, **of_data)


def read(root: Path, task: str = "classification", **settings: Any) -> Listing:
    found = read_data(config_of(root, task, **settings))
    assert isinstance(found, Listing)
    return found


def rows_of(counts: dict[str, int], *more: Any) -> list[list[Any]]:
    return [[f"{name}_{i}.jpg", name, *more] for name, count in counts.items() for i in range(count)]


def labels_of(listing: Listing) -> dict[str, Any]:
    """Return the labels of all images, keyed by file name."""
    parts = [part for part in (listing.train, listing.val, listing.test) if part is not None]
    return {Path(str(p)).name: y.tolist() for one in parts for p, y in zip(one.images, one.labels, strict=True)}
