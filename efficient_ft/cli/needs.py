"""State of a published table on this machine: whether the data sets and the weights of its runs are there."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from efficient_ft.papers.published import Table


def state_of(table: Table, root: str = "./data") -> str:
    """Say what this machine can do of `table` now: its runs, its costs, or nothing, with the reason.

    Args:
        table: a published table.
        root: where the data sets are (`data.root`).
    """
    cells = [cell for row in table.rows for cell in row.cells.values()]
    runs = [cell for cell in cells if cell.arguments]
    if not runs:
        counted = table.counted or any(row.arguments for row in table.rows)
        return "costs" if counted else f"no: {table.reason}"
    needed = sorted({str(cell.data) for cell in runs})
    here = [data for data in needed if present(data, root)]
    missing = [data for data in needed if data not in here]
    absent = [f"not in {root}: {', '.join(missing)}"] if missing else []
    ready = [cell for cell in runs if cell.data in here]
    models = sorted({cell.arguments[0] for cell in ready})
    without = [model for model in models if not _weights(model)]
    if without:
        absent.append(f"weights not here: {', '.join(model.partition('=')[2] for model in without)}")
    able = sum(cell.arguments[0] not in without for cell in ready)
    if not absent:
        return f"costs; runs ({able})"
    return f"costs; {able} of {len(runs)} runs: {'; '.join(absent)}"


@cache
def _weights(model: str) -> bool:
    """Whether the weights of ``model=NAME`` are in a cache, or can be downloaded."""
    from efficient_ft.cli.compose import configurations
    from efficient_ft.cli.groups import CONF, register
    from efficient_ft.models.factory import missing_weights

    register()
    (config,) = configurations(CONF, "train", [model, "recipe=none"], sweep=False)
    return missing_weights(config.model) is None


def present(data: str, root: str = "./data") -> bool:
    """Whether the files of a published data set are in `root`."""
    from efficient_ft.data.published import PUBLISHED

    source = PUBLISHED[data]
    folder = source.root(root)
    return all(archive.state(folder) not in ("absent", "partial", "broken") for archive in source.archives)
