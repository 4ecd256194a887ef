"""Availability of the data sets and weights that the runs of a published table need."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from efficient_ft.papers.published import Table


def state_of(table: Table, root: str = "./data") -> str:
    """Return which costs and runs of `table` are possible on this machine, with data sets in `root`."""
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
    # All runs of a table have the same task, without which their networks do not compose.
    task = next((word for cell in ready for word in cell.arguments if word.startswith("task=")), None)
    models = sorted({cell.arguments[0] for cell in ready})
    without = [model for model in models if not _weights(model, task and (task, f"data={ready[0].data}"))]
    if without:
        absent.append(f"weights not here: {', '.join(model.partition('=')[2] for model in without)}")
    able = sum(cell.arguments[0] not in without for cell in ready)
    if not absent:
        return f"costs; runs ({able})"
    return f"costs; {able} of {len(runs)} runs: {'; '.join(absent)}"


@cache
def _weights(model: str, of_task: tuple[str, ...] | None = None) -> bool:
    """Return True if the weights of ``model=NAME`` are cached or can be downloaded."""
    from efficient_ft.cli.hydra.compose import configured
    from efficient_ft.models.factory import missing_weights

    return missing_weights(configured([model, "recipe=none", *(of_task or ())]).model) is None


def present(data: str, root: str = "./data") -> bool:
    """Return True if the files of a published data set are in `root`."""
    from efficient_ft.data.published import MASK_SETS, PUBLISHED, TEXT_SETS

    if data in MASK_SETS:
        return MASK_SETS[data].missing(data, Path(root)) is None
    source = TEXT_SETS[data] if data in TEXT_SETS else PUBLISHED[data]
    folder = source.root(root)
    return all(archive.state(folder) not in ("absent", "partial", "broken") for archive in source.archives)
