"""State of a published table on this machine: whether the data sets of its runs are there."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from efficient_ft.papers.published import Table


def state_of(table: Table) -> str:
    """Say what this machine can do of `table` now: its runs, its costs, or nothing, with the reason."""
    cells = [cell for row in table.rows for cell in row.cells.values()]
    runs = [cell for cell in cells if cell.arguments]
    if not runs:
        return "costs" if any(row.arguments for row in table.rows) else f"no: {table.reason}"
    needed = sorted({str(cell.data) for cell in runs})
    here = [data for data in needed if present(data)]
    if len(here) == len(needed):
        return f"costs; runs ({len(runs)})"
    missing = [data for data in needed if data not in here]
    ready = sum(cell.data in here for cell in runs)
    return f"costs; {ready} of {len(runs)} runs: not in ./data: {', '.join(missing)}"


def present(data: str) -> bool:
    """Whether the files of a published data set are in ./data, where runs look for them by default."""
    from efficient_ft.data.published import PUBLISHED

    source = PUBLISHED[data]
    root = source.root("./data")
    return all(archive.state(root) not in ("absent", "partial", "broken") for archive in source.archives)
