"""The format number of records and checkpoints, and the error for a file of another version."""

from __future__ import annotations

from pathlib import Path

from efficient_ft.core.errors import UserError

#: Format number of results.json, records.json and checkpoint.ckpt. Increase it if a key or setting changes its meaning.
FORMAT = 1

#: Advice for a run folder that cannot be continued.
START_AGAIN = "Choose another hydra.run.dir, or resume=never, which keeps the old folder under another name."

#: Advice for a path that is not a run folder.
PASS_A_RUN = "Pass the run folder printed when training ended."

#: Advice for a run that another version wrote, if the run is only read.
USE_ITS_VERSION = "Repeat the run with this version, or use the version that wrote it."


class OtherVersionError(UserError):
    """Raised if a file of a run was written by another version of this package and cannot be read by this version.

    The message names `file` and the `reason` for this conclusion, and ends with the advice `do`.
    """

    def __init__(self, file: Path, reason: str, do: str) -> None:
        super().__init__(f"{file} was written by another version of efficient-ft ({reason}). {do}")


def check_format(file: Path, found: object, do: str) -> None:
    """Raise an `OtherVersionError` with the advice `do` if the format number `found` of `file` is not `FORMAT`."""
    if found == FORMAT and not isinstance(found, bool):
        return
    has = "no format number" if found is None else f"format {found}"
    raise OtherVersionError(file, f"it has {has}; this version reads format {FORMAT}", do)
